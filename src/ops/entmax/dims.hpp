// The dimensions that several tensors share, as few as their steps allow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

namespace pullback::entmax {

// A dimension, and each tensor's step along it.
struct Dim {
  std::int64_t size;
  std::vector<std::int64_t> steps;
};

// Sorted by the steps of the first tensor, the smallest last, and merged where all tensors allow.
inline std::vector<Dim> merged(std::vector<Dim> dims) {
  std::ranges::stable_sort(dims, std::ranges::greater(),
                           [](const Dim& dim) { return std::abs(dim.steps[0]); });
  for (std::size_t inner = dims.size(); inner-- > 1;) {
    Dim& low = dims[inner];
    Dim& high = dims[inner - 1];
    bool mergeable = true;
    for (std::size_t i = 0; i < low.steps.size(); ++i) {
      mergeable &= high.steps[i] == low.steps[i] * low.size;
    }
    if (!mergeable) continue;
    high.size *= low.size;
    high.steps = low.steps;
    dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(inner));
  }
  return dims;
}

}  // namespace pullback::entmax

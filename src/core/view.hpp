// View: a spec with its data, indexed by position. For reference code and other slow paths.
#pragma once

#include <cstdint>

#include "core/element.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

struct View {
  const TensorSpec* spec = nullptr;
  void* data = nullptr;

  View(const TensorSpec& spec_, const void* data_) : spec(&spec_), data(const_cast<void*>(data_)) {}

  explicit operator bool() const { return spec->given() && data != nullptr; }

  // Offset in elements. A dimension of size 1 is broadcast: any index reaches its one element.
  template <class... Index>
  std::int64_t offset(Index... index) const {
    std::int64_t sum = 0;
    int dim = 0;
    ((sum += spec->shape[dim] == 1 ? 0 : static_cast<std::int64_t>(index) * spec->strides[dim],
      ++dim),
     ...);
    return sum;
  }

  template <class... Index>
  double get(Index... index) const {
    return load_element(spec->dtype, data, offset(index...));
  }
  template <class... Index>
  std::int64_t get_index(Index... index) const {
    return load_index(spec->dtype, data, offset(index...));
  }
  template <class... Index>
  void set(double value, Index... index) const {
    store_element(spec->dtype, data, offset(index...), value);
  }
};

}  // namespace pullback

// How the cpu variant cuts a layout into tasks, for forward and backward alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pullback/block_sparse.hpp"

namespace pullback::block_softmax {

// Token rows [begin, end) of block row (head, row), which has at least one block.
struct RowGroup {
  std::int32_t head, row, begin, end;
};

// Elements of a group, unless a single row is longer. A group is gone over several times and should
// stay in the second-level cache; and its pieces of each block should be long enough to stream.
inline constexpr std::int64_t kGroupElements = 64 * 1024;

inline std::vector<RowGroup> make_row_groups(const BlockLayout& layout, std::int64_t block) {
  std::vector<RowGroup> groups;
  for (std::int64_t h = 0; h < layout.heads(); ++h) {
    for (std::int64_t r = 0; r < layout.rows(); ++r) {
      const auto row_length = static_cast<std::int64_t>(layout.row(h, r).size()) * block;
      if (row_length == 0) continue;
      const std::int64_t most = std::clamp<std::int64_t>(kGroupElements / row_length, 1, block);
      const std::int64_t count = (block + most - 1) / most;
      for (std::int64_t i = 0; i < count; ++i) {
        groups.push_back({static_cast<std::int32_t>(h), static_cast<std::int32_t>(r),
                          static_cast<std::int32_t>(block * i / count),
                          static_cast<std::int32_t>(block * (i + 1) / count)});
      }
    }
  }
  return groups;
}

// Where a run writes more than this, outputs go past the caches: nothing of them would be left
// there anyway, and the lines need not be read before they are written.
inline constexpr std::int64_t kStreamBytes = std::int64_t{32} << 20;

// Where a tensor has more bytes than this, a task asks for the input of the next one.
inline constexpr std::int64_t kFetchBytes = std::int64_t{1} << 20;

}  // namespace pullback::block_softmax

// How the cpu variant cuts a layout into tasks, for forward and backward alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pullback/block_sparse.hpp"

namespace pullback::block_softmax {

// Token rows [begin, end) of block row (head, row), which has at least one block.
struct RowGroup {
  std::int32_t head, row, begin, end;
};

// Elements of a group, unless a single row is longer: what all passes over it leave in the
// second-level cache.
inline constexpr std::int64_t kGroupElements = 64 * 1024;

// Small groups are gone through by one task, which has to fill and drain its pipeline only once.
inline constexpr std::int64_t kTaskElements = 32 * 1024;

// Rows that are gone over together: in a block they are a run of memory of 64 elements. Longer runs
// of both input and output would not stay in the first-level cache.
constexpr int strip_rows(std::int64_t block) { return block < 32 ? 4 : block < 64 ? 2 : 1; }

class RowTasks {
 public:
  RowTasks(const BlockLayout& layout, std::int64_t block) {
    std::int64_t elements = kTaskElements;
    for (std::int64_t h = 0; h < layout.heads(); ++h) {
      for (std::int64_t r = 0; r < layout.rows(); ++r) {
        const auto row_length = static_cast<std::int64_t>(layout.row(h, r).size()) * block;
        if (row_length == 0) continue;
        std::int64_t rows = std::clamp<std::int64_t>(kGroupElements / row_length, 1, block);
        if (const int strip = strip_rows(block); rows > strip) rows -= rows % strip;
        for (std::int64_t begin = 0; begin < block; begin += rows) {
          const std::int64_t end = std::min(begin + rows, block);
          if (elements >= kTaskElements) {
            starts_.push_back(groups_.size());
            elements = 0;
          }
          elements += (end - begin) * row_length;
          groups_.push_back({static_cast<std::int32_t>(h), static_cast<std::int32_t>(r),
                             static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)});
        }
      }
    }
    starts_.push_back(groups_.size());
  }

  std::span<const RowGroup> groups() const { return groups_; }
  std::int64_t count() const { return static_cast<std::int64_t>(starts_.size()) - 1; }
  std::span<const RowGroup> operator[](std::int64_t task) const {
    const std::size_t begin = starts_[static_cast<std::size_t>(task)];
    const std::size_t end = starts_[static_cast<std::size_t>(task) + 1];
    return groups().subspan(begin, end - begin);
  }

 private:
  std::vector<RowGroup> groups_;
  std::vector<std::size_t> starts_;  // of each task in groups_, and the end
};

// Where a run writes more than this, outputs go past the caches: nothing of them would be left
// there anyway, and the lines need not be read before they are written.
inline constexpr std::int64_t kStreamBytes = std::int64_t{32} << 20;

// Where a tensor has more bytes than this, a task asks for the input of the next one.
inline constexpr std::int64_t kFetchBytes = std::int64_t{1} << 20;

}  // namespace pullback::block_softmax

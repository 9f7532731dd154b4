#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/check.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback {

BlockLayout::BlockLayout(std::int64_t heads, std::int64_t rows, std::int64_t columns,
                         std::span<const std::uint8_t> present)
    : heads_(heads), rows_(rows), columns_(columns) {
  const Checker check("BlockLayout");
  constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
  for (std::int64_t size : {heads, rows, columns}) {
    check.that(size >= 0 && size <= kLimit, "shape", "three sizes from 0 to 2^31 - 1",
               shape_text(std::array{heads, rows, columns}));
  }
  check.that(heads == 0 || std::max({rows, columns, std::int64_t{1}}) <= kMostRows / heads, "shape",
             "at most 2^28 block rows and columns over all heads",
             shape_text(std::array{heads, rows, columns}));
  // Compared by division: the product may not fit 64 bits.
  const auto length = static_cast<std::int64_t>(present.size());
  const std::int64_t plane = rows * columns;
  const bool fits =
      heads == 0 || plane == 0 ? length == 0 : length % plane == 0 && length / plane == heads;
  check.that(fits, "present",
             "one value for each of " + shape_text(std::array{heads, rows, columns}),
             fmt::format("{} values", length));

  with_memory("BlockLayout", [&] { build_tables(present); });
}

void BlockLayout::build_tables(std::span<const std::uint8_t> present) {
  const auto set = static_cast<std::size_t>(std::ranges::count(present, 1));
  by_row_.reserve(set);
  row_start_.reserve(static_cast<std::size_t>(heads_ * rows_ + 1));
  column_start_.assign(static_cast<std::size_t>(heads_ * columns_ + 1), 0);
  std::size_t index = 0;
  for (std::int64_t h = 0; h < heads_; ++h) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      row_start_.push_back(nnz());
      for (std::int64_t c = 0; c < columns_; ++c, ++index) {
        const std::uint8_t value = present[index];
        if (value > 1) {
          fail(ErrorCode::invalid_argument, "BlockLayout", "present", "0 or 1",
               fmt::format("{} at head {}, row {}, column {}", value, h, r, c));
        }
        if (value == 0) continue;
        by_row_.push_back({static_cast<std::int32_t>(h), static_cast<std::int32_t>(r),
                           static_cast<std::int32_t>(c), nnz()});
        ++column_start_[static_cast<std::size_t>(h * columns_ + c + 1)];
      }
    }
  }
  row_start_.push_back(nnz());

  // Counting sort by (head, column); rows stay ascending because rank order visits them so.
  for (std::size_t i = 1; i < column_start_.size(); ++i) column_start_[i] += column_start_[i - 1];
  std::vector<std::int64_t> next(column_start_.begin(), column_start_.end() - 1);
  by_column_.resize(by_row_.size());
  for (const Block& block : by_row_) {
    const auto slot = static_cast<std::size_t>(block.head * columns_ + block.column);
    by_column_[static_cast<std::size_t>(next[slot]++)] = block;
  }
}

std::span<const BlockLayout::Block> BlockLayout::row(std::int64_t head, std::int64_t row) const {
  const auto slot = static_cast<std::size_t>(head * rows_ + row);
  return {by_row_.data() + row_start_[slot], by_row_.data() + row_start_[slot + 1]};
}

std::span<const BlockLayout::Block> BlockLayout::column(std::int64_t head,
                                                        std::int64_t column) const {
  const auto slot = static_cast<std::size_t>(head * columns_ + column);
  return {by_column_.data() + column_start_[slot], by_column_.data() + column_start_[slot + 1]};
}

std::int64_t BlockLayout::rank(std::int64_t head, std::int64_t row_index,
                               std::int64_t column_index) const {
  const auto blocks = row(head, row_index);
  const auto it = std::ranges::lower_bound(blocks, column_index, {}, &Block::column);
  return it != blocks.end() && it->column == column_index ? it->rank : -1;
}

BlockLayout BlockLayout::transposed() const {
  std::vector<std::uint8_t> present(static_cast<std::size_t>(heads_ * rows_ * columns_));
  for (const Block& block : by_row_) {
    const std::int64_t index = (block.head * columns_ + block.column) * rows_ + block.row;
    present[static_cast<std::size_t>(index)] = 1;
  }
  return BlockLayout(heads_, columns_, rows_, present);
}

std::vector<std::uint8_t> BlockLayout::to_bytes() const {
  std::vector<std::uint8_t> present(static_cast<std::size_t>(heads_ * rows_ * columns_));
  for (const Block& block : by_row_) {
    const std::int64_t index = (block.head * rows_ + block.row) * columns_ + block.column;
    present[static_cast<std::size_t>(index)] = 1;
  }
  return present;
}

bool operator==(const BlockLayout& a, const BlockLayout& b) {
  const auto same_block = [](const BlockLayout::Block& x, const BlockLayout::Block& y) {
    return x.head == y.head && x.row == y.row && x.column == y.column;
  };
  return a.heads_ == b.heads_ && a.rows_ == b.rows_ && a.columns_ == b.columns_ &&
         std::ranges::equal(a.by_row_, b.by_row_, same_block);
}

}  // namespace pullback

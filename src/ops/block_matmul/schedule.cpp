#include "ops/block_matmul/schedule.hpp"

#include <algorithm>
#include <span>

#include "ops/block_matmul/cuda/tuning.hpp"

namespace pullback::block_matmul {
namespace {

constexpr std::int64_t kSquare = 16;
constexpr std::int64_t kGroupSquares = kGroupRows / kSquare, kStepLines = kStepColumns / kSquare;

// The rows and columns of op(S) in squares.
class Squares {
 public:
  Squares(const BlockLayout& layout, std::int64_t block, const Sparse& sparse)
      : layout_(layout), sparse_(sparse), per_block_(block / kSquare) {}

  std::int64_t rows() const {
    return (sparse_.transposed ? layout_.columns() : layout_.rows()) * per_block_;
  }
  std::int64_t block_columns() const {
    return sparse_.transposed ? layout_.rows() : layout_.columns();
  }
  std::int64_t per_block() const { return per_block_; }
  std::span<const BlockLayout::Block> blocks_of(std::int64_t head, std::int64_t square_row) const {
    const std::int64_t row = square_row / per_block_;
    return sparse_.transposed ? layout_.column(head, row) : layout_.row(head, row);
  }
  std::int64_t block_column(const BlockLayout::Block& block) const {
    return sparse_.transposed ? block.row : block.column;
  }
  // Of a block's square in row `square_row`, column `column` of the block.
  std::int64_t offset(const BlockLayout::Block& block, std::int64_t square_row,
                      std::int64_t column) const {
    std::int64_t row = square_row % per_block_;
    if (sparse_.transposed) std::swap(row, column);
    return block.rank * sparse_.block_stride + row * kSquare * sparse_.row_stride +
           column * kSquare * sparse_.column_stride;
  }

 private:
  const BlockLayout& layout_;
  const Sparse& sparse_;
  std::int64_t per_block_;
};

// A group that is much longer than the others, as rows that see everything are, would be at work
// when they have ended.
void share_out(const std::vector<Item>& groups, bool sums, Schedule& schedule) {
  const auto all = static_cast<std::int64_t>(schedule.masks.size());
  const std::int64_t mean = all / std::max<std::int64_t>(std::ssize(groups), 1);
  const auto most = std::clamp<std::int64_t>(2 * mean, kLeastShare, kMostSteps);
  for (const Item& group : groups) {
    const std::int64_t shares = std::max<std::int64_t>((group.steps + most - 1) / most, 1);
    const bool split = sums && shares > 1;
    if (split) {
      schedule.splits.push_back(
          {group.first_row, group.head, schedule.slots, static_cast<std::int32_t>(shares)});
    }
    // A group without steps writes zeros where its results are sums, and nothing otherwise.
    for (std::int64_t share = 0; share < shares && (sums || group.steps > 0); ++share) {
      const std::int64_t begin = group.steps * share / shares;
      const std::int64_t end = group.steps * (share + 1) / shares;
      schedule.items.push_back({group.first_step + begin, group.first_row,
                                static_cast<std::int32_t>(end - begin), group.head,
                                split ? schedule.slots++ : -1});
    }
  }
  std::ranges::stable_sort(schedule.items, std::ranges::greater(), &Item::steps);
  schedule.long_items = static_cast<std::uint32_t>(std::ranges::count_if(
      schedule.items, [&](const Item& item) { return item.steps > mean * 3 / 2; }));
}

}  // namespace

Schedule make_schedule(const BlockLayout& layout, std::int64_t block, const Sparse& sparse,
                       std::int64_t line_stride, bool sums) {
  const Squares all(layout, block, sparse);
  const std::int64_t parts = all.per_block();
  Schedule schedule;
  if (layout.nnz() == 0 && !sums) return schedule;
  std::vector<Item> groups;
  std::vector<std::int64_t> present;  // block columns of a group, ascending
  std::vector<std::int64_t> position(static_cast<std::size_t>(all.block_columns()));
  for (std::int64_t head = 0; head < layout.heads(); ++head) {
    for (std::int64_t first = 0; first < all.rows(); first += kGroupSquares) {
      const std::int64_t last = std::min(first + kGroupSquares, all.rows());
      present.clear();
      for (std::int64_t row = first; row < last; row += parts - row % parts) {
        for (const auto& entry : all.blocks_of(head, row)) {
          present.push_back(all.block_column(entry));
        }
      }
      std::ranges::sort(present);
      present.erase(std::unique(present.begin(), present.end()), present.end());
      for (std::size_t i = 0; i < present.size(); ++i) {
        position[static_cast<std::size_t>(present[i])] = static_cast<std::int64_t>(i) * parts;
      }

      const auto lines = static_cast<std::int64_t>(present.size()) * parts;
      const std::int64_t steps = (lines + kStepLines - 1) / kStepLines;
      const auto first_step = static_cast<std::int64_t>(schedule.masks.size());
      const std::int64_t first_line = first_step * kStepLines;
      schedule.masks.resize(static_cast<std::size_t>(first_step + steps), 0);
      schedule.lines.resize(static_cast<std::size_t>(first_line + steps * kStepLines), kNowhere);
      schedule.squares.resize(schedule.lines.size() * kGroupSquares, kNowhere);
      for (std::int64_t i = 0; i < lines; ++i) {
        const std::int64_t column =
            present[static_cast<std::size_t>(i / parts)] * parts + i % parts;
        schedule.lines[static_cast<std::size_t>(first_line + i)] = column * kSquare * line_stride;
      }
      for (std::int64_t row = first; row < last; ++row) {
        for (const auto& entry : all.blocks_of(head, row)) {
          const std::int64_t at = position[static_cast<std::size_t>(all.block_column(entry))];
          for (std::int64_t part = 0; part < parts; ++part) {
            const std::int64_t line = first_line + at + part;
            schedule.squares[static_cast<std::size_t>(line * kGroupSquares + row - first)] =
                all.offset(entry, row, part);
            schedule.masks[static_cast<std::size_t>(line / kStepLines)] |=
                1u << (line % kStepLines * kGroupSquares + row - first);
          }
        }
      }
      groups.push_back({first_step, first * kSquare, static_cast<std::int32_t>(steps),
                        static_cast<std::int32_t>(head), -1});
    }
  }
  share_out(groups, sums, schedule);
  return schedule;
}

}  // namespace pullback::block_matmul

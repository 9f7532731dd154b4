#include "ops/block_matmul/schedule.hpp"

#include <algorithm>
#include <span>

#include "ops/block_matmul/cuda/tuning.hpp"

namespace pullback::block_matmul {
namespace {

// The rows and columns of op(S) in tiles.
class Tiles {
 public:
  Tiles(const BlockLayout& layout, std::int64_t block, const Sparse& sparse)
      : layout_(layout),
        sparse_(sparse),
        per_block_(block >> tile_shift_of(block)),
        tile_(std::int64_t{1} << tile_shift_of(block)) {}

  std::int64_t rows() const {
    return (sparse_.transposed ? layout_.columns() : layout_.rows()) * per_block_;
  }
  std::int64_t block_columns() const {
    return sparse_.transposed ? layout_.rows() : layout_.columns();
  }
  std::int64_t per_block() const { return per_block_; }
  std::span<const BlockLayout::Block> blocks_of(std::int64_t head, std::int64_t tile_row) const {
    const std::int64_t row = tile_row / per_block_;
    return sparse_.transposed ? layout_.column(head, row) : layout_.row(head, row);
  }
  std::int64_t block_column(const BlockLayout::Block& block) const {
    return sparse_.transposed ? block.row : block.column;
  }
  // Of a block's tile in row `tile_row`, column `column` of the block.
  std::int64_t offset(const BlockLayout::Block& block, std::int64_t tile_row,
                      std::int64_t column) const {
    std::int64_t row = tile_row % per_block_;
    if (sparse_.transposed) std::swap(row, column);
    return block.rank * sparse_.block_stride + row * tile_ * sparse_.row_stride +
           column * tile_ * sparse_.column_stride;
  }

 private:
  const BlockLayout& layout_;
  const Sparse& sparse_;
  std::int64_t per_block_, tile_;
};

}  // namespace

int tile_shift_of(std::int64_t block) { return block % 64 == 0 ? 6 : block % 32 == 0 ? 5 : 4; }

Schedule make_schedule(const BlockLayout& layout, std::int64_t block, const Sparse& sparse,
                       bool sums) {
  const Tiles tiles(layout, block, sparse);
  Schedule schedule;
  schedule.tile_shift = tile_shift_of(block);
  const int tile = 1 << schedule.tile_shift;
  const std::int64_t group_tiles = kGroupRows / tile, step_tiles = kStepColumns / tile;
  const std::int64_t parts = tiles.per_block();
  // The squares of 16 that a tile in the first row and column covers, as bits of a mask.
  std::uint32_t corner = 0;
  for (int column = 0; column < tile / 16; ++column) {
    corner |= ((1u << (tile / 16)) - 1) << (8 * column);
  }

  std::vector<std::int64_t> present;  // block columns of a group, ascending
  std::vector<std::int64_t> position(static_cast<std::size_t>(tiles.block_columns()));
  for (std::int64_t head = 0; head < layout.heads(); ++head) {
    for (std::int64_t first = 0; first < tiles.rows(); first += group_tiles) {
      const std::int64_t last = std::min(first + group_tiles, tiles.rows());
      present.clear();
      for (std::int64_t row = first; row < last; row += parts - row % parts) {
        for (const auto& entry : tiles.blocks_of(head, row)) {
          present.push_back(tiles.block_column(entry));
        }
      }
      std::ranges::sort(present);
      present.erase(std::unique(present.begin(), present.end()), present.end());
      for (std::size_t i = 0; i < present.size(); ++i) {
        position[static_cast<std::size_t>(present[i])] = static_cast<std::int64_t>(i) * parts;
      }

      const auto entries = static_cast<std::int64_t>(present.size()) * parts;
      const std::int64_t steps = (entries + step_tiles - 1) / step_tiles;
      const auto first_step = static_cast<std::int64_t>(schedule.masks.size());
      schedule.masks.resize(static_cast<std::size_t>(first_step + steps), 0);
      schedule.columns.resize(static_cast<std::size_t>((first_step + steps) * step_tiles), -1);
      schedule.offsets.resize(
          static_cast<std::size_t>((first_step + steps) * step_tiles * group_tiles), kNoTile);
      for (std::int64_t i = 0; i < entries; ++i) {
        schedule.columns[static_cast<std::size_t>(first_step * step_tiles + i)] =
            static_cast<std::int32_t>(present[static_cast<std::size_t>(i / parts)] * parts +
                                      i % parts);
      }
      for (std::int64_t row = first; row < last; ++row) {
        for (const auto& entry : tiles.blocks_of(head, row)) {
          const std::int64_t at = position[static_cast<std::size_t>(tiles.block_column(entry))];
          for (std::int64_t part = 0; part < parts; ++part) {
            const std::int64_t index = first_step * step_tiles + at + part;
            schedule.offsets[static_cast<std::size_t>(index * group_tiles + row - first)] =
                tiles.offset(entry, row, part);
            schedule.masks[static_cast<std::size_t>(index / step_tiles)] |=
                corner << (8 * (index % step_tiles * tile / 16) + (row - first) * tile / 16);
          }
        }
      }

      const std::int64_t shares = std::max<std::int64_t>((steps + kMostSteps - 1) / kMostSteps, 1);
      const bool split = sums && shares > 1;
      if (split) {
        schedule.splits.push_back({first * tile, static_cast<std::int32_t>(head), schedule.slots,
                                   static_cast<std::int32_t>(shares)});
      }
      // A group without steps writes zeros where its results are sums, and nothing otherwise.
      for (std::int64_t share = 0; share < shares && (sums || steps > 0); ++share) {
        const std::int64_t begin = steps * share / shares, end = steps * (share + 1) / shares;
        schedule.items.push_back({first_step + begin, first * tile,
                                  static_cast<std::int32_t>(end - begin),
                                  static_cast<std::int32_t>(head), split ? schedule.slots++ : -1});
      }
    }
  }
  std::ranges::stable_sort(schedule.items, std::ranges::greater(), &Item::steps);
  return schedule;
}

}  // namespace pullback::block_matmul

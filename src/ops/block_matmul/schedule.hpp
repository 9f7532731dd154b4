// Plan-time tables of the CUDA kernels: the tiles of a product by groups of rows (cuda/params.cuh).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/block_matmul/cuda/params.cuh"
#include "ops/block_matmul/products.hpp"

namespace pullback::block_matmul {

struct Schedule {
  std::vector<Item> items;  // the longest first
  std::vector<std::uint32_t> masks;
  std::vector<std::int32_t> columns;
  std::vector<std::int64_t> offsets;
  std::vector<Split> splits;
  std::int32_t slots = 0;
  std::int32_t tile_shift = 0;
};

// The largest tile that divides a block.
int tile_shift_of(std::int64_t block);

// Of op(S). Groups of more than kMostSteps steps are shared out; where the steps of a group add up
// to one result (`sums`), each part gets a slot for its partial sums.
Schedule make_schedule(const BlockLayout& layout, std::int64_t block, const Sparse& sparse,
                       bool sums);

}  // namespace pullback::block_matmul

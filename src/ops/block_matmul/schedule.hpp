// Plan-time tables of the CUDA kernels: the squares of a product by groups of rows
// (cuda/params.cuh).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/block_matmul/cuda/params.cuh"
#include "ops/block_matmul/products.hpp"

namespace pullback::block_matmul {

struct Schedule {
  std::vector<Item> items;  // the longest first
  std::uint32_t long_items = 0;
  std::vector<std::uint32_t> masks;
  std::vector<std::int64_t> squares, lines;
  std::vector<Split> splits;
  std::int32_t slots = 0;
};

// Of op(S). `line_stride`: between lines of the dense operand that meet the columns of op(S).
// Groups of more than kMostSteps steps, or far more than most have, are shared out; where the steps
// of a group add up to one result (`sums`), each part gets a slot for its partial sums.
Schedule make_schedule(const BlockLayout& layout, std::int64_t block, const Sparse& sparse,
                       std::int64_t line_stride, bool sums);

}  // namespace pullback::block_matmul

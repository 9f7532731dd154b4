// Few queries and many keys, as latents that look at all of an image have them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/op_kernel.hpp"
#include "ops/attention/cuda/sequences.hpp"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// The problem with a block mask of all blocks where tiles of queries are so few that they leave the
// device idle, and sums of d_q have as many turns as there are tiles of keys: with a block mask
// several thread blocks share a tile's list of keys, and turns come in lines side by side.
inline AttentionProblem with_shared_keys(const AttentionProblem& problem,
                                         const cuda::DeviceInfo& device) {
  // Of more keys the tables are too large to be made here.
  constexpr std::int64_t kLeastKeys = 4096, kMostKeys = std::int64_t{1} << 26;
  const AttentionSizes sizes = sizes_of(problem);
  const int width = head_width(static_cast<int>(sizes.head_dim), static_cast<int>(sizes.value_dim));
  const bool serves = !sizes.varlen && !problem.bias.given() && !problem.blocks.given() &&
                      problem.dropout == 0 && problem.softcap == 0 && width <= 128 &&
                      static_cast<float>(*problem.scale) > kLeastScale &&
                      problem.q.dtype != DType::f64 && sizes.total_key >= kLeastKeys &&
                      sizes.total_key <= kMostKeys && sizes.total_key >= 4 * sizes.total_query;
  const std::int64_t rows = ceil_div(sizes.total_query, kLargeBlock);
  const std::int64_t tiles = sizes.batch * sizes.heads * rows;
  if (!serves || tiles == 0 || 3 * tiles > device.multiprocessors) return problem;
  AttentionProblem shared = problem;
  const std::int64_t columns = ceil_div(sizes.total_key, kLargeBlock);
  const std::vector<std::uint8_t> all(static_cast<std::size_t>(rows * columns), 1);
  shared.blocks = {std::make_shared<const BlockLayout>(1, rows, columns, all), 1, kLargeBlock};
  return shared;
}

}  // namespace pullback::attention

// How the backward pass shares its work with a block mask.
#pragma once

#include <algorithm>

#include "ops/attention/cuda/backward_body.hpp"
#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {

// Pairs whose tiles of keys are in flight together: their q, d_out and sums stay in the cache.
inline constexpr std::int64_t kPairGroup = 16;

struct MaskedWork {
  std::int64_t pair_group;
  OwnersAtWork owners;
};

inline MaskedWork masked_work(const AttentionProblem& problem, const cuda::DeviceInfo& device,
                              const BackwardTiles& tiles, int width) {
  const AttentionSizes sizes = sizes_of(problem);
  std::int64_t pairs = (sizes.varlen ? 1 : sizes.batch) * sizes.kv_heads;
  pairs = std::clamp<std::int64_t>(pairs, 1, kPairGroup);
  const bool sixteen_bits = size_of(problem.q.dtype) == 2;
  // Two blocks of a cluster share a tile of keys: half as many tiles are in flight, and fewer wait
  // for turns. With four, beginnings and ends cost more than that gains.
  const int blocks = problem.blocks.given() && sixteen_bits && device.major >= 9 ? 2 : 1;
  // Of random lists all queries are in use at a time. With tiles of few keys, which read them the
  // more often, it pays to keep to the pairs whose queries nearly fit the cache.
  if (blocks > 1 && tiles.keys <= 64) {
    const std::int64_t bytes = sizes.group * sizes.total_query * width * 8;
    const std::int64_t most = std::int64_t{device.l2_bytes} * 3 / 2;
    pairs = ceil_div(pairs, ceil_div(pairs * bytes, std::max(bytes, most)));
  }
  const std::int64_t flight = std::int64_t{device.multiprocessors} * tiles.blocks;
  return {pairs, {static_cast<int>(ceil_div(flight, pairs * blocks)), blocks}};
}

}  // namespace pullback::attention

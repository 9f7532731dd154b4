// How the backward pass shares its work with a block mask.
#pragma once

#include <algorithm>

#include "ops/attention/cuda/backward_body.hpp"
#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {

// Pairs whose tiles of keys are in flight together: their q, d_out and sums stay in the cache.
inline constexpr std::int64_t kPairGroup = 16;

// Of 64, or near it: smaller ones leave few tiles empty, of any size, and then larger tiles pay.
inline bool has_small_blocks(const AttentionProblem& problem) {
  return problem.blocks.given() && problem.blocks.block >= 48 && problem.blocks.block <= 64;
}

// How many blocks of a cluster share a tile of keys: with two, half as many tiles are in flight and
// fewer wait for turns; with four, beginnings and ends cost more than that gains. So they do with
// two where lists are of a few tiles, if they fill the device three times or are all short.
inline int blocks_of_cluster(const AttentionProblem& problem, const BackwardTiles& tiles,
                             std::int64_t flight) {
  const AttentionSizes sizes = sizes_of(problem);
  const BlockLayout& layout = *problem.blocks.layout;
  const std::int64_t block = problem.blocks.block;
  std::int64_t longest = 0;
  for (std::int64_t head = 0; head < layout.heads(); ++head) {
    for (std::int64_t column = 0; column < layout.columns(); ++column) {
      const auto blocks = layout.column(head, column);
      longest = std::max(longest, static_cast<std::int64_t>(blocks.size()));
    }
  }
  // Blocks of a column, and tiles that a tile of keys meets for them, at most.
  const std::int64_t columns = std::max<std::int64_t>(layout.heads() * layout.columns(), 1);
  const std::int64_t mean = layout.nnz() / columns;
  const std::int64_t listed =
      mean * ceil_div(block, tiles.queries) * std::max<std::int64_t>(tiles.keys / block, 1);
  const std::int64_t owners = ceil_div(sizes.total_key, tiles.keys);
  const bool many = sizes.batch * sizes.kv_heads * owners >= 3 * flight;
  return (listed <= 12 && many) || (listed <= 5 && longest <= 2 * mean) ? 1 : 2;
}

struct MaskedWork {
  std::int64_t pair_group;
  OwnersAtWork owners;
};

// hopper: by its own kernel, of which a multiprocessor has one block, in no cluster.
inline MaskedWork masked_work(const AttentionProblem& problem, const cuda::DeviceInfo& device,
                              const BackwardTiles& tiles, int width, bool hopper) {
  const AttentionSizes sizes = sizes_of(problem);
  std::int64_t pairs = (sizes.varlen ? 1 : sizes.batch) * sizes.kv_heads;
  pairs = std::clamp<std::int64_t>(pairs, 1, kPairGroup);
  const bool sixteen_bits = size_of(problem.q.dtype) == 2;
  const std::int64_t flight = std::int64_t{device.multiprocessors} * (hopper ? 1 : tiles.blocks);
  const bool clusters = problem.blocks.given() && sixteen_bits && device.major >= 9 && !hopper;
  const int blocks = clusters ? blocks_of_cluster(problem, tiles, flight) : 1;
  // Of random lists all queries are in use at a time. With tiles of few keys, which read them the
  // more often, it pays to keep to the pairs whose queries nearly fit the cache.
  if (blocks > 1 && tiles.keys <= 64) {
    const std::int64_t bytes = sizes.group * sizes.total_query * width * 8;
    const std::int64_t most = std::int64_t{device.l2_bytes} * 3 / 2;
    pairs = ceil_div(pairs, ceil_div(pairs * bytes, std::max(bytes, most)));
  }
  return {pairs, {static_cast<int>(ceil_div(flight, pairs * blocks)), blocks, flight / blocks}};
}

}  // namespace pullback::attention

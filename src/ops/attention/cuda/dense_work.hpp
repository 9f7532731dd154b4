// How many key/value heads the backward pass without a block mask works on at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/cuda/masked_work.hpp"

namespace pullback::attention {

struct DenseWork {
  const AttentionProblem& problem;
  const AttentionSizes& sizes;
  std::int64_t pairs, rows, k_tiles;  // rows: of queries, in whole tiles
  int keys, step_queries;             // of a tile; of a step
  bool hopper, chained;  // by its own kernels; with a chain of batch items that sums d_bias
  std::int64_t flight;   // thread blocks that the device holds

  // Pairs in flight together. Tiles of keys of a head that follow each other start two steps apart,
  // so that turns come in time. More pairs give the kernels for all devices more time, whose warps
  // wait for turns themselves; Hopper's do not, and the fewer there are, the more of q, d_out and
  // sums is still in the cache when a head's next tiles want them. But the first thread blocks of
  // all start at once, and each waits for those of its head before it: where these are a good part
  // of all, they had better be of many heads. Where the band hides pairs tiles differ in steps: up
  // to four apart and, if few are in flight at all, the longest of all first. Of packed sequences,
  // which may be short, the steps are not known.
  std::int64_t pair_group() const {
    const std::int64_t steps = std::max<std::int64_t>(sizes.group * all_steps(), 1);
    const auto apart = [&](std::int64_t step_count) {
      return std::min(pairs, ceil_div(step_count * flight * k_tiles, steps));
    };
    if (!hopper || sizes.varlen) return std::min(pairs, std::max(apart(2), kPairGroup));
    const std::int64_t blocks = pairs * k_tiles;
    if (problem.mask.left != BandMask::kUnbounded || problem.mask.right != BandMask::kUnbounded) {
      if (blocks <= 4 * flight) return pairs;
      return std::max(apart(2), std::min(apart(4), kPairGroup));
    }
    // Measured: items of a chain had better be close together, and so had short heads with tiles of
    // 64 keys.
    const bool long_heads = k_tiles * keys >= 4096;
    if (chained || (keys < 128 && !long_heads)) return apart(2);
    if (blocks <= 4 * flight) return pairs;
    return apart(long_heads && blocks <= 8 * flight ? 4 : 2);
  }

 private:
  // Steps that the band lets the tiles of keys of a head take.
  std::int64_t all_steps() const {
    if (sizes.varlen) return ceil_div(rows, step_queries) * k_tiles;
    const Sequence whole{0, sizes.total_query, 0, sizes.total_key};
    std::int64_t steps = 0;
    for (std::int64_t key = 0; key < sizes.total_key; key += keys) {
      const std::int64_t last = std::min(key + keys, sizes.total_key) - 1;
      const std::int64_t begin = seeing_queries(problem.mask, whole, key).begin;
      const std::int64_t end = seeing_queries(problem.mask, whole, last).end;
      if (begin < end) steps += ceil_div(end, step_queries) - begin / step_queries;
    }
    return steps;
  }
};

}  // namespace pullback::attention

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
  bool hopper;
  std::int64_t flight;  // thread blocks that the device holds

  // Pairs in flight together. Tiles of keys of a head that follow each other start two steps apart,
  // so that turns come in time. More pairs give the kernels for all devices more time, whose warps
  // wait for turns themselves; Hopper's do not, and the fewer there are, the more of q, d_out and
  // sums is still in the cache when a head's next tiles want them. Where the band hides pairs tiles
  // differ in steps: up to four apart and, if few are in flight at all, the longest of all first.
  // Of packed sequences, which may be short, the steps are not known.
  std::int64_t pair_group() const {
    const std::int64_t steps = std::max<std::int64_t>(sizes.group * all_steps(), 1);
    const auto apart = [&](std::int64_t step_count) {
      return ceil_div(step_count * flight * k_tiles, steps);
    };
    if (!hopper || sizes.varlen) return std::min(pairs, std::max(apart(2), kPairGroup));
    if (problem.mask.left == BandMask::kUnbounded && problem.mask.right == BandMask::kUnbounded) {
      return std::min(pairs, apart(2));
    }
    if (pairs * k_tiles <= 4 * flight) return pairs;
    return std::min(pairs, std::max(apart(2), std::min(apart(4), kPairGroup)));
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

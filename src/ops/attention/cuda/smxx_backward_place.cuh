// Where a block of the backward pass is, and how far: its tile of keys, the queries that see it,
// the step it is at and whose turn that is.
#pragma once

#include "ops/attention/cuda/smxx_backward_tiles.cuh"

namespace pullback::attention {

// One query head and one tile of queries, of which SeenTile knows more with a block mask.
struct BackwardStep : SeenTile {
  int head_of_group;
  // With a block mask: its place in the list of the head's tiles, and where that begins.
  int at;
  int64_t list;
};

// In shared memory: registers are needed for sums.
struct BlockPlace {
  TilePlace keys;
  int64_t pair;
  TileRange queries, whole;  // those that see some of the keys, and those that see all
  bool finite_keys;
  BackwardStep steps[4];  // by their number modulo 4: of a step and the next one
  // Of the step, from the first thread to all.
  bool first_turn, last_turn;
  int32_t number;
  int32_t* counter;  // null: nobody comes after us
  int64_t sum_tile;
  // Of the first thread: the turn before, which is over, but the next block was not told. Or null.
  int32_t* over;
  int32_t next;
};

template <int kKeys, int kQueries>
BlockPlace block_place(const BackwardParams& p) {
  // 32 bits: a grid has no more blocks, and divisions are what a block begins with.
  const uint32_t of_group = static_cast<uint32_t>(p.k_tiles) * static_cast<uint32_t>(p.pair_group);
  const uint32_t group_begin = blockIdx.x / of_group * static_cast<uint32_t>(p.pair_group);
  const uint32_t in_group = blockIdx.x % of_group;
  const uint32_t left = static_cast<uint32_t>(p.pairs) - group_begin;
  const uint32_t group =
      left < static_cast<uint32_t>(p.pair_group) ? left : static_cast<uint32_t>(p.pair_group);
  BlockPlace place;
  place.pair = p.first_pair + group_begin + in_group % group;
  place.keys = place_of<false>(p, place.pair, p.problem.heads / p.problem.group,
                               static_cast<int>(in_group / group), kKeys);
  place.queries = query_tiles_of(place.keys, place.keys.tile, kKeys, kQueries);
  place.whole = whole_tiles_of(place.keys, kKeys, kQueries);
  place.over = nullptr;
  return place;
}

}  // namespace pullback::attention

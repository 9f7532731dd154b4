// Where a block of the backward pass is, and how far: its tile of keys, the queries that see it,
// the step it is at and whose turn that is.
#pragma once

#include "ops/attention/cuda/smxx_backward_tiles.cuh"

namespace pullback::attention {

// One query head and one tile of queries.
struct BackwardStep {
  int head_of_group, tile;
  int at;  // with a block mask: its place in the list of the keys
};

// A tile of keys of one key/value head: what a block works on at a time.
struct BlockPlace {
  TilePlace keys;
  int64_t pair;
  TileRange queries;
};

// In shared memory: registers are needed for sums.
struct BlockState {
  BlockPlace item, next;  // keys.exists false: none
  bool finite_keys;
  BackwardStep steps[2];  // this one and the next, in turns
  // Of the step, from the first thread to all.
  bool first_turn, last_turn;
  int32_t number;
  int32_t* counter;  // null: nobody comes after us
  int64_t sum_tile;
  // Of the first thread: the turn before, which is over, but the next block was not told. Or null.
  int32_t* over;
  int32_t next_turn;
};

template <int kKeys, int kQueries>
BlockPlace block_place(const BackwardParams& p, uint32_t index) {
  // 32 bits: a launch has no more items, and divisions are what an item begins with.
  const uint32_t of_group = static_cast<uint32_t>(p.k_tiles) * static_cast<uint32_t>(p.pair_group);
  const uint32_t group_begin = index / of_group * static_cast<uint32_t>(p.pair_group);
  const uint32_t in_group = index % of_group;
  const uint32_t left = static_cast<uint32_t>(p.pairs) - group_begin;
  const uint32_t group =
      left < static_cast<uint32_t>(p.pair_group) ? left : static_cast<uint32_t>(p.pair_group);
  BlockPlace place;
  place.pair = p.first_pair + group_begin + in_group % group;
  place.keys = place_of<false>(p, place.pair, p.problem.heads / p.problem.group,
                               static_cast<int>(in_group / group), kKeys);
  place.queries = query_tiles_of(place.keys, place.keys.tile, kKeys, kQueries);
  return place;
}

// Items are handed out in their order to blocks that run: who waits for an item of lower number
// waits for a block that works on it or on one of lower number still.
inline uint32_t claim_item(const BackwardParams& p) {
  return static_cast<uint32_t>(atomicAdd(p.claims, 1));
}

// By a whole warp, whose first lane has claimed `index`: that item, or the next one that exists.
template <int kKeys, int kQueries>
BlockPlace claimed_place(const BackwardParams& p, uint32_t index) {
  const uint32_t items = static_cast<uint32_t>(p.pairs) * static_cast<uint32_t>(p.k_tiles);
  for (;;) {
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= items) {
      BlockPlace none;
      none.keys.exists = false;
      return none;
    }
    const BlockPlace place = block_place<kKeys, kQueries>(p, index);
    if (place.keys.exists) return place;
    if (threadIdx.x % 32 == 0) index = claim_item(p);
  }
}

// The steps of an item. kListed: with a block mask, whose lists name the tiles of queries.
template <bool kListed>
struct ItemSteps {
  using Step = BackwardStep;
  const BackwardParams& p;
  const BlockPlace& item;

  int head_of(const Step& step) const {
    return item.keys.head * p.problem.group + step.head_of_group;
  }
  int64_t tile_of(const Step& step) const {
    const int64_t plane = item.pair * p.problem.group + step.head_of_group;
    return plane * p.q_tiles + item.keys.first_tile + step.tile;
  }

  // Where the list of a head's tiles begins and ends.
  const int64_t* list_of(int head_of_group) const {
    const SeenBlocksTable& blocks = p.problem.blocks;
    const int64_t head = item.keys.head * p.problem.group + head_of_group;
    return blocks.first + blocks.plane(item.keys.batch, head) * (blocks.owners + 1) +
           item.keys.tile;
  }
  const SeenTile& seen_tile(int head_of_group, int at) const {
    return p.problem.blocks.tiles[list_of(head_of_group)[0] + at];
  }
  const SeenTile& seen_tile(const Step& step) const {
    return seen_tile(step.head_of_group, step.at);
  }

  // The last tile of the first head from `head_of_group` on that has one; past the group: none.
  Step last_of_head(int head_of_group) const {
    if constexpr (!kListed) {
      const bool any = item.queries.begin < item.queries.end;
      return {any ? head_of_group : p.problem.group, item.queries.end - 1, 0};
    }
    for (; head_of_group < p.problem.group; ++head_of_group) {
      const int64_t* const first = list_of(head_of_group);
      const int last = static_cast<int>(first[1] - first[0]) - 1;
      if (last >= 0) return {head_of_group, seen_tile(head_of_group, last).tile, last};
    }
    return {head_of_group, 0, 0};
  }
  Step next_of(const Step& step) const {
    if constexpr (kListed) {
      if (step.at > 0) {
        return {step.head_of_group, seen_tile(step.head_of_group, step.at - 1).tile, step.at - 1};
      }
    } else if (step.tile > item.queries.begin) {
      return {step.head_of_group, step.tile - 1, 0};
    }
    return last_of_head(step.head_of_group + 1);
  }
  bool exists(const Step& step) const { return step.head_of_group < p.problem.group; }
  bool has_next(const Step& step) const { return exists(next_of(step)); }
};

}  // namespace pullback::attention

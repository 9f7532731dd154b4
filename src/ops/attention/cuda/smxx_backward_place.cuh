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

// An item of work: a tile of keys of one key/value head.
struct alignas(16) BlockPlace {
  TilePlace keys;
  int64_t pair;
  TileRange queries;
  BackwardStep first;  // none: head_of_group is the group's size
};
static_assert(sizeof(BlockPlace) == kItemBytes);

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

// Item `index` of the launch that begins with `first_pair` and has so many pairs. By a whole warp.
template <int kKeys, int kQueries>
BlockPlace block_place(const BackwardParams& p, int64_t first_pair, uint32_t pairs,
                       uint32_t index) {
  // 32 bits: a launch has no more items.
  const uint32_t of_group = static_cast<uint32_t>(p.k_tiles) * static_cast<uint32_t>(p.pair_group);
  const uint32_t group_begin = index / of_group * static_cast<uint32_t>(p.pair_group);
  const uint32_t in_group = index % of_group;
  const uint32_t left = pairs - group_begin;
  const uint32_t group =
      left < static_cast<uint32_t>(p.pair_group) ? left : static_cast<uint32_t>(p.pair_group);
  BlockPlace item;
  item.pair = first_pair + group_begin + in_group % group;
  item.keys = place_of<false>(p, item.pair, p.problem.heads / p.problem.group,
                              static_cast<int>(in_group / group), kKeys);
  if (!item.keys.exists) return item;
  item.queries = query_tiles_of(item.keys, item.keys.tile, kKeys, kQueries);
  item.first = p.problem.blocks.given() ? ItemSteps<true>{p, item}.last_of_head(0)
                                        : ItemSteps<false>{p, item}.last_of_head(0);
  return item;
}

// All items of all launches, one after the other: divisions and searches are done ahead of the
// blocks that have no registers for them. The first block also zeroes the claims.
template <int kKeys, int kQueries>
void list_items(const BackwardParams& p) {
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < p.launches; i += kRowThreads) p.claims[i] = 0;
  }
  constexpr int64_t kWarps = kRowThreads / 32;
  const int64_t items = p.all_pairs * p.k_tiles;
  const int64_t of_launch = static_cast<int64_t>(p.pairs) * p.k_tiles;
  for (int64_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < items; i += gridDim.x * kWarps) {
    const int64_t first_pair = i / of_launch * p.pairs;
    const int64_t left = p.all_pairs - first_pair;
    const BlockPlace item = block_place<kKeys, kQueries>(
        p, first_pair, static_cast<uint32_t>(left < p.pairs ? left : p.pairs),
        static_cast<uint32_t>(i % of_launch));
    if (threadIdx.x % 32 == 0) static_cast<BlockPlace*>(p.items)[i] = item;
  }
}

// By one thread: the number of an item, which nobody else gets, or -1. Items are handed out in
// their order to blocks that run: who waits for an item of lower number waits for a block that
// works on it or on one of lower number still.
inline int claim_item(const BackwardParams& p) {
  const auto* const items = static_cast<const BlockPlace*>(p.items) + p.first_pair * p.k_tiles;
  for (;;) {
    const int number = atomicAdd(p.claims, 1);
    if (number >= p.pairs * p.k_tiles) return -1;
    if (items[number].keys.exists) return number;
  }
}

// By a whole warp, whose first lane has the number.
inline void fetch_item(const BackwardParams& p, int number, BlockPlace& to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  number = __shfl_sync(0xffffffffu, number, 0);
  if (number < 0) {
    to.keys.exists = false;
    return;
  }
  const auto* const items = static_cast<const BlockPlace*>(p.items) + p.first_pair * p.k_tiles;
  if (lane < kItemBytes / 4) {
    reinterpret_cast<uint32_t*>(&to)[lane] =
        reinterpret_cast<const uint32_t*>(items + number)[lane];
  }
}

}  // namespace pullback::attention

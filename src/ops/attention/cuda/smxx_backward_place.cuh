// Where a block of the backward pass is, and how far: its tile of keys, the queries that see it,
// the step it is at and whose turn that is.
#pragma once

#include "device/async_copy.cuh"
#include "device/cluster.cuh"
#include "ops/attention/cuda/smxx_backward_tiles.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

// One query head and one tile of queries, of which SeenTile knows more with a block mask.
struct BackwardStep : SeenTile {
  int head_of_group;
  int head;            // query head
  int64_t first_tile;  // of the head and sequence among the tiles of queries of all planes
  // With a block mask: its place in the list of the head's tiles, and where that begins.
  int at;
  int64_t list;
};

// Whether a block is the first or the last one to add to the d_q of a tile of queries, and where.
struct BlockTurn {
  bool first, last;
  int32_t number;
  int64_t line;        // among those of all planes
  int64_t taken_over;  // the line before, which this turn takes over, or -1
};

// In shared memory: registers are needed for sums.
struct BlockPlace {
  TilePlace keys;
  int64_t pair;
  TileRange queries, whole;  // those that see some of the keys, and those that see all
  bool finite_keys;
  int owner;              // with a block mask: its number
  BackwardStep steps[4];  // by their number modulo 4: of a step and the next one
  BlockTurn turns[2];     // of a step, from the first thread to all
  // Of the first thread: the turn before, which is over, but the next block was not told. Or null.
  int32_t* over;
  int32_t next;

  // By the first thread, a barrier behind the sums of the turn.
  void end_turn() {
    if (over == nullptr) return;
    fence_device();
    store_relaxed(over, next);
    over = nullptr;
  }
  // The same, behind the barrier ahead of the sums of `turn`: those of the turn before have arrived
  // meanwhile, and the fence has little to wait for. It also orders what this thread saw of the
  // counter, if it is the one that looked, before its sums to come; the other threads' come behind
  // the barrier, past the cache of the first level (an acquiring load, which PTX asks for, takes 1
  // to 3 % longer).
  void swap_turn(int turn, int32_t* counters) {
    fence_device();
    if (over != nullptr) store_relaxed(over, next);
    // Nobody comes after the last one.
    over = turns[turn].last ? nullptr : counters + turns[turn].line;
    next = turns[turn].number + 1;
  }
};

// Of a chain: the pair, of this launch, that number `number` of a pair group has.
inline uint32_t pair_of_chain(const BackwardParams& p, uint32_t group_begin, uint32_t number) {
  const auto heads = static_cast<uint32_t>(p.chain_heads);
  const auto kv_heads = static_cast<uint32_t>(p.problem.heads / p.problem.group);
  const auto items = static_cast<uint32_t>(p.pair_group) / heads;
  const uint32_t parts = static_cast<uint32_t>(p.pairs) / kv_heads / items;  // of the items
  const uint32_t group = group_begin / static_cast<uint32_t>(p.pair_group);
  const uint32_t item = group % parts * items + number / heads;
  return item * kv_heads + group / parts * heads + number % heads;
}

// kListed: with a block mask; the blocks of a cluster share a tile of keys.
template <int kKeys, int kQueries, bool kListed, bool kChain = false>
BlockPlace block_place(const BackwardParams& p) {
  const uint32_t index = kListed ? device::cluster_index() : blockIdx.x;
  // 32 bits: a grid has no more blocks, and divisions are what a block begins with.
  const SeenBlocksTable& blocks = p.problem.blocks;
  const auto owners = static_cast<uint32_t>(kListed ? blocks.owner_count : p.k_tiles);
  const uint32_t of_group = owners * static_cast<uint32_t>(p.pair_group);
  const uint32_t group_begin = index / of_group * static_cast<uint32_t>(p.pair_group);
  const uint32_t in_group = index % of_group;
  const uint32_t left = static_cast<uint32_t>(p.pairs) - group_begin;
  const uint32_t group =
      left < static_cast<uint32_t>(p.pair_group) ? left : static_cast<uint32_t>(p.pair_group);
  BlockPlace place;
  const uint32_t number = in_group % group;
  place.pair =
      p.first_pair + (kChain ? pair_of_chain(p, group_begin, number) : group_begin + number);
  int tile = static_cast<int>(in_group / group);
  if constexpr (kListed) {
    place.owner = tile;
    tile = blocks.owners[tile].tile;
  }
  place.keys = place_of<false>(p, place.pair, p.problem.heads / p.problem.group, tile, kKeys);
  place.queries = query_tiles_of(place.keys, place.keys.tile, kKeys, kQueries);
  place.whole = whole_tiles_of(place.keys, kKeys, kQueries);
  place.over = nullptr;
  return place;
}

// From one step to the next. A tile of queries of all heads of the group, then the next tile: head
// by head, blocks that see few of the tiles would come back early and wait for those that see many.
// kListed: with a block mask, whose lists name the tiles of queries of a head; head by head.
template <bool kListed>
struct BackwardSteps {
  using Step = BackwardStep;
  const BackwardParams& p;
  BlockPlace& block;

  const Step& at(uint32_t number) const { return block.steps[number % 4u]; }
  bool exists(const Step& step) const { return step.head_of_group < p.problem.group; }
  bool exists(uint32_t number) const { return exists(at(number)); }

  // By one thread, a barrier ahead of those who read it.
  void begin() const {
    Step& step = block.steps[0];
    if constexpr (kListed) {
      begin_list(step, 0);
      device::async_commit();
      device::async_wait<0>();
    } else {
      set_head(step, block.queries.begin < block.queries.end ? 0 : p.problem.group);
      step.tile = block.queries.end - 1;
    }
  }
  // The same, and ahead of a commit.
  void find(uint32_t number) const {
    const Step& before = at(number - 1);
    Step& step = block.steps[number % 4u];
    if (!exists(before)) {
      step.head_of_group = before.head_of_group;
      return;
    }
    if constexpr (kListed) {
      if (before.at == 0) return begin_list(step, before.head_of_group + 1);
      set_head(step, before.head_of_group);
      step.at = before.at - 1;
      step.list = before.list;
      copy_seen(step);
    } else {
      set_head(step, before.head_of_group + 1);
      step.tile = before.tile;
      if (exists(step) || before.tile == block.queries.begin) return;
      set_head(step, 0);
      --step.tile;
    }
  }

 private:
  void set_head(Step& step, int head_of_group) const {
    step.head_of_group = head_of_group;
    step.head = block.keys.head * p.problem.group + head_of_group;
    step.first_tile =
        (block.pair * p.problem.group + head_of_group) * p.q_tiles + block.keys.first_tile;
  }
  // The end of the first list that is not empty, from that of `head_of_group` on; past the group:
  // none.
  void begin_list(Step& step, int head_of_group) const {
    const int end = p.problem.group;
    for (; head_of_group < end; ++head_of_group) {
      const int64_t* const first = list_of(head_of_group);
      step.list = first[0];
      step.at = static_cast<int>(first[1] - first[0]) - 1;
      if (step.at >= 0) break;
    }
    set_head(step, head_of_group);
    if (head_of_group < end) copy_seen(step);
  }
  // Where the list of a head's tiles begins and ends.
  const int64_t* list_of(int head_of_group) const {
    const SeenBlocksTable& blocks = p.problem.blocks;
    const int64_t head = block.keys.head * p.problem.group + head_of_group;
    return blocks.first + blocks.plane(block.keys.batch, head) * (blocks.lists + 1) +
           block.owner * device::cluster_size() + device::cluster_rank();
  }
  void copy_seen(Step& step) const {
    SeenTile* const to = &step;
    device::async_copy(to, p.problem.blocks.tiles + step.list + step.at);
  }
};

}  // namespace pullback::attention

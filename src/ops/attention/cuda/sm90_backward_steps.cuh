// The steps of a thread block of the backward pass on Hopper, the turns in which its parts of d_q
// come to the sums of them, what every step does alike, and the kernel that has them.
#pragma once

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_params.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

inline int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// A step's place in a ring of stages, and how many went through it before.
struct Stage {
  int number = 0, round = 0;

  void begin(int stages) {
    if (number >= stages) number -= stages, ++round;
  }
};

// A step of a thread block.
struct HopperStep {
  int number, head_of_group;
  int tile;  // of queries; without a block mask
  // With one: the end of its tiles in a list, which is gone through from the end, and how many they
  // are.
  const SeenTile* end;
  int parts;
  // Whether they are the list's first ones, and how many come after.
  bool begins;
  int more;
};

template <class T, auto kTile>
struct HopperBackwardSteps {
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries;
  static constexpr int kSumWidth = kTile.sum_width();
  static constexpr bool kBlocks = kTile.blocks();
  // Statistics, turns and sums of d_q are of the plan's tiles of 64 queries. With a block mask each
  // is a part of the step; else a step's turn is that of its first tile, and the sums of a second
  // one lie behind.
  static constexpr int kPlanTile = 64;
  static constexpr int kPartQueries = kTile.part_queries(), kParts = kQueries / kPartQueries;
  static constexpr int kPlanTiles = kPartQueries / kPlanTile;
  using Stats = StatsTile<float, kPlanTile>;

  const HopperBackwardParams& hopper;
  const BackwardParams& p;
  const BlockPlace& block;
  const TilePlace& place;
  const int first_query_tile, end_query_tile, group_heads;
  const int end_last;  // tiles of queries before see none of the keys that come after

  HopperBackwardSteps(const HopperBackwardParams& params, const BlockPlace& own)
      : hopper(params),
        p(params.all),
        block(own),
        place(own.keys),
        first_query_tile(uniform(own.queries.begin)),
        end_query_tile(uniform(own.queries.end)),
        group_heads(uniform(params.all.problem.group)),
        end_last(uniform(end_of_last())) {}

  int end_of_last() const {
    const TileRange next = query_tiles_of(place, place.tile + 1, kKeys, kPartQueries);
    return next.begin < next.end ? next.begin : block.queries.end;
  }
  // Whether the tile of queries sees all of the block's keys.
  bool sees_all(int tile) const { return tile >= block.whole.begin && tile < block.whole.end; }

  // Calls work(step) for the steps of this thread block, in the order that BackwardSteps has.
  template <class Work>
  void for_each_step(const Work& work) const {
    int number = 0;
    if constexpr (kBlocks) {
      const SeenBlocksTable& table = p.problem.blocks;
#pragma unroll 1
      for (int head = 0; head < group_heads; ++head) {
        const int64_t* const list =
            table.first + table.plane(place.batch, head_of(head)) * (table.lists + 1) + block.owner;
        const SeenTile* end = table.tiles + list[1];
        int left = static_cast<int>(list[1] - list[0]);
        bool begins = true;
#pragma unroll 1
        for (; left > 0; ++number) {
          const int parts = left < kParts ? left : kParts;
          work(HopperStep{number, head, 0, end, parts, begins, left - parts});
          left -= parts;
          end -= parts;
          begins = false;
        }
      }
    } else {
#pragma unroll 1
      for (int tile = end_query_tile - 1; tile >= first_query_tile; --tile) {
#pragma unroll 1
        for (int head = 0; head < group_heads; ++head, ++number) {
          work(HopperStep{number, head, tile, nullptr, 1, false, 0});
        }
      }
    }
  }
  // A part of a step that has it.
  SeenTile part_of(const HopperStep& step, int part) const {
    if constexpr (kBlocks) return step.end[-1 - part];
    return {step.tile, 0, 0, 0, 0};
  }
  bool may_have_steps() const { return kBlocks || first_query_tile < end_query_tile; }
  // Without a block mask.
  int step_count() const { return (end_query_tile - first_query_tile) * group_heads; }
  int head_of(int head_of_group) const { return place.head * p.problem.group + head_of_group; }
  T* rows_of(const HeadRows& rows, int head, int64_t row) const {
    return static_cast<T*>(rows.data) + place.batch * rows.batch + head * rows.head +
           row * rows.row;
  }

  // A step's turn to add to d_q of its queries.
  struct Turn {
    int number;
    bool last;
    int64_t line;  // among those of all planes
    // The line before, which this turn takes over, or -1; and how many turns that has.
    int64_t taken_over;
    int turns_before;

    // Whether there are such that the step itself adds to.
    bool adds_sums() const { return last && number > 0; }
  };
  Turn turn_of(const SeenTile& step, int head_of_group) const {
    const int64_t head_lines = (block.pair * p.problem.group + head_of_group) * p.lines;
    if constexpr (kBlocks) {
      Turn turn{step.turn, step.turn + 1 == step.turns, head_lines + step.line, -1, 0};
      const SeenBlocksTable& table = p.problem.blocks;
      if (table.line_table != nullptr && turn.last) {
        const SeenLine line =
            table.line_table[table.plane(place.batch, head_of(head_of_group)) * table.lines +
                             step.line];
        turn.last = line.last != 0;
        if (line.before >= 0) turn.taken_over = head_lines + line.before;
        turn.turns_before = line.before_turns;
      }
      return turn;
    } else {
      const TileRange keys = key_tiles_of(place, step.tile, kKeys, kPartQueries);
      const int number = place.tile - keys.begin;
      return {number, number + 1 == keys.end - keys.begin,
              head_lines + place.first_tile + step.tile * kPlanTiles, -1, 0};
    }
  }
  // Of the last turn; of others no more than that they are not.
  Turn last_turn_of(const SeenTile& step, int head_of_group) const {
    if (!kBlocks && step.tile >= end_last) return {0, false, 0, -1, 0};
    return turn_of(step, head_of_group);
  }
  bool turn_has_come(const Turn& turn) const {
    return load_acquire(p.turns + turn.line) >= turn.number;
  }
  // Of a chain of batch items: how many steps of `pair`, with the same keys, have added to d_bias.
  int32_t* bias_turn_of(int64_t pair) const { return p.bias_turns + pair * p.k_tiles + place.tile; }
  bool follows_in_chain() const { return place.batch > 0; }
  // Until the item before has, in the step.
  void await_chain(int step) const {
    const int64_t before = block.pair - p.problem.heads / p.problem.group;
    while (load_acquire(bias_turn_of(before)) <= step) {
    }
  }
  // By a thread that all who add have told, behind a fence. Another may have told of a later step.
  void tell_chain(int step) const { raise_relaxed(bias_turn_of(block.pair), step + 1); }

  void await(int64_t line, int turns) const {
    while (load_acquire(p.turns + line) < turns) {
    }
  }
  // How many of the part's tiles have queries.
  int plan_tiles_of(int tile) const {
    return kPlanTiles > 1 && place.q_length - tile * kPartQueries > kPlanTile ? kPlanTiles : 1;
  }
  // Statistics of a part's queries, by kThreads threads; of a tile without queries, and of a part
  // that does not exist, zeros.
  template <int kThreads>
  void copy_stats(uint32_t to, int tile, int head_of_group, bool exists = true) const {
    const auto* const from = static_cast<const Stats*>(p.stats) +
                             ((block.pair * p.problem.group + head_of_group) * p.q_tiles +
                              place.first_tile + tile * kPlanTiles);
    const uint32_t bytes = exists ? plan_tiles_of(tile) * sizeof(Stats) : 0;
    for (uint32_t byte = threadIdx.x * 16; byte < kPlanTiles * sizeof(Stats);
         byte += kThreads * 16) {
      async_copy_or_zero(to + byte, reinterpret_cast<const char*>(from) + byte, byte < bytes);
    }
  }

  // d_q of a tile of queries and of columns from `column` on; the warp's rows begin at `row`.
  template <int kTiles>
  void store_queries(const float (&d_q)[kTiles][4], int tile, int head, int row, int column,
                     int lane) const {
    const int query = tile * kPartQueries;
    const int rows = own_query_rows(p, place, query, kPartQueries);
    const GradientStore<T, false> store{p.d_q,
                                        rows_of(p.d_q, head, place.q_begin + query),
                                        row,
                                        rows,
                                        column,
                                        p.problem.head_dim,
                                        p.problem.scale};
    store.template pieces<true>(reinterpret_cast<const float(&)[1][kTiles][4]>(d_q), lane, true);
  }
  // d_q to those who add it up, in shared memory at `to`; `thread` is of the warpgroup.
  template <int kTiles>
  static void hand_over(const float (&d_q)[kTiles][4], uint32_t to, int thread) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t piece[4] = {__float_as_uint(d_q[n][0]), __float_as_uint(d_q[n][1]),
                                 __float_as_uint(d_q[n][2]), __float_as_uint(d_q[n][3])};
      store_shared(to + (thread + n * kWarpgroupSize) * 16, piece);
    }
    fence_async_proxy();
  }

  // Where the sums of d_bias over the batch lie, of a step's tile.
  float* bias_sums_of(int tile, int head) const {
    const int64_t number = (int64_t{head} * p.q_tiles + tile) * p.k_tiles + place.tile;
    return p.bias_sums + number * (kKeys * kQueries);
  }
  float* sums_of(int64_t line) const {
    return p.sums + (line - p.first_pair * p.problem.group * p.lines) * (kPlanTile * kSumWidth);
  }
};

// The kernel: who of a thread block does what. The first thread finds the place; `Backward` is the
// struct of the kernel's constants, shared memory and work.
template <class Backward, auto kTile>
void run_backward(const HopperBackwardParams& p) {
  // No byte to spare, hence nothing beside dynamic memory, which begins at a multiple of 1024.
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Backward::Shared*>(memory);
  static_assert(sizeof(shared) <= kTile.kPlaceBytes);
  if (threadIdx.x < 32) {
    const BlockPlace found =
        block_place<kTile.keys, Backward::kPartQueries, kTile.blocks(), kTile.bias_sum()>(p.all);
    if (threadIdx.x == 0) {
      shared.place = found;
      shared.finite_keys = true;
      shared.init();
      barrier_init_fence();
    }
  }
  __syncthreads();
  // There is some block that has keys, and waits for the kernel ahead.
  if (!shared.place.keys.exists) return;
  const uint32_t first = shared_address(memory);
  const Backward backward(p, shared, first + kTile.kPlaceBytes, first + kTile.first_tile());
  const int group = uniform(static_cast<int>(threadIdx.x / kWarpgroupSize)) - 1;
  if (group < 0) {
    give_registers<kTile.copy_registers>();
    if (threadIdx.x < Backward::kCopiers) {
      backward.copy();
    } else if (threadIdx.x % 32 == 0) {
      backward.add_queries(static_cast<int>(threadIdx.x) / 32 - Backward::kCopiers / 32);
    }
  } else {
    take_registers<kTile.work_registers>();
    backward.work(group);
  }
}

}  // namespace pullback::attention

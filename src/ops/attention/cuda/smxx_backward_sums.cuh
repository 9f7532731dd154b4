// What several blocks add up, in an order that is the same every run: d_q of a tile of queries, to
// which blocks add in turns; d_k and d_v of a tile of keys whose queries several owners share.
#pragma once

#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

// kEndsEarly: a barrier has come behind the sums of the step before when a turn begins, so that its
// turn may end before this one has come.
template <int kKeys, int kQueries, int kWidth, int kThreads, bool kListed, bool kEndsEarly>
struct QuerySums {
  const BackwardParams& p;
  BlockPlace& block;

  // By one thread: how many turns of the step's line are over.
  int32_t seen(const BackwardStep& step) const { return load_relaxed(p.turns + line_of(step)); }

  // By one thread, before the barrier ahead of the step's sums; so many turns were over before.
  void begin_turn(const BackwardStep& step, int32_t over, BlockTurn& turn) const {
    const TilePlace& place = block.keys;
    int32_t number, count;
    SeenLine line = {-1, 0, 1};
    if constexpr (kListed) {
      number = step.turn;
      count = step.turns;
      const SeenBlocksTable& blocks = p.problem.blocks;
      if (blocks.line_table != nullptr && number + 1 == count) {
        line = blocks.line_table[blocks.plane(place.batch, step.head) * blocks.lines + step.line];
      }
    } else {
      const TileRange keys = key_tiles_of(place, step.tile, kKeys, kQueries);
      number = place.tile - keys.begin;
      count = keys.end - keys.begin;
    }
    const int64_t own = line_of(step);
    if (over < number) await(own, number);
    // The line before has only owners that began before.
    int64_t taken_over = -1;
    if (kListed && line.before >= 0) {
      taken_over = own - step.line + line.before;
      await(taken_over, line.before_turns);
    }
    turn = {number == 0 && taken_over < 0, number + 1 == count && line.last != 0, number, own,
            taken_over};
  }

  // The last turn of a line adds the line before to its own.
  void take_over(const BlockTurn& turn) const {
    if (turn.taken_over < 0) return;
    float* const to = at(turn.line);
    const float* const from = at(turn.taken_over);
#pragma unroll 1
    for (int i = 0; i < kQueries * kWidth; i += kThreads * 4) {
      float sum[4], own[4] = {};
      load_past_l1(sum, from + i);
      if (turn.number > 0) load_past_l1(own, to + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += own[e];
      store_past_l1(to + i, sum);
    }
  }

  // What the product of the step is added to: where the blocks before are added here, their sum.
  // `part` counts parts as large as `sum`.
  template <int kM, int kN>
  void begin(const BlockTurn& turn, float (&sum)[kM][kN][4], int part) const {
    const bool loads = !turn.first && (turn.last || !kAddsInMemory);
    const float* const sums = at(turn.line) + part * (kM * kN * kThreads * 4);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][n][e] = 0;
      }
    }
    if (!loads) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        load_past_l1(sum[m][n], sums + (m * kN + n) * (kThreads * 4));
      }
    }
  }

  // Whether blocks come after this one, and get the sum so.
  template <int kM, int kN>
  bool add(const BlockTurn& turn, const float (&sum)[kM][kN][4], int part) const {
    if (turn.last) return false;
    float* const sums = at(turn.line) + part * (kM * kN * kThreads * 4);
    const auto for_pieces = [&](const auto& visit) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) visit(sums + (m * kN + n) * (kThreads * 4), sum[m][n]);
      }
    };
    using Piece = const float(&)[4];
    if (kAddsInMemory && !turn.first) {
      for_pieces([](float* to, Piece value) { add_in_memory(to, value); });
    } else {
      for_pieces([](float* to, Piece value) { store_past_l1(to, value); });
    }
    return true;
  }

 private:
  // Of the step's turn, among those of all planes.
  int64_t line_of(const BackwardStep& step) const {
    if constexpr (!kListed) return step.first_tile + step.tile;
    return (block.pair * p.problem.group + step.head_of_group) * p.lines + step.line;
  }
  void await(int64_t line, int32_t turns) const {
    if constexpr (kEndsEarly) block.end_turn();
    while (load_relaxed(p.turns + line) < turns) {
    }
  }
  float* at(int64_t line) const {
    const int64_t sum = line - p.first_pair * p.problem.group * p.lines;
    return p.sums + sum * (kQueries * kWidth) + threadIdx.x * 4;
  }
};

// Owners that share a tile of keys of a pair add up d_k (0) or d_v (1), in their order: the last
// one has the sum. By all of `threads`.
template <int kThreads, int kM, int kN, class Threads = AllThreads>
void join_key_parts(const BackwardParams& p, int64_t pair, const SeenOwner& owner,
                    float (&sum)[kM][kN][4], int which, const Threads& threads = {}) {
  const int64_t shared = p.problem.blocks.shared_count;
  int32_t* const done = p.parts_done + (pair * shared + owner.shared) * 2 + which;
  const int64_t at = ((pair - p.first_pair) * shared + owner.shared) * 2 + which;
  float* const sums = p.key_sums + (at * (kM * kN * kThreads) + threads.number()) * 4;
  if (owner.part > 0) {
    await_parts(done, owner.part, threads);
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) {
      float piece[4];
      load_past_l1(piece, sums + i * (kThreads * 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i / kN][i % kN][e] += piece[e];
    }
  }
  if (owner.part + 1 == owner.parts) return;
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) {
    store_past_l1(sums + i * (kThreads * 4), sum[i / kN][i % kN]);
  }
  end_part(done, owner.part, threads);
}

}  // namespace pullback::attention

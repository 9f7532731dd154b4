// A tile of queries that several thread blocks share, as a block mask lets them see many keys: each
// adds the state of its part to that of the parts before, in their order, and the last one goes on.
#pragma once

#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

// Whether this part is the last one: `state` is the tile's then. By all of `threads`; `thread`
// numbers them by the rows that they hold, which are not the same in all thread blocks.
template <int kThreads, class Rows, class Threads = AllThreads>
bool join_parts(Rows& state, const ForwardParams& params, const SeenOwner& owner, int64_t pair,
                float unit, int thread, const Threads& threads = {}) {
  constexpr int kRowTiles = Rows::kRows, kColumnTiles = Rows::kColumns;
  constexpr int kPieces = kRowTiles * (kColumnTiles + 1);  // the maxima and sums come last
  const int64_t index = pair * params.problem.blocks.shared_count + owner.shared;
  int32_t* const done = params.parts_done + index;
  float* const own = params.parts + (index * kPieces * kThreads + thread) * 4;
  const auto piece_at = [own](int m, int n) {
    return own + (m * (kColumnTiles + 1) + n) * (kThreads * 4);
  };
  if (owner.part > 0) {
    await_parts(done, owner.part, threads);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float before[4];
      load_past_l1(before, piece_at(m, kColumnTiles));
      const float largest[2] = {before[0], before[1]};
      state.raise(m, largest, unit);
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float raised = state.maximum[m][half];
        factor[half] = largest[half] == raised ? 1 : exp2_approx((largest[half] - raised) * unit);
        state.sum[m][half] += factor[half] * before[2 + half];
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        float piece[4];
        load_past_l1(piece, piece_at(m, n));
#pragma unroll
        for (int e = 0; e < 4; ++e) state.out[m][n][e] += factor[e / 2] * piece[e];
      }
    }
  }
  if (owner.part + 1 == owner.parts) return true;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const float rest[4] = {state.maximum[m][0], state.maximum[m][1], state.sum[m][0],
                           state.sum[m][1]};
    store_past_l1(piece_at(m, kColumnTiles), rest);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) store_past_l1(piece_at(m, n), state.out[m][n]);
  }
  end_part(done, owner.part, threads);
  return false;
}

}  // namespace pullback::attention

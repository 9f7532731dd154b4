// The first warpgroup of the backward pass on Hopper (sm90_backward.cuh): two warps that copy what
// the steps read, and a thread each of two others that adds up d_q.
#pragma once

#include "device/bulk.cuh"
#include "device/bulk_out.cuh"
#include "ops/attention/cuda/sm90_backward_bias.cuh"
#include "ops/attention/cuda/sm90_backward_steps.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

// Rows of a head to panels of a tile; `rows` more of them exist from the first one on. 8 threads
// side by side in a panel's row, all panels of a row at once: a TileLoader for each panel takes
// twice the instructions and more registers than there are, and steps wait for it.
template <class Backward, int kRows>
void copy_tile(const Backward& own, uint32_t tile, const HeadRows& of, int head, int64_t first,
               int rows, int columns) {
  using T = typename Backward::Element;
  using Layout = TileLayout<T, kPanel>;
  constexpr int kDown = Backward::kCopiers / Layout::kChunks;
  static_assert(kDown == 8);  // rows that are swizzled alike
  const int row = static_cast<int>(threadIdx.x) / Layout::kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % Layout::kChunks;
  const uint32_t to = tile + Layout::offset(row, chunk);
  const T* from = own.rows_of(of, head, first + row) + chunk * Layout::kChunk;
  columns -= chunk * Layout::kChunk;
  rows -= row;
#pragma unroll
  for (int down = 0; down < kRows; down += kDown) {
#pragma unroll
    for (int panel = 0; panel < Backward::kPanels; ++panel) {
      async_copy_or_zero(to + (panel * kRows + down) * kPanelRow, from + panel * kPanel,
                         down < rows && panel * kPanel < columns);
    }
    from += kDown * of.row;
  }
}

template <class Backward>
void copy_steps(const Backward& own) {
  constexpr int kKeys = Backward::kKeys, kQueries = Backward::kQueries, kStages = Backward::kStages;
  const BackwardParams& p = own.p;
  const TilePlace& place = own.place;
  auto& shared = own.shared;
  const int head_dim = p.problem.head_dim, value_dim = p.problem.value_dim;
  const int key = place.tile * kKeys, keys = place.k_length - key;
  copy_tile<Backward, kKeys>(own, own.k_tile, p.k, place.head, place.k_begin + key, keys, head_dim);
  copy_tile<Backward, kKeys>(own, own.v_tile, p.v, place.head, place.k_begin + key, keys,
                             value_dim);
  barrier_arrive_after_copies(&shared.keys_full);
  wait_for_previous_kernel();  // for statistics
  Stage at;
  int stages = kStages;
  own.for_each_step([&](const SeenTile& step, int head_of_group, int number) {
    if (number == kStages - 1) {
      barrier_wait(&shared.keys_checked, 0);
      if (!shared.finite_keys) --stages;
    }
    at.begin(stages);
    const int stage = at.number++, tile = step.tile;
    if (at.round > 0) barrier_wait(&shared.empty[stage], (at.round - 1) & 1);
    const int query = tile * kQueries, left = place.q_length - query;
    const int head = own.head_of(head_of_group);
    copy_tile<Backward, kQueries>(own, own.q_tile_of(stage), p.q, head, place.q_begin + query, left,
                                  head_dim);
    copy_tile<Backward, kQueries>(own, own.d_out_tile_of(stage), p.d_out, head,
                                  place.q_begin + query, left, value_dim);
    own.template copy_stats<Backward::kCopiers>(own.stats_tiles + stage * Backward::kStatsBytes,
                                                tile, head_of_group);
    if (Backward::kBlocks && threadIdx.x == 0) async_copy(&shared.steps[stage], &step);
    if constexpr (Backward::kBias) {
      if (Backward::kBiasSum && p.bias_step != BiasStep::first) {
        prefetch_bytes<Backward::kCopiers>(own.bias_sums_of(tile, head), kKeys * kQueries * 4);
      }
      // Its one place is free early in the step before.
      if (number > 0) barrier_wait(&shared.bias_empty, (number - 1) & 1);
      copy_bias<typename Backward::Element, kKeys, kQueries, Backward::kCopiers>(own.bias_tile, p,
                                                                                 place, head, tile);
    }
    barrier_arrive_after_copies(&shared.full[stage]);
  });
  async_wait<0>();
}

// Of two steps each takes one: turns, and the writes that they wait for, take longer than a step.
// By one thread.
template <class Backward>
void add_step_queries(const Backward& own, int adder) {
  auto& shared = own.shared;
  wait_for_previous_kernel();  // for turns
  own.for_each_step([&](const SeenTile& step, int head_of_group, int number) {
    if (number % Backward::kAdders != adder) return;
    const auto turn = own.turn_of(step, head_of_group);
    if (!turn.last) {
      own.await(turn.line, turn.number);
      fence_async_proxy();
    }
    barrier_wait(&shared.sums_full[adder], number / Backward::kAdders & 1);
    if (!turn.last) {
      float* const sums = own.sums_of(turn.line);
      const uint32_t bytes =
          Backward::kSumBytes / Backward::kPlanTiles * own.plan_tiles_of(step.tile);
      turn.number == 0 ? bulk_store(sums, own.sums_tile, bytes)
                       : bulk_add(sums, own.sums_tile, bytes);
      bulk_commit();
      bulk_wait_read();
    }
    barrier_arrive(&shared.sums_empty);
    if (!turn.last) {
      bulk_wait();
      fence_device();
      store_relaxed(own.p.turns + turn.line, turn.number + 1);
    }
  });
}

}  // namespace pullback::attention

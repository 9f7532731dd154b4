// The first warpgroup of the backward pass on Hopper (sm90_backward.cuh): two warps that see to
// copies of what the steps read, and a thread each of the others that adds up d_q.
#pragma once

#include "device/boxes.cuh"
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

// Queries or d_out of a part of a step, by the copy engine where it knows the tensor; `left` more
// rows exist. `full` is told.
template <class Backward, int kRows>
void copy_rows(const Backward& own, uint32_t tile, const TensorMap& map, const HeadRows& of,
               int head, int row, int left, int columns, uint64_t* full) {
  const TilePlace& place = own.place;
  if (!own.hopper.has_maps) {
    copy_tile<Backward, kRows>(own, tile, of, head, place.q_begin + row, left, columns);
  } else if (threadIdx.x == 0) {
    barrier_expect_more_bytes(full, Backward::kPanels * kRows * kPanelRow);
#pragma unroll
    for (int panel = 0; panel < Backward::kPanels; ++panel) {
      load_box(tile + panel * kRows * kPanelRow, map, panel * kPanel,
               left > 0 ? row : place.q_length, head, static_cast<int>(place.batch), full);
    }
  }
}

template <class Backward>
void copy_steps(const Backward& own) {
  constexpr int kKeys = Backward::kKeys, kQueries = Backward::kQueries, kStages = Backward::kStages;
  constexpr int kParts = Backward::kParts, kPartQueries = Backward::kPartQueries;
  static_assert(kParts == 1 || Backward::kPanels == 1);  // panels of a part lie apart else
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
  int ahead[kParts];  // the next step's tiles: an entry of a list is far away
  own.for_each_step([&](const HopperStep& step) {
    const int number = step.number;
    if (number == kStages - 1) {
      barrier_wait(&shared.keys_checked, 0);
      if (!shared.finite_keys) --stages;
    }
    at.begin(stages);
    const int stage = at.number++, head = own.head_of(step.head_of_group);
    if (at.round > 0) barrier_wait(&shared.empty[stage], (at.round - 1) & 1);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool exists = !Backward::kBlocks || part < step.parts;
      const bool known = Backward::kBlocks && !step.begins;
      const int tile = !exists ? 0 : known ? ahead[part] : own.part_of(step, part).tile;
      const int query = tile * kPartQueries, left = exists ? place.q_length - query : 0;
      constexpr uint32_t kPartBytes = kPartQueries * kPanelRow;
      copy_rows<Backward, kPartQueries>(own, own.q_tile_of(stage) + part * kPartBytes, own.hopper.q,
                                        p.q, head, query, left, head_dim, &shared.full[stage]);
      copy_rows<Backward, kPartQueries>(own, own.d_out_tile_of(stage) + part * kPartBytes,
                                        own.hopper.d_out, p.d_out, head, query, left, value_dim,
                                        &shared.full[stage]);
      own.template copy_stats<Backward::kCopiers>(
          own.stats_tiles + stage * Backward::kStatsBytes + part * stats_bytes(kPartQueries), tile,
          step.head_of_group, exists);
      if (Backward::kBlocks && threadIdx.x == 0) {
        async_copy_or_zero(shared_address(&shared.steps[stage][part]), step.end - 1 - part, exists);
      }
    }
    if constexpr (Backward::kBlocks) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ahead[part] = part < step.more ? step.end[-1 - kParts - part].tile : 0;
      }
    }
    if constexpr (Backward::kBias) {
      const int tile = step.tile;
      // Here, for none of those who work to wait for an answer.
      if (Backward::kBiasSum && own.follows_in_chain()) {
        if (threadIdx.x % kWarpSize == 0) own.await_chain(number);
        __syncwarp();
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

// They take the steps by turns: a step's turn, and the writes that it waits for, take longer than a
// step. A part whose turn has come does not wait for the other one's. By one thread.
template <class Backward>
void add_step_queries(const Backward& own, int adder) {
  constexpr int kParts = Backward::kParts;
  constexpr uint32_t kPartBytes = Backward::kSumBytes / kParts;
  auto& shared = own.shared;
  wait_for_previous_kernel();  // for turns
  const auto add = [&](const HopperStep& step) {
    if (step.number % Backward::kAdders != adder) return;
    typename Backward::Turn turns[kParts];
    uint32_t bytes[kParts], waiting = 0, ready = 0;  // bits of parts
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (Backward::kBlocks && part >= step.parts) continue;
      const SeenTile seen = own.part_of(step, part);
      turns[part] = own.turn_of(seen, step.head_of_group);
      bytes[part] = kPartBytes / Backward::kPlanTiles * own.plan_tiles_of(seen.tile);
      if (!turns[part].last) waiting |= 1u << part;
    }
    const auto look = [&] {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32_t bit = 1u << part;
        if ((waiting & ~ready & bit) && own.turn_has_come(turns[part])) ready |= bit;
      }
    };
    uint64_t* const full = &shared.sums_full[adder];
    const uint32_t parity = step.number / Backward::kAdders & 1;
    do {
      look();
    } while (ready != waiting && !barrier_test(full, parity));
    barrier_wait(full, parity);
    while (waiting != 0) {
      while (ready == 0) look();
      fence_async_proxy();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!(ready >> part & 1)) continue;
        float* const sums = own.sums_of(turns[part].line);
        const uint32_t from = own.sums_tile + part * kPartBytes;
        turns[part].number == 0 ? bulk_store(sums, from, bytes[part])
                                : bulk_add(sums, from, bytes[part]);
      }
      bulk_commit();
      waiting &= ~ready;
      if (waiting == 0) {
        bulk_wait_read();
        barrier_arrive(&shared.sums_empty);
      }
      bulk_wait();
      fence_device();
      if (Backward::kBiasSum) own.tell_chain(step.number);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (ready >> part & 1) {
          store_relaxed(own.p.turns + turns[part].line, turns[part].number + 1);
        }
      }
      if (waiting == 0) return;
      ready = 0;
    }
    barrier_arrive(&shared.sums_empty);
    if constexpr (Backward::kBiasSum) {
      fence_device();
      own.tell_chain(step.number);
    }
  };
  own.for_each_step(add);
}

}  // namespace pullback::attention

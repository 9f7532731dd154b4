// The forward pass on Hopper's tensor cores, one tile of queries a thread block (Shah et al. 2024,
// FlashAttention-3): the formula of smxx_forward.cuh, without softcap, and with one of bias,
// dropout and block mask at most.
//
// The first warpgroup copies: queries, then K 0, V 0, K 1, V 1, … through a ring of slots, and each
// tile of a bias with the one of its keys. Each other one has 64 of the queries, a warp 16, and
// asks the tensor cores for the next tile's scores and for this tile's outputs before it makes
// weights of the former while the latter come in. With a block mask a tile of keys is made of parts
// from anywhere; the first warpgroup hands on which.
//
// Shared memory: the warpgroups' queries, then the ring, all in panels of 64 columns
// (device/wgmma.cuh); tiles of a bias. Keys are interleaved (device/shared_tile.cuh) and values
// alike: their order within a tile is the same, whatever it is.
#pragma once

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_clear.cuh"
#include "ops/attention/cuda/smxx_forward_bias.cuh"
#include "ops/attention/cuda/smxx_forward_parts.cuh"
#include "ops/attention/cuda/smxx_forward_rows.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// Named barriers: of each warpgroup, of the two turns, and of all that work.
inline constexpr int kFirstGroup = 1, kFirstTurn = 4, kAllGroups = 6;

// Two warpgroups ask for their products by turns: the one makes weights while the other's products
// keep the tensor cores busy. Three need no order.
inline void await_turn(int group) { named_wait(kFirstTurn + group, 2 * kWarpgroupSize); }
inline void pass_turn(int group) { named_arrive(kFirstTurn + 1 - group, 2 * kWarpgroupSize); }

template <class T, HopperTile kTile>
struct HopperForward {
  static constexpr int kWidth = kTile.width, kKeys = kTile.keys, kSlots = kTile.slots;
  static constexpr int kQuerySlots = kTile.query_slots, kGroups = kTile.groups;
  static constexpr bool kBlocks = is_blocks(kTile.kind);
  static constexpr bool kDropout = kTile.kind == ForwardKind::dropout;
  static constexpr bool kBias = kTile.kind == ForwardKind::bias;
  static constexpr bool kTurns = kGroups == 2;
  // Who lets go of a slot: a thread of each warp, whose products are its warp's, or all threads,
  // who read a bias or what they see.
  static constexpr bool kAllRelease = kBias || kBlocks;
  static constexpr int kReleasers = kGroups * (kAllRelease ? kWarpgroupSize : 4);
  static constexpr int kPartKeys = kTile.part_keys(), kParts = kKeys / kPartKeys;
  static constexpr int kRows = 64, kPanels = kTile.panels();
  static constexpr int kSlotBytes = kPanels * kKeys * kPanelRow;
  static constexpr int kQueryBytes = kPanels * kRows * kPanelRow;
  static constexpr int kBiasBytes = kRows * kKeys * 2;  // of a warpgroup's queries
  using Bias = StagedBias<T, kRows, kKeys, kWarpgroupSize>;

  struct Barriers {
    uint64_t full[kSlots], empty[kSlots], queries_full[kQuerySlots], queries_empty[kQuerySlots];
    // With a block mask, of the last tiles of keys. Of twice as many as have slots: who has let go
    // of the keys may yet ask.
    SeenTile seen[kBlocks ? kSlots : 1][kParts];
  };

  // One of the tiles of queries, and what of keys it sees.
  struct Tile {
    QueryTile queries;
    int rows;
    SequenceBand band;
    KeyTiles<kPartKeys, kParts> keys;

    Tile(const Problem& p, const QueryTile& tile)
        : queries(tile),
          rows(uniform(TileRows(tile, kTile.rows()).valid)),
          band(p.band, tile.sequence),
          keys(keys_of(p)) {
      for (int32_t* value : {&band.first, &band.end, &band.keys, &keys.first, &keys.count,
                             &keys.first_whole, &keys.whole}) {
        *value = uniform(*value);
      }
    }
    KeyTiles<kPartKeys, kParts> keys_of(const Problem& p) const {
      if constexpr (kBlocks) {
        return {p.blocks, queries.batch, queries.head, queries.owner};
      } else {
        const int first = static_cast<int>(queries.first);
        return {band, first, first + rows - 1};
      }
    }
  };

  const ForwardParams& params;
  Barriers& barriers;
  uint32_t queries, ring, biases;
  Dropout dropout;

  // Calls work(tile, its number) for the tiles of this thread block.
  template <class Work>
  void for_each_tile(const Work& work) const {
    const auto take = [&](uint32_t number) {
      QueryTile tile;
      const bool found = find_query_tile<kBlocks>(params.problem, params.q_tiles, params.pair_group,
                                                  kTile.rows(), tile, number);
      if (uniform(found)) work(Tile(params.problem, tile), number);
    };
    if constexpr (!kTile.persistent) {
      take(blockIdx.x);
    } else {
      // A causal mask makes a pair's last tiles long and its first ones short: two of a unit, from
      // either end, come to the same for all units.
      const uint32_t tiles = params.q_tiles, unit_tiles = params.unit_tiles;
      const uint32_t pair_units = (tiles + unit_tiles - 1) / unit_tiles;
#pragma unroll 1
      for (uint32_t unit = blockIdx.x; unit < params.units; unit += gridDim.x) {
        const uint32_t first = unit / pair_units * tiles, within = unit % pair_units;
#pragma unroll 1
        for (uint32_t at = 0; at < unit_tiles; ++at) {
          if (at == 1 && tiles - 1 - within == within) break;
          take(first + (at == 0 ? within : tiles - 1 - within));
        }
      }
    }
  }

  // --- The warpgroup that copies ---

  void copy() const {
    const Problem& p = params.problem;
    int item = 0, tile_count = 0;
    for_each_tile([&](const Tile& tile, uint32_t) {
      const Sequence& sequence = tile.queries.sequence;
      const TileRows tile_rows(tile.queries, kTile.rows());
      const int rows = tile.rows;
      if (rows < tile_rows.extent) {
        clear_rows<T>(params, tile.queries, rows, tile_rows.extent, kWarpgroupSize);
      }
      if (rows == 0) return;
      const auto first_of = [&](const HeadRows& rows_of, int64_t row, int64_t head) {
        return static_cast<const T*>(rows_of.data) + tile.queries.batch * rows_of.batch +
               row * rows_of.row + head * rows_of.head;
      };
      const int query_slot = tile_count % kQuerySlots, query_round = tile_count / kQuerySlots;
      ++tile_count;
      if (query_round > 0) {
        barrier_wait(&barriers.queries_empty[query_slot], (query_round - 1) & 1);
      }
      const T* const q =
          first_of(params.q, sequence.q_begin + tile.queries.first, tile.queries.head);
#pragma unroll 1
      for (int at = 0; at < kGroups * kPanels; ++at) {
        const int of_group = at / kPanels * kRows, column = at % kPanels * kPanel;
        TileLoader<T, kRows, kPanel, kWarpgroupSize, true>(q + column, params.q.row, 1,
                                                           p.head_dim - column)
            .load(queries + (query_slot * kGroups * kPanels + at) * (kRows * kPanelRow), of_group,
                  rows - of_group);
      }
      barrier_arrive_after_copies(&barriers.queries_full[query_slot]);
      const int64_t kv_head = tile.queries.head / p.group;
      const T* const k = first_of(params.k, sequence.k_begin, kv_head);
      const T* const v = first_of(params.v, sequence.k_begin, kv_head);
      int key[kParts], next_key[kParts];
      const auto find_keys = [&](int n) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) next_key[part] = tile.keys.key(n, part);
      };
      if (tile.keys.count > 0) find_keys(0);
#pragma unroll 1
      for (int n = 0; n < 2 * tile.keys.count; ++n) {
        const int slot = item % kSlots, round = item / kSlots;
        const bool is_value = n % 2 != 0;
        if (!is_value) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) key[part] = next_key[part];
          if (n / 2 + 1 < tile.keys.count) find_keys(n / 2 + 1);
        }
        if (round > 0) barrier_wait(&barriers.empty[slot], (round - 1) & 1);
        if (kBlocks && !is_value && threadIdx.x < kParts) {
          const int at = n / 2 * kParts + static_cast<int>(threadIdx.x);
          async_copy_or_zero(shared_address(&barriers.seen[item / 2 % kSlots][threadIdx.x]),
                             tile.keys.listed + at, at < tile.keys.parts);
        }
        const int64_t step = is_value ? params.v.row : params.k.row;
        const int width = is_value ? p.value_dim : p.head_dim;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
          for (int panel = 0; panel < kPanels; ++panel) {
            const int column = panel * kPanel;
            TileLoader<T, kPartKeys, kPanel, kWarpgroupSize, true, true>(
                (is_value ? v : k) + column, step, 1, width - column)
                .load(ring + slot * kSlotBytes +
                          (panel * kKeys + part * kPartKeys) * static_cast<uint32_t>(kPanelRow),
                      key[part], tile.band.keys - key[part]);
          }
        }
        if (kBias && !is_value) copy_bias(tile, bias_tile(item, 0), key[0]);
        barrier_arrive_after_copies(&barriers.full[slot]);
        ++item;
      }
    });
    async_wait<0>();
  }

  // Of the item, a tile of keys, and of a warpgroup.
  uint32_t bias_tile(int item, int group) const {
    return biases + (item / 2 % kTile.bias_slots() * kGroups + group) * kBiasBytes;
  }
  void copy_bias(const Tile& tile, uint32_t to, int key) const {
    const Plane& bias = params.bias;
    const T* const from = static_cast<const T*>(bias.data) + tile.queries.batch * bias.batch +
                          tile.queries.head * bias.head + tile.queries.first * bias.query +
                          key * bias.key;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      Bias::template load<false>(to + group * kBiasBytes, from + group * kRows * bias.query, bias,
                                 tile.rows - group * kRows, tile.band.keys - key, true);
    }
  }

  // --- The warpgroups that work ---

  void work(int group) const {
    const Problem& p = params.problem;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first_row = group * kRows + static_cast<int>(threadIdx.x / 32 % 4) * 16;
    // With a bias scores are what the exponential takes but for kLog2E.
    const float scale = kBias ? 1.0f : p.scale, unit = scale * kLog2E;
    int item = 0, tile_count = 0;
    if (kTurns && group == 1) pass_turn(group);
    for_each_tile([&](const Tile& tile, uint32_t number) {
      const int rows = tile.rows;
      if (rows == 0) return;
      const int query_slot = tile_count % kQuerySlots, query_round = tile_count / kQuerySlots;
      ++tile_count;
      const uint32_t tile_queries = queries + query_slot * kGroups * kQueryBytes;
      barrier_wait(&barriers.queries_full[query_slot], query_round & 1);
      RunningRows<1, kWidth / 8> state;
      if (tile.keys.count > 0) {
        take_keys(state, tile, item, tile_queries + group * kQueryBytes, group, first_row, lane,
                  unit);
        item += 2 * tile.keys.count;
      }
      if constexpr (kBlocks) {
        if (!join(state, tile, unit)) {
          barrier_arrive(&barriers.queries_empty[query_slot]);
          return;
        }
      }
      // The warpgroup's outputs take the place of its queries, in rows instead of panels.
      named_wait(kFirstGroup + group, kWarpgroupSize);
      const WarpRows warp{lane, first_row, rows - first_row < 16 ? rows - first_row : 16};
      if (warp.rows > 0) {
        // Found anew: what the keys' loop does not need holds no registers there.
        QueryTile own;
        asm volatile("" : "+r"(number));
        find_query_tile<kBlocks>(p, params.q_tiles, params.pair_group, kTile.rows(), own, number);
        const int64_t first = own.sequence.q_begin + own.first;
        finish_rows<T, true, kBias>(
            params, state, tile_queries + group * kQueryBytes + first_row % kRows * (kWidth * 2),
            warp, scale, unit,
            Place{params, number,
                  static_cast<T*>(params.out.data) + own.batch * params.out.batch +
                      first * params.out.row + own.head * params.out.head,
                  static_cast<float*>(params.lse.data) + own.batch * params.lse.batch +
                      own.head * params.lse.head + first * params.lse.row});
      }
      barrier_arrive(&barriers.queries_empty[query_slot]);
    });
  }

  struct Place {
    const ForwardParams& params;
    uint32_t number;
    T* first_out;
    float* first_lse;
    T* out() const { return first_out; }
    float* lse() const { return first_lse; }
    void redo(int row) const { redo_row_of(params, number, row); }
  };
  static __noinline__ void redo_row_of(const ForwardParams& params, uint32_t number, int row) {
    redo_row<T, kTile.rows(), kBlocks>(params, number, row);
  }

  // With a block mask: whether this is the last thread block, or the only one, of those that share
  // the tile. `state` is the tile's then.
  bool join(RunningRows<1, kWidth / 8>& state, const Tile& tile, float unit) const {
    struct Workers {
      int number() const { return static_cast<int>(threadIdx.x) - kWarpgroupSize; }
      void meet() const { named_wait(kAllGroups, kGroups * kWarpgroupSize); }
    };
    const SeenOwner owner = params.problem.blocks.owners[tile.queries.owner];
    if (owner.parts == 1) return true;
    const Workers workers;
    const int64_t plane = int64_t{tile.queries.batch} * params.problem.heads + tile.queries.head;
    return join_parts<kGroups * kWarpgroupSize>(state, params, owner, plane, unit, workers.number(),
                                                workers);
  }

  void take_keys(RunningRows<1, kWidth / 8>& state, const Tile& tile, int first_item,
                 uint32_t own_queries, int group, int first_row, int lane, float unit) const {
    const int first_query = static_cast<int>(tile.queries.first), count = tile.keys.count;
    const uint64_t plane =
        static_cast<uint64_t>(tile.queries.batch) * params.problem.heads + tile.queries.head;
    const KeySpan unmasked = seen_by_all(tile.band, first_query, first_query + tile.rows - 1);
    const auto wait_for = [&](int n) {
      const int item = first_item + n;
      barrier_wait(&barriers.full[item % kSlots], item / kSlots & 1);
      fence_async_proxy();
      return ring + item % kSlots * kSlotBytes;
    };
    const auto release = [&](int n) {
      if (kAllRelease || lane == 0) barrier_arrive(&barriers.empty[(first_item + n) % kSlots]);
    };
    // A part of the n-th tile of keys, as Barriers::seen has it.
    const auto seen_part = [&](int n, int part) {
      uint32_t words[4];
      load_shared(words, shared_address(&barriers.seen[(first_item / 2 + n) % kSlots][part]));
      return SeenTile{static_cast<int>(words[0]), words[1], 0, 0, 0};
    };
    const auto add_terms = [&](float(&s)[1][kKeys / 8][4], int n) {
      if constexpr (kBias) {
        add_bias(s, params.problem.scale,
                 Bias(bias_tile(first_item + 2 * n, group), first_row % kRows, lane));
      }
    };
    const auto hide_unseen = [&](float(&s)[1][kKeys / 8][4], int n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        constexpr int kTiles = kPartKeys / 8;
        int key;
        if constexpr (kBlocks) {
          constexpr uint32_t kSquares = all_squares(kPartKeys, 16);
          const SeenTile seen = seen_part(n, part);
          const uint32_t squares = seen.squares >> first_row / 16 & kSquares;
          key = seen.tile * kPartKeys;
          if (squares != kSquares) {
            hide_squares(s, part * kTiles, (part + 1) * kTiles, squares, lane);
          }
        } else {
          key = tile.keys.key(n, part);
        }
        if (!unmasked.covers(key, kPartKeys)) {
          hide(s, part * kTiles, (part + 1) * kTiles, tile.band, first_query + first_row, key,
               lane);
        }
      }
    };
    const auto drop_some = [&](float(&s)[1][kKeys / 8][4], int n) {
      if constexpr (kDropout) {
        drop(s, dropout, plane, first_query + first_row, tile.keys.key(n, 0), lane);
      }
    };
    float s[1][kKeys / 8][4] = {};
    uint32_t weights[kKeys / 16][4];
    const uint32_t first_tile = wait_for(0);
    keep_in_place(s[0]);
    product_fence();
    ask_for_scores<T, kWidth, kRows, kKeys>(s[0], own_queries, first_tile);
    product_commit();
    product_wait<0>();
    keep_in_place(s[0]);
    add_terms(s, 0);
    release(0);
    hide_unseen(s, 0);
    state.template take<kBias>(s, unit);
    drop_some(s, 0);
    pack_weights<T>(weights, s[0]);
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      const uint32_t k_tile = wait_for(2 * n), v_tile = wait_for(2 * n - 1);
      keep_in_place(s[0]);
      keep_in_place(state.out[0]);
      if (kTurns) await_turn(group);
      product_fence();
      ask_for_scores<T, kWidth, kRows, kKeys>(s[0], own_queries, k_tile);
      product_commit();
      ask_for_outputs<T, kWidth / 8, kKeys>(state.out[0], weights, v_tile);
      product_commit();
      if (kTurns) pass_turn(group);
      product_wait<1>();
      keep_in_place(s[0]);
      add_terms(s, n);
      release(2 * n);
      hide_unseen(s, n);
      float correction[2] = {1, 1};
      bool rises = false;
      state.template take<kBias>(s, unit, [&](int, const float(&by)[2]) {
        rises = true;
        correction[0] = by[0];
        correction[1] = by[1];
      });
      drop_some(s, n);
      product_wait<0>();
      keep_in_place(state.out[0]);
      release(2 * n - 1);
      if (rises) state.rescale(0, correction);
      pack_weights<T>(weights, s[0]);
    }
    const uint32_t v_tile = wait_for(2 * count - 1);
    keep_in_place(state.out[0]);
    product_fence();
    ask_for_outputs<T, kWidth / 8, kKeys>(state.out[0], weights, v_tile);
    product_commit();
    product_wait<0>();
    keep_in_place(state.out[0]);
    release(2 * count - 1);
  }
};

template <class T, HopperTile kTile>
void hopper_forward(const ForwardParams& params) {
  using Forward = HopperForward<T, kTile>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ typename Forward::Barriers barriers;
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : barriers.full) barrier_init(&barrier, kWarpgroupSize);
    for (uint64_t& barrier : barriers.empty) barrier_init(&barrier, Forward::kReleasers);
    for (uint64_t& barrier : barriers.queries_full) barrier_init(&barrier, kWarpgroupSize);
    for (uint64_t& barrier : barriers.queries_empty) {
      barrier_init(&barrier, kTile.groups * kWarpgroupSize);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const uint32_t queries = (shared_address(shared) + 1023) & ~1023u;
  const Forward forward{params,
                        barriers,
                        queries,
                        queries + kTile.query_slots * kTile.groups * Forward::kQueryBytes,
                        queries + kTile.query_slots * kTile.groups * Forward::kQueryBytes +
                            kTile.slots * Forward::kSlotBytes,
                        Forward::kDropout ? params.problem.dropout.for_warp() : Dropout()};
  const int group = uniform(static_cast<int>(threadIdx.x / kWarpgroupSize)) - 1;
  if (group < 0) {
    give_registers<kTile.copy_registers>();
    forward.copy();
  } else {
    take_registers<kTile.work_registers>();
    forward.work(group);
  }
}

}  // namespace pullback::attention

// d_bias of a bias that is broadcast over the batch or the heads, or over them and the queries, on
// Hopper's tensor cores: what smxx_backward_bias.cuh does, for problems with neither softcap nor
// block mask, from rows that begin at 16 bytes.
//
// A thread block owns 128 keys and kHalves · 64 queries of the bias. For each item that maps to
// them, a head of a batch item, it makes dS once more and adds it up in registers; two warpgroups
// have 64 of the keys each:
//
//   S^T = K Q^T, dP^T = V dO^T    64 keys x 64 queries, both from shared memory
//   dS^T = P^T (dP^T - delta)
//
// Shared memory: two stages, of an item each, of keys, values, queries and d_out, in panels of 64
// columns (device/wgmma.cuh); the bias [query][key]; statistics. All threads copy an item ahead.
#pragma once

#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_bias.cuh"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"
#include "ops/attention/cuda/smxx_backward_bias.cuh"

namespace pullback::attention {

template <class T, HopperBiasTile kTile, int kStatsRows>
struct HopperBiasGradient {
  static constexpr int kWidth = kTile.width, kPanels = kTile.panels();
  static constexpr int kKeys = kTile.keys, kHalves = kTile.halves, kQueries = kTile.queries();
  static constexpr int kThreads = kTile.threads, kRows = 64, kTiles = kRows / 8;
  static constexpr uint32_t kKeyBytes = kPanels * kKeys * kPanelRow;
  static constexpr uint32_t kHalfBytes = kPanels * kRows * kPanelRow;  // of queries, or of d_out
  static constexpr uint32_t kStageBytes = 2 * kKeyBytes + 2 * kHalves * kHalfBytes;
  static constexpr uint32_t kBiasBytes = kRows * kKeys * 2;  // of a half
  static constexpr uint32_t kStatsBytes = kQueries * 8;

  const BackwardParams& p;
  const TilePlace& place;  // of the keys, of no item
  const TileRange range;   // tiles of 64 queries that see some of them
  const uint32_t tiles, biases, stats;
  const int thread, lane, row;  // row: the warp's first key
  const Dropout dropout;
  float sum[kHalves][kTiles][4] = {};

  HopperBiasGradient(const BackwardParams& params, const TilePlace& keys, uint32_t shared)
      : p(params),
        place(keys),
        range(query_tiles_of(keys, keys.tile, kKeys, kRows)),
        tiles(shared),
        biases(tiles + kTile.stages * kStageBytes),
        stats(biases + kHalves * kBiasBytes),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        row(uniform(thread / 32) * 16),
        dropout(kTile.dropout ? params.problem.dropout.for_warp() : Dropout()) {}

  bool seen(const BiasItem& item) const {
    return item.query_tile * kHalves < range.end && (item.query_tile + 1) * kHalves > range.begin;
  }

  template <int kTileRows>
  void copy(uint32_t tile, const HeadRows& of, const BiasItem& item, int64_t head, int first,
            int rows, int columns) const {
    const T* const from = static_cast<const T*>(of.data) + item.batch * of.batch + head * of.head +
                          int64_t{first} * of.row;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = panel * kPanel;
      TileLoader<T, kTileRows, kPanel, kThreads, true>(from + column, of.row, 1, columns - column)
          .load(tile + panel * (kTileRows * kPanelRow), 0, rows - first);
    }
  }
  void copy(const BiasItem& item, int stage) const {
    const int head_dim = p.problem.head_dim, value_dim = p.problem.value_dim;
    const int64_t kv_head = item.head / p.problem.group;
    const int key = place.tile * kKeys, query = item.query_tile * kQueries;
    uint32_t to = tiles + stage * kStageBytes;
    copy<kKeys>(to, p.k, item, kv_head, key, place.k_length, head_dim);
    copy<kKeys>(to + kKeyBytes, p.v, item, kv_head, key, place.k_length, value_dim);
    to += 2 * kKeyBytes;
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half, to += 2 * kHalfBytes) {
      const int first = query + half * kRows;
      if (first >= place.q_length) break;
      copy<kRows>(to, p.q, item, item.head, first, place.q_length, head_dim);
      copy<kRows>(to + kHalfBytes, p.d_out, item, item.head, first, place.q_length, value_dim);
    }
    copy_stats<kQueries, kThreads, kStatsRows>(p, stats + stage * kStatsBytes,
                                               item.batch * p.problem.heads + item.head, query);
  }
  // The same for all items.
  void copy_biases(const BiasItem& item) const {
    TilePlace own = place;
    own.batch = item.batch;
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      copy_bias<T, kKeys, kRows, kThreads>(biases + half * kBiasBytes, p, own,
                                           static_cast<int>(item.head),
                                           item.query_tile * kHalves + half);
    }
  }

  void add(const BiasItem& item, int stage) {
    const uint32_t own = row / 64 * (64 * kPanelRow), first = tiles + stage * kStageBytes;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int tile = item.query_tile * kHalves + half;
      if (tile < range.begin || tile >= range.end) continue;
      const uint32_t q_tile = first + 2 * kKeyBytes + half * (2 * kHalfBytes);
      float s[kTiles][4] = {}, d_p[kTiles][4] = {};
      product_fence();
      ask_for_scores<T, kWidth, kKeys, kRows>(s, first + own, q_tile);
      product_commit();
      ask_for_scores<T, kWidth, kKeys, kRows>(d_p, first + kKeyBytes + own, q_tile + kHalfBytes);
      product_commit();
      const int key = place.tile * kKeys + row;
      uint32_t kept = 0;
      if constexpr (kTile.dropout) {
        const auto plane = static_cast<uint64_t>(item.batch * p.problem.heads + item.head);
        kept = draw_kept<kRows>(dropout, plane, tile * kRows, key, lane);
      }
      product_wait<1>();
      keep_in_place(s);
      // Behind a bias of −inf nothing is seen, whatever the score.
      for_each_addend<T, kKeys, kTiles>(
          biases + half * kBiasBytes, row, lane, [&](int n, const float(&addend)[4]) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float score = __fmaf_rn(s[n][e], p.problem.scale, addend[e]);
              s[n][e] = addend[e] == -infinity<float>() ? addend[e] : score;
            }
          });
      if (pairs_seen(place, key, tile * kRows, 16, kRows) != Seen::all) {
        hide_unseen(s, SeenQueries(place, key, tile * kRows, lane));
      }
      product_wait<0>();
      keep_in_place(d_p);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float of_queries[4];  // lse and delta of two
        load_shared_floats(
            of_queries, stats + stage * kStatsBytes + half * (kRows * 8) + n * 64 + lane % 4 * 16);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float lse = of_queries[e % 2 * 2], delta = of_queries[e % 2 * 2 + 1];
          const float chance = exp2_approx((s[n][e] - lse) * kLog2E);
          float gradient = d_p[n][e];
          if constexpr (kTile.dropout) {
            gradient = keeps(kept, n, e) ? gradient * p.problem.keep_scale : 0;
          }
          if (s[n][e] != -infinity<float>()) sum[half][n][e] += chance * (gradient - delta);
        }
      }
    }
  }

  // Of the bias's own queries and keys, through shared memory: rows of the result are queries.
  void store_tiles(const BiasItem& own) const {
    TilePlace to = place;
    to.batch = own.batch;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t words[kTiles / 2][4];
      pack_weights<T>(words, sum[half]);
      __syncthreads();
      store_operands<T>(tiles, words, row + lane / 4, lane % 4);
      __syncthreads();
      store_bias<T, kKeys, kRows, kThreads / 32, false>(
          p, to, static_cast<int>(own.head), own.query_tile * kHalves + half, tiles, thread);
    }
  }
  template <class Store>
  void store_elements(const BiasItem& own, const Store& store) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t i = own.query_tile * kQueries + half * kRows + 8 * n + lane % 4 * 2 + e % 2;
          const int64_t j = place.tile * kKeys + row + lane / 4 + e / 2 * 8;
          if (i < place.q_length && j < place.k_length) store(i, j, sum[half][n][e]);
        }
      }
    }
  }
  // Of a bias of the keys alone.
  template <class Store>
  void store_keys(const Store& store) const {
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      float total = 0;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) total += sum[half][n][2 * key] + sum[half][n][2 * key + 1];
      }
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const int j = place.tile * kKeys + row + lane / 4 + key * 8;
      if (lane % 4 == 0 && j < place.k_length) store(0, j, total);
    }
  }
};

template <class T, HopperBiasTile kTile, int kStatsRows>
void hopper_bias_gradient(const BackwardParams& p) {
  using Gradient = HopperBiasGradient<T, kTile, kStatsRows>;
  extern __shared__ __align__(128) unsigned char shared[];
  BiasItems items(p, kTile.keys, kTile.queries());
  const BiasItem first = items.own();
  TilePlace place = place_of<true>(p, first.batch * p.problem.heads + first.head, p.problem.heads,
                                   0, kTile.queries());
  place.tile = first.key_tile;
  Gradient gradient(p, place, (shared_address(shared) + 1023) & ~1023u);
  const auto next_seen = [&](BiasItem& item) {
    while (items.next(item)) {
      if (gradient.seen(item)) return true;
    }
    return false;
  };
  BiasItem item, ahead;
  bool exists = uniform(next_seen(item)) != 0;
  if (exists) {
    gradient.copy_biases(first);
    gradient.copy(item, 0);
  }
  async_commit();
#pragma unroll 1
  for (int stage = 0; exists; stage = 1 - stage) {
    exists = uniform(next_seen(ahead)) != 0;
    if (exists) gradient.copy(ahead, 1 - stage);
    async_commit();
    async_wait<1>();
    fence_async_proxy();
    __syncthreads();
    gradient.add(item, stage);
    __syncthreads();
    item = ahead;
  }
  const BiasStore<T> store(p, items.part, first.batch, first.head);
  if (items.all_queries) {
    gradient.store_keys(store);
  } else if (p.bias_parts == 1) {
    gradient.store_tiles(first);
  } else {
    gradient.store_elements(first, store);
  }
}

}  // namespace pullback::attention

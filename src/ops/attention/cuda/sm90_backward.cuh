// Gradients of attention on Hopper's tensor cores: the formulas, and the order of the sums, of
// smxx_backward.cuh, without bias, softcap, dropout and block mask, and always all of d_q, d_k,
// d_v.
//
// A thread block owns 128 keys of a key/value head and takes 64 queries a step. The first warpgroup
// has two warps that copy queries, d_out and statistics, and two that add the step's part of d_q to
// those of other blocks when its turn comes. The other warpgroups have 64 keys each:
//
//   S^T = K Q^T, dP^T = V dO^T    64 keys x 64 queries, both from shared memory
//   dV += P^T dO, dK += dS^T Q    P and dS from the registers that they were made in
//   dQ = dS K                     of all 128 keys, half of the width each
//
// Shared memory: keys, values, and keys without NaN and infinity for dQ, if there are such; a ring
// of queries and d_out; two tiles dS^T [key][query]; dQ, as the threads hold it; a ring of
// statistics. What products read is in panels of 64 columns (device/wgmma.cuh).
#pragma once

#include "device/bulk.cuh"
#include "device/bulk_out.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"

namespace pullback::attention {

// The named barrier of both warpgroups that work.
inline constexpr int kBothGroups = 1;

inline int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

template <class T, HopperBackwardTile kTile>
struct HopperBackward {
  static constexpr int kWidth = kTile.width, kPanels = kTile.panels();
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kGroups = kTile.groups;
  static constexpr int kStages = kTile.stages;
  static constexpr int kSumWidth = kTile.sum_width();
  static constexpr int kOwnKeys = kKeys / kGroups, kOwnWidth = kSumWidth / kGroups;
  static constexpr int kTiles = kWidth / 8, kQueryTiles = kQueries / 8, kOwnTiles = kOwnWidth / 8;
  static constexpr int kWorkers = kGroups * kWarpgroupSize;
  static constexpr int kCopiers = kWarpgroupSize / 2;  // threads
  static constexpr int kAdders = 2;                    // warps, of which one thread works

  using Stats = StatsTile<float, kQueries>;
  using Panel = TileLayout<T, kPanel>;
  using Words = uint32_t[kQueryTiles / 2][4];  // P^T or dS^T, as operands

  static constexpr uint32_t kKeyBytes = kPanels * kKeys * kPanelRow;
  static constexpr uint32_t kQueryBytes = kPanels * kQueries * kPanelRow;
  static constexpr uint32_t kScoreBytes = kKeys * kPanelRow;
  static constexpr uint32_t kSumBytes = kQueries * kSumWidth * 4;

  struct Shared {
    BlockPlace place;
    bool finite_keys;
    uint64_t keys_full, full[kStages], empty[kStages], sums_full[kAdders], sums_empty;
  };

  const BackwardParams& p;
  Shared& shared;
  const BlockPlace& block;
  const TilePlace& place;
  const int first_query_tile, end_query_tile, group_heads;
  const uint32_t k_tile, v_tile, finite_k_tile, q_tiles, d_out_tiles, ds_tiles, sums_tile,
      stats_tiles;

  HopperBackward(const BackwardParams& params, Shared& statics, uint32_t tiles)
      : p(params),
        shared(statics),
        block(statics.place),
        place(statics.place.keys),
        first_query_tile(uniform(block.queries.begin)),
        end_query_tile(uniform(block.queries.end)),
        group_heads(uniform(params.problem.group)),
        k_tile(tiles),
        v_tile(k_tile + kKeyBytes),
        finite_k_tile(v_tile + kKeyBytes),
        q_tiles(finite_k_tile + kKeyBytes),
        d_out_tiles(q_tiles + kStages * kQueryBytes),
        ds_tiles(d_out_tiles + kStages * kQueryBytes),
        sums_tile(ds_tiles + 2 * kScoreBytes),
        stats_tiles(sums_tile + kSumBytes) {}

  // Calls work(tile of queries, head of the group, number) for the steps of this thread block, as
  // BackwardSteps has them.
  template <class Work>
  void for_each_step(const Work& work) const {
    int number = 0;
#pragma unroll 1
    for (int tile = end_query_tile - 1; tile >= first_query_tile; --tile) {
#pragma unroll 1
      for (int head = 0; head < group_heads; ++head, ++number) work(tile, head, number);
    }
  }
  int head_of(int head_of_group) const { return place.head * p.problem.group + head_of_group; }
  T* rows_of(const HeadRows& rows, int head, int64_t row) const {
    return static_cast<T*>(rows.data) + place.batch * rows.batch + head * rows.head +
           row * rows.row;
  }

  // --- The warps that copy ---

  // `rows` more rows exist from the first one on.
  template <int kRows>
  void load(uint32_t tile, const HeadRows& of, int head, int64_t first, int rows,
            int columns) const {
    const T* const from = rows_of(of, head, first);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = panel * kPanel;
      TileLoader<T, kRows, kPanel, kCopiers, true>(from + column, of.row, 1, columns - column)
          .load(tile + panel * (kRows * kPanelRow), 0, rows);
    }
  }

  void copy() const {
    const int head_dim = p.problem.head_dim, value_dim = p.problem.value_dim;
    const int key = place.tile * kKeys;
    load<kKeys>(k_tile, p.k, place.head, place.k_begin + key, place.k_length - key, head_dim);
    load<kKeys>(v_tile, p.v, place.head, place.k_begin + key, place.k_length - key, value_dim);
    barrier_arrive_after_copies(&shared.keys_full);
    wait_for_previous_kernel();  // for statistics
    for_each_step([&](int tile, int head_of_group, int number) {
      const int stage = number % kStages, round = number / kStages;
      if (round > 0) barrier_wait(&shared.empty[stage], (round - 1) & 1);
      const int query = tile * kQueries, left = place.q_length - query;
      const int head = head_of(head_of_group);
      load<kQueries>(q_tiles + stage * kQueryBytes, p.q, head, place.q_begin + query, left,
                     head_dim);
      load<kQueries>(d_out_tiles + stage * kQueryBytes, p.d_out, head, place.q_begin + query, left,
                     value_dim);
      const uint32_t byte = threadIdx.x * 16;
      if (byte < sizeof(Stats)) {
        const auto* const from =
            static_cast<const Stats*>(p.stats) +
            ((block.pair * p.problem.group + head_of_group) * p.q_tiles + place.first_tile + tile);
        async_copy_or_zero(stats_tiles + stage * sizeof(Stats) + byte,
                           reinterpret_cast<const char*>(from) + byte, true);
      }
      barrier_arrive_after_copies(&shared.full[stage]);
    });
    async_wait<0>();
  }

  // --- The warps that add up d_q ---

  // A step's turn to add to d_q of its queries.
  struct Turn {
    int number;
    bool last;
    int64_t line;  // among those of all planes

    bool adds_sums() const { return last && number > 0; }
  };
  Turn turn_of(int tile, int head_of_group) const {
    const TileRange keys = key_tiles_of(place, tile, kKeys, kQueries);
    const int number = place.tile - keys.begin;
    return {number, number + 1 == keys.end - keys.begin,
            (block.pair * p.problem.group + head_of_group) * p.lines + place.first_tile + tile};
  }
  void await(const Turn& turn) const {
    while (load_acquire(p.turns + turn.line) < turn.number) {
    }
  }
  float* sums_of(const Turn& turn) const {
    const int64_t line = turn.line - p.first_pair * p.problem.group * p.lines;
    return p.sums + line * (kQueries * kSumWidth);
  }

  // Of two steps each takes one: turns, and the writes that they wait for, take longer than a step.
  // By one thread.
  void add_queries(int adder) const {
    wait_for_previous_kernel();  // for turns
    for_each_step([&](int tile, int head_of_group, int number) {
      if (number % kAdders != adder) return;
      const Turn turn = turn_of(tile, head_of_group);
      if (!turn.last) {
        await(turn);
        fence_async_proxy();
      }
      barrier_wait(&shared.sums_full[adder], number / kAdders & 1);
      if (!turn.last) {
        float* const sums = sums_of(turn);
        turn.number == 0 ? bulk_store(sums, sums_tile, kSumBytes)
                         : bulk_add(sums, sums_tile, kSumBytes);
        bulk_commit();
        bulk_wait_read();
      }
      barrier_arrive(&shared.sums_empty);
      if (!turn.last) {
        bulk_wait();
        fence_device();
        store_relaxed(p.turns + turn.line, turn.number + 1);
      }
    });
  }

  // --- The warpgroups that work ---

  struct Worker {
    int group, lane, row;  // row: the warp's first key of the tile
    int thread;            // of both warpgroups
  };

  // What a thread has of S^T and dP^T: [n][2 · half + c] is key lane / 4 + 8 · half of the warp's
  // 16 and query 8 · n + lane % 4 · 2 + c. Of each half the queries that see the key, by 8 · n + c.
  struct SeenQueries {
    int begin[2];
    uint32_t count[2];

    bool covers(int n, int e) const {
      return static_cast<uint32_t>(8 * n + e % 2 - begin[e / 2]) < count[e / 2];
    }
  };
  SeenQueries seen_queries(const Worker& worker, int tile) const {
    const int first = tile * kQueries + worker.lane % 4 * 2;
    SeenQueries seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = place.tile * kKeys + worker.row + worker.lane / 4 + 8 * half;
      const int begin = key - place.highest, end = key - place.lowest + 1;
      const int last = key >= place.k_length ? begin : end < place.q_length ? end : place.q_length;
      seen.begin[half] = begin - first;
      seen.count[half] = last > begin ? last - begin : 0;
    }
    return seen;
  }

  // Each in place and in a branch without another side: with two sides the compiler lacks registers
  // for the products that run meanwhile.
  void hide_unseen(float (&s)[kQueryTiles][4], const SeenQueries& seen) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = seen.covers(n, e) ? s[n][e] : -infinity<float>();
    }
  }
  // Unseen chances become -0, which others are not. (Of a row whose lse is NaN they are not 0.)
  void mark_unseen(float (&s)[kQueryTiles][4], const SeenQueries& seen) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = seen.covers(n, e) && s[n][e] != 0 ? s[n][e] : -0.0f;
    }
  }
  // The same gradients become -0.
  void mark_unseen(Words& gradients, const Words& chances) const {
#pragma unroll
    for (int step = 0; step < kQueryTiles / 2; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t& word = gradients[step][e];
        if ((chances[step][e] & 0xffffu) == kUnseenBits) word = (word & ~0xffffu) | kUnseenBits;
        if (chances[step][e] >> 16 == kUnseenBits) word = (word & 0xffffu) | kUnseenBits << 16;
      }
    }
  }

  // P^T, then dS^T, in place of S^T.
  void make_chances(float (&s)[kQueryTiles][4], uint32_t stats, int lane) const {
    const float factor = p.problem.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float row[4];  // lse, delta of two queries
      load_shared_floats(row, stats + static_cast<uint32_t>(n * 64 + lane % 4 * 16));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(s[n][e] * factor - row[e % 2 * 2]);
    }
  }
  void make_gradients(float (&s)[kQueryTiles][4], const float (&d_p)[kQueryTiles][4],
                      uint32_t stats, int lane) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float row[4];
      load_shared_floats(row, stats + static_cast<uint32_t>(n * 64 + lane % 4 * 16));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= d_p[n][e] - row[e % 2 * 2 + 1];
    }
  }

  // To the warp's rows of a tile [key][query].
  void store_scores(uint32_t tile, const Words& words, const Worker& worker) const {
    const int own_row = worker.row + worker.lane / 4;
#pragma unroll
    for (int step = 0; step < kQueryTiles / 2; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        store_shared(tile + Panel::offset(own_row + e % 2 * 8, 2 * step + e / 2) +
                         static_cast<uint32_t>(worker.lane % 4 * 4),
                     words[step][e]);
      }
    }
  }

  // By both warpgroups. NaN and infinity become 0.
  void copy_finite(uint32_t to, uint32_t from, uint32_t bytes, int thread) const {
    for (uint32_t at = thread * 4; at < bytes; at += kWorkers * 4) {
      store_shared(to + at, finite_or_zero<T>(load_shared_word(from + at)));
    }
  }

  // By both: whether keys and values are finite; else the keys' copy is made.
  bool check_keys(const Worker& worker) const {
    uint32_t sum = 0;
#pragma unroll 4
    for (uint32_t at = worker.thread * 16; at < 2 * kKeyBytes; at += kWorkers * 16) {
      uint32_t words[4];
      load_shared(words, k_tile + at);
#pragma unroll
      for (const uint32_t pair : words) sum = add_extreme<T>(sum, pair);
    }
    if (low_not_finite<T>(sum) || high_not_finite<T>(sum)) shared.finite_keys = false;
    named_wait(kBothGroups, kWorkers);
    if (shared.finite_keys) return true;
    copy_finite(finite_k_tile, k_tile, kKeyBytes, worker.thread);
    return false;
  }

  // By both: rows of q and d_out with NaN or infinity, which unseen weights must not meet.
  void clean_rows(float (&d_v)[kTiles][4], const Words& weights, uint32_t ds_tile, uint32_t q_tile,
                  uint32_t d_out_tile, const Worker& worker) const {
    store_scores(ds_tile, weights, worker);
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      constexpr int kPanelTiles = kPanel / 8;
      add_not_finite<T, kPanel, kQueries>(
          reinterpret_cast<float(&)[1][kPanelTiles][4]>(d_v[panel * kPanelTiles]), ds_tile,
          worker.row, d_out_tile + panel * (kQueries * kPanelRow), 0, kQueries, 0, worker.lane);
    }
    named_wait(kBothGroups, kWorkers);  // the scores of both are made
    copy_finite(q_tile, q_tile, kQueryBytes, worker.thread);
    copy_finite(d_out_tile, d_out_tile, kQueryBytes, worker.thread);
    fence_async_proxy();
    named_wait(kBothGroups, kWorkers);
  }

  void work(int group) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroupSize;
    const Worker worker{group, thread % 32, thread / 32 * 16, thread};
    float d_k[kTiles][4] = {}, d_v[kTiles][4] = {};
    if (first_query_tile < end_query_tile) {
      barrier_wait(&shared.keys_full, 0);
      const bool finite_keys = uniform(check_keys(worker)) != 0;
      fence_async_proxy();
      const uint32_t keys_of_d_q = finite_keys ? k_tile : finite_k_tile;
      for_each_step([&](int tile, int head_of_group, int number) {
        take_step(d_k, d_v, worker, tile, head_of_group, number, finite_keys, keys_of_d_q);
      });
    }
    const int limit = place.extent < kKeys ? place.extent : kKeys;
    const auto store = [&](const HeadRows& rows, int columns, const float(&sum)[kTiles][4],
                           float factor) {
      const GradientStore<T, false> to{
          rows,       rows_of(rows, place.head, place.k_begin + int64_t{place.tile} * kKeys),
          worker.row, limit,
          0,          columns,
          factor};
      to.template pieces<true>(reinterpret_cast<const float(&)[1][kTiles][4]>(sum), worker.lane,
                               true);
    };
    store(p.d_k, p.problem.head_dim, d_k, p.problem.scale);
    store(p.d_v, p.problem.value_dim, d_v, 1.0f);
  }

  // Both warpgroups meet once a step, when dS is there. d_v and d_k come in beside dQ and its way
  // out; before the next step all have.
  __forceinline__ void take_step(float (&d_k)[kTiles][4], float (&d_v)[kTiles][4],
                                 const Worker& worker, int tile, int head_of_group, int number,
                                 bool finite_keys, uint32_t keys_of_d_q) const {
    const int stage = number % kStages, lane = worker.lane;
    const uint32_t q_tile = q_tiles + stage * kQueryBytes;
    const uint32_t d_out_tile = d_out_tiles + stage * kQueryBytes;
    const uint32_t stats = stats_tiles + stage * sizeof(Stats);
    const uint32_t ds_tile = ds_tiles + number % 2 * kScoreBytes;
    const uint32_t own_keys = worker.group * (kOwnKeys * kPanelRow);
    barrier_wait(&shared.full[stage], number / kStages & 1);
    fence_async_proxy();
    const bool suspicious = load_shared_word(stats + kQueries * 8) != 0;
    const bool whole = tile >= block.whole.begin && tile < block.whole.end;
    const bool partly = !whole && pairs_seen(place, place.tile * kKeys + worker.group * kOwnKeys,
                                             tile * kQueries, kOwnKeys, kQueries) != Seen::all;
    const bool marked = suspicious || !finite_keys;
    float s[kQueryTiles][4] = {}, d_p[kQueryTiles][4] = {};
    Words chances, gradients;
    product_fence();
    ask_for_scores<T, kWidth, kKeys, kQueries>(s, k_tile + own_keys, q_tile);
    product_commit();
    ask_for_scores<T, kWidth, kKeys, kQueries>(d_p, v_tile + own_keys, d_out_tile);
    product_commit();
    product_wait<1>();
    keep_in_place(s);
    if (partly) hide_unseen(s, seen_queries(worker, tile));
    make_chances(s, stats, lane);
    if (marked) mark_unseen(s, seen_queries(worker, tile));
    pack_weights<T>(chances, s);
    product_wait<0>();
    keep_in_place(d_p);
    make_gradients(s, d_p, stats, lane);
    pack_weights<T>(gradients, s);
    if (marked) mark_unseen(gradients, chances);
    if (suspicious) {
      keep_in_place(d_v);
      clean_rows(d_v, chances, ds_tile, q_tile, d_out_tile, worker);
    }
    store_scores(ds_tile, gradients, worker);
    fence_async_proxy();
    keep_in_place(d_v);
    product_fence();
    ask_for_outputs<T, kTiles, kQueries>(d_v, chances, d_out_tile);
    product_commit();
    named_wait(kBothGroups, kWorkers);  // dS of both is there
    auto& d_q = reinterpret_cast<float(&)[kOwnTiles][4]>(s);
    const Turn turn = turn_of(tile, head_of_group);
    const int sums_thread = worker.group * (kOwnTiles * kWarpgroupSize) +
                            worker.thread % kWarpgroupSize;  // in pieces of four
    if (turn.adds_sums()) {
      if (lane == 0) await(turn);
      __syncwarp();
      const float* const sums = sums_of(turn) + sums_thread * 4;
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) load_past_l1(d_q[n], sums + n * (kWarpgroupSize * 4));
    }
    keep_in_place(d_q);
    keep_in_place(d_k);
    product_fence();
    ask_for_queries(d_q, ds_tile, keys_of_d_q, worker.group, turn.adds_sums());
    product_commit();
    ask_for_outputs<T, kTiles, kQueries>(d_k, gradients, q_tile);
    product_commit();
    product_wait<1>();
    keep_in_place(d_q);
    if (number > 0) barrier_wait(&shared.sums_empty, (number - 1) & 1);
    if (turn.last) {
      store_queries(tile, head_of(head_of_group), d_q, worker);
    } else {
      hand_over(d_q, sums_thread);
    }
    barrier_arrive(&shared.sums_full[number % kAdders]);
    product_wait<0>();
    keep_in_place(d_v);
    keep_in_place(d_k);
    __syncwarp();  // all lanes have read their statistics
    if (lane == 0) barrier_arrive(&shared.empty[stage]);
  }

  // dS K, the warpgroup's columns.
  __forceinline__ void ask_for_queries(float (&d_q)[kOwnTiles][4], uint32_t ds_tile, uint32_t keys,
                                       int group, bool adds) const {
    const uint32_t column = group * kOwnWidth;
    const MatrixAddress rows(ds_tile);
    const MatrixAddress columns(keys + column / kPanel * (kKeys * kPanelRow) + column % kPanel * 2);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      product_of_transposed<T>(d_q, rows.at(step * (16 * kPanelRow)),
                               columns.at(step * (16 * kPanelRow)), step > 0 || adds);
    }
  }

  // To the warps that add them up.
  void hand_over(const float (&d_q)[kOwnTiles][4], int sums_thread) const {
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      const uint32_t piece[4] = {__float_as_uint(d_q[n][0]), __float_as_uint(d_q[n][1]),
                                 __float_as_uint(d_q[n][2]), __float_as_uint(d_q[n][3])};
      store_shared(sums_tile + (sums_thread + n * kWarpgroupSize) * 16, piece);
    }
    fence_async_proxy();
  }

  void store_queries(int tile, int head, const float (&d_q)[kOwnTiles][4],
                     const Worker& worker) const {
    const int query = tile * kQueries;
    const int64_t all =
        p.problem.sequences == nullptr ? place.q_length : p.problem.sequences[place.batch].q_extent;
    const int rows = static_cast<int>(all - query < kQueries ? all - query : kQueries);
    const GradientStore<T, false> store{p.d_q,
                                        rows_of(p.d_q, head, place.q_begin + query),
                                        worker.row % kOwnKeys,
                                        rows,
                                        worker.group * kOwnWidth,
                                        p.problem.head_dim,
                                        p.problem.scale};
    store.template pieces<true>(reinterpret_cast<const float(&)[1][kOwnTiles][4]>(d_q), worker.lane,
                                true);
  }
};

template <class T, HopperBackwardTile kTile>
void hopper_backward(const BackwardParams& p) {
  using Backward = HopperBackward<T, kTile>;
  extern __shared__ __align__(128) char tiles[];
  __shared__ typename Backward::Shared shared;
  if (threadIdx.x < 32) {
    const BlockPlace found = block_place<Backward::kKeys, Backward::kQueries, false>(p);
    if (threadIdx.x == 0) {
      shared.place = found;
      shared.finite_keys = true;
      barrier_init(&shared.keys_full, Backward::kCopiers);
      for (uint64_t& barrier : shared.full) barrier_init(&barrier, Backward::kCopiers);
      for (uint64_t& barrier : shared.empty) barrier_init(&barrier, Backward::kWorkers / 32);
      for (uint64_t& barrier : shared.sums_full) barrier_init(&barrier, Backward::kWorkers);
      barrier_init(&shared.sums_empty, 1);
      barrier_init_fence();
    }
  }
  __syncthreads();
  if (!shared.place.keys.exists) return;
  const Backward backward(p, shared, (shared_address(tiles) + 1023) & ~1023u);
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

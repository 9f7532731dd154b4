// Gradients of attention in f16 and bf16 on tensor cores, one kernel. For a tile of keys, over all
// tiles of queries that see it:
//
//   S^T  = K Q^T          P^T  = exp2(scale · log2 e · S^T - lse)
//   dP^T = V dO^T         dS^T = P^T (dP^T - delta)
//   dV  += P^T dO         dK  += dS^T Q              dQ += dS K
//
// A block owns a tile of keys of one key/value head: dV and dK stay in registers over all query
// heads of the group. Scores are transposed, so that P^T and dS^T are made by the lanes that need
// them as operands: with split 1 of the two products after them, from registers; else through
// shared memory, for the warps that sum another part of the width.
//
// dQ is a sum over blocks. They take turns: a tile of queries is added to in the order of the key
// tiles, so that the bits are the same every run. The first block stores its part to the workspace,
// the last one adds what is there to its own and writes d_q. All go over the tiles of queries from
// the last to the first (with a block mask in an order of block_tables.cpp), and blocks of lower
// index, which are launched earlier, have lower keys: a block waits for blocks that run or have
// ended, and rarely, as they started before.
#pragma once

#include "device/async_copy.cuh"
#include "device/dependent.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_backward_scores.cuh"
#include "ops/attention/cuda/smxx_backward_turns.cuh"

namespace pullback::attention {

template <class T, int kWidth, int kKeys, int kQueries, int kSplit, int kStages, int kQueryRows,
          int kFeatures>
struct BackwardBlock {
  static constexpr int kWarps = kKeys / 32 * kSplit, kThreads = kWarps * 32;
  // Scores that a warp makes at a time: 32 keys x 8 · kN queries.
  static constexpr int kChunkQueries = kSplit == 1 ? 32 : kQueries / kSplit;
  static constexpr int kChunks = kSplit == 1 ? kQueries / 32 : 1;
  static constexpr int kN = kChunkQueries / 8;
  // Its part of d_k and d_v: 32 keys x 8 · kOwnN.
  static constexpr int kOwnN = kWidth / kSplit / 8;
  // Its part of d_q: 16 · kDqM queries x 8 · kDqN.
  static constexpr int kDqM = kQueries / kQueryRows / 16;
  static constexpr int kDqWidth = kWidth / (kWarps / kQueryRows);
  static constexpr int kDqN = kDqWidth / 8;

  using Step = BackwardStep;
  using WidthTile = TileLayout<T, kWidth>;
  using ScoreTile = TileLayout<T, kQueries>;
  using Stats = StatsTile<float, kQueries>;
  using KeyScores = Scores<T, kN, kFeatures>;

  static constexpr uint32_t kKeyBytes = kKeys * WidthTile::kRowBytes;
  static constexpr uint32_t kQueryBytes = kQueries * WidthTile::kRowBytes;
  static constexpr uint32_t kScoreBytes = kKeys * ScoreTile::kRowBytes;

  const BackwardParams& p;
  int lane, warp;
  const uint32_t k_tile, v_tile, q_tiles, d_out_tiles, ds_tile, p_tile, stats_tiles;
  BlockState& block;
  const TilePlace& place;

  float d_k[2][kOwnN][4] = {}, d_v[2][kOwnN][4] = {};

  BackwardBlock(const BackwardParams& params, BlockState& shared_state, uint32_t shared)
      : p(params),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        k_tile(shared),
        v_tile(k_tile + kKeyBytes),
        q_tiles(v_tile + kKeyBytes),
        d_out_tiles(q_tiles + kStages * kQueryBytes),
        ds_tile(d_out_tiles + kStages * kQueryBytes),
        p_tile(ds_tile + kScoreBytes),
        stats_tiles(ds_tile + (kSplit > 1 ? 2 : 1) * kScoreBytes),
        block(shared_state),
        place(shared_state.item.keys) {}

  template <int kRows, bool kInterleaved>
  void load(uint32_t tile, const HeadRows& rows, int64_t batch, int head, int64_t first, int count,
            int columns) const {
    const T* const from =
        static_cast<const T*>(rows.data) + batch * rows.batch + first * rows.row + head * rows.head;
    if (!is_general(kFeatures) || p.vectors) {
      TileLoader<T, kRows, kWidth, kThreads, true, kInterleaved>(from, rows.row, rows.element,
                                                                 columns)
          .load(tile, 0, count);
    } else {
      TileLoader<T, kRows, kWidth, kThreads, false, kInterleaved>(from, rows.row, rows.element,
                                                                  columns)
          .load(tile, 0, count);
    }
  }

  // For the compiler other numbers from here on: what follows from them is not made earlier, to be
  // kept in local memory.
  void renew() {
    asm volatile("" : "+r"(lane), "+r"(warp));
    lane &= 31;  // which it still is
    warp &= 31;
  }
  // The warp's first key, and its share.
  int key_row() const { return warp / kSplit * 32; }
  int own() const { return kSplit == 1 ? 0 : warp % kSplit; }

  static constexpr bool listed() { return has_blocks(kFeatures); }
  using Steps = ItemSteps<listed()>;
  Steps steps() const { return {p, block.item}; }
  uint32_t squares_of(const Step& step) const {
    return listed() ? steps().seen_tile(step).squares : ~0u;
  }
  int head_of(const Step& step) const { return steps().head_of(step); }
  int64_t tile_of(const Step& step) const { return steps().tile_of(step); }
  bool has_next(const Step& step) const { return steps().has_next(step); }

  void load_step(const Steps& steps, const Step& step, int stage) const {
    const TilePlace& of = steps.item.keys;
    const int head = steps.head_of(step);
    const int first = step.tile * kQueries;
    const int left = of.q_length - first;
    const int64_t row = of.q_begin + first;
    load<kQueries, false>(q_tiles + stage * kQueryBytes, p.q, of.batch, head, row, left,
                          p.problem.head_dim);
    load<kQueries, false>(d_out_tiles + stage * kQueryBytes, p.d_out, of.batch, head, row, left,
                          p.problem.value_dim);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < static_cast<int>(sizeof(Stats) / 16)) {
      const auto* const stats =
          reinterpret_cast<const char*>(static_cast<const Stats*>(p.stats) + steps.tile_of(step));
      async_copy_or_zero(stats_tiles + stage * sizeof(Stats) + thread * 16, stats + thread * 16,
                         16);
    }
    async_commit();
  }

  // The warp's queries of a chunk, from the tile's first one on.
  int first_of(int chunk) const { return (kSplit == 1 ? chunk : own()) * kChunkQueries; }

  KeyScores scores_of(const Step& step, int chunk, uint32_t stats) const {
    const int first = first_of(chunk);
    return KeyScores(
        p, place, head_of(step), place.tile * kKeys + key_row(), step.tile * kQueries + first,
        squares_of(step) >> (first / 16 * 8 + key_row() / 16), stats + first * 8, lane);
  }

  // The bias of a chunk waits where its dS^T will be stored: nobody else comes there.
  auto bias_of(const KeyScores& scores, int first) const {
    const auto bytes = [tile = ds_tile, row = key_row(), first](int number) {
      return tile + ScoreTile::offset(row + number / kN, first / 8 + number % kN);
    };
    return typename KeyScores::template SharedBias<decltype(bytes)>{scores, bytes};
  }

  // Where the sums of d_bias over launches lie for a tile.
  float* bias_sums_of(const Step& step) const {
    const int64_t head = head_of(step);
    const int64_t tile = (head * p.q_tiles + step.tile) * p.k_tiles + place.tile;
    return p.bias_sums + tile * (kKeys * kQueries);
  }
  auto bias_sink(const KeyScores& scores, const Step& step, int chunk) const {
    if constexpr (is_general(kFeatures) || kFeatures == kBiasSum) {
      float* const sums = bias_sums_of(step) + (warp * kChunks + chunk) * (32 * kChunkQueries);
      return BiasWriter<T, kN, KeyScores, kFeatures == kBiasSum>{scores, sums, {}, {}};
    } else {
      return NoSink{};
    }
  }

  // d_bias is dS: keys of a query next to each other, as the rows of the tile are interleaved.
  void store_bias(const Step& step) const {
    const int head = head_of(step);
    T* const plane =
        static_cast<T*>(p.d_bias.data) + place.batch * p.d_bias.batch + head * p.d_bias.head;
#pragma unroll 1
    for (int eight = warp; eight < kQueries / 8; eight += kWarps) {
      const int i = step.tile * kQueries + eight * 8 + lane / 4;
      T* const row = plane + i * p.d_bias.query;
#pragma unroll
      for (int keys = 0; keys < kKeys; keys += 32) {
        uint32_t words[4];
        load_matrices_transposed(words, ds_tile + ScoreTile::offset(keys + lane, eight));
        if (i < place.q_length) {
          store_eight(row, p.d_bias.key, place.tile * kKeys + keys + lane % 4 * 8, place.k_length,
                      p.d_bias_vectors != 0, words);
        }
      }
    }
  }

  // What the next step reads of the bias and its sums, into the second-level cache.
  void fetch_bias(const Step& step) const {
    if (kFeatures == kBiasSum && p.bias_step != BiasStep::first) {
      const float* const sums = bias_sums_of(step);
      for (int line = threadIdx.x; line < kKeys * kQueries / 32; line += kThreads) {
        prefetch(sums + line * 32);
      }
    }
    if (p.bias.data == nullptr || !p.bias_vectors || p.bias.query == 0) return;
    const int64_t head = head_of(step);
    constexpr int kLines = kKeys / 64;
    for (int line = threadIdx.x; line < kQueries * kLines; line += kThreads) {
      const int i = step.tile * kQueries + line / kLines,
                j = place.tile * kKeys + line % kLines * 64;
      if (i < place.q_length && j < place.k_length) {
        prefetch(static_cast<const T*>(p.bias.data) + place.batch * p.bias.batch +
                 head * p.bias.head + i * p.bias.query + j);
      }
    }
  }

  // sum[m][n] = rows [key_row, + 32) of `keys` times rows [first, + 8 · kN) of `queries`.
  void score_product(float (&sum)[2][kN][4], uint32_t key_tile, uint32_t query_tile,
                     int first) const {
    const LaneRows<T, kWidth, false> keys(key_tile, lane);
    const LaneRows<T, kWidth, true> queries(query_tile, lane);
    multiply_columns<T, kWidth>(sum, keys, key_row(), queries, first);
  }

  // Writes a fragment of P^T or dS^T to its tile [key][query].
  void store_scores(uint32_t tile, const uint32_t (&pairs)[2][kN][2], int first) const {
    const int first_key = key_row() + lane / 4;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first_key + 16 * m + 8 * half;
          store_shared(
              tile + ScoreTile::offset(key, first / 8 + n) + static_cast<uint32_t>(lane % 4 * 4),
              pairs[m][n][half]);
        }
      }
    }
  }

  // P^T and dS^T where nothing is seen.
  void store_unseen(int first) const {
    uint32_t hidden[2][kN][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) hidden[m][n][0] = hidden[m][n][1] = 0x80008000u;  // −0, −0
    }
    if constexpr (kSplit > 1) store_scores(p_tile, hidden, first);
    store_scores(ds_tile, hidden, first);
  }

  // d_v += P^T dO and d_k += dS^T Q over 16 queries from `first` on.
  void sum_keys(const uint32_t (&pt)[2][4], const uint32_t (&ds)[2][4], uint32_t q_tile,
                uint32_t d_out_tile, int first, int chunk) {
    const LaneRows<T, kWidth, false> q_rows(q_tile, lane), d_out_rows(d_out_tile, lane);
    const bool wants_k = p.d_k.data != nullptr, wants_v = p.d_v.data != nullptr;
    if (wants_k && wants_v) {  // one block, for the compiler to mix
      multiply_rows<T>(d_v, pt, d_out_rows, first, chunk);
      multiply_rows<T>(d_k, ds, q_rows, first, chunk);
    } else if (wants_v) {
      multiply_rows<T>(d_v, pt, d_out_rows, first, chunk);
    } else if (wants_k) {
      multiply_rows<T>(d_k, ds, q_rows, first, chunk);
    }
  }

  // Rows of q and d_out with NaN or infinity: unseen weights must not meet them. `weights` holds
  // P^T.
  void clean_rows(uint32_t weights, uint32_t q_tile, uint32_t d_out_tile, int first, int count) {
    add_not_finite<T, kWidth, kQueries>(d_v, weights, key_row(), d_out_tile, first, count,
                                        own() * kOwnN, lane);
    __syncthreads();
    make_finite<T, kWidth, kThreads>(q_tile, first, count);
    make_finite<T, kWidth, kThreads>(d_out_tile, first, count);
    __syncthreads();
  }

  // With split 1: from the warp's own registers.
  void sum_keys_of_chunk(const uint32_t (&pt)[2][kN][2], const uint32_t (&ds)[2][kN][2],
                         uint32_t q_tile, uint32_t d_out_tile, int first) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = pt[m][n + i / 2][i % 2];
          b[m][i] = ds[m][n + i / 2][i % 2];
        }
      }
      sum_keys(a, b, q_tile, d_out_tile, first + 8 * n, 0);
    }
  }

  // Else: all queries of the tile, from shared memory.
  void sum_keys_of_tile(uint32_t q_tile, uint32_t d_out_tile, bool suspicious) {
    const LaneRows<T, kQueries, false> p_rows(p_tile, lane), ds_rows(ds_tile, lane);
    if (suspicious) clean_rows(p_tile, q_tile, d_out_tile, 0, kQueries);
#pragma unroll
    for (int first = 0; first < kQueries; first += 16) {
      const int first_key = key_row();
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(a[m], p_rows.at(first_key + 16 * m, first / 8));
        load_matrices(b[m], ds_rows.at(first_key + 16 * m, first / 8));
      }
      sum_keys(a, b, q_tile, d_out_tile, first, own() * kOwnN);
    }
  }

  // The warp's part of dS K.
  void query_product(float (&sum)[kDqM][kDqN][4], int first_query, int first_chunk) const {
    const LaneRows<T, kQueries, true> ds_rows(ds_tile, lane);
    const LaneRows<T, kWidth, false> k_rows(k_tile, lane);
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      uint32_t a[kDqM][4];
#pragma unroll
      for (int m = 0; m < kDqM; ++m) {
        load_matrices_transposed(a[m], ds_rows.at(key, first_query / 8 + 2 * m));
      }
      multiply_rows<T>(sum, a, k_rows, key, first_chunk);
    }
  }

  void load_keys(uint32_t tile, const HeadRows& rows, const TilePlace& of, int columns) const {
    const int first = of.tile * kKeys;
    load<kKeys, true>(tile, rows, of.batch, of.head, of.k_begin + first, of.k_length - first,
                      columns);
  }

  // Writes two neighbouring elements of a gradient.
  static void store_pair(const HeadRows& rows, T* row, int column, int columns, float a, float b) {
    T* const to = row + column * rows.element;
    if (rows.element == 1 && column + 1 < columns && reinterpret_cast<uint64_t>(to) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to) = pack<T>(a, b);
      return;
    }
    if (column < columns) to[0] = from_real<T>(a);
    if (column + 1 < columns) to[rows.element] = from_real<T>(b);
  }

  // Rows `row` + first of a gradient from a sum of 16 · kM x 8 · kSumN, those below `limit`.
  template <bool kInterleaved, int kM, int kSumN>
  void store_sum(const HeadRows& rows, int head, int64_t first, int row, int limit, int column,
                 int columns, const float (&sum)[kM][kSumN][4], float factor) const {
    T* const base = static_cast<T*>(rows.data) + place.batch * rows.batch + head * rows.head;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + (kInterleaved ? 4 * m + 2 * half + first_key_of_row(lane)
                                          : 16 * m + 8 * half + lane / 4);
        if (r >= limit) continue;
        T* const to = base + (first + r) * rows.row;
#pragma unroll
        for (int n = 0; n < kSumN; ++n) {
          store_pair(rows, to, column + 8 * n + lane % 4 * 2, columns, factor * sum[m][n][2 * half],
                     factor * sum[m][n][2 * half + 1]);
        }
      }
    }
  }

  // By one thread, a barrier behind the sums of the turn.
  void end_turn() const {
    if (block.over == nullptr) return;
    fence_device();
    store_relaxed(block.over, block.next_turn);
    block.over = nullptr;
  }

  // By the same thread, before the barrier ahead of the step's sums. `seen`: what the counter was a
  // while ago.
  void begin_turn(const Step& step, int32_t seen) const {
    int32_t number, count;
    if constexpr (listed()) {
      number = steps().seen_tile(step).turn;
      count = steps().seen_tile(step).turns;
    } else {
      const TileRange keys = key_tiles_of(place, step.tile, kKeys, kQueries);
      number = place.tile - keys.begin;
      count = keys.end - keys.begin;
    }
    int32_t* const counter = p.turns + tile_of(step);
    if (seen < number) {
      end_turn();
      while (load_relaxed(counter) < number) {
      }
    }
    block.first_turn = number == 0;
    block.last_turn = number + 1 == count;
    block.sum_tile = tile_of(step) - p.first_pair * p.problem.group * p.q_tiles;
    block.counter = block.last_turn ? nullptr : counter;
    block.number = number;
  }

  // Ends the turn before, whose sums have arrived meanwhile: the fence has little to wait for. It
  // also orders what begin_turn() saw before the sums to come.
  void swap_turn() const {
    fence_device();
    if (block.over != nullptr) store_relaxed(block.over, block.next_turn);
    block.over = block.counter;
    block.next_turn = block.number + 1;
  }

  void add_d_q(const Step& step, float (&sum)[kDqM][kDqN][4], int first_query,
               int first_column) const {
    float* const sums = p.sums + block.sum_tile * (kQueries * kWidth) + threadIdx.x * 4;
    const bool first = block.first_turn, last = block.last_turn;
#pragma unroll
    for (int m = 0; m < kDqM; ++m) {
#pragma unroll
      for (int n = 0; n < kDqN; ++n) {
        float* const at = sums + (m * kDqN + n) * (kThreads * 4);
        if (!first) {
          if (last) {
            add_loaded(sum[m][n], at);
          } else {
            add_stored(at, sum[m][n]);
          }
        } else if (!last) {
          store_past_l1(at, sum[m][n]);
        }
      }
    }
    if (!last) return;
    const int head = head_of(step);
    const int first_row = step.tile * kQueries;
    const int64_t all =
        p.problem.sequences == nullptr ? place.q_length : p.problem.sequences[place.batch].q_extent;
    const int rows = static_cast<int>(all - first_row < kQueries ? all - first_row : kQueries);
    store_sum<false>(p.d_q, head, place.q_begin + first_row, first_query, rows, first_column,
                     p.problem.head_dim, sum, p.problem.scale);
  }

  // NaN or infinity in the keys and values: they must not reach every query.
  bool keys_not_finite() const {
    bool found = false;
#pragma unroll 4
    for (uint32_t at = threadIdx.x * 16; at < 2 * kKeyBytes; at += kThreads * 16) {
      uint32_t words[4];
      load_shared(words, k_tile + at);
#pragma unroll
      for (const uint32_t pair : words) {
        found |= low_not_finite<T>(pair) || high_not_finite<T>(pair);
      }
    }
    return __syncthreads_or(found) != 0;
  }

  void run() {
    wait_for_previous_kernel();  // for claims, statistics and turns
    if (threadIdx.x < 32) fetch_item(p, threadIdx.x == 0 ? claim_item(p) : 0, block.next);
    if (threadIdx.x == 0) block.over = nullptr;
    __syncthreads();
    load_next(0, false);
    begin_next(0);
    for (int turn = 0; place.exists;) {
      const bool any = steps().exists(block.steps[turn]);
      if (threadIdx.x < 32 && !(any && has_next(block.steps[turn]))) {
        fetch_item(p, threadIdx.x == 0 ? claim_item(p) : 0, block.next);
      }
      if (any) turn = sum_steps(turn) ^ 1;
      __syncthreads();
      if (threadIdx.x == 0) end_turn();
      renew();
      store_keys();
      load_next(turn, any);
      __syncthreads();
      begin_next(turn);
    }
  }

  // Of an item, if that exists.
  Step first_of(const Steps& steps) const {
    return steps.item.keys.exists ? steps.item.first : Step{p.problem.group, 0, 0};
  }
  // The next item's keys, and its first step unless that was loaded.
  void load_next(int turn, bool loaded) const {
    const Steps after = {p, block.next};
    const Step first = first_of(after);
    if (after.exists(first)) {
      load_keys(k_tile, p.k, after.item.keys, p.problem.head_dim);
      load_keys(v_tile, p.v, after.item.keys, p.problem.value_dim);
      if (!loaded) load_step(after, first, kStages > 1 ? turn : 0);
    }
    async_commit();
  }
  void begin_next(int turn) const {
    if (threadIdx.x == 0) {
      block.item = block.next;
      block.steps[turn] = first_of(steps());
    }
    __syncthreads();
  }
  // What comes after `step`, in this item or in the next one.
  void load_after(const Step& step, int stage) const {
    const bool more = has_next(step);
    const Steps after = {p, more ? block.item : block.next};
    const Step following = more ? after.next_of(step) : first_of(after);
    if (after.exists(following)) {
      load_step(after, following, stage);
    } else {
      async_commit();
    }
  }

  // Writes d_k and d_v, and begins new sums.
  void store_keys() {
    const int limit = place.extent < kKeys ? place.extent : kKeys;
    const int64_t row = place.k_begin + place.tile * kKeys;
    const int column = own() * kOwnN * 8;
    if (p.d_k.data != nullptr) {
      store_sum<true>(p.d_k, place.head, row, key_row(), limit, column, p.problem.head_dim, d_k,
                      p.problem.scale);
    }
    if (p.d_v.data != nullptr) {
      store_sum<true>(p.d_v, place.head, row, key_row(), limit, column, p.problem.value_dim, d_v,
                      1.0f);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kOwnN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) d_k[m][n][e] = d_v[m][n][e] = 0;
      }
    }
  }

  // All steps of the item, the first of which is being loaded for `turn`. Returns the last turn;
  // then the next item is known, and its first step is being loaded for the turn after.
  int sum_steps(int turn) {
    async_wait<0>();
    __syncthreads();
    const bool finite = !keys_not_finite();
    if (threadIdx.x == 0) block.finite_keys = finite;
    __syncthreads();
    renew();
    for (;; turn ^= 1) {
      const Step& step = block.steps[turn];
      const int stage = kStages > 1 ? turn : 0;
      const bool more = has_next(step);
      if constexpr (has_bias(kFeatures)) {
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const KeyScores scores = scores_of(step, chunk, stats_tiles + stage * sizeof(Stats));
          bias_of(scores, first_of(chunk)).load();
        }
        async_commit();
        if (more) fetch_bias(steps().next_of(step));
      }
      if constexpr (kStages > 1) {
        load_after(step, stage ^ 1);
      } else {
        async_commit();
      }

      const uint32_t q_tile = q_tiles + stage * kQueryBytes;
      const uint32_t d_out_tile = d_out_tiles + stage * kQueryBytes;
      const uint32_t stats = stats_tiles + stage * sizeof(Stats);
      const bool suspicious = load_shared_word(stats + kQueries * 8) != 0;
      const bool careful = suspicious || !block.finite_keys ||
                           !sees_all(place, place.tile, step.tile, kKeys, kQueries);
      // The next item, a step before the last one.
      const bool takes = threadIdx.x < 32 && more && !has_next(steps().next_of(step));
      int claimed = 0;
      if (takes && threadIdx.x == 0) claimed = claim_item(p);
      int32_t turn_seen = 0;
      if (threadIdx.x == 0 && p.d_q.data != nullptr) {
        turn_seen = load_relaxed(p.turns + tile_of(step));
      }

#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int first = first_of(chunk);
        float s[2][kN][4], d_p[2][kN][4];
        uint32_t pt[2][kN][2], ds[2][kN][2];
        const KeyScores scores = scores_of(step, chunk, stats);
        // With a block mask the warp's keys may see all, some or none of the queries.
        constexpr uint32_t kAllSquares = all_squares(kChunkQueries, 32);
        const uint32_t squares = scores.squares & kAllSquares;
        if constexpr (kFeatures == kBlocks) {
          if (!suspicious && squares == 0) {
            store_unseen(first);
            continue;
          }
        }
        score_product(s, k_tile, q_tile, first);
        if (p.d_q.data != nullptr || p.d_k.data != nullptr || p.d_bias.data != nullptr) {
          score_product(d_p, v_tile, d_out_tile, first);
        }
        const auto bias = bias_of(scores, first);
        if constexpr (has_bias(kFeatures)) {
          async_wait<kStages - 1>();
          __syncwarp();
        }
        uint32_t kept[2];
        scores.draw(kept);
        auto sink = bias_sink(scores, step, chunk);
        if (careful || is_general(kFeatures) || (listed() && squares != kAllSquares)) {
          scores.template make<true>(s, d_p, pt, ds, bias, kept, sink);
        } else {
          scores.template make<false>(s, d_p, pt, ds, bias, kept, sink);
        }
        if constexpr (has_bias(kFeatures)) __syncwarp();  // dS^T takes the place of the bias
        if constexpr (kSplit == 1) {
          if (suspicious) {
            store_scores(ds_tile, pt, first);
            __syncwarp();
            clean_rows(ds_tile, q_tile, d_out_tile, first, kChunkQueries);
          }
          sum_keys_of_chunk(pt, ds, q_tile, d_out_tile, first);
        } else {
          store_scores(p_tile, pt, first);
        }
        store_scores(ds_tile, ds, first);
      }
      if (takes) fetch_item(p, claimed, block.next);
      if (threadIdx.x == 0 && p.d_q.data != nullptr) begin_turn(step, turn_seen);
      __syncthreads();
      if (threadIdx.x == 0 && p.d_q.data != nullptr) swap_turn();
      if (kFeatures == kBias && p.d_bias.data != nullptr) store_bias(step);
      if constexpr (kSplit > 1) {
        sum_keys_of_tile(q_tile, d_out_tile, suspicious);
        if (kStages == 1) __syncthreads();
      }
      if constexpr (kStages == 1) load_after(step, 0);
      if (p.d_q.data != nullptr) {
        float sum[kDqM][kDqN][4] = {};
        if (!block.finite_keys) {
          make_finite<T, kWidth, kThreads>(k_tile, 0, kKeys);
          __syncthreads();
        }
        const int dq_row = warp % kQueryRows * (16 * kDqM);
        const int dq_column = warp / kQueryRows * kDqWidth;
        query_product(sum, dq_row, dq_column / 8);
        if (!block.finite_keys && has_next(step)) {
          __syncthreads();
          load_keys(k_tile, p.k, place, p.problem.head_dim);
          async_commit();
        }
        add_d_q(step, sum, dq_row, dq_column);
      }
      if (!has_next(step)) return turn;
      if (threadIdx.x == 0) block.steps[turn ^ 1] = steps().next_of(step);
      async_wait<0>();
      __syncthreads();
    }
  }
};

template <class T, int kWidth, int kKeys, int kQueries, int kSplit, int kStages, int kQueryRows,
          int kFeatures>
void backward(const BackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ BlockState state;
  using Block = BackwardBlock<T, kWidth, kKeys, kQueries, kSplit, kStages, kQueryRows, kFeatures>;
  Block(p, state, shared_address(shared)).run();
}

}  // namespace pullback::attention

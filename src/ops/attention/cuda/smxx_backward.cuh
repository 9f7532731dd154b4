// Gradients of attention in f16 and bf16 on tensor cores. For a tile of keys, over all queries:
//
//   S^T  = K Q^T          P^T  = exp2(scale · log2 e · S^T - lse)
//   dP^T = V dO^T         dS^T = P^T (dP^T - delta)
//   dV  += P^T dO         dK  += dS^T Q              dQ += dS K
//
// A block owns a tile of keys of one key/value head: dV and dK stay in registers over all query
// heads of the group; with a block mask two blocks of a cluster (sm_90) share a tile and the
// queries that see it, and add their sums. Scores are transposed, so that P^T and dS^T are made by
// the lanes that need them as operands: with split 1 of the two products after them, from
// registers; else through shared memory, for the warps that sum another part of the width.
//
// dQ is a sum over blocks, which take turns: a tile of queries is added to in the order of the key
// tiles, so that the bits are the same every run. The first block stores its part, the last one
// adds that to its own and writes d_q. All go from the last tile of queries to the first, and
// blocks of lower index, launched earlier, have lower keys: a block waits rarely, and for blocks
// that run or have ended. With a block mask the orders are those of block_tables.cpp, a tile of
// queries may have several sums, and several clusters may share a tile of keys.
#pragma once

#include "device/async_copy.cuh"
#include "device/dependent.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_backward_scores.cuh"
#include "ops/attention/cuda/smxx_backward_sums.cuh"

namespace pullback::attention {

template <class T, int kWidth, BackwardTiles kTiles, Features kFeatures>
struct BackwardBlock {
  static constexpr int kKeys = kTiles.keys, kQueries = kTiles.queries, kSplit = kTiles.split;
  static constexpr int kStages = kTiles.stages, kQueryRows = kTiles.query_rows;
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
  // In as many parts as leave registers for d_k and d_v.
  static constexpr int kDqParts = kSplit == 1 && kDqM * kDqWidth > 64 ? 2 : 1;
  static constexpr int kDqN = kDqWidth / kDqParts / 8;

  // Kernels that can do everything have loops where others have copies of code: to compile half of
  // them again would take half a second more.
  static constexpr bool kShort = is_general(kFeatures);

  using Step = BackwardStep;
  using WidthTile = TileLayout<T, kWidth>;
  using ScoreTile = TileLayout<T, kQueries>;
  using Stats = StatsTile<float, kQueries>;
  using KeyScores = Scores<T, kN, kFeatures>;

  static constexpr uint32_t kKeyBytes = kKeys * WidthTile::kRowBytes;
  static constexpr uint32_t kQueryBytes = kQueries * WidthTile::kRowBytes;
  static constexpr uint32_t kScoreBytes = kKeys * ScoreTile::kRowBytes;

  // With two tiles each of P^T and dS^T a step needs one barrier, in its middle: d_q of a step and
  // the scores of the next one run beside each other.
  static constexpr bool kOneBarrier =
      sizeof(T) == 2 && BackwardTiles::one_barrier(kSplit, kStages, has_bias(kFeatures));
  static constexpr int kScoreTiles = kOneBarrier ? 2 : 1;
  static constexpr int kStatsStages =
      BackwardTiles::stats_stages(sizeof(T), kSplit, kStages, has_bias(kFeatures));

  // Whose fence ends a turn: one barrier leaves no time to tell another thread.
  static constexpr int kTurnThread = has_blocks(kFeatures) && !kOneBarrier ? kThreads / 2 : 0;
  const BackwardParams& p;
  const Dropout dropout;
  const int lane, warp, key_row, own;  // key_row: the warp's first key; own: its share
  const uint32_t k_tile, v_tile, q_tiles, d_out_tiles, ds_tiles, stats_tiles, bias_tile;
  BlockPlace& block;
  const TilePlace& place;

  // Of the step.
  uint32_t ds_tile, p_tile;
  int turn = 0;

  float d_k[2][kOwnN][4] = {}, d_v[2][kOwnN][4] = {};

  BackwardBlock(const BackwardParams& params, BlockPlace& shared_place, uint32_t shared)
      : p(params),
        dropout(may_drop(kFeatures) ? params.problem.dropout.for_warp() : Dropout()),
        lane(static_cast<int>(threadIdx.x % 32)),
        warp(static_cast<int>(threadIdx.x / 32)),
        key_row(warp / kSplit * 32),
        own(warp % kSplit),
        k_tile(shared),
        v_tile(k_tile + kKeyBytes),
        q_tiles(v_tile + kKeyBytes),
        d_out_tiles(q_tiles + kStages * kQueryBytes),
        ds_tiles(d_out_tiles + kStages * kQueryBytes),
        stats_tiles(ds_tiles + (kSplit > 1 ? 2 : 1) * kScoreTiles * kScoreBytes),
        bias_tile(stats_tiles + (kStatsStages * sizeof(Stats) + 127) / 128 * 128),
        block(shared_place),
        place(shared_place.keys),
        ds_tile(ds_tiles),
        p_tile(ds_tiles + kScoreTiles * kScoreBytes) {}

  T* rows_of(const HeadRows& rows, int head, int64_t row) const {
    return static_cast<T*>(rows.data) + place.batch * rows.batch + head * rows.head +
           row * rows.row;
  }

  template <int kRows, bool kInterleaved>
  void load(uint32_t tile, const HeadRows& rows, int head, int64_t first, int count,
            int columns) const {
    const T* const from = rows_of(rows, head, first);
    const auto load_by = [&](auto vectors) {
      TileLoader<T, kRows, kWidth, kThreads, vectors.value, kInterleaved, is_general(kFeatures)>(
          from, rows.row, rows.element, columns)
          .load(tile, 0, count);
    };
    !is_general(kFeatures) || p.vectors ? load_by(Constant<true>()) : load_by(Constant<false>());
  }

  static constexpr bool listed() { return has_blocks(kFeatures); }
  BackwardSteps<listed()> steps() const { return {p, block}; }
  QuerySums<kKeys, kQueries, kWidth, kThreads, listed(), !kOneBarrier> sums() const {
    return {p, block};
  }
  static int64_t tile_of(const Step& step) { return step.first_tile + step.tile; }

  void load_step(const Step& step, uint32_t stage) const {
    const int first = step.tile * kQueries, left = place.q_length - first;
    const int64_t row = place.q_begin + first;
#pragma unroll(kShort ? 1 : 2)
    for (int which = 0; which < 2; ++which) {
      load<kQueries, false>((which == 0 ? q_tiles : d_out_tiles) + stage * kQueryBytes,
                            which == 0 ? p.q : p.d_out, step.head, row, left,
                            which == 0 ? p.problem.head_dim : p.problem.value_dim);
    }
    if constexpr (kStatsStages == kStages) load_stats(step, stage);
    async_commit();
  }

  void load_stats(const Step& step, uint32_t stage) const {
    const uint32_t byte = threadIdx.x * 16;
    if (byte >= sizeof(Stats)) return;
    const auto* const from = static_cast<const Stats*>(p.stats) + tile_of(step);
    async_copy_or_zero(stats_tiles + stage * sizeof(Stats) + byte,
                       reinterpret_cast<const char*>(from) + byte, true);
  }

  // The warp's queries of a chunk, from the tile's first one on.
  int first_of(int chunk) const { return (kSplit == 1 ? chunk : own) * kChunkQueries; }

  KeyScores scores_of(const Step& step, int chunk, uint32_t stats) const {
    const int first = first_of(chunk);
    return KeyScores(p, dropout, place, step.head, place.tile * kKeys + key_row,
                     step.tile * kQueries + first, step.squares >> (first / 16 * 8 + key_row / 16),
                     stats + first * 8, lane);
  }

  // Whether all of the tile's keys and the step's queries see each other.
  bool whole(const Step& step) const {
    return step.tile >= block.whole.begin && step.tile < block.whole.end &&
           (!listed() || step.squares == all_squares(kQueries, kKeys));
  }
  // Of kCount keys of the tile and kQueryCount queries of the step's, from the first ones on.
  template <int kCount, int kQueryCount>
  Seen seen_of(const Step& step, int key, int query) const {
    constexpr uint32_t kAllSquares = all_squares(kQueryCount, kCount);
    const uint32_t squares = step.squares >> (query / 16 * 8 + key / 16) & kAllSquares;
    if (listed() && squares == 0) return Seen::none;
    const Seen seen = pairs_seen(place, place.tile * kKeys + key, step.tile * kQueries + query,
                                 kCount, kQueryCount);
    return listed() && squares != kAllSquares && seen == Seen::all ? Seen::some : seen;
  }

  // The bias of a chunk, in a place of the warp's own.
  auto bias_of(const KeyScores& scores, int first) const {
    const auto bytes = [tile = bias_tile, row = key_row, first](int number) {
      return tile + ScoreTile::offset(row + number / kN, first / 8 + number % kN);
    };
    return typename KeyScores::template SharedBias<decltype(bytes)>{scores, bytes};
  }

  // Where the sums of d_bias over launches lie: of a tile, and of the warp's 32 keys and a chunk of
  // queries in it.
  float* bias_sums_of(const Step& step) const {
    const int64_t tile = (int64_t{step.head} * p.q_tiles + step.tile) * p.k_tiles + place.tile;
    return p.bias_sums + tile * (kKeys * kQueries);
  }
  float* bias_sums_of(const Step& step, int chunk) const {
    return bias_sums_of(step) + (warp * kChunks + chunk) * (32 * kChunkQueries);
  }
  auto bias_sink(const KeyScores& scores, const Step& step, int chunk) const {
    if constexpr (is_general(kFeatures) || kFeatures == Features::bias_sum) {
      return BiasWriter<T, kN, KeyScores, kFeatures == Features::bias_sum>{
          scores, bias_sums_of(step, chunk), {}, {}};
    } else {
      return NoSink{};
    }
  }

  void load_bias(const Step& step) const {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      bias_of(scores_of(step, chunk, stats_tiles), first_of(chunk)).load();
    }
  }

  // What the next step reads of the bias and its sums.
  void fetch_bias(const Step& step) const {
    if (kFeatures == Features::bias_sum && p.bias_step != BiasStep::first) {
      prefetch_bytes<kThreads>(bias_sums_of(step), kKeys * kQueries * 4);
    }
    prefetch_bias<T, kKeys, kQueries, kThreads>(p, place, step.head, step.tile);
  }

  // sum[m][n] = rows [key_row, + 32) of `keys` times rows [first, + 8 · kN) of `queries`.
  void score_product(float (&sum)[2][kN][4], uint32_t key_tile, uint32_t query_tile,
                     int first) const {
    const LaneRows<T, kWidth, false> keys(key_tile, lane);
    const LaneRows<T, kWidth, true> queries(query_tile, lane);
    multiply_columns<T, kWidth>(sum, keys, key_row, queries, first);
  }

  // A fragment of P^T or dS^T to its tile [key][query].
  void store_scores(uint32_t tile, const uint32_t (&pairs)[2][kN][2], int first) const {
    store_pairs<ScoreTile>(tile, pairs, key_row, first, lane);
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

  // d_v += P^T dO and d_k += dS^T Q over 16 · kSteps queries from `first` on, the operands from
  // operands(step, P^T, dS^T). Without branches in between, for the compiler to mix.
  template <int kSteps, class Operands>
  void sum_keys(const Operands& operands, uint32_t q_tile, uint32_t d_out_tile, int first,
                int chunk) {
    const LaneRows<T, kWidth, false> q_rows(q_tile, lane), d_out_rows(d_out_tile, lane);
    const auto sum = [&](auto wants_k, auto wants_v) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t pt[2][4], ds[2][4];
        operands(step, pt, ds);
        if (wants_v.value) multiply_rows<T>(d_v, pt, d_out_rows, first + 16 * step, chunk);
        if (wants_k.value) multiply_rows<T>(d_k, ds, q_rows, first + 16 * step, chunk);
      }
    };
    const bool wants_k = p.d_k.data != nullptr, wants_v = p.d_v.data != nullptr;
    if (kShort) {
      if (wants_v) sum(Constant<false>(), Constant<true>());
      if (wants_k) sum(Constant<true>(), Constant<false>());
    } else if (wants_k && wants_v) {
      sum(Constant<true>(), Constant<true>());
    } else if (wants_v) {
      sum(Constant<false>(), Constant<true>());
    } else if (wants_k) {
      sum(Constant<true>(), Constant<false>());
    }
  }

  // Rows of q and d_out with NaN or infinity: unseen weights must not meet them. `weights` holds
  // P^T.
  void clean_rows(uint32_t weights, uint32_t q_tile, uint32_t d_out_tile, int first, int count) {
    add_not_finite<T, kWidth, kQueries>(d_v, weights, key_row, d_out_tile, first, count,
                                        own * kOwnN, lane);
    __syncthreads();
    make_finite<T, kWidth, kThreads>(q_tile, first, count);
    make_finite<T, kWidth, kThreads>(d_out_tile, first, count);
    __syncthreads();
  }

  // With split 1: from the warp's own registers.
  void sum_keys_of_chunk(const uint32_t (&pt)[2][kN][2], const uint32_t (&ds)[2][kN][2],
                         uint32_t q_tile, uint32_t d_out_tile, int first) {
    const auto operands = [&](int step, uint32_t(&a)[2][4], uint32_t(&b)[2][4]) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = pt[m][2 * step + i / 2][i % 2];
          b[m][i] = ds[m][2 * step + i / 2][i % 2];
        }
      }
    };
    sum_keys<kN / 2>(operands, q_tile, d_out_tile, first, 0);
  }

  // Else: all queries of the tile, from shared memory.
  void sum_keys_of_tile(uint32_t q_tile, uint32_t d_out_tile, bool suspicious) {
    const LaneRows<T, kQueries, false> p_rows(p_tile, lane), ds_rows(ds_tile, lane);
    if (suspicious) clean_rows(p_tile, q_tile, d_out_tile, 0, kQueries);
    const auto operands = [&](int step, uint32_t(&a)[2][4], uint32_t(&b)[2][4]) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(a[m], p_rows.at(key_row + 16 * m, 2 * step));
        load_matrices(b[m], ds_rows.at(key_row + 16 * m, 2 * step));
      }
    };
    sum_keys<kQueries / 16>(operands, q_tile, d_out_tile, 0, own * kOwnN);
  }

  // The warp's part of dS K.
  void query_product(const Step& step, float (&sum)[kDqM][kDqN][4], int first_query,
                     int first_chunk) const {
    constexpr int kUpper = kKeys > 64 ? kKeys - 64 : 16;
    const LaneRows<T, kQueries, true> ds_rows(ds_tile, lane);
    const LaneRows<T, kWidth, false> k_rows(k_tile, lane);
    // On the diagonal of a causal mask nothing sees the upper half.
    const bool upper =
        kKeys <= 64 || whole(step) || seen_of<kUpper, kQueries>(step, 64, 0) != Seen::none;
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      if (key == 64 && !upper) break;
      uint32_t a[kDqM][4];
#pragma unroll
      for (int m = 0; m < kDqM; ++m) {
        load_matrices_transposed(a[m], ds_rows.at(key, first_query / 8 + 2 * m));
      }
      multiply_rows<T>(sum, a, k_rows, key, first_chunk);
    }
  }

  void load_keys(uint32_t tile, const HeadRows& rows, int columns) const {
    const int first = place.tile * kKeys;
    load<kKeys, true>(tile, rows, place.head, place.k_begin + first, place.k_length - first,
                      columns);
  }

  void load_keys_and_values() const {
#pragma unroll(kShort ? 1 : 2)
    for (int which = 0; which < 2; ++which) {
      load_keys(which == 0 ? k_tile : v_tile, which == 0 ? p.k : p.v,
                which == 0 ? p.problem.head_dim : p.problem.value_dim);
    }
  }

  void end_d_q(const Step& step, const float (&sum)[kDqM][kDqN][4], int first_query,
               int first_column, int part = 0) const {
    if (sums().add(block.turns[turn], sum, part)) return;
    const int first_row = step.tile * kQueries;
    const int rows = own_query_rows(p, place, first_row, kQueries);
    const GradientStore<T, false> store{
        p.d_q,          rows_of(p.d_q, step.head, place.q_begin + first_row),
        first_query,    rows,
        first_column,   p.problem.head_dim,
        p.problem.scale};
    if constexpr (sizeof(T) == 4) {
      store.template elements<!kShort>(sum, lane);
    } else {
      store.template pieces<!kShort>(sum, lane, p.vectors != 0);
    }
  }

  void run() {
    if (threadIdx.x == 0) {
      block.finite_keys = true;
      steps().begin();
    }
    __syncthreads();
    sum_steps_if_any();
    const bool in_cluster = listed() && cluster_size() > 1;
    if (in_cluster) add_in_cluster<kThreads>(d_k, d_v, k_tile);
    finish_keys(!in_cluster || cluster_rank() == 0, !in_cluster || cluster_rank() == 1);
    if (in_cluster) cluster_barrier();
  }

  // What comes behind this kernel goes by its having waited.
  void sum_steps_if_any() {
    if (steps().exists(0)) {
      sum_steps();
    } else {
      wait_for_previous_kernel();
    }
  }

  void finish_keys(bool keys, bool values) {
    if constexpr (listed()) {
      const SeenOwner owner = p.problem.blocks.owners[block.owner];
      if (owner.parts > 1) {
        if (keys && p.d_k.data != nullptr) join_key_parts<kThreads>(p, block.pair, owner, d_k, 0);
        if (values && p.d_v.data != nullptr) join_key_parts<kThreads>(p, block.pair, owner, d_v, 1);
        if (owner.part + 1 < owner.parts) return;
      }
    }
    store_keys(keys, values);
  }

  void store_keys(bool keys, bool values) const {
    static_assert(kStages * 2 * kQueryBytes >= kKeyBytes);
    const int first = place.tile * kKeys + key_row, limit = place.extent - key_row;
    const int column = own * kOwnN * 8;
    const auto store = [&](const HeadRows& rows, const float(&sum)[2][kOwnN][4], int columns,
                           float factor) {
      if (rows.data == nullptr) return;
      T* const base = rows_of(rows, place.head, place.k_begin + first);
      if constexpr (kShort || sizeof(T) == 4) {
        // By way of the place of queries.
        const StagedStore<T, kWidth> to{q_tiles, base, rows, key_row, column, limit, columns};
        to.template store<!kShort>(sum, factor, lane, p.vectors != 0);
      } else {
        const GradientStore<T, true> to{rows, base, 0, limit, column, columns, factor};
        to.template pieces<true>(sum, lane, true);
      }
    };
    if (keys) store(p.d_k, d_k, p.problem.head_dim, p.problem.scale);
    const float keep_scale = may_drop(kFeatures) ? p.problem.keep_scale : 1;
    if (values) store(p.d_v, d_v, p.problem.value_dim, keep_scale);
  }

  void sum_steps() {
    load_keys_and_values();
    wait_for_previous_kernel();  // for statistics and turns
    if (threadIdx.x == 0) steps().find(1);
    if constexpr (has_bias(kFeatures)) load_bias(block.steps[0]);
    if constexpr (kStatsStages < kStages) load_stats(block.steps[0], 0);
    load_step(block.steps[0], 0);
    async_wait<0>();
    __syncthreads();
    // NaN or infinity in the keys and values must not reach every query.
    if (has_extremes<T, kThreads>(k_tile, 2 * kKeyBytes)) block.finite_keys = false;
    __syncthreads();
    if (kOneBarrier && steps().exists(1)) load_step(steps().at(1), 1);
    for (uint32_t number = 0;; ++number) {
      const Step& step = steps().at(number);
      const Step& next = steps().at(number + 1);
      const uint32_t stage = number % kStages;
      if constexpr (kOneBarrier) {
        turn = static_cast<int>(number % 2);
        ds_tile = ds_tiles + turn * kScoreBytes;
        p_tile = ds_tile + kScoreTiles * kScoreBytes;
      }
      const bool more = steps().exists(number + 1);
      if constexpr (has_bias(kFeatures)) {
        if (more) fetch_bias(next);
      }
      if (threadIdx.x == kThreads - 32) steps().find(number + 2);
      if (!kOneBarrier && kStages > 1 && more) {
        load_step(next, stage ^ 1);
      } else {
        async_commit();
      }

      const uint32_t q_tile = q_tiles + stage * kQueryBytes;
      const uint32_t d_out_tile = d_out_tiles + stage * kQueryBytes;
      const uint32_t stats = stats_tiles + stage % kStatsStages * sizeof(Stats);
      const bool suspicious = load_shared_word(stats + kQueries * 8) != 0;
      const bool only_v =
          p.d_q.data == nullptr && p.d_k.data == nullptr && p.d_bias.data == nullptr;
      const bool careful = is_general(kFeatures) || only_v || suspicious || !block.finite_keys;
      int32_t turn_seen = 0;
      if (threadIdx.x == 0 && p.d_q.data != nullptr) {
        turn_seen = sums().seen(step);
      }

      const bool all_seen = whole(step);
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int first = first_of(chunk);
        float s[2][kN][4], d_p[2][kN][4];
        uint32_t pt[2][kN][2], ds[2][kN][2];
        const KeyScores scores = scores_of(step, chunk, stats);
        // All or none of the warp's pairs may see each other where others differ.
        const Seen seen = all_seen ? Seen::all : seen_of<32, kChunkQueries>(step, key_row, first);
        if constexpr (!is_general(kFeatures) && kFeatures != Features::bias_sum) {
          if (!suspicious && seen == Seen::none) {
            store_unseen(first);
            continue;
          }
        }
        const auto bias = bias_of(scores, first);
        auto sink = bias_sink(scores, step, chunk);
        uint32_t kept[2];
        if (careful || seen != Seen::all) {
          if (!only_v) score_product(d_p, v_tile, d_out_tile, first);
          score_product(s, k_tile, q_tile, first);
          scores.draw(kept);
          scores.template make<true>(s, d_p, pt, ds, bias, kept, sink);
        } else {  // without branches: exponentials beside the second product
          score_product(s, k_tile, q_tile, first);
          score_product(d_p, v_tile, d_out_tile, first);
          scores.draw(kept);
          scores.template make<false>(s, d_p, pt, ds, bias, kept, sink);
        }
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
      if (threadIdx.x == 0 && p.d_q.data != nullptr) {
        sums().begin_turn(step, turn_seen, block.turns[turn]);
      }
      if constexpr (kOneBarrier) async_wait<0>();
      __syncthreads();
      // The tile before is not needed any more, or with split 1 this one.
      if (kOneBarrier && steps().exists(number + 2)) {
        load_step(steps().at(number + 2), (number + 2) % kStages);
      }
      if (threadIdx.x == kTurnThread && p.d_q.data != nullptr) block.swap_turn(turn, p.turns);
      if constexpr (kStatsStages < kStages) {
        if (more) load_stats(next, 0);
        async_commit();
      }
      if constexpr (has_bias(kFeatures)) {
        if (more) load_bias(next);
        async_commit();
      }
      if constexpr (kFeatures == Features::bias) {
        store_bias<T, kKeys, kQueries, kWarps>(p, place, step.head, step.tile, ds_tile);
      }
      if constexpr (kSplit > 1) {
        if (whole(step) || suspicious || seen_of<32, kQueries>(step, key_row, 0) != Seen::none) {
          sum_keys_of_tile(q_tile, d_out_tile, suspicious);
        }
        if (kStages == 1) __syncthreads();
      }
      if (kStages == 1 && more) load_step(next, 0);
      if (p.d_q.data != nullptr) {
        if (!block.finite_keys) {
          make_finite<T, kWidth, kThreads>(k_tile, 0, kKeys);
          __syncthreads();
        }
        const int dq_row = warp % kQueryRows * (16 * kDqM);
        if constexpr (listed()) sums().take_over(block.turns[turn]);
#pragma unroll 1
        for (int part = 0; part < kDqParts; ++part) {
          const int column = warp / kQueryRows * kDqWidth + part * (8 * kDqN);
          float sum[kDqM][kDqN][4];
          sums().begin(block.turns[turn], sum, part);
          query_product(step, sum, dq_row, column / 8);
          end_d_q(step, sum, dq_row, column, part);
        }
        if (!block.finite_keys) {
          __syncthreads();
          load_keys(k_tile, p.k, p.problem.head_dim);
          async_commit();
          async_wait<0>();
          __syncthreads();
        }
      }
      if (!more) break;
      if constexpr (!kOneBarrier) {
        async_wait<0>();
        __syncthreads();
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) block.end_turn();
  }
};

template <class T, int kWidth, BackwardTiles kTiles, Features kFeatures>
void backward(const BackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ BlockPlace place;
  using Block = BackwardBlock<T, kWidth, kTiles, kFeatures>;
  if (threadIdx.x < 32) {
    const BlockPlace found = block_place<kTiles.keys, kTiles.queries, Block::listed()>(p);
    if (threadIdx.x == 0) place = found;
  }
  __syncthreads();
  if (place.keys.exists) {
    Block(p, place, shared_address(shared)).run();
  } else {
    wait_for_previous_kernel();
  }
}

}  // namespace pullback::attention

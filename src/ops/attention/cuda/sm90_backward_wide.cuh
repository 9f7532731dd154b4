// Gradients of attention with wide heads on Hopper's tensor cores: the formulas, and the order of
// the sums, of smxx_backward.cuh, with a softcap, or a bias and dropout, and always all of d_q,
// d_k, d_v.
//
// A thread block owns 64 keys of a key/value head and takes 64 queries a step. The first warpgroup
// has two warps that copy queries, d_out and statistics, and two that add the step's part of d_q to
// those of other blocks when its turn comes. Two warpgroups work; they meet when P and dS are
// there:
//
//   S^T = K Q^T, dP^T = V dO^T    64 keys x 64 queries, 32 queries each, both from shared memory
//   dV += P^T dO, dK += dS^T Q    the first one has dV, the second dK, P and dS from shared memory
//   dQ = dS K                     half of the columns each, 64 or 96 at a time
//
// S^T and dP^T of a step are asked for behind dV, dK and dQ of the step before: dQ is on its way
// out, and weights are made, while they come in.
//
// Shared memory: the block's place and barriers; a ring of statistics; keys, values; rings of
// queries and of d_out; two tiles each of P^T and dS^T [key][query], or one of P^T and a tile of a
// bias; a part of dQ of each warpgroup, as the threads hold it. What products read is in panels of
// 64 columns (device/wgmma.cuh). Keys with NaN or infinity are copied without, for dQ, to where the
// second tile of queries would be.
#pragma once

#include "device/bulk.cuh"
#include "device/bulk_out.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_copies.cuh"
#include "ops/attention/cuda/sm90_backward_scores.cuh"
#include "ops/attention/cuda/sm90_backward_steps.cuh"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"

namespace pullback::attention {

template <class T, HopperBackwardTile kTile>
struct HopperWideBackward : HopperBackwardSteps<T, kTile> {
  using Element = T;
  static constexpr int kWidth = kTile.width, kPanels = kTile.panels();
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kOwnQueries = kQueries / 2;
  static constexpr int kStages = kTile.stages, kOutStages = kTile.d_out_stages();
  static constexpr int kTiles = kWidth / 8, kQueryTiles = kOwnQueries / 8;
  // Of d_q a warpgroup makes its half in so many rounds: registers do not suffice for 128 columns.
  static constexpr int kRounds = kWidth == 256 ? 2 : 1, kOwnTiles = kTiles / 2 / kRounds;
  static constexpr int kPanelTiles = kPanel / 8;
  static constexpr int kWorkers = 2 * kWarpgroupSize;
  static constexpr int kCopiers = kWarpgroupSize / 2;  // threads
  static constexpr int kAdders = 2;                    // warps, of which one thread works
  static constexpr int kBoth = 1;                      // the named barrier of both that work
  static constexpr bool kSoftcap = kTile.kind == HopperBackwardKind::softcap;
  static constexpr bool kDropout = kTile.dropout(), kBias = kTile.bias();
  static constexpr bool kBiasSum = kTile.bias_sum();

  using typename HopperBackwardSteps<T, kTile>::Stats;
  using Scores = float[kQueryTiles][4];
  using Words = uint32_t[kQueryTiles / 2][4];  // P^T or dS^T, as operands

  static constexpr uint32_t kOwnBytes = kOwnQueries * kPanelRow;       // of a panel
  static constexpr uint32_t kTileBytes = kPanels * kKeys * kPanelRow;  // of keys, or of queries
  static constexpr uint32_t kScoreBytes = kKeys * kPanelRow;
  static constexpr uint32_t kSumBytes = kQueries * kOwnTiles * 8 * 4;
  static_assert((2 + kStages + kOutStages) * kTileBytes + 4 * kScoreBytes + 2 * kSumBytes ==
                kTile.tiles_bytes());

  struct Shared {
    BlockPlace place;
    bool finite_keys;
    uint64_t keys_full, keys_checked;
    uint64_t q_full[kStages], q_empty[kStages], d_out_full[kOutStages], d_out_empty[kOutStages];
    uint64_t sums_full[kAdders][2], sums_empty[2];  // of each warpgroup
    uint64_t bias_full, bias_empty, weights_empty;  // with a bias

    void init() {
      barrier_init(&keys_full, kCopiers);
      barrier_init(&keys_checked, kWorkers);
      for (uint64_t& barrier : q_full) barrier_init(&barrier, kCopiers);
      for (uint64_t& barrier : q_empty) barrier_init(&barrier, kWorkers);
      for (uint64_t& barrier : d_out_full) barrier_init(&barrier, kCopiers);
      for (uint64_t& barrier : d_out_empty) barrier_init(&barrier, kWorkers);
      for (auto& of_adder : sums_full) {
        for (uint64_t& barrier : of_adder) barrier_init(&barrier, kWarpgroupSize);
      }
      for (uint64_t& barrier : sums_empty) barrier_init(&barrier, 1);
      barrier_init(&bias_full, kCopiers);
      barrier_init(&bias_empty, kWorkers);
      barrier_init(&weights_empty, kWarpgroupSize);
    }
  };

  using Steps = HopperBackwardSteps<T, kTile>;
  using Steps::await, Steps::for_each_step, Steps::head_of, Steps::rows_of, Steps::sums_of;
  using Steps::block, Steps::hopper, Steps::p, Steps::place, Steps::turn_of;
  using typename Steps::Turn;

  Shared& shared;
  const uint32_t stats_tiles, k_tile, v_tile, q_tiles, d_out_tiles, p_tiles, ds_tiles, sums_tiles;
  const Dropout dropout;

  HopperWideBackward(const HopperBackwardParams& params, Shared& statics, uint32_t stats,
                     uint32_t tiles)
      : Steps(params, statics.place),
        shared(statics),
        stats_tiles(stats),
        k_tile(tiles),
        v_tile(k_tile + kTileBytes),
        q_tiles(v_tile + kTileBytes),
        d_out_tiles(q_tiles + kStages * kTileBytes),
        p_tiles(d_out_tiles + kOutStages * kTileBytes),
        ds_tiles(p_tiles + 2 * kScoreBytes),
        sums_tiles(ds_tiles + 2 * kScoreBytes),
        dropout(kDropout ? params.all.problem.dropout.for_warp() : Dropout()) {}

  uint32_t p_tile_of(int step) const { return p_tiles + (kBias ? 0 : step % 2 * kScoreBytes); }
  uint32_t bias_tile() const { return p_tiles + kScoreBytes; }  // the second one's place

  // Of d_q: a warpgroup's panel of a round. Of three panels each has one and half of the second.
  static constexpr int panel_of(int group, int round) { return 2 * group + round; }
  // Where its sums begin.
  static constexpr int sums_before(int group, int round) {
    return (group * kRounds + round) * static_cast<int>(kSumBytes / 4);
  }

  // --- The warps that copy ---

  void copy() const {
    const int head_dim = p.problem.head_dim, value_dim = p.problem.value_dim;
    const int key = place.tile * kKeys, keys = place.k_length - key;
    copy_tile<HopperWideBackward, kKeys>(*this, k_tile, p.k, place.head, place.k_begin + key, keys,
                                         head_dim);
    copy_tile<HopperWideBackward, kKeys>(*this, v_tile, p.v, place.head, place.k_begin + key, keys,
                                         value_dim);
    barrier_arrive_after_copies(&shared.keys_full);
    wait_for_previous_kernel();  // for statistics
    bool one_stage = false;
    for_each_step([&](const HopperStep& step) {
      const int number = step.number;
      if (number == 1) {
        barrier_wait(&shared.keys_checked, 0);
        one_stage = !shared.finite_keys;
      }
      const int stage = one_stage ? 0 : number % kStages, out_stage = number % kOutStages;
      const int round = one_stage ? number : number / kStages;
      const int query = step.tile * kQueries, left = place.q_length - query;
      const int head = head_of(step.head_of_group);
      if (round > 0) barrier_wait(&shared.q_empty[stage], (round - 1) & 1);
      copy_rows<HopperWideBackward, kQueries>(*this, q_tiles + stage * kTileBytes, hopper.q, p.q,
                                              head, query, left, head_dim, &shared.q_full[stage]);
      Steps::template copy_stats<kCopiers>(stats_tiles + stage * sizeof(Stats), step.tile,
                                           step.head_of_group);
      barrier_arrive_after_copies(&shared.q_full[stage]);
      if constexpr (kBias) {
        // Here, for none of those who work to wait for an answer.
        if (kBiasSum && Steps::follows_in_chain()) {
          if (threadIdx.x % kWarpSize == 0) Steps::await_chain(number);
          __syncwarp();
        }
        // Its one place is free early in the step before.
        if (number > 0) barrier_wait(&shared.bias_empty, (number - 1) & 1);
        copy_bias<T, kKeys, kQueries, kCopiers>(bias_tile(), p, place, head, step.tile);
        barrier_arrive_after_copies(&shared.bias_full);
      }
      if (number >= kOutStages) {
        barrier_wait(&shared.d_out_empty[out_stage], (number / kOutStages - 1) & 1);
      }
      copy_rows<HopperWideBackward, kQueries>(*this, d_out_tiles + out_stage * kTileBytes,
                                              hopper.d_out, p.d_out, head, query, left, value_dim,
                                              &shared.d_out_full[out_stage]);
      barrier_arrive_after_copies(&shared.d_out_full[out_stage]);
    });
    async_wait<0>();
  }

  // --- The warps that add up d_q ---

  // Of two steps each takes one, part after part as the warpgroups hand them in. By one thread.
  void add_queries(int adder) const {
    wait_for_previous_kernel();  // for turns
    for_each_step([&](const HopperStep& step) {
      const int number = step.number;
      if (number % kAdders != adder) return;
      const Turn turn = turn_of(Steps::part_of(step, 0), step.head_of_group);
      if (!turn.last) {
        await(turn.line, turn.number);
        fence_async_proxy();
      }
#pragma unroll
      for (int at = 0; at < 2 * kRounds; ++at) {
        const int group = at % 2, round = at / 2, before = number / kAdders * kRounds + round;
        barrier_wait(&shared.sums_full[adder][group], before & 1);
        if (!turn.last) {
          float* const sums = sums_of(turn.line) + sums_before(group, round);
          const uint32_t from = sums_tiles + group * kSumBytes;
          turn.number == 0 ? bulk_store(sums, from, kSumBytes) : bulk_add(sums, from, kSumBytes);
          bulk_commit();
          bulk_wait_read();
        }
        barrier_arrive(&shared.sums_empty[group]);
      }
      if (!turn.last) bulk_wait();
      if (kBiasSum || !turn.last) fence_device();
      if constexpr (kBiasSum) Steps::tell_chain(number);
      if (!turn.last) store_relaxed(p.turns + turn.line, turn.number + 1);
    });
  }

  // --- The warpgroups that work ---

  struct Worker {
    int group, lane, row;  // row: the warp's first key, or first query of d_q
    int thread;            // of both warpgroups
  };

  static void meet() { named_wait(kBoth, kWorkers); }
  // Of a step's queries: where they are, and how many steps had that place before.
  static int stage_of(int number, bool finite_keys) { return finite_keys ? number % kStages : 0; }
  static int round_of(int number, bool finite_keys) {
    return finite_keys ? number / kStages : number;
  }

  // A step with its turn.
  struct OwnTurn {
    Turn turn;
    const HopperStep& step;
  };

  // By both: whether keys and values are finite; else the keys' copy is made.
  bool check_keys(const Worker& worker) const {
    if (sees_extreme<T, kWorkers>(k_tile, 2 * kTileBytes, worker.thread))
      shared.finite_keys = false;
    meet();
    barrier_arrive(&shared.keys_checked);
    if (shared.finite_keys) return true;
    copy_finite<T, kWorkers>(q_tiles + kTileBytes, k_tile, kTileBytes, worker.thread);
    return false;
  }

  void work(int group) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroupSize;
    const Worker worker{group, thread % 32, thread % kWarpgroupSize / 32 * 16, thread};
    float sum[kTiles][4] = {};  // d_v or d_k
    if (Steps::may_have_steps()) {
      barrier_wait(&shared.keys_full, 0);
      const bool finite_keys = uniform(check_keys(worker)) != 0;
      Scores s = {}, d_p = {};
      ask_for_next_scores(s, worker, 0, finite_keys, true);
      ask_for_next_d_p(d_p, worker, 0, true);
      product_wait<1>();
      keep_in_place(s);
      const int steps = Steps::step_count();
      for_each_step([&](const HopperStep& step) {
        take_step(sum, s, d_p, worker, step, finite_keys, step.number + 1 < steps);
      });
      product_wait<0>();
      keep_in_place(d_p);
    }
    const bool is_value = group == 0;
    const HeadRows& rows = is_value ? p.d_v : p.d_k;
    const int limit = place.extent < kKeys ? place.extent : kKeys;
    const GradientStore<T, false> to{
        rows,
        rows_of(rows, place.head, place.k_begin + int64_t{place.tile} * kKeys),
        worker.row,
        limit,
        0,
        is_value ? p.problem.value_dim : p.problem.head_dim,
        !is_value  ? p.problem.scale
        : kDropout ? p.problem.keep_scale
                   : 1.0f};
    to.template pieces<true>(reinterpret_cast<const float(&)[1][kTiles][4]>(sum), worker.lane,
                             true);
  }

  // rows · columnsᵀ of 64 keys and the warpgroup's 32 queries.
  static void ask_for_own_scores(Scores& s, uint32_t keys, uint32_t queries) {
    const MatrixAddress a(uniform(keys)), b(uniform(queries));
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const uint32_t at = step / 4 * (kKeys * kPanelRow) + step % 4 * 32;
      product_of_shared<T>(s, a.at(at), b.at(at), step > 0);
    }
  }
  // sum += scores · rows over the 64 queries.
  static void ask_for_sum(float (&sum)[kTiles][4], uint32_t scores, uint32_t rows) {
    constexpr uint32_t kPanelBytes = kQueries * kPanelRow;
    const MatrixAddress a(uniform(scores)), b(uniform(rows), kPanelBytes);
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step) {
      const uint64_t weights = a.at(step * 32);
      product_of_rows<T>(reinterpret_cast<float(&)[16][4]>(sum), weights,
                         b.at(step * (16 * kPanelRow)), 1);
      product_of_rows<T>(reinterpret_cast<float(&)[kTiles - 16][4]>(sum[16]), weights,
                         b.at(2 * kPanelBytes + step * (16 * kPanelRow)), 1);
    }
  }

  // Asks for scores of a step's queries, and for d_P, as soon as these are there. If there is no
  // such step the products are made of what is there, as a branch around them would cost copies of
  // registers that they are to be in.
  void ask_for_next_scores(Scores& s, const Worker& worker, int number, bool finite_keys,
                           bool exists) const {
    const int stage = stage_of(number, finite_keys);
    if (exists) barrier_wait(&shared.q_full[stage], round_of(number, finite_keys) & 1);
    fence_async_proxy();
    keep_in_place(s);
    product_fence();
    ask_for_own_scores(s, k_tile, q_tiles + stage * kTileBytes + worker.group * kOwnBytes);
    product_commit();
  }
  void ask_for_next_d_p(Scores& d_p, const Worker& worker, int number, bool exists) const {
    const int stage = number % kOutStages;
    if (exists) barrier_wait(&shared.d_out_full[stage], number / kOutStages & 1);
    fence_async_proxy();
    keep_in_place(d_p);
    product_fence();
    ask_for_own_scores(d_p, v_tile, d_out_tiles + stage * kTileBytes + worker.group * kOwnBytes);
    product_commit();
  }

  // `s` has the step's scores, and d_P comes in. At the end the same holds for the next step.
  __forceinline__ void take_step(float (&sum)[kTiles][4], Scores& s, Scores& d_p,
                                 const Worker& worker, const HopperStep& step, bool finite_keys,
                                 bool has_next) const {
    const int number = step.number, head_of_group = step.head_of_group;
    const int stage = stage_of(number, finite_keys), out_stage = number % kOutStages;
    const int lane = worker.lane, group = worker.group;
    const uint32_t q_tile = q_tiles + stage * kTileBytes;
    const uint32_t d_out_tile = d_out_tiles + out_stage * kTileBytes;
    const uint32_t p_tile = p_tile_of(number);
    const uint32_t ds_tile = ds_tiles + number % 2 * kScoreBytes;
    const uint32_t all_stats = stats_tiles + stage * sizeof(Stats);
    const uint32_t stats = all_stats + group * (kOwnQueries * 8);
    Words chances, gradients;
    const bool suspicious = load_shared_word(all_stats + kQueries * 8) != 0;
    const int tile = step.tile, first_query = tile * kQueries + group * kOwnQueries;
    const bool partly = !Steps::sees_all(tile) && pairs_seen(place, place.tile * kKeys, first_query,
                                                             kKeys, kOwnQueries) != Seen::all;
    const bool marked = suspicious || !finite_keys;
    const auto seen = [&] {
      return SeenQueries(place, place.tile * kKeys + worker.row, first_query, lane);
    };
    uint32_t kept = 0;
    if constexpr (kDropout) {
      const auto plane =
          static_cast<uint64_t>(place.batch * p.problem.heads + head_of(head_of_group));
      kept = draw_kept<kOwnQueries>(dropout, plane, first_query, place.tile * kKeys + worker.row,
                                    lane);
    }
    if constexpr (kBias) {
      const uint32_t own_bias = bias_tile() + group * kOwnBytes;
      barrier_wait(&shared.bias_full, number & 1);
      add_bias<T, kKeys>(s, p.problem.scale, own_bias, worker.row, lane);
      if (marked) hide_by_bias<T, kKeys>(s, own_bias, worker.row, lane);
      barrier_arrive(&shared.bias_empty);
    }
    if constexpr (kSoftcap) take_tanh<T>(s, p.problem.inner_scale);
    if (partly) hide_unseen(s, seen());
    make_chances<kBias>(s, (kSoftcap ? p.problem.softcap : p.problem.scale) * kLog2E, stats, lane);
    if (marked) mark_unseen<false>(s, seen(), 0);
    const uint32_t unseen = kDropout && marked ? unseen_of(s) : 0;
    if constexpr (kDropout) {
      pack_kept<T>(chances, s, kept);
    } else {
      pack_weights<T>(chances, s);
    }
    const int row = worker.row + lane / 4, first_chunk = group * (kOwnQueries / 8);
    // With one tile of P: the product of the step before has read it.
    if (kBias && number > 0) barrier_wait(&shared.weights_empty, (number - 1) & 1);
    store_operands<T>(p_tile, chances, row, lane % 4, first_chunk);
    product_wait<0>();
    keep_in_place(d_p);
    if constexpr (kDropout) {
      make_gradients(s, d_p, stats, kept, p.problem.keep_scale, lane);
      if (marked) mark_unseen(s, unseen);
    } else if constexpr (kSoftcap) {
      make_capped_gradients(s, s, d_p, p.problem.softcap, stats, lane);
    } else {
      make_gradients(s, s, d_p, stats, lane);
    }
    pack_weights<T>(gradients, s);
    if (!kDropout && marked) mark_unseen(gradients, chances);
    if constexpr (kBiasSum) {
      if (!kDropout && marked) mark_unseen(s, chances);
      const int head = head_of(head_of_group);
      constexpr int kSumStep = kOwnQueries * 16;  // of a warp's 16 keys
      add_bias_sums<T, kQueryTiles>(
          p, place, head, first_query, place.tile * kKeys + worker.row, s,
          Steps::bias_sums_of(tile, head) + worker.row * kQueries + group * kSumStep, lane);
    }
    store_operands<T>(ds_tile, gradients, row, lane % 4, first_chunk);
    fence_async_proxy();
    meet();  // P and dS of both are there
    if (suspicious) clean_rows(sum, p_tile, q_tile, d_out_tile, worker);
    const OwnTurn turn = {Steps::last_turn_of(Steps::part_of(step, 0), head_of_group), step};
    const uint32_t keys = finite_keys ? k_tile : q_tiles + kTileBytes;
    float d_q[kOwnTiles][4] = {};
    begin_queries(d_q, turn, 0, worker);
    keep_in_place(d_q);
    keep_in_place(sum);
    product_fence();
    ask_for_sum(sum, group == 0 ? p_tile : ds_tile, group == 0 ? d_out_tile : q_tile);
    product_commit();
    ask_for_queries(d_q, ds_tile, keys, 0, turn, worker);
    if constexpr (kBias && !kBiasSum) {
      store_bias<T, kKeys, kQueries, kWorkers / 32, false>(p, place, head_of(head_of_group), tile,
                                                           ds_tile, worker.thread);
    }
    product_wait<1>();
    keep_in_place(sum);
    if (kBias && group == 0) barrier_arrive(&shared.weights_empty);
    barrier_arrive(&shared.q_empty[stage]);
    barrier_arrive(&shared.d_out_empty[out_stage]);
    ask_for_next_scores(s, worker, number + 1, finite_keys, has_next);
    if constexpr (kRounds == 1) {
      ask_for_next_d_p(d_p, worker, number + 1, has_next);
      product_wait<2>();
    } else {
      product_wait<1>();
      keep_in_place(d_q);
      end_queries(d_q, turn, 0, worker);
      begin_queries(d_q, turn, 1, worker);
      keep_in_place(d_q);
      product_fence();
      ask_for_queries(d_q, ds_tile, keys, 1, turn, worker);
      ask_for_next_d_p(d_p, worker, number + 1, has_next);
      product_wait<1>();
    }
    keep_in_place(d_q);
    end_queries(d_q, turn, kRounds - 1, worker);
    product_wait<1>();
    keep_in_place(s);
  }

  // By both: rows of q and d_out with NaN or infinity, which unseen weights must not meet.
  void clean_rows(float (&sum)[kTiles][4], uint32_t p_tile, uint32_t q_tile, uint32_t d_out_tile,
                  const Worker& worker) const {
    if (worker.group == 0) {
      add_panels_not_finite<T>(sum, p_tile, worker.row, d_out_tile, kQueries * kPanelRow,
                               worker.lane);
    }
    meet();
    copy_finite<T, kWorkers>(q_tile, q_tile, kTileBytes, worker.thread);
    copy_finite<T, kWorkers>(d_out_tile, d_out_tile, kTileBytes, worker.thread);
    fence_async_proxy();
    meet();
  }

  // The last turn starts its product from the sums.
  void begin_queries(float (&d_q)[kOwnTiles][4], const OwnTurn& own, int round,
                     const Worker& worker) const {
    const Turn& turn = own.turn;
    if (!turn.adds_sums()) return;
    if (worker.lane == 0) await(turn.line, turn.number);
    __syncwarp();
    const float* const sums =
        sums_of(turn.line) + sums_before(worker.group, round) + worker.thread % kWarpgroupSize * 4;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) load_past_l1(d_q[n], sums + n * (kWarpgroupSize * 4));
  }
  void ask_for_queries(float (&d_q)[kOwnTiles][4], uint32_t ds_tile, uint32_t keys, int round,
                       const OwnTurn& own, const Worker& worker) const {
    constexpr uint32_t kPanelBytes = kKeys * kPanelRow;
    const uint32_t half = keys + kPanelBytes + worker.group * (kPanelRow / 2);
    const MatrixAddress rows(uniform(ds_tile)),
        columns(uniform(keys + panel_of(worker.group, round) * kPanelBytes)),
        half_columns(uniform(half));
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      constexpr uint32_t kStepBytes = 16 * kPanelRow;
      const bool adds = step > 0 || own.turn.adds_sums();
      const uint64_t scores = rows.at(step * kStepBytes);
      product_of_transposed<T>(reinterpret_cast<float(&)[kPanelTiles][4]>(d_q), scores,
                               columns.at(step * kStepBytes), adds);
      if constexpr (kOwnTiles > kPanelTiles) {
        product_of_transposed<T>(reinterpret_cast<float(&)[kPanelTiles / 2][4]>(d_q[kPanelTiles]),
                                 scores, half_columns.at(step * kStepBytes), adds);
      }
    }
    product_commit();
  }
  void end_queries(const float (&d_q)[kOwnTiles][4], const OwnTurn& own, int round,
                   const Worker& worker) const {
    const HopperStep& step = own.step;
    const int group = worker.group, before = step.number * kRounds + round;
    if (before > 0) barrier_wait(&shared.sums_empty[group], (before - 1) & 1);
    if (own.turn.last) {
      const int head = head_of(step.head_of_group);
      Steps::store_queries(reinterpret_cast<const float(&)[kPanelTiles][4]>(d_q), step.tile, head,
                           worker.row, panel_of(group, round) * kPanel, worker.lane);
      if constexpr (kOwnTiles > kPanelTiles) {
        Steps::store_queries(reinterpret_cast<const float(&)[kPanelTiles / 2][4]>(d_q[kPanelTiles]),
                             step.tile, head, worker.row, kPanel + group * (kPanel / 2),
                             worker.lane);
      }
    } else {
      Steps::hand_over(d_q, sums_tiles + group * kSumBytes, worker.thread % kWarpgroupSize);
    }
    barrier_arrive(&shared.sums_full[step.number % kAdders][group]);
  }
};

template <class T, HopperBackwardTile kTile>
void hopper_wide_backward(const HopperBackwardParams& p) {
  run_backward<HopperWideBackward<T, kTile>, kTile>(p);
}

}  // namespace pullback::attention

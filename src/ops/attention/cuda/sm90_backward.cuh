// Gradients of attention on Hopper's tensor cores: the formulas, and the order of the sums, of
// smxx_backward.cuh, with a softcap, a block mask, or a bias and dropout, and always all of d_q,
// d_k, d_v.
//
// A thread block owns 128 keys of a key/value head and takes 64 queries a step (or 128). The first
// warpgroup has two warps that see to copies of queries, d_out and statistics, and two that add the
// step's part of d_q to those of other blocks when its turn comes. The other warpgroups have 64
// keys each:
//
//   S^T = K Q^T, dP^T = V dO^T    64 keys x 64 queries, both from shared memory
//   dV += P^T dO, dK += dS^T Q    P and dS from the registers that they were made in
//   dQ = dS K                     of all 128 keys, half of the width each (or of the queries)
//
// Both warpgroups have two warps on each processor, and they go through a step together: what
// stands between two products is time that nothing hides. So products are asked for first, and what
// masks and turns say of a step is found beside them.
//
// With a block mask the two tiles of 128 queries are from anywhere, and a warpgroup whose keys none
// of a step's queries see has dS of 0. (Of small blocks that would be half of all:
// sm90_backward_blocks.cuh.)
//
// Shared memory: the block's place and barriers; a ring of statistics; keys and values; a ring of
// queries and d_out, whose last stage keys without NaN and infinity take for dQ, if there are such;
// two tiles dS^T [key][query], or one and a tile of a bias; dQ, as the threads hold it. What
// products read is in panels of 64 columns (device/wgmma.cuh).
#pragma once

#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_copies.cuh"
#include "ops/attention/cuda/sm90_backward_scores.cuh"
#include "ops/attention/cuda/sm90_backward_steps.cuh"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_backward_sums.cuh"

namespace pullback::attention {

// The named barrier of all that work.
inline constexpr int kAllGroups = 1;

template <class T, HopperBackwardTile kTile>
struct HopperBackward : HopperBackwardSteps<T, kTile> {
  using Element = T;
  static constexpr int kWidth = kTile.width, kPanels = kTile.panels();
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = kTile.stages;
  static constexpr int kGroups = kTile.groups();
  static constexpr bool kBlocks = kTile.blocks();
  static constexpr bool kDropout = kTile.dropout();
  static constexpr bool kSoftcap = kTile.kind == HopperBackwardKind::softcap;
  static constexpr bool kBias = kTile.bias();
  static constexpr bool kBiasSum = kTile.bias_sum();
  static constexpr int kSumWidth = kTile.sum_width();
  static constexpr int kOwnKeys = kKeys / kGroups;
  // Of dQ a warpgroup has 64 queries: those of the step and a part of the width, or a part of them.
  static constexpr int kQueryPanels = kTile.query_panels();
  static constexpr int kOwnWidth = kSumWidth * kQueryPanels / kGroups;
  static constexpr int kTiles = kWidth / 8, kQueryTiles = kQueries / 8, kOwnTiles = kOwnWidth / 8;
  static constexpr int kWorkers = kGroups * kWarpgroupSize;
  // Threads that copy, and warps that add up d_q, of which one thread works.
  static constexpr int kCopiers = 64, kAdders = 2;

  using Scores = float[kQueryTiles][4];
  using Words = uint32_t[kQueryTiles / 2][4];  // P^T or dS^T, as operands

  static constexpr uint32_t kKeyBytes = kPanels * kKeys * kPanelRow;
  static constexpr uint32_t kQueryBytes = kPanels * kQueries * kPanelRow;
  static constexpr uint32_t kScorePanelBytes = kKeys * kPanelRow;
  static constexpr uint32_t kScoreBytes = kQueryPanels * kScorePanelBytes;
  static constexpr uint32_t kSumBytes = kQueries * kSumWidth * 4;
  static constexpr uint32_t kStatsBytes = kTile.stats() / kStages;
  static_assert(2 * (kKeyBytes + kStages * kQueryBytes + kScoreBytes) + kSumBytes ==
                kTile.tiles_bytes());
  using Steps = HopperBackwardSteps<T, kTile>;
  using Steps::kParts, Steps::kPartQueries, Steps::kPlanTile;
  static constexpr int kPartTiles = kPartQueries / 8;

  struct Shared {
    BlockPlace place;
    bool finite_keys;
    uint64_t keys_full, keys_checked;
    uint64_t full[kStages], empty[kStages], sums_full[kAdders], sums_empty, bias_empty;
    uint64_t scores_full, cleaning;   // with a block mask
    SeenTile steps[kStages][kParts];  // with a block mask

    void init() {
      barrier_init(&keys_full, kCopiers);
      for (uint64_t& barrier : full) barrier_init(&barrier, kCopiers);
      for (uint64_t& barrier : empty) barrier_init(&barrier, kWorkers);
      for (uint64_t& barrier : sums_full) barrier_init(&barrier, kWorkers);
      barrier_init(&sums_empty, 1);
      for (uint64_t* barrier : {&keys_checked, &bias_empty, &scores_full, &cleaning}) {
        barrier_init(barrier, kWorkers);
      }
    }
  };

  using Steps::await, Steps::for_each_step, Steps::head_of, Steps::rows_of, Steps::sums_of;
  using Steps::block, Steps::p, Steps::place;
  using typename Steps::Turn;

  Shared& shared;
  const uint32_t stats_tiles, k_tile, v_tile, query_tiles, ds_tiles, bias_tile, sums_tile;
  const Dropout dropout;

  HopperBackward(const HopperBackwardParams& params, Shared& statics, uint32_t stats,
                 uint32_t tiles)
      : Steps(params, statics.place),
        shared(statics),
        stats_tiles(stats),
        k_tile(tiles),
        v_tile(k_tile + kKeyBytes),
        query_tiles(v_tile + kKeyBytes),
        ds_tiles(query_tiles + kStages * 2 * kQueryBytes),
        bias_tile(ds_tiles + kScoreBytes),
        sums_tile(ds_tiles + 2 * kScoreBytes),
        dropout(kDropout ? params.all.problem.dropout.for_warp() : Dropout()) {}

  uint32_t q_tile_of(int stage) const { return query_tiles + stage * (2 * kQueryBytes); }
  uint32_t d_out_tile_of(int stage) const { return q_tile_of(stage) + kQueryBytes; }
  uint32_t ds_tile_of(int number) const {
    return ds_tiles + number % kTile.score_tiles() * kScoreBytes;
  }
  // Of the keys, without NaN and infinity.
  uint32_t finite_k_tile() const { return q_tile_of(kStages - 1); }

  // --- The warps that copy, and those that add up d_q ---

  void copy() const { copy_steps(*this); }
  void add_queries(int adder) const { add_step_queries(*this, adder); }

  // --- The warpgroups that work ---

  struct Worker {
    int group, lane, row;  // row: the warp's first key of the tile
    int thread;            // of all that work
  };

  SeenQueries seen_queries(const Worker& worker, int tile) const {
    return SeenQueries(place, place.tile * kKeys + worker.row, tile * kPartQueries, worker.lane);
  }
  // All warpgroups. With a block mask they may come from two places in the code, which named
  // barriers allow and synccheck does not.
  void meet(uint64_t& barrier, int round) const {
    if constexpr (kBlocks) {
      barrier_arrive(&barrier);
      barrier_wait(&barrier, round & 1);
    } else {
      named_wait(kAllGroups, kWorkers);
    }
  }
  // Those that the warp's keys see.
  static uint32_t squares_of(const SeenTile& seen, const Worker& worker) {
    return seen.squares >> worker.row / 16;
  }
  // The scores of a part of the step.
  static float (&scores_of(Scores& s, int part))[kPartTiles][4] {
    return reinterpret_cast<float(&)[kPartTiles][4]>(s[part * kPartTiles]);
  }

  void store_scores(uint32_t tile, const Words& words, const Worker& worker) const {
#pragma unroll
    for (int panel = 0; panel < kQueryPanels; ++panel) {
      using PanelWords = const uint32_t(&)[kPanel / 16][4];
      store_operands<T>(tile + panel * kScorePanelBytes,
                        reinterpret_cast<PanelWords>(words[panel * (kPanel / 16)]),
                        worker.row + worker.lane / 4, worker.lane % 4);
    }
  }

  // By all: whether keys and values are finite; else the keys' copy is made.
  bool check_keys(const Worker& worker) const {
    if (sees_extreme<T, kWorkers>(k_tile, 2 * kKeyBytes, worker.thread)) shared.finite_keys = false;
    named_wait(kAllGroups, kWorkers);
    barrier_arrive(&shared.keys_checked);
    if (shared.finite_keys) return true;
    static_assert(kKeyBytes <= 2 * kQueryBytes);
    copy_finite<T, kWorkers>(finite_k_tile(), k_tile, kKeyBytes, worker.thread);
    return false;
  }

  // By all: rows of q and d_out with NaN or infinity, which unseen weights must not meet.
  void clean_rows(float (&d_v)[kTiles][4], const Words& weights, uint32_t ds_tile, uint32_t q_tile,
                  uint32_t d_out_tile, const Worker& worker) const {
    store_scores(ds_tile, weights, worker);
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < kQueryPanels; ++part) {  // of the queries
      add_panels_not_finite<T>(d_v, ds_tile + part * kScorePanelBytes, worker.row,
                               d_out_tile + part * (kPanel * kPanelRow), kQueries * kPanelRow,
                               worker.lane);
    }
    make_finite(q_tile, d_out_tile, worker);
  }
  void make_finite(uint32_t q_tile, uint32_t d_out_tile, const Worker& worker) const {
    meet(shared.cleaning, 0);  // the scores of all are made
    copy_finite<T, kWorkers>(q_tile, q_tile, kQueryBytes, worker.thread);
    copy_finite<T, kWorkers>(d_out_tile, d_out_tile, kQueryBytes, worker.thread);
    fence_async_proxy();
    meet(shared.cleaning, 1);
  }

  void work(int group) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroupSize;
    const Worker worker{group, thread % 32, thread / 32 * 16, thread};
    float d_k[kTiles][4] = {}, d_v[kTiles][4] = {};
    if (Steps::may_have_steps()) {
      barrier_wait(&shared.keys_full, 0);
      const bool finite_keys = uniform(check_keys(worker)) != 0;
      fence_async_proxy();
      const uint32_t keys_of_d_q = finite_keys ? k_tile : finite_k_tile();
      const int stages = finite_keys ? kStages : kStages - 1;
      Stage stage;
      for_each_step([&](const HopperStep& step) {
        stage.begin(stages);
        take_step(d_k, d_v, worker, step, stage, finite_keys, keys_of_d_q);
        ++stage.number;
      });
    }
    if constexpr (kBlocks) {
      if (!join_keys(d_k, d_v)) return;
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
    store(p.d_v, p.problem.value_dim, d_v, kDropout ? p.problem.keep_scale : 1.0f);
  }

  // With a block mask: whether this owner of the keys is the last one, which has the sums.
  bool join_keys(float (&d_k)[kTiles][4], float (&d_v)[kTiles][4]) const {
    struct Workers {
      int number() const { return static_cast<int>(threadIdx.x) - kWarpgroupSize; }
      void meet() const { named_wait(kAllGroups, kWorkers); }
    };
    const SeenOwner owner = p.problem.blocks.owners[block.owner];
    if (owner.parts == 1) return true;
    wait_for_previous_kernel();  // also where no step did
    using Sum = float(&)[1][kTiles][4];
    join_key_parts<kWorkers>(p, block.pair, owner, reinterpret_cast<Sum>(d_k), 0, Workers());
    join_key_parts<kWorkers>(p, block.pair, owner, reinterpret_cast<Sum>(d_v), 1, Workers());
    return owner.part + 1 == owner.parts;
  }

  // Of a step's queries: whether a statistic is NaN or infinite.
  static bool is_suspicious(uint32_t stats) {
    uint32_t flags = 0;
#pragma unroll
    for (int panel = 0; panel < kQueryPanels; ++panel) {
      flags |= load_shared_word(stats + stats_of(panel * 8) + kPlanTile * 8);
    }
    return flags != 0;
  }

  // The warpgroups meet once a step, when dS is there. d_v and d_k come in beside dQ and its way
  // out; before the next step all have.
  __forceinline__ void take_step(float (&d_k)[kTiles][4], float (&d_v)[kTiles][4],
                                 const Worker& worker, const HopperStep& step, const Stage& at,
                                 bool finite_keys, uint32_t keys_of_d_q) const {
    const int number = step.number, stage = at.number, lane = worker.lane;
    const uint32_t q_tile = q_tile_of(stage), d_out_tile = d_out_tile_of(stage);
    const uint32_t stats = stats_tiles + stage * kStatsBytes;
    const uint32_t ds_tile = ds_tile_of(number);
    const uint32_t own_keys = worker.group * (kOwnKeys * kPanelRow);
    barrier_wait(&shared.full[stage], at.round & 1);
    fence_async_proxy();
    // What is known of a part is loaded anew where it is wanted: registers are needed for sums.
    const auto part_of = [&](int part) { return part_at(step, stage, part); };
    Scores s = {}, d_p = {};
    Words chances, gradients;
    if constexpr (kBlocks) {
      constexpr uint32_t kOwnSquares = all_squares(kPartQueries, kOwnKeys);
      uint32_t of_group = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        of_group |= part_of(part).squares >> worker.group * (kOwnKeys / 16);
      }
      if (uniform(static_cast<int>(of_group & kOwnSquares)) == 0) {
        clear_scores(ds_tile, worker);
        if (is_suspicious(stats)) make_finite(q_tile, d_out_tile, worker);
        fence_async_proxy();
        meet(shared.scores_full, number);
        end_step<false>(d_k, d_v, s, gradients, worker, step, stage, keys_of_d_q);
        return;
      }
    }
    product_fence();
    ask_for_scores<T, kWidth, kKeys, kQueries>(s, k_tile + own_keys, q_tile);
    product_commit();
    ask_for_scores<T, kWidth, kKeys, kQueries>(d_p, v_tile + own_keys, d_out_tile);
    product_commit();
    // Beside the products: a warp has nothing else to hide it behind.
    const bool suspicious = is_suspicious(stats);
    bool partly = false, has_holes = false;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      constexpr uint32_t kSquares = kBlocks ? all_squares(kPartQueries, 16) : 0;
      const SeenTile seen = part_of(part);
      partly =
          partly || (!Steps::sees_all(seen.tile) &&
                     pairs_seen(place, place.tile * kKeys + worker.group * kOwnKeys,
                                seen.tile * kPartQueries, kOwnKeys, kPartQueries) != Seen::all);
      has_holes = has_holes || (kBlocks && (squares_of(seen, worker) & kSquares) != kSquares);
    }
    const bool marked = suspicious || !finite_keys;
    uint32_t kept = 0, unseen = 0;
    if constexpr (kDropout) {
      const auto plane =
          static_cast<uint64_t>(place.batch * p.problem.heads + head_of(step.head_of_group));
      kept = draw_kept<kQueries>(dropout, plane, step.tile * kQueries,
                                 place.tile * kKeys + worker.row, lane);
    }
    product_wait<1>();
    keep_in_place(s);
    if constexpr (kBias) {
      add_bias<T, kKeys>(s, p.problem.scale, bias_tile, worker.row, lane);
      if (marked) hide_by_bias<T, kKeys>(s, bias_tile, worker.row, lane);
      barrier_arrive(&shared.bias_empty);
    }
    if constexpr (kSoftcap) take_tanh<T>(s, p.problem.inner_scale);
    if (partly) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        hide_unseen(scores_of(s, part), seen_queries(worker, part_of(part).tile));
      }
    }
    if (has_holes) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        hide_blocks(scores_of(s, part), squares_of(part_of(part), worker));
      }
    }
    make_chances<kBias>(s, (kSoftcap ? p.problem.softcap : p.problem.scale) * kLog2E, stats, lane);
    if (marked) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const SeenTile seen = part_of(part);
        mark_unseen<kBlocks>(scores_of(s, part), seen_queries(worker, seen.tile),
                             squares_of(seen, worker));
      }
    }
    if constexpr (kDropout) {
      if (marked) unseen = unseen_of(s);
      pack_kept<T>(chances, s, kept);
      product_wait<0>();
      keep_in_place(d_p);
      make_gradients(s, d_p, stats, kept, p.problem.keep_scale, lane);
      if (marked) mark_unseen(s, unseen);
      pack_weights<T>(gradients, s);
    } else {
      // Weights are packed beside the product or, where that takes too many registers, behind it.
      constexpr bool kPacksAhead = kQueryPanels == 1;
      Scores& d_s = kPacksAhead ? s : d_p;
      if constexpr (kPacksAhead) pack_weights<T>(chances, s);
      product_wait<0>();
      keep_in_place(d_p);
      if constexpr (kSoftcap) {
        make_capped_gradients(d_s, s, d_p, p.problem.softcap, stats, lane);
      } else {
        make_gradients(d_s, s, d_p, stats, lane);
      }
      if constexpr (!kPacksAhead) pack_weights<T>(chances, s);
      pack_weights<T>(gradients, d_s);
      if (marked) mark_unseen(gradients, chances);
    }
    if constexpr (kBiasSum) {
      if (!kDropout && marked) mark_unseen(s, chances);
      const int head = head_of(step.head_of_group), key_row = place.tile * kKeys + worker.row;
      add_bias_sums<T, kWidth <= 96 ? 8 : 4>(
          p, place, head, step.tile * kQueries, key_row, s,
          Steps::bias_sums_of(step.tile, head) + worker.row * kQueries, lane);
    }
    // With one tile of dS: those of the step before have been read.
    if (kBias && number > 0) {
      barrier_wait(&shared.sums_full[(number - 1) % kAdders], (number - 1) / kAdders & 1);
    }
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
    meet(shared.scores_full, number);  // dS of all keys is there
    if constexpr (kBias && !kBiasSum) {
#pragma unroll 1
      for (int panel = 0; panel < kQueryPanels; ++panel) {
        store_bias<T, kKeys, kPanel, kWorkers / 32, false>(
            p, place, head_of(step.head_of_group), step.tile * kQueryPanels + panel,
            ds_tile + panel * kScorePanelBytes, worker.thread);
      }
    }
    end_step<true>(d_k, d_v, s, gradients, worker, step, stage, keys_of_d_q);
  }

  // dQ, in place of S^T, and d_k.
  template <bool kSees>
  __forceinline__ void end_step(float (&d_k)[kTiles][4], float (&d_v)[kTiles][4], Scores& s,
                                const Words& gradients, const Worker& worker,
                                const HopperStep& step, int stage, uint32_t keys_of_d_q) const {
    auto& d_q = reinterpret_cast<float(&)[kOwnTiles][4]>(s);
    const int number = step.number;
    bool adds;
    const Turn turn = begin_queries(d_q, adds, worker, step, stage);
    keep_in_place(d_q);
    keep_in_place(d_k);
    product_fence();
    ask_for_queries(d_q, ds_tile_of(number), keys_of_d_q, worker.group, adds);
    product_commit();
    if constexpr (kSees) {
      ask_for_outputs<T, kTiles, kQueries>(d_k, gradients, q_tile_of(stage));
      product_commit();
      product_wait<1>();
    } else {
      product_wait<0>();
    }
    keep_in_place(d_q);
    if (number > 0) barrier_wait(&shared.sums_empty, (number - 1) & 1);
    end_queries(d_q, turn.last, worker, step, stage);
    barrier_arrive(&shared.sums_full[number % kAdders]);
    if constexpr (kSees) {
      product_wait<0>();
      keep_in_place(d_v);
      keep_in_place(d_k);
    }
    barrier_arrive(&shared.empty[stage]);
  }

  // A part of the step at a stage. One that does not exist has no turns.
  SeenTile part_at(const HopperStep& step, int stage, int part) const {
    return kBlocks ? load_part(stage, part) : Steps::part_of(step, part);
  }
  // That which the warpgroup's dQ is of.
  SeenTile own_part(const Worker& worker, const HopperStep& step, int stage) const {
    return part_at(step, stage, kParts > 1 ? worker.group : 0);
  }
  // Where the thread's first piece of four of dQ is, in sums of a part; the others follow at
  // intervals of a warpgroup.
  static int sums_piece(const Worker& worker) {
    const int before = kParts > 1 ? 0 : worker.group * (kOwnTiles * kWarpgroupSize);
    return before + worker.thread % kWarpgroupSize;
  }

  // The last turn starts its product from the sums.
  __forceinline__ Turn begin_queries(float (&d_q)[kOwnTiles][4], bool& adds, const Worker& worker,
                                     const HopperStep& step, int stage) const {
    const SeenTile part = own_part(worker, step, stage);
    const Turn turn = Steps::last_turn_of(part, step.head_of_group);
    const int piece = sums_piece(worker);
    const bool takes_over = kBlocks && turn.taken_over >= 0;
    // A second tile of queries may have none.
    const bool adds_sums = turn.adds_sums() && (Steps::kPlanTiles == 1 ||
                                                worker.group < Steps::plan_tiles_of(part.tile));
    if (adds_sums) {
      if (worker.lane == 0) await(turn.line, turn.number);
      __syncwarp();
      const float* const sums = sums_of(turn.line) + piece * 4;
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) load_past_l1(d_q[n], sums + n * (kWarpgroupSize * 4));
    }
    if (takes_over) take_over(d_q, turn, piece, worker.lane);
    adds = adds_sums || takes_over;
    return turn;
  }
  // Writes dQ, or hands it to those who add it up. Of a part that does not exist they take nothing.
  __forceinline__ void end_queries(const float (&d_q)[kOwnTiles][4], bool last,
                                   const Worker& worker, const HopperStep& step, int stage) const {
    const int group = worker.group;
    if (last) {
      const int row = kQueryPanels > 1 && kParts == 1 ? worker.row : worker.row % kPlanTile;
      Steps::store_queries(d_q, own_part(worker, step, stage).tile, head_of(step.head_of_group),
                           row, kQueryPanels > 1 ? 0 : group * kOwnWidth, worker.lane);
    } else {
      const uint32_t part = kParts > 1 ? group * (kSumBytes / kParts) : 0;
      Steps::hand_over(d_q, sums_tile + part, sums_piece(worker));
    }
  }

  SeenTile load_part(int stage, int part) const {
    uint32_t words[4];
    load_shared(words, shared_address(&shared.steps[stage][part]));
    return {static_cast<int>(words[0]), words[1], static_cast<int>(words[2]),
            static_cast<uint16_t>(words[3]), static_cast<uint16_t>(words[3] >> 16)};
  }

  // The line before, to what d_q has of this one.
  __forceinline__ void take_over(float (&d_q)[kOwnTiles][4], const Turn& turn, int sums_thread,
                                 int lane) const {
    if (lane == 0) await(turn.taken_over, turn.turns_before);
    __syncwarp();
    const float* const sums = sums_of(turn.taken_over) + sums_thread * 4;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      float piece[4];
      load_past_l1(piece, sums + n * (kWarpgroupSize * 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) d_q[n][e] = turn.adds_sums() ? d_q[n][e] + piece[e] : piece[e];
    }
  }

  // dS of the warpgroup's keys becomes 0.
  void clear_scores(uint32_t tile, const Worker& worker) const {
    constexpr uint32_t kOwnBytes = kOwnKeys * kPanelRow;
    const uint32_t zeros[4] = {};
    const uint32_t first = tile + worker.group * kOwnBytes + worker.thread % kWarpgroupSize * 16;
#pragma unroll
    for (uint32_t panel = 0; panel < kQueryPanels; ++panel) {
#pragma unroll
      for (uint32_t at = 0; at < kOwnBytes; at += kWarpgroupSize * 16)
        store_shared(first + panel * kScorePanelBytes + at, zeros);
    }
  }

  // dS K, the warpgroup's columns.
  __forceinline__ void ask_for_queries(float (&d_q)[kOwnTiles][4], uint32_t ds_tile, uint32_t keys,
                                       int group, bool adds) const {
    const uint32_t panel = kQueryPanels == 1 ? 0 : group;
    const uint32_t column = kQueryPanels == 1 ? group * kOwnWidth : 0;
    const MatrixAddress rows(ds_tile + panel * kScorePanelBytes);
    const MatrixAddress columns(keys + column / kPanel * (kKeys * kPanelRow) + column % kPanel * 2);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      product_of_transposed<T>(d_q, rows.at(step * (16 * kPanelRow)),
                               columns.at(step * (16 * kPanelRow)), step > 0 || adds);
    }
  }
};

template <class T, HopperBackwardTile kTile>
void hopper_backward(const HopperBackwardParams& p) {
  run_backward<HopperBackward<T, kTile>, kTile>(p);
}

}  // namespace pullback::attention

// Gradients of attention with a block mask on Hopper's tensor cores, in two passes: thread blocks
// that own 64 keys make d_k and d_v, then those that own 64 queries make d_q. Each goes over the
// tiles of 64 that its block columns (or rows) list, with everything that they need made anew:
//
//   keys      S^T = K Q^T, dP^T = V dO^T    dV += P^T dO, dK += dS^T Q
//   queries   S = Q K^T,   dP = dO V^T      dQ += dS K
//
// These are seven products for two tiles that meet rather than the five of sm90_backward.cuh, but
// no sums of dQ go through memory, half of what it moves, and no block waits for another's turn,
// which blocks with lists of their own come to at any time.
//
// The first warp copies; a warpgroup works, with P and dS as operands in the registers that they
// were made in. A multiprocessor has two thread blocks or more: one's products run beside the
// other's exponentials.
//
// Both passes are one kernel: what a block owns are its first and second tile (K and V, or Q and
// dO), what it lists likewise (Q and dO, or K and V).
//
// Shared memory: the place and barriers; statistics of listed queries; the two own tiles; a ring of
// pairs of listed ones; for owners of keys a tile of P for rows that hold NaN or infinity. All in
// panels of 64 columns (device/wgmma.cuh).
#pragma once

#include "device/boxes.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_backward_params.cuh"
#include "ops/attention/cuda/sm90_backward_scores.cuh"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_backward_gradients.cuh"
#include "ops/attention/cuda/smxx_backward_place.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_backward_sums.cuh"

namespace pullback::attention {

template <class T, BlockBackwardTile kTile>
struct BlockBackward {
  static constexpr bool kOwnsKeys = kTile.owns_keys;
  static constexpr int kRows = BlockBackwardTile::kRows, kWidth = kTile.width;
  static constexpr int kPanels = kTile.panels(), kStages = kTile.stages, kTiles = kWidth / 8;
  static constexpr int kWorkers = kWarpgroupSize, kCopiers = kWarpSize;
  static constexpr int kAllWorkers = 1;  // their named barrier
  static constexpr uint32_t kTileBytes = kTile.tile_bytes();
  static constexpr uint32_t kAllSquares = all_squares(kRows, 16);

  using Stats = StatsTile<float, kRows>;
  using Sum = float[kTiles][4];
  using Scores = float[kRows / 8][4];
  using Words = uint32_t[kRows / 16][4];  // P or dS, as operands

  struct Shared {
    TilePlace place;
    int64_t index;  // of the pair, or of an owner of queries its plane
    int owner;
    bool extreme;  // whether own keys or values hold NaN or infinity
    uint64_t own_full, full[kStages], empty[kStages];
    SeenTile seen[kStages];
    int32_t extreme_keys[kStages];  // listed

    void init() {
      barrier_init(&own_full, 1);
      for (uint64_t& barrier : full) barrier_init(&barrier, kCopiers);
      for (uint64_t& barrier : empty) barrier_init(&barrier, kWorkers);
    }
  };

  const BlockBackwardParams& params;
  const BackwardParams& p;
  Shared& shared;
  const TilePlace& place;
  const uint32_t stats_tiles, own_tiles, listed_tiles, p_tile;

  BlockBackward(const BlockBackwardParams& all, Shared& statics, uint32_t memory)
      : params(all),
        p(all.all),
        shared(statics),
        place(statics.place),
        stats_tiles(memory + BlockBackwardTile::kPlaceBytes),
        own_tiles(memory + kTile.first_tile()),
        listed_tiles(own_tiles + 2 * kTileBytes),
        p_tile(listed_tiles + kStages * 2 * kTileBytes) {}

  uint32_t listed_tile(int stage) const { return listed_tiles + stage * (2 * kTileBytes); }
  uint32_t stats_of_stage(int stage) const { return stats_tiles + stage * sizeof(Stats); }

  // --- Which tiles ---

  // By the first warp. Owners begin in the order of their numbers, those of queries from the end.
  void find_place() const {
    const auto owners = static_cast<uint32_t>(p.problem.blocks.owner_count);
    const uint32_t number = blockIdx.x % owners;
    const int owner = static_cast<int>(kOwnsKeys ? number : owners - 1 - number);
    const int64_t index = blockIdx.x / owners;
    const int heads = kOwnsKeys ? p.problem.heads / p.problem.group : p.problem.heads;
    const TilePlace found =
        place_of<!kOwnsKeys>(p, index, heads, p.problem.blocks.owners[owner].tile, kRows);
    if (threadIdx.x == 0) {
      shared.place = found;
      shared.index = index;
      shared.owner = owner;
      shared.extreme = false;
      shared.init();
      barrier_init_fence();
    }
  }

  // The heads whose lists are this owner's: of the queries.
  int list_count() const { return kOwnsKeys ? p.problem.group : 1; }
  int query_head_of(int list) const {
    return kOwnsKeys ? place.head * p.problem.group + list : place.head;
  }
  struct List {
    const SeenTile* tiles;
    int count;
  };
  List list_of(int number) const {
    const SeenBlocksTable& table = p.problem.blocks;
    const int64_t plane = table.plane(place.batch, query_head_of(number));
    const int64_t* const first = table.first + plane * (table.lists + 1) + shared.owner;
    return {table.tiles + first[0], uniform(static_cast<int>(first[1] - first[0]))};
  }
  const Stats* stats_of(int head, int tile) const {
    return static_cast<const Stats*>(p.stats) +
           ((place.batch * p.problem.heads + head) * p.q_tiles + tile);
  }
  int64_t kv_pair() const {
    const int kv_heads = p.problem.heads / p.problem.group;
    return place.batch * kv_heads + place.head / (kOwnsKeys ? 1 : p.problem.group);
  }
  int32_t* extreme_keys_of(int tile) const {
    return params.extreme_keys + kv_pair() * p.k_tiles + tile;
  }

  // --- The warp that copies ---

  void load_tile(uint32_t to, const TensorMap& map, int tile, int head, uint64_t* full) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      load_box(to + panel * (kRows * kPanelRow), map, panel * kPanel, tile * kRows, head,
               static_cast<int>(place.batch), full);
    }
  }

  void copy() const {
    const bool first_lane = threadIdx.x == 0;
    if (first_lane) {
      barrier_expect_bytes(&shared.own_full, 2 * kTileBytes);
      load_tile(own_tiles, params.own[0], place.tile, place.head, &shared.own_full);
      load_tile(own_tiles + kTileBytes, params.own[1], place.tile, place.head, &shared.own_full);
    }
    wait_for_previous_kernel();  // for statistics, and for which keys are finite
    int stage = 0, round = 0;
    for (int number = 0; number < list_count(); ++number) {
      const List list = list_of(number);
      const int query_head = query_head_of(number);
      const int head = kOwnsKeys ? query_head : place.head / p.problem.group;
      int next = list.count > 0 ? list.tiles[0].tile : 0;  // an entry of a list is far away
#pragma unroll 1
      for (int n = 0; n < list.count; ++n) {
        const int tile = next;
        if (n + 1 < list.count) next = list.tiles[n + 1].tile;
        if (round > 0) barrier_wait(&shared.empty[stage], (round - 1) & 1);
        uint64_t* const full = &shared.full[stage];
        if (first_lane) {
          barrier_expect_more_bytes(full, 2 * kTileBytes);
          load_tile(listed_tile(stage), params.listed[0], tile, head, full);
          load_tile(listed_tile(stage) + kTileBytes, params.listed[1], tile, head, full);
          async_copy(&shared.seen[stage], list.tiles + n);
          if constexpr (!kOwnsKeys) {
            async_copy<4>(shared_address(&shared.extreme_keys[stage]), extreme_keys_of(tile));
          }
        }
        if constexpr (kOwnsKeys) {
          const auto* const from = reinterpret_cast<const char*>(stats_of(query_head, tile));
          for (uint32_t byte = threadIdx.x * 16; byte < sizeof(Stats); byte += kCopiers * 16) {
            async_copy(stats_of_stage(stage) + byte, from + byte);
          }
        }
        barrier_arrive_after_copies(full);
        if (++stage == kStages) stage = 0, ++round;
      }
    }
    async_wait<0>();
  }

  // --- The warpgroup that works ---

  struct Worker {
    int thread, lane, row;  // row: the warp's first of the own tile
    // Of an owner of queries: those of its two rows.
    float lse[2], delta[2];
    bool marked;  // what is own asks for care in every step
  };
  struct Workers {
    int number() const { return static_cast<int>(threadIdx.x) - kWarpgroupSize; }
    void meet() const { named_wait(kAllWorkers, kWorkers); }
  };

  void look_at_own(Worker& worker) const {
    if constexpr (kOwnsKeys) {
      if (sees_extreme<T, kWorkers>(own_tiles, 2 * kTileBytes, worker.thread)) {
        shared.extreme = true;
      }
      Workers().meet();
      worker.marked = uniform(shared.extreme) != 0;
      if (worker.thread == 0) *extreme_keys_of(place.tile) = worker.marked;
    } else {
      wait_for_previous_kernel();
      const Stats& stats = *stats_of(place.head, place.tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowStats<float> row = stats.row[worker.row + worker.lane / 4 + 8 * half];
        worker.lse[half] = row.lse;
        worker.delta[half] = row.delta;
      }
      worker.marked = uniform(stats.suspicious) != 0;
    }
  }

  void work() const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroupSize;
    Worker worker{.thread = thread, .lane = thread % 32, .row = thread / 32 * 16};
    Sum first = {}, second = {};
    barrier_wait(&shared.own_full, 0);
    look_at_own(worker);
    int left = 0;  // steps
    for (int number = 0; number < list_count(); ++number) left += list_of(number).count;
    if (left > 0) {
      Scores s = {}, d_p = {};
      Step step;
      ask_for_first_scores(s, step, true);
#pragma unroll 1
      for (; left > 0; --left) take_step(first, second, s, d_p, worker, step, left > 1);
      product_wait<0>();
      keep_in_place(s);
      keep_in_place(first);
      keep_in_place(second);
    }
    const SeenOwner owner = p.problem.blocks.owners[shared.owner];
    if (owner.parts > 1) {
      wait_for_previous_kernel();  // also where no step did
      using Joined = float(&)[1][kTiles][4];
      const Workers all;
      join_key_parts<kWorkers>(p, shared.index, owner, reinterpret_cast<Joined>(first), 0, all);
      if constexpr (kOwnsKeys) {
        join_key_parts<kWorkers>(p, shared.index, owner, reinterpret_cast<Joined>(second), 1, all);
      }
      if (owner.part + 1 < owner.parts) return;
    }
    if constexpr (kOwnsKeys) {
      store(p.d_k, p.problem.head_dim, first, p.problem.scale, worker);
      store(p.d_v, p.problem.value_dim, second, 1, worker);
    } else {
      store(p.d_q, p.problem.head_dim, first, p.problem.scale, worker);
    }
  }

  void store(const HeadRows& rows, int columns, const Sum& sum, float factor,
             const Worker& worker) const {
    if (rows.data == nullptr) return;
    T* const base = static_cast<T*>(rows.data) + place.batch * rows.batch + place.head * rows.head +
                    int64_t{place.tile} * kRows * rows.row;
    const int limit = place.extent < kRows ? place.extent : kRows;
    const GradientStore<T, false> to{rows, base, worker.row, limit, 0, columns, factor};
    to.template pieces<true>(reinterpret_cast<const float(&)[1][kTiles][4]>(sum), worker.lane,
                             true);
  }

  bool sees_all_of(int tile) const {
    const int own = place.tile * kRows, listed = tile * kRows;
    return pairs_seen(place, kOwnsKeys ? own : listed, kOwnsKeys ? listed : own, kRows, kRows) ==
           Seen::all;
  }
  auto columns_of(const Worker& worker, int tile) const {
    const int own = place.tile * kRows + worker.row, listed = tile * kRows;
    if constexpr (kOwnsKeys) return SeenQueries(place, own, listed, worker.lane);
    if constexpr (!kOwnsKeys) return SeenKeys(place, own, listed, worker.lane);
  }

  // Its place in the ring, and how many steps had that before.
  struct Step {
    int number = 0, stage = 0, round = 0;

    void next() {
      ++number;
      if (++stage == kStages) stage = 0, ++round;
    }
  };

  // As soon as the step's tiles are there. If there is no such step the product is made of what is
  // there: a branch around it would cost copies of registers that it is to be in.
  void ask_for_first_scores(Scores& s, const Step& step, bool exists) const {
    if (exists) barrier_wait(&shared.full[step.stage], step.round & 1);
    product_fence();
    ask_for_scores<T, kWidth, kRows, kRows>(s, uniform(own_tiles),
                                            uniform(listed_tile(step.stage)));
    product_commit();
  }

  // The step's first scores come in, behind the sums of the step before. At the end it is the next
  // step's.
  __forceinline__ void take_step(Sum& first, Sum& second, Scores& s, Scores& d_p,
                                 const Worker& worker, Step& step, bool has_next) const {
    const int stage = step.stage;
    const uint32_t listed_first = uniform(listed_tile(stage));
    const uint32_t listed_second = listed_first + kTileBytes;
    const uint32_t stats = stats_of_stage(stage);
    const float factor = p.problem.scale * kLog2E;
    product_wait<0>();
    keep_in_place(s);
    keep_in_place(first);
    if constexpr (kOwnsKeys) keep_in_place(second);
    if (step.number > 0) barrier_arrive(&shared.empty[stage > 0 ? stage - 1 : kStages - 1]);
    product_fence();
    ask_for_scores<T, kWidth, kRows, kRows>(d_p, uniform(own_tiles + kTileBytes), listed_second);
    product_commit();
    // Beside the products.
    const int tile = shared.seen[stage].tile;
    const uint32_t squares = shared.seen[stage].squares >> worker.row / 16;
    const bool partly = !sees_all_of(tile), has_holes = (squares & kAllSquares) != kAllSquares;
    // Of what is listed: rows of queries that hold NaN or infinity, or keys and values that do.
    const bool extreme =
        kOwnsKeys ? load_shared_word(stats + kRows * 8) != 0 : shared.extreme_keys[stage] != 0;
    const bool marked = worker.marked || extreme;
    if (partly) hide_unseen(s, columns_of(worker, tile));
    if (has_holes) hide_blocks(s, squares);
    if constexpr (kOwnsKeys) {
      make_chances<false>(s, factor, stats, worker.lane);
    } else {
      make_row_chances(s, factor, worker.lse);
    }
    if (marked) mark_unseen<true>(s, columns_of(worker, tile), squares);
    product_wait<0>();
    keep_in_place(d_p);
    if constexpr (kOwnsKeys) {
      make_gradients(d_p, s, d_p, stats, worker.lane);
    } else {
      make_row_gradients(d_p, s, d_p, worker.delta);
    }
    Words chances, gradients;
    if constexpr (kOwnsKeys) pack_weights<T>(chances, s);
    pack_weights<T>(gradients, d_p);
    if (marked) {
      if constexpr (!kOwnsKeys) pack_weights<T>(chances, s);
      mark_unseen(gradients, chances);
    }
    if (extreme) {
      if constexpr (kOwnsKeys) add_extreme_rows(second, chances, listed_second, worker);
      make_finite(listed_first, worker);
      if constexpr (kOwnsKeys) make_finite(listed_second, worker);
    }
    keep_in_place(s);
    keep_in_place(d_p);
    keep_in_place(first);
    if constexpr (kOwnsKeys) keep_in_place(second);
    product_fence();
    if constexpr (kOwnsKeys) ask_for_outputs<T, kTiles, kRows>(second, chances, listed_second);
    ask_for_outputs<T, kTiles, kRows>(first, gradients, listed_first);
    product_commit();
    step.next();
    ask_for_first_scores(s, step, has_next);
  }

  // To d_v, of rows of d_out with NaN or infinity, what the product will leave out.
  void add_extreme_rows(Sum& d_v, const Words& weights, uint32_t d_out_tile,
                        const Worker& worker) const {
    store_operands<T>(p_tile, weights, worker.row + worker.lane / 4, worker.lane % 4);
    __syncwarp();
    add_panels_not_finite<T>(d_v, p_tile, worker.row, d_out_tile, kRows * kPanelRow, worker.lane);
  }
  // A listed tile, whose NaN and infinity unseen weights must not meet, when all have its scores.
  void make_finite(uint32_t tile, const Worker& worker) const {
    Workers().meet();
    copy_finite<T, kWorkers>(tile, tile, kTileBytes, worker.thread);
    fence_async_proxy();
    Workers().meet();
  }
};

template <class T, BlockBackwardTile kTile>
void block_backward(const BlockBackwardParams& p) {
  using Backward = BlockBackward<T, kTile>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Backward::Shared*>(memory);
  static_assert(sizeof(shared) <= BlockBackwardTile::kPlaceBytes);
  allow_next_kernel();
  const Backward backward(p, shared, shared_address(memory));
  if (threadIdx.x < kWarpSize) backward.find_place();
  __syncthreads();
  if (uniform(static_cast<int>(threadIdx.x / kWarpgroupSize)) == 0) {
    give_registers<kTile.copy_registers>();
    if (threadIdx.x < kWarpSize) backward.copy();
  } else {
    take_registers<kTile.work_registers>();
    backward.work();
  }
}

}  // namespace pullback::attention

// The forward pass on Hopper's tensor cores (Shah et al. 2024, FlashAttention-3): the formula of
// smxx_forward.cuh, with a softcap, a block mask, or a bias and dropout.
//
// The first warpgroup copies (sm90_forward_copies.cuh): queries, then K 0, V 0, K 1, V 1, … through
// a ring of slots, and each tile of a bias with the one of its keys. Each other one has 64 of the
// queries, a warp 16, and asks the tensor cores for the next tile's scores and for this tile's
// outputs before it makes weights of the former while the latter come in. With the first scores of
// the next queries the last outputs of these come in.
//
// Shared memory: the warpgroups' queries, then the ring, all in panels of 64 columns
// (device/wgmma.cuh); tiles of a bias. With dropout keys are interleaved
// (device/shared_tile.cuh) and values alike: their order within a tile is the same, whatever it is.
#pragma once

#include "device/bulk.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_forward_copies.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/sm90_seen.cuh"
#include "ops/attention/cuda/smxx_forward_bias.cuh"
#include "ops/attention/cuda/smxx_forward_parts.cuh"
#include "ops/attention/cuda/smxx_forward_rows.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// Named barriers: of each warpgroup, of the two turns, and of all that work.
inline constexpr int kFirstGroup = 1, kFirstTurn = 4, kAllGroups = 6;

// Two warpgroups ask for their products by turns: the one makes weights while the other's products
// keep the tensor cores busy. Three need no order, nor do heads of 64, whose products are short.
inline void await_turn(int group) { named_wait(kFirstTurn + group, 2 * kWarpgroupSize); }
inline void pass_turn(int group) { named_arrive(kFirstTurn + 1 - group, 2 * kWarpgroupSize); }

template <class T, HopperTile kTile>
struct HopperForward {
  using Element = T;
  static constexpr int kWidth = kTile.width, kKeys = kTile.keys, kSlots = kTile.slots;
  static constexpr int kQuerySlots = kTile.query_slots, kGroups = kTile.groups;
  static constexpr int kRows = HopperTile::kGroupRows, kTileRows = kTile.rows(),
                       kPanels = kTile.panels();
  static constexpr bool kPersistent = kTile.persistent;
  static_assert(!kPersistent || kQuerySlots == 2);  // the next queries come beside the last ones
  static constexpr bool kBlocks = is_blocks(kTile.kind);
  static constexpr bool kDropout = kTile.dropout();
  static constexpr bool kBias = kTile.bias();
  static constexpr bool kSoftcap = kTile.kind == ForwardKind::softcap;
  // A call of dropout's generator is for 8 neighbouring keys, which are to be one lane's.
  static constexpr bool kInterleaved = kDropout;
  // Whether the copy engine may copy: a box keeps keys in their order, and who copies a bias beside
  // boxes needs more registers than three warpgroups of 160 leave.
  static constexpr bool kMaps = !kInterleaved && !(kBias && kGroups == 3);
  static constexpr bool kTurns = kGroups == 2 && kWidth > 64;
  // Who lets go of a slot: a thread of each warp, whose products are its warp's, or all threads,
  // who read a bias or what they see.
  static constexpr bool kAllRelease = kBias || kBlocks;
  static constexpr int kReleasers = kGroups * (kAllRelease ? kWarpgroupSize : 4);
  static constexpr int kPartKeys = kTile.part_keys(), kParts = kKeys / kPartKeys;
  static constexpr int kSlotBytes = kPanels * kKeys * kPanelRow;
  static constexpr int kQueryBytes = kPanels * kRows * kPanelRow;
  static_assert(!kBias || kSlots % 2 == 0);             // keys always have the even ones
  static constexpr int kBiasBytes = kRows * kKeys * 2;  // of a warpgroup's queries
  using Bias = StagedBias<T, kRows, kKeys, kWarpgroupSize, kInterleaved>;

  struct Shared {
    uint64_t full[kSlots], empty[kSlots], queries_full[kQuerySlots], queries_empty[kQuerySlots];
    TileNote tiles[kQuerySlots];
    // Of twice as many as have slots: who has let go of the keys may yet ask.
    StepNote<kParts> steps[kSlots];
  };

  const HopperForwardParams& hopper;
  const ForwardParams& params;
  Shared& shared;
  uint32_t queries;

  bool has_maps() const { return kMaps && hopper.has_maps; }
  // Whether heads may have columns before their own ones in shared memory (HalfSectors): with a
  // bias all of them lost more by it than some gained.
  static constexpr bool kShifts = kMaps && kWidth > 64 && !kBias;

  uint32_t queries_of(uint32_t query_slot, int group) const {
    return queries + (query_slot * kGroups + group) * kQueryBytes;
  }
  uint32_t slot(uint32_t number) const {
    return queries + kQuerySlots * kGroups * kQueryBytes + number * kSlotBytes;
  }
  const TileNote& tile(uint32_t number) const { return shared.tiles[number % kQuerySlots]; }
  // Of a step, or the place of its note, and of a warpgroup.
  uint32_t bias_tile(uint32_t step, int group) const {
    constexpr uint32_t kBiasSlots = kBias ? kTile.bias_slots() : 1;
    static_assert(!kBias || kSlots % kBiasSlots == 0);
    return slot(kSlots) + (step % kBiasSlots * kGroups + group) * kBiasBytes;
  }
};

// A warpgroup that works.
template <class Forward>
class ForwardWorker {
  using T = typename Forward::Element;
  static constexpr int kWidth = Forward::kWidth, kKeys = Forward::kKeys, kRows = Forward::kRows;
  static constexpr int kParts = Forward::kParts, kPartKeys = Forward::kPartKeys;
  static constexpr int kSlots = Forward::kSlots, kQuerySlots = Forward::kQuerySlots;
  static constexpr bool kBias = Forward::kBias, kBlocks = Forward::kBlocks;
  using Scores = float[1][kKeys / 8][4];
  using State = RunningRows<1, kWidth / 8>;

 public:
  ForwardWorker(const Forward& own, int group)
      : own_(own),
        group_(group),
        lane_(static_cast<int>(threadIdx.x % kWarpSize)),
        first_row_(group * kRows + static_cast<int>(threadIdx.x / 32 % 4) * 16),
        unit_(scale() * kLog2E),
        dropout_(Forward::kDropout ? own.params.problem.dropout.for_warp() : Dropout()) {}

  void run() {
    if (Forward::kTurns && group_ == 1) pass_turn(group_);
    uint32_t first = 0;  // step of the tile
    bool more;
    do {
      // Told the compiler: else products' operands have their addresses made anew for each.
      first = uniform(first), tile_ = uniform(tile_);
      keys_ = {uniform(keys_.slot), uniform(keys_.round)}, values_ = uniform(values_);
      await(keys_);
      const uint32_t steps = uniform(noted(own_.shared.steps[first % kSlots].count));
      const uint32_t own = steps > 0 ? await_tile() : 0;
      more = Forward::kPersistent && steps > 0;
      if (own > 0) take_keys(first, first + own);
      // Else the outputs come in with the next tile's first scores: of the steps in between, which
      // others' rows need, there is one at most.
      static_assert((Forward::kGroups - 1) * kRows <= kKeys && kSlots >= 4);
      if ((own == 0 || !more) && is_pending_) {
        take_last_values();
        finish(own > 0 ? tile_ : tile_ - 1);
        is_pending_ = false;
      }
      skip(steps - own);
      if (own == 0 && steps > 0) barrier_arrive(&own_.shared.queries_empty[tile_ % kQuerySlots]);
      first += steps;
      ++tile_;
    } while (more);
    if (Forward::kPersistent && has_marked_) redo_marked(own_.params, first_row_);
  }

 private:
  // With a bias scores are what the exponential takes but for kLog2E; with a softcap, tanh.
  float scale() const {
    const Problem& p = own_.params.problem;
    return kBias ? 1.0f : Forward::kSoftcap ? p.softcap : p.scale;
  }

  // The tile's queries; how many steps are this warpgroup's.
  uint32_t await_tile() const {
    barrier_wait(&own_.shared.queries_full[tile_ % kQuerySlots], tile_ / kQuerySlots & 1);
    if (!own_.has_maps()) fence_async_proxy();
    return uniform(own_.tile(tile_).steps[group_]);
  }

  // A place of the ring, and how often all of them were taken before, of which one bit counts.
  struct RingPlace {
    uint32_t slot = 0, round = 0;
    RingPlace after(uint32_t items) const {
      const uint32_t next = slot + items;
      return next < kSlots ? RingPlace{next, round} : RingPlace{next - kSlots, round ^ 1};
    }
    // Of the values that follow these keys. Only an odd ring ends between the two.
    RingPlace of_values() const { return kSlots % 2 == 0 ? RingPlace{slot + 1, round} : after(1); }
  };

  // This warpgroup's steps of a tile. With the first scores the last outputs of the tile before
  // come in. That one is finished before the loop, which holds nothing but what each step does:
  // with a tile's ends in it, or a copy of its steps beside it, the caches of instructions are too
  // small.
  void take_keys(uint32_t step, uint32_t end) {
    constexpr bool kBefore = Forward::kPersistent;
    // Where the ring is long what comes next is there before the weights are, and waiting for it
    // then costs nothing: it would between the weights and their product.
    constexpr bool kEarlyValues = kSlots > 4, kEarlyKeys = kSlots >= 8;
    // If no outputs are pending, what comes in is dropped.
    ask<kBefore>();
    product_wait<0>();
    keep_in_place(scores_[0]);
    if (kBefore) {
      keep_in_place(state_.out[0]);
      if (is_pending_) {
        release(values_);
        finish(tile_ - 1);
      }
      state_ = State();
    }
    is_pending_ = true;
    bool adds = false;  // whether outputs of the step before come in
#pragma unroll 1
    while (true) {
      float correction[2] = {1, 1};
      const bool rises = make_weights(step, correction);
      const RingPlace values = keys_.of_values();
      keys_ = keys_.after(2);
      const bool is_last = ++step == end;
      if (kEarlyValues) await(values);
      if (kEarlyKeys && !is_last) await(keys_);
      product_wait<0>();
      keep_in_place(state_.out[0]);
      if (adds) release(values_);
      if (rises) state_.rescale(0, correction);
      pack_weights<T>(weights_, scores_[0]);
      values_ = values.slot;
      if (!kEarlyKeys && !is_last) await(keys_);
      if (!kEarlyValues) await(values);
      if (is_last) return;
      ask<true>();
      adds = true;
    }
  }

  // For scores of the next keys and, with kOutputs, for the outputs that are pending; each is a
  // group of its own.
  template <bool kOutputs>
  void ask() {
    keep_in_place(scores_[0]);
    if (kOutputs) keep_in_place(state_.out[0]);
    if (Forward::kTurns) await_turn(group_);
    product_fence();
    ask_for_scores<T, kWidth, kRows, kKeys>(
        scores_[0], own_.queries_of(tile_ % kQuerySlots, group_), own_.slot(keys_.slot));
    product_commit();
    if (kOutputs) ask_for_outputs();
    if (Forward::kTurns) pass_turn(group_);
  }
  void ask_for_outputs() {
    attention::ask_for_outputs<T, kWidth / 8, kKeys>(state_.out[0], weights_, own_.slot(values_));
    product_commit();
  }

  // Weights of the scores that were asked for, before they are packed; whether outputs so far are
  // to be corrected.
  bool make_weights(uint32_t step, float (&correction)[2]) {
    const bool masked = noted(own_.shared.steps[step % kSlots].masked) != 0;
    product_wait<1>();
    keep_in_place(scores_[0]);
    if constexpr (kBias) {
      add_bias(scores_, own_.params.problem.scale,
               typename Forward::Bias(own_.bias_tile(step, group_), first_row_ % kRows, lane_));
    }
    release(keys_.slot);
    if constexpr (Forward::kSoftcap) take_tanh<T>(scores_, own_.params.problem.inner_scale);
    hide_unseen(step, masked);
    bool rises = false;
    state_.template take<kBias>(scores_, unit_, [&](int, const float(&by)[2]) {
      rises = true;
      correction[0] = by[0];
      correction[1] = by[1];
    });
    if constexpr (Forward::kDropout) {
      const TileNote& tile = own_.tile(tile_);
      drop(scores_, dropout_, static_cast<uint64_t>(tile.plane), tile.first_query + first_row_,
           noted(own_.shared.steps[step % kSlots].key[0]), lane_);
    }
    return rises;
  }

  // The outputs that are pending, where no scores are to come in with them.
  void take_last_values() {
    keep_in_place(state_.out[0]);
    product_fence();
    ask_for_outputs();
    product_wait<0>();
    keep_in_place(state_.out[0]);
    release(values_);
  }

  // Steps of the tile that this warpgroup's rows do not need.
  void skip(uint32_t steps) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      if (Forward::kTurns) {
        await_turn(group_);
        pass_turn(group_);
      }
      for (int item = 0; item < 2; ++item) {
        await(keys_);
        release(keys_.slot);
        keys_ = keys_.after(1);
      }
    }
  }

  // Until the tile at a place is there.
  void await(const RingPlace& at) const {
    barrier_wait(&own_.shared.full[at.slot], at.round & 1);
    if (!own_.has_maps()) fence_async_proxy();
  }
  // What a step's note says. It is read by those who let go of the step.
  template <class Word>
  Word noted(const Word& word) const {
    if constexpr (Forward::kAllRelease) return word;
    return uniform(lane_ == 0 ? word : 0);
  }
  void release(uint32_t slot) const {
    if (Forward::kAllRelease || lane_ == 0) barrier_arrive(&own_.shared.empty[slot]);
  }

  void hide_unseen(uint32_t step, bool masked) {
    const StepNote<kParts>& note = own_.shared.steps[step % kSlots];
    constexpr int kTiles = kPartKeys / 8;
    if constexpr (kBlocks) {
      constexpr uint32_t kSquares = all_squares(kPartKeys, 16);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32_t squares = note.squares[part] >> first_row_ / 16 & kSquares;
        if (squares != kSquares) {
          hide_squares<Forward::kInterleaved>(scores_, part * kTiles, (part + 1) * kTiles, squares,
                                              lane_);
        }
      }
    }
    if (!masked) return;
    const TileNote& tile = own_.tile(tile_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      hide_by_bits<Forward::kInterleaved>(scores_[0], part * kTiles, (part + 1) * kTiles, tile.band,
                                          tile.first_query + first_row_, noted(note.key[part]),
                                          lane_);
    }
  }

  // Outputs and lse of a tile of queries.
  void finish(uint32_t number) {
    const uint32_t slot = number % kQuerySlots;
    const TileNote& tile = own_.tile(number);
    if (!kBlocks || join(tile)) {
      // The warpgroup's outputs take the place of its queries, in rows instead of panels.
      named_wait(kFirstGroup + group_, kWarpgroupSize);
      const int left = tile.rows - first_row_;
      const WarpRows warp{lane_, first_row_, left < 16 ? left : 16};
      // Without a branch for warps that have no rows, which would cost the loop over tiles its
      // uniform registers.
      finish_rows<T, true, kBias>(own_.params, state_,
                                  own_.queries_of(slot, group_) + first_row_ % kRows * (kWidth * 2),
                                  warp, scale(), unit_, Place{*this, own_.params, tile});
      fence_async_proxy();  // before boxes take their place
    }
    barrier_arrive(&own_.shared.queries_empty[slot]);
  }

  // 0 · NaN: what a row does not see may have reached it. Such rows are done again: a call within
  // the loop over tiles would cost it its uniform registers, so that they are marked there.
  struct Place {
    ForwardWorker& worker;
    const ForwardParams& params;
    const TileNote& tile;

    T* out() const { return static_cast<T*>(params.out.data) + tile.out; }
    float* lse() const { return static_cast<float*>(params.lse.data) + tile.lse; }
    int columns_before() const { return Forward::kShifts ? tile.columns_before : 0; }
    void redo(int row) const {
      if constexpr (Forward::kPersistent) {
        out()[row * params.out.row] = from_real<T>(quiet_nan<float>());
        worker.has_marked_ = true;
      } else {
        redo_one(params, tile.number, row);
      }
    }
  };
  static __noinline__ void redo_one(const ForwardParams& params, uint32_t number, int row) {
    redo_row<T, Forward::kTileRows, kBlocks>(params, number, row);
  }
  static __noinline__ void redo_marked(const ForwardParams& params, int first_row) {
    TileNumbers<true> numbers(params);
    for (uint32_t number; numbers.take(number);) {
      QueryTile tile;
      if (!find_query_tile<kBlocks>(params.problem, params.q_tiles, params.pair_group,
                                    Forward::kTileRows, tile, number)) {
        continue;
      }
      const int rows = TileRows(tile, Forward::kTileRows).valid;
      const T* const out = static_cast<const T*>(params.out.data) + tile.batch * params.out.batch +
                           (tile.sequence.q_begin + tile.first) * params.out.row +
                           tile.head * params.out.head;
      for (int row = first_row; row < first_row + 16 && row < rows; ++row) {
        const float element = to_real(out[row * params.out.row]);
        if (element != element) {
          redo_row<T, Forward::kTileRows, kBlocks>(params, number, row);
        }
      }
    }
  }

  // With a block mask: whether this is the last thread block, or the only one, of those that share
  // the tile. The state is the tile's then.
  bool join(const TileNote& tile) {
    constexpr int kThreads = Forward::kGroups * kWarpgroupSize;
    // A warpgroup without rows does not come here.
    struct Workers {
      int count;
      int number() const { return static_cast<int>(threadIdx.x) - kWarpgroupSize; }
      void meet() const { named_wait(kAllGroups, count); }
    };
    const SeenOwner owner = own_.params.problem.blocks.owners[tile.owner];
    if (owner.parts == 1) return true;
    const Workers workers{tile.rows > kRows ? kThreads : kWarpgroupSize};
    static_assert(Forward::kGroups <= 2 || !kBlocks);
    return join_parts<kThreads>(state_, own_.params, owner, tile.plane, unit_, workers.number(),
                                workers);
  }

  const Forward& own_;
  const int group_, lane_, first_row_;
  const float unit_;
  const Dropout dropout_;
  bool has_marked_ = false;  // rows that are to be done again
  uint32_t tile_ = 0;
  RingPlace keys_;       // of the next step
  uint32_t values_ = 0;  // slot of those whose weights are pending
  bool is_pending_ = false;
  State state_;
  Scores scores_ = {};
  uint32_t weights_[kKeys / 16][4] = {};
};

template <class T, HopperTile kTile>
void hopper_forward(const HopperForwardParams& params) {
  using Forward = HopperForward<T, kTile>;
  // Those who work would wait forever for registers that the launch did not get.
  constexpr int kLaunched = 65536 / kTile.resident / kTile.threads() / 8 * 8;
  static_assert(kTile.copy_registers + kTile.groups * kTile.work_registers <=
                (kTile.groups + 1) * kLaunched);
  // No byte to spare, hence nothing beside dynamic memory, which begins at a multiple of 1024.
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Forward::Shared*>(memory);
  static_assert(sizeof(shared) <= HopperTile::kNoteBytes);
  const Forward forward{params, params.all, shared,
                        shared_address(memory) + HopperTile::kNoteBytes};
  using Copies = ForwardCopies<Forward>;
  if (threadIdx.x == 0) {
    const uint32_t arrivals = Copies::arrivals(!forward.has_maps());
    for (int slot = 0; slot < kTile.slots; ++slot) {
      const bool of_keys = slot % 2 == 0;
      barrier_init(&shared.full[slot], of_keys ? Copies::arrivals_of_keys(forward) : arrivals);
    }
    for (uint64_t& barrier : shared.empty) barrier_init(&barrier, Forward::kReleasers);
    for (uint64_t& barrier : shared.queries_full) barrier_init(&barrier, arrivals);
    for (uint64_t& barrier : shared.queries_empty) {
      barrier_init(&barrier, kTile.groups * kWarpgroupSize);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x / kWarpgroupSize)) - 1;
  if (group < 0) {
    give_registers<kTile.copy_registers>();
    Copies(forward).run();
  } else {
    take_registers<kTile.work_registers>();
    ForwardWorker<Forward>(forward, group).run();
  }
}

}  // namespace pullback::attention

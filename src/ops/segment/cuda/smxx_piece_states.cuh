// The states of the segments that end in a chunk of rows of pieces (smxx_piece_chunks.cuh).
#pragma once

#include "ops/segment/cuda/smxx_piece_forms.cuh"

namespace pullback::segment_cuda {

// What lanes have kept at some rows of a chunk, in shared memory.
template <class Kept>
class KeptRows {
 public:
  static constexpr int kPlanes = sizeof(Kept) / 16;
  static_assert(sizeof(Kept) % 16 == 0);

  // The first 16 bytes of each in the place of the row, the others in another.
  KeptRows(uint32_t first, uint32_t others) : first_(first), others_(others) {}
  // `place` is LaneGroup::place() of the row.
  void store(uint32_t place, const Kept& kept) const {
    const Parts parts{kept};
#pragma unroll
    for (int k = 0; k < kPlanes; ++k) {
      device::store_shared(plane(k) + place, parts.word[k]);
    }
  }
  Kept load(uint32_t place) const {
    Parts parts;
#pragma unroll
    for (int k = 0; k < kPlanes; ++k) {
      parts.words[k] = load_shared<device::Words>(plane(k) + place);
    }
    return parts.kept;
  }
  // What lies there before anything is stored.
  template <class Piece>
  Piece row(uint32_t place) const {
    return load_shared<Piece>(first_ + place);
  }

 private:
  union Parts {
    Kept kept;
    device::Words words[kPlanes];
    uint32_t word[kPlanes][4];
  };
  uint32_t plane(int k) const { return k == 0 ? first_ : others_ + (k - 1) * kNarrowPlaneBytes; }
  uint32_t first_, others_;
};

// What the groups of a warp have of some rows, put together for all of them.
template <class Op, class T>
PieceState<Op, T> met(PieceState<Op, T> state, const LaneGroup& group) {
#pragma unroll 1
  for (int step = group.lanes(); step < device::kWarpSize; step *= 2) {
#pragma unroll
    for (int c = 0; c < kPieceColumns<T>; ++c) {
      unite<Op>(state.column[c], shuffle_xor(state.column[c], step));
    }
  }
  return state;
}

template <class Op, class T>
class PieceStates {
 public:
  using Form = typename PieceFormOf<Op, T>::Type;
  using Kept = typename Form::Kept;
  using State = typename Form::State;
  using Rows = typename Form::Rows;
  using Piece = typename State::Piece;

  // Rows of x from `at` up to `stop`, in which segments end at the lane's `ends`; x is the lane's
  // piece of the first row of all. `open` is the state of the rows of the first segment that are
  // before them.
  PieceStates(const KeptRows<Kept>& kept, const Form& form, const Rows& rows, const Piece* x,
              int at, int stop, const LaneMarks& ends, const State& open)
      : kept_(kept), form_(form), group_(form.group), x_(x), at_(at), stop_(stop), open_(open) {
    walk(rows, ends);
  }

  // Of the segment that ends with that row of the chunk, the first one that does or another; or of
  // the rows of one that have come up to the last row. If is_exact().
  State state(uint32_t row, bool is_first) const {
    return form_.state(kept_at(row), open_, is_first);
  }
  bool is_exact(uint32_t row) const {
    if constexpr (kMayFail) return Form::is_exact(kept_at(row));
    return true;
  }
  // By all lanes. The same for each group, whose segment begins with row `begin` of x, exact or
  // not; of those that do not `want` it, anything.
  State exact_state(bool want, uint32_t row, int begin, bool is_first) const {
    State result = state(row, is_first);
    if constexpr (kMayFail) add_up(want && !is_exact(row), row, begin, result);
    return result;
  }

 private:
  static constexpr bool kMayFail = requires(Kept kept) { Form::is_exact(kept); };
  Kept kept_at(uint32_t row) const { return kept_.load(group_.place(row)); }

  // Along the rows of the chunk. Leaves what is kept of the segments that end at their last rows,
  // of the rows behind the last end at the last of all; at others something.
  void walk(const Rows& rows, const LaneMarks& ends) const {
    const int lane = threadIdx.x % device::kWarpSize, lanes = group_.lanes();
    const uint32_t enders = __ballot_sync(device::kAllLanes, ends.any());
    const uint32_t own = group_.place(group_.first_row());
    Kept kept = first_kept(rows, ends, enders & ((1u << (lane - group_.piece)) - 1));
#pragma unroll
    for (int i = 0; i < kNarrowLaneRows; ++i) {
      form_.add(kept, rows, i);
      kept_.store(group_.place_from(own, i), kept);
      // Into other registers, or it has to wait until the store has read these.
      kept = either(ends.at(i), form_.begin(rows, i + 1), kept);
    }

    // Of the groups up to this one, those since the last end, in lanes.
    const uint32_t enders_here = enders & (0xffffffffu >> (device::kWarpSize - 1 - lane));
    const int last = enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0;
    const int since = lane - group_.piece - (last & -lanes);
    // As long as there are so many groups in a row, behind the first, of which none has an end.
    uint32_t run = ~(enders | (0xffffffffu >> (device::kWarpSize - lanes)));
#pragma unroll 1
    for (int step = lanes; run != 0; run &= run >> step, step *= 2) {
      Kept whole = shuffle_up(kept, step);
      form_.append(whole, kept);
      kept = either(since >= step, whole, kept);
    }
    Kept whole = shuffle_up(kept, lanes);
    if (ends.any() && group_.number > 0) {
      const uint32_t place = group_.place_from(own, ends.first());
      form_.append(whole, kept_.load(place));
      kept_.store(place, whole);
    }
    if (!ends.at(kNarrowLaneRows - 1))
      kept_.store(group_.place_from(own, kNarrowLaneRows - 1), kept);
    __syncwarp();
  }
  // What a group begins with. `before`: lanes of groups before it that have ends.
  Kept first_kept(const Rows& rows, const LaneMarks& ends, uint32_t before) const {
    if constexpr (requires(Piece first) { Form::begin_at(first, true, open_); }) {
      const int source = before != 0 ? 31 - __clz(static_cast<int>(before)) : 0;
      const int end = __shfl_sync(device::kAllLanes, ends.last(), source);
      const int row = before != 0 ? (source >> group_.lane_bits) * kNarrowLaneRows + end + 1 : 0;
      const auto first = kept_.template row<Piece>(group_.place(row));
      __syncwarp();
      return Form::begin_at(first, before == 0, open_);
    } else {
      return group_.number == 0 ? form_.go_on(rows, open_) : form_.begin(rows, 0);
    }
  }
  // Word by word, so that nothing branches.
  static Kept either(bool first, const Kept& a, const Kept& b) {
    union Words {
      Kept kept;
      uint32_t word[sizeof(Kept) / 4];
    };
    Words result = {a};
    const Words other = {b};
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(Kept) / 4); ++k) {
      result.word[k] = first ? result.word[k] : other.word[k];
    }
    return result.kept;
  }

  // From rows of x, one by one: short ones by their groups, others by all.
  void add_up(bool again, uint32_t row, int begin, State& result) const {
    constexpr int kAlone = 32;  // rows
    const int next = at_ + static_cast<int>(row) + 1, stop = next < stop_ ? next : stop_;
    const int from = begin < at_ ? at_ : begin;
    const bool alone = stop - from <= kAlone;
    bool left = again;
#pragma unroll 1
    while (true) {
      const uint32_t lefts = __ballot_sync(device::kAllLanes, left);
      if (lefts == 0) break;
      const bool all_alone = __any_sync(device::kAllLanes, left && alone);
      const int lane = threadIdx.x % device::kWarpSize;
      const int of = all_alone ? lane : __ffs(static_cast<int>(lefts)) - 1;
      const int first = __shfl_sync(device::kAllLanes, from, of);
      const int last = __shfl_sync(device::kAllLanes, stop, of);
      // Groups that want the same rows: in the last turn all do.
      const bool mine = all_alone ? left && alone : first == from && last == stop;
      State part = State::start();
      int place = first + (all_alone ? 0 : group_.number);
      if (place < last) part.begin(place);
#pragma unroll 1
      for (; place < last && (mine || !all_alone); place += all_alone ? 1 : group_.groups()) {
        part.add(x_[static_cast<int64_t>(place) << group_.lane_bits], place);
      }
      if (!all_alone) part = met<Op>(part, group_);
      if (mine) {
        result = begin < at_ ? open_ : State::start();
        result.append(part);
        left = false;
      }
    }
  }

  KeptRows<Kept> kept_;
  const Form& form_;
  const LaneGroup& group_;
  const Piece* x_;
  int at_, stop_;
  const State& open_;
};

}  // namespace pullback::segment_cuda

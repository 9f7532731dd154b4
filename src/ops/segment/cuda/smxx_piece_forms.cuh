// What a lane keeps of its columns of the rows since the last end of a segment, along its rows of a
// chunk (smxx_piece_chunks.cuh): the op's states, or where these take many instructions a row,
// something shorter, of which states are made once for a segment. Such a form has
//   enter(rows, at, first)  for a chunk from row `at` of x on, of which the lane has those from the
//                           first-th on
//   renew()                 after a chunk with a sum that was not exact, and where another segment
//                           begins that has many rows
//   begin(rows, i)          of no rows yet, the i-th of the lane being the next, if it has one more
//   go_on(rows, open)       the same of the first lanes, behind those of `open`; or for all lanes
//   begin_at(first, before, open)  which know the first row of the segment that goes on, or that it
//                           began before the chunk
//   add(kept, rows, i)      adds the i-th
//   append(a, b)            b is of the rows behind those of a
//   state(kept, open, goes_on)  the op's, of the first segment (goes_on) or another
//   spread(open, rows)      of `open`, which all lanes have, what is to be the lane's own: together
//                           they stand for it
//   add_all(state, rows, reload)  adds all rows to that; reload(i) reads the i-th again
// and maybe is_exact(kept): whether it is of use.
#pragma once

#include "ops/segment/cuda/smxx_piece_chunks.cuh"
#include "ops/segment/cuda/smxx_run.cuh"

namespace pullback::segment_cuda {

template <class Op, class T>
struct PieceState {
  static constexpr int kVector = kPieceColumns<T>;
  using Piece = Values<T, kVector>;
  typename Op::State column[kVector];

  static PieceState start() {
    PieceState state;
#pragma unroll
    for (int c = 0; c < kVector; ++c) state.column[c] = Op::start();
    return state;
  }
  // Of no rows yet, the next one being at `place`.
  void begin(int place) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) column[c] = begin_run<Op>(place);
  }
  void add(const Piece& row, int place) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) Op::add(column[c], row.real(c), place);
  }
  // Rows from `place` on, reload(i) being the i-th, one by one.
  template <class Reload>
  void add_again(const Reload& reload, int place) {
#pragma unroll 1
    for (int i = 0; i < kNarrowLaneRows; ++i) add(reload(i), place + i);
  }
  void append(const PieceState& later) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) Op::append(column[c], later.column[c]);
  }
};

template <class Op, class T>
struct StatesForm {
  using State = PieceState<Op, T>;
  using Kept = State;
  using Rows = PieceRows<T>;
  static constexpr int kVector = State::kVector;
  const LaneGroup& group;
  int place = 0;  // of the lane's first row

  void enter(const Rows&, int at, int first) { place = at + first; }
  static void renew() {}
  Kept begin(const Rows&, int i) const {
    Kept kept;
    kept.begin(place + i);
    return kept;
  }
  Kept go_on(const Rows& rows, const State& open) const {
    if constexpr (Op::kPlaces) {
      if (open.column[0].place < 0) return begin(rows, 0);
    }
    return open;
  }
  void add(Kept& kept, const Rows& rows, int i) const { kept.add(rows.piece[i], place + i); }
  static void append(Kept& a, const Kept& b) { a.append(b); }
  static State state(const Kept& kept, const State&, bool) { return kept; }

  State spread(const State& open, const Rows&) const {
    return group.number == 0 ? open : State::start();
  }
  template <class Reload>
  void add_all(State& state, const Rows& rows, const Reload& reload) const {
    state = go_on(rows, state);
    const auto value = [&](int c, int i) { return rows.piece[i].real(c); };
    if (!add_rows<Op, Real<T>, kNarrowLaneRows>(state.column, value, place)) {
      state.add_again(reload, place);
    }
  }
};

// Extremes with their places, as if there were no NaN.
template <class Op, class T>
struct ExtremeForm : StatesForm<Op, T> {
  using Form = StatesForm<Op, T>;
  using typename Form::Kept, typename Form::Rows, typename Form::State;

  void add(Kept& kept, const Rows& rows, int i) const {
#pragma unroll
    for (int c = 0; c < State::kVector; ++c) {
      const Real<T> x = rows.piece[i].real(c);
      Op::append_number(kept.column[c], Op::state_of(Op::top_of_row(x), this->place + i));
    }
  }
  static void append(Kept& a, const Kept& b) {
#pragma unroll
    for (int c = 0; c < State::kVector; ++c) Op::append_number(a.column[c], b.column[c]);
  }

  // No, where there is a NaN: it has no place.
  static bool is_exact(const Kept& kept) {
    bool exact = true;
#pragma unroll
    for (int c = 0; c < State::kVector; ++c) exact &= kept.column[c].top == kept.column[c].top;
    return exact;
  }
};

// Sums of exponentials in 32 bits for softmax, which asks for more digits than one shift for many
// segments leaves: each segment's shift is its first row, which all lanes that have rows of it
// know. What was before the chunk is not in its sum.
template <class Op, class T>
struct AimedForm : StatesForm<Op, T> {
  using Form = StatesForm<Op, T>;
  using typename Form::Kept, typename Form::Rows, typename Form::State;
  using Piece = typename State::Piece;
  static constexpr int kVector = State::kVector;

  // Of no rows yet, in a group whose first rows are of a segment that `first` is the first row of,
  // if it did not begin before the chunk.
  static Kept begin_at(const Piece& first, bool is_before, const State& open) {
    const bool goes_on = is_before && open.column[0].sum != 0;
    Kept kept = State::start();
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      kept.column[c].shift = goes_on ? open.column[c].shift : Op::aim_at(first.real(c));
    }
    return kept;
  }
  static Kept begin(const Rows& rows, int i) {
    Kept kept = State::start();
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (i < kNarrowLaneRows) kept.column[c].shift = Op::aim_at(rows.piece[i].real(c));
    }
    return kept;
  }
  static void add(Kept& kept, const Rows& rows, int i) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      kept.column[c].sum += exponential(rows.piece[i].real(c) - kept.column[c].shift);
    }
  }
  static void append(Kept& a, const Kept& b) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      a.column[c] = {b.column[c].shift, a.column[c].sum + b.column[c].sum};
    }
  }
  static State state(Kept kept, const State& open, bool goes_on) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) kept.column[c].sum += goes_on ? open.column[c].sum : 0;
    return kept;
  }

  // All lanes at one row, so that their states are put together without an exponential.
  State spread(const State& open, const Rows& rows) const {
    State own = open;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float first = __shfl_sync(device::kAllLanes, rows.piece[0].real(c), this->group.piece);
      if (own.column[c].sum == 0) own.column[c].shift = Op::aim_at(first);
      if (this->group.number != 0) own.column[c].sum = 0;
    }
    return own;
  }
  // No, where a row is not finite or far above the first. Many rows make a large sum, too.
  static bool is_exact(const Kept& kept) {
    bool exact = true;
#pragma unroll
    for (int c = 0; c < kVector; ++c) exact &= kept.column[c].sum <= Op::kMostOfMany;
    return exact;
  }
};

// The extremes of pairs of 16-bit columns, and their rows in the chunk.
template <class Op, class T>
struct PairsForm {
  using State = PieceState<Op, T>;
  using Rows = PieceRows<T>;
  static constexpr int kPairs = State::kVector / 2;
  struct Kept {
    uint32_t word[Op::kPlaces ? 2 * kPairs : kPairs];  // extremes, then rows
  };
  static constexpr uint32_t kBefore = 0xffff;  // the row of an extreme before the chunk
  const LaneGroup& group;
  int at = 0;          // place of the chunk's first row
  uint32_t first = 0;  // the lane's first row in it

  void enter(const Rows&, int at_, int first_) {
    at = at_;
    first = first_;
  }
  static void renew() {}
  Kept begin(const Rows&, int i) const {
    const float lowest = -device::infinity<float>();
    Kept kept;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      kept.word[k] = device::pack<T>(lowest, lowest);
      if constexpr (Op::kPlaces) kept.word[kPairs + k] = twice(first + i);
    }
    return kept;
  }
  Kept go_on(const Rows& rows, const State& open) const {
    Kept kept = begin(rows, 0);
    if constexpr (Op::kPlaces) {
      if (open.column[0].place < 0) return kept;
    }
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      kept.word[k] = device::pack<T>(open.column[2 * k].top, open.column[2 * k + 1].top);
      if constexpr (Op::kPlaces) kept.word[kPairs + k] = twice(kBefore);
    }
    return kept;
  }
  void add(Kept& kept, const Rows& rows, int i) const {
    const uint32_t row = twice(first + i);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      Op::template add_pair<T>(kept.word[k], rows_of(kept, k), rows.piece[i].word[k], row);
    }
  }
  static void append(Kept& a, Kept b) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      Op::template append_pair<T>(a.word[k], rows_of(a, k), b.word[k], rows_of(b, k));
    }
  }
  State state(Kept kept, const State& open, bool) const {
    State state;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      float low, high;
      device::unpack<T>(kept.word[k], low, high);
      const uint32_t rows = rows_of(kept, k);
      state.column[2 * k] = Op::state_of(low, place_of(rows & 0xffff, open, 2 * k));
      state.column[2 * k + 1] = Op::state_of(high, place_of(rows >> 16, open, 2 * k + 1));
    }
    return state;
  }

  State spread(const State& open, const Rows&) const {
    return group.number == 0 ? open : State::start();
  }
  template <class Reload>
  void add_all(State& state, const Rows& rows, const Reload& reload) const {
    Kept kept = begin(rows, 0);
#pragma unroll
    for (int i = 0; i < kNarrowLaneRows; ++i) add(kept, rows, i);
    if constexpr (Op::kPlaces) {
      if (!is_exact(kept)) {
        const int place = at + static_cast<int>(first);
        if (state.column[0].place < 0) state.begin(place);
        state.add_again(reload, place);
        return;
      }
    }
    if (is_above(kept, state)) state.append(this->state(kept, state, true));
  }

  // No, where there is a NaN: it has no place.
  static bool is_exact(const Kept& kept)
    requires(Op::kPlaces)
  {
    uint32_t nan = 0;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) nan |= Packed<T>::nan(kept.word[k]);
    return nan == 0;
  }

 private:
  static uint32_t twice(uint32_t number) { return number * 0x10001u; }
  // Whether any of them may take the place of one that came before: mostly none does.
  static bool is_above(const Kept& kept, const State& state) {
    uint32_t above = 0;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const uint32_t before = device::pack<T>(state.column[2 * k].top, state.column[2 * k + 1].top);
      above |= Packed<T>::template above<true>(kept.word[k], before);
      if constexpr (!Op::kPlaces) above |= Packed<T>::nan(kept.word[k]);
    }
    return above != 0;
  }
  // Of an op without places, any word.
  static uint32_t& rows_of(Kept& kept, int k) { return kept.word[Op::kPlaces ? kPairs + k : k]; }
  int place_of(uint32_t row, const State& open, int c) const {
    if constexpr (Op::kPlaces) {
      return row == kBefore ? open.column[c].place : at + static_cast<int>(row);
    }
    return 0;
  }
};

// Sums of exp(x - shift), with one shift a column for all segments of the chunk: that of the chunk
// before, unless one of its sums was not exact.
template <class Op, class T>
struct PowersForm {
  using State = PieceState<Op, T>;
  using Rows = PieceRows<T>;
  static constexpr int kVector = State::kVector;
  struct Kept {
    float sum[kVector];
  };
  using Shift = SharedShift<Op, T>;
  static constexpr float kTurn = Shift::kTurns ? -kLog2OfE : -1;  // of a shift of 1
  const LaneGroup& group;
  float turn[kVector] = {};
  bool is_aimed = false;

  // At the largest of the groups' first rows.
  void enter(const Rows& rows, int, int) {
    if (is_aimed) return;
    is_aimed = true;
    float most[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) most[c] = rows.piece[0].real(c);
#pragma unroll 1
    for (int step = group.lanes(); step < device::kWarpSize; step *= 2) {
#pragma unroll
      for (float& x : most) x = fmaxf(x, __shfl_xor_sync(device::kAllLanes, x, step));
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) turn[c] = Shift::at(most[c]) * kTurn;
  }
  // At others, in the next chunk.
  void renew() { is_aimed = false; }
  static Kept begin(const Rows&, int) { return {}; }
  Kept go_on(const Rows&, const State& open) const {
    Kept kept;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      kept.sum[c] = open.column[c].sum * exponential(open.column[c].shift - shift(c));
    }
    return kept;
  }
  void add(Kept& kept, const Rows& rows, int i) const {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float x = rows.piece[i].real(c);
      kept.sum[c] +=
          Shift::kTurns ? device::exp2_approx(fma(x, kLog2OfE, turn[c])) : exponential(x + turn[c]);
    }
  }
  static void append(Kept& a, const Kept& b) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) a.sum[c] += b.sum[c];
  }
  State state(const Kept& kept, const State&, bool) const {
    State state;
#pragma unroll
    for (int c = 0; c < kVector; ++c) state.column[c] = {shift(c), kept.sum[c]};
    return state;
  }

  State spread(const State& open, const Rows& rows) const {
    if (group.number != 0) return state({}, open, false);
    const Kept kept = go_on(rows, open);
    return open.column[0].sum == 0 || is_exact(kept) ? state(kept, open, false) : open;
  }
  template <class Reload>
  void add_all(State& state, const Rows& rows, const Reload& reload) {
    Kept kept = {}, whole;
#pragma unroll
    for (int i = 0; i < kNarrowLaneRows; ++i) add(kept, rows, i);
    bool same = true;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      same &= state.column[c].shift == shift(c);
      whole.sum[c] = state.column[c].sum + kept.sum[c];
    }
    // Powers may vanish beside others.
    bool exact = true;
    if (same && is_exact(whole)) {
      state = this->state(whole, state, false);
    } else if (is_exact(kept)) {
      state.append(this->state(kept, state, false));
    } else {
      exact = false;
      // What a state without rows aims at may be above all rows, which would vanish beside it.
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        if (state.column[c].sum == 0) state.column[c] = Op::start();
      }
      state.add_again(reload, 0);
    }
    if (!__all_sync(device::kAllLanes, exact)) renew();
  }

  static bool is_exact(const Kept& kept) { return Shift::are_exact(kept.sum); }

 private:
  float shift(int c) const { return turn[c] * (Shift::kTurns ? -kLogOf2 : -1); }
};

template <class Op, class T>
inline constexpr bool kPacksPieces = kPacksRuns<Op, T, kPieceColumns<T>>;
template <class Op, class T>
struct PieceFormOf {
  using Type = StatesForm<Op, T>;
};
template <class Op, class T>
  requires kPacksPieces<Op, T>
struct PieceFormOf<Op, T> {
  using Type = PairsForm<Op, T>;
};
template <class Op, class T>
  requires(Op::kPlaces && !kPacksPieces<Op, T>)
struct PieceFormOf<Op, T> {
  using Type = ExtremeForm<Op, T>;
};
template <class Op, class T>
  requires kSharesShift<Op, T>
struct PieceFormOf<Op, T> {
  using Type = PowersForm<Op, T>;
};
template <class Op, class T>
  requires(kAims<Op> && !kSharesShift<Op, T>)
struct PieceFormOf<Op, T> {
  using Type = AimedForm<Op, T>;
};

}  // namespace pullback::segment_cuda

// What a lane keeps of the rows since the last end of a segment, along its rows of a chunk
// (smxx_chunks.cuh): the op's state, or where that takes many instructions a row, something shorter
// of which a state is made once for a segment. Such a form has
//   of(rows, at, open)  for a chunk from row `at` of x on; `open` is the state of the rows of its
//                       first segment that are before it
//   begin(rows, i)      of no rows yet, the i-th of the lane being the next, if it has one more
//   go_on(rows, open)   the same of the first lane, behind those of `open`
//   add(kept, rows, i)  adds the i-th
//   leaving, entering   the same as all lanes know it, and back
//   append(a, b)        b is of the rows behind those of a
//   state(kept, lane)   the op's, of what that lane kept
// and maybe is_exact(kept): whether it is of use.
#pragma once

#include "ops/segment/cuda/smxx_chunks.cuh"
#include "ops/segment/cuda/smxx_shared_shift.cuh"

namespace pullback::segment_cuda {

inline int lane_of_warp() { return threadIdx.x % device::kWarpSize; }

template <class Op, class T>
struct StateForm {
  using State = typename Op::State;
  using Kept = State;
  int at;

  static StateForm of(const Chunk<T>&, int at, const State&) { return {at}; }
  int place(int i) const { return at + lane_of_warp() * Chunk<T>::kLaneRows + i; }
  Kept begin(const Chunk<T>&, int i) const { return begin_run<Op>(place(i)); }
  Kept go_on(const Chunk<T>& rows, const State& open) const {
    if constexpr (Op::kPlaces) {
      if (open.place < 0) return begin(rows, 0);
    }
    return open;
  }
  void add(Kept& kept, const Chunk<T>& rows, int i) const { Op::add(kept, rows.real(i), place(i)); }
  static Kept leaving(const Kept& kept) { return kept; }
  static Kept entering(const Kept& kept) { return kept; }
  static void append(Kept& a, const Kept& b) { Op::append(a, b); }
  static State state(const Kept& kept, int) { return kept; }
};

// The first of the largest 16-bit floats as one integer: in its upper half the float, as an integer
// of the same order, in the lower one how many rows of the lane, or of the chunk, are behind its
// own, or all, if it is one before the chunk. -0 is 0.
template <class Op, class T>
struct KeyForm {
  using State = typename Op::State;
  using Kept = int;
  static constexpr int kRows = Chunk<T>::kRows, kLaneRows = Chunk<T>::kLaneRows;
  // No row: below all keys, also with up to 2^16 added.
  static constexpr Kept kNone = -0x7fffffff - 1;
  static_assert(kRows < 1 << 16);
  int at;
  int before;  // the place of the one before the chunk

  static KeyForm of(const Chunk<T>&, int at, const State& open) { return {at, open.place}; }
  static Kept begin(const Chunk<T>&, int) { return kNone; }
  static Kept go_on(const Chunk<T>&, const State& open) {
    if (open.place < 0) return kNone;
    const uint32_t pair = ordered(device::pack<T>(0, open.top));
    return static_cast<Kept>(__byte_perm(pair, kLaneRows, 0x3254));
  }
  static void add(Kept& kept, const Chunk<T>& rows, int i) {
    const uint32_t pair = ordered(Op::upward(rows.pair(i / 2))), behind = kLaneRows - 1 - i;
    const uint32_t key = i % 2 == 0 ? (pair << 16) + behind : __byte_perm(pair, behind, 0x3254);
    kept = max(kept, static_cast<Kept>(key));
  }
  static Kept leaving(Kept kept) { return kept + rows_behind(lane_of_warp()); }
  static Kept entering(Kept kept) { return kept - rows_behind(lane_of_warp()); }
  static void append(Kept& a, Kept b) { a = max(a, b); }
  State state(Kept kept, int lane) const {
    const Kept key = kept + rows_behind(lane);
    const auto bits = static_cast<uint16_t>(device::reordered(static_cast<uint32_t>(key)) >> 16);
    const int behind = key & 0xffff;
    return Op::state_of(Op::top_of(device::to_real(T{bits})),
                        behind < kRows ? at + kRows - 1 - behind : before);
  }

 private:
  static uint32_t ordered(uint32_t pair) { return device::reordered(Packed<T>::canonical(pair)); }
  static int rows_behind(int lane) { return (device::kWarpSize - 1 - lane) * kLaneRows; }
};

// The sum of exp(x - shift), with one shift for all segments of the chunk: the largest of some
// rows.
template <class Op, class T>
struct PowerForm {
  using State = typename Op::State;
  using Kept = float;
  using Shift = SharedShift<Op, T>;
  float shift, turn;

  explicit PowerForm(float shift_) : shift(shift_), turn(-kLog2OfE * shift_) {}
  static PowerForm of(const Chunk<T>& rows, int, const State&) {
    const auto in_order = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    const int first = in_order(static_cast<int>(__float_as_uint(rows.real(0))));
    const int most = in_order(__reduce_max_sync(device::kAllLanes, first));
    return PowerForm(Shift::at(__uint_as_float(static_cast<uint32_t>(most))));
  }
  static Kept begin(const Chunk<T>&, int) { return 0; }
  Kept go_on(const Chunk<T>&, const State& open) const {
    return open.sum * exponential(open.shift - shift);
  }
  void add(Kept& kept, const Chunk<T>& rows, int i) const {
    const float x = rows.real(i);
    kept += Shift::kTurns ? device::exp2_approx(fma(x, kLog2OfE, turn)) : exponential(x - shift);
  }
  static Kept leaving(Kept kept) { return kept; }
  static Kept entering(Kept kept) { return kept; }
  static void append(Kept& a, Kept b) { a += b; }
  State state(Kept kept, int) const { return {shift, kept}; }

  static bool is_exact(Kept kept) {
    const float sums[1] = {kept};
    return Shift::are_exact(sums);
  }
  // The same of rows behind others, which the shift was one of.
  bool is_small(Kept kept) const {
    return Shift::serves(shift) && __float_as_uint(kept) <= Shift::kMost;
  }
};

// The same of 32 bits for softmax, which asks for more digits: each run of rows has its first one
// as its shift.
template <class Op, class T>
struct AimedForm {
  using State = typename Op::State;
  using Kept = State;

  static AimedForm of(const Chunk<T>&, int, const State&) { return {}; }
  static Kept begin(const Chunk<T>& rows, int i) {
    Kept kept = Op::start();
    if (i < Chunk<T>::kLaneRows) kept.shift = Op::aim_at(rows.real(i));
    return kept;
  }
  static Kept go_on(const Chunk<T>& rows, const State& open) {
    return open.sum == 0 ? begin(rows, 0) : open;
  }
  static void add(Kept& kept, const Chunk<T>& rows, int i) {
    kept.sum += exponential(rows.real(i) - kept.shift);
  }
  // Beside another shift nothing would tell that this sum is not exact.
  static Kept leaving(const Kept& kept) {
    return {kept.shift, is_exact(kept) ? kept.sum : device::quiet_nan<float>()};
  }
  static Kept entering(const Kept& kept) { return kept; }
  static void append(Kept& a, const Kept& b) { Op::append(a, b); }
  static State state(const Kept& kept, int) { return kept; }

  // No, where a row is not finite or far above the first. Many rows make a large sum, too.
  static bool is_exact(const Kept& kept) { return kept.sum <= Op::kMostOfMany; }
};

template <class Op, class T>
inline constexpr bool kHasKeys = sizeof(T) == 2 && requires { Op::upward(0u); };
template <class Op, class T>
struct FormOf {
  using Type = StateForm<Op, T>;
};
template <class Op, class T>
  requires kHasKeys<Op, T>
struct FormOf<Op, T> {
  using Type = KeyForm<Op, T>;
};
template <class Op, class T>
  requires kSharesShift<Op, T>
struct FormOf<Op, T> {
  using Type = PowerForm<Op, T>;
};
template <class Op, class T>
  requires(kAims<Op> && !kSharesShift<Op, T> && sizeof(T) == 4)
struct FormOf<Op, T> {
  using Type = AimedForm<Op, T>;
};

// Along the rows of a chunk, in which segments end at the lane's `ends`. Leaves at here[i] what is
// kept of the one that ends with the lane's i-th row; gives what is of the rows behind the last
// end.
template <class Form, class T>
typename Form::Kept walk_chunk(const Form& form, const Chunk<T>& rows, const LaneMarks& ends,
                               const typename Form::State& open, typename Form::Kept* here) {
  using Kept = typename Form::Kept;
  const int lane = lane_of_warp();
  Kept kept = lane == 0 ? form.go_on(rows, open) : form.begin(rows, 0);
#pragma unroll
  for (int i = 0; i < Chunk<T>::kLaneRows; ++i) {
    form.add(kept, rows, i);
    // Into another register, or it has to wait until the store has read this one.
    if (ends.at(i)) here[i] = kept;
    kept = ends.at(i) ? form.begin(rows, i + 1) : kept;
  }

  // Of the lanes up to this one, those since the last end.
  const uint32_t enders = __ballot_sync(device::kAllLanes, ends.any());
  const uint32_t enders_here = enders & (0xffffffffu >> (device::kWarpSize - 1 - lane));
  const int lanes = lane - (enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0);
  kept = form.leaving(kept);
  // As long as there are so many lanes in a row, behind the first, of which none has an end.
  uint32_t run = ~(enders | 1);
#pragma unroll 1
  for (int step = 1; run != 0; run &= run >> step, step *= 2) {
    Kept whole = shuffle_up(kept, step);
    form.append(whole, kept);
    kept = lanes >= step ? whole : kept;
  }
  Kept whole = shuffle_up(kept, 1);
  if (ends.any() && lane > 0) {
    Kept& first = here[ends.first()];
    form.append(whole, form.leaving(first));
    first = form.entering(whole);
  }
  return shuffle(kept, device::kWarpSize - 1);
}

// The states of the segments that end in a chunk.
template <class Op, class T>
class ChunkStates {
 public:
  using State = typename Op::State;
  using Form = typename FormOf<Op, T>::Type;
  using Kept = typename Form::Kept;
  static constexpr int kLaneRows = Chunk<T>::kLaneRows;
  static constexpr int kPitch = kLaneRows + 1;  // keeps lanes in different banks
  using Shared = Kept[device::kWarpSize * kPitch];

  // Rows of x from `at` up to `stop`.
  ChunkStates(Shared& shared, const Chunk<T>& rows, const T* x, int at, int stop,
              const LaneMarks& ends, const State& open)
      : shared_(shared),
        x_(x),
        at_(at),
        stop_(stop),
        open_(open),
        form_(Form::of(rows, at, open)),
        rest_(walk_chunk(form_, rows, ends, open, shared + lane_of_warp() * kPitch)) {}

  // Of the segment that ends with that row of the chunk, if is_exact().
  State state(uint32_t row) const {
    const auto lane = static_cast<int>(row / kLaneRows);
    return form_.state(shared_[row + lane], lane);
  }
  bool is_exact(uint32_t row) const {
    if constexpr (kMayFail) return Form::is_exact(shared_[row + row / kLaneRows]);
    return true;
  }
  // By all lanes. The same of each lane's own segment, which begins with row `begin` of x, whether
  // that is exact or not; of those that do not `want` it, anything.
  State exact_state(bool want, uint32_t row, int begin) const {
    State result = state(row);
    if constexpr (kMayFail) {
      constexpr int kAlone = 32;  // rows that a lane adds up
      const bool again = want && !is_exact(row);
      const int next = at_ + static_cast<int>(row) + 1, stop = next < stop_ ? next : stop_;
      const bool alone = stop - from_here(begin) <= kAlone;
      if (again && alone) result = with_open(begin, added_up(from_here(begin), stop, 1));
      uint32_t left = __ballot_sync(device::kAllLanes, again && !alone);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int of = __ffs(static_cast<int>(left)) - 1;
        const State whole = added_up_by_all(__shfl_sync(device::kAllLanes, begin, of),
                                            __shfl_sync(device::kAllLanes, stop, of));
        if (lane_of_warp() == of) result = whole;
      }
    }
    return result;
  }
  // By all lanes. Of the rows from `begin` on, behind the last end, or where the last row of all is
  // marked as one, behind the one before.
  State rest(int begin, bool marked) const {
    if (begin >= stop_) return Op::start();
    const int row = marked ? stop_ - 1 - at_ : Chunk<T>::kRows - 1, lane = row / kLaneRows;
    const Kept kept = marked ? shared_[row + lane] : rest_;
    if constexpr (kMayFail) {
      if (!Form::is_exact(kept)) return added_up_by_all(begin, stop_);
    }
    return form_.state(kept, lane);
  }

 private:
  static constexpr bool kMayFail = requires { Form::is_exact(Kept{}); };

  // From rows of x, one by one.
  State added_up(int from, int stop, int step) const {
    State state = Op::start();
#pragma unroll 1
    for (int i = from; i < stop; i += step) Op::add(state, device::to_real(x_[i]), i);
    return state;
  }
  State added_up_by_all(int begin, int stop) const {
    const State part = added_up(from_here(begin) + lane_of_warp(), stop, device::kWarpSize);
    return with_open(begin, gathered<Op>(part));
  }
  int from_here(int begin) const { return begin < at_ ? at_ : begin; }
  State with_open(int begin, const State& here) const {
    State state = begin < at_ ? open_ : Op::start();
    Op::append(state, here);
    return state;
  }

  Shared& shared_;
  const T* x_;
  int at_, stop_;
  State open_;
  Form form_;
  Kept rest_;
};

}  // namespace pullback::segment_cuda

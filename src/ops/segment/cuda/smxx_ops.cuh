// The reductions: a state for a run of rows, how a row enters it, how the state of the rows that
// come after is appended, and what is stored of it.
#pragma once

#include "ops/segment/cuda/smxx_math.cuh"
#include "ops/segment/cuda/smxx_tile.cuh"

namespace pullback::segment_cuda {

// What stands for a row: its element of x; x · y; its bit of the mask.
enum class Input { x, product, mask };

template <class R>
struct Sum {
  struct State {
    R sum;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {0}; }
  static void add(State& a, R x, int) { a.sum += x; }
  static void append(State& a, const State& b) { a.sum += b.sum; }
  static R value(const State& a) { return a.sum; }
};

// The same of zeros and ones, in an integer.
template <class R>
struct Count {
  struct State {
    int64_t count;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {0}; }
  static void add(State& a, R x, int) { a.count += x != 0; }
  static void append(State& a, const State& b) { a.count += b.count; }
  static R value(const State& a) { return static_cast<R>(a.count); }
};

// In double, as the rounding of many factors adds up.
template <class R>
struct Product {
  struct State {
    double product;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {1}; }
  static void add(State& a, R x, int) { a.product *= x; }
  static void append(State& a, const State& b) { a.product *= b.product; }
  static R value(const State& a) { return static_cast<R>(a.product); }
};

template <bool kMin>
inline constexpr uint32_t kPairSigns = kMin ? 0x80008000u : 0;

// min is max of the negated rows.
template <class R, bool kMin>
struct Extreme {
  struct State {
    R top;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {-device::infinity<R>()}; }
  static void add(State& a, R x, int) { a.top = larger(a.top, kMin ? -x : x); }
  // The same of two columns of 16-bit floats.
  template <class T>
  static void add_pair(uint32_t& top, uint32_t& place, uint32_t x, uint32_t row) {
    append_pair<T>(top, place, x ^ kPairSigns<kMin>, row);
  }
  template <class T>
  static void append_pair(uint32_t& top, uint32_t&, uint32_t next, uint32_t) {
    top = Packed<T>::max_or_nan(next, top);
  }
  static State state_of(R top, int) { return {top}; }
  static void append(State& a, const State& b) { a.top = larger(a.top, b.top); }
  static R value(const State& a) { return kMin ? -a.top : a.top; }
};

// With the place of the first or last row that has it; of NaN always the first.
template <class R, bool kMin, bool kLast>
struct ExtremePlace {
  struct State {
    R top;
    int place;  // after the first row of the tile
  };
  static constexpr bool kPlaces = true;
  // Place -1: no row. A run of rows begins with the place of its first.
  static State start() { return {-device::infinity<R>(), -1}; }
  static State begin(int place) { return {-device::infinity<R>(), place}; }
  static bool replaces(const State& a, R x) {
    // Without && and ||, which become branches.
    const bool above = kLast ? !(x < a.top) : !(x <= a.top);
    return above & (a.top == a.top);
  }
  static void add(State& a, R x, int place) {
    const R value = kMin ? -x : x;
    const bool better = replaces(a, value);
    a.top = better ? value : a.top;
    a.place = better ? place : a.place;
  }
  // The same of two columns of 16-bit floats, but that a NaN does not become the place.
  template <class T>
  static void add_pair(uint32_t& top, uint32_t& place, uint32_t x, uint32_t row) {
    append_pair<T>(top, place, x ^ kPairSigns<kMin>, row);
  }
  template <class T>
  static void append_pair(uint32_t& top, uint32_t& place, uint32_t next, uint32_t row) {
    const uint32_t above = Packed<T>::template above<kLast>(next, top);
    place = (place & ~above) | (row & above);
    top = Packed<T>::max_or_nan(next, top);
  }
  static State state_of(R top, int place) { return {top, place}; }
  static R top_of_row(R x) { return kMin ? -x : x; }
  // Of later rows, but that a NaN does not become the place.
  static void append_number(State& a, const State& b) {
    const bool above = kLast ? b.top >= a.top : b.top > a.top;
    a.place = above ? b.place : a.place;
    a.top = larger(b.top, a.top);
  }
  // Of two columns, what is largest where they are extreme; and the top of that, of min without the
  // sign of a zero.
  static uint32_t upward(uint32_t pair)
    requires(!kLast)
  {
    return pair ^ kPairSigns<kMin>;
  }
  static R top_of(R largest) { return kMin ? -(R{0} - largest) : largest; }
  // The peak of some rows, and which of them has it.
  struct Peak {
    R top;
    int at;
  };
  template <int kCount>
  static Peak peak(const R (&x)[kCount]) {
    Peak peak = {kMin ? -x[0] : x[0], kLast ? 0 : kCount - 1};
#pragma unroll
    for (int k = 1; k < kCount; ++k) peak.top = larger(peak.top, kMin ? -x[k] : x[k]);
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      const int k = kLast ? i : kCount - 1 - i;
      peak.at = (kMin ? -x[k] : x[k]) == peak.top ? k : peak.at;
    }
    return peak;
  }
  static void take(State& a, const Peak& peak, int place) {
    const bool better = replaces(a, peak.top);
    a.top = better ? peak.top : a.top;
    a.place = better ? place + peak.at : a.place;
  }
  // Whether b, of later rows, stands for both.
  static bool gives_way(const State& a, const State& b) {
    return (b.place >= 0) & (replaces(a, b.top) | (a.place < 0));
  }
  static void append(State& a, const State& b) {
    if (gives_way(a, b)) a = b;
  }
  // The states of a warp's lanes put together, whose rows come in any order.
  static State gathered(const State& a) {
    R top = a.top;
#pragma unroll
    for (int step = device::kWarpSize / 2; step > 0; step /= 2) {
      top = larger(top, __shfl_xor_sync(device::kAllLanes, top, step));
    }
    const bool nan = top != top;
    const bool has = (a.place >= 0) & ((a.top == top) | (nan & (a.top != a.top)));
    const int place = has ? a.place : -1;
    if (kLast && !nan) return {top, __reduce_max_sync(device::kAllLanes, place)};
    const uint32_t first = __reduce_min_sync(device::kAllLanes, static_cast<uint32_t>(place));
    return {top, static_cast<int>(first)};
  }
  static R value(const State& a) { return kMin ? -a.top : a.top; }
};

// With the number of rows that have it. The value of this op is that number.
template <class R, bool kMin>
struct ExtremeCount {
  struct State {
    R top;
    int64_t count;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {-device::infinity<R>(), 0}; }
  static void add(State& a, R x, int) { append(a, {kMin ? -x : x, 1}); }
  static void append(State& a, const State& b) {
    const bool nan = a.top != a.top;
    if (a.top == b.top || (nan && b.top != b.top)) {
      a.count += b.count;
    } else if (!nan && !(b.top < a.top)) {
      a = b;
    }
  }
  static R value(const State& a) { return static_cast<R>(a.count); }
};

// sum of exp(x - shift). The shift is the largest x up to what kMost allows: a run aims at its
// first row, or at 0, and takes rows not far above as they are. An infinite shift counts the rows
// that have it.
template <class R>
struct ExponentialSum {
  struct State {
    R shift, sum;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {-device::infinity<R>(), 0}; }
  static void add(State& a, R x, int) {
    const R difference = x - a.shift;
    const bool above = difference > 0;
    R scale = exponential(above ? -difference : difference);
    scale = x == a.shift ? 1 : scale;  // also where both are infinite
    a.sum = a.sum * (above ? scale : 1) + (above ? 1 : scale);
    a.shift = above ? x : a.shift;
  }
  // Of rows added as they are. The larger, the less exact is a term that is far above: of 3000 =
  // exp(8) the roundings of x - shift, of its power and of the sum's logarithm come to 1e-6.
  static constexpr R kMost = 3000;
  // The same of some hundred rows, which make a large sum by their number, too.
  static constexpr R kMostOfMany = 1 << 18;
  // The shift of a run that begins with `first`: 0 where this is little more, so that a logsumexp
  // near 0 is not shift + log(sum) of two that cancel.
  static R aim_at(R first) { return first >= -16 && first <= 0 ? 0 : first; }
  static void append(State& a, const State& b) {
    if (a.shift == b.shift) {
      a.sum += b.sum;
      return;
    }
    const R shift = a.shift > b.shift ? a.shift : b.shift;
    a.sum = scaled(a, shift) + scaled(b, shift);
    a.shift = shift;
  }
  static R scaled(const State& a, R shift) {
    return a.shift == shift ? a.sum : a.sum * exponential(a.shift - shift);
  }
  // Stored in 16 bits, or as exact as R is.
  static R value(const State& a) { return shifted_logarithm(a.shift, a.sum); }
  static R exact_value(const State& a) { return exact_logarithm(a.shift, a.sum); }
};

// The same; both parts are stored, as softmax needs them.
template <class R>
struct SoftmaxSum : ExponentialSum<R> {
  static R aim_at(R first) { return first; }
};
// What softmax makes of the segment's rows from these: exp(x - shift) / sum.
template <class R>
struct SoftmaxPower {
  R shift, inverse;

  static SoftmaxPower of(R shift, R sum) {
    const R infinity = device::infinity<R>();
    // Of nothing but -inf, x - 0 gives 0, and NaN where the sum is NaN.
    return {shift == -infinity ? 0 : shift,
            shift == infinity ? device::quiet_nan<R>() : R{1} / sum};
  }
  R value(R x) const { return exponential(x - shift) * inverse; }
};

template <class Op>
inline constexpr bool kAims = requires { Op::aim_at(0); };

// Adds kCount rows of one segment, from `place` on; value(i, k) is column i of the k-th. An op with
// peaks finds each column's first; false, and nothing is added, when one is not finite. One that
// aims adds the rows if none is far above its aim.
template <class Op, class R, int kCount, int kVector, class Rows>
bool add_rows(typename Op::State (&state)[kVector], const Rows& value, int place) {
  struct Column {
    R x[kCount];
  };
  const auto column = [&](int i) {
    Column result;
#pragma unroll
    for (int k = 0; k < kCount; ++k) result.x[k] = value(i, k);
    return result;
  };
  if constexpr (requires { typename Op::Peak; }) {
    typename Op::Peak peak[kVector];
    R sizes = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) peak[i] = Op::peak(column(i).x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sizes += peak[i].top < 0 ? -peak[i].top : peak[i].top;
    if (!(sizes < device::infinity<R>())) return false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) Op::take(state[i], peak[i], place);
  } else if constexpr (kAims<Op>) {
    R sum[kVector], most = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum[i] = exponential(value(i, 0) - state[i].shift);
#pragma unroll
      for (int k = 1; k < kCount; ++k) sum[i] += exponential(value(i, k) - state[i].shift);
      most = larger(most, sum[i]);
    }
    if (!(most <= Op::kMost)) return false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i].sum += sum[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) Op::add(state[i], value(i, k), place + k);
    }
  }
  return true;
}

// --- Exchange between lanes ---

// Each word of a state as `exchange` gives it.
template <class State, class Exchange>
State exchanged(const State& state, const Exchange& exchange) {
  constexpr int kWords = (sizeof(State) + 3) / 4;
  union {
    uint32_t word[kWords];
    State state;
  } value = {};
  value.state = state;
#pragma unroll
  for (int i = 0; i < kWords; ++i) value.word[i] = exchange(value.word[i]);
  return value.state;
}
template <class State>
State shuffle_up(const State& state, int step) {
  return exchanged(state,
                   [&](uint32_t word) { return __shfl_up_sync(device::kAllLanes, word, step); });
}
template <class State>
State shuffle_xor(const State& state, int step) {
  return exchanged(state,
                   [&](uint32_t word) { return __shfl_xor_sync(device::kAllLanes, word, step); });
}
template <class State>
State shuffle(const State& state, int lane) {
  return exchanged(state,
                   [&](uint32_t word) { return __shfl_sync(device::kAllLanes, word, lane); });
}

// The states of all lanes put together.
template <class Op>
typename Op::State gathered(typename Op::State state) {
  if constexpr (requires { Op::gathered(state); }) {
    return Op::gathered(state);
  } else {
#pragma unroll
    for (int step = device::kWarpSize / 2; step > 0; step /= 2) {
      Op::append(state, shuffle_xor(state, step));
    }
    return state;
  }
}

// Puts together states whose rows lie among each other.
template <class Op>
void unite(typename Op::State& a, const typename Op::State& b) {
  if constexpr (Op::kPlaces) {
    const bool swapped = static_cast<uint32_t>(b.place) < static_cast<uint32_t>(a.place);
    const typename Op::State early = swapped ? b : a, late = swapped ? a : b;
    a = early;
    Op::append(a, late);
  } else {
    Op::append(a, b);
  }
}

// The state of a run that begins with the row at `place`.
template <class Op>
typename Op::State begin_run(int place) {
  if constexpr (requires { Op::begin(place); }) {
    return Op::begin(place);
  } else {
    return Op::start();
  }
}

template <class Op>
inline constexpr bool kStoresPair = false;
template <class R>
inline constexpr bool kStoresPair<SoftmaxSum<R>> = true;

// Whether what is stored may be wanted divided by the number of rows.
template <class Op>
inline constexpr bool kMakesMeans = false;
template <class R>
inline constexpr bool kMakesMeans<Sum<R>> = true;

// Whether what is stored in 16 bits may be wanted unrounded, too: lse.
template <class Op, class Out>
inline constexpr bool kStoresReal = false;
template <class R, class Out>
inline constexpr bool kStoresReal<ExponentialSum<R>, Out> = sizeof(Out) == 2;

// --- Storing ---

// More than one column at a time only where the host has seen that rows are made of aligned pieces.
template <class T, int kCount>
void store_row(const Matrix& to, int64_t row, int64_t column, const Values<T, kCount>& values) {
  T* at = static_cast<T*>(to.data) + row * to.row_stride + column * to.column_stride;
  *reinterpret_cast<Values<T, kCount>*>(at) = values;
}
// Their columns follow each other, then.
template <class T, int kCount>
Values<T, kCount> load_row(const Matrix& from, int64_t row, int64_t column) {
  const int64_t step = kCount > 1 ? 1 : from.column_stride;
  const T* at = static_cast<const T*>(from.data) + row * from.row_stride + column * step;
  return *reinterpret_cast<const Values<T, kCount>*>(at);
}

// Where the state of a tile's head (0) or tail (1) waits for smxx_combine.cuh.
template <class Op>
typename Op::State* slot_of(const Params& p, int64_t tile, int which) {
  return static_cast<typename Op::State*>(p.slots) + (tile * 2 + which) * p.slot_columns;
}

// u8 counts places from 0 in the segment; this one means none.
inline constexpr int64_t kNoPlace = 255;

// Where the outputs of a segment of the problem go, for kCount columns from `column` on.
template <bool kRowsPermuted>
struct RowOutputs {
  static constexpr bool kPermuted = kRowsPermuted;
  const Params& p;
  int64_t s, column;
  bool wants_result() const { return p.result.data != nullptr; }
  bool wants_result2() const { return p.result2.data != nullptr; }
  bool wants_arg() const { return p.arg.data != nullptr; }
  bool wants_mean() const { return p.mean != 0; }
  ArgType arg_type() const { return p.arg_type; }
  template <class V>
  void result(const V& values) const {
    store_row(p.result, s, column, values);
  }
  template <class V>
  void result2(const V& values) const {
    store_row(p.result2, s, column, values);
  }
  template <class V>
  void arg(const V& values) const {
    store_row(p.arg, s, column, values);
  }
};

// The same for kCount columns from `column` on of any segment that ends in a tile. What their
// places have in common is made once: 64-bit products cost as much as the rows of a short segment.
template <bool kRowsPermuted, int kCount>
class TileOutputs {
 public:
  static constexpr bool kPermuted = kRowsPermuted;
  TileOutputs(const Params& params, const Tile& tile, int64_t column)
      : p(params),
        origin_(tile.origin),
        result_(begin_of(p.result, tile, column)),
        result2_(begin_of(p.result2, tile, column)),
        arg_(begin_of(p.arg, tile, column)) {}

  // Of the k-th, whose rows are those from `begin` to `end` of the tile.
  template <class Op, class Out>
  void finish(uint32_t k, int begin, int end, const typename Op::State (&state)[kCount]) {
    k_ = k;
    finish_to<Op, Out>(
        p, *this, state, origin_, [&] { return origin_ + begin; }, [&] { return end - begin; });
  }

  bool wants_result() const { return p.result.data != nullptr; }
  bool wants_result2() const { return p.result2.data != nullptr; }
  bool wants_arg() const { return p.arg.data != nullptr; }
  bool wants_mean() const { return p.mean != 0; }
  ArgType arg_type() const { return p.arg_type; }
  template <class V>
  void result(const V& values) const {
    store(p.result, result_, values);
  }
  template <class V>
  void result2(const V& values) const {
    store(p.result2, result2_, values);
  }
  template <class V>
  void arg(const V& values) const {
    store(p.arg, arg_, values);
  }

 private:
  static int64_t begin_of(const Matrix& to, const Tile& tile, int64_t column) {
    return kept(Tile::problem_segment(tile.first) * to.row_stride + column * to.column_stride);
  }
  template <class V>
  void store(const Matrix& to, int64_t begin, const V& values) const {
    using Element = decltype(values.stored(0));
    *reinterpret_cast<V*>(static_cast<Element*>(to.data) + (begin + k_ * to.row_stride)) = values;
  }
  const Params& p;
  int64_t origin_;
  int64_t result_, result2_, arg_;  // in elements
  uint32_t k_ = 0;
};

// What arg(i) gives for each of the columns, made in as many bits as are stored.
template <class T, int kCount, class Outputs, class Arg>
void store_arg_as(const Outputs& to, const Arg& arg) {
  Values<T, kCount> values;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values.element[i] = static_cast<T>(arg(i));
  to.arg(values);
}
template <int kCount, class Outputs, class Arg>
void store_arg(const Outputs& to, const Arg& arg) {
  if (to.arg_type() == ArgType::i32) {
    store_arg_as<int32_t, kCount>(to, arg);
  } else {
    store_arg_as<int64_t, kCount>(to, arg);
  }
}

// Stores what a segment has come to. Its states stand for kCount columns, their places count from
// `place`; begin() and length() of its rows are called where they are needed.
template <class Op, class Out, int kCount, class Outputs, class Begin, class Length>
void finish_to(const Params& p, const Outputs& to, const typename Op::State (&state)[kCount],
               int64_t place, const Begin& begin, const Length& length) {
  Real<Out> values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kStoresPair<Op>) {
      values[i] = state[i].shift;
    } else if constexpr (sizeof(Out) > 2 && requires { Op::exact_value(state[i]); }) {
      values[i] = Op::exact_value(state[i]);
    } else {
      values[i] = Op::value(state[i]);
    }
  }
  if (to.wants_result()) {
    if constexpr (kMakesMeans<Op>) {
      if (to.wants_mean()) {
        const ByLength<Out> divided(length());
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = divided(values[i]);
      }
    }
    to.result(Values<Out, kCount>::of(values));
  }
  if constexpr (kStoresPair<Op>) {
    Values<Out, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.element[i] = state[i].sum;
    to.result2(values);
  }
  if constexpr (kStoresReal<Op, Out>) {
    if (to.wants_result2()) to.result2(Values<Real<Out>, kCount>::of(values));
  }
  if constexpr (Op::kPlaces) {
    if (!to.wants_arg()) return;
    const auto row = [&](int i) { return place + state[i].place; };
    if (to.arg_type() == ArgType::u8) {
      const int64_t from = begin();
      store_arg_as<uint8_t, kCount>(to, [&](int i) {
        const int64_t arg = row(i) - from;
        return arg > kNoPlace ? kNoPlace : arg;
      });
    } else if (Outputs::kPermuted && p.permutation.data != nullptr) {
      store_arg<kCount>(to, [&](int i) { return written_row<true>(p, row(i)); });
    } else {
      store_arg<kCount>(to, row);
    }
  }
}
// The same of segment j of the list, from `column` on.
template <class Op, class Out, bool kPermuted, int kCount>
void finish(const Params& p, const Segments& segments, int64_t j, int64_t column,
            const typename Op::State (&state)[kCount], int64_t place) {
  finish_to<Op, Out>(
      p, RowOutputs<kPermuted>{p, Tile::problem_segment(j), column}, state, place,
      [&] { return segments.begin(j); }, [&] { return segments.length(j); });
}

// The same of an empty segment.
template <class Op, class Out, int kCount, class Outputs>
void finish_empty_to(const Params& p, const Outputs& to) {
  const auto empty = static_cast<Real<Out>>(p.empty_value);
  Real<Out> values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = empty;
  if (to.wants_result()) to.result(Values<Out, kCount>::of(values));
  if constexpr (kStoresPair<Op>) to.result2(Values<Out, kCount>{});
  if constexpr (kStoresReal<Op, Out>) {
    if (to.wants_result2()) to.result2(Values<Real<Out>, kCount>::of(values));
  }
  if constexpr (Op::kPlaces) {
    if (!to.wants_arg()) return;
    if (to.arg_type() == ArgType::u8) {
      store_arg_as<uint8_t, kCount>(to, [](int) { return kNoPlace; });
    } else {
      store_arg<kCount>(to, [](int) { return -1; });
    }
  }
}
template <class Op, class Out, int kCount = 1>
void finish_empty(const Params& p, int64_t j, int64_t column) {
  finish_empty_to<Op, Out, kCount>(p, RowOutputs<false>{p, Tile::problem_segment(j), column});
}

}  // namespace pullback::segment_cuda

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

// min is max of the negated rows.
template <class R, bool kMin>
struct Extreme {
  struct State {
    R top;
  };
  static constexpr bool kPlaces = false;
  static State start() { return {-device::infinity<R>()}; }
  static void add(State& a, R x, int) { a.top = larger(a.top, kMin ? -x : x); }
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
  // Place -1: no row yet.
  static State start() { return {-device::infinity<R>(), -1}; }
  static bool replaces(const State& a, R x) {
    // Without && and ||, which become branches.
    const bool above = kLast ? !(x < a.top) : !(x <= a.top);
    return (above & (a.top == a.top)) | (a.place < 0);
  }
  static void add(State& a, R x, int place) {
    const R value = kMin ? -x : x;
    const bool better = replaces(a, value);
    a.top = better ? value : a.top;
    a.place = better ? place : a.place;
  }
  // What add() of each would come to, but with the largest found first. Declines NaN.
  template <int kCount>
  static bool add_together(State& a, const R (&x)[kCount], int place) {
    R top = kMin ? -x[0] : x[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) top = larger(top, kMin ? -x[k] : x[k]);
    if (top != top) return false;
    if (replaces(a, top)) {
      a.top = top;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int k = kLast ? i : kCount - 1 - i;
        if ((kMin ? -x[k] : x[k]) == top) a.place = place + k;
      }
    }
    return true;
  }
  static void append(State& a, const State& b) {
    if ((b.place >= 0) & replaces(a, b.top)) a = b;
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

// sum of exp(x - shift), shift being the largest x. An infinite shift counts the rows that have it.
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
  // With one change of the shift for all. Declines infinities.
  template <int kCount>
  static bool add_together(State& a, const R (&x)[kCount], int) {
    R shift = a.shift;
#pragma unroll
    for (int k = 0; k < kCount; ++k) shift = x[k] > shift ? x[k] : shift;
    if (!((shift < 0 ? -shift : shift) < device::infinity<R>())) return false;
    R sum = a.sum * exponential(a.shift - shift);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += exponential(x[k] - shift);
    a = {shift, sum};
    return true;
  }
  static void append(State& a, const State& b) {
    const R shift = a.shift > b.shift ? a.shift : b.shift;
    a.sum = scaled(a, shift) + scaled(b, shift);
    a.shift = shift;
  }
  static R scaled(const State& a, R shift) {
    return a.shift == shift ? a.sum : a.sum * exponential(a.shift - shift);
  }
  static R value(const State& a) { return a.shift + logarithm(a.sum); }
};

// The same; both parts are stored, as softmax needs them.
template <class R>
struct SoftmaxSum : ExponentialSum<R> {};

// Rows from `place` on, all of one segment.
template <class Op, int kCount>
void add_rows(typename Op::State& a, const auto (&x)[kCount], int place) {
  if constexpr (requires { Op::add_together(a, x, place); }) {
    if (Op::add_together(a, x, place)) return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) Op::add(a, x[k], place + k);
}

template <class Op>
inline constexpr bool kStoresPair = false;
template <class R>
inline constexpr bool kStoresPair<SoftmaxSum<R>> = true;

// --- Storing ---

// More than one column at a time only where the host has seen that rows are made of aligned pieces.
template <class T, int kCount>
void store_row(const Matrix& to, int64_t row, int64_t column, const Values<T, kCount>& values) {
  T* at = static_cast<T*>(to.data) + row * to.row_stride + column * to.column_stride;
  *reinterpret_cast<Values<T, kCount>*>(at) = values;
}
template <class T, int kCount>
Values<T, kCount> load_row(const Matrix& from, int64_t row, int64_t column) {
  const T* at =
      static_cast<const T*>(from.data) + row * from.row_stride + column * from.column_stride;
  return *reinterpret_cast<const Values<T, kCount>*>(at);
}

template <int kCount>
void store_arg(const Params& p, int64_t s, int64_t column, const int64_t (&arg)[kCount]) {
  const auto store = [&]<class T>(T) {
    Values<T, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.element[i] = static_cast<T>(arg[i]);
    store_row(p.arg, s, column, values);
  };
  if (p.arg_type == ArgType::i32) {
    store(int32_t{});
  } else if (p.arg_type == ArgType::i64) {
    store(int64_t{});
  } else {
    store(uint8_t{});
  }
}

// Where the state of a tile's head (0) or tail (1) waits for smxx_combine.cuh.
template <class Op>
typename Op::State* slot_of(const Params& p, int64_t tile, int which) {
  return static_cast<typename Op::State*>(p.slots) + (tile * 2 + which) * p.slot_columns;
}

// u8 counts places from 0 in the segment; this one means none.
inline constexpr int64_t kNoPlace = 255;

// Stores what segment j of the list has come to; its states stand for kCount columns from `column`
// on, its places count from `place`.
template <class Op, class Out, int kCount>
void finish(const Params& p, const Segments& segments, int64_t j, int64_t column,
            const typename Op::State (&state)[kCount], int64_t place) {
  const int64_t s = Tile::problem_segment(j);
  if (p.result.data != nullptr) {
    Real<Out> values[kCount];
    Real<Out> divisor = 1;
    if (p.mean) divisor = static_cast<Real<Out>>(segments.length(j));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kStoresPair<Op>) {
        values[i] = state[i].shift;
      } else {
        values[i] = Op::value(state[i]);
      }
      if (p.mean) values[i] /= divisor;
    }
    store_row(p.result, s, column, Values<Out, kCount>::of(values));
  }
  if constexpr (kStoresPair<Op>) {
    Values<Out, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.element[i] = state[i].sum;
    store_row(p.result2, s, column, values);
  }
  if (Op::kPlaces && p.arg.data != nullptr) {
    int64_t arg[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Op::kPlaces) arg[i] = place + state[i].place;
      if (p.arg_type == ArgType::u8) {
        arg[i] -= segments.begin(j);
        if (arg[i] > kNoPlace) arg[i] = kNoPlace;
      } else {
        arg[i] = written_row<true>(p, arg[i]);
      }
    }
    store_arg(p, s, column, arg);
  }
}

// By one thread, for one column of an empty segment.
template <class Op, class Out>
void finish_empty(const Params& p, int64_t j, int64_t column) {
  const int64_t s = Tile::problem_segment(j);
  if (p.result.data != nullptr) {
    const auto value = static_cast<Real<Out>>(p.empty_value);
    store_row(p.result, s, column, Values<Out, 1>{{device::from_real<Out>(value)}});
  }
  if constexpr (kStoresPair<Op>) store_row(p.result2, s, column, Values<Out, 1>{});
  if (Op::kPlaces && p.arg.data != nullptr) {
    const int64_t arg[1] = {p.arg_type == ArgType::u8 ? kNoPlace : -1};
    store_arg(p, s, column, arg);
  }
}

}  // namespace pullback::segment_cuda

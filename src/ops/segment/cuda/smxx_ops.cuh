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
  template <int kCount>
  static R peak(const State&, const R (&x)[kCount]) {
    R top = kMin ? -x[0] : x[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) top = larger(top, kMin ? -x[k] : x[k]);
    return top;
  }
  template <int kCount>
  static void add_together(State& a, R top, const R (&x)[kCount], int place) {
    const bool better = replaces(a, top);
    int at = place + (kLast ? 0 : kCount - 1);
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      const int k = kLast ? i : kCount - 1 - i;
      at = (kMin ? -x[k] : x[k]) == top ? place + k : at;
    }
    a.top = better ? top : a.top;
    a.place = better ? at : a.place;
  }
  // Whether b, of later rows, stands for both.
  static bool gives_way(const State& a, const State& b) {
    return (b.place >= 0) & (replaces(a, b.top) | (a.place < 0));
  }
  static void append(State& a, const State& b) {
    if (gives_way(a, b)) a = b;
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
  template <int kCount>
  static R peak(const State& a, const R (&x)[kCount]) {
    R shift = a.shift;
#pragma unroll
    for (int k = 0; k < kCount; ++k) shift = x[k] > shift ? x[k] : shift;
    return shift;
  }
  template <int kCount>
  static void add_together(State& a, R shift, const R (&x)[kCount], int) {
    R sum = a.sum * exponential(a.shift - shift);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += exponential(x[k] - shift);
    a = {shift, sum};
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

// Adds kCount rows of one segment, from `place` on; value(i, k) is column i of the k-th. An op that
// has peak() and add_together() finds each column's peak first; false, and nothing is added, when
// one is not finite.
template <class Op, class R, int kCount, int kVector>
bool add_rows(typename Op::State (&state)[kVector], const auto& value, int place) {
  struct Column {
    R x[kCount];
  };
  const auto column = [&](int i) {
    Column result;
#pragma unroll
    for (int k = 0; k < kCount; ++k) result.x[k] = value(i, k);
    return result;
  };
  if constexpr (requires { Op::peak(state[0], column(0).x); }) {
    R peak[kVector], sizes = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      peak[i] = Op::peak(state[i], column(i).x);
      sizes += peak[i] < 0 ? -peak[i] : peak[i];
    }
    if (!(sizes < device::infinity<R>())) return false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) Op::add_together(state[i], peak[i], column(i).x, place);
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
  constexpr int kWords = sizeof(State) / 4;
  union {
    State state;
    uint32_t word[kWords];
  } value = {state};
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
State shuffle_down(const State& state, int step) {
  return exchanged(state,
                   [&](uint32_t word) { return __shfl_down_sync(device::kAllLanes, word, step); });
}
template <class State>
State shuffle(const State& state, int lane) {
  return exchanged(state,
                   [&](uint32_t word) { return __shfl_sync(device::kAllLanes, word, lane); });
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
    const int64_t begin = p.arg_type == ArgType::u8 ? segments.begin(j) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Op::kPlaces) arg[i] = place + state[i].place - begin;
    }
    if (p.arg_type == ArgType::u8) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) arg[i] = arg[i] > kNoPlace ? kNoPlace : arg[i];
    } else if (p.permutation.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) arg[i] = written_row<true>(p, arg[i]);
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

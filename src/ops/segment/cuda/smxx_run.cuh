// What a lane has of the rows since the last end of a segment, kVector columns of them. Where
// 16-bit floats can be compared in pairs, extremes stay in pairs until the segment ends. Of 16-bit
// floats sums of exponentials are sums of powers of 2 until then, and only then it is asked whether
// they are exact.
#pragma once

#include "ops/segment/cuda/smxx_shared_shift.cuh"

namespace pullback::segment_cuda {

template <class Op, class T, int kVector>
inline constexpr bool kPacksRuns =
    kPairs<T, kVector> && requires(uint32_t word) { Op::template add_pair<T>(word, word, 0, 0); };

enum class RunKind { states, pairs, powers };
template <class Op, class T, int kVector>
inline constexpr RunKind kRunKind = kPacksRuns<Op, T, kVector>    ? RunKind::pairs
                                    : kAims<Op> && sizeof(T) == 2 ? RunKind::powers
                                                                  : RunKind::states;

template <class Op, class T, int kVector, RunKind kKind = kRunKind<Op, T, kVector>>
struct Run {
  using State = typename Op::State;
  State state[kVector];

  void begin(int place) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i] = begin_run<Op>(place);
  }
  // Rows of one segment from `place` on, value(i, k) being column i of the k-th. False, and nothing
  // is added, where they have to be added one by one.
  template <int kCount, class Rows>
  bool add(const Rows& value, int place) {
    aim(value);
    return add_rows<Op, Real<T>, kCount>(state, value, place);
  }
  template <class Rows>
  void add_row(const Rows& value, int place) {
    if constexpr (kAims<Op>) {
      if (add<1>(value, place)) return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) Op::add(state[i], value(i, 0), place);
  }
  // The states of the run, whose rows are at `first` to `last`; reload(place) reads a row again.
  template <class Reload>
  void close(State (&result)[kVector], int, int, const Reload&) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = state[i];
  }

 private:
  template <class Rows>
  void aim(const Rows& value) {
    if constexpr (kAims<Op>) {
      if (state[0].sum != 0) return;  // it has the first row's power
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[i].shift = Op::aim_at(value(i, 0));
    }
  }
};

template <class Op, class T, int kVector>
struct Run<Op, T, kVector, RunKind::pairs> {
  using State = typename Op::State;
  uint32_t top[kVector / 2], place[kVector / 2];  // of columns 2 i and 2 i + 1

  void begin(int first) {
    const uint32_t lowest = device::pack<T>(-device::infinity<float>(), -device::infinity<float>());
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      top[i] = lowest;
      place[i] = twice(first);
    }
  }
  // value.pair(i, k) are columns 2 i and 2 i + 1 of the k-th; places are less than 2^16.
  template <int kCount, class Rows>
  bool add(const Rows& value, int first) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t at = twice(first + k);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        Op::template add_pair<T>(top[i], place[i], value.pair(i, k), at);
      }
    }
    return true;
  }
  template <class Rows>
  void add_row(const Rows& value, int at) {
    add<1>(value, at);
  }
  // A NaN makes the extreme NaN, but leaves the place at a row before it, or at the first.
  template <class Reload>
  void close(State (&result)[kVector], int, int last, const Reload& reload) const {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      float low, high;
      device::unpack<T>(top[i], low, high);
      result[2 * i] = Op::state_of(low, static_cast<int>(place[i] & 0xffff));
      result[2 * i + 1] = Op::state_of(high, static_cast<int>(place[i] >> 16));
    }
    if constexpr (Op::kPlaces) {
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) nan |= Packed<T>::nan(top[i]);
      if (nan != 0) find_nans(result, last, reload);
    }
  }

 private:
  static uint32_t twice(int number) { return static_cast<uint32_t>(number) * 0x10001u; }
  template <class Reload>
  static void find_nans(State (&result)[kVector], int last, const Reload& reload) {
    uint32_t sought = 0;  // columns
    int row = last;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (result[i].top == result[i].top) continue;
      sought |= 1u << i;
      row = result[i].place < row ? result[i].place : row;
    }
#pragma unroll 1
    for (; sought != 0 && row <= last; ++row) {
      const Values<T, kVector> values = reload(row);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if ((sought >> i & 1) == 0 || values.real(i) == values.real(i)) continue;
        sought &= ~(1u << i);
        result[i].place = row;
      }
    }
  }
};

// The sum of exp(x - aim) as one of 2^(x log2(e) + turn), a product less for each x. The aim is the
// first row, or 0 where that is further than kFarthestShift from 0.
template <class Op, class T, int kVector>
struct Run<Op, T, kVector, RunKind::powers> {
  using State = typename Op::State;
  float turn[kVector], sum[kVector];

  void begin(int) {
    turn[0] = device::quiet_nan<float>();  // no row yet
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = 0;
  }
  template <int kCount, class Rows>
  bool add(const Rows& value, int) {
    if (turn[0] != turn[0]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float x = value(i, 0);
        turn[i] = fabsf(x) <= kFarthestShift ? -kLog2OfE * x : 0;
      }
    }
    add_aimed<kCount>(value);
    return true;
  }
  template <int kCount, class Rows>
  void add_aimed(const Rows& value) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        sum[i] += device::exp2_approx(fma(value(i, k), kLog2OfE, turn[i]));
      }
    }
  }
  template <class Rows>
  void add_row(const Rows& value, int at) {
    add<1>(value, at);
  }
  template <class Reload>
  void close(State (&result)[kVector], int first, int last, const Reload& reload) const {
    const bool exact = SharedShift<Op, T>::are_exact(sum);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      result[i] = Op::start();
      if (exact) result[i] = {-kLogOf2 * turn[i], sum[i]};
    }
    if (exact) return;
#pragma unroll 1
    for (int row = first; row <= last; ++row) {
      const Values<T, kVector> values = reload(row);
#pragma unroll
      for (int i = 0; i < kVector; ++i) Op::add(result[i], values.real(i), row);
    }
  }
};

}  // namespace pullback::segment_cuda

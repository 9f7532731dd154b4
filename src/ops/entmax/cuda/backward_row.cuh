// What the backward kernels of entmax share: s = y^(2-alpha), from y or from the support mask, and
// rows with unit stride along the axis as 16-byte pieces, whole ones fast and those at the two ends
// of a row element by element.
#pragma once

#include "device/cache_hint.cuh"
#include "device/float.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "ops/entmax/cuda/backward_params.cuh"
#include "ops/entmax/cuda/smxx_power.cuh"

namespace pullback::entmax {

using namespace device;

// To 1 ulp, subnormals to 0; the exact one takes longer than the memory that these kernels wait
// for.
inline float square_root(float value) { return sqrt_approx(value); }
inline double square_root(double value) { return sqrt(value); }

// For results of 16 bits the hardware's logarithm has digits enough. NaN of NaN.
template <class T>
float power(float base, float exponent) {
  if constexpr (sizeof(T) == 2) return rough_power_of(base, exponent);
  return fma(base, 0.0f, power_of(base, exponent));
}
// A call: the code of a piece's elements side by side takes seconds to compile.
template <class T>
__noinline__ double power(double base, double exponent) {
  // The slope at the edge of the support is infinite; a finite one keeps 0 times it at 0.
  return base != base ? base : exp(fmin(exponent * log(base), 600.0));
}

// Powers of elements of y, in their place: s of them, 0 where y is, NaN of NaN. One branch for all
// of them, or they wait for each other.
template <class T, class R, int kCount>
void to_powers(R (&y)[kCount], double alpha) {
  // Up to alpha = 2 powers in double have no digits that y has not lost.
  if constexpr (sizeof(R) > sizeof(Real<T>)) {
    if (alpha <= 2) {
      Real<T> narrow[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) narrow[i] = static_cast<Real<T>>(y[i]);
      to_powers<T>(narrow, alpha);
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] = static_cast<R>(narrow[i]);
      return;
    }
  }
  const auto replace = [&](const auto& slope_of) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const R s = slope_of(y[i]);
      y[i] = y[i] == 0 ? R{0} : s;
    }
  };
  const R exponent = static_cast<R>(2 - alpha);
  if (exponent == 0 || exponent == R{0.5} || exponent == 1) {
    replace([&](R value) {
      const R one_or_nan = fma(value, R{0}, R{1});
      return exponent == 0 ? one_or_nan : exponent == 1 ? value : square_root(value);
    });
  } else {
    replace([&](R value) { return power<T>(value, exponent); });
  }
}

// s of an element of y.
template <class T, Weights kWeights, class R>
R slope(R y, double alpha) {
  if constexpr (kWeights == Weights::power) {
    R of_one[] = {y};
    to_powers<T>(of_one, alpha);
    return of_one[0];
  }
  if (y == 0) return 0;
  if constexpr (kWeights == Weights::sparsemax) return fma(y, R{0}, R{1});
  if constexpr (kWeights == Weights::entmax15) return square_root(y);
  return y;
}
// Of several, in their place.
template <class T, Weights kWeights, class R, int kCount>
void to_slopes(R (&y)[kCount], double alpha) {
  if constexpr (kWeights == Weights::power) {
    to_powers<T>(y, alpha);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = slope<T, kWeights>(y[i], alpha);
  }
}

// Which row a block or warp works on, and what of the row is not an element.
struct RowPlace {
  int64_t row;    // of Rows::count
  int64_t group;  // ragged row
  int64_t begin, length;
  double alpha;
  bool nan;        // all of d_x is
  bool elsewhere;  // a row for smxx_backward_any.cuh
};

template <class T>
double alpha_of_row(const BackwardParams& p, int64_t row, int64_t group = 0) {
  if (!p.alpha.data) return p.alpha_of_all;
  const int64_t at = row_offset(p.rows, p.alpha, row) + group * p.alpha.axis;
  return static_cast<double>(static_cast<const Real<T>*>(p.alpha.data)[at]);
}

template <class T, Weights kWeights>
RowPlace place_of(const BackwardParams& p, int64_t task) {
  RowPlace place{task, 0, 0, p.rows.length, p.alpha_of_all, false, false};
  if (p.rows.offsets) {
    place.row = task / p.rows.groups;
    place.group = task - place.row * p.rows.groups;
    place.begin = p.rows.offsets[place.group];
    place.length = p.rows.offsets[place.group + 1] - place.begin;
  }
  if constexpr (kWeights == Weights::power) {
    place.alpha = alpha_of_row<T>(p, place.row, place.group);
    place.elsewhere = !is_gentle(place.alpha);
  }
  if constexpr (kWeights == Weights::mask) {
    const auto* sizes = static_cast<const int32_t*>(p.support_size.data);
    place.nan = sizes[row_offset(p.rows, p.support_size, place.row)] < 0;
  }
  return place;
}

// 16 bytes of a row as words: arrays of 16-bit elements would end up in local memory.
using Piece = Words;

inline double element_of(const Piece& piece, int e, double) {
  return __hiloint2double(static_cast<int>(piece.element[2 * e + 1]),
                          static_cast<int>(piece.element[2 * e]));
}
inline float element_of(const Piece& piece, int e, float) {
  return __uint_as_float(piece.element[e]);
}
inline float element_of(const Piece& piece, int e, bf16) {
  const uint32_t word = piece.element[e / 2];
  return __uint_as_float(e % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
inline float element_of(const Piece& piece, int e, f16) {
  const uint32_t word = piece.element[e / 2];
  return to_real(f16{static_cast<uint16_t>(e % 2 == 0 ? word : word >> 16)});
}

inline Piece packed(const double (&from)[2], double) {
  Piece piece;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    piece.element[2 * e] = static_cast<uint32_t>(__double2loint(from[e]));
    piece.element[2 * e + 1] = static_cast<uint32_t>(__double2hiint(from[e]));
  }
  return piece;
}
inline Piece packed(const float (&from)[4], float) {
  return {{__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
           __float_as_uint(from[3])}};
}
inline Piece packed(const float (&from)[8], bf16) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.element[i] = pack<bf16>(from[2 * i], from[2 * i + 1]);
  }
  return piece;
}
inline Piece packed(const float (&from)[8], f16) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.element[i] = pack<f16>(from[2 * i], from[2 * i + 1]);
  }
  return piece;
}

// Whether an element is not zero.
template <class T>
bool any_of(const Piece& piece) {
  const uint32_t all = piece.element[0] | piece.element[1] | piece.element[2] | piece.element[3];
  if constexpr (sizeof(T) == 2) return (all & 0x7fff7fffu) != 0;
  if constexpr (sizeof(T) == 4) return (all & 0x7fffffffu) != 0;
  return (piece.element[0] | piece.element[2] |
          ((piece.element[1] | piece.element[3]) & 0x7fffffffu)) != 0;
}

// What s of a piece comes from: its elements of y, or the bits of the mask that stand for them.
template <class T, Weights kWeights>
struct SlopePiece {
  Piece data;
  bool any() const { return any_of<T>(data); }
  // Calls use(element, s).
  template <class Use>
  void for_each(double alpha, const Use& use) const {
    constexpr int kLength = kVectorLength<T>;
    if constexpr (kWeights == Weights::power) {
      Real<T> s[kLength];
#pragma unroll
      for (int e = 0; e < kLength; ++e) s[e] = element_of(data, e, T{});
      to_powers<T>(s, alpha);
#pragma unroll
      for (int e = 0; e < kLength; ++e) use(e, s[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kLength; ++e) {
        use(e, slope<T, kWeights>(element_of(data, e, T{}), alpha));
      }
    }
  }
};
template <class T>
struct SlopePiece<T, Weights::mask> {
  uint32_t data;
  bool any() const { return data != 0; }
  template <class Use>
  void for_each(double, const Use& use) const {
#pragma unroll
    for (int e = 0; e < kVectorLength<T>; ++e) use(e, data >> e & 1 ? Real<T>{1} : Real<T>{0});
  }
};

// Long rows are read twice, the second time from a cache: what is read for the first time asks to
// stay there, what is read for the last time, and stored, to go.
using Keep = CacheHint<true>;
using Drop = CacheHint<false>;

// A row with unit stride along the axis: `head` elements up to the first multiple of 16 bytes,
// whole pieces of 16 bytes, and what is left. All tensors of a row are aligned alike. The elements
// beside the pieces are the edge: fewer than kMaxEdge, each for one thread.
template <class T, Weights kWeights>
struct PieceRow {
  static constexpr int kLength = kVectorLength<T>;
  static constexpr int kMaxEdge = 2 * kLength;

  const T* y = nullptr;
  const uint8_t* bits = nullptr;  // instead of y
  const T* d_y;
  T* d_x;
  int pieces, head, edge;

  PieceRow(const BackwardParams& p, const RowPlace& place) {
    d_y = static_cast<const T*>(p.d_y.data) + row_offset(p.rows, p.d_y, place.row) + place.begin;
    d_x = static_cast<T*>(p.d_x.data) + row_offset(p.rows, p.d_x, place.row) + place.begin;
    if constexpr (kWeights == Weights::mask) {
      bits = static_cast<const uint8_t*>(p.support.data) + row_offset(p.rows, p.support, place.row);
    } else {
      y = static_cast<const T*>(p.y.data) + row_offset(p.rows, p.y, place.row) + place.begin;
    }
    const auto past = static_cast<int>(reinterpret_cast<uint64_t>(d_x) / sizeof(T) % kLength);
    head = past == 0 ? 0 : kLength - past;
    const auto length = static_cast<int>(place.length);  // within 32 bits: backward.cpp
    if (head > length) head = length;
    pieces = static_cast<int>(static_cast<uint32_t>(length - head) / kLength);
    edge = length - pieces * kLength;
  }

  // Which element the i-th of the edge is.
  int edge_at(int i) const { return i < head ? i : i + pieces * kLength; }
};

// `count` pieces of a row from piece `begin` on.
template <class T, Weights kWeights>
struct PieceRange {
  using Slope = SlopePiece<T, kWeights>;

  const T* y;
  const uint8_t* bits;
  const T* d_y;
  T* d_x;
  int first_bit;
  int count;

  PieceRange(const PieceRow<T, kWeights>& row, int begin, int end) {
    const int at = row.head + begin * kVectorLength<T>;
    if constexpr (kWeights == Weights::mask) {
      bits = row.bits + (at >> 3);
      first_bit = at & 7;
    } else {
      y = row.y + at;
    }
    d_y = row.d_y + at;
    d_x = row.d_x + at;
    count = end > begin ? end - begin : 0;
  }

  // Of one element, which counts from the first piece on.
  template <class R>
  R slope_at(int64_t at, double alpha) const {
    if constexpr (kWeights == Weights::mask) {
      const int64_t bit = at + first_bit;
      return bits[bit >> 3] >> (bit & 7) & 1 ? R{1} : R{0};
    } else {
      return slope<T, kWeights>(static_cast<R>(to_real(y[at])), alpha);
    }
  }

  template <class Hint>
  Slope load_slope(int piece, const Hint& hint) const {
    constexpr int kLength = kVectorLength<T>;
    if constexpr (kWeights == Weights::mask) {
      const int64_t bit = static_cast<int64_t>(piece) * kLength + first_bit;
      const int low = static_cast<int>(bit & 7);
      uint32_t data = bits[bit >> 3];
      if (low + kLength > 8) data |= static_cast<uint32_t>(bits[(bit >> 3) + 1]) << 8;
      return {data >> low & ((1u << kLength) - 1)};
    } else {
      return {hint.load(y + static_cast<int64_t>(piece) * kLength)};
    }
  }
  template <class Hint>
  Piece load_d_y(int piece, const Hint& hint) const {
    return hint.load(d_y + static_cast<int64_t>(piece) * kVectorLength<T>);
  }
  void store(int piece, const Piece& value) const {
    Drop().store(d_x + static_cast<int64_t>(piece) * kVectorLength<T>, value);
  }
};

template <class R>
struct Sums {
  R s = 0, s_d_y = 0;
};

// Adds s and s * d_y. d_y does not count where s is 0, whatever it is.
template <class R>
void add(Sums<R>& sums, R s, R d_y) {
  sums.s += s;
  sums.s_d_y = fma(s, s == 0 ? R{0} : d_y, sums.s_d_y);
}

// `slopes`: a SlopePiece, or what has s of a piece's elements likewise.
template <class T, class Slopes, class R>
void add_piece(Sums<R>& sums, const Slopes& slopes, const Piece& d_y, double alpha) {
  slopes.for_each(alpha, [&](int e, R s) { add(sums, s, element_of(d_y, e, T{})); });
}

template <class R>
R gradient(R s, R d_y, R mean) {
  return s == 0 ? R{0} : s * (d_y - mean);
}

template <class T, class Slopes, class R>
Piece gradient_piece(const Slopes& slopes, const Piece& d_y, R mean, double alpha) {
  R result[kVectorLength<T>];
  slopes.for_each(alpha,
                  [&](int e, R s) { result[e] = gradient(s, element_of(d_y, e, T{}), mean); });
  return packed(result, T{});
}

// All of d_x of a row, by threads `thread` of `threads`.
template <class T, Weights kWeights>
void fill_nan(const PieceRow<T, kWeights>& row, int64_t thread, int64_t threads) {
  const T nan = from_real<T>(quiet_nan<Real<T>>());
  const int length = row.pieces * kVectorLength<T> + row.edge;
  for (int64_t i = thread; i < length; i += threads) row.d_x[i] = nan;
}

}  // namespace pullback::entmax

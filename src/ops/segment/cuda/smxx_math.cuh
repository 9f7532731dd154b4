// Single instructions, and pieces of rows.
#pragma once

#include "device/async_copy.cuh"
#include "device/float.cuh"
#include "device/memory.cuh"
#include "device/packed.cuh"
#include "device/registers.cuh"
#include "device/shared.cuh"

namespace pullback::segment_cuda {

using device::async_commit;
using device::async_copy;
using device::async_wait;
using device::kept;
using device::load_shared;
using device::Packed;
using device::Real;
using device::shared_address;

// A NaN beats everything.
inline float larger(float a, float b) { return device::max_or_nan(a, b); }
inline double larger(double a, double b) { return a != a || a > b ? a : b; }
// Whether x is the extreme: a NaN is if that is one.
template <class R>
bool tied(R x, R extreme) {
  return (x == extreme) | ((x != x) & (extreme != extreme));
}

// Whether rows of T come in pairs of columns that can be compared together.
template <class T, int kCount>
inline constexpr bool kPairs = device::kComparesPacked && sizeof(T) == 2 && kCount % 2 == 0;

constexpr int alignment_of(int bytes) { return bytes < 16 ? bytes : 16; }

// kCount neighbours of a row, as they lie in memory.
template <class T, int kCount>
struct alignas(alignment_of(sizeof(T) * kCount)) Values {
  T element[kCount];

  Real<T> real(int i) const { return device::to_real(element[i]); }
  T stored(int i) const { return element[i]; }
  static Values of(const Real<T> (&values)[kCount]) {
    Values result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.element[i] = device::from_real<T>(values[i]);
    return result;
  }
};

// A row's byte of the mask of one column.
struct MaskByte {
  uint8_t byte;
};
template <int kCount>
struct alignas(alignment_of(kCount)) Values<MaskByte, kCount> {
  uint8_t element[kCount];
  float real(int i) const { return static_cast<float>(element[i] & 1); }
};

// x · y of a row, from two tensors of T.
template <class T>
struct RowProduct {
  using Element = T;
  T element;
};
template <class T>
inline constexpr bool kIsProduct = requires { typename T::Element; };

template <class T, int kCount>
struct alignas(alignment_of(2 * kCount)) PackedValues {
  uint32_t word[kCount / 2];

  float real(int i) const { return device::to_real(stored(i)); }
  T stored(int i) const { return {static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16))}; }
  template <class Result>
  static Result pack(const float (&values)[kCount]) {
    Result result;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      result.word[i] = device::pack<T>(values[2 * i], values[2 * i + 1]);
    }
    return result;
  }
};
template <int kCount>
  requires(kCount % 2 == 0)
struct Values<device::bf16, kCount> : PackedValues<device::bf16, kCount> {
  static Values of(const float (&values)[kCount]) {
    return PackedValues<device::bf16, kCount>::template pack<Values>(values);
  }
};
template <int kCount>
  requires(kCount % 2 == 0)
struct Values<device::f16, kCount> : PackedValues<device::f16, kCount> {
  static Values of(const float (&values)[kCount]) {
    return PackedValues<device::f16, kCount>::template pack<Values>(values);
  }
};

// A piece of 4 or 8 bytes as one word, which no compiler takes apart.
template <int kBytes>
struct WordOf {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint64_t;
};
template <class V>
union PieceWord {
  V values;
  typename WordOf<sizeof(V)>::Type word;
};
template <class V>
inline constexpr bool kIsWord = sizeof(V) == 4 || sizeof(V) == 8;

// 16-byte pieces pass by the first-level cache: every one is touched once.
template <class T, int kCount>
Values<T, kCount> load_once(const T* at) {
  using V = Values<T, kCount>;
  if constexpr (sizeof(V) == 16) {
    union {
      device::Words words;
      V values;
    } piece = {device::load_words(at)};
    return piece.values;
  } else if constexpr (kIsWord<V> && kCount > 1) {
    PieceWord<V> piece;
    piece.word = *reinterpret_cast<const decltype(piece.word)*>(at);
    return piece.values;
  } else {
    return *reinterpret_cast<const V*>(at);
  }
}
template <class T, int kCount>
void store_once(T* at, const Values<T, kCount>& values) {
  using V = Values<T, kCount>;
  if constexpr (sizeof(V) == 16) {
    union {
      V values;
      device::Words words;
    } piece = {values};
    device::store_words(at, piece.words);
  } else if constexpr (kIsWord<V> && kCount > 1) {
    const PieceWord<V> piece = {values};
    *reinterpret_cast<decltype(PieceWord<V>::word)*>(at) = piece.word;
  } else {
    *reinterpret_cast<V*>(at) = values;
  }
}

// Divides values of T by a length above 0. A division takes ten instructions, but many values have
// the same length.
template <class T>
class ByLength {
 public:
  template <class Int>
  explicit ByLength(Int length)
      : length_(static_cast<Real<T>>(length)), inverse_(Real<T>{1} / length_) {}
  Real<T> operator()(Real<T> x) const {
    if constexpr (sizeof(T) == 8) return x / length_;
    const Real<T> quotient = x * inverse_;
    if constexpr (sizeof(T) == 2) return quotient;
    // Rounded as the division rounds, but infinities stay what they are.
    const Real<T> rounded = fma(fma(-quotient, length_, x), inverse_, quotient);
    return rounded == rounded ? rounded : quotient;
  }

 private:
  Real<T> length_, inverse_;
};

// Its error is below an ulp of 1 for arguments up to 0, and grows with what is above.
inline constexpr float kLog2OfE = 1.44269504088896341f, kLogOf2 = 0.693147180559945309f;
inline float exponential(float x) { return device::exp2_approx(x * kLog2OfE); }
// Of exp(x - shift) as 2^(x log2(e) + turn), where turn = -shift log2(e): turn, and the shift that
// is made of it, are rounded, which is a factor of the sum that is off by 5e-5 at most up to here.
inline constexpr float kFarthestShift = 1024;
inline double exponential(double x) { return exp(x); }
// shift + log(sum), the logarithm being off by 2e-7 of itself, or of 1.
inline float shifted_logarithm(float shift, float sum) {
  return fma(device::log2_approx(sum), kLogOf2, shift);
}
inline double shifted_logarithm(double shift, double sum) { return shift + log(sum); }
// The same where sum has powers by exponential(x - shift), by a step of Newton's: of a single power
// x, as that is off by as much.
inline float exact_logarithm(float shift, float sum) {
  const float near = shifted_logarithm(shift, sum);
  const float off = (sum - exponential(near - shift)) * device::reciprocal_approx(sum);
  return fabsf(off) < 1 ? near + off : near;
}
inline double exact_logarithm(double shift, double sum) { return shifted_logarithm(shift, sum); }

}  // namespace pullback::segment_cuda

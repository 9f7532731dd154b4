// The arithmetic of forward on whole vectors: y = 2^((x − m) c) / Σ 2^((x − m) c), where m is the
// maximum of a row and c = scale · log₂e (f64: powers of e, c = scale). Subtracting first is exact
// where it matters, however large the scores are. A negative scale is the vector's: its sign bits
// are flipped, and c is positive.
#pragma once

#include "device/float.cuh"
#include "device/memory.cuh"
#include "device/packed.cuh"

namespace pullback::block_softmax {

using namespace device;

inline constexpr float kLog2E = 1.4426950408889634f;

// Finite: of equal elements the difference is 0.
inline float factor_of_scores(float scale) {
  constexpr float kMost = 0x1.fffffep127f;
  return fminf(scale * kLog2E, kMost);
}
inline double factor_of_scores(double scale) { return scale; }

// scale · x, never as part of a fused operation: of large scores that would have digits which the
// maximum has not.
inline float scaled(float scale, float x) { return __fmul_rn(scale, x); }
inline double scaled(double scale, double x) { return __dmul_rn(scale, x); }

inline float power(float exponent) { return exp2_approx(exponent); }
inline double power(double exponent) { return exp(exponent); }

template <class T>
inline constexpr bool kExactProducts = false;
template <>
inline constexpr bool kExactProducts<bf16> = true;

// The c of a row of elements of T. Of a bf16's 8 bits and 16 of c the product is exact in f32; what
// c loses moves the logarithm of y by 2^-17 of itself.
template <class T>
Real<T> factor_of_elements(Real<T> scale) {
  const Real<T> factor = factor_of_scores(scale);
  if constexpr (kExactProducts<T>) {
    // Towards 0 where rounding could end in infinity.
    const uint32_t half = factor < 0x1p127f ? 0x80u : 0;
    return __uint_as_float((__float_as_uint(factor) + half) & 0xffffff00u);
  } else {
    return factor;
  }
}
// 2^((x − m) c) of an element and the row's maximum; exact products need no difference first.
// Where that of the maximum overflows, elements that are not equal to it, if only by a bf16's last
// digit, are so far away that it is enough for c to bring the maximum to about 2^127.
template <class T>
Real<T> power_of_element(Real<T> x, Real<T> maximum, Real<T> factor) {
  if constexpr (kExactProducts<T>) {
    const uint32_t exponent = __float_as_uint(maximum) & 0x7f800000u;
    const float c = fabsf(maximum * factor) < infinity<float>()
                        ? factor
                        : __uint_as_float((380u << 23) - exponent);
    return power(fma(x, c, -(maximum * c)));
  } else {
    return power((x - maximum) * factor);
  }
}

template <class T>
void negate(Words& raw) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (sizeof(T) == 2) raw.element[w] ^= 0x80008000u;
    if (sizeof(T) == 4 || (sizeof(T) == 8 && w % 2 == 1)) raw.element[w] ^= 0x80000000u;
  }
}

template <class T>
struct Reals {
  Real<T> element[kVectorLength<T>];
};
template <class T>
Reals<T> reals(const Words& raw) {
  Reals<T> result;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      unpack<T>(raw.element[w], result.element[2 * w], result.element[2 * w + 1]);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) result.element[e] = __uint_as_float(raw.element[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      result.element[e] = __hiloint2double(static_cast<int>(raw.element[2 * e + 1]),
                                           static_cast<int>(raw.element[2 * e]));
    }
  }
  return result;
}

// NaN loses against any number.
inline float larger(float a, float b) { return fmaxf(a, b); }
inline double larger(double a, double b) { return fmax(a, b); }

// The maximum of the elements of vectors; 16-bit ones are compared two at a time.
template <class T>
class Largest {
  using R = Real<T>;
  static constexpr bool kPacked = sizeof(T) == 2;

 public:
  void add(const Words& raw) {
    if constexpr (kPacked) {
#pragma unroll
      for (int w = 0; w < 4; ++w) largest_ = Packed<T>::max(largest_, raw.element[w]);
    } else {
      const Reals<T> values = reals<T>(raw);
#pragma unroll
      for (int e = 0; e < kVectorLength<T>; ++e) largest_ = larger(largest_, values.element[e]);
    }
  }
  R value() const {
    if constexpr (kPacked) {
      R low, high;
      unpack<T>(largest_, low, high);
      return larger(low, high);
    } else {
      return largest_;
    }
  }

 private:
  static auto none() {
    if constexpr (kPacked) {
      return pack<T>(-infinity<R>(), -infinity<R>());
    } else {
      return -infinity<R>();
    }
  }
  decltype(none()) largest_ = none();
};

template <class T, class R>
Words rounded(const R (&values)[kVectorLength<T>]) {
  Words raw;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < 4; ++w) raw.element[w] = pack<T>(values[2 * w], values[2 * w + 1]);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) raw.element[e] = __float_as_uint(values[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      raw.element[2 * e] = static_cast<uint32_t>(__double2loint(values[e]));
      raw.element[2 * e + 1] = static_cast<uint32_t>(__double2hiint(values[e]));
    }
  }
  return raw;
}

}  // namespace pullback::block_softmax

// The 16-bit float types and their conversions. Arithmetic is done in Real<T>: double for double,
// float for the rest.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
struct RealOf {
  using Type = float;
};
template <>
struct RealOf<double> {
  using Type = double;
};
template <class T>
using Real = typename RealOf<T>::Type;

inline double to_real(double value) { return value; }
inline float to_real(float value) { return value; }
inline float to_real(bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline float to_real(f16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Rounds to nearest even.
template <class T>
T from_real(Real<T> value);
template <>
inline double from_real<double>(double value) {
  return value;
}
template <>
inline float from_real<float>(float value) {
  return value;
}
template <>
inline bf16 from_real<bf16>(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
inline f16 from_real<f16>(float value) {
  f16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// Two 16-bit floats in a word, `low` first in memory. Left to itself the compiler spends a register
// on each.
template <class T>
uint32_t pack(float low, float high);
template <>
inline uint32_t pack<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
inline uint32_t pack<f16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <class T>
void unpack(uint32_t pair, float& low, float& high);
template <>
inline void unpack<bf16>(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}
template <>
inline void unpack<f16>(uint32_t pair, float& low, float& high) {
  low = to_real(f16{static_cast<uint16_t>(pair)});
  high = to_real(f16{static_cast<uint16_t>(pair >> 16)});
}

// By the hardware's own instruction; what is below 2^-126 is 0.
inline float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
// Of a subnormal number, -inf.
inline float log2_approx(float x) {
  float logarithm;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
  return logarithm;
}
// To 1 ulp; of and to subnormal numbers, 0.
inline float sqrt_approx(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
inline float reciprocal_approx(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// A NaN beats everything.
inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
inline double max_or_nan(double a, double b) { return a > b || a != a ? a : b; }

template <class R>
R infinity() {
  return static_cast<R>(__int_as_float(0x7f800000));
}
template <class R>
R quiet_nan() {
  return static_cast<R>(__int_as_float(0x7fffffff));
}

}  // namespace pullback::device

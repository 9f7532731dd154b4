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

template <class R>
R infinity() {
  return static_cast<R>(__int_as_float(0x7f800000));
}
template <class R>
R quiet_nan() {
  return static_cast<R>(__int_as_float(0x7fffffff));
}

}  // namespace pullback::device

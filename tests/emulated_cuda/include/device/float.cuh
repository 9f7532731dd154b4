// device/float.cuh on the host.
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
inline float to_real(f16 value) { return emulated::from_bits<_Float16>(value.bits); }

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
  if (value != value) return {0x7fff};
  const uint32_t bits = __float_as_uint(value);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline f16 from_real<f16>(float value) {
  if (value != value) return {0x7fff};
  return {static_cast<uint16_t>(emulated::bits_of(static_cast<_Float16>(value)))};
}

template <class T>
uint32_t pack(float low, float high) {
  return from_real<T>(low).bits | static_cast<uint32_t>(from_real<T>(high).bits) << 16;
}
template <class T>
void unpack(uint32_t pair, float& low, float& high) {
  low = to_real(T{static_cast<uint16_t>(pair)});
  high = to_real(T{static_cast<uint16_t>(pair >> 16)});
}

// What is subnormal is 0 to the hardware.
inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? 0 : value; }
inline float exp2_approx(float x) { return flushed(exp2f(flushed(x))); }
inline float log2_approx(float x) { return log2f(flushed(x)); }
inline float sqrt_approx(float x) { return sqrtf(flushed(x)); }
inline float reciprocal_approx(float x) { return flushed(1 / flushed(x)); }
inline float max_or_nan(float a, float b) { return a != a || a > b ? a : b; }
inline double max_or_nan(double a, double b) { return a != a || a > b ? a : b; }

template <class R>
R infinity() {
  return static_cast<R>(__int_as_float(0x7f800000));
}
template <class R>
R quiet_nan() {
  return static_cast<R>(__int_as_float(0x7fffffff));
}

}  // namespace pullback::device

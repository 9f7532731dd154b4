// Units of f32 tiles that are split in planes of f16 (smxx_planes.cuh): powers of two.
#pragma once

#include "device/types.cuh"

namespace pullback::attention {

inline constexpr uint32_t kInfinityBits = 0x7f800000;

// A magnitude as bits, which order like numbers; 0 for what is not finite.
inline uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffff; }
inline uint32_t finite_magnitude_of(float x) {
  const uint32_t magnitude = magnitude_of(x);
  return magnitude < kInfinityBits ? magnitude : 0;
}
// The same order in two instructions: infinity and NaN come before every finite number.
inline uint32_t finite_order(uint32_t bits) { return (bits + 0x00800000) & 0x7fffffff; }
inline uint32_t magnitude_of_order(uint32_t order) {
  return order > 0x00800000 ? order - 0x00800000 : 0;
}

inline float unit_of(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  return __uint_as_float((exponent > 15 ? exponent - 14 : 1) << 23);
}
// 1 / 2^n
inline float inverse_of(float power_of_two) {
  return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

}  // namespace pullback::attention

// A word of one float, or of two 16-bit ones that are taken at once.
#pragma once

#include "device/float.cuh"

namespace pullback::device {

// Whether Packed has above() and nan(), of 16-bit floats.
inline constexpr bool kComparesPacked = __CUDA_ARCH__ >= 900;

// Two 16-bit floats as integers in the same order, or such integers as floats. What canonical()
// has left of NaN is the largest.
inline uint32_t reordered(uint32_t pair) {
  // All bits of a half are its sign; then those below the sign are exchanged. In one piece, or the
  // compiler takes another instruction where a half is wanted.
  uint32_t result;
  asm("{.reg .b32 signs; prmt.b32 signs, %1, 0, 0xbb99; lop3.b32 %0, %1, signs, 0x7fff7fff, 0x78;}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

template <class T>
struct Packed;
template <>
struct Packed<float> {
  // The larger ones; a NaN beats everything.
  static uint32_t max_or_nan(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};
template <>
struct Packed<bf16> {
  // The same numbers, but 0 for -0, and one NaN for all: 0x7fff.
  static uint32_t canonical(uint32_t pair) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3f803f80u), "r"(0u));
    return result;
  }
  static uint32_t max_or_nan(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  // The larger ones; a NaN loses against any number.
  static uint32_t max(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  static void unpack(uint32_t pair, float& low, float& high) {
    device::unpack<bf16>(pair, low, high);
  }
#if __CUDA_ARCH__ >= 900
  // All bits of a half, or none: whether a is above b, or (kEqual) no less.
  template <bool kEqual>
  static uint32_t above(uint32_t a, uint32_t b) {
    uint32_t mask;
    if constexpr (kEqual) {
      asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    } else {
      asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    }
    return mask;
  }
  // The same: whether a is NaN.
  static uint32_t nan(uint32_t a) {
    uint32_t mask;
    asm("set.nan.u32.bf16x2 %0, %1, %1;" : "=r"(mask) : "r"(a));
    return mask;
  }
#endif
};
template <>
struct Packed<f16> {
  // The same numbers, but 0 for -0, and one NaN for all: 0x7fff.
  static uint32_t canonical(uint32_t pair) {
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3c003c00u), "r"(0u));
    return result;
  }
  static uint32_t max_or_nan(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  static uint32_t max(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  // Both at once, or the compiler converts each where it is used, some twice.
  static void unpack(uint32_t pair, float& low, float& high) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
  }
#if __CUDA_ARCH__ >= 900
  template <bool kEqual>
  static uint32_t above(uint32_t a, uint32_t b) {
    uint32_t mask;
    if constexpr (kEqual) {
      asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    } else {
      asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    }
    return mask;
  }
  // The same: whether a is NaN.
  static uint32_t nan(uint32_t a) {
    uint32_t mask;
    asm("set.nan.u32.f16x2 %0, %1, %1;" : "=r"(mask) : "r"(a));
    return mask;
  }
#endif
};

}  // namespace pullback::device

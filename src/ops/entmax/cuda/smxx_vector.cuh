// 16 bytes of a row in packed form: two elements of a 16-bit type are compared by one instruction.
#pragma once

#include "device/memory.cuh"
#include "ops/entmax/cuda/smxx_group.cuh"

namespace pullback::entmax {

using device::bf16;
using device::f16;

template <class T>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<bf16> = true;

template <class T>
struct alignas(16) Packed {
  uint32_t word[4];
};

template <class T>
Packed<T> load_packed(const void* from) {
  Packed<T> result;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.word[0]), "=r"(result.word[1]), "=r"(result.word[2]),
                 "=r"(result.word[3])
               : "l"(from));
  return result;
}

template <class T>
void store_packed(void* to, const Packed<T>& value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// Elements of one word: one float, or two of 16 bits, the lower half first.
template <class T>
inline constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

inline void unpack(uint32_t word, float (&to)[1], float) { to[0] = __uint_as_float(word); }
inline void unpack(uint32_t word, float (&to)[2], bf16) {
  to[0] = __uint_as_float(word << 16);
  to[1] = __uint_as_float(word & 0xffff0000u);
}
inline void unpack(uint32_t word, float (&to)[2], f16) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(to[0]), "=f"(to[1])
      : "r"(word));
}

inline uint32_t pack(const float (&from)[1], float) { return __float_as_uint(from[0]); }
inline uint32_t pack(const float (&from)[2], bf16) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
  return word;
}
inline uint32_t pack(const float (&from)[2], f16) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
  return word;
}

// Elementwise maximum of words; NaN wins.
template <class T>
uint32_t max_of_words(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (sizeof(T) == 4) {
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else if constexpr (kIsBf16<T>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
template <class T>
uint32_t max_of(const Packed<T>& v) {
  return max_of_words<T>(max_of_words<T>(v.word[0], v.word[1]),
                         max_of_words<T>(v.word[2], v.word[3]));
}
template <class T>
float max_in_word(uint32_t word) {
  float x[kPerWord<T>];
  unpack(word, x, T{});
  return kPerWord<T> == 1 ? x[0] : max_or_nan(x[0], x[kPerWord<T> - 1]);
}

template <class T>
inline constexpr int kDigits = sizeof(T) == 4 ? 24
                               : kIsBf16<T>   ? 8
                                              : 11;

// Of p. y shows no more than its own type's; what else a row has is f32. Where p has a third
// derivative theta is closer than p by the slope of f and the curvature that the steps mind.
template <class T, class Params>
int digits_wanted(const Params& p) {
  if (sizeof(T) == 4 || p.support_size.data) return 24;
  if (p.tau.data) return p.alpha < 4.0 / 3 ? 18 : 24;
  return kDigits<T>;
}

// Minus infinity in all elements.
template <class T>
inline constexpr uint32_t kHiddenWord = sizeof(T) == 4 ? 0xff800000u
                                        : kIsBf16<T>   ? 0xff80ff80u
                                                       : 0xfc00fc00u;

}  // namespace pullback::entmax

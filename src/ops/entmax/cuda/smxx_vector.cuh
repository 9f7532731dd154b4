// 16 bytes of a row in packed form: two elements of a 16-bit type are compared by one instruction.
#pragma once

#include "device/memory.cuh"
#include "device/packed.cuh"
#include "ops/entmax/cuda/smxx_group.cuh"

namespace pullback::entmax {

using device::bf16;
using device::f16;
using device::load_words;
using device::store_words;
using device::Words;

template <class T>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<bf16> = true;

// Elements of one word: one float, or two of 16 bits, the lower half first.
template <class T>
inline constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

template <class T>
void unpack(uint32_t word, float (&to)[kPerWord<T>]) {
  if constexpr (sizeof(T) == 4) {
    to[0] = __uint_as_float(word);
  } else {
    device::Packed<T>::unpack(word, to[0], to[1]);
  }
}
template <class T>
uint32_t pack(const float (&from)[kPerWord<T>]) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(from[0]);
  } else {
    return device::pack<T>(from[0], from[1]);
  }
}

// Elementwise maximum of words; NaN wins.
template <class T>
uint32_t max_of_words(uint32_t a, uint32_t b) {
  return device::Packed<T>::max_or_nan(a, b);
}
template <class T>
uint32_t max_of(const Words& v) {
  return max_of_words<T>(max_of_words<T>(v.element[0], v.element[1]),
                         max_of_words<T>(v.element[2], v.element[3]));
}
template <class T>
float max_in_word(uint32_t word) {
  float x[kPerWord<T>];
  unpack<T>(word, x);
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

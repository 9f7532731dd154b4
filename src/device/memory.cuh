// Global memory in 16-byte pieces that bypass the first-level cache: every element is touched once.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

template <class T>
inline constexpr int kVectorLength = 16 / static_cast<int>(sizeof(T));

template <class T>
struct alignas(16) Vector {
  T element[kVectorLength<T>];
};

template <class T>
Vector<T> load_vector(const T* from) {
  union {
    Vector<T> vector;
    uint32_t word[4];
  } result;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.word[0]), "=r"(result.word[1]), "=r"(result.word[2]),
                 "=r"(result.word[3])
               : "l"(from));
  return result.vector;
}

template <class T>
void store_vector(T* to, const Vector<T>& vector) {
  union {
    Vector<T> vector;
    uint32_t word[4];
  } value = {vector};
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// Two bytes where `i` is below `count`, else 0: lanes that do not part, so that they can all ask
// for several before they wait for the first.
inline uint16_t load_below(const void* from, int i, int count) {
  uint16_t bits = 0;
  asm volatile("{.reg .pred p; setp.lt.s32 p, %2, %3; @p ld.global.u16 %0, [%1];}"
               : "+h"(bits)
               : "l"(from), "r"(i), "r"(count));
  return bits;
}

// 16 bytes, whatever they hold: a compiler that sees 16-bit pieces takes them apart, and spends
// registers and instructions on it.
using Words = Vector<uint32_t>;

template <class T>
Words load_words(const T* from) {
  return load_vector(reinterpret_cast<const uint32_t*>(from));
}
template <class T>
void store_words(T* to, const Words& words) {
  store_vector(reinterpret_cast<uint32_t*>(to), words);
}

}  // namespace pullback::device

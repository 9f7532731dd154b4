// Shared memory by its 32-bit address, as the copying and the matrix instructions take it.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

inline uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

inline void store_shared(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
inline void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
inline void store_shared(uint32_t address, const uint32_t (&value)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}
inline void load_shared(uint32_t (&value)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}
// 4, 8 or 16 bytes of shared memory.
template <class T>
T load_shared(uint32_t from) {
  union {
    uint32_t word[sizeof(T) / 4];
    T value;
  } piece;
  if constexpr (sizeof(T) == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]),
                   "=r"(piece.word[3])
                 : "r"(from));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1])
                 : "r"(from));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(piece.word[0]) : "r"(from));
  }
  return piece.value;
}
// Adds one, whoever else does.
inline void count_shared(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}
inline uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace pullback::device

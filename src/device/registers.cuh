// What the compiler is kept from doing with registers.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

// Computes the value here, and not again where it is used.
inline uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
inline int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
inline int64_t kept(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

}  // namespace pullback::device

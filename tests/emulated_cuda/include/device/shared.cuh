// device/shared.cuh on the host: addresses count from below the dynamic shared memory, so that
// other variables of the block have one too, and keep its alignment.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

inline constexpr uint32_t kDynamicShared = 1u << 30;

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulated::dynamic_shared()) +
         kDynamicShared;
}
inline unsigned char* shared_pointer(uint32_t address) {
  return emulated::dynamic_shared() + static_cast<int32_t>(address - kDynamicShared);
}

template <class T>
T load_shared(uint32_t from) {
  if (from % sizeof(T) != 0) emulated::fail("a misaligned load from shared memory");
  return *reinterpret_cast<const T*>(shared_pointer(from));
}

inline uint32_t dynamic_shared_bytes() { return emulated::dynamic_bytes; }

inline uint32_t load_shared_word(uint32_t address) { return load_shared<uint32_t>(address); }
inline void store_shared(uint32_t address, uint32_t value) {
  if (address % sizeof value != 0) emulated::fail("a misaligned store to shared memory");
  *reinterpret_cast<uint32_t*>(shared_pointer(address)) = value;
}
inline void store_shared(uint32_t address, const uint32_t (&value)[4]) {
  for (int i = 0; i < 4; ++i) store_shared(address + 4 * i, value[i]);
}
inline void count_shared(uint32_t address) { store_shared(address, load_shared_word(address) + 1); }

}  // namespace pullback::device

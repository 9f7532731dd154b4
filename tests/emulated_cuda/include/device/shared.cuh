// device/shared.cuh on the host: an address is the number of a region and the place in it. Dynamic
// shared memory and a kernel's own variables may lie in regions that no 32 bits reach across.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

inline constexpr uint32_t kRegionBytes = 1u << 30;

inline uint32_t shared_address(const void* pointer) {
  constexpr uintptr_t kAlignment = 1024, kHalf = kRegionBytes / 2;
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  uint32_t number = 0;
  for (uintptr_t& region : emulated::shared_regions) {
    if (region == 0) region = at / kAlignment * kAlignment - kHalf;
    if (at - region < kRegionBytes)
      return number * kRegionBytes + static_cast<uint32_t>(at - region);
    ++number;
  }
  emulated::fail("shared memory in more places than there are regions");
}
inline unsigned char* shared_pointer(uint32_t address) {
  return reinterpret_cast<unsigned char*>(emulated::shared_regions[address / kRegionBytes] +
                                          address % kRegionBytes);
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

// device/async_copy.cuh on the host: copies are made when their group is waited for, no sooner.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

inline void copy_later(uint32_t to_shared, const void* from_global, int bytes, int of) {
  if (to_shared % of != 0 || reinterpret_cast<uintptr_t>(from_global) % of != 0) {
    emulated::fail("a misaligned copy");
  }
  emulated::current->copies.back().push_back({shared_pointer(to_shared), from_global, bytes, of});
}

template <int kBytes = 16>
void async_copy(uint32_t to_shared, const void* from_global) {
  copy_later(to_shared, from_global, kBytes, kBytes);
}
inline void async_copy(void* to_shared, const void* from_global) {
  async_copy(shared_address(to_shared), from_global);
}
inline void async_copy_padded(uint32_t to_shared, const void* from_global, int bytes) {
  copy_later(to_shared, from_global, bytes, 16);
}
inline void async_copy_padded_cached(uint32_t to_shared, const void* from_global, int bytes) {
  copy_later(to_shared, from_global, bytes, 16);
}
inline void async_copy_or_zero(uint32_t to_shared, const void* from_global, bool valid) {
  copy_later(to_shared, from_global, valid ? 16 : 0, 16);
}

inline void async_commit() { emulated::current->copies.emplace_back(); }
inline void async_wait(int pending) {
  auto& groups = emulated::current->copies;
  while (static_cast<int>(groups.size()) - 1 > pending) {
    for (const emulated::Copy& copy : groups.front()) {
      memcpy(copy.to, copy.from, copy.bytes);
      memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.of - copy.bytes);
    }
    groups.erase(groups.begin());
  }
}
template <int kPending>
void async_wait() {
  async_wait(kPending);
}

}  // namespace pullback::device

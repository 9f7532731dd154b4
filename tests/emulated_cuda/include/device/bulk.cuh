// device/bulk.cuh on the host: for kernels of clusters, which are compiled but not launched, and
// what is prefetched, which has to be there.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

inline void barrier_init(uint64_t*, uint32_t) { emulated::fail("a barrier of copies"); }
inline void barrier_init_fence() {}
inline void barrier_expect_bytes(uint64_t*, uint32_t) {}
inline void barrier_wait(uint64_t*, uint32_t) {}
template <class T>
void send(uint32_t, const T&, uint32_t) {}

inline void bulk_prefetch(const void* from, uint32_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(from);
  if (address % 16 != 0 || bytes % 16 != 0) emulated::fail("a prefetch of no whole pieces");
  for (uint32_t at = 0; at < bytes; ++at) static_cast<const volatile unsigned char*>(from)[at];
}

}  // namespace pullback::device

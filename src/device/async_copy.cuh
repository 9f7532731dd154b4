// Copies from global to shared memory that run beside the thread (sm_80). A thread that reads only
// what it copied itself needs no barrier: async_wait is enough.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

// 4, 8 or 16 bytes; both addresses are aligned to as many. 16 bytes pass by the first-level cache.
template <int kBytes = 16>
void async_copy(uint32_t to_shared, const void* from_global) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from_global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to_shared), "l"(from_global),
                 "n"(kBytes)
                 : "memory");
  }
}
inline void async_copy(void* to_shared, const void* from_global) {
  async_copy(shared_address(to_shared), from_global);
}

// The first `bytes` of 16, and zeros; what lies behind them is not read.
inline void async_copy_padded(uint32_t to_shared, const void* from_global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared),
               "l"(from_global), "r"(bytes)
               : "memory");
}

// The same through the first-level cache: for what the block reads again soon.
inline void async_copy_padded_cached(uint32_t to_shared, const void* from_global, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared),
               "l"(from_global), "r"(bytes)
               : "memory");
}

// All 16 bytes, or none.
inline void async_copy_or_zero(uint32_t to_shared, const void* from_global, bool valid) {
  async_copy_padded(to_shared, from_global, valid ? 16 : 0);
}

// Closes the group of all copies since the last call; a group may be empty.
inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups, the youngest, are under way.
template <int kPending>
void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same for a number known at run time; above 8 it waits as for 8.
inline void async_wait(int pending) {
  switch (pending) {
    case 0:
      return async_wait<0>();
    case 1:
      return async_wait<1>();
    case 2:
      return async_wait<2>();
    case 3:
      return async_wait<3>();
    case 4:
      return async_wait<4>();
    case 5:
      return async_wait<5>();
    case 6:
      return async_wait<6>();
    case 7:
      return async_wait<7>();
    default:
      return async_wait<8>();
  }
}

}  // namespace pullback::device

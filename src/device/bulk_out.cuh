// Bulk copies out of shared memory (sm_90): a thread asks, and the copy engine stores, or adds in
// memory. `bytes` is a multiple of 16, both addresses are aligned to 16. What other threads wrote
// has to be fenced by them (fence_async_proxy in device/wgmma.cuh) and waited for.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

inline void bulk_store(void* to_global, uint32_t from_shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to_global),
               "r"(from_shared), "r"(bytes)
               : "memory");
}
// Each element once, in no order among them.
inline void bulk_add(float* to_global, uint32_t from_shared, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to_global),
      "r"(from_shared), "r"(bytes)
      : "memory");
}

// Closes the group of this thread's bulk copies since the last call.
inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups have read shared memory, which is then free.
inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until all of them are written.
inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace pullback::device

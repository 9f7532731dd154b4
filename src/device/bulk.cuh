// mbarriers and bulk copies (sm_90): a thread asks for a contiguous piece of global memory, the
// copy engine fills shared memory and counts the bytes on a barrier that the readers wait for.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// After barrier_init, before anybody else uses the barriers: makes them visible to the copy engine.
inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives when the calling thread's asynchronous copies (device/async_copy.cuh) so far are there.
inline void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits until the phase with this parity (0 for the first) has completed.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Into the shared memory of another block of the cluster, whose barrier there counts the bytes;
// both by remote_address(). Who waits for the barrier sees them: no fence, and no block waits for
// those that it does not hear from.
inline void send(uint32_t address, float value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}
inline void send(uint32_t address, double value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
          address),
      "l"(__double_as_longlong(value)), "r"(barrier)
      : "memory");
}
inline void send(uint32_t address, const float (&values)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(__float_as_uint(values[0])), "r"(__float_as_uint(values[1])),
      "r"(__float_as_uint(values[2])), "r"(__float_as_uint(values[3])), "r"(barrier)
      : "memory");
}

// `bytes` is a multiple of 16, both addresses are aligned to 16. The data is read once: it need not
// stay in the second-level cache.
inline void bulk_load(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
      "l"(from_global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Into the second-level cache alone: nobody waits, and nothing follows from it. Multiples of 16, as
// above. Before sm_90 it does nothing.
inline void bulk_prefetch(const void* from_global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from_global), "r"(bytes));
#endif
}

}  // namespace pullback::device

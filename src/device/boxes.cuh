// Boxes of tensors (sm_90): a thread asks for one, the copy engine fills shared memory with it and
// counts the bytes on a barrier that others arrive at too. And what a barrier knows already.
#pragma once

#include "device/bulk.cuh"
#include "device/tensor_map.cuh"

namespace pullback::device {

// Bytes that the barrier's phase waits for beside its arrivals, of which this is none.
inline void barrier_expect_more_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Whether the phase with this parity has completed. As for barrier_wait(), the phase before has: a
// barrier tells of one phase only.
inline bool barrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// A box of a tensor of four dimensions, from a column and row on, which may lie outside of it. The
// barrier counts the bytes of a whole box.
inline void load_box(uint32_t to_shared, const TensorMap& map, int column, int row, int third,
                     int fourth, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to_shared),
      "l"(&map), "r"(column), "r"(row), "r"(third), "r"(fourth), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace pullback::device

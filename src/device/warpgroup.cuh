// What the warpgroups of a thread block, four neighbouring warps each, do for each other (sm_90a).
#pragma once

#include "device/warp.cuh"

namespace pullback::device {

inline constexpr int kWarpgroupSize = 128;

// The first lane's value, which is every lane's: the compiler then knows that it is, and keeps what
// follows from it in registers of the warp. Products take their operands' addresses from there.
inline int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

// Barrier `number`, 1 to 15, of so many threads of the block: all of them come, some wait.
inline void named_wait(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
inline void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of each thread of the calling warpgroup from here on: taken from what others gave up.
template <int kRegisters>
void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace pullback::device

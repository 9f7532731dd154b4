// Reductions of integers over a warp, each by one instruction. To the compiler they are plain
// functions of their arguments, which it may move and join; all lanes have to come to them.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

inline int warp_sum_integer(int value) {
  int result;
  asm("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}
inline int warp_max_integer(int value) {
  int result;
  asm("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

}  // namespace pullback::device

// Reductions over a warp by butterflies: every lane gets the result, with the same bits on all.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarpSize = 32;

template <class T>
T warp_sum(T value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// NaN loses against any number, as in max.f32.
template <class T>
T warp_max(T value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value || value != value ? other : value;
  }
  return value;
}

}  // namespace pullback::device

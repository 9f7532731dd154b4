// Ragged offsets as every backend reads them: inside the axis and never decreasing, whatever the
// tensor holds. One block walks over them with a running maximum.
#pragma once

#include "device/warp.cuh"
#include "ops/entmax/cuda/params.cuh"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {

inline void clean_offsets(const OffsetsParams& p) {
  using namespace device;
  constexpr int kWarps = kOffsetsThreads / kWarpSize;
  __shared__ int64_t of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t carry = 0;
  for (int64_t begin = 0; begin <= p.groups; begin += kOffsetsThreads) {
    const int64_t i = begin + static_cast<int64_t>(threadIdx.x);
    int64_t value = 0;
    if (i <= p.groups) {
      const int64_t at = i * p.from_step;
      value = p.wide ? static_cast<const int64_t*>(p.from)[at]
                     : static_cast<const int32_t*>(p.from)[at];
      value = value < 0 ? 0 : value > p.length ? p.length : value;
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, value, step);
      if (lane >= step && before > value) value = before;
    }
    if (lane == kWarpSize - 1) of_warp[warp] = value;
    __syncthreads();
    int64_t largest = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp && largest > value) value = largest;
      if (of_warp[w] > largest) largest = of_warp[w];
    }
    if (i <= p.groups) p.to[i] = value;
    carry = largest;
    __syncthreads();
  }
}

}  // namespace pullback::entmax

// A bias, or its gradient, from the steps of one tensor to those of another. 2^lane_bits threads
// take kBiasPieces keys each of a query, one of `chunks` of the row.
#pragma once

#include "device/types.cuh"
#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

inline void copy_bias(const BiasCopyParams& p) {
  const int lane = static_cast<int>(threadIdx.x) & ((1 << p.lane_bits) - 1);
  const int row = static_cast<int>(threadIdx.x >> p.lane_bits);
  const int64_t query =
      static_cast<int64_t>(blockIdx.x / p.chunks) * (kBiasThreads >> p.lane_bits) + row;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x % p.chunks) * kBiasPieces << p.lane_bits) + lane;
  if (query >= p.shape.query) return;
  const int64_t pairs = p.shape.batch * p.shape.head;
  for (int64_t pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
    const int64_t batch = pair / p.shape.head, head = pair % p.shape.head;
    const auto start_of = [&](const Plane& plane) {
      return static_cast<uint16_t*>(plane.data) + batch * plane.batch + head * plane.head +
             query * plane.query;
    };
    const uint16_t* const from = start_of(p.from);
    uint16_t* const to = start_of(p.to);
    // All are on their way before the first one is stored.
    uint16_t values[kBiasPieces];
#pragma unroll
    for (int n = 0; n < kBiasPieces; ++n) {
      const int64_t key = first + (static_cast<int64_t>(n) << p.lane_bits);
      if (key < p.shape.key) values[n] = from[key * p.from.key];
    }
#pragma unroll
    for (int n = 0; n < kBiasPieces; ++n) {
      const int64_t key = first + (static_cast<int64_t>(n) << p.lane_bits);
      if (key < p.shape.key) to[key * p.to.key] = values[n];
    }
  }
}

}  // namespace pullback::attention

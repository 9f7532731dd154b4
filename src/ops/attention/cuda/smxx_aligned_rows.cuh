// Rows of tensors from their places to others, zeros behind them. 2^lane_bits threads take
// kCopyPieces words each of a row, one of `chunks` of it.
#pragma once

#include "device/types.cuh"
#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

// T: unsigned, of a word's size.
template <class T>
void align_rows(const RowCopyParams& p) {
  const RowCopy& copy = p.copies[blockIdx.z];
  if (blockIdx.x >= copy.blocks) return;
  const int lanes = 1 << copy.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int row = static_cast<int>(threadIdx.x >> copy.lane_bits);
  const int64_t query =
      static_cast<int64_t>(blockIdx.x / copy.chunks) * (kCopyThreads >> copy.lane_bits) + row;
  if (query >= copy.shape.query) return;
  const int first = static_cast<int>(blockIdx.x % copy.chunks) * kCopyPieces * lanes + lane;
  const int keys = static_cast<int>(copy.shape.key), width = static_cast<int>(copy.width);
  const auto heads = static_cast<uint32_t>(copy.shape.head);
  const uint32_t pairs = static_cast<uint32_t>(copy.shape.batch) * heads;
  for (uint32_t pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
    const uint32_t batch = pair / heads, head = pair % heads;
    const auto start_of = [&](const Plane& plane) {
      return static_cast<T*>(plane.data) + batch * plane.batch + head * plane.head +
             query * plane.query + first * plane.key;
    };
    const T* from = start_of(copy.from);
    T* to = start_of(copy.to);
    // All are on their way before the first one is stored.
    T values[kCopyPieces];
#pragma unroll
    for (int n = 0; n < kCopyPieces; ++n, from += lanes * copy.from.key) {
      values[n] = first + n * lanes < keys ? *from : T{0};
    }
#pragma unroll
    for (int n = 0; n < kCopyPieces; ++n, to += lanes * copy.to.key) {
      if (first + n * lanes < width) *to = values[n];
    }
  }
}

}  // namespace pullback::attention

// The first kernels of a run: they look whether offsets or ids are in order (smxx_segments.cuh),
// and find the starts of tiles.
#pragma once

#include "ops/segment/cuda/smxx_segments.cuh"

namespace pullback::segment_cuda {

inline int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

inline void end_check(const Params& p, bool bad) {
  const int any = __syncthreads_or(bad);
  if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  if (thread_number() == 0) *p.repaired = 0;
}

// Starts of tiles are found as if all were well; if not, repair() finds them again.
inline void check_offsets(const Params& p) {
  device::allow_next_kernel();
  const Segments segments = make_segments(p, false);
  constexpr int kAtOnce = 8;  // reads on their way
  bool bad = false;
  for (int64_t s = thread_number(); s <= p.segments; s += kAtOnce * thread_count()) {
    int64_t offset[kAtOnce], before[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = s + i * thread_count();
      offset[i] = before[i] = 0;
      if (at > p.segments) continue;
      offset[i] = index_at(p.offsets, at);
      if (at > 0) before[i] = index_at(p.offsets, at - 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) bad |= offset[i] < before[i] || offset[i] > p.rows;
  }
  find_starts(p, segments, thread_number(), thread_count());
  end_check(p, bad);
}

// offset(s) = number of ids below s, by bisection of ids that are taken to be in order.
inline void offsets_of_ids(const Params& p) {
  device::allow_next_kernel();
  bool bad = false;
  for (int64_t n = thread_number() + 1; n < p.rows; n += thread_count()) {
    const int64_t id = clamped(index_at(p.ids, n), -1, p.segments);
    bad |= id < clamped(index_at(p.ids, n - 1), -1, p.segments);
  }
  for (int64_t s = thread_number(); s <= p.segments; s += thread_count()) {
    int64_t low = 0, high = p.rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (index_at(p.ids, middle) >= s) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    p.own_offsets[s] = low;
  }
  end_check(p, bad);
}

inline void find_all_starts(const Params& p) {
  find_starts(p, make_segments(p), thread_number(), thread_count());
}

}  // namespace pullback::segment_cuda

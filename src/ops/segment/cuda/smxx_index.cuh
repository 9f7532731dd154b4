// From index tensors that nobody vouches for to segments that the other kernels can trust, without
// the host hearing of it: check (all blocks), repair (one block, idle unless a check failed), and
// with ids the starts of tiles. The rules are those of index.hpp: an offset or id that is smaller
// than one before it counts as the largest so far.
#pragma once

#include "ops/segment/cuda/smxx_tile.cuh"

namespace pullback::segment_cuda {

inline void report_disorder(const Params& p, bool bad) {
  const int any = __syncthreads_or(bad);
  if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
}

inline int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// By all warps of the grid, or of the block.
inline void find_starts(const Params& p, const Segments& segments, int64_t thread,
                        int64_t threads) {
  const bool first_lane = threadIdx.x % device::kWarpSize == 0;
  for (int64_t tile = thread / device::kWarpSize; tile <= p.tiles;
       tile += threads / device::kWarpSize) {
    const TileStart start = find_start(segments, tile * p.tile_items);
    if (first_lane) p.starts[tile] = start;
  }
  if (thread == 0) p.starts[p.tiles + 1] = {segments.begin(1), segments.end(segments.count)};
}

// Starts of tiles are found as if all were well; if not, repair() finds them again.
inline void check_offsets(const Params& p) {
  let_next_kernel_begin();
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
  report_disorder(p, bad);
}

// offset(s) = number of ids below s, by bisection of ids that are taken to be in order.
inline void offsets_of_ids(const Params& p) {
  let_next_kernel_begin();
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
  report_disorder(p, bad);
}

// own_offsets[i] becomes the largest (kForward) of elements 0 to i, or the smallest of i to S.
template <bool kForward, int kThreads>
void scan_own_offsets(const Params& p) {
  __shared__ int64_t scan[kThreads];
  const int thread = threadIdx.x;
  const int64_t count = p.segments + 1;
  const int64_t neutral = kForward ? 0 : p.rows;
  int64_t carry = neutral;
  const auto pick = [](int64_t a, int64_t b) { return kForward == (a < b) ? b : a; };
  for (int64_t base = 0; base < count; base += kThreads) {
    const int64_t i = base + thread;
    const int64_t at = kForward ? i : count - 1 - i;
    scan[thread] = i < count ? p.own_offsets[at] : neutral;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
      const int64_t other = thread >= step ? scan[thread - step] : neutral;
      __syncthreads();
      scan[thread] = pick(scan[thread], other);
      __syncthreads();
    }
    if (i < count) p.own_offsets[at] = pick(scan[thread], carry);
    carry = pick(carry, scan[kThreads - 1]);
    __syncthreads();
  }
}

// own_offsets becomes the caller's, put in order. By one block.
template <int kThreads>
void repair_offsets(const Params& p) {
  for (int64_t s = threadIdx.x; s <= p.segments; s += kThreads) {
    p.own_offsets[s] = clamped(index_at(p.offsets, s), 0, p.rows);
  }
  __syncthreads();
  scan_own_offsets<true, kThreads>(p);
}

template <bool kIds>
void repair(const Params& p) {
  let_next_kernel_begin();
  wait_for_kernel_ahead();
  bool bad = false;
  for (int block = threadIdx.x; block < p.check_blocks; block += blockDim.x) {
    bad |= p.disorder[block] != 0;
  }
  bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0) *p.use_own_offsets = kIds || bad;
  if (!bad) return;
  if constexpr (kIds) {
    // The first row whose id is s or more: the smallest, over ids from s on, of first rows.
    for (int64_t s = threadIdx.x; s <= p.segments; s += blockDim.x) p.own_offsets[s] = p.rows;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < p.rows; n += blockDim.x) {
      const int64_t id = clamped(index_at(p.ids, n), -1, p.segments);
      if (id >= 0) atomicMin(&p.own_offsets[id], n);
    }
    __syncthreads();
    scan_own_offsets<false, kRepairThreads>(p);
  } else {
    repair_offsets<kRepairThreads>(p);
    find_starts(p, make_segments(p, true), threadIdx.x, blockDim.x);
  }
}

inline void find_all_starts(const Params& p) {
  find_starts(p, make_segments(p), thread_number(), thread_count());
}

}  // namespace pullback::segment_cuda

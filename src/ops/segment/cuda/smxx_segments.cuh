// The segments as all kernels see them, out of index tensors that nobody vouches for and without
// the host hearing of it. The first kernel of a run looks whether they are in order; the next one
// repairs what is not. The rules are those of index.hpp: an offset or id that is smaller than one
// before it counts as the largest so far.
#pragma once

#include "device/dependent.cuh"
#include "device/warp.cuh"
#include "ops/segment/cuda/params.cuh"

namespace pullback::segment_cuda {

inline int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

inline int64_t index_at(const Indices& indices, int64_t i) {
  return indices.wide ? static_cast<const int64_t*>(indices.data)[i * indices.stride]
                      : static_cast<const int32_t*>(indices.data)[i * indices.stride];
}

// Segments 0 to S+1 of the list (params.cuh), over offsets of the caller or of our own.
struct Segments {
  Indices offsets;
  int64_t rows, count;

  int64_t end(int64_t j) const { return j <= count ? index_at(offsets, j) : rows; }
  int64_t begin(int64_t j) const { return j == 0 ? 0 : index_at(offsets, j - 1); }
  int64_t length(int64_t j) const { return end(j) - begin(j); }
};

inline Segments make_segments(const Params& p, bool own) {
  Segments segments{p.offsets, p.rows, p.segments};
  if (own) segments.offsets = {p.own_offsets, 1, 1};
  return segments;
}

// The start of the tile that begins with this item, in segment `j` of these rows, the first that
// ends at the item or behind it; and whether rows of the tile's first segment lie before it. Inside
// a segment tiles begin with multiples of `alignment`, a power of two, if these are inside, too.
inline TileStart start_within(const Segments& segments, int end_items, int64_t item, int64_t j,
                              int64_t begin, int64_t end, bool& inside, int alignment = 1) {
  begin = clamped(begin, 0, segments.rows);
  const int64_t row = clamped(item - j * end_items, begin, segments.rows);
  const bool begun = begin < row;
  const bool ended = begun && end == row;
  inside = begun && !ended;
  const int64_t aligned = row & -static_cast<int64_t>(alignment);
  return {j + ended, inside && aligned > begin ? aligned : row};
}
// Takes the rows of the tile's first segment that lie before it, too, where these are snap_rows at
// most.
inline void snap(const Params& p, int64_t begin, TileStart& start) {
  begin = clamped(begin, 0, p.rows);
  if (start.row - begin <= p.snap_rows) start.row = begin;
}

// Where the tiles that begin with some items of the list begin, and whether their first segments
// have rows before them. By a warp: 32 places at a time.
// Of offsets out of order the first tile still begins, and the last one ends, where it must.
template <int kCount>
void find_starts_at(const Segments& segments, int end_items, const int64_t (&item)[kCount],
                    TileStart (&start)[kCount], bool (&inside)[kCount], int alignment = 1) {
  const int lane = threadIdx.x % device::kWarpSize;
  int64_t low[kCount], high[kCount];
  bool searching = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    low[i] = 0;
    high[i] = segments.count + 2;
  }
  while (searching) {
    bool reached[kCount];
    int64_t step[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      step[i] = (high[i] - low[i] + device::kWarpSize - 1) / device::kWarpSize;
      const int64_t at = low[i] + lane * step[i] + step[i] - 1;
      reached[i] = at >= high[i] || segments.end(at) + at * end_items >= item[i];
    }
    searching = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t lanes = __ballot_sync(device::kAllLanes, reached[i]);
      if (low[i] >= high[i]) continue;
      if (lanes == 0) {
        low[i] = high[i];
        continue;
      }
      low[i] += (__ffs(static_cast<int>(lanes)) - 1) * step[i];
      high[i] = low[i] + step[i] - 1 < high[i] ? low[i] + step[i] - 1 : high[i];
      searching |= low[i] < high[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    inside[i] = false;
    if (item[i] <= 0) {
      start[i] = {0, 0};
    } else if (low[i] == segments.count + 2 ||
               item[i] >= segments.rows + (segments.count + 2) * end_items) {
      start[i] = {segments.count + 2, segments.rows};
    } else {
      start[i] = start_within(segments, end_items, item[i], low[i], segments.begin(low[i]),
                              segments.end(low[i]), inside[i], alignment);
    }
  }
}
// The start of one tile, snapped.
inline TileStart find_start(const Params& p, const Segments& segments, int64_t item) {
  TileStart start[1];
  bool inside[1];
  find_starts_at(segments, p.end_items, {item}, start, inside);
  if (inside[0]) snap(p, segments.begin(start[0].segment), start[0]);
  return start[0];
}

// By all warps of the grid, or of the block.
inline void find_starts(const Params& p, const Segments& segments, int64_t thread,
                        int64_t threads) {
  const bool first_lane = threadIdx.x % device::kWarpSize == 0;
  for (int64_t tile = thread / device::kWarpSize; tile <= p.tiles;
       tile += threads / device::kWarpSize) {
    const TileStart start = find_start(p, segments, tile * p.tile_items);
    if (first_lane) p.starts[tile] = start;
  }
  if (thread == 0) p.starts[p.tiles + 1] = {segments.begin(1), segments.end(segments.count)};
}

// --- Repair, by one block ---

// own_offsets[i] becomes the largest (forward) of elements 0 to i, or the smallest of i to S. Every
// kernel has it and hardly ever runs it: loops keep it short.
inline void scan_own_offsets(const Params& p, bool forward) {
  __shared__ int64_t totals[32];
  const int thread = threadIdx.x, threads = blockDim.x;
  const int lane = thread % device::kWarpSize, warp = thread / device::kWarpSize;
  const int64_t count = p.segments + 1;
  const int64_t neutral = forward ? 0 : p.rows;
  int64_t carry = neutral;
  const auto pick = [&](int64_t a, int64_t b) { return forward == (a < b) ? b : a; };
  for (int64_t base = 0; base < count; base += threads) {
    const int64_t i = base + thread;
    const int64_t at = forward ? i : count - 1 - i;
    int64_t value = i < count ? p.own_offsets[at] : neutral;
#pragma unroll 1
    for (int step = 1; step < device::kWarpSize; step *= 2) {
      const int64_t before = __shfl_up_sync(device::kAllLanes, value, step);
      if (lane >= step) value = pick(value, before);
    }
    if (lane == device::kWarpSize - 1) totals[warp] = value;
    __syncthreads();
    value = pick(value, carry);
#pragma unroll 1
    for (int other = 0; other < threads / device::kWarpSize; ++other) {
      if (other < warp) value = pick(value, totals[other]);
      carry = pick(carry, totals[other]);
    }
    if (i < count) p.own_offsets[at] = value;
    __syncthreads();
  }
}

// own_offsets become the caller's, put in order, and the starts of tiles what follows from them.
__noinline__ inline void repair(const Params& p) {
  const int64_t thread = threadIdx.x, threads = blockDim.x;
  if (p.ids.data != nullptr) {
    // The first row whose id is s or more: the smallest, over ids from s on, of first rows.
    for (int64_t s = thread; s <= p.segments; s += threads) p.own_offsets[s] = p.rows;
    __syncthreads();
    for (int64_t n = thread; n < p.rows; n += threads) {
      const int64_t id = clamped(index_at(p.ids, n), -1, p.segments);
      if (id >= 0) atomicMin(&p.own_offsets[id], n);
    }
  } else {
    for (int64_t s = thread; s <= p.segments; s += threads) {
      p.own_offsets[s] = clamped(index_at(p.offsets, s), 0, p.rows);
    }
  }
  __syncthreads();
  scan_own_offsets(p, p.ids.data == nullptr);
  find_starts(p, make_segments(p, true), thread, threads);
}

// What this thread has seen of whether the kernel ahead has met disorder.
inline bool disorder_ahead(const Params& p) {
  bool bad = false;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.disorder_count; i += blockDim.x) bad |= p.disorder[i] != 0;
  return bad;
}

// Whether any thread has seen some; if so, all is repaired when this returns. The first block sees
// to it, on which the others may wait, as it is on the device before them.
inline bool repaired(const Params& p, bool bad) {
  bad = __syncthreads_or(bad) != 0;
  const bool first = blockIdx.x == 0 && blockIdx.y == 0;
  if (first && threadIdx.x == 0) *p.use_own_offsets = bad || p.ids.data != nullptr;
  if (!bad) return false;
  if (first) {
    repair(p);
    __syncthreads();
    __threadfence();
    if (threadIdx.x == 0) atomicExch(p.repaired, 1);
  } else {
    if (threadIdx.x == 0) {
      while (atomicAdd(p.repaired, 0) == 0) {
      }
    }
    __syncthreads();
    __threadfence();
  }
  return true;
}

// --- Counting blocks ---

// By the first block of a run's first kernel, for those behind it.
inline void clear_counts(const Params& p) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || threadIdx.x != 0) return;
  *p.repaired = 0;
  *p.arrivals = 0;
}
// The same where the kernel itself counts. The workspace comes as it is, so blocks wait at a gate
// until the count has been cleared. It opens by a key that is not there by chance; the last block
// shuts it.
inline void open_gate(const Params& p) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || threadIdx.x != 0) return;
  clear_counts(p);
  __threadfence();
  atomicExch(p.gate, p.key);
}

struct Arrival {
  bool last, disorder;  // the latter of all blocks, and known to the last one alone
};
inline Arrival arrive(const Params& p, bool bad) {
  constexpr int kCountBits = 40;
  bad = __syncthreads_or(bad) != 0;
  Arrival result = {false, bad};
  if (threadIdx.x == 0) {
    while (atomicAdd(p.gate, 0ull) != p.key) {
    }
    __threadfence();
    const uint64_t one = 1, blocks = one * gridDim.x * gridDim.y;
    const uint64_t before = atomicAdd(p.arrivals, one + (bad ? one << kCountBits : 0));
    __threadfence();
    result.last = (before & ((one << kCountBits) - 1)) + 1 == blocks;
    result.disorder |= before >> kCountBits != 0;
    if (result.last) atomicExch(p.gate, ~p.key);
  }
  result.last = __syncthreads_or(result.last) != 0;
  result.disorder = __syncthreads_or(result.disorder) != 0;
  return result;
}

// For a kernel that finds out itself whether offsets are in order: whether this block has to do all
// again, over repaired ones.
inline bool has_to_repeat(const Params& p, bool bad, Segments& segments) {
  if (p.proof != Proof::wanted) return false;
  const Arrival arrival = arrive(p, bad);
  if (!arrival.last || !arrival.disorder) return false;
  repair(p);
  __syncthreads();
  segments = make_segments(p, true);
  return true;
}

// What every kernel but a run's first begins with.
inline Segments make_segments(const Params& p) {
  device::wait_for_previous_kernel();
  const bool own = p.proof == Proof::checked
                       ? repaired(p, disorder_ahead(p)) || p.ids.data != nullptr
                       : *p.use_own_offsets != 0;
  return make_segments(p, own);
}

// What a reduction that streams begins with.
inline Segments begin_reduction(const Params& p) {
  if (p.proof == Proof::wanted) {
    device::allow_next_kernel();
    clear_counts(p);
    return make_segments(p, false);
  }
  const Segments segments = make_segments(p);
  device::allow_next_kernel();
  return segments;
}
// What a map begins with, which may be a run's first.
inline Segments begin_map(const Params& p) {
  if (p.proof != Proof::wanted) return make_segments(p);
  open_gate(p);
  return make_segments(p, false);
}

}  // namespace pullback::segment_cuda

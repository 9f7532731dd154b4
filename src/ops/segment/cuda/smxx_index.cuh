// The first kernels of a run: they look whether offsets or ids are in order (smxx_segments.cuh),
// and find the starts of tiles.
#pragma once

#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/tuning.hpp"

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

// The tiles that begin with an item of a segment of the list, which has the rows from `begin` to
// `end`: those from `tile` to `stop`.
struct TilesWithin {
  int64_t segment, begin, end;
  int64_t tile, stop;

  TilesWithin(const Params& p, const Segments& segments, double tiles_per_item, int64_t j)
      : segment(j), begin(segments.begin(j)), end(segments.end(j)) {
    // The first tile whose first item comes after this one. The quotient is exact but for its last
    // bit.
    const auto tile_after = [&](int64_t item) {
      auto before = static_cast<int64_t>(static_cast<double>(item) * tiles_per_item);
      const int64_t rest = item - before * p.tile_items;
      before += rest < 0 ? -1 : rest >= p.tile_items ? 1 : 0;
      return clamped(before + 1, 0, p.tiles + 1);
    };
    tile = j == 0 ? 0 : tile_after(begin + (j - 1) * p.end_items);
    stop = j == p.segments + 1 ? p.tiles + 1 : tile_after(end + j * p.end_items);
  }
  void write_start(const Params& p, const Segments& segments, int64_t at) const {
    const int64_t item = at * p.tile_items;
    bool inside = false;
    TileStart start = {p.segments + 2, p.rows};
    if (item <= p.rows + (p.segments + 1) * p.end_items) {
      start = start_within(segments, p.end_items, item, segment, begin, end, inside);
    }
    if (inside) snap(p, begin, start);
    p.starts[at] = start;
  }
};

// Whether offsets are out of order. Starts of tiles come from the segments that have them, each of
// which is looked at anyway: a search would be several reads, one behind the other. Where there is
// disorder they are of no use, as repair() finds them again, but there has to be something to read.
inline bool check_with_starts(const Params& p, const Segments& segments) {
  constexpr int kSegments = kThreads * kCheckAtOnce;  // of a block
  constexpr int kAlone = 4;                           // tiles of a thread
  __shared__ uint16_t longer[kSegments];              // segments with more are the block's
  __shared__ int longer_count;
  const int lane = threadIdx.x % device::kWarpSize;
  const int64_t count = p.segments + 2;
  const double tiles_per_item = 1 / static_cast<double>(p.tile_items);
  if (thread_number() == 0) {
    p.starts[p.tiles + 1] = {segments.begin(1), segments.end(p.segments)};
  }
  bool bad = false;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kSegments; base < count;
       base += static_cast<int64_t>(gridDim.x) * kSegments) {
    if (threadIdx.x == 0) longer_count = 0;
    __syncthreads();
    // The warp's, 32 by 32.
    const int64_t first = base + (threadIdx.x - lane) * kCheckAtOnce;
    int64_t end[kCheckAtOnce], reached = first < count ? segments.begin(first) : p.rows;
#pragma unroll
    for (int i = 0; i < kCheckAtOnce; ++i) {
      const int64_t j = first + i * device::kWarpSize + lane;
      end[i] = j < count ? segments.end(j) : p.rows;
    }
#pragma unroll
    for (int i = 0; i < kCheckAtOnce; ++i) {
      int64_t begin = __shfl_up_sync(device::kAllLanes, end[i], 1);
      if (lane == 0) begin = reached;
      reached = __shfl_sync(device::kAllLanes, end[i], device::kWarpSize - 1);
      bad |= begin < 0 || end[i] < begin || end[i] > p.rows;
    }
    if (__any_sync(device::kAllLanes, bad) == 0) {
#pragma unroll 1
      for (int i = 0; i < kCheckAtOnce; ++i) {
        const int64_t j = first + i * device::kWarpSize + lane;
        if (j >= count) break;
        const TilesWithin within(p, segments, tiles_per_item, j);  // what it reads is near now
        if (within.stop - within.tile > kAlone) {
          longer[atomicAdd(&longer_count, 1)] = static_cast<uint16_t>(j - base);
          continue;
        }
#pragma unroll 1
        for (int64_t tile = within.tile; tile < within.stop; ++tile) {
          within.write_start(p, segments, tile);
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < longer_count; ++i) {
      const TilesWithin within(p, segments, tiles_per_item, base + longer[i]);
#pragma unroll 1
      for (int64_t tile = within.tile + threadIdx.x; tile < within.stop; tile += kThreads) {
        within.write_start(p, segments, tile);
      }
    }
    __syncthreads();
  }
  if (__syncthreads_or(bad) != 0) {
    for (int64_t tile = threadIdx.x; tile <= p.tiles; tile += kThreads) p.starts[tile] = {0, 0};
  }
  return bad;
}

// The same where a search is as fast: of few segments, or so many that looking at them takes
// longer.
inline bool check_others(const Params& p, const Segments& segments) {
  constexpr int kAtOnce = kSearchAtOnce;
  bool bad = false;
  for (int64_t s = thread_number(); s <= p.segments; s += kAtOnce * thread_count()) {
    int64_t offset[kAtOnce], before[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = s + i * thread_count();
      offset[i] = before[i] = 0;
      if (at > p.segments) continue;
      offset[i] = segments.end(at);
      before[i] = segments.begin(at);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) bad |= offset[i] < before[i] || offset[i] > p.rows;
  }
  find_starts(p, segments, thread_number(), thread_count());
  return bad;
}

inline void check_offsets(const Params& p) {
  device::allow_next_kernel();
  const Segments segments = make_segments(p, false);
  const bool bad = starts_by_segments(p.segments, p.tiles) ? check_with_starts(p, segments)
                                                           : check_others(p, segments);
  end_check(p, bad);
}

// --- Offsets of ids: offset(s) is the number of ids below s ---

// So many segments without rows, from a multiple of that on, are a stretch, which a warp fills; or
// one thread would, where ids leave out many.
inline constexpr int64_t kStretch = 1024;

// The first row whose id is `segment` or more, of ids in order. By a warp: 32 places at a time.
inline int64_t first_row_from(const Params& p, int64_t segment) {
  const int lane = threadIdx.x % device::kWarpSize;
  int64_t low = 0, high = p.rows;
  while (low < high) {
    const int64_t step = (high - low + device::kWarpSize - 1) / device::kWarpSize;
    const int64_t at = low + lane * step + step - 1;
    const bool reached = at >= high || index_at(p.ids, at) >= segment;
    const uint32_t lanes = __ballot_sync(device::kAllLanes, reached);
    if (lanes == 0) return high;
    low += (__ffs(static_cast<int>(lanes)) - 1) * step;
    high = low + step - 1 < high ? low + step - 1 : high;
  }
  return low;
}

inline void fill_stretches(const Params& p) {
  const int lane = threadIdx.x % device::kWarpSize;
  const int64_t step = thread_count() / device::kWarpSize * kStretch;
  for (int64_t s = thread_number() / device::kWarpSize * kStretch; s + kStretch <= p.segments;
       s += step) {
    const int64_t row = first_row_from(p, s);
    if (row != first_row_from(p, s + kStretch)) continue;
    for (int64_t i = lane; i < kStretch; i += device::kWarpSize) p.own_offsets[s + i] = row;
  }
}

// Offsets from `first` to `last` become `row`. By a warp, together a lane's after the other's.
inline void fill_offsets(const Params& p, int64_t first, int64_t last, int64_t row) {
  uint32_t lanes = __ballot_sync(device::kAllLanes, first <= last);
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    const int64_t from = __shfl_sync(device::kAllLanes, first, lane);
    const int64_t to = __shfl_sync(device::kAllLanes, last, lane);
    const int64_t value = __shfl_sync(device::kAllLanes, row, lane);
    for (int64_t s = from + threadIdx.x % device::kWarpSize; s <= to; s += device::kWarpSize) {
      p.own_offsets[s] = value;
    }
  }
}

// The same, but of whole stretches. Mostly there are few for each lane, which it fills alone.
inline void fill_beside_stretches(const Params& p, int64_t first, int64_t last, int64_t row) {
  constexpr int kAlone = 8;
  if (__all_sync(device::kAllLanes, last - first < kAlone)) {
    for (int64_t s = first; s <= last; ++s) p.own_offsets[s] = row;
    return;
  }
  const int64_t begin = (first + kStretch - 1) / kStretch * kStretch;
  const int64_t stop = last / kStretch * kStretch;
  const bool has_stretch = stop > begin;
  fill_offsets(p, first, has_stretch ? begin - 1 : last, row);
  fill_offsets(p, has_stretch ? stop : last + 1, last, row);
}

inline void offsets_of_ids(const Params& p) {
  device::allow_next_kernel();
  constexpr int kRows = 4;  // of a thread, one after the other
  // As the row before the first has a segment before all, and the one behind the last the last one.
  const auto id_at = [&](int64_t n) -> int64_t {
    if (n < 0) return -1;
    return n < p.rows ? clamped(index_at(p.ids, n), -1, p.segments) : p.segments;
  };
  bool bad = false;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x * kRows; base <= p.rows;
       base += kRows * thread_count()) {
    const int64_t first = base + threadIdx.x * kRows;
    int64_t id[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) id[i] = id_at(first + i);
    int64_t before = id_at(first - 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool exists = first + i <= p.rows;
      bad |= exists && id[i] < before;
      // Segments above the id before, up to this one, begin here.
      fill_beside_stretches(p, before + 1, exists ? id[i] : before, first + i);
      before = id[i];
    }
  }
  fill_stretches(p);
  end_check(p, bad);
}

inline void find_all_starts(const Params& p) {
  find_starts(p, make_segments(p), thread_number(), thread_count());
}

}  // namespace pullback::segment_cuda

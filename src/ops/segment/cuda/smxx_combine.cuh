// Puts together the segments that reach over several tiles, from the tiles' slots, in the order of
// the tiles: the result does not depend on who does it.
//
// Of rows with several columns, the block that is the last to leave its slot for a segment does it,
// once for each group of tiles, and the last one of these for all groups. Of x of one column,
// another launch does it, a block for some tiles: a segment of few slots is the work of one thread;
// for more, the block's threads take equal runs of slots, and then their results are put together.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// The slots of a segment: the tail of tile `first`, all of the tiles between, the head of `last`.
struct SlotRun {
  int64_t segment = 0;
  int first = 0, last = -1;
  int count() const { return last - first + 1; }
};

template <class Op>
struct PlacedState {
  typename Op::State state;
  int64_t row;  // places count from here

  void append(const PlacedState& b) {
    if constexpr (Op::kPlaces) {
      if (Op::gives_way(state, b.state)) *this = b;
    } else {
      Op::append(state, b.state);
    }
  }
};

template <class Op>
int64_t places_of(const Params& p, int64_t tile) {
  return Op::kPlaces ? tile_origin(p, p.starts[tile]) : 0;
}

// --- Rows of several columns ---

// The segment that reaches into the tile from before (0), or out of it (1), if there is one. One
// that reaches through is found by 0.
inline SlotRun slots_through(const Params& p, const Segments& segments, const Tile& tile,
                             int which) {
  const int64_t j = which == 0 ? tile.first : tile.stop;
  if (j < 1 || j > p.segments) return {};
  const int64_t begin = segments.begin(j), end = segments.end(j);
  const bool reaches = which == 0
                           ? begin < tile.row && end > tile.row
                           : begin >= tile.row && begin < tile.row_stop && end > tile.row_stop;
  if (!reaches) return {};
  return {j, static_cast<int>(tile_of_row(p, j, begin)),
          static_cast<int>(tile_of_row(p, j, end - 1))};
}

// Whether this block is the last of `count` to say that its slots are written.
inline bool last_to_arrive(const Params& p, int which, int tile, int count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrivals = p.arrivals + (column_block(p) * kArrivals + which) * p.tiles + tile;
    last = atomicAdd(arrivals, 1) + 1 == count;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <class Op, int kVector>
struct SlotSums {
  PlacedState<Op> sums[kThreads][kVector];

  // What the slots of a run in tiles `first` to `last` come to, in the lanes of walker 0: all
  // slots, or, with a step of kSlotGroup, those that stand for their groups.
  void gather(const Params& p, const SlotRun& run, int first, int last, int step, int64_t column,
              bool active, PlacedState<Op> (&sum)[kVector]) {
    constexpr int kWords = sizeof(typename Op::State) / 4;
    constexpr int kAtOnce = kVector * kWords >= 16 ? 1 : 16 / (kVector * kWords);
    const int lanes = 1 << p.lane_bits, walkers = kThreads >> p.lane_bits;
    const int walker = static_cast<int>(threadIdx.x) >> p.lane_bits;
    const int count = last / step - first / step + 1;
    int each = (count + walkers - 1) / walkers;
    if (each < kLeastSlots) each = kLeastSlots;
    const int from = walker * each, stop = from + each < count ? from + each : count;
    const auto load = [&](int k, PlacedState<Op>(&to)[kVector]) {
      const int tile = k == 0 ? first : (first & -step) + k * step;
      const typename Op::State* slot = slot_of<Op>(p, tile, tile < run.last) + column;
      const int64_t row = places_of<Op>(p, tile);
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[i] = {slot[i], row};
    };
    if (active && from < stop) {
      load(from, sum);
#pragma unroll 1
      for (int base = from + 1; base < stop; base += kAtOnce) {
        PlacedState<Op> next[kAtOnce][kVector];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (base + k < stop) load(base + k, next[k]);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (base + k >= stop) continue;
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[i].append(next[k][i]);
        }
      }
    }
    if (count <= each) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[threadIdx.x][i] = sum[i];
    __syncthreads();
    if (walker != 0) return;
#pragma unroll 1
    for (int other = 1; other * each < count; ++other) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i].append(sums[threadIdx.x + other * lanes][i]);
    }
  }

  // By a block that has written its slot of the run.
  template <class Out>
  void arrive(const Params& p, const Segments& segments, const SlotRun& run, int tile,
              int64_t column, bool active) {
    if (run.count() <= 1) return;
    const int group = tile & -kSlotGroup;
    const int first = run.first > group ? run.first : group;
    const int group_last = group + kSlotGroup - 1;
    const int last = run.last < group_last ? run.last : group_last;
    if (!last_to_arrive(p, first < run.last, first, last - first + 1)) return;
    const bool writes = active && threadIdx.x >> p.lane_bits == 0;
    PlacedState<Op> sum[kVector];
    gather(p, run, first, last, 1, column, active, sum);
    if (first != run.first || last != run.last) {
      if (writes) {
        const int64_t row = places_of<Op>(p, first);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if constexpr (Op::kPlaces) sum[i].state.place += static_cast<int>(sum[i].row - row);
          slot_of<Op>(p, first, first < run.last)[column + i] = sum[i].state;
        }
      }
      const int groups = run.last / kSlotGroup - run.first / kSlotGroup + 1;
      if (!last_to_arrive(p, kArrivals - 1, run.first, groups)) return;
      gather(p, run, run.first, run.last, kSlotGroup, column, active, sum);
    }
    if (!writes) return;
    // From shared memory, as a loop over registers would have to be unrolled.
    PlacedState<Op>* const own = sums[threadIdx.x];
#pragma unroll
    for (int i = 0; i < kVector; ++i) own[i] = sum[i];
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) {
      const typename Op::State state[1] = {own[i].state};
      finish<Op, Out>(p, segments, run.segment, column + i, state, own[i].row);
    }
  }
};

// --- One column ---

// The segment that begins in this tile and ends in another, if there is one.
inline SlotRun slots_from(const Params& p, const Segments& segments, int tile) {
  const TileStart start = p.starts[tile], stop = p.starts[tile + 1];
  const int64_t j = stop.segment;
  if (j < 1 || j > p.segments) return {};
  const int64_t begin = segments.begin(j), end = segments.end(j);
  if (begin < start.row || begin >= stop.row || end <= stop.row) return {};
  return {j, tile, static_cast<int>(tile_of_row(p, j, end - 1))};
}

template <class Op>
PlacedState<Op> append_slots(const Params& p, const SlotRun& run, int from, int stop) {
  constexpr int kAtOnce = 8;
  const auto load = [&](int tile) {
    return PlacedState<Op>{*slot_of<Op>(p, tile, tile < run.last), places_of<Op>(p, tile)};
  };
  PlacedState<Op> sum = load(from);
  for (int base = from + 1; base < stop; base += kAtOnce) {
    PlacedState<Op> next[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i < stop) next[i] = load(base + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i < stop) sum.append(next[i]);
    }
  }
  return sum;
}

// By a block of kBlock threads, for as many tiles from `tile` on.
template <class Op, class Out, int kBlock>
struct ColumnCombiner {
  PlacedState<Op> sums[kBlock];
  SlotRun runs[kBlock];

  void combine(const Params& p, const Segments& segments, int tile) {
    const int thread = threadIdx.x;
    const auto done = [&](const SlotRun& run, const PlacedState<Op>& sum) {
      const typename Op::State state[1] = {sum.state};
      finish<Op, Out>(p, segments, run.segment, 0, state, sum.row);
    };
    const SlotRun own =
        tile + thread < p.tiles ? slots_from(p, segments, tile + thread) : SlotRun{};
    const bool is_long = own.count() > kCombineSequential;
    runs[thread] = own;
    if (own.count() > 0 && !is_long) done(own, append_slots<Op>(p, own, own.first, own.last + 1));
    if (!__syncthreads_or(is_long)) return;
    for (int i = 0; i < kBlock; ++i) {
      const SlotRun run = runs[i];
      if (run.count() <= kCombineSequential) continue;
      const int each = (run.count() + kBlock - 1) / kBlock;
      const int from = run.first + thread * each;
      const int stop = from + each <= run.last ? from + each : run.last + 1;
      if (from < stop) sums[thread] = append_slots<Op>(p, run, from, stop);
      __syncthreads();
      if (thread == 0) {
        PlacedState<Op> sum = sums[0];
        for (int other = 1; run.first + other * each <= run.last; ++other) sum.append(sums[other]);
        done(run, sum);
      }
      __syncthreads();
    }
  }
};

template <class Op, class Out>
void combine_column(const Params& p) {
  __shared__ ColumnCombiner<Op, Out, kThreads> combiner;
  combiner.combine(p, make_segments(p), static_cast<int>(blockIdx.x) * kThreads);
}

}  // namespace pullback::segment_cuda

// Puts together the segments that reach over several tiles, from the tiles' slots, in the order of
// the tiles. A segment of few slots is the work of one thread per column; for more, the block's
// threads take equal runs of slots, and then their results are put together in pairs.
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

// The segment that begins in this tile and ends in another, if there is one.
inline SlotRun slots_from(const Params& p, const Segments& segments, int tile) {
  const TileStart start = p.starts[tile], stop = p.starts[tile + 1];
  const int64_t j = stop.segment;
  if (j < 1 || j > p.segments) return {};
  const int64_t begin = segments.begin(j), end = segments.end(j);
  if (begin < start.row || begin >= stop.row || end <= stop.row) return {};
  return {j, tile, static_cast<int>(tile_of_row(p, j, end - 1))};
}

template <class Op, int kAtOnce>
PlacedState<Op> append_slots(const Params& p, const SlotRun& run, int from, int stop,
                             int64_t column) {
  const auto load = [&](int tile) {
    return PlacedState<Op>{slot_of<Op>(p, tile, tile < run.last)[column], places_of<Op>(p, tile)};
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

// A block of kBlock threads, for kColumns columns and the segments that begin in some tiles.
template <class Op, class Out, int kBlock, int kColumns>
struct Combiner {
  static constexpr int kParts = kBlock / kColumns;
  static constexpr int kAtOnce = kBlock < 256 ? 4 : 8;  // small blocks have few registers
  static constexpr int kTiles = combine_tiles(kColumns, kBlock);
  PlacedState<Op> sums[kParts][kColumns];
  SlotRun runs[kTiles];
  int long_runs[kTiles];  // which of them take the whole block, in no order
  int long_count;

  void combine(const Params& p, const Segments& segments, int first_tile, int64_t columns_block) {
    const int thread = threadIdx.x, part = thread / kColumns, lane = thread % kColumns;
    const int64_t column = columns_block * kColumns + lane;
    const bool active = column < p.columns;
    const auto done = [&](const SlotRun& run, const PlacedState<Op>& sum) {
      const typename Op::State state[1] = {sum.state};
      finish<Op, Out, true>(p, segments, run.segment, column, state, sum.row);
    };

    if (thread == 0) long_count = 0;
    __syncthreads();
    for (int i = thread; i < kTiles; i += kBlock) {
      runs[i] = first_tile + i < p.tiles ? slots_from(p, segments, first_tile + i) : SlotRun{};
      if (runs[i].count() > kCombineSequential) long_runs[atomicAdd(&long_count, 1)] = i;
    }
    __syncthreads();
    // First the short ones, kParts at a time, then each long one by all parts, in one loop: what it
    // does is long, and compiled with every reduction.
    constexpr int kShortSteps = (kTiles + kParts - 1) / kParts;
    for (int step = 0; step < kShortSteps + long_count; ++step) {
      const bool is_long = step >= kShortSteps;
      const int place = step * kParts + part;
      SlotRun run;
      if (is_long) {
        run = runs[long_runs[step - kShortSteps]];
      } else if (place < kTiles && runs[place].count() <= kCombineSequential) {
        run = runs[place];
      }
      const int each = is_long ? (run.count() + kParts - 1) / kParts : run.count();
      const int from = run.first + (is_long ? part * each : 0);
      const int stop = from + each <= run.last ? from + each : run.last + 1;
      PlacedState<Op> sum;
      if (active && from < stop) sum = append_slots<Op, kAtOnce>(p, run, from, stop, column);
      if (is_long) {
        const int parts = (run.count() + each - 1) / each;
        if (active && part < parts) sums[part][lane] = sum;
        for (int apart = 1; apart < parts; apart *= 2) {
          __syncthreads();
          if (active && part % (2 * apart) == 0 && part + apart < parts) {
            sums[part][lane].append(sums[part + apart][lane]);
          }
        }
        if (active && part == 0) sum = sums[0][lane];
        __syncthreads();
      }
      if (active && from < stop && (!is_long || part == 0)) done(run, sum);
    }
  }
};

template <class Op, class Out, int kColumns>
void combine(const Params& p) {
  using Block = Combiner<Op, Out, kThreads, kColumns>;
  __shared__ Block block;
  block.combine(p, make_segments(p), static_cast<int>(blockIdx.x) * Block::kTiles, column_block(p));
}

}  // namespace pullback::segment_cuda

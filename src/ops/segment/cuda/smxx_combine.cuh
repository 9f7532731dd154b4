// Puts together the segments that reach over several tiles, from the tiles' slots, in the order of
// the tiles. A segment of few slots is the work of one thread per column; for more, several threads
// take equal runs of slots, and then their results are put together in pairs.
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
  const int64_t begin = segments.begin(j), end = clamped(segments.end(j), 0, p.rows);
  if (begin < start.row || begin >= stop.row || end <= stop.row) return {};
  return {j, tile, static_cast<int>(clamped(tile_of_row(p, j, end - 1), 0, p.tiles - 1))};
}

// Slots whose reads a thread has in flight together.
inline constexpr int kCombineAtOnce = 8;

// What comes after the reduction waits for its instructions, too: there should be few.
template <class Op>
PlacedState<Op> append_slots(const Params& p, const SlotRun& run, int from, int stop,
                             int64_t column) {
  using Placed = PlacedState<Op>;
  constexpr int kAtOnce = kCombineAtOnce;
  const auto* tail = slot_of<Op>(p, from, 1) + column;
  const int64_t step = 2 * p.slot_columns;
  const auto at = [&](const typename Op::State* slot, int i) {
    return Placed{*slot, places_of<Op>(p, from + i)};
  };
  // One of the slots is a head.
  const bool has_head = stop > run.last;
  const int tails = stop - from - has_head;
  Placed head, sum, next[kAtOnce];
  if (has_head) head = at(slot_of<Op>(p, run.last, 0) + column, tails);
  if (tails == 0) return head;
  sum = at(tail, 0);
#pragma unroll 1
  for (int base = 1; base < tails; base += kAtOnce) {
    tail += step;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i < tails) next[i] = at(tail + i * step, base + i);
    }
    tail += (kAtOnce - 1) * step;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i < tails) sum.append(next[i]);
    }
  }
  if (has_head) sum.append(head);
  return sum;
}

// A block, for kColumns columns and the segments that begin in some tiles. A part is a thread for
// each column.
template <class Op, class Out, int kColumns>
struct Combiner {
  static constexpr int kParts = kThreads / kColumns;
  static constexpr int kTiles = combine_tiles(kColumns);
  // How many parts share a run, by its kind: one, some or all. Each has as many slots as it reads
  // in two turns, or all take part. Powers of two.
  static constexpr int kKinds = 3, kSomeBits = 2, kSlots = 2 * kCombineAtOnce;
  static constexpr int bits_of(int parts) { return parts == 1 ? 0 : 1 + bits_of(parts / 2); }
  static constexpr int part_bits(int kind) {
    constexpr int kAllBits = bits_of(kParts);
    return kind == 0 ? 0 : kind == 1 ? kSomeBits : kAllBits;
  }

  PlacedState<Op> sums[kParts][kColumns];
  SlotRun runs[kTiles];
  uint16_t listed[kKinds][kTiles];  // places of runs, in no order
  int counts[kKinds];

  void find_runs(const Params& p, const Segments& segments, int64_t first_tile) {
    static_assert(kTiles <= kThreads);
    const int thread = threadIdx.x;
    if (thread < kKinds) counts[thread] = 0;
    __syncthreads();
    if (thread < kTiles && first_tile + thread < p.tiles) {
      const SlotRun run = slots_from(p, segments, static_cast<int>(first_tile) + thread);
      const int slots = run.count();
      if (slots > 0) {
        runs[thread] = run;
        const int kind = (slots > kSlots) + (slots > kSlots << kSomeBits);
        listed[kind][atomicAdd(&counts[kind], 1)] = static_cast<uint16_t>(thread);
      }
    }
    __syncthreads();
  }
  bool has_runs() const { return (counts[0] | counts[1] | counts[2]) != 0; }

  // Of as many parts as `parts`, one after the other, whose first ones have something: `sum` of the
  // first becomes all of it. has(apart): whether the part so many further on has something.
  template <class Has>
  void meet(PlacedState<Op>& sum, bool mine, int part, int lane, int parts, const Has& has) {
    const int rank = part & (parts - 1);
    if (mine) sums[part][lane] = sum;
    for (int apart = 1; apart < parts; apart *= 2) {
      __syncthreads();
      if (mine && (rank & (2 * apart - 1)) == 0 && has(apart)) {
        sums[part][lane].append(sums[part + apart][lane]);
      }
    }
    if (mine && rank == 0) sum = sums[part][lane];
    __syncthreads();
  }

  // `stale`: the runs are of no use. Their slots may be read all the same, while that is being
  // found out.
  void combine(const Params& p, const Segments& segments, int64_t columns_block, bool stale) {
    const int thread = threadIdx.x, part = thread / kColumns, lane = thread % kColumns;
    const int64_t column = columns_block * kColumns + lane;
    const bool active = column < p.columns;
#pragma unroll 1
    for (int kind = 0; kind < kKinds; ++kind) {
      const int bits = part_bits(kind), parts = 1 << bits, rank = part & (parts - 1);
#pragma unroll 1
      for (int next = 0; next < counts[kind]; next += kParts >> bits) {
        const int number = next + (part >> bits);
        SlotRun run;
        if (number < counts[kind]) run = runs[listed[kind][number]];
        const int each = (run.count() + parts - 1) >> bits, from = run.first + rank * each;
        const int stop = from + each <= run.last ? from + each : run.last + 1;
        const bool mine = active && from < stop;
        PlacedState<Op> sum;
        if (mine) sum = append_slots<Op>(p, run, from, stop, column);
        if (bits > 0) {
          meet(sum, mine, part, lane, parts,
               [&](int apart) { return from + apart * each <= run.last; });
        }
        if (mine && rank == 0 && !stale) {
          const typename Op::State state[1] = {sum.state};
          finish<Op, Out, true>(p, segments, run.segment, column, state, sum.row);
        }
      }
    }
  }
};

// Looks for runs while the reduction goes on, whose blocks let this kernel begin once they have
// their tiles. Where the first of them had to repair offsets, that was in vain, and the first block
// of each column block does all; nothing else waits for the answer.
template <class Op, class Out, int kColumns>
void combine(const Params& p) {
  using Block = Combiner<Op, Out, kColumns>;
  __shared__ Block block;
  bool own = p.ids.data != nullptr, again = false;
  int64_t tile = static_cast<int64_t>(blockIdx.x) * Block::kTiles;
#pragma unroll 1
  do {
    const Segments segments = make_segments(p, own);
    block.find_runs(p, segments, tile);
    bool stale = false;
    if (!again) {
      if (blockIdx.x != 0 && !block.has_runs()) return;
      device::wait_for_previous_kernel();
      stale = *p.repaired != 0;
    }
    block.combine(p, segments, column_block(p), stale);
    if (again) tile += Block::kTiles;
    if (stale && blockIdx.x == 0) {
      __threadfence();  // nothing that was read before is kept
      own = again = true;
    }
    __syncthreads();
  } while (again && tile < p.tiles);
}

}  // namespace pullback::segment_cuda

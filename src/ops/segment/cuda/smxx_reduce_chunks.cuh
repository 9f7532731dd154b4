// Forward for x of one column, contiguous, by chunks (smxx_chunks.cuh). A lane goes along its rows
// of a chunk with a running state, which it leaves in shared memory at each row that is the last of
// a segment, to begin anew; a segmented scan over the lanes adds what came before. Then the lanes
// turn to the segments that end, whose outputs lie side by side. Where none ends each lane keeps a
// state over its pieces of the rows, however many chunks they fill; the lanes' states meet in the
// chunk where the segment ends.
#pragma once

#include "ops/segment/cuda/smxx_chunk_forms.cuh"
#include "ops/segment/cuda/smxx_packed_outputs.cuh"

namespace pullback::segment_cuda {

// Adds kRows rows of a chunk from the lane's `first` on, all of one segment.
template <class Op, int kRows, class T>
void add_piece(typename Op::State& state, const Chunk<T>& rows, int first, int place) {
  if constexpr (Op::kPlaces) {
    if (state.place < 0) state = begin_run<Op>(place);
  }
  typename Op::State one[1] = {state};
  if (add_rows<Op, decltype(rows.real(0)), kRows>(
          one, [&](int, int k) { return rows.real(first + k); }, place)) {
    state = one[0];
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) Op::add(state, rows.real(first + i), place + i);
}

// Adds a chunk's rows, all of one segment, to what each lane has of it.
template <class Op, class T>
void add_chunk(typename Op::State& state, const Chunk<T>& rows, int at) {
  constexpr int kRows = Chunk<T>::kLaneRows;
  if constexpr (kHasKeys<Op, T>) {
    const KeyForm<Op, T> form{at, 0};
    auto kept = form.begin(rows, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) form.add(kept, rows, i);
    Op::append(state, form.state(kept, lane_of_warp()));
  } else if constexpr (kAims<Op> && sizeof(T) == 2) {
    using Form = PowerForm<Op, T>;
    const Form form(state.shift);
    auto kept = form.begin(rows, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) form.add(kept, rows, i);
    if (form.is_small(kept)) {
      state.sum += kept;
      return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) Op::add(state, rows.real(i), at);
  } else {
#pragma unroll
    for (int k = 0; k < kRows; k += Chunk<T>::kPieceRows) {
      add_piece<Op, Chunk<T>::kPieceRows>(state, rows, k, at + lane_of_warp() * kRows + k);
    }
  }
}

// T: what a row is read as; a RowProduct's rows are those of x and y.
template <class Op, class T, class Out, int kStateBytes>
void reduce_chunks(const Params& p) {
  using State = typename Op::State;
  constexpr int kRows = Chunk<T>::kRows;
  constexpr int kAhead = reduce_ahead(sizeof(T));
  using Steps = ChunkWalk<kAhead, kReduceMore>;
  struct Shared {
    typename ChunkRing<T, kReduceChunks>::Shared rows;
    typename ChunkStates<Op, T>::Shared states;
    ChunkMarks<T> last;          // rows of segments
    uint16_t ends[kReduceEnds];  // last rows of the segments that end
  };
  static_assert(sizeof(typename ChunkStates<Op, T>::Kept) == kStateBytes);
  static_assert(kStreamWarps * sizeof(Shared) ==
                reduce_chunks_bytes(sizeof(T), kStateBytes, kIsProduct<T> ? 2 : 1));
  extern __shared__ __align__(kRingAlignment) unsigned char memory[];
  const Segments segments = begin_reduction(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + kept(static_cast<uint32_t>(warp * sizeof(Shared))));
  Steps steps(p, segments, blockIdx.x, kRows);
  const T* const x = static_cast<const T*>(p.x.data) + steps.base;
  auto ring = [&] {
    using Ring = ChunkRing<T, kReduceChunks>;
    if constexpr (kIsProduct<T>) {
      using Element = typename T::Element;
      return Ring(shared.rows, static_cast<const Element*>(p.x.data) + steps.base,
                  static_cast<const Element*>(p.y.data) + steps.base, steps.rows);
    } else {
      return Ring(shared.rows, x, steps.rows);
    }
  }();
  shared.last.take();

#pragma unroll
  for (int i = 0; i < kReduceChunks; ++i) ring.request(i * kRows < steps.row_stop);
  // Of the rows of `steps.segment` before the chunk: the same in all lanes, or of each lane's own.
  State open = Op::start();
  bool is_spread = false, in_head = steps.starts_inside;
  for (int at = 0;; at += kRows) {
    const int low = at > steps.row ? at : steps.row;
    const int high = at + kRows < steps.row_stop ? at + kRows : steps.row_stop;
    const bool full = low == at && high == at + kRows, last = high == steps.row_stop;
    Chunk<T> rows;
    ring.take(rows);
    ring.request(at + kReduceChunks * kRows < steps.row_stop);

    if (full && steps.first_end() > high) {
      if (!is_spread) {
        if constexpr (kAims<Op>) {
          // All lanes at one row, so that their states are put together without an exponential.
          if (open.sum == 0) {
            open.shift = Op::aim_at(__shfl_sync(device::kAllLanes, rows.real(0), 0));
          }
        }
        const State whole = open;
        if (lane != 0) open = Op::start();
        if constexpr (kAims<Op>) open.shift = whole.shift;
        is_spread = true;
      }
      add_chunk<Op, T>(open, rows, at);
      if (last) break;
      continue;
    }

    const auto mark = [&](int, int number, int, int end) {
      const int row = end - (at + 1), rank = number - steps.segment;
      if (static_cast<uint32_t>(row) < static_cast<uint32_t>(high - at)) shared.last.set(row);
      if (static_cast<uint32_t>(rank) < kReduceEnds) shared.ends[rank] = static_cast<uint16_t>(row);
    };
    const auto ended = steps.ended(
        high, [](int, int) {}, mark);
    // Rows of other shares, or behind x, are kept apart as segments of their own.
    if (low > at) shared.last.set(low - 1 - at);
    if (last && high > at) shared.last.set(high - 1 - at);
    if (steps.used_up(ended)) steps.read_ahead(steps.segment + ended.count, ended.reached);
    __syncwarp();

    if (is_spread) open = gathered<Op>(open);
    is_spread = false;
    const ChunkStates<Op, T> states(shared.states, rows, x, at, high, shared.last.take(), open);
    __syncwarp();

    bool exact = true;
    const auto store = [&](auto outputs) {
      constexpr int kAtOnce = 2;  // for their reads to be in flight together
#pragma unroll 1
      for (int base = lane; base < ended.count; base += kAtOnce * device::kWarpSize) {
        const auto number = [&](int k) { return base + k * device::kWarpSize; };
        const auto begin_of = [&](int i) {
          return i > 0 ? at + 1 + shared.ends[i - 1] : steps.reached;
        };
        uint32_t row[kAtOnce];
        State state[kAtOnce][1];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          // In bounds whatever the offsets are.
          row[k] = number(k) < ended.count ? shared.ends[number(k)] % kRows : 0;
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          state[k][0] = states.state(row[k]);
          exact &= number(k) >= ended.count || states.is_exact(row[k]);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = number(k);
          if (i >= ended.count) break;
          const auto begin = [&] { return begin_of(i); };
          outputs.i = i;
          finish_to<Op, Out>(
              p, outputs, state[k], steps.base, [&] { return steps.base + begin(); },
              [&] { return at + 1 + static_cast<int>(row[k]) - begin(); });
        }
      }
    };
    const bool plain = !ended.odd && !in_head && ended.count <= kReduceEnds &&
                       steps.segment >= steps.lowest &&
                       steps.segment + ended.count <= steps.highest;
    const bool stored =
        plain && to_packed<Op, Out>(p, Tile::problem_segment(steps.first + steps.segment), store);
    if (!stored || __any_sync(device::kAllLanes, !exact)) {
      int before = steps.reached;
#pragma unroll 1
      for (int from = 0; from < ended.count; from += device::kWarpSize) {
        const int number = steps.segment + from + lane;
        const int end = steps.read_end(steps.segment + from), begin = steps.begin_of(before, end);
        before = end;
        const auto row = static_cast<uint32_t>(end - 1 - at);
        const bool mine = from + lane < ended.count && steps.in_problem(number);
        const bool ends_here = mine && begin != end && row < kRows;
        const State state[1] = {states.exact_state(ends_here, row % kRows, begin)};
        if (!mine) continue;
        if (begin == end) {
          finish_empty<Op, Out>(p, steps.first + number, 0);
        } else if (ends_here) {
          if (in_head && number == steps.segment) {
            slot_of<Op>(p, steps.share, 0)[0] = state[0];
          } else {
            finish<Op, Out, false>(p, segments, steps.first + number, 0, state, steps.base);
          }
        }
      }
    }
    if (ended.count > 0) in_head = false;
    steps.next(ended);
    open = states.rest(steps.reached, last);
    if (last) break;
  }
  if (is_spread) open = gathered<Op>(open);
  if (lane == 0) slot_of<Op>(p, steps.share, 1)[0] = open;
  if (p.proof == Proof::wanted) {
    const int any = __syncthreads_or(steps.disorder());
    if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  }
}

}  // namespace pullback::segment_cuda

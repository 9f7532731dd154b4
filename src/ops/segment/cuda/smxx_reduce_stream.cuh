// Forward for x of one column, contiguous (smxx_stream.cuh). A lane takes some consecutive rows of
// a piece and turns them into running states, begun anew after each last row of a segment; those of
// last rows go to shared memory. A segmented scan over the warp and over the warps tells each lane
// what its rows continue. Then the threads turn to the segments, a thread for each, and put the two
// together: outputs are stored side by side.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"
#include "ops/segment/cuda/smxx_stream.cuh"

namespace pullback::segment_cuda {

// The rows of a lane, as they lie in shared memory.
template <class T>
struct LaneRows {
  static constexpr int kRows = stream_lane_rows(sizeof(T));
  using Half = Values<T, kRows / 2>;
  Half half[2];

  explicit LaneRows(const unsigned char* from) {
    const uint32_t at = shared_address(from);
    half[0] = load_shared<Half>(at);
    half[1] = load_shared<Half>(at + sizeof(Half));
  }
  Real<T> real(int i) const { return half[i / (kRows / 2)].real(i % (kRows / 2)); }
};

// A segment's, in the shape of Segments.
struct Bounds {
  int64_t first, stop;

  int64_t begin(int64_t) const { return first; }
  int64_t length(int64_t) const { return stop - first; }
};

// The states of lanes 0 to 31 put together, in lane 0.
template <class Op, class State>
State gathered(State state) {
#pragma unroll
  for (int step = 1; step < device::kWarpSize; step *= 2) {
    Op::append(state, shuffle_down(state, step));
  }
  return state;
}

template <class Op, class T, class Out, int kStateBytes>
void reduce_stream(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kBytes = static_cast<int>(sizeof(T));
  constexpr int kLaneRows = LaneRows<T>::kRows;
  constexpr int kWarps = kStreamThreads / device::kWarpSize;
  constexpr int kWarpRows = kStreamRows / kWarps;
  constexpr int kTurnRows = device::kWarpSize * kLaneRows;  // of a warp at a time
  constexpr int kTurns = kWarpRows / kTurnRows;
  constexpr int kChunkBytes = stream_chunk_bytes(kBytes);
  constexpr uint32_t kFull = (1u << kLaneRows) - 1;
  using Steps = Walk<kStreamRows>;
  using Rows = Ring<kStreamChunks, kChunkBytes>;
  struct Shared {
    typename Rows::Shared x;
    typename Steps::Shared steps;
    State at_end[stream_states(kBytes)];       // of last rows: what their lane knows
    State continued[kStreamRows / kLaneRows];  // by a lane's rows
    State open[kWarps];                        // of the rows after the last end in each warp
    State carry[2];      // of the rows after the last end before the piece, by turns
    bool ended[kWarps];  // whether a warp had an end
  };
  static_assert(sizeof(Shared) <= stream_reduce_bytes(kBytes, sizeof(State)));
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / device::kWarpSize;
  const int lane = thread % device::kWarpSize;
  const auto end_place = [](int row) { return row + row / kLaneRows; };

  Segments segments;
  if (!begin_stream(p, segments)) return;
  Steps steps(p, segments, shared.steps, kChunkBytes / kBytes);
  steps.skip_outside();
  typename Steps::EndRing ends = steps.end_ring(segments);
  Rows x(shared.x, static_cast<const T*>(p.x.data) + steps.base, steps.bytes_of_rows(kBytes),
         kChunkBytes);
  if (thread == 0) shared.carry[0] = Op::start();
  start_rings(x, ends);

  int parity = 0;
  while (steps.goes_on()) {
    steps.template begin_piece<kLaneRows>();
    wait_for_copies();
    steps.mark(
        ends,
        [&](int, int64_t begin, int64_t end, bool ended) {
          return ended & (begin < end) ? end - 1 - steps.origin_row : int64_t{-1};
        },
        [](int, bool) { return 0; }, [](int, int) {});
    x.wait((steps.window * kBytes + kChunkBytes - 1) / kChunkBytes);
    const int place = steps.origin * kBytes % (kStreamChunks * kChunkBytes);

    State before = Op::start();  // since the warp's last end
    State earlier[kTurns];       // the same before this lane's rows
    bool any_end = false, complete[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int own = warp * kWarpRows + turn * kTurnRows + lane * kLaneRows;
      const uint32_t stops = shared.steps.bits[own / 32] >> (own % 32) & kFull;
      const uint32_t enders = __ballot_sync(device::kAllLanes, stops != 0);
      const unsigned char* from = x.at(place + own * kBytes);
      const int low = steps.row - steps.origin - own, high = steps.window - steps.origin - own;
      const int first_place = steps.origin + own;
      State state = Op::start();
      State* const at_end = shared.at_end + end_place(own);
      const auto walk = [&](int i, Real<T> value) {
        Op::add(state, value, first_place + i);
        if (stops >> i & 1) {
          at_end[i] = state;
          state = Op::start();
        }
      };
      bool done = false;
      if (low <= 0 && high >= kLaneRows) {
        const LaneRows<T> rows(from);
        if (enders == 0) {
          State one[1] = {state};
          done = add_rows<Op, Real<T>, kLaneRows>(
              one, [&](int, int k) { return rows.real(k); }, first_place);
          state = one[0];
        } else {
          done = true;
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) walk(i, rows.real(i));
        }
      }
      if (!done) {
#pragma unroll 1
        for (int i = low < 0 ? 0 : low; i < high && i < kLaneRows; ++i) {
          walk(i, device::to_real(reinterpret_cast<const T*>(from)[i]));
        }
      }
      if (enders == 0) {
        Op::append(before, shuffle(gathered<Op>(state), 0));
        complete[turn] = true;  // and nobody asks
        continue;
      }
      // Of the lanes up to this one, those since the last end.
      const uint32_t enders_here = enders & (0xffffffffu >> (31 - lane));
      const int since = enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0;
#pragma unroll
      for (int step = 1; step < device::kWarpSize; step *= 2) {
        State whole = shuffle_up(state, step);
        if (lane - step >= since) {
          Op::append(whole, state);
          state = whole;
        }
      }
      earlier[turn] = shuffle_up(state, 1);
      if (lane == 0) earlier[turn] = Op::start();
      const bool ends_before = (enders & ((1u << lane) - 1)) != 0;
      if (!ends_before) {
        State whole = before;
        Op::append(whole, earlier[turn]);
        earlier[turn] = whole;
      }
      complete[turn] = any_end | ends_before;
      before = shuffle(state, device::kWarpSize - 1);
      any_end = true;
    }
    if (lane == 0) {
      shared.open[warp] = before;
      shared.ended[warp] = any_end;
    }
    __syncthreads();

    // What the rows before this warp's have left open.
    const auto open_before = [&](int stop) {
      State state = shared.carry[parity];
#pragma unroll 1
      for (int other = 0; other < stop; ++other) {
        if (shared.ended[other]) {
          state = shared.open[other];
        } else {
          Op::append(state, shared.open[other]);
        }
      }
      return state;
    };
    if (any_end) {
      const State prefix = open_before(warp);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        State state = earlier[turn];
        if (!complete[turn]) {
          state = prefix;
          Op::append(state, earlier[turn]);
        }
        shared.continued[(warp * kTurns + turn) * device::kWarpSize + lane] = state;
      }
    }
    if (thread == 0) shared.carry[parity ^ 1] = open_before(kWarps);
    steps.clear();
    __syncthreads();

#pragma unroll 1
    for (int number = thread; number < steps.taken; number += kStreamThreads) {
      const int64_t j = steps.first + number;
      const int64_t begin = steps.begin_of(number), end = steps.end_of(number);
      const auto last = static_cast<uint64_t>(end - 1 - steps.origin_row);
      if (begin == end || last >= static_cast<uint64_t>(kStreamRows)) {
        finish_empty<Op, Out>(p, j, 0);
        continue;
      }
      const int run = static_cast<int>(last) / kLaneRows;
      State state[1] = {shared.at_end[end_place(static_cast<int>(last))]};
      if (begin < steps.origin_row + run * kLaneRows) {
        State whole = shared.continued[run];
        Op::append(whole, state[0]);
        state[0] = whole;
      }
      if (begin < steps.share_row) {
        slot_of<Op>(p, blockIdx.x, 0)[0] = state[0];
      } else {
        finish<Op, Out>(p, Bounds{begin, end}, j, 0, state, steps.base);
      }
    }
    parity ^= 1;
    __syncthreads();
    steps.next_piece();
    refill(x, steps.row / kLaneRows * kLaneRows * kBytes / kChunkBytes);
    refill(ends, steps.oldest_end());
  }
  if (thread == 0) slot_of<Op>(p, blockIdx.x, 1)[0] = shared.carry[parity];
  steps.report();
}

}  // namespace pullback::segment_cuda

// Forward for x of one column, contiguous (smxx_stream.cuh). A lane takes some consecutive rows of
// a piece and turns them into running states, begun anew after each last row of a segment; those of
// last rows go to shared memory. A segmented scan over the warp and over the warps tells each lane
// what its rows continue. Then the threads turn to the segments, a thread for each, and put the two
// together: outputs are stored side by side.
#pragma once

#include "ops/segment/cuda/smxx_combine.cuh"
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

// Adds a lane's rows; `stops` are the last ones of segments, whose states go to `at_end`. The lanes
// of the warp aim at one row, so that their states are added without another exponential. False,
// and nothing is added, when a row is far from it.
template <class Op, class T, class State>
bool aimed_rows(const LaneRows<T>& rows, uint32_t stops, State& state, State* at_end) {
  if constexpr (kAims<Op>) {
    constexpr int kRows = LaneRows<T>::kRows;
    const float shift = __shfl_sync(device::kAllLanes, rows.real(0), 0);
    float term[kRows], away = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float difference = rows.real(i) - shift;
      away = larger(away, difference < 0 ? -difference : difference);
      term[i] = exponential(difference);
    }
    if (!(away <= Op::kNear)) return false;
    state = {shift, 0};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      state.sum += term[i];
      if (stops >> i & 1) {
        at_end[i] = state;
        state = {shift, 0};
      }
    }
    if (stops >> (kRows - 1) != 0) state = Op::start();  // an aim is only for rows that follow
  }
  return true;
}

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
  constexpr int kRows = kStreamRows;
  constexpr int kWarpRows = kRows / kWarps;
  constexpr int kTurnRows = device::kWarpSize * kLaneRows;  // of a warp at a time
  constexpr int kTurns = kWarpRows / kTurnRows;
  constexpr int kChunkBytes = stream_chunk_bytes(kBytes);
  constexpr uint32_t kFull = (1u << kLaneRows) - 1;
  using Steps = Walk<kRows>;
  using Rows = Ring<kStreamChunks, kChunkBytes>;
  struct Shared {
    typename Rows::Shared x;
    typename Steps::Shared steps;
    alignas(16) State at_end[kRows + stream_runs(kBytes)];  // of last rows: what their lane knows
    State continued[stream_runs(kBytes)];                   // by a lane's rows
    State open[kWarps];             // of the rows after the last end in each warp
    State carry[2];                 // of the rows after the last end before the piece, by turns
    bool ended[kWarps];             // whether a warp had an end
    int16_t ends[kStreamEnds + 1];  // behind the begin of the first: rows counted from origin
  };
  static_assert(sizeof(Shared) <= stream_reduce_bytes(kBytes, sizeof(State)));
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / device::kWarpSize;
  const int lane = thread % device::kWarpSize;
  const auto end_place = [](int row) { return row + row / kLaneRows; };

  Segments segments;
  using Combining = Combiner<Op, Out, kStreamThreads, 1>;
  static_assert(sizeof(Combining) <= sizeof(shared.at_end));
  Combining& combiner = *reinterpret_cast<Combining*>(shared.at_end);
  if (!begin_stream(p, segments)) {
    combiner.combine(p, segments, static_cast<int>(blockIdx.x) * kStreamThreads);
    return;
  }
  Steps steps(p, segments, shared.steps, kChunkBytes / kBytes);
  steps.skip_outside();
  typename Steps::EndRing ends = steps.end_ring(segments);
  Rows x(shared.x, static_cast<const T*>(p.x.data) + steps.base, steps.bytes_of_rows(kBytes),
         kChunkBytes);
  if (thread == 0) shared.carry[0] = Op::start();
  start_rings(x, ends);

  const int64_t share_first = steps.first;
  const bool starts_inside =
      share_first > 0 && share_first < steps.stop && segments.begin(share_first) < steps.share_row;
  int parity = 0;
  while (steps.goes_on()) {
    steps.template begin_piece<kLaneRows>();
    wait_for_copies();
    // The end of an empty segment is one of rows too, or before the piece.
    const int low_row = steps.row - steps.origin;
    steps.mark(
        ends,
        [&](int number, int begin, int end, bool ended) {
          if (number == 0) shared.ends[0] = static_cast<int16_t>(begin);
          if (!ended) return -1;
          shared.ends[number + 1] = static_cast<int16_t>(end);
          return end > low_row ? end - 1 : -1;
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
      const int from_row = low < 0 ? 0 : low;
      State state = from_row < high && from_row < kLaneRows ? begin_run<Op>(first_place + from_row)
                                                            : Op::start();
      State* const at_end = shared.at_end + end_place(own);
      const auto walk = [&](int i, Real<T> value) {
        Op::add(state, value, first_place + i);
        if (stops >> i & 1) {
          at_end[i] = state;
          state = begin_run<Op>(first_place + i + 1);
        }
      };
      bool done = false;
      if constexpr (kAims<Op>) {
        if (__all_sync(device::kAllLanes, low <= 0 && high >= kLaneRows)) {
          done = aimed_rows<Op>(LaneRows<T>(from), stops, state, at_end);
        }
      } else if (low <= 0 && high >= kLaneRows) {
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
        for (int i = from_row; i < high && i < kLaneRows; ++i) {
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

    const bool in_head = steps.first == share_first && starts_inside;
#pragma unroll 1
    for (int number = thread; number < steps.taken; number += kStreamThreads) {
      const int64_t j = steps.first + number;
      const int begin = shared.ends[number], end = shared.ends[number + 1];
      if (begin >= end) {
        finish_empty<Op, Out>(p, j, 0);
        continue;
      }
      const int run = (end - 1) / kLaneRows;
      State state[1] = {shared.at_end[end - 1 + run]};
      if (begin < run * kLaneRows) {
        State whole = shared.continued[run];
        Op::append(whole, state[0]);
        state[0] = whole;
      }
      if (in_head && number == 0) {
        slot_of<Op>(p, blockIdx.x, 0)[0] = state[0];
      } else {
        finish<Op, Out>(p, segments, j, 0, state, steps.base);
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
  if (p.proof != Proof::again || !last_to_arrive(p)) return;
  for (int tile = 0; tile < p.tiles; tile += kStreamThreads) {
    combiner.combine(p, segments, tile);
    __syncthreads();
  }
}

}  // namespace pullback::segment_cuda

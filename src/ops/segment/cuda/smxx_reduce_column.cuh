// Forward for x of one column, with any stride and in any order. A lane takes some consecutive rows
// and turns them into running states, begun anew after each last row of a segment; a segmented scan
// over the warp and over the warps adds what came before. The states of last rows then lie in
// shared memory, and the threads turn to the segments, a thread for each: their outputs are stored
// side by side.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// What stands for the row at `place` of the sorted order.
template <class T, Input kInput>
Real<T> column_value(const Params& p, int64_t place) {
  const int64_t n = row_of<true>(p, place);
  if constexpr (kInput == Input::mask) {
    const auto* mask = static_cast<const uint8_t*>(p.mask.data);
    return static_cast<Real<T>>(mask[n * p.mask.row_stride] & 1);
  } else {
    const Real<T> value = device::to_real(static_cast<const T*>(p.x.data)[n * p.x.row_stride]);
    if constexpr (kInput != Input::product) return value;
    return value * device::to_real(static_cast<const T*>(p.y.data)[n * p.y.row_stride]);
  }
}

template <class Op, class T, class Out, Input kInput, int kStateBytes>
void reduce_column(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kWarps = kThreads / device::kWarpSize;
  constexpr int kColumnRows = column_rows(sizeof(State));
  constexpr int kRounds = column_rounds(sizeof(State));
  constexpr int kWarpRows = device::kWarpSize * kColumnRows;
  constexpr int kRows = kWarps * kWarpRows * kRounds;
  constexpr uint32_t kFull = (1u << kColumnRows) - 1;
  __shared__ EndBits<kRows> ends;
  __shared__ State at_end[kRows];  // where the bit is set: the state of the piece that ends there
  __shared__ State open[kWarps];   // of the rows after the last end in each warp
  __shared__ bool ended[kWarps];   // whether there is one

  const auto [segments, tile] = begin_tile(p);
  device::allow_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int lane = threadIdx.x % device::kWarpSize;
  const auto first_row = [&](int round) {
    return (warp * kRounds + round) * kWarpRows + lane * kColumnRows;
  };
  ends.mark(
      segments, tile, [](int64_t) { return 0; }, [](int64_t, int, int) {}, [](int64_t) {});

  State before = Op::start();  // since the warp's last end
  bool any_end = false;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int row = first_row(round);
    const uint32_t inside = rows_inside(tile, row) & kFull;
    const uint32_t stops = ends.bits[row / 32] >> (row % 32) & kFull;
    Real<T> value[kColumnRows];
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      value[i] = inside >> i & 1 ? column_value<T, kInput>(p, tile.origin + row + i) : 0;
    }
    State state =
        inside != 0 ? begin_run<Op>(row + __ffs(static_cast<int>(inside)) - 1) : Op::start();
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      if (inside >> i & 1) Op::add(state, value[i], row + i);
      if (stops >> i & 1) {
        at_end[row + i] = state;
        state = begin_run<Op>(row + i + 1);
      }
    }
    // Of the lanes up to this one, those since the last end.
    const uint32_t enders = __ballot_sync(device::kAllLanes, stops != 0);
    const uint32_t enders_here = enders & (0xffffffffu >> (31 - lane));
    const int since = enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0;
    if (lane == 0 && stops == 0) {
      State whole = before;
      Op::append(whole, state);
      state = whole;
    }
#pragma unroll
    for (int step = 1; step < device::kWarpSize; step *= 2) {
      State whole = shuffle_up(state, step);
      if (lane - step >= since) {
        Op::append(whole, state);
        state = whole;
      }
    }
    State earlier = shuffle_up(state, 1);
    if (lane == 0) earlier = before;
    if (stops != 0) {
      const int end = row + __ffs(static_cast<int>(stops)) - 1;
      Op::append(earlier, at_end[end]);
      at_end[end] = earlier;
    }
    before = shuffle(state, device::kWarpSize - 1);
    any_end |= enders != 0;
  }
  if (lane == 0) {
    open[warp] = before;
    ended[warp] = any_end;
  }
  __syncthreads();

  // The first end of a warp also gets what the warps before have left open.
  if (lane == 0) {
    int from = warp;
    while (from > 0 && !ended[from - 1]) --from;
    if (from > 0) --from;
    State earlier = Op::start();
    for (; from < warp; ++from) Op::append(earlier, open[from]);
    if (any_end) {
      const int end = ends.next(warp * kRounds * kWarpRows);
      State whole = earlier;
      Op::append(whole, at_end[end]);
      at_end[end] = whole;
    }
    if (warp == kWarps - 1) {
      if (any_end) earlier = Op::start();
      Op::append(earlier, before);
      slot_of<Op>(p, blockIdx.x, 1)[0] = earlier;
    }
  }
  __syncthreads();
  for (int64_t j = tile.first + threadIdx.x; j < tile.stop; j += kThreads) {
    if (j < 1 || j > p.segments) continue;
    const int64_t begin = segments.begin(j), end = segments.end(j);
    if (begin == end) {
      finish_empty<Op, Out>(p, j, 0);
      continue;
    }
    const auto row = static_cast<uint64_t>(end - 1 - tile.origin);
    if (row >= kRows) continue;
    const State state[1] = {at_end[row]};
    if (begin < tile.row) {
      slot_of<Op>(p, blockIdx.x, 0)[0] = state[0];
    } else {
      finish<Op, Out, true>(p, segments, j, 0, state, tile.origin);
    }
  }
}

}  // namespace pullback::segment_cuda

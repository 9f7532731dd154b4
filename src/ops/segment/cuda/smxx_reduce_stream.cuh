// Forward for x of one column, contiguous (smxx_stream.cuh). Of a long segment each lane keeps a
// running state over its pieces of the rows, however many windows they fill; the lanes' states meet
// where the segment ends.
#pragma once

#include "ops/segment/cuda/smxx_combine.cuh"
#include "ops/segment/cuda/smxx_stream.cuh"

namespace pullback::segment_cuda {

// Adds the rows of x from `begin` to `end`, all of one segment.
template <class Op, class T, int kLaneRows>
void add_few(typename Op::State& state, const RowRing<T, kLaneRows>& x, int begin, int end) {
  using R = Real<T>;
  constexpr int kAtOnce = kStreamAtOnce;
  if constexpr (kAims<Op>) Op::aim(state, device::to_real(x.at(begin)));
#pragma unroll 1
  for (int row = begin; row < end; row += kAtOnce) {
    const T* const from = &x.at(row);
    const int left = end - row;
    R value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      value[i] = device::to_real(from[i]);
      if (kAims<Op> && i >= left) value[i] = -device::infinity<R>();
    }
    if constexpr (kAims<Op>) {
      typename Op::State one[1] = {state};
      if (add_rows<Op, R, kAtOnce>(
              one, [&](int, int k) { return value[k]; }, row)) {
        state = one[0];
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i < left) Op::add(state, value[i], row + i);
    }
  }
}

// Adds a row to the state of a lane whose rows do not follow each other.
template <class Op, class R>
void add_row(typename Op::State& state, R x, int place) {
  if constexpr (Op::kPlaces) {
    if (state.place < 0) state = begin_run<Op>(place);
  }
  typename Op::State one[1] = {state};
  if (kAims<Op> && add_rows<Op, R, 1>(
                       one, [&](int, int) { return x; }, place)) {
    state = one[0];
  } else {
    Op::add(state, x, place);
  }
}

// Adds this lane's rows of a chunk that lie in [low, high), counted from the lane's first.
template <class Op, class T, int kRows>
void add_piece(typename Op::State& state, const Values<T, kRows>& piece, int low, int high,
               int place) {
  using R = Real<T>;
  if (low >= kRows || high <= 0 || low >= high) return;
  const int first = low > 0 ? low : 0;
  if constexpr (Op::kPlaces) {
    if (state.place < 0) state = begin_run<Op>(place + first);
  }
  if (low <= 0 && high >= kRows) {
    typename Op::State one[1] = {state};
    if (add_rows<Op, R, kRows>(
            one, [&](int, int k) { return piece.real(k); }, place)) {
      state = one[0];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= low && i < high) Op::add(state, piece.real(i), place + i);
  }
}

template <class Op, class T, class Out, int kStateBytes>
void reduce_stream(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kLaneRows = 16 / static_cast<int>(sizeof(T));
  using Ring = RowRing<T, kLaneRows>;
  constexpr int kChunkRows = Ring::kChunkRows;
  using Steps = Walk<kChunkRows>;
  using Combining = Combiner<Op, Out, kStreamThreads, 1>;
  struct Streaming {
    typename Ring::Shared x[kStreamWarps];
    typename Steps::Shared ends[kStreamWarps];
  };
  __shared__ __align__(16) unsigned char memory[sizeof(Streaming)];
  static_assert(sizeof(Combining) <= sizeof(memory));
  Streaming& shared = *reinterpret_cast<Streaming*>(memory);
  Combining& combiner = *reinterpret_cast<Combining*>(memory);

  Segments segments;
  if (!begin_stream(p, segments)) {
    combiner.combine(p, segments, static_cast<int>(blockIdx.x) * kStreamThreads, 0);
    return;
  }
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Steps steps(p, segments, shared.ends[warp]);
  Ring x(shared.x[warp], static_cast<const T*>(p.x.data) + steps.base, steps.rows);

  // Of rows from `begin` to `end`, those of this lane.
  const auto add = [&](State& state, int begin, int end) {
    if constexpr (kAims<Op>) {
      // All lanes at one row, so that their states are put together without an exponential.
      if (state.sum == 0 && begin < end) Op::aim(state, device::to_real(x.at(begin)));
    }
    if (end - begin <= kStreamWarpRows) {
#pragma unroll 1
      for (int row = begin + lane; row < end; row += device::kWarpSize) {
        add_row<Op>(state, device::to_real(x.at(row)), row);
      }
      return;
    }
#pragma unroll 2
    for (int chunk = Ring::chunk_of(begin); chunk * kChunkRows < end; ++chunk) {
      const int at = chunk * kChunkRows + lane * kLaneRows;
      add_piece<Op, T>(state, x.piece(chunk), begin - at, end - at, at);
    }
  };

  State open = Op::start();  // of the rows of `segment` before `row`
  bool in_head = steps.starts_inside, is_open = in_head;
  while (steps.goes_on()) {
    steps.advance([&](int chunk) { x.request(chunk); });
    const auto batch = steps.batch();
    if (batch.count == 0) {
      add(open, steps.row, batch.open_stop);
      is_open = true;
      steps.next(batch);
      continue;
    }
    const bool goes_on = is_open && batch.number == steps.segment;
    const bool is_long = batch.mine && (goes_on || batch.end - batch.begin > kStreamLaneRows);
    State state = Op::start();
    if (batch.mine && !is_long && batch.begin < batch.end) {
      state = begin_run<Op>(batch.begin);
      add_few<Op>(state, x, batch.begin, batch.end);
    }
    for (uint32_t longs = __ballot_sync(device::kAllLanes, is_long); longs != 0;
         longs &= longs - 1) {
      const int owner = __ffs(static_cast<int>(longs)) - 1;
      State whole = Op::start();
      if (is_open) {  // the first of them goes on
        whole = open;
        open = Op::start();
        is_open = false;
      }
      add(whole, __shfl_sync(device::kAllLanes, batch.begin, owner),
          __shfl_sync(device::kAllLanes, batch.end, owner));
      whole = gathered<Op>(whole);
      if (lane == owner) state = whole;
    }
    const int64_t j = steps.first_group + batch.number;
    if (batch.mine && j >= 1 && j <= p.segments) {
      if (in_head && batch.number == steps.segment) {
        slot_of<Op>(p, steps.share, 0)[0] = state;
      } else if (batch.begin == batch.end && !goes_on) {
        finish_empty<Op, Out>(p, j, 0);
      } else {
        const State one[1] = {state};
        finish<Op, Out>(p, segments, j, 0, one, steps.base);
      }
    }
    in_head = false;
    steps.next(batch);
  }
  open = gathered<Op>(open);
  if (lane == 0) slot_of<Op>(p, steps.share, 1)[0] = open;
  steps.report();
  if (p.proof != Proof::again || !arrive<false>(p, false).last) return;
  for (int tile = 0; tile < p.tiles; tile += kStreamThreads) {
    combiner.combine(p, segments, tile, 0);
    __syncthreads();
  }
}

}  // namespace pullback::segment_cuda

// Behind a reduction that streams (smxx_chunks.cuh): puts together the segments
// that reach over several shares, from their slots. Where offsets were out of order, all that the
// reduction did was in vain; then they are repaired, and segments reduced from their rows, short
// ones by a thread, others by a block. That is slow, but offsets are not meant to be so, and it
// keeps the reductions small.
#pragma once

#include "ops/segment/cuda/smxx_combine.cuh"

namespace pullback::segment_cuda {

// A row as a reduction that streams reads it.
template <class T>
auto row_real(const Params& p, int64_t row, int64_t column) {
  if constexpr (kIsProduct<T>) {
    using Element = typename T::Element;
    return load_row<Element, 1>(p.x, row, column).real(0) *
           load_row<Element, 1>(p.y, row, column).real(0);
  } else {
    return load_row<T, 1>(p.x, row, column).real(0);
  }
}

// T: what the reduction reads, which of a mask are its bytes.
template <class Op, class T, class Out>
struct SegmentReducer {
  using Block = Combiner<Op, Out, 1>;
  static constexpr int kAloneRows = 32;  // of a segment, at most, that a thread takes

  const Params& p;
  const Segments& segments;
  int64_t column;

  PlacedState<Op> rows(int64_t from, int64_t stop) const {
    PlacedState<Op> sum{begin_run<Op>(0), from};
    for (int64_t row = from; row < stop; ++row) {
      Op::add(sum.state, row_real<T>(p, row, column), static_cast<int>(row - from));
    }
    return sum;
  }
  void store(int64_t j, const PlacedState<Op>& sum) const {
    const typename Op::State state[1] = {sum.state};
    finish<Op, Out, true>(p, segments, j, column, state, sum.row);
  }
  // True where it is not for a thread.
  bool is_long(int64_t j) const {
    const int64_t begin = segments.begin(j), end = segments.end(j);
    if (end - begin > kAloneRows) return true;
    if (begin == end) {
      finish_empty<Op, Out>(p, j, column);
    } else {
      store(j, rows(begin, end));
    }
    return false;
  }
  // By the block, each of whose threads takes as many rows, one after the other.
  void together(int64_t j, Block& block) const {
    const int64_t begin = segments.begin(j), end = segments.end(j);
    const int64_t each = (end - begin + kThreads - 1) / kThreads;
    const int64_t from = begin + threadIdx.x * each, stop = from + each < end ? from + each : end;
    const bool mine = from < stop;
    PlacedState<Op> sum;
    if (mine) sum = rows(from, stop);
    block.meet(sum, mine, threadIdx.x, 0, kThreads,
               [&](int apart) { return from + apart * each < end; });
    if (threadIdx.x == 0) store(j, sum);
  }
};

template <class Op, class T, class Out>
void combine_shares(const Params& p) {
  using Block = Combiner<Op, Out, 1>;
  __shared__ Block block;
  __shared__ uint16_t longs[kThreads];
  __shared__ int long_count;
  device::wait_for_previous_kernel();
  const bool checks = p.proof == Proof::checked;
  const bool bad = checks && disorder_ahead(p);
  Segments segments = checks ? make_segments(p, false) : make_segments(p);
  const int64_t column = column_block(p);
  block.find_runs(p, segments, static_cast<int64_t>(blockIdx.x) * Block::kTiles);
  if (!checks || !repaired(p, bad)) {
    block.combine(p, segments, column, false);
    return;
  }
  segments = make_segments(p, true);
  const SegmentReducer<Op, T, Out> reducer{p, segments, column};
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads; base < p.segments;
       base += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (threadIdx.x == 0) long_count = 0;
    __syncthreads();
    const int64_t j = base + threadIdx.x + 1;
    if (j <= p.segments && reducer.is_long(j)) {
      longs[atomicAdd(&long_count, 1)] = static_cast<uint16_t>(threadIdx.x);
    }
    __syncthreads();
    for (int i = 0; i < long_count; ++i) reducer.together(base + longs[i] + 1, block);
    __syncthreads();
  }
}

}  // namespace pullback::segment_cuda

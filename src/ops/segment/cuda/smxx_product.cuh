// Backward of prod: d_x = d_out · (product of the rows before) · (product of the rows after),
// without a division, so that zeros and infinities come out right; in double, so that products of
// some rows may pass what their dtype holds.
//
// Three launches: product_rows<T, false> leaves the products of each tile's open ends in its slots,
// product_carries turns them into what comes before and after each tile, product_rows<T, true> does
// the rows. A group of lanes keeps 8 consecutive rows in registers, a lane one column.
#pragma once

#include "ops/segment/cuda/smxx_combine.cuh"

namespace pullback::segment_cuda {

template <class T, bool kStore>
void product_rows(const Params& p) {
  using R = Real<T>;
  __shared__ Ends<kThreads * kProductRows> ends;
  __shared__ double heads[kThreads], tails[kThreads];

  const auto [segments, tile] = begin_tile(p);
  const int lanes = 1 << p.lane_bits, walkers = kThreads >> p.lane_bits;
  const int thread = threadIdx.x, walker = thread >> p.lane_bits, lane = thread & (lanes - 1);
  const int64_t column = column_block(p) * lanes + lane;
  const bool active = column < p.columns;
  ends.mark(segments, tile, [](int64_t) {});

  constexpr uint32_t kFull = (1u << kProductRows) - 1;
  const int row = walker * kProductRows;
  const auto ends_of = [&](int other) {
    return ends.bits[other * kProductRows / 32] >> (other * kProductRows % 32) & kFull;
  };
  const uint32_t stops = ends_of(walker);
  const uint32_t all = rows_inside<true>(tile, row) & kFull;
  const uint32_t inside = active ? rows_inside(tile, row) & kFull : 0;
  R x[kProductRows];
#pragma unroll
  for (int i = 0; i < kProductRows; ++i) {
    x[i] = 1;
    if (inside >> i & 1) {
      const int64_t n = row_of<true>(p, tile.origin + row + i);
      x[i] = device::to_real(
          static_cast<const T*>(p.x.data)[n * p.x.row_stride + column * p.x.column_stride]);
    }
  }
  double head = 1, tail = 1;
  bool in_head = true;
#pragma unroll
  for (int i = 0; i < kProductRows; ++i) {
    tail *= x[i];
    if (in_head) head = tail;
    if (stops >> i & 1) {
      in_head = false;
      tail = 1;
    }
  }
  heads[thread] = head;
  tails[thread] = tail;
  __syncthreads();
  if (!active) return;

  // Product of the open rows before walker `stop`, and after walker `from`, within the tile.
  bool open_left = false, open_right = false;
  const auto product_before = [&](int stop) {
    int from = stop;
    while (from > 0 && ends_of(from - 1) == 0) --from;
    open_left = from == 0;
    double product = 1;
    for (int other = from > 0 ? from - 1 : 0; other < stop; ++other) {
      product *= tails[(other << p.lane_bits) + lane];
    }
    return product;
  };
  const auto product_after = [&](int from) {
    double product = 1;
    int other = from + 1;
    for (; other < walkers; ++other) {
      product *= heads[(other << p.lane_bits) + lane];
      if (ends_of(other) != 0) break;
    }
    open_right = other == walkers;
    return product;
  };
  if constexpr (!kStore) {
    double* slots =
        static_cast<double*>(p.slots) + blockIdx.x * int64_t{2} * p.slot_columns + column;
    if (walker == 0) slots[0] = stops != 0 ? head : head * product_after(0);
    if (walker == walkers - 1) slots[p.slot_columns] = product_before(walkers);
  } else {
    const double* carries =
        static_cast<const double*>(p.carries) + blockIdx.x * int64_t{2} * p.slot_columns + column;
    const int64_t head_segment = ends.segment_to(tile, ends.next(0));
    const auto goes_on = [&](int64_t j, int64_t at) {
      return j >= 1 && j <= p.segments && segments.begin(j) < at && segments.end(j) > at;
    };
    double prefix = product_before(walker);
    if (open_left && goes_on(head_segment, tile.row)) prefix = carries[0] * prefix;
    double suffix = product_after(walker);
    if (open_right && goes_on(tile.stop, tile.row_stop)) suffix *= carries[p.slot_columns];
    double after[kProductRows];
#pragma unroll
    for (int i = kProductRows - 1; i >= 0; --i) {
      if (stops >> i & 1) suffix = 1;
      after[i] = suffix;
      suffix *= x[i];
    }
#pragma unroll
    for (int i = 0; i < kProductRows; ++i) {
      if (!(all >> i & 1)) continue;
      R value = 0;
      if (inside >> i & 1) {
        const int64_t j = ends.segment_to(tile, ends.next(row + i));
        const R g = device::to_real(load_row<T, 1>(p.d_out, j - 1, column).element[0]);
        value = static_cast<R>(g * (prefix * after[i]));
      }
      prefix *= x[i];
      if (stops >> i & 1) prefix = 1;
      const int64_t n = written_row<true>(p, tile.origin + row + i);
      if (n < 0) continue;
      static_cast<T*>(p.d_x.data)[n * p.d_x.row_stride + column * p.d_x.column_stride] =
          device::from_real<T>(value);
    }
  }
}

// For the segments that reach over several tiles: carries[t][0] is the product of the slots before
// tile t, carries[t][1] of those after it.
template <int kColumns>
void product_carries(const Params& p) {
  constexpr int kParts = kThreads / kColumns;
  const Segments segments = make_segments(p);
  const int64_t column = column_block(p) * kColumns + static_cast<int>(threadIdx.x) % kColumns;
  const int tile = static_cast<int>(blockIdx.x) * kParts + static_cast<int>(threadIdx.x) / kColumns;
  if (tile >= p.tiles || column >= p.columns) return;
  const SlotRun run = slots_from(p, segments, tile);
  const auto at = [&](void* data, int64_t t, int which) -> double& {
    return static_cast<double*>(data)[(t * 2 + which) * p.slot_columns + column];
  };
  double product = 1;
#pragma unroll 8
  for (int64_t t = run.first; t < run.last; ++t) {
    product *= at(p.slots, t, 1);
    at(p.carries, t + 1, 0) = product;
  }
  product = 1;
#pragma unroll 8
  for (int64_t t = run.last; t > run.first; --t) {
    product *= at(p.slots, t, t < run.last ? 1 : 0);
    at(p.carries, t - 1, 1) = product;
  }
}

}  // namespace pullback::segment_cuda

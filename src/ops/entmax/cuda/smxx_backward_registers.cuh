// Rows with unit stride along the axis, kept in registers: d_x = s (d_y - <s, d_y> / S), S = sum of
// s. A row takes a warp or a block (several: sm90_backward_cluster.cuh), and is read once, d_y only
// where y has support.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

// What a thread keeps of a piece to have s from, twice. Powers take longer to compute than to keep.
template <class T, Weights kWeights>
struct HeldSlopes : SlopePiece<T, kWeights> {
  void compute(double) {}
};
template <class T>
struct HeldSlopes<T, Weights::power> : SlopePiece<T, Weights::power> {
  Real<T> s[kVectorLength<T>];

  void compute(double alpha) {
    SlopePiece<T, Weights::power>::for_each(alpha, [&](int e, Real<T> value) { s[e] = value; });
  }
  template <class Use>
  void for_each(double, const Use& use) const {
#pragma unroll
    for (int e = 0; e < kVectorLength<T>; ++e) use(e, s[e]);
  }
};

// An element beside the pieces, of one thread: in shared memory, as registers are scarce.
template <class T>
struct EdgeElement {
  Real<T> s, d_y;
  T* d_x;
};

// Up to kVectors pieces of `range` a thread, and `edge_count` elements of the row's edge. kAll: d_y
// is loaded beside y. sum_over_row(): over all threads that share the row, the same bits on each.
template <class T, Weights kWeights, int kVectors, bool kAll, class SumOverRow>
void registers_row(const PieceRow<T, kWeights>& row, const PieceRange<T, kWeights>& range,
                   int edge_count, const RowPlace& place, int thread, int threads,
                   EdgeElement<T>& edge, const SumOverRow& sum_over_row) {
  using R = Real<T>;
  HeldSlopes<T, kWeights> slopes[kVectors];
  Piece d_y[kVectors];
  bool active[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int piece = thread + j * threads;
    active[j] = piece < range.count;
    if (active[j]) {
      slopes[j].data = range.load_slope(piece, Drop()).data;
      if constexpr (kAll) d_y[j] = range.load_d_y(piece, Drop());
    }
  }
  if (thread < edge_count) {
    const int at = row.edge_at(thread) - row.head;
    edge = {range.template slope_at<R>(at, place.alpha), to_real(range.d_y[at]), range.d_x + at};
  }
  if constexpr (!kAll) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      active[j] = active[j] && slopes[j].any();
      if (active[j]) d_y[j] = range.load_d_y(thread + j * threads, Drop());
    }
  }

  if (place.nan) return fill_nan(row, thread, threads);

  Sums<R> sums;
  if (thread < edge_count) add(sums, edge.s, edge.d_y);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (!active[j]) continue;
    slopes[j].compute(place.alpha);
    add_piece<T>(sums, slopes[j], d_y[j], place.alpha);
  }
  sums = sum_over_row(sums);
  const R mean = sums.s_d_y / sums.s;

#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int piece = thread + j * threads;
    if (piece >= range.count) continue;
    Piece d_x{};
    if (active[j]) d_x = gradient_piece<T>(slopes[j], d_y[j], mean, place.alpha);
    range.store(piece, d_x);
  }
  if (thread < edge_count) {
    *edge.d_x = from_real<T>(gradient(edge.s, edge.d_y, mean));
  }
}

enum class Group { warp, block };

template <class T, Weights kWeights, int kVectors, Group kGroup>
void backward_registers(const BackwardParams& p) {
  int64_t task = static_cast<int64_t>(blockIdx.x);
  int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if constexpr (kGroup == Group::warp) {
    task = task * kWarpRows + thread / kWarpSize;
    if (task >= p.rows.count * p.rows.groups) return;
    thread %= kWarpSize;
    threads = kWarpSize;
  }
  const RowPlace place = place_of<T, kWeights>(p, task);
  if (place.elsewhere) return;
  using R = Real<T>;
  // Short rows of 16-bit types wait for latency more than for memory.
  constexpr bool kAll = kWeights == Weights::softmax ||
                        (kGroup == Group::warp && sizeof(T) == 2 && kWeights != Weights::mask);
  constexpr int kRows = kGroup == Group::block ? 1 : kWarpRows;
  __shared__ Sums<R> scratch[kGroup == Group::block ? kWarpSize : 1];
  __shared__ EdgeElement<T> edges[kRows][PieceRow<T, kWeights>::kMaxEdge];
  const PieceRow<T, kWeights> row(p, place);
  const PieceRange<T, kWeights> range(row, 0, row.pieces);
  const auto sum_over_row = [&](const Sums<R>& sums) -> Sums<R> {
    if constexpr (kGroup == Group::block) return block_sum(sums, scratch);
    return {warp_sum(sums.s), warp_sum(sums.s_d_y)};
  };
  registers_row<T, kWeights, kVectors, kAll>(
      row, range, row.edge, place, thread, threads,
      edges[threadIdx.x / threads % kRows][thread % PieceRow<T, kWeights>::kMaxEdge], sum_over_row);
}

}  // namespace pullback::entmax

// Rows with unit stride along the axis, kept in registers: d_x = s (d_y - <s, d_y> / S), S = sum of
// s. A row takes a warp or a block, and is read once, d_y only where y has support.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

enum class Group { warp, block };

// A row of up to kVectors pieces a thread, and the edge.
template <class T, Weights kWeights, int kVectors, Group kGroup>
void registers_row(const BackwardParams& p, const RowPlace& place, int thread, int threads) {
  using R = Arithmetic<T, kWeights>;
  using SlopeOf = SlopePiece<T, kWeights>;
  // Short rows of 16-bit types wait for latency more than for memory: they load d_y beside y.
  constexpr bool kAll = kWeights == Weights::softmax ||
                        (kGroup == Group::warp && sizeof(T) == 2 && kWeights != Weights::mask);
  // A piece of f32 can hold s in place of y: an accurate power is not computed twice.
  constexpr bool kInPlace = kWeights == Weights::power && sizeof(T) == 4;
  constexpr Weights kHeld = kInPlace ? Weights::softmax : kWeights;
  __shared__ Sums<R> scratch[kGroup == Group::block ? kWarpSize : 1];
  const PieceRow<T, kWeights> row(p, place);
  const PieceRange<T, kWeights> range(row, 0, row.pieces);

  typename SlopeOf::Data data[kVectors];
  Piece d_y[kVectors];
  bool active[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int piece = thread + j * threads;
    active[j] = piece < range.count;
    if (active[j]) {
      data[j] = range.load_slope(piece, Drop());
      if constexpr (kAll) d_y[j] = range.load_d_y(piece, Drop());
    }
  }
  const bool has_edge = thread < row.edge;
  const int64_t edge_at = row.edge_at(thread) - row.head;
  R edge_s = 0, edge_d_y = 0;
  if (has_edge) {
    edge_s = range.template slope_at<R>(edge_at, place.alpha);
    edge_d_y = static_cast<R>(to_real(range.d_y[edge_at]));
  }
  if constexpr (!kAll) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      active[j] = active[j] && SlopeOf::any(data[j]);
      if (active[j]) d_y[j] = range.load_d_y(thread + j * threads, Drop());
    }
  }

  if (place.nan) return fill_nan(row, thread, threads);

  Sums<R> sums;
  if (has_edge) add(sums, edge_s, edge_d_y);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (!active[j]) continue;
    if constexpr (kInPlace) {
#pragma unroll
      for (uint32_t& word : data[j].element) {
        word = __float_as_uint(slope<T, kWeights>(__uint_as_float(word), place.alpha));
      }
    }
    add_piece<T, kHeld>(sums, data[j], d_y[j], place.alpha);
  }
  if constexpr (kGroup == Group::warp) {
    sums = {warp_sum(sums.s), warp_sum(sums.s_d_y)};
  } else {
    sums = block_sum(sums, scratch);
  }
  const R mean = sums.s_d_y / sums.s;

#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int piece = thread + j * threads;
    if (piece >= range.count) continue;
    Piece d_x{};
    if (active[j]) d_x = gradient_piece<T, kHeld>(data[j], d_y[j], mean, place.alpha);
    range.store(piece, d_x);
  }
  if (has_edge)
    range.d_x[edge_at] = from_real<T>(static_cast<Real<T>>(gradient(edge_s, edge_d_y, mean)));
}

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
  with_weights_of_row<T, kWeights>(place, [&]<Weights kOfRow>() {
    registers_row<T, kOfRow, kVectors, kGroup>(p, place, thread, threads);
  });
}

}  // namespace pullback::entmax

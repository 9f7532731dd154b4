// The gradients of the added terms: ds = y (d_y − δ), summed over whatever the term broadcasts, in
// a fixed order. δ of every row is in the workspace.
//   plane_gradient   d_rpe and d_attn_mask: a thread sums a piece of a row of the gradient
//   column_partial   d_key_padding_mask: a thread block sums the rows of a few blocks of one
//   column_gradient  column, and a thread adds up the partial sums of its column
// kWidth is 1, or the length of a 16-byte vector: then rows are contiguous and aligned.
#pragma once

#include "device/float.cuh"
#include "ops/block_softmax/cuda/params.cuh"
#include "ops/block_softmax/cuda/smxx_piece.cuh"
#include "ops/block_softmax/cuda/tuning.hpp"

namespace pullback::block_softmax {

using namespace device;

// Adds ds of some neighbouring columns of one row; 0 where y is 0, whatever d_y is.
template <class T, int kWidth>
void add_score_gradients(Real<T> (&sums)[kWidth], const BlockTensor& y, const BlockTensor& d_y,
                         int64_t batch, int64_t rank, int32_t row, int32_t column, Real<T> delta) {
  using R = Real<T>;
  const auto piece_of = [&](const BlockTensor& tensor) {
    return load_piece<T, kWidth>(static_cast<const T*>(tensor.data) + batch * tensor.batch +
                                 rank * tensor.rank + row * tensor.row + column * tensor.column);
  };
  const Piece<T, kWidth> weights = piece_of(y), gradients = piece_of(d_y);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const R weight = to_real(weights.element[e]);
    const R ds = weight * (to_real(gradients.element[e]) - delta);
    sums[e] += weight == R{0} ? R{0} : ds;
  }
}

// The rank of the row's block at `column`, or -1. A row's columns increase.
inline int64_t find_rank(const BlockRow& block_row, const int32_t* columns, int32_t column) {
  const int32_t* const mine = columns + block_row.first_rank;
  int32_t low = 0, high = block_row.blocks;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (mine[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < block_row.blocks && mine[low] == column ? block_row.first_rank + low : -1;
}

template <class T, int kWidth>
void plane_gradient(const PlaneGradientParams& p) {
  using R = Real<T>;
  const int64_t heads = p.per_head ? p.heads : 1;
  const auto pieces = static_cast<uint32_t>(p.block_columns) * (p.block / kWidth);  // of a row
  const uint32_t all = pieces * p.block;  // of a block row
  // A thread block takes pieces of one block row.
  const uint32_t parts = (all + kThreads - 1) / kThreads;
  const int64_t block_row_and_plane = blockIdx.x / parts;
  const uint32_t item = (blockIdx.x - block_row_and_plane * parts) * kThreads + threadIdx.x;
  if (item >= all) return;
  const int64_t plane = block_row_and_plane / p.block_rows_per_head;
  const int64_t block_row = block_row_and_plane - plane * p.block_rows_per_head;
  const int64_t plane_batch = plane / heads, plane_head = plane - plane_batch * heads;
  const auto row = static_cast<int32_t>(item / pieces);
  const auto plane_column = static_cast<int32_t>((item - row * pieces) * kWidth);
  const int32_t block_column = plane_column / p.block;
  const int32_t column = plane_column - block_column * p.block;
  const R* const deltas = static_cast<const R*>(p.delta);

  R sums[kWidth] = {};
  const int64_t head_end = p.per_head ? plane_head + 1 : p.heads;
  const int64_t batch_end = p.per_batch ? plane_batch + 1 : p.batches;
  for (int64_t head = plane_head; head < head_end; ++head) {
    const int64_t index = head * p.block_rows_per_head + block_row;
    const int64_t rank = find_rank(p.block_rows[index], p.columns, block_column);
    if (rank < 0) continue;
#pragma unroll 2
    for (int64_t batch = plane_batch; batch < batch_end; ++batch) {
      add_score_gradients<T>(sums, p.y, p.d_y, batch, rank, row, column,
                             deltas[batch * p.delta_batch + index * p.block + row]);
    }
  }
  T* const to = static_cast<T*>(p.gradient) + plane_batch * p.batch + plane_head * p.head +
                (block_row * p.block + row) * p.row + plane_column * p.column;
  Piece<T, kWidth> piece;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) piece.element[e] = from_real<T>(sums[e]);
  store_piece(to, piece);
}

template <class T, int kWidth>
void column_partial(const ColumnGradientParams& p) {
  using R = Real<T>;
  __shared__ R shared[kThreads * kWidth];  // [groups, block]
  const int32_t lanes = p.block / kWidth;
  const int32_t groups = kThreads / lanes;  // of threads: each takes every groups-th row
  const int32_t group = static_cast<int32_t>(threadIdx.x) / lanes;
  const int32_t column = (static_cast<int32_t>(threadIdx.x) - group * lanes) * kWidth;
  const R* const deltas = static_cast<const R*>(p.delta);

  for (int64_t item = blockIdx.x; item < p.batches * p.chunk_count; item += gridDim.x) {
    const int64_t batch = item / p.chunk_count;
    const ColumnChunk chunk = p.chunks[item - batch * p.chunk_count];
    R sums[kWidth] = {};
    if (group < groups) {
      for (int32_t k = 0; k < chunk.blocks; ++k) {
        const ColumnBlock block = p.blocks[chunk.first + k];
        const R* const delta =
            deltas + batch * p.delta_batch + static_cast<int64_t>(block.index) * p.block;
#pragma unroll 4
        for (int32_t row = group; row < p.block; row += groups) {
          add_score_gradients<T>(sums, p.y, p.d_y, batch, block.rank, row, column, delta[row]);
        }
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) shared[group * p.block + column + e] = sums[e];
    }
    __syncthreads();
    if (static_cast<int32_t>(threadIdx.x) < p.block) {
      R sum = 0;
      for (int32_t g = 0; g < groups; ++g) sum += shared[g * p.block + threadIdx.x];
      static_cast<R*>(p.partial)[item * p.block + threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

template <class T>
void column_gradient(const ColumnGradientParams& p) {
  using R = Real<T>;
  const int64_t columns = p.block_columns * p.block;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       item < p.batches * columns; item += step) {
    const int64_t batch = item / columns, column = item - batch * columns;
    const int64_t block_column = column / p.block;
    const R* const partial = static_cast<const R*>(p.partial) + batch * p.chunk_count * p.block +
                             (column - block_column * p.block);
    R sum = 0;
    for (int64_t chunk = p.first_chunk[block_column]; chunk < p.first_chunk[block_column + 1];
         ++chunk) {
      sum += partial[chunk * p.block];
    }
    static_cast<T*>(p.gradient)[batch * p.batch + column * p.column] = from_real<T>(sum);
  }
}

}  // namespace pullback::block_softmax

// The gradients of the added terms: ds = y (d_y − δ), summed over whatever the term broadcasts, in
// a fixed order. δ of every row is in the workspace.
//   plane_gradient   d_rpe and d_attn_mask: a thread block sums kStripRows rows of one block's
//   place column_partial   d_key_padding_mask: a thread block sums the rows of a few blocks of one
//   column, column_gradient  and a thread adds up the partial sums of its column
#pragma once

#include "device/float.cuh"
#include "ops/block_softmax/cuda/params.cuh"
#include "ops/block_softmax/cuda/tuning.hpp"

namespace pullback::block_softmax {

using namespace device;

// ds of element (rank, row, column); 0 where y is 0, whatever d_y is.
template <class T>
Real<T> score_gradient(const BlockTensor& y, const BlockTensor& d_y, int64_t batch, int64_t rank,
                       int32_t row, int32_t column, Real<T> delta) {
  using R = Real<T>;
  const R weight = to_real(static_cast<const T*>(
      y.data)[batch * y.batch + rank * y.rank + row * y.row + column * y.column]);
  if (weight == R{0}) return R{0};
  return weight * (to_real(static_cast<const T*>(d_y.data)[batch * d_y.batch + rank * d_y.rank +
                                                           row * d_y.row + column * d_y.column]) -
                   delta);
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

template <class T>
void plane_gradient(const PlaneGradientParams& p) {
  using R = Real<T>;
  constexpr int kSums = kStripRows * kMaxBlock / kThreads;
  const int64_t strips = p.block / kStripRows;
  const int64_t heads = p.per_head ? p.heads : 1, batches = p.per_batch ? p.batches : 1;
  const int64_t tiles = batches * heads * p.block_rows_per_head * strips * p.block_columns;
  const R* const deltas = static_cast<const R*>(p.delta);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int64_t rest = tile / p.block_columns;
    const int32_t block_column = static_cast<int32_t>(tile - rest * p.block_columns);
    const int32_t first_row = static_cast<int32_t>(rest % strips) * kStripRows;
    rest /= strips;
    const int64_t block_row = rest % p.block_rows_per_head;
    rest /= p.block_rows_per_head;
    const int64_t plane_head = rest % heads, plane_batch = rest / heads;

    R sums[kSums] = {};
    const int64_t head_end = p.per_head ? plane_head + 1 : p.heads;
    const int64_t batch_end = p.per_batch ? plane_batch + 1 : p.batches;
    for (int64_t head = plane_head; head < head_end; ++head) {
      const int64_t index = head * p.block_rows_per_head + block_row;
      const int64_t rank = find_rank(p.block_rows[index], p.columns, block_column);
      if (rank < 0) continue;
      for (int64_t batch = plane_batch; batch < batch_end; ++batch) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
          const int32_t element = s * kThreads + static_cast<int32_t>(threadIdx.x);
          if (element >= kStripRows * p.block) break;
          const int32_t row = first_row + element / p.block, column = element % p.block;
          sums[s] += score_gradient<T>(p.y, p.d_y, batch, rank, row, column,
                                       deltas[batch * p.delta_batch + index * p.block + row]);
        }
      }
    }
    T* const to = static_cast<T*>(p.gradient) + plane_batch * p.batch + plane_head * p.head;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const int32_t element = s * kThreads + static_cast<int32_t>(threadIdx.x);
      if (element >= kStripRows * p.block) break;
      const int64_t row = block_row * p.block + first_row + element / p.block;
      const int64_t column = static_cast<int64_t>(block_column) * p.block + element % p.block;
      to[row * p.row + column * p.column] = from_real<T>(sums[s]);
    }
  }
}

template <class T>
void column_partial(const ColumnGradientParams& p) {
  using R = Real<T>;
  __shared__ R shared[kThreads];
  const int32_t groups = kThreads / p.block;  // of threads: each takes every groups-th row
  const int32_t group = static_cast<int32_t>(threadIdx.x) / p.block;
  const int32_t column = static_cast<int32_t>(threadIdx.x) % p.block;
  const R* const deltas = static_cast<const R*>(p.delta);

  for (int64_t item = blockIdx.x; item < p.batches * p.chunk_count; item += gridDim.x) {
    const int64_t batch = item / p.chunk_count;
    const ColumnChunk chunk = p.chunks[item - batch * p.chunk_count];
    R sum = 0;
    if (group < groups) {
      for (int32_t k = 0; k < chunk.blocks; ++k) {
        const ColumnBlock block = p.blocks[chunk.first + k];
        const R* const delta =
            deltas + batch * p.delta_batch + static_cast<int64_t>(block.index) * p.block;
        for (int32_t row = group; row < p.block; row += groups) {
          sum += score_gradient<T>(p.y, p.d_y, batch, block.rank, row, column, delta[row]);
        }
      }
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0) {
      for (int32_t g = 1; g < groups; ++g) sum += shared[g * p.block + column];
      static_cast<R*>(p.partial)[item * p.block + column] = sum;
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

// out = op(S) · in on tensor cores, for bf16 and f16.
//
// A thread block computes kGroupRows rows by kColumns columns. Step by step the tiles of S and the
// rows of `in` that they meet stream through shared memory; a warp holds sums of 32 rows by half of
// the columns and leaves out, 16 by 16, what no tile covers. S is read once for each column tile,
// and `in` once for all rows of the group that share a tile column.
#pragma once

#include "device/memory.cuh"
#include "ops/block_matmul/cuda/smxx_steps.cuh"

namespace pullback::block_matmul {

inline constexpr int kSpreadSparseBytes = 2 * kGroupRows * kStepColumns;

// Asks for the operands of a step: tiles of S, then of `in`. kAlong: neighbours in memory lie along
// the sum's dimension.
template <class T, int kColumns, bool kSparseAlong, bool kInAlong>
void load_spread_stage(uint32_t stage, const SpreadParams& p, const StepTables& tables, int step,
                       const T* sparse, const T* in, int64_t first_column) {
  using Layout = TileLayout<T, kTileRow>;
  constexpr int kDown = kThreads / 8;
  const int chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll 2
  for (int i = 0; i < kGroupRows / kDown; ++i) {
    const int tile_row = static_cast<int>(threadIdx.x) / 8 + i * kDown;
    const int across = tile_row / kStepColumns * kTileRow + chunk * kChunk;
    const int row = kSparseAlong ? tile_row : across;
    const int k = kSparseAlong ? chunk * kChunk : tile_row % kStepColumns;
    const int64_t offset = tables.offset(step, row, k);
    if (offset != kNoTile) {
      const int64_t inside = kSparseAlong ? tables.inside(row) * p.sparse.row + tables.inside(k)
                                          : tables.inside(row) + tables.inside(k) * p.sparse.column;
      async_copy_or_zero(stage + Layout::offset(tile_row, chunk), sparse + offset + inside, 16);
    }
  }
#pragma unroll 2
  for (int i = 0; i < kColumns / kDown; ++i) {
    const int tile_row = static_cast<int>(threadIdx.x) / 8 + i * kDown;
    const int across = tile_row / kStepColumns * kTileRow + chunk * kChunk;
    const int k = kInAlong ? chunk * kChunk : tile_row % kStepColumns;
    const int64_t row = tables.column(step, k);
    const int64_t column = first_column + (kInAlong ? tile_row : across);
    if (row >= 0 && column < p.in.columns) {
      const int64_t offset = kInAlong ? row + column * p.in.column : row * p.in.row + column;
      async_copy_or_zero(stage + kSpreadSparseBytes + Layout::offset(tile_row, chunk), in + offset,
                         kInAlong ? 16 : clamp_bytes(p.in.columns - column));
    }
  }
}

// sums += S · in of one step, for a warp's 32 rows by kColumns / 2 columns.
template <class T, int kColumns, bool kSparseAlong, bool kInAlong>
void multiply_spread_stage(float (&sums)[2][kColumns / 16][4], uint32_t stage, uint32_t mask,
                           int first_row, int first_column) {
#pragma unroll
  for (int k = 0; k < kStepColumns; k += 16) {
    const uint32_t present = mask >> (k / 16 * 8 + first_row / 16) & 3;
    if (present == 0) continue;
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if ((present >> m & 1) == 0) continue;
      load_left<T, kSparseAlong, kSparseAlong ? kGroupRows : kStepColumns>(a[m], stage,
                                                                           first_row + m * 16, k);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; n += 2) {
      uint32_t b[4];
      load_right<T, kInAlong, kInAlong ? kColumns : kStepColumns>(b, stage + kSpreadSparseBytes, k,
                                                                  first_column + n * 8);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if ((present >> m & 1) == 0) continue;
        mma_16816<T>(sums[m][n], a[m], b[0], b[1]);
        mma_16816<T>(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Rounds the group's rows of sums in shared memory into out.
template <class T, int kColumns, int kStride>
void store_group(const SpreadParams& p, const float* sums, T* out, int64_t rows, int64_t columns) {
  if (p.vectors == 0) {
    for (int i = threadIdx.x; i < kGroupRows * kColumns; i += kThreads) {
      const int row = i / kColumns, column = i % kColumns;
      if (row < rows && column < columns) {
        out[row * p.out.row + column * p.out.column] = from_real<T>(sums[row * kStride + column]);
      }
    }
    return;
  }
  // Vectors lie along the dimension of neighbours in memory.
  const bool along_rows = p.out.column == 1;
  const int64_t lines = along_rows ? rows : columns, length = along_rows ? columns : rows;
  const int per_line = (along_rows ? kColumns : kGroupRows) / kChunk;
  const int line_step = along_rows ? kStride : 1, step = along_rows ? 1 : kStride;
  const int64_t out_line = along_rows ? p.out.row : p.out.column;
  for (int i = threadIdx.x; i < kGroupRows * kColumns / kChunk; i += kThreads) {
    const int line = i / per_line, at = i % per_line * kChunk;
    if (line >= lines || at >= length) continue;
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      vector.element[e] = from_real<T>(sums[line * line_step + (at + e) * step]);
    }
    T* to = out + line * out_line + at;
    if (at + kChunk <= length) {
      store_vector(to, vector);
    } else {
      for (int e = 0; e < length - at; ++e) to[e] = vector.element[e];
    }
  }
}

template <class T, int kColumns, bool kSparseAlong, bool kInAlong>
void spread_tiles(const SpreadParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr uint32_t kStageBytes = kSpreadSparseBytes + 2 * kStepColumns * kColumns;
  const int64_t item_index = blockIdx.x / p.column_tiles;
  const int column_tile = static_cast<int>(blockIdx.x % p.column_tiles);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kColumns;
  const Item item = p.steps.items[item_index];
  StepTables tables(shared, p.steps.tile_shift);
  tables.load(p.steps, item);
  const uint32_t stages = shared_address(shared + kTableBytes);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % 4 * kWarpRows, warp_column = warp / 4 * (kColumns / 2);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* sparse = static_cast<const T*>(p.sparse.data) + batch * p.sparse.batch;
    const T* in = static_cast<const T*>(p.in.data) + batch * p.in.batch + item.head * p.in.head;
    const auto load = [&](int step) {
      if (step < item.steps) {
        load_spread_stage<T, kColumns, kSparseAlong, kInAlong>(
            stages + step % kStages * kStageBytes, p, tables, step, sparse, in, first_column);
      }
      async_commit();
    };
    float sums[2][kColumns / 16][4] = {};
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) load(step);
    for (int step = 0; step < item.steps; ++step) {
      async_wait<kStages - 2>();
      __syncthreads();
      load(step + kStages - 1);
      multiply_spread_stage<T, kColumns, kSparseAlong, kInAlong>(
          sums, stages + step % kStages * kStageBytes, tables.masks[step], warp_row, warp_column);
    }
    async_wait<0>();
    __syncthreads();

    // A stride that spreads the quads of a warp over the banks.
    constexpr int kStride = kColumns + 8;
    float* staged = reinterpret_cast<float*>(shared + kTableBytes);
    static_assert(kGroupRows * kStride * 4 <= kStages * kStageBytes);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + m * 16 + half * 8 + lane / 4;
          const int column = warp_column + n * 8 + lane % 4 * 2;
          staged[row * kStride + column] = sums[m][n][half * 2];
          staged[row * kStride + column + 1] = sums[m][n][half * 2 + 1];
        }
      }
    }
    __syncthreads();
    if (item.slot >= 0) {
      float* partial = static_cast<float*>(p.partial) +
                       ((item.slot * p.batches + batch) * p.column_tiles + column_tile) *
                           (kGroupRows * kColumns);
      for (int i = threadIdx.x; i < kGroupRows * kColumns; i += kThreads) {
        partial[i] = staged[i / kColumns * kStride + i % kColumns];
      }
    } else {
      T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + item.head * p.out.head +
               item.first_row * p.out.row + first_column * p.out.column;
      store_group<T, kColumns, kStride>(p, staged, out, p.out.rows - item.first_row,
                                        p.out.columns - first_column);
    }
    __syncthreads();
  }
}

}  // namespace pullback::block_matmul

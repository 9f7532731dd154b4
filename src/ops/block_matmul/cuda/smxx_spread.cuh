// out = op(S) · in on tensor cores, for bf16 and f16.
//
// A thread block computes kGroupRows rows by kColumns columns. Step by step the tiles of S and the
// rows of `in` that they meet stream through shared memory; a warp holds the sums of 32 rows and
// leaves out, 16 by 16, what no tile covers. S is read once for each column tile, and `in` once for
// all rows of the group that share a tile column.
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
  constexpr int kLeftRows = kSparseAlong ? kGroupRows : kStepColumns;
  constexpr int kRightRows = kInAlong ? kColumns : kStepColumns;
  const int column_tile = static_cast<int>(blockIdx.x % p.column_tiles);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kColumns;
  const Item item = p.steps.items[blockIdx.x / p.column_tiles];
  StepTables tables(shared + spread_operand_bytes(kColumns), p.steps.tile_shift);
  tables.load(p.steps, item);
  const uint32_t stages = shared_address(shared);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* sparse = static_cast<const T*>(p.sparse.data) + batch * p.sparse.batch;
    const T* in = static_cast<const T*>(p.in.data) + batch * p.in.batch + item.head * p.in.head;
    const auto load = [&](int step) {
      if (step < item.steps) {
        load_spread_stage<T, kColumns, kSparseAlong, kInAlong>(
            stages + step % kSpreadStages * kStageBytes, p, tables, step, sparse, in, first_column);
      }
      async_commit();
    };
    float sums[2][kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSpreadStages - 1; ++step) load(step);
    for (int step = 0; step < item.steps; ++step) {
      async_wait<kSpreadStages - 2>();
      __syncthreads();
      load(step + kSpreadStages - 1);
      const uint32_t stage = stages + step % kSpreadStages * kStageBytes;
      // Bit m + 8 k: rows from 16 m on of the warp by columns from 16 k on of the step.
      const uint32_t present = tables.masks[step] >> warp_row / 16 & 0x03030303;
      if (present == 0x03030303) {
        multiply_tiles<T, kColumns, kStepColumns, kSparseAlong, kLeftRows, kInAlong, kRightRows>(
            sums, stage, stage + kSpreadSparseBytes, warp_row);
      } else if (present != 0) {
        multiply_covered_tiles<T, kColumns, kStepColumns, kSparseAlong, kLeftRows, kInAlong,
                               kRightRows>(
            sums, stage, stage + kSpreadSparseBytes, warp_row,
            [&](int m, int, int k) { return (present >> (8 * k + m) & 1) != 0; });
      }
    }
    async_wait<0>();
    __syncthreads();

    // A stride that spreads the quads of a warp over the banks.
    constexpr int kStride = kColumns + 8;
    float* staged = reinterpret_cast<float*>(shared);
    static_assert(kGroupRows * kStride * 4 <= spread_operand_bytes(kColumns));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + m * 16 + half * 8 + lane / 4;
          float* to = staged + row * kStride + n * 8 + lane % 4 * 2;
          to[0] = sums[m][n][half * 2];
          to[1] = sums[m][n][half * 2 + 1];
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

// out = op(S) · in on tensor cores, for f32, bf16 and f16.
//
// A thread block computes kGroupRows rows by kColumns columns. Step by step the squares of S and
// the rows of `in` that they meet stream through shared memory; a warp holds the sums of 32 rows
// and leaves out squares that are not there. S is read once for each column tile, and `in` once for
// all rows of the group that share a column.
#pragma once

#include "device/dependent.cuh"
#include "device/memory.cuh"
#include "ops/block_matmul/cuda/smxx_steps.cuh"

namespace pullback::block_matmul {

inline constexpr int kSpreadSparseBytes = kGroupRows * kTileRowBytes;

// Asks for the operands of a stage, the columns from `first_k` on of a step: squares of S, then
// lines of `in`. kAlong: neighbours in memory lie along the sum's dimension. All tables are read
// before the first copy, for nothing is read ahead of one.
template <class T, int kColumns, bool kSparseAlong, bool kInAlong>
void load_spread_stage(uint32_t stage, const SpreadParams& p, const StepTables& tables, int step,
                       int first_k, const T* sparse, const T* in, int64_t columns) {
  constexpr int kRow = kTileRow<T>, kDown = kThreads / 8, kSquares = kGroupRows / kDown;
  static_assert(kDown == 16);
  const int thread_row = static_cast<int>(threadIdx.x) / 8;
  const int neighbour = static_cast<int>(threadIdx.x) % 8 * kChunk<T>;
  const uint32_t to = stage + Layout<T>::offset(thread_row, threadIdx.x % 8);
  // Of tile row thread_row + 16 i: its place beside, and its row within, the tile.
  const auto across = [&](int i) { return i * kDown / kRow * kRow + neighbour; };
  const auto down = [&](int i) { return thread_row + i * kDown % kRow; };

  int64_t squares[kSquares], lines[kInAlong ? 1 : kRow / 16];
#pragma unroll
  for (int i = 0; i < kSquares; ++i) {
    squares[i] = kSparseAlong ? tables.square(step, i * kDown, first_k + neighbour)
                              : tables.square(step, across(i), first_k + down(i));
  }
#pragma unroll
  for (int i = 0; i < (kInAlong ? 1 : kRow / 16); ++i) {
    lines[i] = tables.line(step, first_k + (kInAlong ? neighbour : i * 16));
  }
  const T* const square = sparse + (kSparseAlong ? thread_row * p.sparse.row + neighbour % 16
                                                 : neighbour % 16 + thread_row * p.sparse.column);
#pragma unroll
  for (int i = 0; i < kSquares; ++i) {
    if (squares[i] != kNowhere) {
      async_copy_or_zero(to + i * kDown * kTileRowBytes, square + squares[i], true);
    }
  }
  const uint32_t to_in = to + kSpreadSparseBytes;
  if constexpr (kInAlong) {
    if (lines[0] == kNowhere) return;
    const T* from = in + lines[0] + neighbour % 16 + thread_row * p.in.column;
#pragma unroll
    for (int i = 0; i < kColumns / kDown; ++i) {
      if (thread_row + i * kDown < columns) {
        async_copy_or_zero(to_in + i * kDown * kTileRowBytes, from + i * kDown * p.in.column, true);
      }
    }
  } else {
    const T* const from = in + thread_row * p.in.row;
#pragma unroll
    for (int i = 0; i < kColumns / kDown; ++i) {
      const int64_t line = lines[i % (kRow / 16)];
      if (line != kNowhere && across(i) < columns) {
        async_copy_padded(to_in + i * kDown * kTileRowBytes, from + line + across(i),
                          clamp_bytes<T>(columns - across(i)));
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
  const int per_line = (along_rows ? kColumns : kGroupRows) / kChunk<T>;
  const int line_step = along_rows ? kStride : 1, step = along_rows ? 1 : kStride;
  const int64_t out_line = along_rows ? p.out.row : p.out.column;
  for (int i = threadIdx.x; i < kGroupRows * kColumns / kChunk<T>; i += kThreads) {
    const int line = i / per_line, at = i % per_line * kChunk<T>;
    if (line >= lines || at >= length) continue;
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < kChunk<T>; ++e) {
      vector.element[e] = from_real<T>(sums[line * line_step + (at + e) * step]);
    }
    T* to = out + line * out_line + at;
    if (at + kChunk<T> <= length) {
      store_vector(to, vector);
    } else {
      for (int e = 0; e < length - at; ++e) to[e] = vector.element[e];
    }
  }
}

template <class T, int kColumns, int kStages, bool kSparseAlong, bool kInAlong>
void spread_tiles(const SpreadParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr uint32_t kStageBytes = kSpreadSparseBytes + kColumns * kTileRowBytes;
  // A stage is as deep as a row of a tile.
  constexpr int kDepth = kTileRow<T>, kPieces = kStepColumns / kDepth;
  constexpr int kLeftRows = kSparseAlong ? kGroupRows : kDepth;
  constexpr int kRightRows = kInAlong ? kColumns : kDepth;
  allow_next_kernel();
  const int column_tile = static_cast<int>(blockIdx.x % p.column_tiles);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kColumns;
  const Turn turn = turn_of(p.steps, blockIdx.x / p.column_tiles, p.batches);
  const Item item = p.steps.items[turn.item];
  const int64_t batch = turn.batch;
  StepTables tables(shared + spread_operand_bytes(kColumns, kStages));
  tables.load(p.steps, item);
  const uint32_t stages = shared_address(shared);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const T* sparse = static_cast<const T*>(p.sparse.data) + batch * p.sparse.batch;
  const T* in = static_cast<const T*>(p.in.data) + batch * p.in.batch + item.head * p.in.head +
                first_column * p.in.column;
  const int pieces = item.steps * kPieces;
  const auto load = [&](int piece) {
    if (piece < pieces) {
      load_spread_stage<T, kColumns, kSparseAlong, kInAlong>(
          stages + piece % kStages * kStageBytes, p, tables, piece / kPieces,
          piece % kPieces * kDepth, sparse, in, p.in.columns - first_column);
    }
    async_commit();
  };
  float sums[2][kColumns / 8][4] = {};
#pragma unroll
  for (int piece = 0; piece < kStages - 1; ++piece) load(piece);
  for (int piece = 0; piece < pieces; ++piece) {
    async_wait<kStages - 2>();
    __syncthreads();
    load(piece + kStages - 1);
    const uint32_t sparse_tile = stages + piece % kStages * kStageBytes;
    const uint32_t in_tile = sparse_tile + kSpreadSparseBytes;
    // Bit m + 8 k: rows from 16 m on of the warp by columns from 16 k on of the piece.
    constexpr uint32_t kAll = kPieces == 1 ? 0x03030303 : 0x0303;
    const uint32_t present =
        tables.masks[piece / kPieces] >> (piece % kPieces * (kDepth / 16 * 8) + warp_row / 16) &
        kAll;
    if (present == kAll && sizeof(T) == 2) {
      if constexpr (sizeof(T) == 2) {
        multiply_tiles<T, kColumns, kDepth, kSparseAlong, kLeftRows, kInAlong, kRightRows>(
            sums, sparse_tile, in_tile, warp_row);
      }
    } else if (present != 0) {
      multiply_covered_tiles<T, kColumns, kDepth, kSparseAlong, kLeftRows, kInAlong, kRightRows>(
          sums, sparse_tile, in_tile, warp_row,
          [&](int m, int, int k) { return (present >> (8 * k + m) & 1) != 0; });
    }
  }
  async_wait<0>();
  __syncthreads();

  // A stride that spreads the quads of a warp over the banks.
  constexpr int kStride = kColumns + 8;
  float* staged = reinterpret_cast<float*>(shared);
  static_assert(kGroupRows * kStride * 4 <= spread_operand_bytes(kColumns, kStages));
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
    float* partial =
        static_cast<float*>(p.partial) +
        ((item.slot * p.batches + batch) * p.column_tiles + column_tile) * (kGroupRows * kColumns);
    for (int i = threadIdx.x; i < kGroupRows * kColumns; i += kThreads) {
      partial[i] = staged[i / kColumns * kStride + i % kColumns];
    }
  } else {
    T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + item.head * p.out.head +
             item.first_row * p.out.row + first_column * p.out.column;
    store_group<T, kColumns, kStride>(p, staged, out, p.out.rows - item.first_row,
                                      p.out.columns - first_column);
  }
}

}  // namespace pullback::block_matmul

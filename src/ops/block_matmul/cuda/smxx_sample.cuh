// S = left · right at the tiles of S, on tensor cores, for bf16 and f16.
//
// A thread block takes a group of rows: the rows of `left` stay in shared memory while the columns
// of `right` pass through, kStepColumns a step. With kDepth 0 the sum is longer than fits, and both
// pass through in pieces of kStepColumns of it. A warp holds sums of 32 rows by a step's columns,
// leaves out, 16 by 16, what no tile covers, and writes the rest through a buffer of its own, whole
// lines of a tile at a time.
#pragma once

#include "device/memory.cuh"
#include "ops/block_matmul/cuda/smxx_steps.cuh"

namespace pullback::block_matmul {

// Asks for kLines rows of `left` or columns of `right` by kDepth of the sum from `first` on, both
// zero past their ends. `line_of(i)` is the place of line i, negative if it is nowhere.
template <class T, int kLines, int kDepth, bool kAlong, class LineOf>
void load_lines(uint32_t tiles, const T* from, LineOf line_of, int64_t lines, int64_t line_step,
                int64_t first, int64_t depth, int64_t depth_step) {
  using Layout = TileLayout<T, kTileRow>;
  constexpr int kTileRows = kAlong ? kLines : kDepth;
  constexpr int kDown = kThreads / 8;
  const int chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
  for (int i = 0; i < kLines * kDepth / kTileRow / kDown; ++i) {
    const int tile_row = static_cast<int>(threadIdx.x) / 8 + i * kDown;
    const int neighbour = tile_row / kTileRows * kTileRow + chunk * kChunk;
    const int64_t line = line_of(kAlong ? tile_row % kTileRows : neighbour);
    const int64_t k = first + (kAlong ? neighbour : tile_row % kTileRows);
    const bool inside = line >= 0 && line < lines && k < depth;
    const int64_t offset = kAlong ? line * line_step + k : line + k * depth_step;
    async_copy_or_zero(tiles + Layout::offset(tile_row, chunk), inside ? from + offset : from,
                       inside ? clamp_bytes(kAlong ? depth - k : lines - line) : 0);
  }
}

// Writes 16 rows of a warp's sums to the tiles that they belong to, and clears them.
template <class T>
void store_rows(float (&sums)[8][4], const SampleParams& p, const StepTables& tables, int step,
                int first_row, T* sparse, uint32_t staging) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared(staging + (half * 8 + lane / 4) * kStagingRow + n * 16 + lane % 4 * 4,
                   pack<T>(sums[n][2 * half], sums[n][2 * half + 1]));
      sums[n][2 * half] = sums[n][2 * half + 1] = 0;
    }
  }
  __syncwarp();
  const int column = lane % 8 * kChunk;
  // Sixteen rows lie in one tile.
  const int64_t offset = tables.offset(step, first_row, column);
  if (offset != kNoTile) {
    T* to = sparse + offset + tables.inside(column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      union {
        uint32_t word[4];
        Vector<T> vector;
      } piece;
      load_shared(piece.word, staging + row * kStagingRow + column * 2);
      store_vector(to + tables.inside(first_row + row) * p.sparse.row, piece.vector);
    }
  }
  __syncwarp();
}

template <class T, int kDepth, bool kLeftAlong, bool kRightAlong>
void sample_tiles(const SampleParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr bool kStays = kDepth > 0;
  constexpr int kPiece = kStays ? kDepth : kStepColumns;
  constexpr int kLeftRows = kLeftAlong ? kGroupRows : kPiece;
  constexpr int kRightRows = kRightAlong ? kStepColumns : kPiece;
  constexpr uint32_t kLeftBytes = 2 * kGroupRows * kPiece;
  constexpr uint32_t kRightBytes = 2 * kStepColumns * kPiece;
  constexpr uint32_t kStageBytes = kStays ? kRightBytes : kLeftBytes + kRightBytes;
  const Item item = p.steps.items[blockIdx.x];
  StepTables tables(shared + sample_operand_bytes(kDepth) + kStagingBytes, p.steps.tile_shift);
  tables.load(p.steps, item);
  const uint32_t left_tiles = shared_address(shared);
  const uint32_t stages = left_tiles + (kStays ? kLeftBytes : 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_row = warp * kWarpRows;
  const uint32_t staging = left_tiles + sample_operand_bytes(kDepth) + warp * 16 * kStagingRow;
  const int64_t depth = p.left.columns;
  // At least one: without depth the tiles are zeros.
  const int pieces = kStays || depth == 0 ? 1 : static_cast<int>((depth + kPiece - 1) / kPiece);
  const int loads = item.steps * pieces;

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    T* sparse = static_cast<T*>(p.sparse.data) + batch * p.sparse.batch;
    const T* left =
        static_cast<const T*>(p.left.data) + batch * p.left.batch + item.head * p.left.head;
    const T* right =
        static_cast<const T*>(p.right.data) + batch * p.right.batch + item.head * p.right.head;
    const auto load_left_lines = [&](uint32_t to, int64_t first) {
      load_lines<T, kGroupRows, kPiece, kLeftAlong>(
          to, left, [&](int line) { return item.first_row + line; }, p.left.rows, p.left.row, first,
          depth, p.left.column);
    };
    int next_step = 0, next_piece = 0;
    const auto load = [&](int index) {
      if (index < loads) {
        const uint32_t stage = stages + index % kSampleStages * kStageBytes;
        const int64_t first = static_cast<int64_t>(next_piece) * kPiece;
        if constexpr (!kStays) load_left_lines(stage + kRightBytes, first);
        load_lines<T, kStepColumns, kPiece, kRightAlong>(
            stage, right, [&](int line) { return tables.column(next_step, line); }, p.right.columns,
            p.right.column, first, depth, p.right.row);
        if (++next_piece == pieces) {
          next_piece = 0;
          ++next_step;
        }
      }
      async_commit();
    };
    if constexpr (kStays) load_left_lines(left_tiles, 0);
#pragma unroll
    for (int index = 0; index < kSampleStages - 1; ++index) load(index);

    float sums[2][8][4] = {};
    int step = 0, piece = 0;
    for (int index = 0; index < loads; ++index) {
      async_wait<kSampleStages - 2>();
      __syncthreads();
      load(index + kSampleStages - 1);
      const uint32_t stage = stages + index % kSampleStages * kStageBytes;
      const uint32_t left_tile = kStays ? left_tiles : stage + kRightBytes;
      // Bit m + 8 n: rows from 16 m on of the warp by columns from 16 n on of the step.
      const uint32_t present = tables.masks[step] >> warp_row / 16 & 0x03030303;
      if (present == 0x03030303) {
        multiply_tiles<T, kStepColumns, kPiece, kLeftAlong, kLeftRows, kRightAlong, kRightRows>(
            sums, left_tile, stage, warp_row);
      } else if (present != 0) {
        multiply_covered_tiles<T, kStepColumns, kPiece, kLeftAlong, kLeftRows, kRightAlong,
                               kRightRows>(
            sums, left_tile, stage, warp_row,
            [&](int m, int n, int) { return (present >> (8 * n + m) & 1) != 0; });
      }
      if (++piece < pieces) continue;
      piece = 0;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if ((present >> m & 0x01010101) != 0) {
          store_rows<T>(sums[m], p, tables, step, warp_row + m * 16, sparse, staging);
        }
      }
      ++step;
    }
    async_wait<0>();
    __syncthreads();
  }
}

}  // namespace pullback::block_matmul

// S = left · right at the tiles of S, on tensor cores, for bf16 and f16.
//
// A thread block takes a group of rows: the rows of `left` stay in shared memory while the columns
// of `right` pass through, kStepColumns a step. With kDepth 0 the sum is longer than fits, and both
// pass through in pieces of kStepColumns of it. A warp holds sums of 32 rows by 32 columns, leaves
// out, 16 by 16, what no tile covers, and writes the rest through a buffer of its own.
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

template <class T, int kDepth, bool kLeftAlong, bool kRightAlong>
void sample_tiles(const SampleParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr bool kStays = kDepth > 0;
  constexpr int kPiece = kStays ? kDepth : kStepColumns;
  constexpr uint32_t kLeftBytes = 2 * kGroupRows * kPiece;
  constexpr uint32_t kRightBytes = 2 * kStepColumns * kPiece;
  constexpr uint32_t kStageBytes = kStays ? kRightBytes : kLeftBytes + kRightBytes;
  const Item item = p.steps.items[blockIdx.x];
  StepTables tables(shared, p.steps.tile_shift);
  tables.load(p.steps, item);
  const uint32_t left_tiles = shared_address(shared + kTableBytes);
  const uint32_t stages = left_tiles + (kStays ? kLeftBytes : 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % 4 * kWarpRows, warp_column = warp / 4 * 32;
  const uint32_t staging = stages + kStages * kStageBytes + warp * 16 * kStagingRow;
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
    int next_step = 0;
    int64_t next_k = 0;
    const auto load = [&](int index) {
      if (index < loads) {
        const uint32_t stage = stages + index % kStages * kStageBytes;
        if constexpr (!kStays) load_left_lines(stage + kRightBytes, next_k);
        const int step = next_step;
        load_lines<T, kStepColumns, kPiece, kRightAlong>(
            stage, right, [&](int line) { return tables.column(step, line); }, p.right.columns,
            p.right.column, next_k, depth, p.right.row);
        next_k += kPiece;
        if (next_k >= depth) {
          next_k = 0;
          ++next_step;
        }
      }
      async_commit();
    };
    if constexpr (kStays) load_left_lines(left_tiles, 0);
#pragma unroll
    for (int index = 0; index < kStages - 1; ++index) load(index);

    float sums[2][4][4] = {};
    int step = 0, piece = 0;
    for (int index = 0; index < loads; ++index) {
      async_wait<kStages - 2>();
      __syncthreads();
      load(index + kStages - 1);
      const uint32_t stage = stages + index % kStages * kStageBytes;
      const uint32_t left_tile = kStays ? left_tiles : stage + kRightBytes;
      // Bit m + 8 n: rows from 16 m on by columns from 16 n on, of the warp.
      const uint32_t present = tables.masks[step] >> (warp_column / 16 * 8 + warp_row / 16) & 0x303;
      if (present != 0) {
#pragma unroll
        for (int k = 0; k < kPiece; k += 16) {
          uint32_t a[2][4];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            load_left<T, kLeftAlong, kLeftAlong ? kGroupRows : kPiece>(a[m], left_tile,
                                                                       warp_row + m * 16, k);
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if ((present >> 8 * n & 3) == 0) continue;
            uint32_t b[4];
            load_right<T, kRightAlong, kRightAlong ? kStepColumns : kPiece>(b, stage, k,
                                                                            warp_column + n * 16);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              if ((present >> (8 * n + m) & 1) == 0) continue;
              mma_16816<T>(sums[m][2 * n], a[m], b[0], b[1]);
              mma_16816<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
      if (++piece < pieces) continue;
      piece = 0;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if ((present >> m & 0x101) != 0) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              store_shared(staging + (half * 8 + lane / 4) * kStagingRow + n * 16 + lane % 4 * 4,
                           pack<T>(sums[m][n][2 * half], sums[m][n][2 * half + 1]));
              sums[m][n][2 * half] = sums[m][n][2 * half + 1] = 0;
            }
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = i * 8 + lane / 4, column = lane % 4 * kChunk;
            const int group_row = warp_row + m * 16 + row, step_column = warp_column + column;
            const int64_t offset = tables.offset(step, group_row, step_column);
            if (offset != kNoTile) {
              union {
                uint32_t word[4];
                Vector<T> vector;
              } piece_of_row;
              load_shared(piece_of_row.word, staging + row * kStagingRow + column * 2);
              store_vector(sparse + offset + tables.inside(group_row) * p.sparse.row +
                               tables.inside(step_column),
                           piece_of_row.vector);
            }
          }
          __syncwarp();
        }
      }
      ++step;
    }
    async_wait<0>();
    __syncthreads();
  }
}

}  // namespace pullback::block_matmul

// S = left · right at the squares of S, on tensor cores, for f32, bf16 and f16.
//
// A thread block takes a group of rows: the rows of `left` stay in shared memory while the columns
// of `right` pass through, kStepColumns a step. With kDepth 0 the sum is longer than fits, and both
// pass through, a row of a tile of it at a time. A warp holds sums of 32 rows by a step's columns,
// leaves out squares that are not there, and writes the rest through a buffer of its own, whole
// lines at a time.
#pragma once

#include "device/memory.cuh"
#include "ops/block_matmul/cuda/smxx_steps.cuh"

namespace pullback::block_matmul {

// Asks for kLines rows of `left` or columns of `right` by kDepth of the sum from `first` on, which
// is zero past its end. line_of(i) is where line i begins, for multiples of 16 or of a chunk, or
// kNowhere.
template <class T, int kLines, int kDepth, bool kAlong, class LineOf>
void load_lines(uint32_t tiles, const T* from, LineOf line_of, int64_t line_step, int64_t first,
                int64_t depth, int64_t depth_step) {
  constexpr int kTileRows = kAlong ? kLines : kDepth, kDown = kThreads / 8;
  constexpr int kCopies = kLines * kDepth / kTileRow<T> / kDown;
  static_assert(kDown == 16);
  const int thread_row = static_cast<int>(threadIdx.x) / 8;
  const int neighbour = static_cast<int>(threadIdx.x) % 8 * kChunk<T>;
  const uint32_t to = tiles + Layout<T>::offset(thread_row, threadIdx.x % 8);
  const auto across = [&](int i) { return i * kDown / kTileRows * kTileRow<T> + neighbour; };
  const auto down = [&](int i) { return i * kDown % kTileRows; };

  int64_t lines[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) lines[i] = line_of(kAlong ? down(i) : across(i) / 16 * 16);
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    if (lines[i] == kNowhere) continue;
    const int64_t k = first + (kAlong ? across(i) : thread_row + down(i));
    const int64_t inside = kAlong ? thread_row * line_step + k : across(i) % 16 + k * depth_step;
    const int bytes = kAlong ? clamp_bytes<T>(depth - k) : k < depth ? 16 : 0;
    async_copy_padded(to + i * kDown * kTileRowBytes, bytes > 0 ? from + lines[i] + inside : from,
                      bytes);
  }
}

// Writes 16 rows of a warp's sums to their squares, and clears them.
template <class T>
void store_rows(float (&sums)[8][4], const SampleParams& p, const StepTables& tables, int step,
                int first_row, T* sparse, uint32_t staging) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kRowBytes = staging_row(sizeof(T)), kChunks = kStepColumns / kChunk<T>;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t to = staging + (half * 8 + lane / 4) * kRowBytes +
                          (n * 8 + lane % 4 * 2) * static_cast<int>(sizeof(T));
      float &left = sums[n][2 * half], &right = sums[n][2 * half + 1];
      if constexpr (sizeof(T) == 4) {
        store_shared(to, __float_as_uint(left));
        store_shared(to + 4, __float_as_uint(right));
      } else {
        store_shared(to, pack<T>(left, right));
      }
      left = right = 0;
    }
  }
  __syncwarp();
  const int column = lane % kChunks * kChunk<T>;
  const int64_t square = tables.square(step, first_row, column);
  if (square != kNowhere) {
    T* to = sparse + square + column % 16;
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int row = i * (32 / kChunks) + lane / kChunks;
      union {
        uint32_t word[4];
        Vector<T> vector;
      } piece;
      load_shared(piece.word, staging + row * kRowBytes + lane % kChunks * 16);
      store_vector(to + row * p.sparse.row, piece.vector);
    }
  }
  __syncwarp();
}

template <class T, int kDepth, bool kLeftAlong, bool kRightAlong>
void sample_tiles(const SampleParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr bool kStays = kDepth > 0;
  constexpr int kStages = sample_stages(kDepth);
  constexpr int kPiece = kStays ? kDepth : kTileRow<T>;
  constexpr int kLeftRows = kLeftAlong ? kGroupRows : kPiece;
  constexpr int kRightRows = kRightAlong ? kStepColumns : kPiece;
  constexpr uint32_t kLeftBytes = sizeof(T) * kGroupRows * kPiece;
  constexpr uint32_t kRightBytes = sizeof(T) * kStepColumns * kPiece;
  constexpr uint32_t kStageBytes = kStays ? kRightBytes : kLeftBytes + kRightBytes;
  const Turn turn = turn_of(p.steps, blockIdx.x, p.batches);
  const Item item = p.steps.items[turn.item];
  const int64_t batch = turn.batch;
  StepTables tables(shared + sample_operand_bytes(kDepth) + staging_bytes(sizeof(T)));
  tables.load(p.steps, item);
  const uint32_t left_tiles = shared_address(shared);
  const uint32_t stages = left_tiles + (kStays ? kLeftBytes : 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_row = warp * kWarpRows;
  const uint32_t staging =
      left_tiles + sample_operand_bytes(kDepth) + warp * 16 * staging_row(sizeof(T));
  const int64_t depth = p.left.columns;
  // At least one: without depth all squares are zeros.
  const int pieces = kStays || depth == 0 ? 1 : static_cast<int>((depth + kPiece - 1) / kPiece);
  const int loads = item.steps * pieces;

  T* sparse = static_cast<T*>(p.sparse.data) + batch * p.sparse.batch;
  const T* left = static_cast<const T*>(p.left.data) + batch * p.left.batch +
                  item.head * p.left.head + item.first_row * p.left.row;
  const T* right =
      static_cast<const T*>(p.right.data) + batch * p.right.batch + item.head * p.right.head;
  const auto load_left_lines = [&](uint32_t to, int64_t first) {
    const int64_t rows = p.left.rows - item.first_row;
    load_lines<T, kGroupRows, kPiece, kLeftAlong>(
        to, left, [&](int row) { return row < rows ? row * p.left.row : kNowhere; }, p.left.row,
        first, depth, p.left.column);
  };
  int next_step = 0, next_piece = 0;
  const auto load = [&](int index) {
    if (index < loads) {
      const uint32_t stage = stages + index % kStages * kStageBytes;
      const int64_t first = static_cast<int64_t>(next_piece) * kPiece;
      if constexpr (!kStays) load_left_lines(stage + kRightBytes, first);
      load_lines<T, kStepColumns, kPiece, kRightAlong>(
          stage, right, [&](int column) { return tables.line(next_step, column); }, p.right.column,
          first, depth, p.right.row);
      if (++next_piece == pieces) {
        next_piece = 0;
        ++next_step;
      }
    }
    async_commit();
  };
  if constexpr (kStays) load_left_lines(left_tiles, 0);
#pragma unroll
  for (int index = 0; index < kStages - 1; ++index) load(index);

  float sums[2][8][4] = {};
  int step = 0, piece = 0;
  for (int index = 0; index < loads; ++index) {
    async_wait<kStages - 2>();
    __syncthreads();
    load(index + kStages - 1);
    const uint32_t stage = stages + index % kStages * kStageBytes;
    const uint32_t left_tile = kStays ? left_tiles : stage + kRightBytes;
    // Bit m + 8 n: rows from 16 m on of the warp by columns from 16 n on of the step.
    const uint32_t present = tables.masks[step] >> warp_row / 16 & 0x03030303;
    if (present == 0x03030303 && sizeof(T) == 2) {
      if constexpr (sizeof(T) == 2) {
        multiply_tiles<T, kStepColumns, kPiece, kLeftAlong, kLeftRows, kRightAlong, kRightRows>(
            sums, left_tile, stage, warp_row);
      }
    } else if (present != 0) {
      multiply_covered_tiles<T, kStepColumns, kPiece, kLeftAlong, kLeftRows, kRightAlong,
                             kRightRows>(sums, left_tile, stage, warp_row, [&](int m, int n, int) {
        return (present >> (8 * n + m) & 1) != 0;
      });
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
}

}  // namespace pullback::block_matmul

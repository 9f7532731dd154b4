// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::block_matmul {

// A group of rows of the sparse matrix is what one thread block takes; a step of it is this many
// columns. Both are multiples of the largest tile.
inline constexpr int kGroupRows = 128;
inline constexpr int kStepColumns = 64;
// Of one thread block; longer groups are shared out.
inline constexpr int kMostSteps = 32;

// On tensor cores a warp holds sums of 32 rows by all columns of a step.
inline constexpr int kWarpRows = 32;
inline constexpr int kThreads = kGroupRows / kWarpRows * 32;

// Columns of the dense result that a thread block of spread computes.
inline constexpr int kNarrow = 64, kWide = 128;
// Lengths of the sum for which sample keeps the left operand in shared memory. Longer ones (0) pass
// through, kStepColumns of both operands at a time.
inline constexpr int kDepths[] = {64, 128};

// Tiles of the operands that are in shared memory at a time. They and the registers leave room for
// this many blocks on a multiprocessor of sm_90.
inline constexpr int kSpreadStages = 3;
inline constexpr int spread_blocks(int columns) { return columns == kNarrow ? 3 : 2; }
inline constexpr int kSampleStages = 3;
inline constexpr int sample_blocks(int depth) { return depth == kDepths[0] ? 3 : 2; }

// Of dynamic shared memory: operands, a buffer of 16 rows for each warp to round into, and the
// tables of an item's steps.
inline constexpr int kStagingRow = 2 * kStepColumns + 16;
inline constexpr int spread_operand_bytes(int columns) {
  return kSpreadStages * 2 * kStepColumns * (kGroupRows + columns);
}
inline constexpr int sample_operand_bytes(int depth) {
  const int left = 2 * kGroupRows * (depth > 0 ? depth : kStepColumns);
  const int right = 2 * kStepColumns * (depth > 0 ? depth : kStepColumns);

  return depth > 0 ? left + kSampleStages * right : kSampleStages * (left + right);
}
inline constexpr int kStagingBytes = kThreads / 32 * 16 * kStagingRow;
inline constexpr int table_bytes(int tile_shift) {
  const int across = kStepColumns >> tile_shift;
  return kMostSteps * (8 * across * (kGroupRows >> tile_shift) + 4 * across + 4);
}

// The kernels of smxx_plain.cuh: threads, and the piece of the operands that is in shared memory at
// a time, as deep as the smallest tile.
inline constexpr int kPlainThreads = 256;
inline constexpr int kPlainDepth = 16;
inline constexpr int kPlainColumns = 64;

// Rows of a group that a thread block of combine takes.
inline constexpr int kCombineRows = 16;

}  // namespace pullback::block_matmul

// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::block_matmul {

// A group of rows of the sparse matrix is what one thread block takes; a step of it is this many
// columns.
inline constexpr int kGroupRows = 128;
inline constexpr int kStepColumns = 64;
// Of one thread block; longer groups are shared out. kLeastShare: into no smaller parts.
inline constexpr int kMostSteps = 32;
inline constexpr int kLeastShare = 8;

// On tensor cores a warp holds sums of 32 rows by all columns of a step.
inline constexpr int kWarpRows = 32;
inline constexpr int kThreads = kGroupRows / kWarpRows * 32;

// Columns of the dense result that a thread block of spread computes.
inline constexpr int kNarrow = 64, kWide = 128;
// Bytes of a row of an operand's tile in shared memory.
inline constexpr int kTileRowBytes = 128;
// Lengths of the sum for which sample keeps the left operand in shared memory. With others (0)
// both operands pass through, a row of a tile of the sum at a time.
inline constexpr int kDepths[] = {64, 128};  // in 16 bits

// Tiles of the operands that are in shared memory at a time. They and the registers leave room for
// some blocks on a multiprocessor of sm_90.
inline constexpr int spread_stages(int columns, int arch) {
  const bool small = arch != 80 && arch != 90 && arch != 100;  // 99 KiB for a block
  return columns == kWide || small ? 3 : 4;
}
inline constexpr int kSpreadBlocks = 2;
inline constexpr int sample_stages(int depth) { return depth == kDepths[0] ? 4 : 3; }
inline constexpr int sample_blocks(int depth) { return depth == kDepths[0] ? 3 : 2; }

// Of dynamic shared memory: operands, a buffer of 16 rows for each warp to round into, and the
// tables of an item's steps.
inline constexpr int staging_row(int element_bytes) { return element_bytes * kStepColumns + 16; }
inline constexpr int staging_bytes(int element_bytes) {
  return kThreads / 32 * 16 * staging_row(element_bytes);
}
inline constexpr int spread_operand_bytes(int columns, int stages) {
  return stages * kTileRowBytes * (kGroupRows + columns);
}
inline constexpr int sample_operand_bytes(int depth) {
  return depth > 0 ? 2 * depth * (kGroupRows + sample_stages(depth) * kStepColumns)
                   : kTileRowBytes * sample_stages(depth) * (kGroupRows + kStepColumns);
}
inline constexpr int kStepSquares = kStepColumns / 16 * (kGroupRows / 16);
inline constexpr int kTableBytes = kMostSteps * (8 * kStepSquares + 8 * (kStepColumns / 16) + 4);

// The kernels of smxx_plain.cuh: threads, and the piece of the operands that is in shared memory at
// a time, as deep as a square.
inline constexpr int kPlainThreads = 256;
inline constexpr int kPlainDepth = 16;
inline constexpr int kPlainColumns = 64;

// Rows of a group that a thread block of combine takes.
inline constexpr int kCombineRows = 16;

}  // namespace pullback::block_matmul

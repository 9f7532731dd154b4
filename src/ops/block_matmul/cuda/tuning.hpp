// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::block_matmul {

inline constexpr int kThreads = 256;

// A group of rows of the sparse matrix is what one thread block takes; a step of it is this many
// columns. Both are multiples of the largest tile.
inline constexpr int kGroupRows = 128;
inline constexpr int kStepColumns = 64;
// Of one thread block; longer groups are shared out.
inline constexpr int kMostSteps = 32;

// Columns of the dense result that a thread block of spread computes.
inline constexpr int kNarrow = 64, kWide = 128;

// Tiles of the operands that are on their way at a time.
inline constexpr int kStages = 3;

// Lengths of the sum for which sample keeps the left operand in shared memory.
inline constexpr int kDepths[] = {64, 128};

// Rows of a group that a thread block of combine takes.
inline constexpr int kCombineRows = 16;

// Of dynamic shared memory. The tables of an item's steps (smxx_steps.cuh) come first.
inline constexpr int kTableBytes = kMostSteps * (4 + 4 * 4 + 32 * 8);
inline constexpr int spread_bytes(int columns) {
  return kTableBytes + kStages * 2 * kStepColumns * (kGroupRows + columns);
}
// `depth`: the sum's length that stays in shared memory, or 0: pieces of kStepColumns of both
// operands pass through. A warp rounds 16 rows of 32 columns at a time.
inline constexpr int kStagingRow = 80;
inline constexpr int sample_bytes(int depth) {
  const int left = 2 * kGroupRows * (depth > 0 ? depth : kStepColumns);
  const int right = 2 * kStepColumns * (depth > 0 ? depth : kStepColumns);
  return kTableBytes + (depth > 0 ? left + kStages * right : kStages * (left + right)) +
         kThreads / 32 * 16 * kStagingRow;
}

// Depth of the pieces of smxx_plain.cuh, which are as deep as the smallest tile.
inline constexpr int kPlainDepth = 16;
inline constexpr int kPlainColumns = 64;

}  // namespace pullback::block_matmul

// What the tile kernels are given. Plain C++20, for host and device.
#pragma once

#include "ops/entmax/cuda/backward_params.cuh"
#include "ops/entmax/cuda/forward_params.cuh"

namespace pullback::entmax {

// Elements of a row that a thread holds at most: forward; backward, y and d_y each.
inline constexpr int kForwardTileHeld = 32;
inline constexpr int kBackwardTileHeld = 16;
// Threads of a block where no warps share rows; and at most, which leaves 80 registers to each.
inline constexpr int kTileThreads = 128;
inline constexpr int kTileMostThreads = 768;
// columns * warps at most, where several warps share rows.
inline constexpr int kTileScratch = 256;
// Of a block, where rows are read twice (smxx_columns.cuh).
inline constexpr int kColumnsThreads = 512;

// Which threads share a row: with t = lane / columns, those of a warp that have the same
// lane % columns; and likewise in all `warps` warps of the block, where that is more than 1.
struct TileShape {
  int32_t columns;   // rows side by side in a warp, a power of two
  int32_t warps;     // that share a row; 1: each has rows of its own
  int32_t held;      // elements of a thread at most, even if a word is two elements; 0: not held
  int32_t passes;    // staged: rows of a thread
  int32_t pitch;     // staged: elements from row to row in shared memory
  uint32_t per_row;  // staged: 2^32 over a row's words, rounded up; 0 where rows have no gaps
};

struct ForwardTileParams {
  ForwardParams op;
  TileShape shape;
};
struct BackwardTileParams {
  BackwardParams op;
  TileShape shape;
};

}  // namespace pullback::entmax

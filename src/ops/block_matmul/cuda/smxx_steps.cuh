// The tables of an item's steps in shared memory, and the fragments of the operands.
//
// Tiles of operands are rows of 64 elements (device/shared_tile.cuh) that lie in the order of
// memory: along the sum's dimension, or across it. Longer extents are several tiles.
#pragma once

#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "ops/block_matmul/cuda/params.cuh"
#include "ops/block_matmul/cuda/tuning.hpp"

namespace pullback::block_matmul {

using namespace device;

inline constexpr int kWarpRows = 32;  // of the 8 warps, 4 lie along the rows and 2 along columns
inline constexpr int kTileRow = 64;   // elements
inline constexpr int kChunk = 8;      // elements of 16 bytes

// Views of kTableBytes of shared memory.
struct StepTables {
  int64_t* offsets;  // [kMostSteps, 32] at most
  int32_t* columns;  // [kMostSteps, 4] at most
  uint32_t* masks;   // [kMostSteps]
  int32_t shift;

  StepTables(unsigned char* shared, int32_t tile_shift)
      : offsets(reinterpret_cast<int64_t*>(shared)),
        columns(reinterpret_cast<int32_t*>(offsets + kMostSteps * 32)),
        masks(reinterpret_cast<uint32_t*>(columns + kMostSteps * 4)),
        shift(tile_shift) {}

  // By all threads, which then meet at a barrier.
  void load(const Steps& steps, const Item& item) {
    const int across = kStepColumns >> shift, per_step = across * (kGroupRows >> shift);
    for (int i = threadIdx.x; i < item.steps * per_step; i += kThreads) {
      offsets[i] = steps.offsets[item.first_step * per_step + i];
    }
    for (int i = threadIdx.x; i < item.steps * across; i += kThreads) {
      columns[i] = steps.columns[item.first_step * across + i];
    }
    for (int i = threadIdx.x; i < item.steps; i += kThreads) {
      masks[i] = steps.masks[item.first_step + i];
    }
    __syncthreads();
  }

  // Of the tile at (row of the group, column of the step).
  int64_t offset(int step, int row, int column) const {
    const int tile = (step << (6 - shift)) + (column >> shift);
    return offsets[(tile << (7 - shift)) + (row >> shift)];
  }
  // Where the column of the step is in the whole matrix; negative: nowhere.
  int64_t column(int step, int column) const {
    const int32_t tile = columns[(step << (6 - shift)) + (column >> shift)];
    return tile < 0 ? -1 : (static_cast<int64_t>(tile) << shift) + inside(column);
  }
  int inside(int row_or_column) const { return row_or_column & ((1 << shift) - 1); }
};

// Where this lane finds its row of the four matrices of a fragment, in a tile of which the fragment
// begins at (row, chunk), row a multiple of 8 and chunk even. Added to a lane's part that does not
// change, a chunk is a constant to xor with.
template <class T>
uint32_t fragment_address(uint32_t tile, int row, int chunk, int lane_row, int lane_chunk) {
  using Layout = TileLayout<T, kTileRow>;
  return tile + row * Layout::kRowBytes + (Layout::offset(lane_row, lane_chunk) ^ (chunk * 16));
}

// Sixteen rows from `row` on, sixteen of the sum from `k` on (both multiples of 16), of the left
// operand. kAlong: a tile row holds the sum's dimension, and tiles have `kRows` rows.
template <class T, bool kAlong, int kRows>
void load_left(uint32_t (&a)[4], uint32_t tiles, int row, int k) {
  using Layout = TileLayout<T, kTileRow>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t tile = tiles + (kAlong ? k : row) / kTileRow * (kRows * Layout::kRowBytes);
  if constexpr (kAlong) {
    load_matrices(a, fragment_address<T>(tile, row, k % kTileRow / kChunk, lane % 16, lane / 16));
  } else {
    load_matrices_transposed(a, fragment_address<T>(tile, k, row % kTileRow / kChunk,
                                                    lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }
}

// Sixteen columns of the right operand: b[0], b[1] are the fragment of the first eight.
template <class T, bool kAlong, int kRows>
void load_right(uint32_t (&b)[4], uint32_t tiles, int k, int column) {
  using Layout = TileLayout<T, kTileRow>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t tile = tiles + (kAlong ? k : column) / kTileRow * (kRows * Layout::kRowBytes);
  if constexpr (kAlong) {
    load_matrices(b, fragment_address<T>(tile, column, k % kTileRow / kChunk,
                                         lane / 16 * 8 + lane % 8, lane / 8 % 2));
  } else {
    load_matrices_transposed(
        b, fragment_address<T>(tile, k, column % kTileRow / kChunk, lane % 16, lane / 16));
  }
}

inline int clamp_bytes(int64_t elements) {
  return elements >= kChunk ? 16 : elements <= 0 ? 0 : static_cast<int>(elements) * 2;
}

}  // namespace pullback::block_matmul

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

inline constexpr int kTileRow = 64;  // elements
inline constexpr int kChunk = 8;     // elements of 16 bytes

// Views of table_bytes() of shared memory.
struct StepTables {
  int64_t* offsets;  // [kMostSteps, tiles across, tiles down]
  int32_t* columns;  // [kMostSteps, tiles across]
  uint32_t* masks;   // [kMostSteps]
  int32_t shift;

  StepTables(unsigned char* shared, int32_t tile_shift)
      : offsets(reinterpret_cast<int64_t*>(shared)),
        columns(reinterpret_cast<int32_t*>(offsets + (kMostSteps << (13 - 2 * tile_shift)))),
        masks(reinterpret_cast<uint32_t*>(columns + (kMostSteps << (6 - tile_shift)))),
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

// sums += left · right for a warp's 32 rows by kColumns columns and kDepth of the sum. The next
// fragments are loaded before the present ones are multiplied.
template <class T, int kColumns, int kDepth, bool kLeftAlong, int kLeftRows, bool kRightAlong,
          int kRightRows>
void multiply_tiles(float (&sums)[2][kColumns / 8][4], uint32_t left, uint32_t right, int row) {
  constexpr int kParts = kColumns / 64, kUnits = kDepth / 16 * kParts;
  uint32_t a[2][2][4], b[2][4][4];
  const auto load = [&](int unit) {
    const int k = unit / kParts * 16, part = unit % kParts;
    if (part == 0) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_left<T, kLeftAlong, kLeftRows>(a[k / 16 % 2][m], left, row + m * 16, k);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_right<T, kRightAlong, kRightRows>(b[unit % 2][n], right, k, part * 64 + n * 16);
    }
  };
  load(0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit + 1 < kUnits) load(unit + 1);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        mma_16816<T>(sums[m][unit % kParts * 8 + n], a[unit / kParts % 2][m],
                     b[unit % 2][n / 2][n % 2 * 2], b[unit % 2][n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

// The same, leaving out what covered(m, n, k), in units of 16, denies. What it denies in all rows
// is not even loaded.
template <class T, int kColumns, int kDepth, bool kLeftAlong, int kLeftRows, bool kRightAlong,
          int kRightRows, class Covered>
void multiply_covered_tiles(float (&sums)[2][kColumns / 8][4], uint32_t left, uint32_t right,
                            int row, Covered covered) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) load_left<T, kLeftAlong, kLeftRows>(a[m], left, row + m * 16, k);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      if (!covered(0, n, k / 16) && !covered(1, n, k / 16)) continue;
      uint32_t b[4];
      load_right<T, kRightAlong, kRightRows>(b, right, k, n * 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (!covered(m, n, k / 16)) continue;
        mma_16816<T>(sums[m][2 * n], a[m], b[0], b[1]);
        mma_16816<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

inline int clamp_bytes(int64_t elements) {
  return elements >= kChunk ? 16 : elements <= 0 ? 0 : static_cast<int>(elements) * 2;
}

}  // namespace pullback::block_matmul

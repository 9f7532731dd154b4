// What the host hands to the kernels of block_matmul. Plain C++20; host and device compile it.
//
// The kernels see tiles of 16, 32 or 64 rows and columns, the largest that divide a block, and the
// sparse operand as op(S): its rows and columns are exchanged where it is transposed. Rows come in
// groups of kGroupRows; a group has a list of the tile columns in which any of its rows has a tile,
// and a step is the next kStepColumns / tile of them.
#pragma once

#include "device/types.cuh"

namespace pullback::block_matmul {

// An offset where there is no tile: real ones may be negative, as strides are.
inline constexpr int64_t kNoTile = -0x7fffffffffffffff - 1;

// What one thread block walks: some of the steps of a group, or none for a group without tiles.
struct Item {
  int64_t first_step;  // in the tables below
  int64_t first_row;
  int32_t steps, head;
  int32_t slot;  // of the partial sums; -1: it has all steps of the group
};

struct Steps {
  const Item* items;
  // Bit 8 · (c / 16) + r / 16 says that a tile covers column c of the step and row r of the group.
  const uint32_t* masks;  // [steps]
  // Tile columns; -1 past the end of a list.
  const int32_t* columns;  // [steps, kStepColumns / tile]
  // Where a tile begins, in elements from the batch entry's beginning, or kNoTile.
  const int64_t* offsets;  // [steps, kStepColumns / tile, kGroupRows / tile]
  int32_t tile_shift;      // log2 of the tile
};

// Logical [rows, columns] for each (z, h); steps in elements.
struct DenseTensor {
  void* data;
  int64_t rows, columns;
  int64_t batch, head, row, column;
};

// A tile's rows and columns are those of op(S).
struct SparseTensor {
  void* data;
  int64_t batch, row, column;
};

struct SpreadParams {
  Steps steps;
  SparseTensor sparse;
  DenseTensor in, out;
  int64_t batches;
  int32_t column_tiles;
  // Real [slots, batches, column_tiles, kGroupRows, columns of a tile]
  void* partial;
  int32_t vectors;  // out may be stored in pieces of 16 bytes, along its rows or its columns
};

// A group whose steps several thread blocks share.
struct Split {
  int64_t first_row;
  int32_t head, first_slot, slots;
};

struct CombineParams {
  const Split* splits;
  DenseTensor out;
  int64_t batches;
  int32_t column_tiles, tile_columns;
  const void* partial;
};

struct SampleParams {
  Steps steps;
  SparseTensor sparse;
  DenseTensor left, right;
  int64_t batches;
};

}  // namespace pullback::block_matmul

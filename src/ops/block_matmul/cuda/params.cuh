// What the host hands to the kernels of block_matmul. Plain C++20; host and device compile it.
//
// The kernels see squares of 16 by 16, which divide every block, and the sparse operand as op(S):
// its rows and columns are exchanged where it is transposed. Rows come in groups of kGroupRows; a
// group has a list of the columns in which any of its rows has a square, 16 an entry, and a step is
// the next kStepColumns of them.
#pragma once

#include "device/types.cuh"

namespace pullback::block_matmul {

// An offset where nothing is: real ones may be negative, as strides are.
inline constexpr int64_t kNowhere = -0x7fffffffffffffff - 1;

// What one thread block walks: some of the steps of a group, or none for a group without squares.
struct Item {
  int64_t first_step;  // in the tables below
  int64_t first_row;
  int32_t steps, head;
  int32_t slot;  // of the partial sums; -1: it has all steps of the group
};

// Offsets count elements from the beginning of the batch entry.
struct Steps {
  const Item* items;  // the long ones first
  uint32_t count, long_items;
  // Bit 8 · (c / 16) + r / 16: there is a square at column c of the step and row r of the group.
  const uint32_t* masks;  // [steps]
  // Where the squares begin, or kNowhere.
  const int64_t* squares;  // [steps, kStepColumns / 16, kGroupRows / 16]
  // Where the lines of the dense operand begin that meet the 16 columns: rows of a spread's `in`,
  // columns of a sample's `right`. kNowhere past the end of a list.
  const int64_t* lines;  // [steps, kStepColumns / 16]
};

// What a thread block takes: the long items of all batch entries come first, so that none of them
// begins when the others end; then batch entry after batch entry, whose items share the dense
// operand in the second-level cache.
struct Turn {
  uint32_t item, batch;
};
inline constexpr Turn turn_of(const Steps& steps, uint32_t number, uint32_t batches) {
  const uint32_t of_long = steps.long_items * batches, others = steps.count - steps.long_items;
  if (number < of_long) return {number / batches, number % batches};
  number -= of_long;
  return {steps.long_items + number % others, number / others};
}

// Logical [rows, columns] for each (z, h); steps in elements.
struct DenseTensor {
  void* data;
  int64_t rows, columns;
  int64_t batch, head, row, column;
};

// Rows and columns of squares are those of op(S).
struct SparseTensor {
  void* data;
  int64_t batch, row, column;
};

struct SpreadParams {
  Steps steps;
  SparseTensor sparse;
  DenseTensor in, out;
  int32_t batches, column_tiles;
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
  int32_t batches;
};

}  // namespace pullback::block_matmul

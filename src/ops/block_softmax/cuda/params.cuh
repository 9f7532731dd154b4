// What the host hands to the kernels of block_softmax. Plain C++20; host and device compile it.
#pragma once

#include "device/types.cuh"

namespace pullback::block_softmax {

// A block row with at least one block, as a table on the device lists it.
struct alignas(16) BlockRow {
  int64_t first_rank;
  int32_t blocks;
  int32_t index;  // head · R + row
};

struct ColumnBlock {
  int64_t rank;
  int32_t index;  // of its block row
  int32_t padding;
};

// At most kColumnChunk blocks of one column, and where they stand in the table of ColumnBlock.
struct ColumnChunk {
  int64_t first;
  int32_t blocks;
  int32_t column;
};

// Division by 2^shift · odd, odd at most 7; `magic` is ⌈2^32 / odd⌉, or 0 for odd 1.
struct Divisor {
  uint32_t value, shift, magic;
};

// The rows of all block rows of about one length. A unit is some warps of a thread block; it takes
// 2^row_shift neighbouring rows of one block row at a time. From its low end, a lane's number holds
// segment_shift bits of the position in a row, row_shift bits of the row, and again position: so
// that a warp's access covers whole runs of memory.
struct RowClass {
  uint32_t first_cta;
  uint32_t first_block_row;  // in the table
  uint32_t units;
  uint8_t warps, row_shift, segment_shift;
  uint8_t units_shift;  // a thread block takes 2^units_shift units
  Divisor units_per_block_row;
};

inline constexpr int kMaxRowClasses = 8;

struct Schedule {
  const BlockRow* block_rows;
  int32_t class_count;
  uint32_t ctas;
  RowClass classes[kMaxRowClasses];
};

// [Z,nnz,b,b]; steps in elements.
struct BlockTensor {
  void* data;
  int64_t batch, rank, row, column;
};

// What forward adds to the scores or hides them by; a step of 0 broadcasts.
enum class TermKind : int32_t { none, add, keep, keep_bytes };

struct Term {
  const void* data;
  int64_t batch, head, row, column;
  TermKind kind;
  int32_t vectors;  // columns are neighbours, and a vector of x meets an aligned one here
};

inline constexpr int kTerms = 3;  // rpe, key_padding_mask, attn_mask: in the order of the sum

struct ForwardParams {
  Schedule schedule;
  BlockTensor x, y;
  int64_t batches;
  int32_t block;
  Divisor piece;  // vectors in the b elements of a row of a block
  double scale;
  int32_t ring;  // smxx_ring.cuh: batches in the ring
  // With terms only:
  const int32_t* columns;  // [nnz]
  int32_t rows;            // R
  Term terms[kTerms];
};

struct BackwardParams {
  Schedule schedule;
  BlockTensor y, d_y, d_x;  // d_x.data null: only delta
  int64_t batches;
  int32_t block;
  Divisor piece;
  double scale;
  int32_t ring;  // smxx_ring.cuh: batches in the ring
  void* delta;   // Real [Z, H·R·b]: Σ y · d_y of each row; null: not wanted
  int64_t delta_batch;
};

// d_rpe or d_attn_mask: ds summed over the batch, the heads, both or neither.
struct PlaneGradientParams {
  BlockTensor y, d_y;
  const void* delta;
  int64_t delta_batch;
  const BlockRow* block_rows;  // [H·R], rows without blocks too
  const int32_t* columns;      // [nnz]
  int64_t batches, heads, block_rows_per_head, block_columns;
  int32_t block;
  int32_t per_batch, per_head;  // the gradient has this dimension
  void* gradient;
  int64_t batch, head, row, column;  // steps of the gradient
};

struct ColumnGradientParams {
  BlockTensor y, d_y;
  const void* delta;
  int64_t delta_batch;
  const ColumnBlock* blocks;   // by column, then head, then row
  const ColumnChunk* chunks;   // by column
  const int32_t* first_chunk;  // [C + 1]
  int64_t batches, chunk_count, block_columns;
  int32_t block;
  void* partial;  // Real [Z, chunk_count, b]
  void* gradient;
  int64_t batch, column;  // steps of the gradient
};

}  // namespace pullback::block_softmax

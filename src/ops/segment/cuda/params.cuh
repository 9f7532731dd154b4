// What the host tells the segment kernels. Every kernel gets the same struct and reads its part.
#pragma once

#include "device/types.cuh"

namespace pullback::segment_cuda {

// A tensor of two dimensions; strides in elements.
struct Matrix {
  void* data;
  int64_t row_stride, column_stride;
  // Columns of the aligned pieces that rows are made of, as many as fit: a power of two. 0: columns
  // lie apart.
  int32_t vector;
  int32_t element_bytes;
};

// A tensor of one dimension, i32 or i64.
struct Indices {
  const void* data;
  int64_t stride;
  int32_t wide;
};

// The list that tiles are cut from has N rows and S+2 ends: segment 0 has the rows before
// offsets[0], segments 1 to S are the problem's, segment S+1 has the rows after offsets[S]. The end
// of a segment with rows comes with its last row; an empty one's is an item by itself.
struct TileStart {
  int64_t segment, row;
};

// What is known of the offsets: that use_own_offsets says which are in order; nothing, and the
// kernel is to find out (where they are not, a map does all again, and a reduction leaves it to the
// kernel behind); that the kernel ahead has found out, and this one has to repair them.
enum class Proof : int32_t { given, wanted, checked };

enum class ArgType : int32_t { i64, i32, u8 };

struct Params {
  int64_t rows, segments, columns;  // N, S, D
  int64_t tiles, tile_items;
  int32_t end_items;      // that the end of a segment counts for
  int32_t column_block;   // of the blocks with blockIdx.y = 0
  int32_t lane_bits;      // 2^lane_bits lanes share a row
  int32_t snap_rows;      // a tile begins with its first segment, if up to so many rows earlier
  int32_t ring_rows;      // of a lane of smxx_reduce_rows.cuh
  int32_t row_alignment;  // tiles count their rows from a multiple of it: a power of two
  Indices offsets, ids, permutation;
  Indices row_ids;  // of permuted rows

  // Workspace.
  int64_t* own_offsets;      // [S+1]: made from ids, or repaired
  int32_t* use_own_offsets;  // [1]
  int32_t* disorder;         // [disorder_count]: whether a block has met disorder
  int32_t* repaired;         // [1]: that one block has repaired the offsets
  uint64_t* arrivals;        // [1]: blocks that are done, and those that have met disorder
  uint64_t* gate;            // [1]: `key` once arrivals count
  uint64_t key;              // of the plan: what the workspace does not hold by chance
  Proof proof;
  int32_t disorder_count;
  TileStart* starts;  // [tiles+2]; the last holds offsets[0] and offsets[S]
  void* slots;        // states [tiles, 2, slot_columns]: head and tail
  int64_t slot_columns;
  void* carries;  // prod: [tiles, 2, slot_columns]: product before the head, after the tail

  Matrix x, y;                        // inputs with a row for each of x
  Matrix result, result2;             // [S,D]
  Matrix arg;                         // [S,D]
  Matrix mask;                        // u8 [N,ceil(D/8)]
  Matrix d_out;                       // [S,D] or [N,D]
  Matrix statistic, statistic2, out;  // [S,D], read by backward
  Matrix d_x;                         // [N,D]; softmax forward writes out through it

  double empty_value;
  int32_t mean;
  ArgType arg_type;
};

struct SortParams {
  int64_t rows, segments, tiles;
  Indices ids, permutation, offsets;
  void* from;  // pairs
  void* to;
  uint32_t* counts;  // [digits, tiles]
  int64_t* places;   // [digits, tiles]: their sums
  int32_t shift;
  int32_t first;  // pairs come from ids
};

}  // namespace pullback::segment_cuda

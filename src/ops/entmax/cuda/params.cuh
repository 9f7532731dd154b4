// Which row lies where: the geometry that host and device share. Plain C++20.
#pragma once

#ifdef __CUDACC_RTC__
#include "device/types.cuh"
#else
#include <cstdint>
#endif

namespace pullback::entmax {

inline constexpr int kMaxOuterRank = 7;

// A tensor as the kernels see it. Steps are in elements.
struct RowTensor {
  void* data;                    // null: not given, or not wanted; filled in by run()
  int64_t outer[kMaxOuterRank];  // from row to row along each outer dimension of Rows
  int64_t axis;  // along the axis; per-row tensors: from one ragged row to the next; support: from
                 //   byte to byte
};

// The dimensions of x without the axis, merged as far as all tensors allow; the last varies
// fastest.
struct Rows {
  int64_t count;   // rows, ragged ones not counted: the product of sizes
  int64_t length;  // of the axis
  int64_t groups;  // ragged rows along the axis; 1 when there are no offsets
  // [groups + 1], clean: within the axis, never decreasing (smxx_offsets.cuh). Null: not ragged.
  const int64_t* offsets;
  int32_t rank;
  int64_t sizes[kMaxOuterRank];
};

// Where row `row` (of Rows::count) begins, in elements.
inline int64_t row_offset(const Rows& rows, const RowTensor& tensor, int64_t row) {
  if (rows.rank <= 1) return row * tensor.outer[0];
  int64_t offset = 0;
#ifdef __CUDACC_RTC__
#pragma unroll 1
#endif
  for (int dim = rows.rank - 1; dim > 0; --dim) {
    const int64_t rest = row / rows.sizes[dim];
    offset += (row - rest * rows.sizes[dim]) * tensor.outer[dim];
    row = rest;
  }
  return offset + row * tensor.outer[0];
}

// The kernel that copies x and hides what the mask does (smxx_hide.cuh). All dimensions are alike
// to it: the axis of these rows is that of the smallest steps.
struct HideParams {
  Rows rows;
  RowTensor x, mask, to;
};

// The kernel that cleans ragged offsets, one block.
struct OffsetsParams {
  const void* from;  // i32 or i64
  int64_t from_step;
  int64_t* to;
  int64_t groups;
  int64_t length;
  bool wide;  // i64
};

}  // namespace pullback::entmax

// What the host tells the backward kernels. Plain C++20.
#pragma once

#include "ops/entmax/cuda/params.cuh"

namespace pullback::entmax {

// Where s = y^(2-alpha) comes from, and in which arithmetic: that of the dtype, or double for
// mixed.
enum class Weights : int {
  softmax,    // alpha 1: y
  sparsemax,  // alpha 2: 1 where y > 0
  entmax15,   // alpha 1.5: the square root of y
  power,      // any alpha up to 2
  mixed,      // any alpha
  mask,       // alpha 2: the bits of the support mask
};

struct BackwardParams {
  Rows rows;
  RowTensor y, support, d_y, d_x;          // y or support
  RowTensor alpha, support_size, d_alpha;  // per row; alpha null: alpha_of_all
  double alpha_of_all;
  int32_t cached_pieces;  // of a thread (backward_slice.cuh)
  // Rows cut into chunks over several blocks (smxx_backward_stream.cuh).
  int64_t chunks;
  void* partial_sums;  // [rows][chunks] of two numbers
};

}  // namespace pullback::entmax

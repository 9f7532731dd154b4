// What the host tells the backward kernels. Plain C++20.
#pragma once

#include "ops/entmax/cuda/params.cuh"

namespace pullback::entmax {

// Where s = y^(2-alpha) comes from.
enum class Weights : int {
  softmax,    // alpha 1: y
  sparsemax,  // alpha 2: 1 where y > 0
  entmax15,   // alpha 1.5: the square root of y
  power,      // any alpha up to 2, also of rows of their own
  mask,       // alpha 2: the bits of the support mask
};

struct BackwardParams {
  Rows rows;
  RowTensor y, support, d_y, d_x;          // y or support
  RowTensor alpha, support_size, d_alpha;  // per row; alpha null: alpha_of_all
  double alpha_of_all;
  bool gentle_elsewhere;  // smxx_backward_any.cuh leaves rows whose own alpha is_gentle()
  int32_t cached_pieces;  // of a thread (backward_slice.cuh)
  // Rows cut into chunks over several blocks (smxx_backward_stream.cuh).
  int64_t chunks;
  void* partial_sums;  // [rows][chunks] of two numbers
};

// Whether a row with its own alpha is for kernels of Weights::power. Above 2, y^(2-alpha) leaves
// the range of float.
inline bool is_gentle(double alpha) { return alpha >= 1 && alpha <= 2; }

}  // namespace pullback::entmax

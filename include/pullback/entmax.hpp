// entmax: p_i = [(alpha-1) x_i - tau]_+^(1/(alpha-1)) along an axis, with sum p = 1, and gradients.
// alpha 1 is softmax (tau is then logsumexp(x)), 2 is sparsemax. Formulas:
// src/ops/entmax/README.md.
#pragma once

#include <cstdint>

#include "pullback/export.hpp"
#include "pullback/plan.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

// A row is the elements along `axis` at one index of the other dimensions; V is its length. With
// `offsets` the axis holds G rows of different lengths, [offsets[g], offsets[g+1]).
// "Per row" below means: the shape of x without `axis`, or with that dimension G when ragged.
// x, y, d_y and d_x have one dtype: f64, f32, bf16 or f16. NaN or +inf in a row gives a row of NaN;
// -inf has probability 0; a row of nothing but -inf or hidden elements gives zeros, tau +inf.
// complete() describes a contiguous tensor where an output or d_y is not given.
struct EntmaxProblem {
  TensorSpec x;              // rank 1 to 8
  int axis = -1;             // negative counts from the back
  double alpha = 2;          // >= 1; unused when alpha_per_row is given
  TensorSpec alpha_per_row;  // optional, per row, f32 (f64 for f64); values < 1 give NaN rows
  TensorSpec mask;     // optional u8 or bool, the shape of x (strides may be 0): 0 hides an element
  TensorSpec offsets;  // optional i32 or i64 [G+1]: ragged rows; clamped into the axis and made
                       //   non-decreasing; elements in no row get zeros
  bool check_indices = false;  // checked mode: run() reports the first bad offset

  TensorSpec y;             // like x
  TensorSpec tau;           // per row, f32 (f64 for f64)
  TensorSpec support;       // alpha = 2, not ragged: u8, per row with ceil(V/8) bytes appended as
                            //   the last dimension; bit i%8 of byte i/8 says p_i > 0
  TensorSpec support_size;  // i32, per row: how many p_i > 0 before rounding; -1 for a row of NaN

  TensorSpec d_y, d_x;  // like x; d_x may be d_y's memory
  TensorSpec d_alpha;   // like alpha_per_row (per row even when alpha is a scalar)

  friend bool operator==(const EntmaxProblem&, const EntmaxProblem&) = default;
};

// Forward reads x, alpha_per_row, mask, offsets, and writes the non-null of y, tau, support,
// support_size. Backward reads d_y with either y, or support and support_size (alpha = 2, y null),
// and writes the non-null of d_x and d_alpha.
struct EntmaxTensors {
  const void* x = nullptr;
  const void* alpha_per_row = nullptr;
  const void* mask = nullptr;
  const void* offsets = nullptr;
  void* y = nullptr;
  void* tau = nullptr;
  void* support = nullptr;
  void* support_size = nullptr;
  const void* d_y = nullptr;
  void* d_x = nullptr;
  void* d_alpha = nullptr;
};

PULLBACK_API EntmaxProblem complete(const EntmaxProblem& problem);
PULLBACK_API Plan<EntmaxTensors> make_plan(const Device& device, const EntmaxProblem& problem,
                                           Pass pass, const PlanOptions& options = {});

}  // namespace pullback

// What the forward kernels are given. Plain C++20, for host and device.
#pragma once

#include "ops/entmax/cuda/params.cuh"

namespace pullback::entmax {

struct ForwardParams {
  Rows rows;
  double alpha;  // when alpha_per_row is null
  RowTensor x, mask, alpha_per_row;
  RowTensor y, tau, support, support_size;  // null: not wanted
  bool general_elsewhere;  // smxx_forward_any.cuh leaves rows whose own alpha is_general()
};

// Whether a row with its own alpha is for kernels of Family::general, which serve 1.5, too.
inline bool is_general(double alpha) { return alpha >= 1.125 && alpha < 2; }

// Of all rows or, where kOwn, this one's own if they have them.
template <bool kOwn>
double alpha_of(const ForwardParams& p, int64_t row) {
  if (!kOwn || !p.alpha_per_row.data) return p.alpha;
  return static_cast<double>(
      static_cast<const float*>(p.alpha_per_row.data)[row_offset(p.rows, p.alpha_per_row, row)]);
}

}  // namespace pullback::entmax

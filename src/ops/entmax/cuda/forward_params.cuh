// What the forward kernels are given. Plain C++20, for host and device.
#pragma once

#include "ops/entmax/cuda/params.cuh"

namespace pullback::entmax {

struct ForwardParams {
  Rows rows;
  double alpha;  // when alpha_per_row is null
  RowTensor x, mask, alpha_per_row;
  RowTensor y, tau, support, support_size;  // null: not wanted
};

}  // namespace pullback::entmax

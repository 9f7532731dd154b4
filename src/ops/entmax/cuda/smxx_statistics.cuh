// What forward tells of a row beside y.
#pragma once

#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_solve.cuh"

namespace pullback::entmax {

// By one of a row's threads; the row's largest element need not be finite.
inline void store_statistics(const ForwardParams& p, int64_t row, float largest, float tau,
                             int size) {
  if (!(magnitude(largest) < device::infinity<float>())) {
    const bool empty = largest < 0;
    tau = empty ? device::infinity<float>() : device::quiet_nan<float>();
    size = empty ? 0 : -1;
  }
  if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
  if (p.support_size.data) {
    static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
  }
}

}  // namespace pullback::entmax

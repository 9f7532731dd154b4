// What the host hands to the kernels of the backward pass on Hopper. Plain C++20; host and device
// compile it.
#pragma once

#include "device/tensor_map.cuh"
#include "ops/attention/cuda/backward_params.cuh"

namespace pullback::attention {

struct HopperBackwardParams {
  // [B,H,S,width], of which a box is a part's queries of a head, and 64 columns.
  device::TensorMap q, d_out;
  int32_t has_maps;
  BackwardParams all;
};

}  // namespace pullback::attention

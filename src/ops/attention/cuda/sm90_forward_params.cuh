// What the host hands to the kernels of the forward pass on Hopper. Plain C++20; host and device
// compile it.
#pragma once

#include "device/tensor_map.cuh"
#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

struct HopperForwardParams {
  // [B,H,S,width], of which a box is 64 columns of a head: of a warpgroup's queries, and of a part
  // of a tile of keys.
  device::TensorMap q, k, v;
  int32_t has_maps;
  ForwardParams all;
};

}  // namespace pullback::attention

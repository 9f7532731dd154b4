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

// Of one pass of sm90_backward_blocks.cuh, whose lists `all` has: its owners are tiles of keys, or
// of queries.
struct BlockBackwardParams {
  // Of rows of its tiles: what is owned, k and v or q and d_out, and what is listed, the other two.
  device::TensorMap own[2], listed[2];
  BackwardParams all;
  int32_t* extreme_keys;  // [pairs, k_tiles]: whether keys or values hold NaN or infinity
};

}  // namespace pullback::attention

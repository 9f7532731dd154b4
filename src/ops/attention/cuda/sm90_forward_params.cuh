// What the host hands to the kernels of the forward pass on Hopper. Plain C++20; host and device
// compile it.
#pragma once

#include "device/tensor_map.cuh"
#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

// Heads whose rows begin in the middle of a sector of 32 bytes, for which the copy engine takes
// longer, up to half as long again. A box of such a head begins 8 columns before it, and has zeros
// there: what keys are multiplied by begins 8 columns before its own ones, too, and of values the
// product does.
struct HalfSectors {
  static constexpr int kColumns = 8;
  int32_t first, head, batch;  // 1 where it begins so; where every other head, or batch item does

  bool any() const { return (first | head | batch) != 0; }
  int columns(int of_head, int of_batch) const {
    return ((first + of_head * head + of_batch * batch) & 1) * kColumns;
  }
};

struct HopperForwardParams {
  // [B,H,S,width], of which a box is 64 columns of a head: of a warpgroup's queries, and of a part
  // of a tile of keys.
  device::TensorMap q, k, v;
  int32_t has_maps;
  HalfSectors k_begins, v_begins;
  ForwardParams all;
};

}  // namespace pullback::attention

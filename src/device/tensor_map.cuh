// A tensor in global memory as the copy engine knows it. Plain C++20; host and device compile it.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

// CUtensorMap: opaque, made by the driver on the host (cuda/tensor_map.hpp).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace pullback::device

// device/warp_integer.cuh on the host.
#pragma once

#include "device/warp.cuh"

namespace pullback::device {

inline int warp_sum_integer(int value) { return __reduce_add_sync(kAllLanes, value); }
inline int warp_max_integer(int value) { return __reduce_max_sync(kAllLanes, value); }

}  // namespace pullback::device

// Programmatic dependent launch (sm_90): a kernel that may start before the one ahead of it in the
// stream has ended. Before sm_90 these do nothing, and kernels run one after the other.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

// Once all blocks have said so, or have ended, the next kernel may start.
inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernels ahead have ended and their writes are seen.
inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace pullback::device

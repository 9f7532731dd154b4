// All CUDA kernels of the library: what is compiled ahead of time, and held to its budgets.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/kernel_key.hpp"

namespace pullback::driver {

// For sm_90: every kernel that a plan on such a device may load.
std::vector<cuda::KernelSource> all_kernels(int arch);

// Whether the op has variants for CUDA devices.
bool has_cuda(std::string_view op);

}  // namespace pullback::driver

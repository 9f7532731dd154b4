#include "driver/kernel_list.hpp"

namespace pullback::cuda {

// In src/ops/<op>/cuda/<part>.cpp.
#define PULLBACK_CUDA_PART(op, part) std::vector<KernelSource> op##_##part##_kernels(int arch);
#include "cuda_part_list.inc"
#undef PULLBACK_CUDA_PART

}  // namespace pullback::cuda

namespace pullback::driver {

std::vector<cuda::KernelSource> all_kernels([[maybe_unused]] int arch) {
  std::vector<cuda::KernelSource> all;
#define PULLBACK_CUDA_PART(op, part)                       \
  for (auto& kernel : cuda::op##_##part##_kernels(arch)) { \
    all.push_back(std::move(kernel));                      \
  }
#include "cuda_part_list.inc"
#undef PULLBACK_CUDA_PART
  return all;
}

bool has_cuda([[maybe_unused]] std::string_view op) {
#define PULLBACK_CUDA_PART(name, part) \
  if (op == #name) return true;
#include "cuda_part_list.inc"
#undef PULLBACK_CUDA_PART
  return false;
}

}  // namespace pullback::driver

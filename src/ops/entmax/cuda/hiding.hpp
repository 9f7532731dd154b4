// A mask applied ahead of the kernels that know none.
#pragma once

#include "cuda/op_kernel.hpp"
#include "ops/entmax/cuda/params.cuh"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {

// Copies x to a tensor of the same shape, with -inf where the problem's mask hides it.
class Hiding {
 public:
  // Whether a plan can have the kernel.
  static bool serves(DType dtype, const cuda::DeviceInfo& device);

  Hiding(const EntmaxProblem& problem, const TensorSpec& to, const cuda::DeviceInfo& device);

  void enqueue(Stream stream, const void* x, const void* mask, void* to) const;

 private:
  HideParams params_{};
  cuda::PlannedKernel<HideParams> kernel_;
};

}  // namespace pullback::entmax

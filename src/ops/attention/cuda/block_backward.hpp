// The backward pass with a block mask on Hopper.
#pragma once

#include "cuda/op_kernel.hpp"
#include "ops/attention/problem.hpp"

namespace pullback::attention {

bool block_backward_serves(const AttentionProblem& problem, const cuda::DeviceInfo& device);
Body make_block_backward(const AttentionProblem& problem, const Device& device);

}  // namespace pullback::attention

// Tensors whose rows begin anywhere: heads of 100 in 16 bits, a bias of 197 keys.
#pragma once

#include "ops/attention/problem.hpp"

namespace pullback::attention {

using BodyOf = Body (*)(const AttentionProblem& problem, const Device& device);

// `make`'s body for the problem. Where rows of heads, or of the bias, do not begin at 16 bytes,
// which kernels could only read element by element, and the problem is large enough: for copies
// whose rows do, in the workspace; of heads with zeros behind, of gradients back to their places.
Body make_with_aligned_rows(const AttentionProblem& problem, const Device& device, Pass pass,
                            BodyOf make);

}  // namespace pullback::attention

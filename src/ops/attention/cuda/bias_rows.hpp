// Biases whose rows begin anywhere, as those of 197 keys do.
#pragma once

#include "ops/attention/problem.hpp"

namespace pullback::attention {

using BodyOf = Body (*)(const AttentionProblem& problem, const Device& device);

// `make`'s body for the problem. Where rows of the bias do not begin at 16 bytes, which kernels
// could only read element by element, and the problem is large enough: for a copy of the bias whose
// rows do, in the workspace, and d_bias alike.
Body make_with_bias_rows(const AttentionProblem& problem, const Device& device, Pass pass,
                         BodyOf make);

}  // namespace pullback::attention

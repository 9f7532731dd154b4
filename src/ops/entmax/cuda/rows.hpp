// The host's side of params.cuh: where rows lie, and ragged offsets made clean.
#pragma once

#include <span>
#include <vector>

#include "cuda/op_kernel.hpp"
#include "ops/entmax/cuda/params.cuh"
#include "ops/entmax/dims.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {

// Null data; the outer dimensions of the problem, not merged yet.
RowTensor row_tensor(const Steps& steps);

// The dims that rows are counted in: sizes and count of `rows`, steps of the tensors.
void set_outer(const std::vector<Dim>& dims, Rows& rows, std::span<RowTensor* const> tensors);

// Sorts the outer dimensions by the steps of the first tensor, merges them where all tensors allow,
// and rewrites the tensors' steps. Without offsets.
Rows merged_rows(const EntmaxProblem& problem, std::span<RowTensor* const> tensors);

// So many thread blocks, at least one; more than a grid has are refused.
unsigned grid_of(std::int64_t blocks);

// Ragged offsets on the device, cleaned at the head of every run.
class RaggedOffsets {
 public:
  RaggedOffsets() = default;
  RaggedOffsets(const EntmaxProblem& problem, const cuda::DeviceInfo& device);

  // At the head of the workspace; 0 when rows are not ragged.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // What Rows::offsets is in this run. In checked mode it waits for the stream, reads the offsets
  // and throws Error naming the first bad one.
  const std::int64_t* enqueue(Stream stream, const void* offsets, Workspace workspace) const;

 private:
  EntmaxProblem problem_;
  cuda::PlannedKernel<OffsetsParams> kernel_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace pullback::entmax

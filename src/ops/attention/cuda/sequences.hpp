// What the CUDA variants of both passes share: parameters of the problem, and the launch that lists
// the sequences of a varlen run.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "cuda/op_kernel.hpp"
#include "ops/attention/cuda/params.cuh"
#include "ops/attention/problem.hpp"

namespace pullback::attention {

// Positions have 32 bits. Those past the end, up to a tile and a half of them, are computed too.
inline constexpr std::int64_t kLongestSequence = std::numeric_limits<std::int32_t>::max() - 1024;

// Without pointers. Fails where a sequence may be longer than that.
Problem problem_params(const AttentionProblem& problem);
HeadRows head_rows(const TensorSpec& spec);
RowValues row_values(const TensorSpec& spec);
Plane plane(const TensorSpec& spec);

// Whether all rows of the tensor are made of 16-byte pieces, aligned if the first one is.
bool has_vector_rows(const TensorSpec& spec);
// Whether whole pieces of 16 bytes of a bias's rows, from the first key on, are aligned if the
// first one is. A row may end within one.
bool has_vector_keys(const TensorSpec& bias);

// Does nothing unless varlen.
class SequenceLister {
 public:
  SequenceLister(const AttentionProblem& problem, const cuda::DeviceInfo& device, int q_tile,
                 int k_tile);

  std::size_t workspace_bytes() const { return bytes_; }
  // At most so many tiles have rows, in all sequences together.
  std::int64_t q_tiles() const { return q_tiles_; }
  std::int64_t k_tiles() const { return k_tiles_; }
  // The table, at the beginning of `scratch`; null unless varlen.
  const PackedSequence* list(Stream stream, const AttentionTensors& tensors, void* scratch) const;

 private:
  std::optional<cuda::PlannedKernel<SequencesParams>> kernel_;
  SequencesParams params_{};
  std::size_t bytes_ = 0;
  std::int64_t q_tiles_ = 0, k_tiles_ = 0;
};

}  // namespace pullback::attention

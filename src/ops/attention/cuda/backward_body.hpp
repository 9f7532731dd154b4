// What the plans of the backward pass on CUDA share.
#pragma once

#include <fmt/format.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/workspace.hpp"
#include "ops/attention/block_tables.hpp"
#include "ops/attention/cuda/sequences.hpp"
#include "ops/attention/cuda/sm90_backward_params.cuh"

namespace pullback::attention {

using BackwardKernel = cuda::PlannedKernel<BackwardParams>;
using HopperKernel = cuda::PlannedKernel<HopperBackwardParams>;
inline constexpr std::string_view kBackwardParams = "attention::BackwardParams";
inline constexpr std::string_view kHopperBackwardParams = "attention::HopperBackwardParams";

// A workspace part of so many bytes.
inline std::size_t aligned(std::int64_t bytes) {
  return workspace_aligned(static_cast<std::size_t>(bytes));
}

// A number of tiles that fits a grid.
inline std::int32_t tile_count(std::int64_t tiles) {
  constexpr std::int64_t kMost = 0x7fffffff;
  if (tiles > kMost) {
    fail(ErrorCode::unsupported, "attention", "q and k",
         fmt::format("at most {} tiles of rows on a CUDA device", kMost), fmt::format("{}", tiles));
  }
  return static_cast<std::int32_t>(tiles);
}

template <class Kernel>
void set_grid(Kernel& kernel, std::int64_t blocks) {
  kernel.shape.grid[0] = static_cast<unsigned>(tile_count(blocks));
}

inline bool all_have_vector_rows(const AttentionProblem& problem) {
  for (const TensorSpec* spec : {&problem.q, &problem.k, &problem.v, &problem.d_out, &problem.d_q,
                                 &problem.d_k, &problem.d_v}) {
    if (spec->given() && !has_vector_rows(*spec)) return false;
  }
  return true;
}

// Of bias, dropout and block mask.
inline int term_count(const AttentionProblem& problem) {
  return problem.bias.given() + (problem.dropout > 0) + problem.blocks.given();
}

class BackwardBody : public cuda::CudaBody<AttentionTensors> {
 protected:
  BackwardBody(const AttentionProblem& problem, const Device& device, int queries, int keys,
               OwnersAtWork at_work = {})
      : CudaBody(device),
        sizes_(sizes_of(problem)),
        sequences_(problem, device_, queries, keys),
        blocks_(problem, device_, Pass::backward, queries, keys, at_work),
        planes_((sizes_.varlen ? 1 : sizes_.batch) * sizes_.heads),
        pairs_(planes_ / std::max<std::int64_t>(sizes_.group, 1)) {
    params_.problem = problem_params(problem);
    // Positions of queries and keys, and their differences, are 32 bits, rows between sequences
    // too.
    if (sizes_.total_query + sizes_.total_key > kLongestSequence) {
      fail(ErrorCode::unsupported, "attention", "q and k",
           fmt::format("at most {} rows together, backward on a CUDA device", kLongestSequence),
           fmt::format("{} and {}", sizes_.total_query, sizes_.total_key));
    }
    params_.problem.blocks = blocks_.get();
    params_.q = head_rows(problem.q);
    params_.k = head_rows(problem.k);
    params_.v = head_rows(problem.v);
    params_.out = head_rows(problem.out);
    params_.d_out = head_rows(problem.d_out);
    params_.d_q = head_rows(problem.d_q);
    params_.d_k = head_rows(problem.d_k);
    params_.d_v = head_rows(problem.d_v);
    params_.lse = row_values(problem.lse);
    params_.d_lse = row_values(problem.d_lse);
    params_.bias = plane(problem.bias);
    params_.d_bias = plane(problem.d_bias);
    if (problem.d_bias.given()) {
      const auto& shape = problem.d_bias.shape;
      params_.bias_shape = {shape[0], shape[1], shape[2], shape[3]};
      bias_elements_ = problem.d_bias.numel();
    }
    params_.bias_parts = 1;
    params_.q_tiles =
        tile_count(sizes_.varlen ? sequences_.q_tiles() : ceil_div(sizes_.total_query, queries));
    params_.k_tiles =
        tile_count(sizes_.varlen ? sequences_.k_tiles() : ceil_div(sizes_.total_key, keys));
    sequence_bytes_ = sequences_.workspace_bytes();
  }

  // Pointers of a run; the sequences, whose table comes first in the workspace.
  BackwardParams begin(Stream stream, const AttentionTensors& tensors, Workspace workspace) const {
    BackwardParams params = params_;
    params.problem.sequences = sequences_.list(stream, tensors, workspace.data);
    params.problem.dropout.seed_at = static_cast<const std::uint64_t*>(tensors.seed);
    const auto set = [](auto& tensor, const void* data) { tensor.data = const_cast<void*>(data); };
    set(params.q, tensors.q);
    set(params.k, tensors.k);
    set(params.v, tensors.v);
    set(params.out, tensors.out);
    set(params.d_out, tensors.d_out);
    set(params.lse, tensors.lse);
    set(params.d_lse, tensors.d_lse);
    set(params.bias, tensors.bias);
    set(params.d_q, tensors.d_q);
    set(params.d_k, tensors.d_k);
    set(params.d_v, tensors.d_v);
    set(params.d_bias, tensors.d_bias);
    return params;
  }

  // A kernel whose blocks have a tile of d_bias each, or share one where tiles are few.
  struct BiasSum {
    BackwardKernel kernel;
    std::int32_t parts = 0;  // of a tile; 0: there is no kernel
  };
  BiasSum bias_sum(const cuda::OpKernel& op_kernel, int shared_bytes, int keys, int queries) const {
    const BiasShape& shape = params_.bias_shape;
    const std::int64_t k_tiles = ceil_div(sizes_.total_key, keys);
    const std::int64_t q_tiles = ceil_div(sizes_.total_query, queries);
    const std::int64_t own =
        shape.batch * shape.head * (shape.query > 1 ? q_tiles : 1) * (shape.key > 1 ? k_tiles : 1);
    const std::int64_t each = planes_ * q_tiles * k_tiles / own;
    // Enough blocks for two waves.
    const std::int64_t wanted = std::int64_t{2} * device_.multiprocessors;
    BiasSum sum{{op_kernel, device_, shared_bytes},
                static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted / own, 1, each))};
    set_grid(sum.kernel, own * sum.parts);
    return sum;
  }

  AttentionSizes sizes_;
  SequenceLister sequences_;
  BlockTables blocks_;
  std::int64_t planes_, pairs_, bias_elements_ = 0;
  BackwardParams params_{};
  std::size_t sequence_bytes_ = 0;
};

// f32 and f64.
Body make_plain_backward(const AttentionProblem& problem, const Device& device);

}  // namespace pullback::attention

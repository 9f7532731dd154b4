// What Hopper's own kernels of the backward pass serve.
#pragma once

#include <algorithm>

#include "ops/attention/cuda/backward_kernels.hpp"

namespace pullback::attention {

// Narrow heads take the room of those of 64.
inline int hopper_width(const AttentionProblem& problem) {
  return std::max(tensor_core_width(problem), 64);
}
// sums_bias: over the batch.
inline HopperBackwardKind hopper_kind(const AttentionProblem& problem, bool sums_bias = false) {
  using Kind = HopperBackwardKind;
  if (problem.softcap > 0) return Kind::softcap;
  if (problem.bias.given() && problem.dropout > 0) {
    return sums_bias ? Kind::bias_sum_dropout : Kind::bias_dropout;
  }
  if (problem.bias.given()) return sums_bias ? Kind::bias_sum : Kind::bias;
  if (problem.dropout > 0) return Kind::dropout;
  return problem.blocks.given() ? Kind::blocks : Kind::plain;
}
inline HopperBackwardTile hopper_tile_of(const AttentionProblem& problem, int width,
                                         bool sums_bias) {
  return hopper_backward_tile(hopper_kind(problem, sums_bias), width);
}

// The kernels find tanh of a score from the weight that it gave. What that is wrong by counts as
// many times as the cap is smaller than lse.
inline constexpr double kLeastSoftcap = 0.01;

inline bool has_hopper_features(const AttentionProblem& problem) {
  if (!all_have_vector_rows(problem)) return false;
  if (problem.softcap > 0) return problem.softcap >= kLeastSoftcap && term_count(problem) == 0;
  return static_cast<float>(*problem.scale) > kLeastScale &&
         (term_count(problem) <= 1 || !problem.blocks.given()) &&
         (!problem.bias.given() || has_vector_keys(problem.bias));
}

inline bool hopper_serves(const AttentionProblem& problem, const cuda::DeviceInfo& device) {
  const AttentionSizes sizes = sizes_of(problem);
  const int width = hopper_width(problem);
  const std::int64_t pairs = (sizes.varlen ? 1 : sizes.batch) * sizes.kv_heads;
  const std::int64_t k_tiles = ceil_div(sizes.total_key, 128) + (sizes.varlen ? sizes.batch : 0);
  return has_hopper_backward_tile(hopper_kind(problem), width,
                                  static_cast<int>(size_of(problem.q.dtype))) &&
         hopper_backward_pays(width, sizes.max_query, pairs * k_tiles, device.multiprocessors) &&
         problem.d_q.given() && problem.d_k.given() && problem.d_v.given() &&
         has_hopper_features(problem) &&
         cuda::can_have<HopperBackwardParams>(
             hopper_backward_kernel(problem.q.dtype, hopper_kind(problem), width).kernel, device);
}
// Of the keys at least, and whole rows of them.
inline bool hopper_sums_bias(const AttentionProblem& problem) {
  if (!problem.d_bias.given()) return false;
  const AttentionSizes sizes = sizes_of(problem);
  const auto& shape = problem.d_bias.shape;
  return has_hopper_bias_tile(tensor_core_width(problem),
                              static_cast<int>(size_of(problem.q.dtype))) &&
         shape[3] == sizes.total_key && (shape[2] == sizes.total_query || shape[2] == 1) &&
         has_hopper_features(problem);
}

}  // namespace pullback::attention

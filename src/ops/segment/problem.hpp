// What the backends of segment see.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>

#include "core/variant.hpp"
#include "pullback/segment.hpp"

namespace pullback {

enum class SegmentFeature {
  sum,
  mean,
  max,
  min,
  prod,
  logsumexp,
  softmax,
  ties_last,
  ties_even,
  arg,
  arg_mask,
  lse,
  permutation,
  checked_indices,
};

inline constexpr std::array<std::string_view, 14> kSegmentFeatureNames = {
    "sum",         "mean",        "max", "min",      "prod", "logsumexp",   "softmax",
    "ties = last", "ties = even", "arg", "arg_mask", "lse",  "permutation", "check_indices"};

// Whether ids, in order, say where segments are; beside a permutation they say so once more.
inline bool by_ids(const SegmentProblem& problem) {
  return problem.ids.given() && !problem.permutation.given();
}

inline bool is_extreme(SegmentReduce reduce) {
  return reduce == SegmentReduce::max || reduce == SegmentReduce::min;
}

// What a segment without rows comes to.
inline double empty_value(const SegmentProblem& problem) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (problem.empty == EmptySegment::zero) return 0;
  if (problem.empty == EmptySegment::nan) return std::numeric_limits<double>::quiet_NaN();
  switch (problem.reduce) {
    case SegmentReduce::prod:
      return 1;
    case SegmentReduce::max:
    case SegmentReduce::logsumexp:
      return -kInfinity;
    case SegmentReduce::min:
      return kInfinity;
    default:
      return 0;
  }
}

// What backward of max and min works from: the first of arg, arg_mask that is there and suffices.
// One position cannot tell an even split, so for that arg is not enough.
enum class SegmentSaved { arg, arg_mask, nothing };

inline SegmentSaved saved_of(const SegmentProblem& problem, const SegmentTensors& tensors) {
  if (tensors.arg != nullptr && problem.ties != Ties::even) return SegmentSaved::arg;
  return tensors.arg_mask != nullptr ? SegmentSaved::arg_mask : SegmentSaved::nothing;
}

// Backward of logsumexp is d_out * exp(x - lse). A 16-bit out is too coarse to stand in an
// exponent: for those dtypes that is lse where it was saved, and else summed anew.
inline bool out_is_lse(const SegmentProblem& problem) {
  return accumulation_dtype(problem.x.dtype) == problem.x.dtype;
}
inline bool has_lse(const SegmentProblem& problem, const SegmentTensors& tensors) {
  return out_is_lse(problem) || tensors.lse != nullptr;
}

// A compact arg (u8) counts places from 0; this one means that the segment is empty.
inline constexpr std::int64_t kNoPlace = 255;

using SegmentBody = PlanBody<SegmentTensors>;

std::unique_ptr<SegmentBody> make_segment_reference(const SegmentProblem& problem,
                                                    const Device& device, Pass pass);
std::unique_ptr<SegmentBody> make_segment_textbook(const SegmentProblem& problem,
                                                   const Device& device, Pass pass);
std::unique_ptr<SegmentBody> make_segment_cpu(const SegmentProblem& problem, const Device& device,
                                              Pass pass);
std::unique_ptr<SegmentBody> make_segment_cuda(const SegmentProblem& problem, const Device& device,
                                               Pass pass);

std::unique_ptr<PlanBody<SegmentPermutationTensors>> make_permutation_cuda(
    const SegmentPermutationProblem& problem, const Device& device);

}  // namespace pullback

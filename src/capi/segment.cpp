#include "pullback/segment.hpp"

#include "capi/common.hpp"
#include "core/check.hpp"

namespace pullback::capi {
namespace {

struct SegmentOp {
  using CProblem = pullback_segment_problem;
  using Problem = SegmentProblem;
  using CTensors = pullback_segment_tensors;
  using Tensors = SegmentTensors;
  static constexpr std::string_view name = "segment";
  static constexpr CProblem problem_defaults = PULLBACK_SEGMENT_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_SEGMENT_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(x);
    PULLBACK_TENSOR(offsets);
    PULLBACK_TENSOR(ids);
    PULLBACK_TENSOR(permutation);
    PULLBACK_TENSOR(out);
    PULLBACK_TENSOR(arg);
    PULLBACK_TENSOR(arg_mask);
    PULLBACK_TENSOR(d_out);
    PULLBACK_TENSOR(d_x);
    PULLBACK_TENSOR(lse);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    check_flags(name, given.flags, PULLBACK_CHECK_INDICES);
    problem.num_segments = given.num_segments;
    problem.reduce = choice(name, "reduce", given.reduce, SegmentReduce::softmax);
    problem.ties = choice(name, "ties", given.ties, Ties::even);
    problem.empty = choice(name, "empty", given.empty, EmptySegment::nan);
    problem.check_indices = given.flags & PULLBACK_CHECK_INDICES;
  }
};

struct SegmentPermutationOp {
  using CProblem = pullback_segment_permutation_problem;
  using Problem = SegmentPermutationProblem;
  using CTensors = pullback_segment_permutation_tensors;
  using Tensors = SegmentPermutationTensors;
  static constexpr std::string_view name = "segment_permutation";
  static constexpr CProblem problem_defaults = PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(ids);
    PULLBACK_TENSOR(permutation);
    PULLBACK_TENSOR(offsets);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    problem.num_segments = given.num_segments;
  }

  static Plan<Tensors> plan(const Device& device, const Problem& problem,
                            const PlanOptions& options) {
    Checker(name).that(options.variant.empty(), "variant", "none: there is one implementation",
                       options.variant);
    return plan_permutation(device, problem);
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

PULLBACK_C_OP(segment, SegmentOp)

pullback_status pullback_segment_permutation_plan(
    const pullback_segment_permutation_problem* problem, const pullback_plan_options* options,
    pullback_plan** plan) {
  return guarded(
      [&] { make_plan_of<SegmentPermutationOp>(problem, PULLBACK_FORWARD, options, plan); });
}

pullback_status pullback_segment_permutation_run(
    const pullback_plan* plan, void* stream, const pullback_segment_permutation_tensors* tensors,
    void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    run_plan_of<SegmentPermutationOp>(plan, stream, tensors, workspace, workspace_bytes);
  });
}

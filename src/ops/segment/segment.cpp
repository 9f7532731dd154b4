#include <fmt/format.h>

#include "ops/segment/problem.hpp"

namespace pullback {

SegmentProblem complete(const SegmentProblem& given) {
  constexpr std::int64_t kI32Rows = 0x7fffffff;
  const Checker check("segment");
  SegmentProblem problem = given;
  const SegmentReduce reduce = problem.reduce;

  const TensorSpec& x = problem.x;
  check.given("x", x);
  check.rank("x", x, 2);
  check.dtype("x", x, {DType::f64, DType::f32, DType::bf16, DType::f16});
  const std::int64_t rows = x.shape[0];
  const std::int64_t columns = x.shape[1];

  if (problem.permutation.given()) {
    check.that(problem.offsets.given(), "offsets", "those of the permutation", "none",
               "pass the offsets that segment_permutation wrote");
  } else {
    check.that(problem.offsets.given() != problem.ids.given(), "offsets, ids",
               "exactly one of them, or both with a permutation",
               problem.offsets.given() ? "both" : "none");
  }
  const auto check_index = [&](std::string_view name, const TensorSpec& spec) {
    check.sane(name, spec);
    check.rank(name, spec, 1);
    check.dtype(name, spec, {DType::i64, DType::i32});
  };
  check.that(problem.num_segments >= 0, "num_segments", "0 or more",
             fmt::format("{}", problem.num_segments));
  if (problem.offsets.given()) {
    check_index("offsets", problem.offsets);
    const std::int64_t length = problem.offsets.shape[0];
    check.that(length >= 1, "offsets", "S+1 elements, so at least 1", "0");
    check.that(problem.num_segments == 0 || problem.num_segments == length - 1, "num_segments",
               fmt::format("0 or {}, the length of offsets - 1", length - 1),
               fmt::format("{}", problem.num_segments));
    problem.num_segments = length - 1;
  }
  if (problem.ids.given()) {
    check_index("ids", problem.ids);
    check.shape("ids", problem.ids, {rows});
  }
  if (problem.permutation.given()) {
    check_index("permutation", problem.permutation);
    check.shape("permutation", problem.permutation, {rows});
    check.that(rows < 0xffffffff, "x", "fewer than 2^32 - 1 rows with a permutation",
               fmt::format("{} rows", rows));
  }
  const std::int64_t segments = problem.num_segments;
  check.product("num_segments and the columns of x", {segments, columns});

  // out and d_out have a row per segment, or for softmax one per row of x.
  const std::int64_t out_rows = reduce == SegmentReduce::softmax ? rows : segments;
  const std::array out_shape{out_rows, columns};
  check.derived("out", problem.out, Checker::output, x.dtype, out_shape);
  check.derived("d_out", problem.d_out, Checker::input, x.dtype, out_shape);
  check.derived("d_x", problem.d_x, Checker::output, x);

  if (problem.arg.given()) {
    check.that(is_extreme(reduce), "arg", "none, as only max and min have one", "a tensor");
    check.dtype("arg", problem.arg, {DType::i64, DType::i32, DType::u8});
    check.shape("arg", problem.arg, {segments, columns});
    check.writable("arg", problem.arg);
    check.that(problem.arg.dtype != DType::i32 || rows <= kI32Rows, "arg",
               "dtype i64 for 2^31 rows or more", "i32");
  }
  // Ties are counted where they are divided by: in 32 bits.
  check.that(!is_extreme(reduce) || problem.ties != Ties::even || x.dtype == DType::f64 ||
                 rows <= kI32Rows,
             "x", "fewer than 2^31 rows with ties even", fmt::format("{} rows", rows));
  if (problem.arg_mask.given()) {
    check.that(is_extreme(reduce), "arg_mask", "none, as only max and min have one", "a tensor");
    check.dtype("arg_mask", problem.arg_mask, {DType::u8});
    check.shape("arg_mask", problem.arg_mask, {rows, (columns + 7) / 8});
    check.writable("arg_mask", problem.arg_mask);
  }
  if (problem.lse.given()) {
    check.that(reduce == SegmentReduce::logsumexp && !out_is_lse(problem), "lse",
               "none, as only logsumexp of bf16 and f16 has one beside out", "a tensor");
    check.dtype("lse", problem.lse, {DType::f32});
    check.shape("lse", problem.lse, {segments, columns});
    check.writable("lse", problem.lse);
  }
  return problem;
}

namespace {

constexpr std::string_view kOp = "segment";

FeatureSet needs_of(const SegmentProblem& problem) {
  using F = SegmentFeature;
  FeatureSet needs = FeatureSet{1} << static_cast<int>(problem.reduce);
  if (is_extreme(problem.reduce)) {
    if (problem.ties == Ties::last) needs |= features(F::ties_last);
    if (problem.ties == Ties::even) needs |= features(F::ties_even);
  }
  if (problem.arg.given()) needs |= features(F::arg);
  if (problem.arg_mask.given()) needs |= features(F::arg_mask);
  if (problem.lse.given()) needs |= features(F::lse);
  if (problem.permutation.given()) needs |= features(F::permutation);
  if (problem.check_indices) needs |= features(F::checked_indices);
  return needs;
}
static_assert(static_cast<int>(SegmentFeature::softmax) ==
              static_cast<int>(SegmentReduce::softmax));

TensorUses uses_of(const SegmentProblem& problem, const SegmentTensors& tensors, Pass pass) {
  TensorUses uses;
  uses.read("offsets", problem.offsets, tensors.offsets);
  uses.read("ids", problem.ids, tensors.ids);
  uses.read("permutation", problem.permutation, tensors.permutation);
  if (pass == Pass::forward) {
    uses.read("x", problem.x, tensors.x);
    uses.write("out", problem.out, tensors.out);
    uses.write("arg", problem.arg, tensors.arg);
    uses.write("arg_mask", problem.arg_mask, tensors.arg_mask);
    uses.write("lse", problem.lse, tensors.lse);
    return uses;
  }
  const bool gradient = tensors.d_x != nullptr;
  const bool recompute =
      is_extreme(problem.reduce) && saved_of(problem, tensors) == SegmentSaved::nothing;
  const bool reads_x = recompute || problem.reduce == SegmentReduce::prod ||
                       problem.reduce == SegmentReduce::logsumexp;
  const bool reads_out = recompute || problem.reduce == SegmentReduce::softmax ||
                         (problem.reduce == SegmentReduce::logsumexp && out_is_lse(problem));
  uses.read("x", problem.x, tensors.x, gradient && reads_x);
  uses.read("out", problem.out, tensors.out, gradient && reads_out);
  uses.read("arg", problem.arg, tensors.arg, false);
  uses.read("arg_mask", problem.arg_mask, tensors.arg_mask, false);
  uses.read("lse", problem.lse, tensors.lse, false);
  uses.read("d_out", problem.d_out, tensors.d_out, gradient);
  uses.write("d_x", problem.d_x, tensors.d_x);
  return uses;
}

constexpr FeatureSet kEverything = (FeatureSet{1} << kSegmentFeatureNames.size()) - 1;
// On a GPU nobody waits for a run, so that nobody could be told of a bad index.
constexpr FeatureSet kUnchecked = kEverything & ~features(SegmentFeature::checked_indices);
constexpr Variant<SegmentProblem, SegmentTensors> kVariants[] = {
    {{"cpu", DeviceKind::cpu, CpuIsa::any, kEverything, 10}, make_segment_cpu},
    {{"reference", DeviceKind::cpu, CpuIsa::any, kEverything, -1}, make_segment_reference},
    {{"textbook", DeviceKind::cpu, CpuIsa::any, kEverything, -1}, make_segment_textbook},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kUnchecked, 10, 80}, make_segment_cuda},
};

}  // namespace

Plan<SegmentTensors> make_plan(const Device& device, const SegmentProblem& given, Pass pass,
                               const PlanOptions& options) {
  const SegmentProblem problem = complete(given);
  if (device.kind == DeviceKind::cuda && problem.check_indices) {
    fail(ErrorCode::unsupported, kOp, "check_indices", "false on a CUDA device", "true",
         "check the indices in a plan for the CPU");
  }
  return plan_with_variants<SegmentProblem, SegmentTensors>(kOp, kVariants, needs_of(problem),
                                                            kSegmentFeatureNames, uses_of, device,
                                                            problem, pass, options);
}

}  // namespace pullback

#include "pullback/entmax.hpp"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "core/check.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback {
namespace {

using namespace entmax;

constexpr std::string_view kOp = "entmax";

class Completion {
 public:
  explicit Completion(const EntmaxProblem& problem) : problem_(problem) {}

  EntmaxProblem run() {
    axis_and_alpha();
    like_x();
    per_row();
    support();
    return problem_;
  }

 private:
  using Shape = std::vector<std::int64_t>;

  void axis_and_alpha() {
    const TensorSpec& x = problem_.x;
    check_.given("x", x);
    check_.dtype("x", x, {DType::f64, DType::f32, DType::bf16, DType::f16});
    check_.that(x.rank >= 1, "x", "rank 1 to 8", "rank 0", "give it a dimension of size 1");
    const int axis = problem_.axis < 0 ? problem_.axis + x.rank : problem_.axis;
    check_.that(axis >= 0 && axis < x.rank, "axis", fmt::format("{} to {}", -x.rank, x.rank - 1),
                fmt::format("{}", problem_.axis));
    problem_.axis = axis;
    if (!problem_.alpha_per_row.given()) {
      check_.that(problem_.alpha >= 1 && std::isfinite(problem_.alpha), "alpha",
                  "a finite number of 1 or more", fmt::format("{}", problem_.alpha));
    }
    if (problem_.offsets.given()) {
      check_.sane("offsets", problem_.offsets);
      check_.dtype("offsets", problem_.offsets, {DType::i32, DType::i64});
      check_.rank("offsets", problem_.offsets, 1);
      check_.that(problem_.offsets.shape[0] >= 1, "offsets", "G + 1 elements for G rows", "0",
                  "no rows at all is one offset");
    }
  }

  void like_x() {
    const auto dims = problem_.x.shape.begin();
    const Shape shape(dims, dims + problem_.x.rank);
    check_.derived("y", problem_.y, Checker::output, problem_.x.dtype, shape);
    check_.derived("d_y", problem_.d_y, Checker::input, problem_.x.dtype, shape);
    check_.derived("d_x", problem_.d_x, Checker::output, problem_.x.dtype, shape);
    if (!problem_.mask.given()) return;
    check_.sane("mask", problem_.mask);
    check_.dtype("mask", problem_.mask, {DType::u8, DType::boolean});
    check_.shape("mask", problem_.mask, shape);
  }

  void per_row() {
    Shape shape;
    for (int dim = 0; dim < problem_.x.rank; ++dim) {
      if (dim != problem_.axis) shape.push_back(problem_.x.shape[dim]);
      if (dim == problem_.axis && problem_.offsets.given()) shape.push_back(group_count(problem_));
    }
    const DType real = accumulation_dtype(problem_.x.dtype);
    check_.derived("tau", problem_.tau, Checker::output, real, shape);
    check_.derived("support_size", problem_.support_size, Checker::output, DType::i32, shape);
    check_.derived("d_alpha", problem_.d_alpha, Checker::output, real, shape);
    if (problem_.alpha_per_row.given()) {
      check_.derived("alpha_per_row", problem_.alpha_per_row, Checker::input, real, shape);
    }
  }

  void support() {
    const bool possible =
        problem_.alpha == 2 && !problem_.alpha_per_row.given() && !problem_.offsets.given();
    if (!possible) {
      check_.that(!problem_.support.given(), "support",
                  "none unless alpha is 2 for all rows and rows are not ragged", "a tensor",
                  "run the backward from y");
      return;
    }
    Shape shape;
    for (int dim = 0; dim < problem_.x.rank; ++dim) {
      if (dim != problem_.axis) shape.push_back(problem_.x.shape[dim]);
    }
    shape.push_back((row_length(problem_) + 7) / 8);
    check_.derived("support", problem_.support, Checker::output, DType::u8, shape);
  }

  Checker check_{kOp};
  EntmaxProblem problem_;
};

TensorUses uses(const EntmaxProblem& problem, const EntmaxTensors& tensors, Pass pass) {
  TensorUses uses;
  uses.read("alpha_per_row", problem.alpha_per_row, tensors.alpha_per_row);
  uses.read("offsets", problem.offsets, tensors.offsets);
  if (pass == Pass::forward) {
    uses.read("x", problem.x, tensors.x);
    uses.read("mask", problem.mask, tensors.mask);
    uses.write("y", problem.y, tensors.y);
    uses.write("tau", problem.tau, tensors.tau);
    uses.write("support", problem.support, tensors.support);
    uses.write("support_size", problem.support_size, tensors.support_size);
  } else {
    // The support mask serves where y is null; d_alpha needs the probabilities themselves.
    const bool from_y =
        tensors.y != nullptr || tensors.support == nullptr || tensors.d_alpha != nullptr;
    uses.read("y", problem.y, tensors.y, from_y);
    uses.read("support", problem.support, tensors.support, !from_y);
    uses.read("support_size", problem.support_size, tensors.support_size, !from_y);
    uses.read("d_y", problem.d_y, tensors.d_y);
    uses.write("d_x", problem.d_x, tensors.d_x, false, "d_y");
    uses.write("d_alpha", problem.d_alpha, tensors.d_alpha);
  }
  return uses;
}

Body make_cpu(const EntmaxProblem& problem, const Device& device, Pass pass) {
  return pass == Pass::forward ? make_cpu_forward(problem, device)
                               : make_cpu_backward(problem, device);
}

Body make_cuda(const EntmaxProblem& problem, const Device& device, Pass pass) {
  return pass == Pass::forward ? make_cuda_forward(problem, device)
                               : make_cuda_backward(problem, device);
}

constexpr FeatureSet kEverything = features(Feature::alpha_per_row, Feature::mask, Feature::ragged);

constexpr Variant<EntmaxProblem, EntmaxTensors> kVariants[] = {
    {{"cpu", DeviceKind::cpu, CpuIsa::any, kEverything, 10}, make_cpu},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kEverything, 10, 80}, make_cuda},
    {{"reference", DeviceKind::cpu, CpuIsa::any, kEverything, -1}, make_reference},
    {{"textbook", DeviceKind::cpu, CpuIsa::any, kEverything, -1}, make_textbook},
};

FeatureSet needs_of(const EntmaxProblem& problem) {
  FeatureSet needs = 0;
  if (problem.alpha_per_row.given()) needs |= features(Feature::alpha_per_row);
  if (problem.mask.given()) needs |= features(Feature::mask);
  if (problem.offsets.given()) needs |= features(Feature::ragged);
  return needs;
}

}  // namespace

void entmax::check_offsets(const EntmaxProblem& problem, const void* offsets) {
  const TensorSpec& spec = problem.offsets;
  const std::int64_t length = row_length(problem);
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < spec.shape[0]; ++i) {
    const std::int64_t offset = load_index(spec.dtype, offsets, i * spec.strides[0]);
    if (offset < last || offset > length) {
      fail(ErrorCode::invalid_argument, kOp, fmt::format("offsets[{}]", i),
           fmt::format("{} to {}", last, length), fmt::format("{}", offset),
           "offsets never decrease and stay within the axis");
    }
    last = offset;
  }
}

EntmaxProblem complete(const EntmaxProblem& problem) { return Completion(problem).run(); }

Plan<EntmaxTensors> make_plan(const Device& device, const EntmaxProblem& problem, Pass pass,
                              const PlanOptions& options) {
  const EntmaxProblem completed = complete(problem);
  return plan_with_variants<EntmaxProblem, EntmaxTensors>(
      kOp, kVariants, needs_of(completed), kFeatureNames, uses, device, completed, pass, options);
}

}  // namespace pullback

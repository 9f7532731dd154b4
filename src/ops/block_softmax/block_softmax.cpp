// block_softmax: checks, defaults, and the choice of a variant.
#include <fmt/format.h>

#include "ops/block_softmax/problem.hpp"

namespace pullback {
namespace block_softmax {
namespace {

constexpr std::string_view kOp = "block_softmax";

constexpr Variant<BlockSoftmaxProblem, BlockSoftmaxTensors> kVariants[] = {
    {{"cpu", DeviceKind::cpu, CpuIsa::any, kAllFeatures, 10}, make_cpu},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kAllFeatures, 10, 80}, make_cuda},
    {{"reference", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_reference},
    {{"textbook", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_textbook},
};

FeatureSet needs_of(const BlockSoftmaxProblem& problem) {
  FeatureSet needs = 0;
  if (problem.rpe.given()) needs |= features(Feature::rpe);
  if (problem.key_padding_mask.given()) needs |= features(Feature::key_padding_mask);
  if (problem.attn_mask.given()) needs |= features(Feature::attn_mask);
  if (problem.d_key_padding_mask.given() || problem.d_attn_mask.given()) {
    needs |= features(Feature::mask_gradients);
  }
  return needs;
}

TensorUses uses(const BlockSoftmaxProblem& p, const BlockSoftmaxTensors& t, Pass pass) {
  TensorUses uses;
  if (pass == Pass::forward) {
    uses.read("x", p.x, t.x);
    uses.read("rpe", p.rpe, t.rpe);
    uses.read("key_padding_mask", p.key_padding_mask, t.key_padding_mask);
    uses.read("attn_mask", p.attn_mask, t.attn_mask);
    uses.write("y", p.y, t.y, true, "x");
  } else {
    uses.read("y", p.y, t.y);
    uses.read("d_y", p.d_y, t.d_y);
    uses.write("d_x", p.d_x, t.d_x, false, "d_y");
    uses.write("d_rpe", p.d_rpe, t.d_rpe);
    uses.write("d_key_padding_mask", p.d_key_padding_mask, t.d_key_padding_mask);
    uses.write("d_attn_mask", p.d_attn_mask, t.d_attn_mask);
  }
  return uses;
}

void check_mask(const Checker& check, std::string_view name, const TensorSpec& mask, MaskMode mode,
                DType dtype) {
  check.sane(name, mask);
  if (mode == MaskMode::add) {
    check.dtype(name, mask, {dtype});
  } else {
    check.dtype(name, mask, {dtype, DType::u8, DType::boolean});
  }
}

void complete_gradient(const Checker& check, std::string_view name, TensorSpec& gradient,
                       std::string_view term_name, const TensorSpec& term) {
  if (term.given()) {
    check.derived(name, gradient, Checker::output, term);
  } else {
    check.that(!gradient.given(), name, fmt::format("no gradient, as {} is not given", term_name),
               gradient.to_string());
  }
}

void complete_mask_gradient(const Checker& check, std::string_view name, TensorSpec& gradient,
                            std::string_view mask_name, const TensorSpec& mask, MaskMode mode) {
  if (mask.given() && mode == MaskMode::keep) {
    check.that(!gradient.given(), name, "no gradient, as the mask is in keep mode",
               gradient.to_string(), fmt::format("use add mode for {}", mask_name));
    return;
  }
  complete_gradient(check, name, gradient, mask_name, mask);
}

}  // namespace

std::unique_ptr<Body> make_cpu(const BlockSoftmaxProblem& problem, const Device& device,
                               Pass pass) {
  return pass == Pass::forward ? make_cpu_forward(problem, device)
                               : make_cpu_backward(problem, device);
}

std::unique_ptr<Body> make_cuda(const BlockSoftmaxProblem& problem, const Device& device,
                                Pass pass) {
  return pass == Pass::forward ? make_cuda_forward(problem, device)
                               : make_cuda_backward(problem, device);
}

}  // namespace block_softmax

BlockSoftmaxProblem complete(const BlockSoftmaxProblem& problem) {
  using namespace block_softmax;
  const Checker check(kOp);
  BlockSoftmaxProblem p = problem;

  check.that(p.layout != nullptr, "layout", "a block layout", "null");
  check.block(p.block);
  check.that(finite_for(p.x.dtype, p.scale), "scale", "a finite number",
             fmt::format("{}", p.scale));
  check.given("x", p.x);
  check.dtype("x", p.x, {DType::f64, DType::f32, DType::bf16, DType::f16});
  check.rank("x", p.x, 4);
  const auto [Z, H, R, C, b, nnz] = sizes_of(p);
  check.shape("x", p.x, {Z, nnz, b, b});
  check.product("the batch of x and the rows of layout", {Z, H, R, b});

  if (p.rpe.given()) {
    check.sane("rpe", p.rpe);
    check.dtype("rpe", p.rpe, {p.x.dtype});
    check.rank("rpe", p.rpe, 4);
    const auto z = p.rpe.shape[0] == 1 ? 1 : Z, h = p.rpe.shape[1] == 1 ? 1 : H;
    check.shape("rpe", p.rpe, {z, h, R * b, C * b});
  }
  if (p.key_padding_mask.given()) {
    check_mask(check, "key_padding_mask", p.key_padding_mask, p.key_padding_mode, p.x.dtype);
    check.shape("key_padding_mask", p.key_padding_mask, {Z, C * b});
  }
  if (p.attn_mask.given()) {
    check_mask(check, "attn_mask", p.attn_mask, p.attn_mask_mode, p.x.dtype);
    check.shape("attn_mask", p.attn_mask, {R * b, C * b});
  }

  check.derived("y", p.y, Checker::output, p.x);
  check.derived("d_y", p.d_y, Checker::input, p.x);
  check.derived("d_x", p.d_x, Checker::output, p.x);
  complete_gradient(check, "d_rpe", p.d_rpe, "rpe", p.rpe);
  complete_mask_gradient(check, "d_key_padding_mask", p.d_key_padding_mask, "key_padding_mask",
                         p.key_padding_mask, p.key_padding_mode);
  complete_mask_gradient(check, "d_attn_mask", p.d_attn_mask, "attn_mask", p.attn_mask,
                         p.attn_mask_mode);
  return p;
}

Plan<BlockSoftmaxTensors> make_plan(const Device& device, const BlockSoftmaxProblem& problem,
                                    Pass pass, const PlanOptions& options) {
  using namespace block_softmax;
  const BlockSoftmaxProblem p = complete(problem);
  return plan_with_variants<BlockSoftmaxProblem, BlockSoftmaxTensors>(
      kOp, kVariants, needs_of(p), kFeatureNames, uses, device, p, pass, options);
}

bool operator==(const BlockSoftmaxProblem& a, const BlockSoftmaxProblem& b) {
  const bool same_layout = a.layout == b.layout ||
                           (a.layout != nullptr && b.layout != nullptr && *a.layout == *b.layout);
  return same_layout && a.block == b.block && a.x == b.x && a.rpe == b.rpe &&
         a.key_padding_mask == b.key_padding_mask && a.attn_mask == b.attn_mask &&
         a.key_padding_mode == b.key_padding_mode && a.attn_mask_mode == b.attn_mask_mode &&
         a.scale == b.scale && a.y == b.y && a.d_y == b.d_y && a.d_x == b.d_x &&
         a.d_rpe == b.d_rpe && a.d_key_padding_mask == b.d_key_padding_mask &&
         a.d_attn_mask == b.d_attn_mask;
}

}  // namespace pullback

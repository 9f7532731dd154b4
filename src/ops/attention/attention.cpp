// attention: checks, defaults, and the choice of a variant.
#include "pullback/attention.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "core/check.hpp"
#include "core/variant.hpp"
#include "core/view.hpp"
#include "ops/attention/dropout.cuh"
#include "ops/attention/problem.hpp"

namespace pullback {
namespace attention {
namespace {

constexpr std::string_view kOp = "attention";
constexpr std::int64_t kMaxHeadDim = 256;

void check_query_key_value(const Checker& check, const AttentionProblem& problem, bool varlen) {
  const int rank = varlen ? 3 : 4;
  const int rows = rank - 3;
  const std::pair<std::string_view, const TensorSpec*> inputs[] = {
      {"q", &problem.q}, {"k", &problem.k}, {"v", &problem.v}};
  for (const auto& [name, spec] : inputs) {
    check.given(name, *spec);
    check.that(spec->rank == rank, name,
               varlen ? "[total,H,D] as cu_seqlens are given" : "[B,S,H,D] without cu_seqlens",
               spec->to_string(), varlen ? "" : "or pass cu_seqlens_q and cu_seqlens_k");
  }
  check.dtype("q", problem.q, {DType::f64, DType::f32, DType::bf16, DType::f16});
  check.dtype("k", problem.k, {problem.q.dtype});
  check.dtype("v", problem.v, {problem.q.dtype});

  const auto text = [](const TensorSpec& spec) { return spec.to_string(); };
  const std::int64_t heads = problem.q.shape[rows + 1], kv_heads = problem.k.shape[rows + 1];
  const std::int64_t head_dim = problem.q.shape[rows + 2], value_dim = problem.v.shape[rows + 2];
  if (!varlen) {
    check.that(problem.k.shape[0] == problem.q.shape[0], "k",
               fmt::format("the batch size of q, {}", problem.q.shape[0]), text(problem.k));
  }
  check.that(head_dim >= 1 && head_dim <= kMaxHeadDim, "q",
             fmt::format("a head dim between 1 and {}", kMaxHeadDim), text(problem.q));
  check.that(problem.k.shape[rows + 2] == head_dim, "k",
             fmt::format("the head dim of q, {}", head_dim), text(problem.k));
  const bool divides = heads > 0 ? kv_heads > 0 && heads % kv_heads == 0 : kv_heads == 0;
  check.that(divides, "k",
             heads > 0 ? fmt::format("a number of heads that divides the {} of q", heads)
                       : "no heads, as q has none",
             text(problem.k), "each key/value head serves the same number of query heads");
  for (int dim = 0; dim < rows + 2; ++dim) {
    check.that(problem.v.shape[dim] == problem.k.shape[dim], "v",
               fmt::format("the sizes of k before its head dim, as in {}", text(problem.k)),
               text(problem.v));
  }
  check.that(value_dim >= 1 && value_dim <= kMaxHeadDim, "v",
             fmt::format("a head dim between 1 and {}", kMaxHeadDim), text(problem.v));
}

void check_cu_seqlens_specs(const Checker& check, const AttentionProblem& problem, bool varlen) {
  if (!varlen) {
    check.that(problem.max_seqlen_q == 0 && problem.max_seqlen_k == 0, "max_seqlen",
               "0 without cu_seqlens",
               fmt::format("{}, {}", problem.max_seqlen_q, problem.max_seqlen_k),
               "it bounds the sequences that cu_seqlens_q and cu_seqlens_k describe");
    return;
  }
  const std::pair<std::string_view, const TensorSpec*> offsets[] = {
      {"cu_seqlens_q", &problem.cu_seqlens_q}, {"cu_seqlens_k", &problem.cu_seqlens_k}};
  for (const auto& [name, spec] : offsets) {
    check.that(spec->given(), name, "a tensor [B+1]", "none",
               "pass both cu_seqlens_q and cu_seqlens_k, or neither");
    check.sane(name, *spec);
    check.dtype(name, *spec, {DType::i32, DType::i64});
    check.rank(name, *spec, 1);
    check.that(spec->shape[0] >= 1, name, "B+1 entries, at least 1", spec->to_string());
  }
  check.that(problem.cu_seqlens_q.shape[0] == problem.cu_seqlens_k.shape[0], "cu_seqlens_k",
             fmt::format("{} entries as in cu_seqlens_q", problem.cu_seqlens_q.shape[0]),
             problem.cu_seqlens_k.to_string());
  check.that(problem.max_seqlen_q >= 0, "max_seqlen_q", "0 (unknown) or more",
             fmt::format("{}", problem.max_seqlen_q));
  check.that(problem.max_seqlen_k >= 0, "max_seqlen_k", "0 (unknown) or more",
             fmt::format("{}", problem.max_seqlen_k));
}

void check_options(const Checker& check, const AttentionProblem& problem) {
  // Tensors of 16 bits are computed in f32, too, where both are multiplied by log2 e, and scores by
  // their quotient.
  const bool wide = problem.q.dtype == DType::f64;
  const double largest =
      wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double least =
      wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double most = wide ? largest : largest / std::numbers::log2e;
  const double scale = problem.scale.value_or(1);
  check.that(std::abs(scale) <= most, "scale",
             fmt::format("a number from {:.4g} to {:.4g}", -most, most), fmt::format("{}", scale));
  check.that(problem.softcap == 0 || (problem.softcap >= least && problem.softcap <= most),
             "softcap", fmt::format("0 (off), or {:.4g} to {:.4g}", least, most),
             fmt::format("{}", problem.softcap));
  check.that(problem.softcap == 0 || std::abs(scale / problem.softcap) <= largest, "softcap",
             fmt::format("scale / softcap from {:.4g} to {:.4g}", -largest, largest),
             fmt::format("{} / {}", scale, problem.softcap));
  check.that(problem.dropout >= 0 && problem.dropout < 1, "dropout", "a probability in [0, 1)",
             fmt::format("{}", problem.dropout));
  if (problem.seed.given()) {
    check.sane("seed", problem.seed);
    check.dtype("seed", problem.seed, {DType::i64});
    check.that(problem.seed.numel() == 1, "seed", "one element", problem.seed.to_string());
  }
  check.that(problem.mask.left >= -1 && problem.mask.right >= -1, "mask",
             "left and right of 0 or more, or -1 for unbounded",
             fmt::format("{}, {}", problem.mask.left, problem.mask.right));
}

// An input that may be left out.
void check_like(const Checker& check, std::string_view name, TensorSpec& spec,
                const TensorSpec& model) {
  if (spec.given()) check.derived(name, spec, Checker::input, model);
}

// all: its gradient is wanted, given or not.
void check_bias(const Checker& check, AttentionProblem& problem, bool varlen, bool all) {
  if (!problem.bias.given()) {
    check.that(!problem.d_bias.given(), "d_bias", "none without a bias",
               problem.d_bias.to_string());
    return;
  }
  check.that(!varlen, "bias", "none with cu_seqlens", problem.bias.to_string(),
             "a packed batch has no common key axis: run the sequences one by one, or padded");
  check.sane("bias", problem.bias);
  check.dtype("bias", problem.bias, {problem.q.dtype});
  check.broadcast_shape(
      "bias", problem.bias,
      {problem.q.shape[0], problem.q.shape[2], problem.q.shape[1], problem.k.shape[1]});
  if (all || problem.d_bias.given()) {
    check.derived("d_bias", problem.d_bias, Checker::output, problem.bias);
  }
}

void check_blocks(const Checker& check, const AttentionProblem& problem, bool varlen) {
  const BlockMask& mask = problem.blocks;
  if (!mask.given()) {
    check.that(
        mask.block == 0 && mask.batches == 1, "layout",
        fmt::format("one, as there are blocks of {} for {} batch items", mask.block, mask.batches),
        "none", "pass the layout, or leave block and batches out");
    return;
  }
  check.that(
      !varlen, "layout", "none with cu_seqlens", "a block layout",
      "a packed batch has no common grid of blocks: run the sequences one by one, or padded");
  check.block(mask.block);
  const AttentionSizes sizes = sizes_of(problem);
  check.that(mask.batches == 1 || mask.batches == sizes.batch, "layout",
             fmt::format("layouts for 1 or {} batch items", sizes.batch),
             fmt::format("{}", mask.batches));
  const auto count = [&](std::int64_t length) { return (length + mask.block - 1) / mask.block; };
  const BlockLayout& layout = *mask.layout;
  const bool heads_fit =
      layout.heads() == mask.batches || layout.heads() == mask.batches * sizes.heads;
  check.that(heads_fit && layout.rows() == count(sizes.total_query) &&
                 layout.columns() == count(sizes.total_key),
             "layout",
             fmt::format("[{} times 1 or {} heads, {}, {}] blocks of {}", mask.batches, sizes.heads,
                         count(sizes.total_query), count(sizes.total_key), mask.block),
             fmt::format("[{}, {}, {}]", layout.heads(), layout.rows(), layout.columns()),
             "rows are for queries, columns for keys, the last ones may be partly outside");
}

TensorUses uses(const AttentionProblem& problem, const AttentionTensors& tensors, Pass pass) {
  TensorUses all;
  all.read("q", problem.q, tensors.q);
  all.read("k", problem.k, tensors.k);
  all.read("v", problem.v, tensors.v);
  all.read("bias", problem.bias, tensors.bias);
  all.read("cu_seqlens_q", problem.cu_seqlens_q, tensors.cu_seqlens_q);
  all.read("cu_seqlens_k", problem.cu_seqlens_k, tensors.cu_seqlens_k);
  all.read("seed", problem.seed, tensors.seed);
  if (pass == Pass::forward) {
    all.write("out", problem.out, tensors.out, true);
    all.write("lse", problem.lse, tensors.lse);
    return all;
  }
  all.read("out", problem.out, tensors.out);
  all.read("lse", problem.lse, tensors.lse);
  all.read("d_out", problem.d_out, tensors.d_out);
  all.read("d_lse", problem.d_lse, tensors.d_lse);
  all.write("d_q", problem.d_q, tensors.d_q);
  all.write("d_k", problem.d_k, tensors.d_k);
  all.write("d_v", problem.d_v, tensors.d_v);
  all.write("d_bias", problem.d_bias, tensors.d_bias);
  return all;
}

// The checked mode: looks at cu_seqlens before the variant writes anything.
class IndexCheckedBody final : public PlanBody<AttentionTensors> {
 public:
  IndexCheckedBody(const AttentionProblem& problem, Body variant)
      : problem_(problem), variant_(std::move(variant)) {
    workspace_bytes = variant_->workspace_bytes;
    description = variant_->description + "\ncu_seqlens are checked before each run";
  }

  void run(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    check_cu_seqlens(problem_, tensors);
    variant_->run(stream, tensors, workspace);
  }

 private:
  AttentionProblem problem_;
  Body variant_;
};

template <Body (*make)(const AttentionProblem&, const Device&, Pass)>
Body make_checked(const AttentionProblem& problem, const Device& device, Pass pass) {
  Body variant = make(problem, device, pass);
  const bool checked = problem.check_indices && problem.cu_seqlens_q.given();
  if (!checked || device.kind != DeviceKind::cpu) return variant;
  return std::make_unique<IndexCheckedBody>(problem, std::move(variant));
}

constexpr FeatureSet kOfBf16 = kAllFeatures & ~features(Feature::f64, Feature::f32, Feature::f16);

constexpr FeatureSet kOfHopper = kAllFeatures & ~features(Feature::f64, Feature::f32);

constexpr Variant<AttentionProblem, AttentionTensors> kVariants[] = {
    {{"cpu_amx_bf16", DeviceKind::cpu, CpuIsa::amx_bf16, kOfBf16, 20},
     make_checked<make_cpu_amx_bf16>},
    {{"cpu_avx512_bf16", DeviceKind::cpu, CpuIsa::avx512_bf16, kOfBf16, 15},
     make_checked<make_cpu_avx512_bf16>},
    {{"cpu", DeviceKind::cpu, CpuIsa::any, kAllFeatures, 10}, make_checked<make_cpu>},
    {{"cuda_sm90", DeviceKind::cuda, CpuIsa::any, kOfHopper, 20, 90, Passes::forward,
      /*arch_only=*/true},
     make_cuda_sm90_forward},
    {{"cuda_sm90", DeviceKind::cuda, CpuIsa::any, kOfHopper, 20, 90, Passes::backward,
      /*arch_only=*/true},
     make_cuda_sm90_backward},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kAllFeatures, 10, 80, Passes::forward},
     make_cuda_forward},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kAllFeatures, 10, 80, Passes::backward},
     make_cuda_backward},
    {{"reference", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_checked<make_reference>},
    {{"textbook", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_checked<make_textbook>},
};

}  // namespace
}  // namespace attention

bool operator==(const BlockMask& a, const BlockMask& b) {
  const bool same_layout =
      a.layout == b.layout || (a.given() && b.given() && *a.layout == *b.layout);
  return same_layout && a.batches == b.batches && a.block == b.block;
}

AttentionProblem complete(const AttentionProblem& given) {
  using namespace attention;
  const Checker check(kOp);
  AttentionProblem problem = given;
  const bool varlen = problem.cu_seqlens_q.given() || problem.cu_seqlens_k.given();
  check_cu_seqlens_specs(check, problem, varlen);
  check_query_key_value(check, problem, varlen);
  check_options(check, problem);

  const AttentionSizes sizes = sizes_of(problem);
  if (varlen) {
    check.product("cu_seqlens_q and the heads of q", {sizes.batch, sizes.heads});
    check.product("cu_seqlens_k and the heads of k", {sizes.batch, sizes.kv_heads});
  }
  if (!problem.scale) problem.scale = 1 / std::sqrt(static_cast<double>(sizes.head_dim));
  if (varlen) {
    const auto bound = [](std::int64_t stated, std::int64_t total) {
      return stated == 0 ? total : std::min(stated, total);
    };
    problem.max_seqlen_q = bound(problem.max_seqlen_q, sizes.total_query);
    problem.max_seqlen_k = bound(problem.max_seqlen_k, sizes.total_key);
  }

  TensorSpec out_like = problem.q, lse_like;
  out_like.shape[out_like.rank - 1] = sizes.value_dim;
  const DType lse_dtype = accumulation_dtype(problem.q.dtype);
  if (varlen) {
    lse_like = TensorSpec::contiguous(lse_dtype, {sizes.heads, sizes.total_query});
  } else {
    lse_like = TensorSpec::contiguous(lse_dtype, {sizes.batch, sizes.heads, sizes.total_query});
  }
  check.derived("out", problem.out, Checker::output, out_like);
  check.derived("lse", problem.lse, Checker::output, lse_like);
  check_like(check, "d_out", problem.d_out, problem.out);
  check_like(check, "d_lse", problem.d_lse, problem.lse);
  const bool all = !problem.d_q.given() && !problem.d_k.given() && !problem.d_v.given() &&
                   !problem.d_bias.given();
  const auto gradient = [&](std::string_view name, TensorSpec& spec, const TensorSpec& of) {
    if (all || spec.given()) check.derived(name, spec, Checker::output, of);
  };
  gradient("d_q", problem.d_q, problem.q);
  gradient("d_k", problem.d_k, problem.k);
  gradient("d_v", problem.d_v, problem.v);
  check_bias(check, problem, varlen, all);
  check_blocks(check, problem, varlen);
  return problem;
}

Plan<AttentionTensors> make_plan(const Device& device, const AttentionProblem& given, Pass pass,
                                 const PlanOptions& options) {
  using namespace attention;
  const AttentionProblem problem = complete(given);
  Checker(kOp).that(pass == Pass::forward || problem.d_out.given(), "d_out",
                    "a tensor for the backward pass", "none", "pass the gradient of out");
  if (device.kind == DeviceKind::cuda && problem.check_indices && problem.cu_seqlens_q.given()) {
    fail(ErrorCode::unsupported, kOp, "check_indices", "false on a CUDA device", "true",
         "check cu_seqlens in a plan for the CPU");
  }
  return plan_with_variants<AttentionProblem, AttentionTensors>(
      kOp, kVariants, needs(problem, pass), kFeatureNames, uses, device, problem, pass, options);
}

void write_dropout_mask(const TensorSpec& spec, void* mask, double dropout,
                        std::uint64_t dropout_seed) {
  const Checker check("write_dropout_mask");
  check.given("mask", spec);
  check.dtype("mask", spec, {DType::u8, DType::boolean});
  check.rank("mask", spec, 4);
  check.writable("mask", spec);
  check.that(dropout >= 0 && dropout < 1, "dropout", "a probability in [0, 1)",
             fmt::format("{}", dropout));
  if (spec.numel() == 0) return;
  check.that(mask != nullptr, "mask", "a data pointer", "null");
  const attention::Dropout generator(dropout, dropout_seed);
  const View view(spec, mask);
  for (std::int64_t b = 0; b < spec.shape[0]; ++b) {
    for (std::int64_t h = 0; h < spec.shape[1]; ++h) {
      const auto plane = static_cast<std::uint64_t>(b * spec.shape[1] + h);
      for (std::int64_t i = 0; i < spec.shape[2]; ++i) {
        for (std::int64_t j = 0; j < spec.shape[3]; ++j) {
          view.set(generator.keeps(plane, i, j) ? 1 : 0, b, h, i, j);
        }
      }
    }
  }
}

}  // namespace pullback

// block_matmul: checks, defaults, and the choice of a variant.
#include <fmt/format.h>

#include <array>

#include "ops/block_matmul/problem.hpp"

namespace pullback {
namespace block_matmul {
namespace {

constexpr std::string_view kOp = "block_matmul";

constexpr Variant<BlockMatmulProblem, BlockMatmulTensors> kVariants[] = {
    {{"cpu", DeviceKind::cpu, CpuIsa::any, kAllFeatures, 10}, make_cpu},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, kAllFeatures, 10, 80}, make_cuda},
    {{"reference", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_reference},
    {{"textbook", DeviceKind::cpu, CpuIsa::any, kAllFeatures, -1}, make_textbook},
};

TensorUses uses(const BlockMatmulProblem& p, const BlockMatmulTensors& t, Pass pass) {
  TensorUses uses;
  const bool forward = pass == Pass::forward;
  // The gradient of a needs b, and that of b needs a.
  uses.read("a", p.a, t.a, forward || t.d_b != nullptr);
  uses.read("b", p.b, t.b, forward || t.d_a != nullptr);
  if (forward) {
    uses.write("c", p.c, t.c, true);
  } else {
    uses.read("d_c", p.d_c, t.d_c, t.d_a != nullptr || t.d_b != nullptr);
    uses.write("d_a", p.d_a, t.d_a);
    uses.write("d_b", p.d_b, t.d_b);
  }
  return uses;
}

}  // namespace

Sizes sizes_of(const BlockMatmulProblem& p) {
  const BlockLayout& layout = *p.layout;
  const std::int64_t rows = layout.rows() * p.block, columns = layout.columns() * p.block;
  Sizes sizes{};
  sizes.H = layout.heads();
  sizes.b = p.block;
  sizes.nnz = layout.nnz();
  sizes.Z = p.a.shape[0];
  switch (p.mode) {
    case BlockMatmulMode::sdd:
      sizes.M = rows;
      sizes.N = columns;
      sizes.K = p.a.shape[p.transpose_a ? 2 : 3];
      break;
    case BlockMatmulMode::dsd:
      sizes.M = p.transpose_a ? columns : rows;
      sizes.K = p.transpose_a ? rows : columns;
      sizes.N = p.b.shape[p.transpose_b ? 2 : 3];
      break;
    case BlockMatmulMode::dds:
      sizes.K = p.transpose_b ? columns : rows;
      sizes.N = p.transpose_b ? rows : columns;
      sizes.M = p.a.shape[p.transpose_a ? 3 : 2];
      break;
  }
  return sizes;
}

}  // namespace block_matmul

BlockMatmulProblem complete(const BlockMatmulProblem& problem) {
  using namespace block_matmul;
  const Checker check(kOp);
  BlockMatmulProblem p = problem;

  check.that(p.layout != nullptr, "layout", "a block layout", "null");
  check.block(p.block);
  check.given("a", p.a);
  check.dtype("a", p.a, {DType::f64, DType::f32, DType::bf16, DType::f16});
  check.rank("a", p.a, 4);
  check.given("b", p.b);
  check.dtype("b", p.b, {p.a.dtype});
  check.rank("b", p.b, 4);

  const auto [Z, H, M, N, K, b, nnz] = sizes_of(p);
  using Shape = std::array<std::int64_t, 4>;
  const auto shape = [Z = Z, H = H, b = b, nnz = nnz](bool sparse, bool transposed,
                                                      std::int64_t rows, std::int64_t columns) {
    if (sparse) return Shape{Z, nnz, b, b};
    return transposed ? Shape{Z, H, columns, rows} : Shape{Z, H, rows, columns};
  };
  check.shape("a", p.a, shape(p.mode == BlockMatmulMode::dsd, p.transpose_a, M, K));
  check.shape("b", p.b, shape(p.mode == BlockMatmulMode::dds, p.transpose_b, K, N));
  check.derived("c", p.c, Checker::output, p.a.dtype,
                shape(p.mode == BlockMatmulMode::sdd, p.transpose_c, M, N));
  check.derived("d_c", p.d_c, Checker::input, p.c);
  check.derived("d_a", p.d_a, Checker::output, p.a);
  check.derived("d_b", p.d_b, Checker::output, p.b);
  return p;
}

Plan<BlockMatmulTensors> make_plan(const Device& device, const BlockMatmulProblem& problem,
                                   Pass pass, const PlanOptions& options) {
  using namespace block_matmul;
  const BlockMatmulProblem p = complete(problem);
  const FeatureSet needs = FeatureSet{1} << static_cast<int>(p.mode);
  return plan_with_variants<BlockMatmulProblem, BlockMatmulTensors>(
      kOp, kVariants, needs, kFeatureNames, uses, device, p, pass, options);
}

bool operator==(const BlockMatmulProblem& a, const BlockMatmulProblem& b) {
  const bool same_layout = a.layout == b.layout ||
                           (a.layout != nullptr && b.layout != nullptr && *a.layout == *b.layout);
  return same_layout && a.mode == b.mode && a.transpose_a == b.transpose_a &&
         a.transpose_b == b.transpose_b && a.transpose_c == b.transpose_c && a.block == b.block &&
         a.a == b.a && a.b == b.b && a.c == b.c && a.d_c == b.d_c && a.d_a == b.d_a &&
         a.d_b == b.d_b;
}

}  // namespace pullback

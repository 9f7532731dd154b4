#include "ops/block_matmul/products.hpp"

namespace pullback::block_matmul {
namespace {

Sample sample_of(const BlockMatmulProblem& p, Role a_role, const TensorSpec& a, Role b_role,
                 const TensorSpec& b, Role c_role, const TensorSpec& c) {
  const Dense left = Dense::of(a_role, a, p.transpose_a);
  const Dense right = Dense::of(b_role, b, p.transpose_b);
  const Sparse sparse = Sparse::of(c_role, c, false);
  // cᵀ = op(b)ᵀ · op(a)ᵀ
  if (p.transpose_c) return {right.transpose(), left.transpose(), sparse};
  return {left, right, sparse};
}

Spread spread_of(const BlockMatmulProblem& p, Role a_role, const TensorSpec& a, Role b_role,
                 const TensorSpec& b, Role c_role, const TensorSpec& c) {
  if (p.mode == BlockMatmulMode::dsd) {
    return {Sparse::of(a_role, a, p.transpose_a), Dense::of(b_role, b, p.transpose_b),
            Dense::of(c_role, c, p.transpose_c)};
  }
  // cᵀ = op(b)ᵀ · op(a)ᵀ
  return {Sparse::of(b_role, b, !p.transpose_b), Dense::of(a_role, a, !p.transpose_a),
          Dense::of(c_role, c, !p.transpose_c)};
}

}  // namespace

std::vector<Product> products_of(const BlockMatmulProblem& p, Pass pass) {
  const bool sdd = p.mode == BlockMatmulMode::sdd;
  if (pass == Pass::forward) {
    if (sdd) return {sample_of(p, Role::a, p.a, Role::b, p.b, Role::c, p.c)};
    return {spread_of(p, Role::a, p.a, Role::b, p.b, Role::c, p.c)};
  }
  if (sdd) {
    const Sample from = sample_of(p, Role::a, p.a, Role::b, p.b, Role::d_c, p.d_c);
    const Sample to = sample_of(p, Role::d_a, p.d_a, Role::d_b, p.d_b, Role::d_c, p.d_c);
    return {Spread{from.sparse, from.right.transpose(), to.left},
            Spread{from.sparse.transpose(), from.left, to.right.transpose()}};
  }
  const Spread from = spread_of(p, Role::a, p.a, Role::b, p.b, Role::d_c, p.d_c);
  const Spread to = spread_of(p, Role::d_a, p.d_a, Role::d_b, p.d_b, Role::d_c, p.d_c);
  Sparse blocks = to.sparse;
  blocks.transposed = false;
  const Sample sample = from.sparse.transposed ? Sample{from.in, from.out.transpose(), blocks}
                                               : Sample{from.out, from.in.transpose(), blocks};
  return {sample, Spread{from.sparse.transpose(), from.out, to.in}};
}

std::shared_ptr<const BlockLayout> layout_of_products(const BlockMatmulProblem& problem) {
  if (problem.mode == BlockMatmulMode::sdd && problem.transpose_c) {
    return std::make_shared<const BlockLayout>(problem.layout->transposed());
  }
  return problem.layout;
}

}  // namespace pullback::block_matmul

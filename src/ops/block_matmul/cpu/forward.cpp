// The forward pass: one product.
#include "ops/block_matmul/cpu/products.hpp"

namespace pullback::block_matmul {

SampleForm sample_form(const BlockMatmulProblem& p, const void* a, const void* b,
                       const TensorSpec& c_spec, const void* c) {
  const Dense left = Dense::of(p.a, a, p.transpose_a), right = Dense::of(p.b, b, p.transpose_b);
  const Sparse sparse = Sparse::of(c_spec, c, false);
  // cᵀ = op(b)ᵀ · op(a)ᵀ
  if (p.transpose_c) return {right.transpose(), left.transpose(), sparse};
  return {left, right, sparse};
}

SpreadForm spread_form(const BlockMatmulProblem& p, const void* a, const void* b,
                       const TensorSpec& c_spec, const void* c) {
  if (p.mode == BlockMatmulMode::dsd) {
    return {Sparse::of(p.a, a, p.transpose_a), Dense::of(p.b, b, p.transpose_b),
            Dense::of(c_spec, c, p.transpose_c)};
  }
  // cᵀ = op(b)ᵀ · op(a)ᵀ
  return {Sparse::of(p.b, b, !p.transpose_b), Dense::of(p.a, a, !p.transpose_a),
          Dense::of(c_spec, c, !p.transpose_c)};
}

namespace {

class CpuForward final : public Body {
 public:
  CpuForward(const BlockMatmulProblem& problem, const Device& device)
      : problem_(problem), products_(problem, device) {
    workspace_bytes = products_.workspace_bytes();
    description = products_.description();
  }

  void run(Stream, const BlockMatmulTensors& t, Workspace workspace) const override {
    if (problem_.mode == BlockMatmulMode::sdd) {
      products_.sample(sample_form(problem_, t.a, t.b, problem_.c, t.c), workspace);
    } else {
      products_.spread(spread_form(problem_, t.a, t.b, problem_.c, t.c), workspace);
    }
  }

 private:
  BlockMatmulProblem problem_;
  Products products_;
};

}  // namespace

std::unique_ptr<Body> make_cpu_backward(const BlockMatmulProblem& problem, const Device& device);

std::unique_ptr<Body> make_cpu(const BlockMatmulProblem& problem, const Device& device, Pass pass) {
  if (pass == Pass::backward) return make_cpu_backward(problem, device);
  return std::make_unique<CpuForward>(problem, device);
}

}  // namespace pullback::block_matmul

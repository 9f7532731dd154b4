// The backward pass: for sdd two spreads, for dsd and dds a sample and a spread (products.hpp).
#include "ops/block_matmul/cpu/products.hpp"

namespace pullback::block_matmul {
namespace {

class CpuBackward final : public Body {
 public:
  CpuBackward(const BlockMatmulProblem& problem, const Device& device)
      : problem_(problem), products_(problem, device) {
    workspace_bytes = products_.workspace_bytes();
    description = products_.description();
    // The gradients have layouts of their own.
    gradients_ = problem;
    gradients_.a = problem.d_a;
    gradients_.b = problem.d_b;
  }

  void run(Stream, const BlockMatmulTensors& t, Workspace workspace) const override {
    if (problem_.mode == BlockMatmulMode::sdd) {
      const SampleForm forms = sample_form(problem_, t.a, t.b, problem_.d_c, t.d_c);
      const SampleForm to = sample_form(gradients_, t.d_a, t.d_b, problem_.d_c, t.d_c);
      if (to.left.data != nullptr) {
        products_.spread({forms.sparse, forms.right.transpose(), to.left}, workspace);
      }
      if (to.right.data != nullptr) {
        products_.spread({forms.sparse.transpose(), forms.left, to.right.transpose()}, workspace);
      }
      return;
    }
    const SpreadForm forms = spread_form(problem_, t.a, t.b, problem_.d_c, t.d_c);
    const SpreadForm to = spread_form(gradients_, t.d_a, t.d_b, problem_.d_c, t.d_c);
    if (to.sparse.data != nullptr) {
      Sparse blocks = to.sparse;
      blocks.transposed = false;
      if (forms.sparse.transposed) {
        products_.sample({forms.in, forms.out.transpose(), blocks}, workspace);
      } else {
        products_.sample({forms.out, forms.in.transpose(), blocks}, workspace);
      }
    }
    if (to.in.data != nullptr) {
      products_.spread({forms.sparse.transpose(), forms.out, to.in}, workspace);
    }
  }

 private:
  BlockMatmulProblem problem_, gradients_;
  Products products_;
};

}  // namespace

std::unique_ptr<Body> make_cpu_backward(const BlockMatmulProblem& problem, const Device& device) {
  return std::make_unique<CpuBackward>(problem, device);
}

}  // namespace pullback::block_matmul

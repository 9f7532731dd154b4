// The gradient of attention with one query, q = 0, so that both keys, 1 and -1, get weight 1/2.
// With values 1 and 3 the output is 2, the score gradients are -1/2 and 1/2, and d_q = -1/2 - 1/2.
#include <pullback/attention.hpp>
#include <pullback/error.hpp>

#include <cstdio>
#include <memory>
#include <new>

namespace {

bool run(const pullback::AttentionProblem& problem, pullback::Pass pass,
         const pullback::AttentionTensors& tensors) {
  const auto plan = pullback::make_plan(pullback::Device::cpu(), problem, pass);
  const std::align_val_t alignment{pullback::kWorkspaceAlignment};
  void* memory = ::operator new(plan.workspace_bytes(), alignment);
  plan.run({}, tensors, {memory, plan.workspace_bytes()});
  ::operator delete(memory, alignment);
  return plan.describe().starts_with("attention ");
}

}  // namespace

int main() {
  using pullback::DType, pullback::TensorSpec;
  const float q = 0, k[2] = {1, -1}, v[2] = {1, 3}, d_out = 1;
  float out = 0, lse = 0, d_q = 0, d_k[2] = {}, d_v[2] = {};
  pullback::AttentionProblem problem;
  problem.q = problem.d_out = TensorSpec::contiguous(DType::f32, {1, 1, 1, 1});
  problem.k = problem.v = TensorSpec::contiguous(DType::f32, {1, 2, 1, 1});
  pullback::AttentionTensors tensors;
  tensors.q = &q;
  tensors.k = k;
  tensors.v = v;
  tensors.out = &out;
  tensors.lse = &lse;
  const bool forward = run(problem, pullback::Pass::forward, tensors);
  tensors.d_out = &d_out;
  tensors.d_q = &d_q;
  tensors.d_k = d_k;
  tensors.d_v = d_v;
  const bool backward = run(problem, pullback::Pass::backward, tensors);
  if (!forward || !backward || out != 2 || d_q != -1 || d_k[0] != 0 || d_k[1] != 0 ||
      d_v[0] != 0.5f || d_v[1] != 0.5f) {
    std::printf("out %g d_q %g d_k %g %g d_v %g %g\n", out, d_q, d_k[0], d_k[1], d_v[0], d_v[1]);
    return 1;
  }

  // Errors cross the library's boundary as what they are.
  problem.v = TensorSpec::contiguous(DType::f64, {1, 2, 1, 1});
  try {
    pullback::complete(problem);
  } catch (const pullback::Error& error) {
    return error.code() == pullback::ErrorCode::invalid_argument ? 0 : 1;
  }
  return 1;
}

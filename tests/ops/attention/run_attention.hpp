// Runs attention through the C++ API on named tensors, for tests that say more than a case can.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/check.hpp"
#include "driver/case.hpp"
#include "pullback/attention.hpp"

namespace pullback::testing {

using driver::HostTensor;
using driver::TensorMap;

struct AttentionRun {
  AttentionProblem options;        // its specs are ignored: those of the tensors count
  TensorMap inputs;                // q k v d_out [bias d_lse cu_seqlens_q cu_seqlens_k]
  TensorMap outputs;               // given ones are used as they are, the rest are made
  std::string only_gradient = {};  // "d_k": the other gradients get null pointers
  Device device = Device::cpu(2);

  // The outputs of a forward and a backward pass.
  TensorMap operator()() const {
    AttentionProblem problem = options;
    TensorMap results = outputs;
    const auto spec = [&](const TensorMap& tensors, const char* name) {
      return driver::spec_of(tensors, name);
    };
    problem.q = spec(inputs, "q");
    problem.k = spec(inputs, "k");
    problem.v = spec(inputs, "v");
    problem.bias = spec(inputs, "bias");
    problem.d_out = spec(inputs, "d_out");
    problem.d_lse = spec(inputs, "d_lse");
    problem.cu_seqlens_q = spec(inputs, "cu_seqlens_q");
    problem.cu_seqlens_k = spec(inputs, "cu_seqlens_k");
    problem.out = spec(outputs, "out");
    problem.d_q = spec(outputs, "d_q");
    problem.d_k = spec(outputs, "d_k");
    problem.d_v = spec(outputs, "d_v");
    problem = complete(problem);

    const auto data = [&](const char* name) { return driver::data_of(inputs, name); };
    const auto output = [&](const char* name, const TensorSpec& of) -> void* {
      if (!of.given()) return nullptr;
      if (!results.contains(name)) results[name] = HostTensor(of);
      return results[name].data();
    };
    const auto gradient = [&](const char* name, const TensorSpec& of) -> void* {
      return only_gradient.empty() || only_gradient == name ? output(name, of) : nullptr;
    };
    AttentionTensors tensors;
    tensors.q = data("q");
    tensors.k = data("k");
    tensors.v = data("v");
    tensors.bias = data("bias");
    tensors.cu_seqlens_q = data("cu_seqlens_q");
    tensors.cu_seqlens_k = data("cu_seqlens_k");
    tensors.out = output("out", problem.out);
    tensors.lse = output("lse", problem.lse);
    run(problem, Pass::forward, tensors);
    tensors.d_out = data("d_out");
    tensors.d_lse = data("d_lse");
    tensors.d_q = gradient("d_q", problem.d_q);
    tensors.d_k = gradient("d_k", problem.d_k);
    tensors.d_v = gradient("d_v", problem.d_v);
    tensors.d_bias = gradient("d_bias", problem.d_bias);
    run(problem, Pass::backward, tensors);
    return results;
  }

 private:
  void run(const AttentionProblem& problem, Pass pass, const AttentionTensors& tensors) const {
    const auto plan = make_plan(device, problem, pass);
    plan.run({}, tensors, driver::WorkspaceBuffer(plan.workspace_bytes()).get());
  }
};

// Normal q, k, v and d_out.
inline AttentionRun normal_run(DType dtype, std::int64_t batch, std::int64_t query,
                               std::int64_t key, std::int64_t heads, std::int64_t kv_heads,
                               std::int64_t head_dim, std::uint64_t seed = 1) {
  driver::Random random(seed);
  AttentionRun run;
  run.inputs["q"] = driver::normal_tensor(dtype, {batch, query, heads, head_dim}, random);
  run.inputs["k"] = driver::normal_tensor(dtype, {batch, key, kv_heads, head_dim}, random);
  run.inputs["v"] = driver::normal_tensor(dtype, {batch, key, kv_heads, head_dim}, random);
  run.inputs["d_out"] = driver::normal_tensor(dtype, {batch, query, heads, head_dim}, random);
  return run;
}

// A view of `count` neighbours from `first` on along `dim`.
inline HostTensor slice(const HostTensor& tensor, int dim, std::int64_t first, std::int64_t count) {
  TensorSpec spec = tensor.spec();
  spec.shape[dim] = count;
  const std::int64_t bytes =
      first * spec.strides[dim] * static_cast<std::int64_t>(size_of(spec.dtype));
  return HostTensor::borrow(spec, static_cast<const std::byte*>(tensor.data()) + bytes,
                            std::make_shared<HostTensor>(tensor));
}

// The same elements without the dimension `dim`, which has size 1.
inline HostTensor squeezed(const HostTensor& tensor, int dim) {
  TensorSpec spec = tensor.spec();
  for (int d = dim; d + 1 < spec.rank; ++d) {
    spec.shape[d] = spec.shape[d + 1];
    spec.strides[d] = spec.strides[d + 1];
  }
  spec.shape[--spec.rank] = 0;
  return HostTensor::borrow(spec, tensor.data(), std::make_shared<HostTensor>(tensor));
}

inline void expect_near(const HostTensor& a, const HostTensor& b, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(a.numel(), b.numel()) << what;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (a.get(i) == b.get(i)) continue;  // infinities
    ASSERT_NEAR(a.get(i), b.get(i), tolerance) << what << " element " << i;
  }
}

inline void expect_near(const TensorMap& a, const TensorMap& b, double tolerance) {
  for (const auto& [name, tensor] : a) expect_near(tensor, b.find(name)->second, tolerance, name);
}

}  // namespace pullback::testing

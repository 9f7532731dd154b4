// Block-sparse attention composed of the ops equals dense attention with the layout as its mask,
// which is computed here in double: out, d_q, d_k, d_v.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/sparsity.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::TensorMemory;

constexpr std::int64_t kBatch = 2, kHeads = 2, kSeqLen = 96, kBlock = 16;
constexpr double kScale = 0.25;

struct Setting {
  Device device = Device::cpu(2);
  std::int64_t head_dim = 20;
};

struct Gradients {
  HostTensor out, d_q, d_k, d_v;
};

HostTensor dense_tensor(DType dtype, std::int64_t head_dim) {
  return HostTensor(TensorSpec::contiguous(dtype, {kBatch, kHeads, kSeqLen, head_dim}));
}

HostTensor random_tensor(DType dtype, std::int64_t head_dim, std::uint64_t seed) {
  driver::Random random(seed);
  HostTensor tensor = dense_tensor(dtype, head_dim);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal());
  return tensor;
}

template <class Problem, class Tensors>
void run(const Device& device, TensorMemory& memory, const Problem& problem, Pass pass,
         const Tensors& tensors) {
  const auto plan = make_plan(device, problem, pass);
  memory.reserve_workspace(plan.workspace_bytes());
  plan.run(memory.stream(), tensors, memory.workspace());
  memory.fetch();
}

// scores = q kᵀ at the blocks; p = softmax(scale · scores), in place; out = p v. Backward: d_p at
// the blocks, d_scores in place of d_p, and the products' own gradients.
Gradients block_sparse_attention(const Setting& setting, std::shared_ptr<const BlockLayout> layout,
                                 const HostTensor& q, const HostTensor& k, const HostTensor& v,
                                 const HostTensor& d_out) {
  const DType dtype = q.spec().dtype;
  const auto sparse = TensorSpec::contiguous(dtype, {kBatch, layout->nnz(), kBlock, kBlock});
  const auto dense = [&] { return dense_tensor(dtype, setting.head_dim); };
  const Gradients result{dense(), dense(), dense(), dense()};
  TensorMemory memory(setting.device);
  const void* const at_q = memory.input(q);
  const void* const at_k = memory.input(k);
  const void* const at_v = memory.input(v);
  const void* const at_d_out = memory.input(d_out);
  void* const p = memory.output(HostTensor(sparse));
  void* const d_scores = memory.output(HostTensor(sparse));
  BlockMatmulProblem qk, pv;
  qk.layout = pv.layout = layout;
  qk.block = pv.block = kBlock;
  qk.mode = BlockMatmulMode::sdd;
  qk.transpose_b = true;
  qk.a = q.spec();
  qk.b = k.spec();
  pv.mode = BlockMatmulMode::dsd;
  pv.a = sparse;
  pv.b = v.spec();
  BlockSoftmaxProblem softmax;
  softmax.layout = layout;
  softmax.block = kBlock;
  softmax.x = sparse;
  softmax.scale = kScale;

  const auto pass = [&](const auto& problem, Pass which, const auto& tensors) {
    run(setting.device, memory, problem, which, tensors);
  };
  pass(qk, Pass::forward, BlockMatmulTensors{.a = at_q, .b = at_k, .c = p});
  pass(softmax, Pass::forward, BlockSoftmaxTensors{.x = p, .y = p});
  pass(pv, Pass::forward, BlockMatmulTensors{.a = p, .b = at_v, .c = memory.output(result.out)});

  pass(pv, Pass::backward,
       BlockMatmulTensors{
           .a = p, .b = at_v, .d_c = at_d_out, .d_a = d_scores, .d_b = memory.output(result.d_v)});
  pass(softmax, Pass::backward, BlockSoftmaxTensors{.y = p, .d_y = d_scores, .d_x = d_scores});
  pass(qk, Pass::backward,
       BlockMatmulTensors{.a = at_q,
                          .b = at_k,
                          .d_c = d_scores,
                          .d_a = memory.output(result.d_q),
                          .d_b = memory.output(result.d_k)});
  return result;
}

std::vector<double> values_of(const HostTensor& tensor) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values.push_back(tensor.get(i));
  return values;
}

struct DenseGradients {
  std::vector<double> out, d_q, d_k, d_v;
};

DenseGradients dense_attention(const BlockLayout& layout, std::int64_t head_dim,
                               const std::vector<double>& q, const std::vector<double>& k,
                               const std::vector<double>& v, const std::vector<double>& d_out) {
  const std::vector<double> zeros(q.size());
  DenseGradients result{zeros, zeros, zeros, zeros};
  std::vector<double> p(kSeqLen), d_p(kSeqLen);
  for (std::int64_t plane = 0; plane < kBatch * kHeads; ++plane) {
    const auto at = [&](std::int64_t token, std::int64_t d) {
      return static_cast<std::size_t>((plane * kSeqLen + token) * head_dim + d);
    };
    for (std::int64_t i = 0; i < kSeqLen; ++i) {
      const auto seen = [&](std::int64_t j) {
        return layout.present(plane % kHeads, i / kBlock, j / kBlock);
      };
      double sum = 0, delta = 0;
      for (std::int64_t j = 0; j < kSeqLen; ++j) {
        double score = 0;
        for (std::int64_t d = 0; d < head_dim; ++d) score += q[at(i, d)] * k[at(j, d)];
        sum += p[static_cast<std::size_t>(j)] = seen(j) ? std::exp(kScale * score) : 0;
      }
      for (std::int64_t j = 0; j < kSeqLen; ++j) {
        double& probability = p[static_cast<std::size_t>(j)];
        if (sum > 0) probability /= sum;
        double& d_probability = d_p[static_cast<std::size_t>(j)] = 0;
        for (std::int64_t d = 0; d < head_dim; ++d) {
          result.out[at(i, d)] += probability * v[at(j, d)];
          result.d_v[at(j, d)] += probability * d_out[at(i, d)];
          d_probability += d_out[at(i, d)] * v[at(j, d)];
        }
        delta += probability * d_probability;
      }
      for (std::int64_t j = 0; j < kSeqLen; ++j) {
        const auto at_j = static_cast<std::size_t>(j);
        const double d_score = kScale * p[at_j] * (d_p[at_j] - delta);
        for (std::int64_t d = 0; d < head_dim; ++d) {
          result.d_q[at(i, d)] += d_score * k[at(j, d)];
          result.d_k[at(j, d)] += d_score * q[at(i, d)];
        }
      }
    }
  }
  return result;
}

void expect_near(const HostTensor& got, const std::vector<double>& expected, double tolerance,
                 const char* name) {
  double worst = 0;
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const double difference = std::abs(got.get(i) - expected[static_cast<std::size_t>(i)]);
    worst = std::isnan(difference) ? difference : std::max(worst, difference);
    if (std::isnan(worst)) break;
  }
  EXPECT_LE(worst, tolerance) << name;
}

void expect_equals_dense(BlockLayout blocks, const Setting& setting = {}) {
  const auto layout = std::make_shared<const BlockLayout>(std::move(blocks));
  const struct {
    DType dtype;
    double tolerance;
  } precisions[] = {{DType::f64, 1e-13}, {DType::f32, 2e-5}, {DType::bf16, 0.15}};
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    const HostTensor q = random_tensor(dtype, setting.head_dim, 1);
    const HostTensor k = random_tensor(dtype, setting.head_dim, 2);
    const HostTensor v = random_tensor(dtype, setting.head_dim, 3);
    const HostTensor d_out = random_tensor(dtype, setting.head_dim, 4);
    const Gradients ours = block_sparse_attention(setting, layout, q, k, v, d_out);
    const DenseGradients dense = dense_attention(*layout, setting.head_dim, values_of(q),
                                                 values_of(k), values_of(v), values_of(d_out));
    expect_near(ours.out, dense.out, tolerance, "out");
    expect_near(ours.d_q, dense.d_q, tolerance, "d_q");
    expect_near(ours.d_k, dense.d_k, tolerance, "d_k");
    expect_near(ours.d_v, dense.d_v, tolerance, "d_v");
  }
}

constexpr auto kBack = SparsityDirection::unidirectional;

TEST(BlockSparseAttention, equals_dense_attention_under_dense) {
  expect_equals_dense(make_layout(DenseSparsity{.num_heads = kHeads}, kSeqLen));
}

TEST(BlockSparseAttention, equals_dense_attention_under_fixed) {
  expect_equals_dense(make_layout(FixedSparsity{.num_heads = kHeads,
                                                .different_layout_per_head = true,
                                                .num_local_blocks = 2,
                                                .num_different_global_patterns = 2},
                                  kSeqLen));
  expect_equals_dense(make_layout(FixedSparsity{.num_heads = kHeads, .attention = kBack}, kSeqLen));
}

TEST(BlockSparseAttention, equals_dense_attention_under_variable) {
  expect_equals_dense(make_layout(VariableSparsity{.num_heads = kHeads,
                                                   .different_layout_per_head = true,
                                                   .num_random_blocks = 1,
                                                   .local_window_blocks = {1, 2}},
                                  kSeqLen));
}

TEST(BlockSparseAttention, equals_dense_attention_under_big_bird) {
  expect_equals_dense(make_layout(
      BigBirdSparsity{.num_heads = kHeads, .different_layout_per_head = true}, kSeqLen));
  expect_equals_dense(make_layout(
      BigBirdSparsity{.num_heads = kHeads, .num_random_blocks = 2, .attention = kBack}, kSeqLen));
}

TEST(BlockSparseAttention, equals_dense_attention_under_bs_longformer) {
  expect_equals_dense(
      make_layout(BSLongformerSparsity{.num_heads = kHeads, .global_block_indices = {2}}, kSeqLen));
}

TEST(BlockSparseAttention, equals_dense_attention_under_local_sliding_window) {
  expect_equals_dense(make_layout(LocalSlidingWindowSparsity{.num_heads = kHeads}, kSeqLen));
}

// Rows 1 and 4 of head 0 see nothing: zeros, not NaN, in out and in all gradients.
TEST(BlockSparseAttention, equals_dense_attention_with_empty_rows) {
  std::vector<std::uint8_t> present(kHeads * 6 * 6, 0);
  for (std::size_t i = 0; i < present.size(); ++i) present[i] = i % 3 == 0 && i / 6 % 3 != 1;
  expect_equals_dense(BlockLayout(kHeads, 6, 6, present));
}

// On tensor cores with the head dimension of 64, on plain arithmetic with 20.
TEST(BlockSparseAttention, equals_dense_attention_on_cuda) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  for (const std::int64_t head_dim : {20, 64}) {
    SCOPED_TRACE(head_dim);
    const Setting setting{Device::cuda(), head_dim};
    expect_equals_dense(
        make_layout(FixedSparsity{.num_heads = kHeads, .attention = kBack}, kSeqLen), setting);
    expect_equals_dense(
        make_layout(BigBirdSparsity{.num_heads = kHeads, .different_layout_per_head = true},
                    kSeqLen),
        setting);
    std::vector<std::uint8_t> present(kHeads * 6 * 6, 0);
    for (std::size_t i = 0; i < present.size(); ++i) present[i] = i % 3 == 0 && i / 6 % 3 != 1;
    expect_equals_dense(BlockLayout(kHeads, 6, 6, present), setting);
  }
}

}  // namespace
}  // namespace pullback

// Attention through the C ABI gives the very bits of the C++ API, with every option set to
// something that changes the result.
#include <cmath>
#include <vector>

#include "capi/c_ops.hpp"
#include "pullback/attention.hpp"

namespace pullback::testing {
namespace {

TEST(CAttention, equals_cpp) {
  Random random(1);
  const HostTensor q = normal_tensor(DType::f32, {2, 9, 4, 8}, random);
  const HostTensor k = normal_tensor(DType::f32, {2, 7, 2, 8}, random);
  const HostTensor v = normal_tensor(DType::f32, {2, 7, 2, 5}, random);
  const HostTensor bias = normal_tensor(DType::f32, {1, 4, 1, 7}, random);
  const HostTensor d_out = normal_tensor(DType::f32, {2, 9, 4, 5}, random);
  const HostTensor d_lse = normal_tensor(DType::f32, {2, 4, 9}, random);

  AttentionProblem problem;
  problem.q = q.spec();
  problem.k = k.spec();
  problem.v = v.spec();
  problem.bias = bias.spec();
  problem.d_out = d_out.spec();
  problem.d_lse = d_lse.spec();
  problem.scale = 0.3;
  problem.softcap = 2.5;
  problem.mask = {3, 1, Corner::bottom_right};
  problem.dropout = 0.25;
  problem.dropout_seed = 42;
  const AttentionProblem full = complete(problem);
  const HostTensor out(full.out), lse(full.lse), d_q(full.d_q), d_k(full.d_k), d_v(full.d_v),
      d_bias(full.d_bias);
  AttentionTensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.bias = bias.data();
  tensors.out = out.data();
  tensors.lse = lse.data();
  run(make_plan(Device::cpu(2), problem, Pass::forward), tensors);
  tensors.d_out = d_out.data();
  tensors.d_lse = d_lse.data();
  tensors.d_q = d_q.data();
  tensors.d_k = d_k.data();
  tensors.d_v = d_v.data();
  tensors.d_bias = d_bias.data();
  run(make_plan(Device::cpu(2), problem, Pass::backward), tensors);

  const DLTensor dl_q = describe(q), dl_k = describe(k), dl_v = describe(v),
                 dl_bias = describe(bias), dl_d_out = describe(d_out), dl_d_lse = describe(d_lse);
  const double scale = 0.3;
  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  c_problem.q = &dl_q;
  c_problem.k = &dl_k;
  c_problem.v = &dl_v;
  c_problem.bias = &dl_bias;
  c_problem.d_out = &dl_d_out;
  c_problem.d_lse = &dl_d_lse;
  c_problem.scale = &scale;
  c_problem.softcap = 2.5;
  c_problem.mask_left = 3;
  c_problem.mask_right = 1;
  c_problem.mask_corner = PULLBACK_BOTTOM_RIGHT;
  c_problem.dropout = 0.25;
  c_problem.dropout_seed = 42;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_attention_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan forward(made);
  ASSERT_OK(pullback_attention_plan(&c_problem, PULLBACK_BACKWARD, nullptr, &made));
  const CPlan backward(made);
  const HostTensor c_out = allocate(forward, "out"), c_lse = allocate(forward, "lse"),
                   c_d_q = allocate(backward, "d_q"), c_d_k = allocate(backward, "d_k"),
                   c_d_v = allocate(backward, "d_v"), c_d_bias = allocate(backward, "d_bias");
  pullback_attention_tensors c_tensors = PULLBACK_ATTENTION_TENSORS_INIT;
  c_tensors.q = q.data();
  c_tensors.k = k.data();
  c_tensors.v = v.data();
  c_tensors.bias = bias.data();
  c_tensors.out = c_out.data();
  c_tensors.lse = c_lse.data();
  run(pullback_attention_run, forward, c_tensors);
  c_tensors.d_out = d_out.data();
  c_tensors.d_lse = d_lse.data();
  c_tensors.d_q = c_d_q.data();
  c_tensors.d_k = c_d_k.data();
  c_tensors.d_v = c_d_v.data();
  c_tensors.d_bias = c_d_bias.data();
  run(pullback_attention_run, backward, c_tensors);

  EXPECT_TRUE(same_bits(c_out, out));
  EXPECT_TRUE(same_bits(c_lse, lse));
  EXPECT_TRUE(same_bits(c_d_q, d_q));
  EXPECT_TRUE(same_bits(c_d_k, d_k));
  EXPECT_TRUE(same_bits(c_d_v, d_v));
  EXPECT_TRUE(same_bits(c_d_bias, d_bias));
}

TEST(CAttention, block_layout_equals_cpp) {
  Random random(1);
  const HostTensor q = normal_tensor(DType::f32, {2, 40, 2, 8}, random);
  const HostTensor k = normal_tensor(DType::f32, {2, 20, 2, 8}, random);
  const HostTensor v = normal_tensor(DType::f32, {2, 20, 2, 8}, random);
  // [B,H,R,C] of blocks of 16.
  std::vector<std::uint8_t> present(2 * 2 * 3 * 2);
  for (std::size_t i = 0; i < present.size(); ++i) present[i] = i % 3 != 0;

  AttentionProblem problem;
  problem.q = q.spec();
  problem.k = k.spec();
  problem.v = v.spec();
  problem.blocks = {std::make_shared<const BlockLayout>(4, 3, 2, present), 2, 16};
  const HostTensor out(complete(problem).out);
  AttentionTensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.out = out.data();
  run(make_plan(Device::cpu(2), problem, Pass::forward), tensors);

  pullback_block_layout* layout = nullptr;
  ASSERT_OK(pullback_block_layout_create(4, 3, 2, present.data(), &layout));
  const DLTensor dl_q = describe(q), dl_k = describe(k), dl_v = describe(v);
  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  c_problem.q = &dl_q;
  c_problem.k = &dl_k;
  c_problem.v = &dl_v;
  c_problem.layout = layout;
  c_problem.layout_batches = 2;
  c_problem.block = 16;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_attention_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan plan(made);
  pullback_block_layout_destroy(layout);
  const HostTensor c_out = allocate(plan, "out");
  pullback_attention_tensors c_tensors = PULLBACK_ATTENTION_TENSORS_INIT;
  c_tensors.q = q.data();
  c_tensors.k = k.data();
  c_tensors.v = v.data();
  c_tensors.out = c_out.data();
  run(pullback_attention_run, plan, c_tensors);
  EXPECT_TRUE(same_bits(c_out, out));
}

TEST(CAttention, varlen_equals_cpp) {
  Random random(2);
  const HostTensor q = normal_tensor(DType::f32, {6, 2, 4}, random);
  const HostTensor offsets = tensor_of(DType::i32, {3}, {0, 2, 6});
  AttentionProblem problem;
  problem.q = problem.k = problem.v = q.spec();
  problem.cu_seqlens_q = problem.cu_seqlens_k = offsets.spec();
  problem.max_seqlen_q = problem.max_seqlen_k = 4;
  const HostTensor out(complete(problem).out);
  AttentionTensors tensors;
  tensors.q = tensors.k = tensors.v = q.data();
  tensors.cu_seqlens_q = tensors.cu_seqlens_k = offsets.data();
  tensors.out = out.data();
  run(make_plan(Device::cpu(1), problem, Pass::forward), tensors);

  const DLTensor dl_q = describe(q), dl_offsets = describe(offsets);
  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  c_problem.q = c_problem.k = c_problem.v = &dl_q;
  c_problem.cu_seqlens_q = c_problem.cu_seqlens_k = &dl_offsets;
  c_problem.max_seqlen_q = c_problem.max_seqlen_k = 4;
  c_problem.flags = PULLBACK_CHECK_INDICES;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_attention_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan plan(made);
  const HostTensor c_out = allocate(plan, "out");
  pullback_attention_tensors c_tensors = PULLBACK_ATTENTION_TENSORS_INIT;
  c_tensors.q = c_tensors.k = c_tensors.v = q.data();
  c_tensors.cu_seqlens_q = c_tensors.cu_seqlens_k = offsets.data();
  c_tensors.out = c_out.data();
  run(pullback_attention_run, plan, c_tensors);
  EXPECT_TRUE(same_bits(c_out, out));

  // With PULLBACK_CHECK_INDICES a bad entry is reported; nothing is written.
  offsets.set(1, 99);
  const HostTensor untouched(c_out.spec()), refused(c_out.spec());
  c_tensors.out = refused.data();
  const driver::WorkspaceBuffer workspace = workspace_of(plan);
  EXPECT_EQ(pullback_attention_run(plan.get(), nullptr, &c_tensors, workspace.get().data,
                                   workspace.get().bytes),
            PULLBACK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pullback_last_error()).find("99"), std::string::npos)
      << pullback_last_error();
  EXPECT_TRUE(same_bits(refused, untouched));
}

TEST(CAttention, dropout_mask_equals_cpp) {
  const HostTensor mask(TensorSpec::contiguous(DType::u8, {1, 2, 5, 9})),
      c_mask(TensorSpec::contiguous(DType::u8, {1, 2, 5, 9}));
  write_dropout_mask(mask.spec(), mask.data(), 0.5, 7);
  const DLTensor dl_mask = describe(c_mask);
  ASSERT_OK(pullback_write_dropout_mask(&dl_mask, 0.5, 7));
  EXPECT_TRUE(same_bits(c_mask, mask));

  DLTensor without_data = dl_mask;
  without_data.data = nullptr;
  EXPECT_EQ(pullback_write_dropout_mask(&without_data, 0.5, 7), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(pullback_write_dropout_mask(&dl_mask, 1.5, 7), PULLBACK_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace pullback::testing

// Attention through the C ABI gives the very bits of the C++ API, with every option set to
// something that changes the result.
#include <cstring>
#include <utility>
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
  const auto describe_in = [&](auto& problem, auto&& as) {
    problem.q = as(q);
    problem.k = as(k);
    problem.v = as(v);
    problem.bias = as(bias);
    problem.d_out = as(d_out);
    problem.d_lse = as(d_lse);
    problem.softcap = 2.5;
    problem.dropout = 0.25;
    problem.dropout_seed = 42;
  };
  AttentionProblem problem;
  describe_in(problem, AsSpec());
  problem.scale = 0.3;
  problem.mask = {3, 1, Corner::bottom_right};

  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  AsDLTensor as_dl_tensor;
  describe_in(c_problem, as_dl_tensor);
  const double scale = 0.3;
  c_problem.scale = &scale;
  c_problem.mask_left = 3;
  c_problem.mask_right = 1;
  c_problem.mask_corner = PULLBACK_BOTTOM_RIGHT;

  expect_bits_of_cpp(
      problem,
      plan_passes(pullback_attention_plan, c_problem, {PULLBACK_FORWARD, PULLBACK_BACKWARD}),
      pullback_attention_run, {"out", "lse", "d_q", "d_k", "d_v", "d_bias"},
      [&](auto& tensors, Pass pass, const TensorMap& outputs) {
        tensors.q = q.data();
        tensors.k = k.data();
        tensors.v = v.data();
        tensors.bias = bias.data();
        tensors.out = outputs.at("out").data();
        tensors.lse = outputs.at("lse").data();
        if (pass == Pass::forward) return;
        tensors.d_out = d_out.data();
        tensors.d_lse = d_lse.data();
        tensors.d_q = outputs.at("d_q").data();
        tensors.d_k = outputs.at("d_k").data();
        tensors.d_v = outputs.at("d_v").data();
        tensors.d_bias = outputs.at("d_bias").data();
      });
}

TEST(CAttention, blocks_need_a_layout) {
  const HostTensor x(TensorSpec::contiguous(DType::f32, {1, 16, 1, 8}));
  AsDLTensor as_dl_tensor;
  pullback_attention_problem problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  problem.q = problem.k = problem.v = as_dl_tensor(x);
  for (const auto& [batches, block] : {std::pair<std::int64_t, std::int64_t>{0, 16}, {2, 0}}) {
    problem.layout_batches = batches;
    problem.block = block;
    pullback_plan* plan = nullptr;
    EXPECT_EQ(pullback_attention_plan(&problem, PULLBACK_FORWARD, nullptr, &plan),
              PULLBACK_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(pullback_last_error(), "attention: layout: expected one"), nullptr);
  }
}

TEST(CAttention, block_layout_equals_cpp) {
  Random random(1);
  const HostTensor q = normal_tensor(DType::f32, {2, 40, 2, 8}, random);
  const HostTensor k = normal_tensor(DType::f32, {2, 20, 2, 8}, random);
  const HostTensor v = normal_tensor(DType::f32, {2, 20, 2, 8}, random);
  // [B,H,R,C] of blocks of 16.
  std::vector<std::uint8_t> present(2 * 2 * 3 * 2);
  for (std::size_t i = 0; i < present.size(); ++i) present[i] = i % 3 != 0;
  const auto describe_in = [&](auto& problem, auto&& as) {
    problem.q = as(q);
    problem.k = as(k);
    problem.v = as(v);
  };
  AttentionProblem problem;
  describe_in(problem, AsSpec());
  problem.blocks = {std::make_shared<const BlockLayout>(4, 3, 2, present), 2, 16};

  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  AsDLTensor as_dl_tensor;
  describe_in(c_problem, as_dl_tensor);
  pullback_block_layout* layout = nullptr;
  ASSERT_OK(pullback_block_layout_create(4, 3, 2, present.data(), &layout));
  c_problem.layout = layout;
  c_problem.layout_batches = 2;
  c_problem.block = 16;
  const auto plans = plan_passes(pullback_attention_plan, c_problem, {PULLBACK_FORWARD});
  pullback_block_layout_destroy(layout);  // the plans keep what they need

  expect_bits_of_cpp(problem, plans, pullback_attention_run, {"out"},
                     [&](auto& tensors, Pass, const TensorMap& outputs) {
                       tensors.q = q.data();
                       tensors.k = k.data();
                       tensors.v = v.data();
                       tensors.out = outputs.at("out").data();
                     });
}

TEST(CAttention, varlen_equals_cpp) {
  Random random(2);
  const HostTensor q = normal_tensor(DType::f32, {6, 2, 4}, random);
  const HostTensor offsets = tensor_of(DType::i32, {3}, {0, 2, 6});
  const auto describe_in = [&](auto& problem, auto&& as) {
    problem.q = problem.k = problem.v = as(q);
    problem.cu_seqlens_q = problem.cu_seqlens_k = as(offsets);
    problem.max_seqlen_q = problem.max_seqlen_k = 4;
  };
  AttentionProblem problem;
  describe_in(problem, AsSpec());
  pullback_attention_problem c_problem = PULLBACK_ATTENTION_PROBLEM_INIT;
  AsDLTensor as_dl_tensor;
  describe_in(c_problem, as_dl_tensor);
  c_problem.flags = PULLBACK_CHECK_INDICES;
  const auto plans = plan_passes(pullback_attention_plan, c_problem, {PULLBACK_FORWARD});
  const auto point = [&](auto& tensors, Pass, const TensorMap& outputs) {
    tensors.q = tensors.k = tensors.v = q.data();
    tensors.cu_seqlens_q = tensors.cu_seqlens_k = offsets.data();
    tensors.out = outputs.at("out").data();
  };
  const TensorMap outputs =
      expect_bits_of_cpp(problem, plans, pullback_attention_run, {"out"}, point);

  // With PULLBACK_CHECK_INDICES a bad entry is reported; nothing is written.
  offsets.set(1, 99);
  const HostTensor untouched(outputs.at("out").spec()), refused(outputs.at("out").spec());
  pullback_attention_tensors tensors = PULLBACK_ATTENTION_TENSORS_INIT;
  point(tensors, Pass::forward, {{"out", refused}});
  const driver::WorkspaceBuffer workspace = workspace_of(plans.front());
  EXPECT_EQ(pullback_attention_run(plans.front().get(), nullptr, &tensors, workspace.get().data,
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

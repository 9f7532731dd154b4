// Each op through the C ABI gives the very bits of the C++ API, with every option set to something
// that changes the result.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "capi/c_tensors.hpp"
#include "driver/case.hpp"
#include "pullback/attention.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/entmax.hpp"
#include "pullback/segment.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::testing {
namespace {

using driver::HostTensor;
using driver::normal_tensor;
using driver::Random;
using driver::same_bits;
using driver::tensor_of;

#define ASSERT_OK(call) ASSERT_EQ(call, PULLBACK_OK) << pullback_last_error()

template <class Tensors>
void run(const Plan<Tensors>& plan, const Tensors& tensors) {
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  plan.run({}, tensors, workspace.get());
}

template <class Run, class CTensors>
void run(Run run_op, const CPlan& plan, const CTensors& tensors) {
  const driver::WorkspaceBuffer workspace = workspace_of(plan);
  ASSERT_OK(run_op(plan.get(), nullptr, &tensors, workspace.get().data, workspace.get().bytes));
}

bool differs(const HostTensor& a, const HostTensor& b) { return !same_bits(a, b); }

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

TEST(CBlockLayout, round_trip) {
  const std::vector<std::uint8_t> present = {1, 0, 1, 0, 0, 1};
  pullback_block_layout* made = nullptr;
  ASSERT_OK(pullback_block_layout_create(1, 2, 3, present.data(), &made));
  const CLayout layout(made);
  std::int64_t heads = 0, rows = 0, columns = 0, nnz = 0;
  ASSERT_OK(pullback_block_layout_size(layout.get(), &heads, &rows, &columns, &nnz));
  EXPECT_EQ(heads, 1);
  EXPECT_EQ(rows, 2);
  EXPECT_EQ(columns, 3);
  EXPECT_EQ(nnz, 3);
  std::vector<std::uint8_t> copy(6, 9);
  ASSERT_OK(pullback_block_layout_present(layout.get(), copy.data(), copy.size()));
  EXPECT_EQ(copy, present);
  EXPECT_EQ(pullback_block_layout_present(layout.get(), copy.data(), 5), PULLBACK_INVALID_ARGUMENT);

  const std::uint8_t two = 2;
  EXPECT_EQ(pullback_block_layout_create(1, 1, 1, &two, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(pullback_block_layout_create(-1, 1, 1, &two, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(pullback_block_layout_create(INT64_MAX, INT64_MAX, INT64_MAX, &two, &made),
            PULLBACK_INVALID_ARGUMENT);
}

std::vector<std::uint8_t> bytes_of(const CLayout& layout) {
  std::int64_t heads = 0, rows = 0, columns = 0;
  pullback_block_layout_size(layout.get(), &heads, &rows, &columns, nullptr);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(heads * rows * columns));
  pullback_block_layout_present(layout.get(), bytes.data(), bytes.size());
  return bytes;
}

template <class Make, class C, class Sparsity>
void expect_same_layout(Make make, const C& given, const Sparsity& sparsity) {
  pullback_block_layout* made = nullptr;
  ASSERT_OK(make(&given, 32 * 11, &made));
  EXPECT_EQ(bytes_of(CLayout(made)), make_layout(sparsity, 32 * 11).to_bytes());
}

TEST(CSparsity, defaults_are_those_of_cpp) {
  const auto same = [](auto make, auto given, auto sparsity) {
    given.block = sparsity.block = 32;
    expect_same_layout(make, given, sparsity);
  };
  same(pullback_dense_layout, pullback_dense_sparsity PULLBACK_DENSE_SPARSITY_INIT,
       DenseSparsity{});
  same(pullback_fixed_layout, pullback_fixed_sparsity PULLBACK_FIXED_SPARSITY_INIT,
       FixedSparsity{});
  same(pullback_variable_layout, pullback_variable_sparsity PULLBACK_VARIABLE_SPARSITY_INIT,
       VariableSparsity{});
  same(pullback_bigbird_layout, pullback_bigbird_sparsity PULLBACK_BIGBIRD_SPARSITY_INIT,
       BigBirdSparsity{});
  same(pullback_bslongformer_layout,
       pullback_bslongformer_sparsity PULLBACK_BSLONGFORMER_SPARSITY_INIT, BSLongformerSparsity{});
  same(pullback_local_sliding_window_layout,
       pullback_local_sliding_window_sparsity PULLBACK_LOCAL_SLIDING_WINDOW_SPARSITY_INIT,
       LocalSlidingWindowSparsity{});
}

TEST(CSparsity, every_parameter_arrives) {
  FixedSparsity fixed{2, 32, true, 6, 2, SparsityDirection::unidirectional, false, 3, false};
  pullback_fixed_sparsity c_fixed = PULLBACK_FIXED_SPARSITY_INIT;
  c_fixed = {
      sizeof(c_fixed),
      2,
      32,
      PULLBACK_UNIDIRECTIONAL | PULLBACK_DIFFERENT_LAYOUT_PER_HEAD | PULLBACK_KEEP_ABOVE_DIAGONAL,
      6,
      2,
      3};
  expect_same_layout(pullback_fixed_layout, c_fixed, fixed);

  VariableSparsity variable;
  variable.num_heads = 3;
  variable.block = 32;
  variable.different_layout_per_head = true;
  variable.num_random_blocks = 2;
  variable.local_window_blocks = {2, 3};
  variable.global_block_indices = {1, 5};
  variable.global_block_end_indices = {2, 7};
  variable.horizontal_global_attention = true;
  variable.seed = 5;
  const std::int64_t windows[] = {2, 3}, begins[] = {1, 5}, ends[] = {2, 7};
  const pullback_variable_sparsity c_variable = {
      sizeof(c_variable),
      3,
      32,
      PULLBACK_DIFFERENT_LAYOUT_PER_HEAD | PULLBACK_HORIZONTAL_GLOBAL,
      2,
      windows,
      2,
      begins,
      2,
      ends,
      5};
  expect_same_layout(pullback_variable_layout, c_variable, variable);

  BigBirdSparsity bigbird;
  bigbird.num_heads = 2;
  bigbird.block = 32;
  bigbird.different_layout_per_head = true;
  bigbird.num_random_blocks = 2;
  bigbird.num_sliding_window_blocks = 5;
  bigbird.num_global_blocks = 2;
  bigbird.seed = 11;
  expect_same_layout(pullback_bigbird_layout,
                     pullback_bigbird_sparsity{sizeof(pullback_bigbird_sparsity), 2, 32,
                                               PULLBACK_DIFFERENT_LAYOUT_PER_HEAD, 2, 5, 2, 11},
                     bigbird);

  BSLongformerSparsity longformer;
  longformer.block = 32;
  longformer.num_sliding_window_blocks = 1;
  longformer.global_block_indices = {2};
  longformer.global_block_end_indices = {4};
  longformer.attention = SparsityDirection::unidirectional;
  const std::int64_t begin = 2, end = 4;
  expect_same_layout(pullback_bslongformer_layout,
                     pullback_bslongformer_sparsity{sizeof(pullback_bslongformer_sparsity), 1, 32,
                                                    PULLBACK_UNIDIRECTIONAL, 1, &begin, 1, &end},
                     longformer);

  LocalSlidingWindowSparsity local;
  local.num_heads = 2;
  local.block = 32;
  local.num_sliding_window_blocks = 5;
  local.attention = SparsityDirection::bidirectional;
  expect_same_layout(pullback_local_sliding_window_layout,
                     pullback_local_sliding_window_sparsity{
                         sizeof(pullback_local_sliding_window_sparsity), 2, 32, 0, 5},
                     local);
}

TEST(CSparsity, bad_parameters_are_refused) {
  pullback_block_layout* made = nullptr;
  pullback_variable_sparsity variable = PULLBACK_VARIABLE_SPARSITY_INIT;
  variable.num_global_block_indices = 3;
  EXPECT_EQ(pullback_variable_layout(&variable, 64, &made), PULLBACK_INVALID_ARGUMENT);
  pullback_bigbird_sparsity bigbird = PULLBACK_BIGBIRD_SPARSITY_INIT;
  bigbird.flags = PULLBACK_HORIZONTAL_GLOBAL;
  EXPECT_EQ(pullback_bigbird_layout(&bigbird, 64, &made), PULLBACK_INVALID_ARGUMENT);
  const pullback_dense_sparsity dense = PULLBACK_DENSE_SPARSITY_INIT;
  EXPECT_EQ(pullback_dense_layout(&dense, 17, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(made, nullptr);
}

TEST(CBlockSoftmax, equals_cpp) {
  const std::vector<std::uint8_t> present = {1, 0, 1, 1};
  const auto shared = std::make_shared<const BlockLayout>(1, 2, 2, present);
  Random random(3);
  const HostTensor x = normal_tensor(DType::f32, {2, 3, 16, 16}, random);
  const HostTensor rpe = normal_tensor(DType::f32, {1, 1, 32, 32}, random);
  const HostTensor padding = driver::integer_tensor(DType::f32, {2, 32}, random, 1);
  const HostTensor mask = normal_tensor(DType::f32, {32, 32}, random);
  const HostTensor d_y = normal_tensor(DType::f32, {2, 3, 16, 16}, random);
  BlockSoftmaxProblem problem;
  problem.layout = shared;
  problem.block = 16;
  problem.x = x.spec();
  problem.rpe = rpe.spec();
  problem.key_padding_mask = padding.spec();
  problem.attn_mask = mask.spec();
  problem.d_y = d_y.spec();
  problem.key_padding_mode = MaskMode::keep;
  problem.attn_mask_mode = MaskMode::add;
  problem.scale = 0.7;
  const BlockSoftmaxProblem full = complete(problem);
  const HostTensor y(full.y), d_x(full.d_x), d_rpe(full.d_rpe), d_mask(full.d_attn_mask);
  BlockSoftmaxTensors tensors;
  tensors.x = x.data();
  tensors.rpe = rpe.data();
  tensors.key_padding_mask = padding.data();
  tensors.attn_mask = mask.data();
  tensors.y = y.data();
  run(make_plan(Device::cpu(1), problem, Pass::forward), tensors);
  tensors.d_y = d_y.data();
  tensors.d_x = d_x.data();
  tensors.d_rpe = d_rpe.data();
  tensors.d_attn_mask = d_mask.data();
  run(make_plan(Device::cpu(1), problem, Pass::backward), tensors);

  pullback_block_layout* layout = nullptr;
  ASSERT_OK(pullback_block_layout_create(1, 2, 2, present.data(), &layout));
  const DLTensor dl_x = describe(x), dl_rpe = describe(rpe), dl_padding = describe(padding),
                 dl_mask = describe(mask), dl_d_y = describe(d_y);
  pullback_block_softmax_problem c_problem = PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT;
  c_problem.layout = layout;
  c_problem.block = 16;
  c_problem.x = &dl_x;
  c_problem.rpe = &dl_rpe;
  c_problem.key_padding_mask = &dl_padding;
  c_problem.attn_mask = &dl_mask;
  c_problem.d_y = &dl_d_y;
  c_problem.key_padding_mode = PULLBACK_MASK_KEEP;
  c_problem.attn_mask_mode = PULLBACK_MASK_ADD;
  c_problem.scale = 0.7;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_block_softmax_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan forward(made);
  ASSERT_OK(pullback_block_softmax_plan(&c_problem, PULLBACK_BACKWARD, nullptr, &made));
  const CPlan backward(made);
  pullback_block_layout_destroy(layout);  // the plans keep what they need
  const HostTensor c_y = allocate(forward, "y"), c_d_x = allocate(backward, "d_x"),
                   c_d_rpe = allocate(backward, "d_rpe"),
                   c_d_mask = allocate(backward, "d_attn_mask");
  pullback_block_softmax_tensors c_tensors = PULLBACK_BLOCK_SOFTMAX_TENSORS_INIT;
  c_tensors.x = x.data();
  c_tensors.rpe = rpe.data();
  c_tensors.key_padding_mask = padding.data();
  c_tensors.attn_mask = mask.data();
  c_tensors.y = c_y.data();
  run(pullback_block_softmax_run, forward, c_tensors);
  c_tensors.d_y = d_y.data();
  c_tensors.d_x = c_d_x.data();
  c_tensors.d_rpe = c_d_rpe.data();
  c_tensors.d_attn_mask = c_d_mask.data();
  run(pullback_block_softmax_run, backward, c_tensors);
  EXPECT_TRUE(same_bits(c_y, y));
  EXPECT_TRUE(same_bits(c_d_x, d_x));
  EXPECT_TRUE(same_bits(c_d_rpe, d_rpe));
  EXPECT_TRUE(same_bits(c_d_mask, d_mask));
}

TEST(CBlockMatmul, equals_cpp_in_every_mode) {
  const std::vector<std::uint8_t> present = {1, 0, 1, 1};
  const auto shared = std::make_shared<const BlockLayout>(1, 2, 2, present);
  pullback_block_layout* layout_made = nullptr;
  ASSERT_OK(pullback_block_layout_create(1, 2, 2, present.data(), &layout_made));
  const CLayout layout(layout_made);
  Random random(4);
  const HostTensor dense = normal_tensor(DType::f32, {1, 1, 32, 32}, random);
  const HostTensor dense_b = normal_tensor(DType::f32, {1, 1, 32, 32}, random);
  const HostTensor sparse = normal_tensor(DType::f32, {1, 3, 16, 16}, random);

  std::vector<HostTensor> results;
  for (const int mode : {PULLBACK_SDD, PULLBACK_DSD, PULLBACK_DDS}) {
    for (unsigned transposes = 0; transposes < 8; ++transposes) {
      const HostTensor& a = mode == PULLBACK_DSD ? sparse : dense;
      const HostTensor& b = mode == PULLBACK_DDS ? sparse : dense_b;
      const HostTensor& d_c = mode == PULLBACK_SDD ? sparse : dense;
      BlockMatmulProblem problem;
      problem.mode = static_cast<BlockMatmulMode>(mode);
      problem.transpose_a = transposes & PULLBACK_TRANSPOSE_A;
      problem.transpose_b = transposes & PULLBACK_TRANSPOSE_B;
      problem.transpose_c = transposes & PULLBACK_TRANSPOSE_C;
      problem.layout = shared;
      problem.block = 16;
      problem.a = a.spec();
      problem.b = b.spec();
      problem.d_c = d_c.spec();
      const BlockMatmulProblem full = complete(problem);
      const HostTensor c(full.c), d_a(full.d_a), d_b(full.d_b);
      BlockMatmulTensors tensors{a.data(), b.data(), c.data()};
      run(make_plan(Device::cpu(1), problem, Pass::forward), tensors);
      tensors.d_c = d_c.data();
      tensors.d_a = d_a.data();
      tensors.d_b = d_b.data();
      run(make_plan(Device::cpu(1), problem, Pass::backward), tensors);

      const DLTensor dl_a = describe(a), dl_b = describe(b), dl_d_c = describe(d_c);
      pullback_block_matmul_problem c_problem = PULLBACK_BLOCK_MATMUL_PROBLEM_INIT;
      c_problem.layout = layout.get();
      c_problem.block = 16;
      c_problem.mode = mode;
      c_problem.flags = transposes;
      c_problem.a = &dl_a;
      c_problem.b = &dl_b;
      c_problem.d_c = &dl_d_c;
      pullback_plan* made = nullptr;
      ASSERT_OK(pullback_block_matmul_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
      const CPlan forward(made);
      ASSERT_OK(pullback_block_matmul_plan(&c_problem, PULLBACK_BACKWARD, nullptr, &made));
      const CPlan backward(made);
      const HostTensor c_c = allocate(forward, "c"), c_d_a = allocate(backward, "d_a"),
                       c_d_b = allocate(backward, "d_b");
      pullback_block_matmul_tensors c_tensors = PULLBACK_BLOCK_MATMUL_TENSORS_INIT;
      c_tensors.a = a.data();
      c_tensors.b = b.data();
      c_tensors.c = c_c.data();
      run(pullback_block_matmul_run, forward, c_tensors);
      c_tensors.d_c = d_c.data();
      c_tensors.d_a = c_d_a.data();
      c_tensors.d_b = c_d_b.data();
      run(pullback_block_matmul_run, backward, c_tensors);
      EXPECT_TRUE(same_bits(c_c, c)) << mode << " " << transposes;
      EXPECT_TRUE(same_bits(c_d_a, d_a)) << mode << " " << transposes;
      EXPECT_TRUE(same_bits(c_d_b, d_b)) << mode << " " << transposes;
      for (const HostTensor& earlier : results) EXPECT_TRUE(differs(earlier, c_c));
      results.push_back(c_c);
    }
  }
}

TEST(CEntmax, equals_cpp) {
  Random random(5);
  const HostTensor x = normal_tensor(DType::bf16, {5, 3, 4}, random);
  const HostTensor mask = driver::integer_tensor(DType::u8, {5, 3, 4}, random, 0);
  for (std::int64_t i = 0; i < mask.numel(); ++i) mask.set(i, i % 5 != 0);
  const HostTensor d_y = normal_tensor(DType::bf16, {5, 3, 4}, random);
  EntmaxProblem problem;
  problem.x = x.spec();
  problem.mask = mask.spec();
  problem.d_y = d_y.spec();
  problem.axis = 0;
  problem.alpha = 1.25;
  const EntmaxProblem full = complete(problem);
  const HostTensor y(full.y), tau(full.tau), d_x(full.d_x), d_alpha(full.d_alpha);
  EntmaxTensors tensors;
  tensors.x = x.data();
  tensors.mask = mask.data();
  tensors.y = y.data();
  tensors.tau = tau.data();
  run(make_plan(Device::cpu(1), problem, Pass::forward), tensors);
  tensors.d_y = d_y.data();
  tensors.d_x = d_x.data();
  tensors.d_alpha = d_alpha.data();
  run(make_plan(Device::cpu(1), problem, Pass::backward), tensors);

  const DLTensor dl_x = describe(x), dl_mask = describe(mask), dl_d_y = describe(d_y);
  pullback_entmax_problem c_problem = PULLBACK_ENTMAX_PROBLEM_INIT;
  c_problem.x = &dl_x;
  c_problem.mask = &dl_mask;
  c_problem.d_y = &dl_d_y;
  c_problem.axis = 0;
  c_problem.alpha = 1.25;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_entmax_plan(&c_problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan forward(made);
  ASSERT_OK(pullback_entmax_plan(&c_problem, PULLBACK_BACKWARD, nullptr, &made));
  const CPlan backward(made);
  const HostTensor c_y = allocate(forward, "y"), c_tau = allocate(forward, "tau"),
                   c_d_x = allocate(backward, "d_x"), c_d_alpha = allocate(backward, "d_alpha");
  pullback_entmax_tensors c_tensors = PULLBACK_ENTMAX_TENSORS_INIT;
  c_tensors.x = x.data();
  c_tensors.mask = mask.data();
  c_tensors.y = c_y.data();
  c_tensors.tau = c_tau.data();
  run(pullback_entmax_run, forward, c_tensors);
  c_tensors.d_y = d_y.data();
  c_tensors.d_x = c_d_x.data();
  c_tensors.d_alpha = c_d_alpha.data();
  run(pullback_entmax_run, backward, c_tensors);
  EXPECT_TRUE(same_bits(c_y, y));
  EXPECT_TRUE(same_bits(c_tau, tau));
  EXPECT_TRUE(same_bits(c_d_x, d_x));
  EXPECT_TRUE(same_bits(c_d_alpha, d_alpha));
}

TEST(CSegment, unsorted_ids_by_permutation) {
  const HostTensor x = tensor_of(DType::f32, {5, 1}, {3, 8, 3, 5, 8});
  const HostTensor ids = tensor_of(DType::i64, {5}, {2, 0, 2, 9, 0});  // 9 is out of range
  const HostTensor d_out = tensor_of(DType::f32, {3, 1}, {10, 20, 30});

  const DLTensor dl_ids = describe(ids);
  pullback_segment_permutation_problem sort = PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT;
  sort.ids = &dl_ids;
  sort.num_segments = 3;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_segment_permutation_plan(&sort, nullptr, &made));
  const CPlan sorting(made);
  const HostTensor permutation = allocate(sorting, "permutation"),
                   offsets = allocate(sorting, "offsets");
  pullback_segment_permutation_tensors sorted = PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT;
  sorted.ids = ids.data();
  sorted.permutation = permutation.data();
  sorted.offsets = offsets.data();
  run(pullback_segment_permutation_run, sorting, sorted);
  const double expected_order[] = {1, 4, 0, 2, 3}, expected_offsets[] = {0, 2, 2, 4};
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(permutation.get(i), expected_order[i]);
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(offsets.get(i), expected_offsets[i]);

  const DLTensor dl_x = describe(x), dl_offsets = describe(offsets),
                 dl_permutation = describe(permutation), dl_d_out = describe(d_out);
  pullback_segment_problem problem = PULLBACK_SEGMENT_PROBLEM_INIT;
  problem.x = &dl_x;
  problem.offsets = &dl_offsets;
  problem.permutation = &dl_permutation;
  problem.d_out = &dl_d_out;
  problem.reduce = PULLBACK_SEGMENT_MAX;
  problem.ties = PULLBACK_TIES_LAST;
  problem.empty = PULLBACK_EMPTY_NAN;
  ASSERT_OK(pullback_segment_plan(&problem, PULLBACK_FORWARD, nullptr, &made));
  const CPlan forward(made);
  ASSERT_OK(pullback_segment_plan(&problem, PULLBACK_BACKWARD, nullptr, &made));
  const CPlan backward(made);
  const HostTensor out = allocate(forward, "out"), d_x = allocate(backward, "d_x");
  pullback_segment_tensors tensors = PULLBACK_SEGMENT_TENSORS_INIT;
  tensors.x = x.data();
  tensors.offsets = offsets.data();
  tensors.permutation = permutation.data();
  tensors.out = out.data();
  run(pullback_segment_run, forward, tensors);
  EXPECT_EQ(out.get(0), 8);
  EXPECT_TRUE(std::isnan(out.get(1)));
  EXPECT_EQ(out.get(2), 3);
  tensors.d_out = d_out.data();
  tensors.d_x = d_x.data();
  run(pullback_segment_run, backward, tensors);
  const double expected[] = {0, 0, 30, 0, 10};  // ties: the last row of the segment
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(d_x.get(i), expected[i]);
}

}  // namespace
}  // namespace pullback::testing

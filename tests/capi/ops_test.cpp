// Each op through the C ABI gives the very bits of the C++ API, with every option set to something
// that changes the result.
#include <cmath>
#include <vector>

#include "capi/c_ops.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/entmax.hpp"
#include "pullback/segment.hpp"

namespace pullback::testing {
namespace {

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

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
  const auto describe_in = [&](auto& problem, auto&& as) {
    problem.block = 16;
    problem.x = as(x);
    problem.rpe = as(rpe);
    problem.key_padding_mask = as(padding);
    problem.attn_mask = as(mask);
    problem.d_y = as(d_y);
    problem.scale = 0.7;
  };
  BlockSoftmaxProblem problem;
  describe_in(problem, AsSpec());
  problem.layout = shared;
  problem.key_padding_mode = MaskMode::keep;
  problem.attn_mask_mode = MaskMode::add;

  pullback_block_softmax_problem c_problem = PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT;
  AsDLTensor as_dl_tensor;
  describe_in(c_problem, as_dl_tensor);
  pullback_block_layout* layout = nullptr;
  ASSERT_OK(pullback_block_layout_create(1, 2, 2, present.data(), &layout));
  c_problem.layout = layout;
  c_problem.key_padding_mode = PULLBACK_MASK_KEEP;
  c_problem.attn_mask_mode = PULLBACK_MASK_ADD;
  const auto plans =
      plan_passes(pullback_block_softmax_plan, c_problem, {PULLBACK_FORWARD, PULLBACK_BACKWARD});
  pullback_block_layout_destroy(layout);  // the plans keep what they need

  expect_bits_of_cpp(problem, plans, pullback_block_softmax_run,
                     {"y", "d_x", "d_rpe", "d_attn_mask"},
                     [&](auto& tensors, Pass pass, const TensorMap& outputs) {
                       tensors.x = x.data();
                       tensors.rpe = rpe.data();
                       tensors.key_padding_mask = padding.data();
                       tensors.attn_mask = mask.data();
                       tensors.y = outputs.at("y").data();
                       if (pass == Pass::forward) return;
                       tensors.d_y = d_y.data();
                       tensors.d_x = outputs.at("d_x").data();
                       tensors.d_rpe = outputs.at("d_rpe").data();
                       tensors.d_attn_mask = outputs.at("d_attn_mask").data();
                     });
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
      SCOPED_TRACE(std::to_string(mode) + " " + std::to_string(transposes));
      const auto describe_in = [&](auto& problem, auto&& as) {
        problem.block = 16;
        problem.a = as(a);
        problem.b = as(b);
        problem.d_c = as(d_c);
      };
      BlockMatmulProblem problem;
      describe_in(problem, AsSpec());
      problem.mode = static_cast<BlockMatmulMode>(mode);
      problem.transpose_a = transposes & PULLBACK_TRANSPOSE_A;
      problem.transpose_b = transposes & PULLBACK_TRANSPOSE_B;
      problem.transpose_c = transposes & PULLBACK_TRANSPOSE_C;
      problem.layout = shared;
      pullback_block_matmul_problem c_problem = PULLBACK_BLOCK_MATMUL_PROBLEM_INIT;
      AsDLTensor as_dl_tensor;
      describe_in(c_problem, as_dl_tensor);
      c_problem.mode = mode;
      c_problem.flags = transposes;
      c_problem.layout = layout.get();

      const TensorMap outputs = expect_bits_of_cpp(
          problem,
          plan_passes(pullback_block_matmul_plan, c_problem, {PULLBACK_FORWARD, PULLBACK_BACKWARD}),
          pullback_block_matmul_run, {"c", "d_a", "d_b"},
          [&](auto& tensors, Pass pass, const TensorMap& out) {
            tensors.a = a.data();
            tensors.b = b.data();
            tensors.c = out.at("c").data();
            if (pass == Pass::forward) return;
            tensors.d_c = d_c.data();
            tensors.d_a = out.at("d_a").data();
            tensors.d_b = out.at("d_b").data();
          });
      const HostTensor& c = outputs.at("c");
      for (const HostTensor& earlier : results) EXPECT_TRUE(differs(earlier, c));
      results.push_back(c);
    }
  }
}

TEST(CEntmax, equals_cpp) {
  Random random(5);
  const HostTensor x = normal_tensor(DType::bf16, {5, 3, 4}, random);
  const HostTensor mask = driver::integer_tensor(DType::u8, {5, 3, 4}, random, 0);
  for (std::int64_t i = 0; i < mask.numel(); ++i) mask.set(i, i % 5 != 0);
  const HostTensor d_y = normal_tensor(DType::bf16, {5, 3, 4}, random);
  const auto describe_in = [&](auto& problem, auto&& as) {
    problem.x = as(x);
    problem.mask = as(mask);
    problem.d_y = as(d_y);
    problem.axis = 0;
    problem.alpha = 1.25;
  };
  EntmaxProblem problem;
  describe_in(problem, AsSpec());
  pullback_entmax_problem c_problem = PULLBACK_ENTMAX_PROBLEM_INIT;
  AsDLTensor as_dl_tensor;
  describe_in(c_problem, as_dl_tensor);

  expect_bits_of_cpp(
      problem, plan_passes(pullback_entmax_plan, c_problem, {PULLBACK_FORWARD, PULLBACK_BACKWARD}),
      pullback_entmax_run, {"y", "tau", "d_x", "d_alpha"},
      [&](auto& tensors, Pass pass, const TensorMap& outputs) {
        tensors.x = x.data();
        tensors.mask = mask.data();
        tensors.y = outputs.at("y").data();
        tensors.tau = outputs.at("tau").data();
        if (pass == Pass::forward) return;
        tensors.d_y = d_y.data();
        tensors.d_x = outputs.at("d_x").data();
        tensors.d_alpha = outputs.at("d_alpha").data();
      });
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

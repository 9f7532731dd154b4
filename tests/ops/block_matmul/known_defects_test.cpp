// Defects of earlier block-sparse products that must not come back, one test each. Others of them
// are cases in cases.cpp: bf16 in every mode, rows of at most 2 blocks, empty rows, a single block.
#include <gtest/gtest.h>

#include <functional>

#include "driver/driver.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/error.hpp"
#include "pullback/sparsity.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::WorkspaceBuffer;

HostTensor filled(const TensorSpec& spec, const std::function<double(std::int64_t)>& value) {
  HostTensor tensor(spec);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value(i));
  return tensor;
}

void run(const BlockMatmulProblem& problem, Pass pass, const BlockMatmulTensors& tensors) {
  const auto plan = make_plan(Device::cpu(2), problem, pass);
  plan.run({}, tensors, WorkspaceBuffer(plan.workspace_bytes()).get());
}

BlockMatmulProblem sdd_over(const BlockLayout& layout, std::int64_t K) {
  BlockMatmulProblem p;
  p.layout = std::make_shared<const BlockLayout>(layout);
  p.block = 16;
  p.a = TensorSpec::contiguous(DType::f32, {1, layout.heads(), layout.rows() * 16, K});
  p.b = TensorSpec::contiguous(DType::f32, {1, layout.heads(), K, layout.columns() * 16});
  return p;
}

// Tables that were kept by sequence length alone were those of whichever layout came first.
TEST(BlockMatmulDefects, two_layouts_of_equal_length_do_not_share_tables) {
  const std::uint8_t diagonal[] = {1, 0, 0, 1}, other[] = {0, 1, 1, 0};
  const BlockMatmulProblem first = sdd_over(BlockLayout(1, 2, 2, diagonal), 1);
  const BlockMatmulProblem second = sdd_over(BlockLayout(1, 2, 2, other), 1);
  EXPECT_FALSE(first == second);
  // a is 1 in block row 0 and 2 in 1; b is 10 in block column 0 and 100 in 1.
  const HostTensor a = filled(first.a, [](std::int64_t i) { return i < 16 ? 1 : 2; });
  const HostTensor b = filled(first.b, [](std::int64_t i) { return i < 16 ? 10 : 100; });
  const HostTensor c(TensorSpec::contiguous(DType::f32, {1, 2, 16, 16}));
  for (int round = 0; round < 2; ++round) {
    run(first, Pass::forward, {.a = a.data(), .b = b.data(), .c = c.data()});
    EXPECT_EQ(c.get(0), 10);
    EXPECT_EQ(c.get(256), 200);
    run(second, Pass::forward, {.a = a.data(), .b = b.data(), .c = c.data()});
    EXPECT_EQ(c.get(0), 100);
    EXPECT_EQ(c.get(256), 20);
  }
}

// With one gradient asked for, the other was left undefined. Here it is not computed, and the input
// that only it needs may be null.
TEST(BlockMatmulDefects, one_gradient_may_be_null) {
  const BlockLayout layout = make_layout(BigBirdSparsity{.num_heads = 2}, 6 * 16);
  for (const auto mode : {BlockMatmulMode::sdd, BlockMatmulMode::dsd, BlockMatmulMode::dds}) {
    BlockMatmulProblem p = sdd_over(layout, 9);
    p.mode = mode;
    const auto sparse = TensorSpec::contiguous(DType::f32, {1, layout.nnz(), 16, 16});
    if (mode == BlockMatmulMode::dsd) {
      p.a = sparse;
      p.b = TensorSpec::contiguous(DType::f32, {1, 2, 96, 9});
    } else if (mode == BlockMatmulMode::dds) {
      p.b = sparse;
      p.a = TensorSpec::contiguous(DType::f32, {1, 2, 9, 96});
    }
    p = complete(p);
    driver::Random random(1);
    const auto normal = [&](std::int64_t) { return random.normal(); };
    const HostTensor a = filled(p.a, normal), b = filled(p.b, normal), d_c = filled(p.c, normal);
    const HostTensor d_a(p.a), d_b(p.b), d_a_alone(p.a), d_b_alone(p.b);
    run(p, Pass::backward,
        {.a = a.data(), .b = b.data(), .d_c = d_c.data(), .d_a = d_a.data(), .d_b = d_b.data()});
    run(p, Pass::backward, {.b = b.data(), .d_c = d_c.data(), .d_a = d_a_alone.data()});
    run(p, Pass::backward, {.a = a.data(), .d_c = d_c.data(), .d_b = d_b_alone.data()});
    run(p, Pass::backward, {});
    EXPECT_TRUE(same_bits(d_a, d_a_alone));
    EXPECT_TRUE(same_bits(d_b, d_b_alone));
  }
}

// The stride of a single column may be anything; products stepped over it, past the tensor. (What
// they read was right: a sanitizer sees it.)
TEST(BlockMatmulDefects, the_stride_of_a_single_column_is_not_stepped_over) {
  const std::uint8_t present[] = {1};
  BlockMatmulProblem p = sdd_over(BlockLayout(1, 1, 1, present), 1);
  const HostTensor a = filled(p.a, [](std::int64_t i) { return i + 1; });
  const HostTensor b = filled(p.b, [](std::int64_t) { return 2; });
  const HostTensor c(TensorSpec::contiguous(DType::f32, {1, 1, 16, 16}));
  p.a.strides[3] = p.b.strides[2] = std::int64_t{1} << 61;
  run(p, Pass::forward, {.a = a.data(), .b = b.data(), .c = c.data()});
  for (std::int64_t i = 0; i < c.numel(); ++i) EXPECT_EQ(c.get(i), 2 * (i / 16 + 1));
}

// A reduction of length 0 raced with the result when no row had more than three blocks.
TEST(BlockMatmulDefects, rows_of_at_most_3_blocks_keep_their_result) {
  const BlockLayout layout = make_layout(LocalSlidingWindowSparsity{.num_heads = 4}, 32 * 16);
  BlockMatmulProblem p = sdd_over(layout, 1);
  p.mode = BlockMatmulMode::dsd;
  p.a = TensorSpec::contiguous(DType::f32, {1, layout.nnz(), 16, 16});
  p.b = TensorSpec::contiguous(DType::f32, {1, 4, 512, 3});
  const HostTensor a = filled(p.a, [](std::int64_t) { return 1; });
  const HostTensor b = filled(p.b, [](std::int64_t) { return 1; });
  const HostTensor c(p.b);
  for (int round = 0; round < 20; ++round) {
    run(p, Pass::forward, {.a = a.data(), .b = b.data(), .c = c.data()});
    for (std::int64_t i = 0; i < c.numel(); ++i) {
      ASSERT_EQ(c.get(i), i / 3 % 512 < 16 ? 16 : 32);
    }
  }
}

TEST(BlockMatmulDefects, a_layout_of_two_dimensions_is_refused) {
  const BlockMatmulProblem p = sdd_over(BlockLayout(1, 1, 1, std::vector<std::uint8_t>{1}), 2);
  driver::Request request;
  request.op = "block_matmul";
  request.options["mode"] = "sdd";
  request.inputs["a"] = filled(p.a, [](std::int64_t) { return 1; });
  request.inputs["b"] = filled(p.b, [](std::int64_t) { return 1; });
  request.inputs["d_c"] =
      filled(TensorSpec::contiguous(DType::f32, {1, 1, 16, 16}), [](std::int64_t) { return 1; });
  request.inputs["layout"] =
      filled(TensorSpec::contiguous(DType::i32, {1, 1}), [](std::int64_t) { return 1; });
  try {
    evaluate(request);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "block_matmul: layout: expected rank 3, got rank 2 [1, 1]");
  }
}

}  // namespace
}  // namespace pullback

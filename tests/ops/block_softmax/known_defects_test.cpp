// Defects of earlier block-sparse softmax kernels that must not come back, one test each. Others of
// them are cases in cases.cpp: rows of at most 2 blocks, a row of 32784 elements, rows that see
// nothing, and every dtype.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "driver/driver.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/error.hpp"
#include "pullback/sparsity.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::WorkspaceBuffer;

template <class Tensors>
void run(const Plan<Tensors>& plan, const Tensors& tensors) {
  plan.run({}, tensors, WorkspaceBuffer(plan.workspace_bytes()).get());
}

HostTensor filled(const TensorSpec& spec, const std::function<double(std::int64_t)>& value) {
  HostTensor tensor(spec);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value(i));
  return tensor;
}

BlockSoftmaxProblem problem_over(const BlockLayout& layout, DType dtype) {
  BlockSoftmaxProblem p;
  p.layout = std::make_shared<const BlockLayout>(layout);
  p.block = 16;
  p.x = TensorSpec::contiguous(dtype, {1, layout.nnz(), 16, 16});
  return p;
}

// Tables that were kept by sequence length alone were those of whichever layout came first.
TEST(BlockSoftmaxDefects, two_layouts_of_equal_length_do_not_share_tables) {
  const std::uint8_t diagonal[] = {1, 0, 0, 1}, row[] = {1, 1, 0, 0};
  const BlockSoftmaxProblem first = problem_over(BlockLayout(1, 2, 2, diagonal), DType::f32);
  const BlockSoftmaxProblem second = problem_over(BlockLayout(1, 2, 2, row), DType::f32);
  EXPECT_FALSE(first == second);
  const auto first_plan = make_plan(Device::cpu(1), first, Pass::forward);
  const auto second_plan = make_plan(Device::cpu(1), second, Pass::forward);
  const HostTensor x = filled(first.x, [](std::int64_t) { return 1; });
  for (int round = 0; round < 2; ++round) {
    const HostTensor y(first.x);
    run(first_plan, {.x = x.data(), .y = y.data()});
    EXPECT_FLOAT_EQ(static_cast<float>(y.get(0)), 1.0f / 16);
    run(second_plan, {.x = x.data(), .y = y.data()});
    EXPECT_FLOAT_EQ(static_cast<float>(y.get(0)), 1.0f / 32);
  }
}

// The tables index three dimensions; a two-dimensional layout was read past its end.
TEST(BlockSoftmaxDefects, a_layout_of_two_dimensions_is_refused) {
  driver::Request request;
  request.op = "block_softmax";
  const auto spec = TensorSpec::contiguous(DType::f32, {1, 1, 16, 16});
  request.inputs["x"] = filled(spec, [](std::int64_t) { return 0; });
  request.inputs["d_y"] = request.inputs["x"];
  request.inputs["layout"] =
      filled(TensorSpec::contiguous(DType::i32, {1, 1}), [](std::int64_t) { return 1; });
  try {
    evaluate(request);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "block_softmax: layout: expected rank 3, got rank 2 [1, 1]");
  }
}

// A row of nothing but -inf gave NaN, which the products after it spread to every key it touched.
TEST(BlockSoftmaxDefects, rows_that_see_nothing_give_zeros_and_zero_gradients) {
  const std::uint8_t present[] = {1, 1};
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const BlockSoftmaxProblem p = problem_over(BlockLayout(1, 1, 2, present), dtype);
    const HostTensor x = filled(p.x, [](std::int64_t) { return -INFINITY; });
    const HostTensor d_y = filled(p.x, [](std::int64_t i) { return i % 2 ? NAN : INFINITY; });
    const HostTensor y(p.x), d_x(p.x);
    run(make_plan(Device::cpu(1), p, Pass::forward), {.x = x.data(), .y = y.data()});
    run(make_plan(Device::cpu(1), p, Pass::backward),
        {.y = y.data(), .d_y = d_y.data(), .d_x = d_x.data()});
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      ASSERT_EQ(y.get(i), 0);
      ASSERT_EQ(d_x.get(i), 0);
    }
  }
}

// In place: y in x's memory, d_x in d_y's, with the gradients of added terms taken besides.
TEST(BlockSoftmaxDefects, in_place_equals_out_of_place) {
  const BlockLayout layout =
      make_layout(BigBirdSparsity{.num_heads = 2, .different_layout_per_head = true}, 8 * 16);
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    BlockSoftmaxProblem p = problem_over(layout, dtype);
    p.scale = 0.5;
    p.rpe = TensorSpec::contiguous(dtype, {1, 1, 128, 128});
    driver::Random random(3);
    const auto normal = [&](std::int64_t) { return random.normal(); };
    const HostTensor x = filled(p.x, normal), d_y = filled(p.x, normal),
                     rpe = filled(p.rpe, normal);
    const HostTensor y(p.x), d_x(p.x), d_rpe(p.rpe), d_rpe_in_place(p.rpe);
    const auto forward = make_plan(Device::cpu(2), p, Pass::forward);
    const auto backward = make_plan(Device::cpu(2), p, Pass::backward);
    run(forward, {.x = x.data(), .rpe = rpe.data(), .y = y.data()});
    run(backward, {.y = y.data(), .d_y = d_y.data(), .d_x = d_x.data(), .d_rpe = d_rpe.data()});
    run(forward, {.x = x.data(), .rpe = rpe.data(), .y = x.data()});
    EXPECT_TRUE(same_bits(x, y));
    run(backward,
        {.y = y.data(), .d_y = d_y.data(), .d_x = d_y.data(), .d_rpe = d_rpe_in_place.data()});
    EXPECT_TRUE(same_bits(d_y, d_x));
    EXPECT_TRUE(same_bits(d_rpe, d_rpe_in_place));
  }
}

// Outputs past the caches are stored in another way: the same bits.
TEST(BlockSoftmaxDefects, long_outputs_equal_short_ones) {
  const std::uint8_t present[] = {1};
  for (DType dtype : {DType::f32, DType::bf16}) {
    BlockSoftmaxProblem small = problem_over(BlockLayout(1, 1, 1, present), dtype);
    small.x = TensorSpec::contiguous(dtype, {64, 1, 16, 16});
    driver::Random random(9);
    const HostTensor x = filled(small.x, [&](std::int64_t) { return random.normal(); });
    const HostTensor y(small.x), d_x(small.x);
    run(make_plan(Device::cpu(2), small, Pass::forward), {.x = x.data(), .y = y.data()});
    run(make_plan(Device::cpu(2), small, Pass::backward),
        {.y = y.data(), .d_y = x.data(), .d_x = d_x.data()});

    // The same 64 matrices again and again: 36 or 72 MiB.
    BlockSoftmaxProblem large = small;
    const std::int64_t repeats = 1152;
    BlockLayout many(1, repeats, 1, std::vector<std::uint8_t>(repeats, 1));
    large.layout = std::make_shared<const BlockLayout>(many);
    large.x = small.x;
    large.x.shape[1] = repeats;
    large.x.strides[1] = 0;
    large.d_y = large.x;
    large.y = {};
    const auto out = TensorSpec::contiguous(dtype, {64, repeats, 16, 16});
    const HostTensor large_y(out), large_d_x(out);
    run(make_plan(Device::cpu(2), large, Pass::forward), {.x = x.data(), .y = large_y.data()});
    run(make_plan(Device::cpu(2), large, Pass::backward),
        {.y = large_y.data(), .d_y = x.data(), .d_x = large_d_x.data()});
    for (std::int64_t z = 0; z < 64; ++z) {
      for (std::int64_t r = 0; r < repeats; r += 97) {
        for (std::int64_t i = 0; i < 256; ++i) {
          const std::int64_t index = (z * repeats + r) * 256 + i;
          ASSERT_EQ(large_y.get(index), y.get(z * 256 + i));
          ASSERT_EQ(large_d_x.get(index), d_x.get(z * 256 + i));
        }
      }
    }
  }
}

// One sum over a long row loses a digit of f32 for every ten times as many elements.
TEST(BlockSoftmaxDefects, long_rows_sum_to_one_and_have_small_deltas) {
  const std::int64_t columns = 65536 / 16;
  const std::vector<std::uint8_t> present(columns, 1);
  BlockSoftmaxProblem p = problem_over(BlockLayout(1, 1, columns, present), DType::f32);
  p.d_y = p.x;
  const HostTensor x =
      filled(p.x, [](std::int64_t i) { return i % 16 == 0 && i < 256 ? 0 : -1.2; });
  const HostTensor y(p.x), d_x(p.x);
  const HostTensor d_y = filled(p.x, [](std::int64_t i) { return i == 1 ? 3 : 1; });
  run(make_plan(Device::cpu(1), p, Pass::forward), {.x = x.data(), .y = y.data()});
  run(make_plan(Device::cpu(1), p, Pass::backward),
      {.y = y.data(), .d_y = d_y.data(), .d_x = d_x.data()});
  double sum = 0;
  for (std::int64_t k = 0; k < columns; ++k) {
    for (std::int64_t j = 0; j < 16; ++j) sum += y.get(k * 256 + j);
  }
  EXPECT_NEAR(sum, 1, 5e-6);
  // d_x = y (d_y - delta), and delta is 1 + 2 y[1], the sum of y being 1.
  EXPECT_NEAR(d_x.get(1) / y.get(1), 2 - 2 * y.get(1), 1e-5);
  EXPECT_NEAR(d_x.get(2) / y.get(2), -2 * y.get(1), 1e-5);
}

}  // namespace
}  // namespace pullback

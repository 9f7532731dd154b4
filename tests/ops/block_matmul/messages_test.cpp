#include <gtest/gtest.h>

#include <functional>

#include "driver/driver.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/error.hpp"
#include "support/message_of.hpp"

namespace pullback {
namespace {

// Z 2, H 1, R 2, C 1, nnz 1, b 16, K 5.
BlockMatmulProblem valid() {
  const std::uint8_t present[] = {0, 1};
  BlockMatmulProblem p;
  p.layout = std::make_shared<const BlockLayout>(1, 2, 1, present);
  p.block = 16;
  p.a = TensorSpec::contiguous(DType::f32, {2, 1, 32, 5});
  p.b = TensorSpec::contiguous(DType::f32, {2, 1, 5, 16});
  return p;
}

std::string refusal(const std::function<void(BlockMatmulProblem&)>& change) {
  BlockMatmulProblem p = valid();
  change(p);
  return message_of([&] { complete(p); });
}

TEST(BlockMatmulMessages, name_the_tensor_and_the_rule) {
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.layout = nullptr; }),
            "block_matmul: layout: expected a block layout, got null");
  EXPECT_EQ(refusal([](auto& p) { p.block = 8; }),
            "block_matmul: block: expected 16 to 128, a multiple of 16, got 8");
  EXPECT_EQ(refusal([](auto& p) { p.a.rank = 3; }),
            "block_matmul: a: expected rank 4, got rank 3 [2, 1, 32]");
  EXPECT_EQ(refusal([](auto& p) {
              p.b = TensorSpec::contiguous(DType::bf16, {2, 1, 5, 16});
            }),
            "block_matmul: b: expected dtype f32, got bf16; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) { p.transpose_b = true; }),
            "block_matmul: b: expected shape [2, 1, 16, 5], got [2, 1, 5, 16]");
  EXPECT_EQ(refusal([](auto& p) { p.mode = BlockMatmulMode::dsd; }),
            "block_matmul: a: expected shape [2, 1, 16, 16], got [2, 1, 32, 5]");
  EXPECT_EQ(refusal([](auto& p) {
              p.c = TensorSpec::contiguous(DType::f32, {2, 2, 16, 16});
            }),
            "block_matmul: c: expected shape [2, 1, 16, 16], got [2, 2, 16, 16]");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_a = p.a;
              p.d_a.strides[1] = p.d_a.strides[0] = 0;
            }),
            "block_matmul: d_a: expected an output whose elements do not overlap, got f32 [2, 1, "
            "32, 5] strides [0, 0, 5, 1]; pass a tensor without stride 0 and without interleaved "
            "dimensions");
}

TEST(BlockMatmulMessages, the_driver_needs_a_mode) {
  driver::Request request;
  request.op = "block_matmul";
  request.inputs["a"] = driver::HostTensor(valid().a);
  request.inputs["b"] = driver::HostTensor(valid().b);
  request.inputs["d_c"] = driver::HostTensor(TensorSpec::contiguous(DType::f32, {2, 1, 16, 16}));
  driver::HostTensor layout(TensorSpec::contiguous(DType::u8, {1, 2, 1}));
  layout.set(0, 0);
  layout.set(1, 1);
  request.inputs["layout"] = layout;
  const auto refused = [&] { return message_of([&] { evaluate(request); }); };
  EXPECT_EQ(refused(), "block_matmul: --mode: expected sdd or dsd or dds, got none");
  request.options["mode"] = "sdd";
  EXPECT_EQ(refused(), "no error");
  request.options["mode"] = "ssd";
  EXPECT_EQ(refused(), "block_matmul: --mode: expected sdd or dsd or dds, got 'ssd'");
}

}  // namespace
}  // namespace pullback

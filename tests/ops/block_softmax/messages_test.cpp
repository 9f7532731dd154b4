#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "driver/driver.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/error.hpp"
#include "support/message_of.hpp"

namespace pullback {
namespace {

const std::vector<std::uint8_t> kPresent = {1, 1, 0, 1};

// Z 2, H 1, R = C = 2, nnz 3, b 16.
BlockSoftmaxProblem valid() {
  BlockSoftmaxProblem p;
  p.layout = std::make_shared<const BlockLayout>(1, 2, 2, kPresent);
  p.block = 16;
  p.x = TensorSpec::contiguous(DType::f32, {2, 3, 16, 16});
  return p;
}

std::string refusal(const std::function<void(BlockSoftmaxProblem&)>& change) {
  BlockSoftmaxProblem p = valid();
  change(p);
  return message_of([&] { complete(p); });
}

TEST(BlockSoftmaxMessages, name_the_tensor_and_the_rule) {
  EXPECT_EQ(refusal([](auto&) {}), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.layout = nullptr; }),
            "block_softmax: layout: expected a block layout, got null");
  EXPECT_EQ(refusal([](auto& p) { p.block = 20; }),
            "block_softmax: block: expected 16 to 128, a multiple of 16, got 20");
  EXPECT_EQ(refusal([](auto& p) { p.scale = std::numeric_limits<double>::infinity(); }),
            "block_softmax: scale: expected a finite number, got inf");
  EXPECT_EQ(refusal([](auto& p) { p.x = {}; }), "block_softmax: x: expected a tensor, got none");
  EXPECT_EQ(refusal([](auto& p) {
              p.x = TensorSpec::contiguous(DType::f32, {2, 4, 16, 16});
            }),
            "block_softmax: x: expected shape [2, 3, 16, 16], got [2, 4, 16, 16]");
  EXPECT_EQ(refusal([](auto& p) {
              p.x = TensorSpec::contiguous(DType::i32, {2, 3, 16, 16});
            }),
            "block_softmax: x: expected dtype f64 or f32 or bf16 or f16, got i32; convert the "
            "tensor first");
  EXPECT_EQ(refusal([](auto& p) {
              p.rpe = TensorSpec::contiguous(DType::f32, {3, 1, 32, 32});
            }),
            "block_softmax: rpe: expected shape [2, 1, 32, 32], got [3, 1, 32, 32]");
  EXPECT_EQ(refusal([](auto& p) {
              p.attn_mask_mode = MaskMode::add;
              p.attn_mask = TensorSpec::contiguous(DType::u8, {32, 32});
            }),
            "block_softmax: attn_mask: expected dtype f32, got u8; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) {
              p.key_padding_mask = TensorSpec::contiguous(DType::f32, {2, 48});
            }),
            "block_softmax: key_padding_mask: expected shape [2, 32], got [2, 48]");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_rpe = TensorSpec::contiguous(DType::f32, {1, 1, 32, 32});
            }),
            "block_softmax: d_rpe: expected no gradient, as rpe is not given, got f32 [1, 1, 32, "
            "32]");
  EXPECT_EQ(refusal([](auto& p) {
              p.attn_mask = TensorSpec::contiguous(DType::u8, {32, 32});
              p.d_attn_mask = TensorSpec::contiguous(DType::f32, {32, 32});
            }),
            "block_softmax: d_attn_mask: expected no gradient, as the mask is in keep mode, got "
            "f32 [32, 32]; use add mode for attn_mask");
}

TEST(BlockSoftmaxMessages, outputs_must_not_overlap_themselves_or_others) {
  BlockSoftmaxProblem p = valid();
  p.y = p.x;
  p.y.strides[0] = 0;
  EXPECT_THROW(complete(p), Error);

  p = valid();
  const auto plan = make_plan(Device::cpu(1), p, Pass::forward);
  const driver::HostTensor x(p.x);
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  EXPECT_EQ(message_of([&] {
              plan.run({}, {.x = x.data(), .y = static_cast<float*>(x.data()) + 1},
                       workspace.get());
            }),
            "block_softmax: y: expected memory of its own, got overlap with x");
  EXPECT_EQ(message_of([&] { plan.run({}, {.x = x.data()}, workspace.get()); }),
            "block_softmax: y: expected a data pointer, got null");
}

TEST(BlockSoftmaxMessages, the_driver_refuses_bad_layouts_and_options) {
  driver::Request request;
  request.op = "block_softmax";
  request.inputs["x"] = driver::HostTensor(valid().x);
  request.inputs["d_y"] = driver::HostTensor(valid().x);
  driver::HostTensor layout(TensorSpec::contiguous(DType::i64, {1, 2, 2}));
  for (std::int64_t i = 0; i < 4; ++i) layout.set(i, kPresent[static_cast<std::size_t>(i)]);
  request.inputs["layout"] = layout;
  const auto refused = [&] { return message_of([&] { evaluate(request); }); };
  EXPECT_EQ(refused(), "no error");
  layout.set(2, 7);
  EXPECT_EQ(refused(), "block_softmax: layout: expected 0 or 1, got 7");
  layout.set(2, 0);
  request.options["key-padding-mode"] = "mul";
  EXPECT_EQ(refused(), "block_softmax: --key-padding-mode: expected add or keep, got 'mul'");
}

}  // namespace
}  // namespace pullback

// Every refusal of attention, with its text.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "ops/attention/run_attention.hpp"
#include "support/message_of.hpp"

namespace pullback {
namespace {

TensorSpec f32(std::initializer_list<std::int64_t> shape) {
  return TensorSpec::contiguous(DType::f32, shape);
}

AttentionProblem good() {
  AttentionProblem problem;
  problem.q = f32({2, 5, 4, 8});
  problem.k = f32({2, 6, 2, 8});
  problem.v = f32({2, 6, 2, 10});
  problem.d_out = f32({2, 5, 4, 10});
  return problem;
}

AttentionProblem good_varlen() {
  AttentionProblem problem;
  problem.q = f32({5, 4, 8});
  problem.k = f32({6, 2, 8});
  problem.v = f32({6, 2, 10});
  problem.cu_seqlens_q = problem.cu_seqlens_k = TensorSpec::contiguous(DType::i32, {3});
  return problem;
}

// What complete() says to a good problem after `change`.
std::string refusal(const std::function<void(AttentionProblem&)>& change,
                    AttentionProblem problem = good()) {
  change(problem);
  return message_of([&] { complete(problem); });
}

TEST(attention_messages, good_problems_are_completed) {
  const AttentionProblem problem = complete(good());
  EXPECT_EQ(problem.out, f32({2, 5, 4, 10}));
  EXPECT_EQ(problem.lse, f32({2, 4, 5}));
  EXPECT_EQ(problem.d_v, f32({2, 6, 2, 10}));
  EXPECT_FALSE(problem.d_bias.given());
  EXPECT_DOUBLE_EQ(*problem.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(complete(problem), problem);
  const AttentionProblem varlen = complete(good_varlen());
  EXPECT_EQ(varlen.lse, f32({4, 5}));
  EXPECT_EQ(varlen.max_seqlen_q, 5);
  EXPECT_EQ(varlen.max_seqlen_k, 6);
  EXPECT_EQ(complete(varlen), varlen);
}

TEST(attention_messages, gradients_that_are_given_are_those_wanted) {
  AttentionProblem some = good();
  some.bias = f32({1, 4, 1, 6});
  EXPECT_EQ(complete(some).d_bias, some.bias);
  const auto plan_all = make_plan(Device::cpu(1), some, Pass::backward);
  some.d_q = some.q;
  some = complete(some);
  EXPECT_FALSE(some.d_k.given() || some.d_v.given() || some.d_bias.given());
  EXPECT_EQ(complete(some), some);
  const auto plan = make_plan(Device::cpu(1), some, Pass::backward);
  EXPECT_LT(plan.workspace_bytes(), plan_all.workspace_bytes());  // d_bias is summed there
  float memory[1000] = {};
  std::vector<std::byte> workspace(plan.workspace_bytes() + 64);
  AttentionTensors tensors{.q = memory, .k = memory, .v = memory, .bias = memory};
  tensors.out = tensors.lse = memory;
  tensors.d_out = memory;
  tensors.d_k = memory + 500;
  EXPECT_EQ(message_of([&] {
              plan.run({}, tensors, {workspace.data(), workspace.size()});
            }),
            "attention: d_k: expected null, as the problem has no such tensor, got a pointer; "
            "describe the tensor in the problem before making the plan");
}

TEST(attention_messages, q_k_v) {
  EXPECT_EQ(refusal([](auto& p) { p.q = {}; }), "attention: q: expected a tensor, got none");
  EXPECT_EQ(refusal([](auto& p) {
              p.q = f32({5, 4, 8});
            }),
            "attention: q: expected [B,S,H,D] without cu_seqlens, got f32 [5, 4, 8]; or pass "
            "cu_seqlens_q and cu_seqlens_k");
  EXPECT_EQ(refusal([](auto& p) { p.q.dtype = DType::i32; }),
            "attention: q: expected dtype f64 or f32 or bf16 or f16, got i32; convert the tensor "
            "first");
  EXPECT_EQ(refusal([](auto& p) { p.k.dtype = DType::bf16; }),
            "attention: k: expected dtype f32, got bf16; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) { p.v.dtype = DType::f64; }),
            "attention: v: expected dtype f32, got f64; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) {
              p.k = f32({3, 6, 2, 8});
            }),
            "attention: k: expected the batch size of q, 2, got f32 [3, 6, 2, 8]");
  EXPECT_EQ(refusal([](auto& p) {
              p.k = f32({2, 6, 2, 7});
            }),
            "attention: k: expected the head dim of q, 8, got f32 [2, 6, 2, 7]");
  EXPECT_EQ(refusal([](auto& p) {
              p.k = f32({2, 6, 3, 8});
            }),
            "attention: k: expected a number of heads that divides the 4 of q, got f32 "
            "[2, 6, 3, 8]; each key/value head serves the same number of query heads");
  EXPECT_EQ(refusal([](auto& p) {
              p.k = f32({2, 6, 0, 8});
            }),
            "attention: k: expected a number of heads that divides the 4 of q, got f32 "
            "[2, 6, 0, 8]; each key/value head serves the same number of query heads");
  EXPECT_EQ(refusal([](auto& p) {
              p.q = f32({2, 5, 0, 8});
            }),
            "attention: k: expected no heads, as q has none, got f32 [2, 6, 2, 8]; each key/value "
            "head serves the same number of query heads");
  EXPECT_EQ(refusal([](auto& p) {
              p.v = f32({2, 7, 2, 10});
            }),
            "attention: v: expected the sizes of k before its head dim, as in f32 [2, 6, 2, 8], "
            "got f32 [2, 7, 2, 10]");
  EXPECT_EQ(refusal([](auto& p) {
              p.q = f32({2, 5, 4, 257});
            }),
            "attention: q: expected a head dim between 1 and 256, got f32 [2, 5, 4, 257]");
  EXPECT_EQ(refusal([](auto& p) {
              p.q = f32({2, 5, 4, 0});
            }),
            "attention: q: expected a head dim between 1 and 256, got f32 [2, 5, 4, 0]");
  EXPECT_EQ(refusal([](auto& p) {
              p.v = f32({2, 6, 2, 0});
            }),
            "attention: v: expected a head dim between 1 and 256, got f32 [2, 6, 2, 0]");
  EXPECT_EQ(refusal([](auto& p) {
              p.q = f32({-2, 5, 4, 8});
            }),
            "attention: q: expected sizes of 0 or more, got [-2, 5, 4, 8]");
  EXPECT_EQ(refusal([](auto& p) {
              p.q.strides[0] = std::numeric_limits<std::int64_t>::max();
            }).substr(0, 64),
            "attention: q: expected strides that reach at most 2^50 bytes, go");
}

TEST(attention_messages, bias) {
  EXPECT_EQ(refusal([](auto& p) {
              p.bias = f32({2, 4, 5, 7});
            }),
            "attention: bias: expected shape [2, 4, 5, 6], or 1 in any place, got [2, 4, 5, 7]");
  EXPECT_EQ(refusal([](auto& p) {
              p.bias = f32({5, 6});
            }),
            "attention: bias: expected rank 4, got rank 2 [5, 6]");
  EXPECT_EQ(refusal([](auto& p) {
              p.bias = TensorSpec::contiguous(DType::f64, {1, 1, 5, 6});
            }),
            "attention: bias: expected dtype f32, got f64; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) {
              p.bias = f32({1, 4, 1, 6}), p.d_bias = f32({2, 4, 5, 6});
            }),
            "attention: d_bias: expected shape [1, 4, 1, 6], got [2, 4, 5, 6]");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_bias = f32({1, 4, 1, 6});
            }),
            "attention: d_bias: expected none without a bias, got f32 [1, 4, 1, 6]");
  EXPECT_EQ(refusal(
                [](auto& p) {
                  p.bias = f32({1, 1, 5, 6});
                },
                good_varlen()),
            "attention: bias: expected none with cu_seqlens, got f32 [1, 1, 5, 6]; a packed batch "
            "has no common key axis: run the sequences one by one, or padded");
}

TEST(attention_messages, varlen) {
  EXPECT_EQ(refusal([](auto& p) { p.cu_seqlens_k = {}; }, good_varlen()),
            "attention: cu_seqlens_k: expected a tensor [B+1], got none; pass both cu_seqlens_q "
            "and cu_seqlens_k, or neither");
  EXPECT_EQ(
      refusal([](auto& p) { p.cu_seqlens_q = f32({3}); }, good_varlen()),
      "attention: cu_seqlens_q: expected dtype i32 or i64, got f32; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) { p.cu_seqlens_q.shape[0] = 0; }, good_varlen()),
            "attention: cu_seqlens_q: expected B+1 entries, at least 1, got i32 [0]");
  EXPECT_EQ(refusal([](auto& p) { p.cu_seqlens_q.shape[0] = 4; }, good_varlen()),
            "attention: cu_seqlens_k: expected 4 entries as in cu_seqlens_q, got i32 [3]");
  EXPECT_EQ(refusal(
                [](auto& p) {
                  p.q = f32({2, 5, 4, 8});
                },
                good_varlen()),
            "attention: q: expected [total,H,D] as cu_seqlens are given, got f32 [2, 5, 4, 8]");
  EXPECT_EQ(refusal([](auto& p) { p.max_seqlen_k = -1; }, good_varlen()),
            "attention: max_seqlen_k: expected 0 (unknown) or more, got -1");
  EXPECT_EQ(refusal([](auto& p) { p.max_seqlen_q = 3; }),
            "attention: max_seqlen: expected 0 without cu_seqlens, got 3, 0; it bounds the "
            "sequences that cu_seqlens_q and cu_seqlens_k describe");
}

TEST(attention_messages, options) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(refusal([](auto& p) { p.dropout = 1; }),
            "attention: dropout: expected a probability in [0, 1), got 1");
  EXPECT_EQ(refusal([](auto& p) { p.seed = TensorSpec::contiguous(DType::i64, {2}); }),
            "attention: seed: expected one element, got i64 [2]");
  EXPECT_EQ(refusal([&](auto& p) { p.dropout = nan; }),
            "attention: dropout: expected a probability in [0, 1), got nan");
  EXPECT_EQ(refusal([&](auto& p) { p.softcap = nan; }),
            "attention: softcap: expected 0 (off), or 1.175e-38 to 2.359e+38, got nan");
  EXPECT_EQ(refusal([](auto& p) { p.softcap = -1; }),
            "attention: softcap: expected 0 (off), or 1.175e-38 to 2.359e+38, got -1");
  // Neither infinite nor 0, but not so in f32, in which f32 is computed, or times log2 e.
  EXPECT_EQ(refusal([](auto& p) { p.softcap = 3e38; }),
            "attention: softcap: expected 0 (off), or 1.175e-38 to 2.359e+38, got 3e+38");
  EXPECT_EQ(refusal([](auto& p) { p.softcap = 1e-46; }),
            "attention: softcap: expected 0 (off), or 1.175e-38 to 2.359e+38, got 1e-46");
  EXPECT_EQ(refusal([](auto& p) { p.scale = 2, p.softcap = 1.2e-38; }), "no error");
  EXPECT_EQ(refusal([](auto& p) { p.scale = -8, p.softcap = 1.2e-38; }),
            "attention: softcap: expected scale / softcap from -3.403e+38 to 3.403e+38, got -8 / "
            "1.2e-38");
  EXPECT_EQ(refusal([](auto& p) { p.scale = -3e38; }),
            "attention: scale: expected a number from -2.359e+38 to 2.359e+38, got -3e+38");
  EXPECT_EQ(refusal([&](auto& p) { p.scale = nan; }),
            "attention: scale: expected a number from -2.359e+38 to 2.359e+38, got nan");
  EXPECT_EQ(refusal([](auto& p) { p.mask.left = -2; }),
            "attention: mask: expected left and right of 0 or more, or -1 for unbounded, got "
            "-2, -1");
}

TEST(attention_messages, outputs_and_gradients) {
  EXPECT_EQ(refusal([](auto& p) {
              p.out = f32({2, 5, 4, 8});
            }),
            "attention: out: expected shape [2, 5, 4, 10], got [2, 5, 4, 8]");
  EXPECT_EQ(refusal([](auto& p) {
              p.lse = TensorSpec::contiguous(DType::f64, {2, 4, 5});
            }),
            "attention: lse: expected dtype f32, got f64; convert the tensor first");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_out = f32({2, 5, 4, 8});
            }),
            "attention: d_out: expected shape [2, 5, 4, 10], got [2, 5, 4, 8]");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_lse = f32({2, 5, 4});
            }),
            "attention: d_lse: expected shape [2, 4, 5], got [2, 5, 4]");
  EXPECT_EQ(refusal([](auto& p) { p.d_q = f32({1}); }),
            "attention: d_q: expected shape [2, 5, 4, 8], got [1]");
  EXPECT_EQ(refusal([](auto& p) {
              p.d_k = p.k;
              p.d_k.strides[2] = 0;
            }),
            "attention: d_k: expected an output whose elements do not overlap, got f32 "
            "[2, 6, 2, 8] strides [96, 16, 0, 1]; pass a tensor without stride 0 and without "
            "interleaved dimensions");
  AttentionProblem problem = good();
  problem.d_out = {};
  EXPECT_EQ(message_of([&] { make_plan(Device::cpu(), problem, Pass::backward); }),
            "attention: d_out: expected a tensor for the backward pass, got none; pass the "
            "gradient of out");
  EXPECT_NO_THROW(make_plan(Device::cpu(), problem, Pass::forward));
}

TEST(attention_messages, variants) {
  EXPECT_EQ(message_of([] {
              make_plan(Device::cpu(), good(), Pass::forward, {.variant = "nonsense"});
            }).substr(0, 29),
            "attention: variant: expected ");
  const auto plan = make_plan(Device::cpu(), good(), Pass::backward, {.variant = "reference"});
  EXPECT_EQ(plan.describe(),
            "attention backward: reference\n"
            "plain loops on one thread, sums in double\n"
            "chosen: asked for by name");
}

TEST(attention_messages, pointers) {
  const AttentionProblem problem = complete(good());
  const auto plan = make_plan(Device::cpu(), problem, Pass::forward);
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  const driver::HostTensor q(problem.q), k(problem.k), v(problem.v), out(problem.out);
  AttentionTensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  const auto run = [&] { plan.run({}, tensors, workspace.get()); };
  EXPECT_EQ(message_of(run), "attention: out: expected a data pointer, got null");
  tensors.out = q.data();
  EXPECT_EQ(message_of(run), "attention: out: expected memory of its own, got overlap with q");
  tensors.out = static_cast<char*>(out.data()) + 2;
  EXPECT_EQ(message_of(run).substr(0, 71),
            "attention: out: expected a pointer aligned to its 4-byte elements, got ");
  tensors.out = out.data();
  tensors.k = nullptr;
  EXPECT_EQ(message_of(run), "attention: k: expected a data pointer, got null");
  tensors.k = k.data();
  tensors.bias = q.data();
  EXPECT_EQ(message_of(run),
            "attention: bias: expected null, as the problem has no such tensor, got a pointer; "
            "describe the tensor in the problem before making the plan");
}

TEST(attention_messages, checked_mode_names_the_first_bad_entry_and_writes_nothing) {
  const auto refusal_of = [](std::initializer_list<double> cu_q, std::initializer_list<double> cu_k,
                             std::int64_t max_seqlen_q = 0) {
    testing::AttentionRun run;
    driver::Random random(1);
    run.inputs["q"] = driver::normal_tensor(DType::f32, {5, 4, 8}, random);
    run.inputs["k"] = driver::normal_tensor(DType::f32, {6, 2, 8}, random);
    run.inputs["v"] = driver::normal_tensor(DType::f32, {6, 2, 8}, random);
    run.inputs["d_out"] = driver::normal_tensor(DType::f32, {5, 4, 8}, random);
    run.inputs["cu_seqlens_q"] = driver::tensor_of(DType::i32, {3}, cu_q);
    run.inputs["cu_seqlens_k"] = driver::tensor_of(DType::i32, {3}, cu_k);
    run.options.check_indices = true;
    run.options.max_seqlen_q = max_seqlen_q;
    const driver::HostTensor out(f32({5, 4, 8}));
    run.outputs["out"] = out;
    const std::string message = message_of([&] { run(); });
    if (message != "no error") {
      for (std::int64_t i = 0; i < out.numel(); ++i) EXPECT_TRUE(std::isnan(out.get(i)));
    }
    return message;
  };
  EXPECT_EQ(refusal_of({0, 2, 5}, {0, 6, 6}), "no error");
  EXPECT_EQ(refusal_of({1, 2, 4}, {0, 0, 1}), "no error");
  EXPECT_EQ(refusal_of({-1, 2, 5}, {0, 3, 6}),
            "attention: cu_seqlens_q[0]: expected a row between 0 and 5, got -1");
  EXPECT_EQ(refusal_of({0, 2, 6}, {0, 3, 7}),
            "attention: cu_seqlens_q[2]: expected a row between 0 and 5, got 6");
  EXPECT_EQ(refusal_of({0, 2, 5}, {0, 3, 2}),
            "attention: cu_seqlens_k[2]: expected at least the entry before it, 3, got 2");
  EXPECT_EQ(refusal_of({0, 4, 5}, {0, 3, 6}, 3),
            "attention: cu_seqlens_q[1]: expected at most 3 = the entry before it + max_seqlen_q "
            "3, got 4");
}

TEST(attention_messages, write_dropout_mask) {
  std::uint8_t mask[16];
  const auto refusal_of = [&](const TensorSpec& spec, void* data, double dropout) {
    return message_of([&] { write_dropout_mask(spec, data, dropout, 1); });
  };
  const auto spec = TensorSpec::contiguous(DType::u8, {1, 1, 4, 4});
  EXPECT_EQ(refusal_of(spec, mask, 0.5), "no error");
  EXPECT_EQ(refusal_of(spec, nullptr, 0.5),
            "write_dropout_mask: mask: expected a data pointer, got null");
  EXPECT_EQ(refusal_of(spec, mask, 1),
            "write_dropout_mask: dropout: expected a probability in [0, 1), got 1");
  EXPECT_EQ(refusal_of(f32({1, 1, 4, 4}), mask, 0.5),
            "write_dropout_mask: mask: expected dtype u8 or bool, got f32; convert the tensor "
            "first");
  EXPECT_EQ(refusal_of(TensorSpec::contiguous(DType::u8, {4, 4}), mask, 0.5),
            "write_dropout_mask: mask: expected rank 4, got rank 2 [4, 4]");
}

TEST(attention_messages, blocks) {
  const auto with = [](std::int64_t heads, std::int64_t rows, std::int64_t columns,
                       std::int64_t block, std::int64_t batches = 1) {
    return [=](AttentionProblem& p) {
      const std::vector<std::uint8_t> present(static_cast<std::size_t>(heads * rows * columns), 1);
      p.blocks = {std::make_shared<const BlockLayout>(heads, rows, columns, present), batches,
                  block};
    };
  };
  EXPECT_EQ(refusal(with(4, 1, 1, 16)), "no error");
  EXPECT_EQ(refusal(with(8, 1, 1, 16, 2)), "no error");
  EXPECT_EQ(refusal(with(2, 1, 1, 16, 2)), "no error");
  EXPECT_EQ(refusal(with(4, 1, 1, 24)),
            "attention: block: expected 16 to 128, a multiple of 16, got 24");
  EXPECT_EQ(refusal(with(3, 1, 1, 16, 3)),
            "attention: layout: expected layouts for 1 or 2 batch items, got 3");
  EXPECT_EQ(refusal(with(2, 1, 1, 16)),
            "attention: layout: expected [1 times 1 or 4 heads, 1, 1] blocks of 16, got [2, 1, 1]; "
            "rows are for queries, columns for keys, the last ones may be partly outside");
  EXPECT_EQ(refusal(with(1, 1, 2, 16)),
            "attention: layout: expected [1 times 1 or 4 heads, 1, 1] blocks of 16, got [1, 1, 2]; "
            "rows are for queries, columns for keys, the last ones may be partly outside");
  EXPECT_EQ(refusal(with(1, 1, 1, 16), good_varlen()),
            "attention: layout: expected none with cu_seqlens, got a block layout; a packed batch "
            "has no common grid of blocks: run the sequences one by one, or padded");
  EXPECT_EQ(refusal([](auto& p) { p.blocks.block = 16; }),
            "attention: layout: expected one, as there are blocks of 16 for 1 batch items, got "
            "none; pass the layout, or leave block and batches out");
}

}  // namespace
}  // namespace pullback

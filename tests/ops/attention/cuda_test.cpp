// attention on a GPU where the case list does not look: long sequences, and the same bits a
// thousand times from what is summed by several blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/block_layout.hpp"
#include "driver/check.hpp"
#include "driver/tensor_memory.hpp"
#include "ops/attention/case_setup.hpp"
#include "pullback/attention.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

using namespace driver;

class attention_cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = cuda::driver_problem(); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }
};

constexpr std::int64_t kLong = 131072;

// Both passes of self-attention of 2048 channels, with the bytes of the tensors of the problem.
void for_long_plans(const Device& device, const auto& visit) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      AttentionProblem problem;
      problem.q = TensorSpec::contiguous(dtype, {1, kLong, 2048 / head_dim, head_dim});
      problem.k = problem.v = problem.d_out = problem.q;
      for (const BandMask& mask : {BandMask{}, BandMask::causal(Corner::bottom_right)}) {
        problem.mask = mask;
        const AttentionProblem full = complete(problem);
        std::size_t bytes = 0;
        for (const TensorSpec* spec : {&full.q, &full.k, &full.v, &full.out, &full.lse, &full.d_out,
                                       &full.d_q, &full.d_k, &full.d_v}) {
          bytes += static_cast<std::size_t>(spec->numel()) * size_of(spec->dtype);
        }
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          SCOPED_TRACE(full.q.to_string());
          visit(full, bytes, make_plan(device, full, pass).workspace_bytes());
        }
      }
    }
  }
}

TEST_F(attention_cuda, more_tiles_than_a_grid_has_are_refused) {
  AttentionProblem problem;  // their number has no bits among its lower 32
  problem.q = TensorSpec::contiguous(DType::bf16, {std::int64_t{1} << 42, 1, 16});
  problem.k = problem.v = problem.q;
  problem.cu_seqlens_q = problem.cu_seqlens_k = TensorSpec::contiguous(DType::i64, {1});
  problem.max_seqlen_q = problem.max_seqlen_k = 1024;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_THROW(make_plan(Device::cuda(), problem, pass), Error);
  }
}

TEST_F(attention_cuda, more_tiles_than_kernels_for_hopper_count_go_to_the_others) {
  if (cuda::device_info(0).major != 9) GTEST_SKIP() << "no Hopper";
  const auto takes_hopper = [](std::int64_t sequences) {
    AttentionProblem problem;
    problem.q = TensorSpec::contiguous(DType::bf16, {sequences, 64, 64});
    problem.k = problem.v = problem.q;
    problem.cu_seqlens_q = problem.cu_seqlens_k =
        TensorSpec::contiguous(DType::i32, {sequences + 1});
    problem.max_seqlen_q = problem.max_seqlen_k = 1024;
    return make_plan(Device::cuda(), complete(problem), Pass::forward).describe().find("Hopper") !=
           std::string::npos;
  };
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  EXPECT_TRUE(takes_hopper(kMost));
  EXPECT_FALSE(takes_hopper(kMost + 1));
}

// d_q in f32, and tiles.
TEST(attention_memory, of_131072_tokens_on_the_cpu) {
  for_long_plans(Device::cpu(2), [](const AttentionProblem& problem, std::size_t,
                                    std::size_t scratch) {
    EXPECT_LE(scratch, static_cast<std::size_t>(problem.q.numel()) * 4 + (std::size_t{64} << 20));
  });
}

TEST_F(attention_cuda, memory_of_131072_tokens) {
  for_long_plans(Device::cuda(), [](const AttentionProblem&, std::size_t own, std::size_t scratch) {
    EXPECT_LE(scratch * 10, own);
  });
}

// Rows of a tensor [1,S,H,D] or [1,H,S] in double.
std::vector<double> row_of(const HostTensor& tensor, std::int64_t heads, std::int64_t row,
                           std::int64_t head) {
  const std::int64_t width = tensor.spec().shape[3];
  std::vector<double> values(static_cast<std::size_t>(width));
  tensor.load((row * heads + head) * width, values);
  return values;
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add(std::vector<double>& sum, double factor, std::span<const double> values) {
  sum.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) sum[i] += factor * values[i];
}

void expect_row(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  double largest = 0;
  for (const double value : want) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], largest * 0x1p-6) << what << " " << i;
  }
}

// All rows are computed; the first and the last ones, and some between, are compared with f64.
TEST_F(attention_cuda, gradients_of_131072_tokens) {
  constexpr std::int64_t kHeads = 8, kWidth = 128;
  const attention_setup::Setup setup{.batch = 1,
                                     .query = kLong,
                                     .key = kLong,
                                     .heads = kHeads,
                                     .kv_heads = kHeads,
                                     .head_dim = kWidth,
                                     .value_dim = kWidth};
  Random random(1);
  const Request request{.op = "attention",
                        .inputs = attention_setup::inputs_of(setup, DType::bf16, random),
                        .options = {},
                        .device = Device::cuda(),
                        .variant = {}};
  const TensorMap results = evaluate(request);
  const auto row = [&](const char* name, std::int64_t at, std::int64_t head) {
    const auto input = request.inputs.find(name);
    return row_of(input == request.inputs.end() ? results.at(name) : input->second, kHeads, at,
                  head);
  };
  const double scale = 1 / std::sqrt(static_cast<double>(kWidth));
  for (const auto& [head, at] : {std::array<std::int64_t, 2>{0, 0}, {3, 70001}, {7, kLong - 1}}) {
    SCOPED_TRACE(at);
    const auto lse_of = [&, head = head](std::int64_t i) {
      return results.at("lse").get(head * kLong + i);
    };
    const std::vector<double> q = row("q", at, head), d_out = row("d_out", at, head);
    const std::vector<double> k = row("k", at, head), v = row("v", at, head);
    const double delta = dot(row("out", at, head), d_out);
    std::vector<double> out, d_q, d_k, d_v;
    double sum = 0;
    for (std::int64_t other = 0; other < kLong; ++other) {
      const std::vector<double> their_k = row("k", other, head), their_v = row("v", other, head);
      const double p = std::exp(dot(q, their_k) * scale - lse_of(at));
      sum += p;
      add(out, p, their_v);
      add(d_q, scale * p * (dot(d_out, their_v) - delta), their_k);

      const std::vector<double> their_q = row("q", other, head);
      const std::vector<double> their_d_out = row("d_out", other, head);
      const double their_delta = dot(row("out", other, head), their_d_out);
      const double their_p = std::exp(dot(their_q, k) * scale - lse_of(other));
      add(d_v, their_p, their_d_out);
      add(d_k, scale * their_p * (dot(their_d_out, v) - their_delta), their_q);
    }
    EXPECT_NEAR(sum, 1, 1e-4);  // what is wrong with lse
    expect_row(row("out", at, head), out, "out");
    expect_row(row("d_q", at, head), d_q, "d_q");
    expect_row(row("d_k", at, head), d_k, "d_k");
    expect_row(row("d_v", at, head), d_v, "d_v");
  }
}

void expect_tensor(const HostTensor& got, const HostTensor& want) {
  double largest = 0;
  for (std::int64_t i = 0; i < want.numel(); ++i)
    largest = std::max(largest, std::abs(want.get(i)));
  for (std::int64_t i = 0; i < want.numel(); ++i) {
    ASSERT_NEAR(got.get(i), want.get(i), largest * 0x1p-6) << "element " << i;
  }
  EXPECT_TRUE(got.guards_intact());
}

// With a softcap a row's lse and delta are finite all the same. Its element of d_k is 0 times
// infinity for the keys that it sees, but none for the others.
TEST_F(attention_cuda, infinite_queries_stay_with_the_keys_that_they_see) {
  for (const std::int64_t head_dim : {20, 64, 128, 192}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " D " << head_dim);
      const attention_setup::Setup setup{.batch = 1,
                                         .query = 330,
                                         .key = 330,
                                         .head_dim = head_dim,
                                         .value_dim = head_dim,
                                         .sigma = 2};
      Random random(6);
      Request request{.op = "attention",
                      .inputs = attention_setup::inputs_of(setup, dtype, random),
                      .options = {{"softcap", "3"}, {"causal", "top-left"}},
                      .device = Device::cuda(),
                      .variant = {}};
      constexpr std::int64_t kRow = 5, kColumn = 7;
      request.inputs.at("q").set(kRow * setup.heads * head_dim + kColumn,
                                 std::numeric_limits<double>::infinity());
      const TensorMap got = evaluate(request);
      request.device = Device::cpu();
      request.variant = "reference";
      const TensorMap want = evaluate(request);
      for (const char* name : {"out", "lse", "d_q", "d_k", "d_v"}) {
        SCOPED_TRACE(name);
        HostTensor result = got.at(name), expected = want.at(name);
        for (std::int64_t row = 0; row <= kRow && name == std::string_view("d_k"); ++row) {
          const std::int64_t seen = row * setup.heads * head_dim + kColumn;
          ASSERT_TRUE(std::isnan(expected.get(seen)));
          result.set(seen, 0);
          expected.set(seen, 0);
        }
        expect_tensor(result, expected);
      }
    }
  }
}

// Gradients of which only some are wanted, and tensors that vectors of 16 bytes do not fit: kernels
// that need more leave it to others.
TEST_F(attention_cuda, any_gradients_at_any_addresses) {
  const auto expect_all = [](const attention_setup::Setup& setup, std::int64_t block, DType dtype) {
    Random random(4);
    const Request request{.op = "attention",
                          .inputs = attention_setup::inputs_of(setup, dtype, random),
                          .options = block == 0 ? OptionMap{} : attention_setup::with_size(block),
                          .device = Device::cuda(),
                          .variant = {}};
    const TensorMap expected = evaluate(request);
    AttentionProblem problem;
    problem.q = request.inputs.at("q").spec();
    problem.k = request.inputs.at("k").spec();
    problem.v = request.inputs.at("v").spec();
    problem.d_out = request.inputs.at("d_out").spec();
    if (block > 0) {
      problem.blocks.layout = layout_of("attention", request.inputs, &problem.blocks.batches);
      problem.blocks.block = block;
    }
    problem = complete(problem);
    const auto plan_all = make_plan(Device::cuda(), problem, Pass::backward);
    // Bits of what is wanted; 8: what is not the plan does not know.
    const auto expect_some = [&](unsigned wanted, bool unaligned) {
      const auto plan_some = [&] {
        AttentionProblem some = problem;
        if (!(wanted & 1)) some.d_q = {};
        if (!(wanted & 2)) some.d_k = {};
        if (!(wanted & 4)) some.d_v = {};
        return make_plan(Device::cuda(), some, Pass::backward);
      };
      const auto plan = wanted & 8 ? plan_some() : plan_all;
      SCOPED_TRACE(testing::Message()
                   << plan.describe() << (unaligned ? " unaligned, " : " ") << wanted);
      TensorMemory memory(Device::cuda(), {.unaligned = unaligned});
      AttentionTensors tensors{.q = memory.input(request.inputs.at("q")),
                               .k = memory.input(request.inputs.at("k")),
                               .v = memory.input(request.inputs.at("v")),
                               .d_out = memory.input(request.inputs.at("d_out"))};
      HostTensor out = expected.at("out"), lse = expected.at("lse");
      const HostTensor d_q(problem.d_q), d_k(problem.d_k), d_v(problem.d_v);
      tensors.out = const_cast<void*>(memory.input(out));
      tensors.lse = const_cast<void*>(memory.input(lse));
      if (wanted & 1) tensors.d_q = memory.output(d_q);
      if (wanted & 2) tensors.d_k = memory.output(d_k);
      if (wanted & 4) tensors.d_v = memory.output(d_v);
      memory.reserve_workspace(plan.workspace_bytes());
      plan.run(memory.stream(), tensors, memory.workspace());
      memory.fetch();
      if (wanted & 1) expect_tensor(d_q, expected.at("d_q"));
      if (wanted & 2) expect_tensor(d_k, expected.at("d_k"));
      if (wanted & 4) expect_tensor(d_v, expected.at("d_v"));
    };
    for (const bool unaligned : {false, true}) {
      for (unsigned wanted = 1; wanted < 15; ++wanted) {
        if (wanted != 8) expect_some(wanted, unaligned);
      }
    }
  };
  for (const std::int64_t head_dim : {64, 72, 128, 256}) {
    const attention_setup::Setup setup{.batch = 2,
                                       .query = 330,
                                       .key = 450,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = head_dim,
                                       .value_dim = head_dim};
    expect_all(setup, 0, DType::bf16);
    for (const std::int64_t block : {32, 64, 128}) {
      expect_all(attention_setup::with_blocks(setup, {.block = block, .heads = 4}), block,
                 DType::bf16);
    }
    expect_all(setup, 0, DType::f32);
  }
}

// What several blocks add up: d_q, d_k and d_v of groups, and d_bias over each of its dimensions.
TEST_F(attention_cuda, sums_have_the_same_bits_a_thousand_times) {
  const auto expect_same = [](const attention_setup::Setup& setup, const OptionMap& options,
                              DType dtype, int runs) {
    Random random(2);
    const Request request{.op = "attention",
                          .inputs = attention_setup::inputs_of(setup, dtype, random),
                          .options = options,
                          .device = Device::cuda(),
                          .variant = {}};
    const TensorMap expected = evaluate(request);
    const auto session = find_driver(request.op).prepare(request);
    for (int run = 0; run < runs && !HasFailure(); ++run) {
      session->forward();
      session->backward();
      session->fetch(Fetch::outputs);
      for (const auto& [name, tensor] : expected) {
        EXPECT_TRUE(same_bits(tensor, session->outputs.at(name))) << name << " in run " << run;
      }
    }
  };
  const attention_setup::Setup setup{.batch = 2,
                                     .query = 70,
                                     .key = 140,
                                     .heads = 8,
                                     .kv_heads = 2,
                                     .head_dim = 64,
                                     .value_dim = 64};
  const OptionMap options = {{"dropout", "0.1"}, {"seed", "3"}, {"causal", "bottom-right"}};
  const auto with_bias = [&](const std::vector<std::int64_t>& bias) {
    attention_setup::Setup changed = setup;
    changed.bias = bias;
    return changed;
  };
  expect_same(with_bias({1, 8, 70, 140}), options, DType::bf16, 1000);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    expect_same(with_bias({2, 8, 70, 140}), options, dtype, 50);
    expect_same(with_bias({2, 1, 1, 140}), options, dtype, 50);
    expect_same(with_bias({1, 1, 1, 1}), options, dtype, 50);
  }
  // Batch items that add up d_bias one after the other, and some that do so in flight together.
  attention_setup::Setup wide = setup;
  wide.batch = 5;
  for (const std::int64_t key : {300, 1100}) {
    wide.query = 2 * key, wide.key = key;
    wide.bias = {1, 8, wide.query, wide.key};
    expect_same(wide, options, DType::bf16, 200);
    expect_same(wide, {{"causal", "top-left"}}, DType::f16, 50);
  }
  // Heads of which thread blocks share a tile of keys.
  wide = setup;
  wide.query = 4100;
  expect_same(
      attention_setup::with_blocks(wide, {.block = 64, .batches = 2, .heads = 8, .density = 0.7}),
      {{"block", "64"}}, DType::bf16, 50);
  // Long lists shared by several, and lines of turns.
  wide.key = 2500;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    expect_same(attention_setup::with_blocks(
                    wide, {.block = 64, .heads = 8, .density = 0.02, .global = 30}),
                {{"block", "64"}}, dtype, 50);
  }
}

// Nobody who wants no gradients needs lse.
TEST_F(attention_cuda, forward_without_lse) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const std::int64_t head_dim : {16, 64, 128, 256}) {
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " D " << head_dim);
      AttentionProblem problem;
      problem.q = TensorSpec::contiguous(dtype, {2, 400, 2, head_dim});
      problem.k = problem.v = TensorSpec::contiguous(dtype, {2, 330, 2, head_dim});
      problem.mask = BandMask::causal(Corner::bottom_right);  // rows see nothing at first
      problem = complete(problem);
      Random random(1);
      const auto values = [&](const TensorSpec& spec) {
        return normal_tensor(dtype, {spec.shape.begin(), spec.shape.begin() + 4}, random);
      };
      const HostTensor q = values(problem.q), k = values(problem.k), v = values(problem.v);
      const HostTensor out(problem.out), alone(problem.out), lse(problem.lse);
      TensorMemory memory(Device::cuda());
      AttentionTensors tensors;
      tensors.q = memory.input(q);
      tensors.k = memory.input(k);
      tensors.v = memory.input(v);
      const auto plan = make_plan(Device::cuda(), problem, Pass::forward);
      memory.reserve_workspace(plan.workspace_bytes());
      tensors.out = memory.output(alone);
      plan.run(memory.stream(), tensors, memory.workspace());
      tensors.out = memory.output(out);
      tensors.lse = memory.output(lse);
      plan.run(memory.stream(), tensors, memory.workspace());
      memory.fetch();
      EXPECT_TRUE(same_bits(alone, out));
      EXPECT_NE(out.get(out.numel() - 1), 0);
    }
  }
}

}  // namespace
}  // namespace pullback

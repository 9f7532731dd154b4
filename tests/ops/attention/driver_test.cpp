// Options, tensors and costs of attention as the command line sees them.
#include <gtest/gtest.h>

#include "driver/case.hpp"
#include "driver/driver.hpp"
#include "pullback/error.hpp"

namespace pullback::driver {
namespace {

Request request_with(OptionMap options) {
  Random random(1);
  Request request;
  request.op = "attention";
  request.options = std::move(options);
  request.inputs["q"] = normal_tensor(DType::f64, {1, 12, 2, 4}, random);
  request.inputs["k"] = normal_tensor(DType::f64, {1, 15, 2, 4}, random);
  request.inputs["v"] = normal_tensor(DType::f64, {1, 15, 2, 6}, random);
  request.inputs["d_out"] = normal_tensor(DType::f64, {1, 12, 2, 6}, random);
  request.device = Device::cpu(1);
  return request;
}

std::string message_of(const Request& request) {
  try {
    evaluate(request);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool same(const OptionMap& a, const OptionMap& b) {
  const TensorMap x = evaluate(request_with(a)), y = evaluate(request_with(b));
  for (const auto& [name, tensor] : x) {
    if (!same_bits(tensor, y.at(name))) return false;
  }
  return x.size() == y.size();
}

TEST(attention_driver, causal_bounds_the_window_on_the_right) {
  EXPECT_TRUE(same({{"causal", "top-left"}}, {{"window", "-1,0"}}));
  EXPECT_TRUE(same({{"causal", "bottom-right"}}, {{"window", "-1,0"}, {"corner", "bottom-right"}}));
  EXPECT_TRUE(same({{"causal", "bottom-right"}, {"window", "4,9"}},
                   {{"window", "4,0"}, {"corner", "bottom-right"}}));
  EXPECT_TRUE(same({{"causal", "top-left"}, {"window", "4,-1"}}, {{"window", "4,0"}}));
  EXPECT_FALSE(same({{"window", "4,2"}}, {{"window", "4,2"}, {"corner", "bottom-right"}}));
  EXPECT_FALSE(same({{"window", "4,2"}}, {{"window", "4,0"}}));
  EXPECT_TRUE(same({{"window", "-1,-1"}}, {}));
}

TEST(attention_driver, a_layout_and_its_block_come_together) {
  Request request = request_with({});
  request.inputs["layout"] = filled_tensor(DType::u8, {1, 1, 1}, 1);
  EXPECT_EQ(message_of(request),
            "attention: --block: expected the side of the layout's blocks, 16 to 128, got none");
  request.options["block"] = "16";
  EXPECT_EQ(message_of(request), "no error");
  request.inputs.erase("layout");
  EXPECT_EQ(message_of(request), "attention: --block: expected none without a layout, got 16");
}

TEST(attention_driver, options_reach_the_problem) {
  EXPECT_TRUE(same({{"scale", "0.5"}}, {}));  // 1 / sqrt(4)
  EXPECT_FALSE(same({{"scale", "0.25"}}, {}));
  EXPECT_FALSE(same({{"softcap", "1"}}, {}));
  EXPECT_FALSE(same({{"dropout", "0.5"}}, {}));
  EXPECT_FALSE(same({{"dropout", "0.5"}}, {{"dropout", "0.5"}, {"seed", "1"}}));
  const auto seeded = [](const char* seed) {
    return OptionMap{{"dropout", "0.5"}, {"seed", seed}};
  };
  EXPECT_TRUE(same(seeded("18446744073709551615"), seeded("-1")));
  EXPECT_TRUE(same(seeded("9223372036854775808"), seeded("-9223372036854775808")));
  EXPECT_FALSE(same(seeded("18446744073709551615"), seeded("1")));
  EXPECT_TRUE(same({{"deterministic", "true"}}, {}));
}

TEST(attention_driver, bad_options) {
  EXPECT_EQ(message_of(request_with({{"dropout", "0.5"}, {"seed", "18446744073709551616"}})),
            "attention: --seed: expected an integer, got '18446744073709551616'");
  EXPECT_EQ(message_of(request_with({{"causal", "yes"}})),
            "attention: --causal: expected top-left or bottom-right, got 'yes'");
  EXPECT_EQ(message_of(request_with({{"causal", "top-left"}, {"corner", "bottom-right"}})),
            "attention: --corner: expected the corner of --causal, got the other; leave --corner "
            "out: it places a window that is not causal");
  EXPECT_EQ(message_of(request_with({{"causal", "top-left"}, {"window", "0,-2"}})),
            "attention: mask: expected left and right of 0 or more, or -1 for unbounded, got "
            "0, -2");
  EXPECT_EQ(message_of(request_with({{"window", "3"}})),
            "attention: --window: expected 2 integers with commas between, got '3'");
  EXPECT_EQ(message_of(request_with({{"max-seqlen-q", "3"}})),
            "attention: max_seqlen: expected 0 without cu_seqlens, got 3, 0; it bounds the "
            "sequences that cu_seqlens_q and cu_seqlens_k describe");
  EXPECT_NE(message_of(request_with({{"alpha", "3"}})).find("got --alpha"), std::string::npos);
}

TEST(attention_driver, inputs) {
  Request request = request_with({});
  request.inputs.erase("d_out");
  EXPECT_EQ(message_of(request),
            "attention: d_out: expected a tensor [B,Sq,H,Dv], or [total_q,H,Dv], got none");
  request.backward = false;
  EXPECT_EQ(message_of(request), "no error");
  EXPECT_EQ(evaluate(request).size(), 2u);
  request.inputs.erase("v");
  EXPECT_EQ(message_of(request),
            "attention: v: expected a tensor [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv], got none");
}

TEST(attention_driver, bad_cu_seqlens_of_a_file_are_reported) {
  Random random(1);
  Request request = request_with({});
  request.inputs["q"] = request.inputs["d_out"] = normal_tensor(DType::f32, {5, 2, 4}, random);
  request.inputs["k"] = request.inputs["v"] = normal_tensor(DType::f32, {6, 2, 4}, random);
  request.inputs["cu_seqlens_q"] = tensor_of(DType::i64, {2}, {0, 6});
  request.inputs["cu_seqlens_k"] = tensor_of(DType::i64, {2}, {0, 6});
  EXPECT_EQ(message_of(request),
            "attention: cu_seqlens_q[1]: expected a row between 0 and 5, got 6");
}

TEST(attention_driver, cost_counts_visible_pairs_and_compulsory_bytes) {
  const OpDriver& driver = find_driver("attention");
  const auto flops = [&](OptionMap options) {
    return driver.cost(request_with(std::move(options)), Pass::forward).flops;
  };
  const double pair = 2 * 2 * (4 + 6);  // 2 heads, a multiplication and an addition each
  EXPECT_EQ(flops({}), 12 * 15 * pair);
  EXPECT_EQ(flops({{"causal", "top-left"}}), 12 * 13 / 2 * pair);
  EXPECT_EQ(flops({{"causal", "bottom-right"}}), (12 * 13 / 2 + 12 * 3) * pair);
  EXPECT_EQ(flops({{"window", "0,0"}}), 12 * pair);
  const Cost backward = driver.cost(request_with({}), Pass::backward);
  EXPECT_EQ(backward.flops, 2.5 * 12 * 15 * pair);
  // q k v out lse d_out d_q d_k d_v, in doubles.
  EXPECT_EQ(backward.bytes, 8 * (2 * 96 + 2 * 120 + 2 * 180 + 2 * 144 + 24));
}

}  // namespace
}  // namespace pullback::driver

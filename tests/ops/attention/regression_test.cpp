// Defects that users of other attention libraries met, each as a test, and identities that need no
// reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "driver/check.hpp"
#include "ops/attention/run_attention.hpp"

namespace pullback::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const char* const kGradients[] = {"d_q", "d_k", "d_v"};

double at(const HostTensor& tensor, std::initializer_list<std::int64_t> index) {
  std::int64_t flat = 0;
  int dim = 0;
  for (std::int64_t i : index) flat = flat * tensor.spec().shape[dim++] + i;
  return tensor.get(flat);
}

void expect_same_bits(const TensorMap& a, const TensorMap& b) {
  for (const auto& [name, tensor] : a) {
    EXPECT_TRUE(driver::same_bits(tensor, b.find(name)->second)) << name;
  }
}

void expect_all(const HostTensor& tensor, double value, const std::string& what) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) ASSERT_EQ(tensor.get(i), value) << what;
}

void expect_finite(const TensorMap& tensors) {
  for (const auto& [name, tensor] : tensors) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      const bool no_sum = name == "lse" && tensor.get(i) == -kInf;
      ASSERT_TRUE(std::isfinite(tensor.get(i)) || no_sum) << name << " element " << i;
    }
  }
}

// FlashAttention #1817, #1137, #889: backward functions that take d_lse and drop it.
TEST(attention_regression, gradient_of_lse_is_not_dropped) {
  AttentionRun run = normal_run(DType::f64, 1, 20, 37, 2, 2, 8);
  run.inputs["d_out"] = driver::filled_tensor(DType::f64, {1, 20, 2, 8}, 0);
  run.inputs["d_lse"] = driver::filled_tensor(DType::f64, {1, 2, 20}, 1);
  run.inputs["bias"] = driver::filled_tensor(DType::f64, {1, 2, 20, 37}, 0);
  const TensorMap outputs = run();
  // The derivative of a row's lse by its scores is the row's probabilities.
  for (std::int64_t row = 0; row < 40; ++row) {
    double sum = 0;
    for (std::int64_t j = 0; j < 37; ++j) sum += outputs.at("d_bias").get(row * 37 + j);
    EXPECT_NEAR(sum, 1, 1e-12);
  }
  expect_all(outputs.at("d_v"), 0, "d_v");
}

// PyTorch #181645: a logsumexp off by a factor ln 2.
TEST(attention_regression, lse_is_a_natural_logarithm) {
  AttentionRun run = normal_run(DType::f64, 1, 3, 50, 1, 1, 8);
  run.inputs["q"] = driver::filled_tensor(DType::f64, {1, 3, 1, 8}, 0);
  const TensorMap outputs = run();
  for (std::int64_t i = 0; i < 3; ++i) EXPECT_NEAR(outputs.at("lse").get(i), std::log(50), 1e-13);
}

TEST(attention_regression, equal_scores_average_integers_exactly) {
  for (DType dtype : driver::Case().dtypes) {
    AttentionRun run = normal_run(dtype, 1, 5, 64, 2, 2, 16);
    driver::Random random(3);
    run.inputs["q"] = driver::filled_tensor(dtype, {1, 5, 2, 16}, 0);
    const HostTensor v = driver::integer_tensor(dtype, {1, 64, 2, 16}, random, 1);
    run.inputs["v"] = v;
    const TensorMap outputs = run();
    for (std::int64_t column = 0; column < 32; ++column) {
      double sum = 0;
      for (std::int64_t j = 0; j < 64; ++j) sum += v.get(j * 32 + column);
      for (std::int64_t i = 0; i < 5; ++i) {
        EXPECT_EQ(outputs.at("out").get(i * 32 + column), sum / 64) << name_of(dtype);
      }
    }
  }
}

// FlashAttention #355, PyTorch #134001, #138581: incoming gradients with unusual strides.
TEST(attention_regression, stride_0_d_out_equals_its_copy) {
  AttentionRun run = normal_run(DType::f32, 2, 65, 70, 2, 2, 16);
  const HostTensor one = driver::filled_tensor(DType::f32, {1, 1, 1, 1}, 1);
  run.inputs["d_out"] = driver::broadcast(one, {2, 65, 2, 16});
  AttentionRun copy = run;
  copy.inputs["d_out"] = driver::contiguous_copy(run.inputs["d_out"]);
  expect_near(run(), copy(), 1e-6);
}

// FlashAttention #1778: causal with more queries than keys leaves rows that see nothing.
TEST(attention_regression, causal_bottom_right_with_more_queries_than_keys) {
  AttentionRun run = normal_run(DType::f32, 1, 70, 33, 2, 2, 16);
  run.options.mask = BandMask::causal(Corner::bottom_right);
  const TensorMap outputs = run();
  expect_finite(outputs);
  for (std::int64_t i = 0; i < 37; ++i) {  // 70 - 33 rows
    EXPECT_EQ(at(outputs.at("lse"), {0, 1, i}), -kInf);
    for (std::int64_t d = 0; d < 16; ++d) {
      EXPECT_EQ(at(outputs.at("out"), {0, i, 1, d}), 0);
      EXPECT_EQ(at(outputs.at("d_q"), {0, i, 1, d}), 0);
    }
  }
  EXPECT_TRUE(std::isfinite(at(outputs.at("lse"), {0, 1, 37})));
}

// PyTorch's memory-efficient backward omits the corner's offset from the window when Sq != Sk.
// Every band equals the dense mask that its definition spells out.
TEST(attention_regression, every_band_equals_its_dense_mask) {
  const std::int64_t sides[] = {-1, 0, 1, 6, 40, std::numeric_limits<std::int64_t>::max()};
  for (const auto& [query, key] : {std::pair{20, 33}, {33, 20}, {21, 21}}) {
    for (Corner corner : {Corner::top_left, Corner::bottom_right}) {
      for (std::int64_t left : sides) {
        for (std::int64_t right : sides) {
          AttentionRun band = normal_run(DType::f64, 1, query, key, 1, 1, 4);
          band.inputs["bias"] = driver::filled_tensor(DType::f64, {1, 1, query, key}, 0);
          AttentionRun dense = band;
          band.options.mask = {left, right, corner};
          HostTensor bias = driver::filled_tensor(DType::f64, {1, 1, query, key}, 0);
          const std::int64_t offset = corner == Corner::bottom_right ? key - query : 0;
          for (std::int64_t i = 0; i < query; ++i) {
            for (std::int64_t j = 0; j < key; ++j) {
              const bool seen =
                  (left < 0 || j - i - offset >= -left) && (right < 0 || j - i - offset <= right);
              if (!seen) bias.set(i * key + j, -kInf);
            }
          }
          dense.inputs["bias"] = bias;
          expect_near(band(), dense(), 1e-13);
          if (HasFatalFailure()) FAIL() << "left " << left << " right " << right;
        }
      }
    }
  }
}

// The memory-efficient backward of PyTorch never writes the bias gradient of skipped tiles.
TEST(attention_regression, d_bias_is_zero_where_causal_skips) {
  AttentionRun run = normal_run(DType::f32, 1, 150, 150, 1, 1, 16);
  driver::Random random(5);
  run.inputs["bias"] = driver::normal_tensor(DType::f32, {1, 1, 150, 150}, random);
  run.options.mask = BandMask::causal(Corner::top_left);
  const TensorMap outputs = run();
  for (std::int64_t i = 0; i < 150; ++i) {
    for (std::int64_t j = i + 1; j < 150; ++j) {
      ASSERT_EQ(at(outputs.at("d_bias"), {0, 0, i, j}), 0);
    }
  }
}

// FlashAttention #2776: no queries or no keys must yield zero gradients, not unwritten ones.
TEST(attention_regression, empty_q_or_k_gives_zero_gradients) {
  const TensorMap no_query = normal_run(DType::f32, 2, 0, 9, 2, 2, 8)();
  expect_all(no_query.at("d_k"), 0, "d_k");
  expect_all(no_query.at("d_v"), 0, "d_v");
  AttentionRun run = normal_run(DType::f32, 2, 9, 0, 2, 2, 8);
  run.inputs["bias"] = driver::filled_tensor(DType::f32, {1, 2, 9, 1}, 0);
  const TensorMap no_key = run();
  expect_all(no_key.at("out"), 0, "out");
  expect_all(no_key.at("lse"), -kInf, "lse");
  expect_all(no_key.at("d_q"), 0, "d_q");
  expect_all(no_key.at("d_bias"), 0, "d_bias");
}

// Rows that see nothing stay clean even when d_out, d_lse and the hidden keys hold NaN.
TEST(attention_regression, masked_rows_give_zeros_whatever_the_rest_holds) {
  for (const bool by_bias : {false, true}) {
    AttentionRun run = normal_run(DType::f32, 1, 40, 40, 2, 2, 16);
    run.inputs["d_lse"] = driver::filled_tensor(DType::f32, {1, 2, 40}, 0.5);
    // Queries 0…9 see nothing.
    if (by_bias) {
      run.inputs["bias"] = driver::filled_tensor(DType::f32, {1, 1, 40, 1}, 0);
      for (std::int64_t i = 0; i < 10; ++i) run.inputs["bias"].set(i, -kInf);
    } else {
      for (const char* name : {"k", "v"}) run.inputs[name] = slice(run.inputs[name], 1, 10, 30);
      run.options.mask = BandMask::causal(Corner::bottom_right);
    }
    const TensorMap clean = run();
    expect_finite(clean);
    for (std::int64_t i = 0; i < 10 * 32; ++i) {
      run.inputs["d_out"].set(i, kNaN);
      ASSERT_EQ(clean.at("out").get(i), 0);
      ASSERT_EQ(clean.at("d_q").get(i), 0);
    }
    for (std::int64_t i = 0; i < 10; ++i) {
      run.inputs["d_lse"].set(i, kNaN);
      ASSERT_EQ(clean.at("lse").get(i), -kInf);
    }
    expect_near(run(), clean, 1e-6);
  }
}

// PyTorch #101967: 0 · NaN. What nobody sees may hold anything.
TEST(attention_regression, nan_in_hidden_keys_goes_nowhere) {
  for (DType dtype : driver::Case().dtypes) {
    AttentionRun run = normal_run(dtype, 1, 20, 100, 2, 2, 16);
    run.options.mask = BandMask::causal(Corner::top_left);  // keys 20…99 are hidden
    const TensorMap clean = run();
    for (double poison : {kNaN, kInf}) {
      for (const char* name : {"k", "v"}) {
        for (std::int64_t i = 20 * 32; i < 100 * 32; ++i) run.inputs[name].set(i, poison);
      }
      const TensorMap poisoned = run();
      expect_finite(poisoned);
      expect_near(poisoned, clean, 1e-6);
    }
  }
}

TEST(attention_regression, nan_in_a_seen_value_reaches_just_the_rows_that_see_it) {
  for (DType dtype : driver::Case().dtypes) {
    AttentionRun run = normal_run(dtype, 1, 80, 80, 1, 1, 8);
    run.options.mask = BandMask::causal(Corner::top_left);
    run.inputs["v"].set(50 * 8, kNaN);  // key 50, element 0
    const TensorMap outputs = run();
    for (std::int64_t i = 0; i < 80; ++i) {
      EXPECT_EQ(std::isnan(at(outputs.at("out"), {0, i, 0, 0})), i >= 50) << i;
      EXPECT_FALSE(std::isnan(at(outputs.at("out"), {0, i, 0, 1}))) << i;
      EXPECT_EQ(std::isnan(at(outputs.at("d_q"), {0, i, 0, 0})), i >= 50) << i;
    }
  }
}

// Its weight is 0, and d_out times its value, which overflows, changes nothing.
TEST(attention_regression, a_key_of_score_minus_infinity_has_no_gradient) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    AttentionRun run = normal_run(dtype, 1, 1, 32, 1, 1, 2);
    run.options.scale = 1;
    for (std::int64_t i = 0; i < 64; ++i) {
      run.inputs["k"].set(i, i == 0 ? -1e30 : 0);
      run.inputs["v"].set(i, i == 0 ? 1e30 : i % 2 + 1);
    }
    run.inputs["v"].set(1, 0);
    for (const char* name : {"q", "d_out"}) run.inputs[name].set(0, 1e30);
    run.inputs["q"].set(1, 0);
    run.inputs["d_out"].set(1, 1);
    const TensorMap outputs = run();
    for (std::int64_t i = 0; i < 2; ++i) {
      EXPECT_EQ(outputs.at("d_q").get(i), 0);
      EXPECT_EQ(outputs.at("d_k").get(i), 0);
    }
  }
}

// FlashAttention #2541: views of a fused QKV tensor; here the gradients are packed too.
TEST(attention_regression, packed_qkv_with_packed_gradients) {
  constexpr std::int64_t kBatch = 2, kRows = 67, kHeads = 3, kWidth = 20;
  driver::Random random(4);
  const auto packed = [&](const HostTensor& tensor, std::int64_t part) {
    return squeezed(slice(tensor, 2, part, 1), 2);
  };
  const HostTensor qkv =
      driver::normal_tensor(DType::f32, {kBatch, kRows, 3, kHeads, kWidth}, random);
  const HostTensor d_qkv(qkv.spec());
  AttentionRun run = normal_run(DType::f32, kBatch, kRows, kRows, kHeads, kHeads, kWidth);
  AttentionRun apart = run;
  std::int64_t part = 0;
  for (const char* name : {"q", "k", "v"}) {
    run.inputs[name] = packed(qkv, part);
    apart.inputs[name] = driver::contiguous_copy(run.inputs[name]);
    run.outputs[std::string("d_") + name] = packed(d_qkv, part++);
  }
  expect_near(run(), apart(), 1e-6);
  EXPECT_TRUE(d_qkv.guards_intact());
}

// FlashAttention #2552: a v head dim and address without the alignment that vector loads like.
TEST(attention_regression, misaligned_value_head_dim) {
  driver::Random random(6);
  for (DType dtype : {DType::f32, DType::bf16}) {
    AttentionRun run = normal_run(dtype, 1, 40, 70, 2, 2, 64);
    const HostTensor wide = driver::normal_tensor(dtype, {1, 70, 2, 23}, random);
    run.inputs["v"] = slice(wide, 3, 3, 17);
    run.inputs["d_out"] = slice(driver::normal_tensor(dtype, {1, 40, 2, 19}, random), 3, 1, 17);
    AttentionRun copy = run;
    copy.inputs["v"] = driver::contiguous_copy(run.inputs["v"]);
    copy.inputs["d_out"] = driver::contiguous_copy(run.inputs["d_out"]);
    expect_near(run(), copy(), 1e-6);
    EXPECT_TRUE(wide.guards_intact());
  }
}

TEST(attention_regression, backward_is_linear_in_d_out) {
  AttentionRun run = normal_run(DType::f64, 1, 50, 60, 2, 1, 8);
  const HostTensor first = run.inputs["d_out"];
  driver::Random random(8);
  const HostTensor second = driver::normal_tensor(DType::f64, {1, 50, 2, 8}, random);
  const TensorMap of_first = run();
  run.inputs["d_out"] = second;
  const TensorMap of_second = run();
  HostTensor sum = driver::contiguous_copy(first);
  for (std::int64_t i = 0; i < sum.numel(); ++i) sum.set(i, 3 * first.get(i) - second.get(i));
  run.inputs["d_out"] = sum;
  const TensorMap of_sum = run();
  for (const char* name : kGradients) {
    for (std::int64_t i = 0; i < of_sum.at(name).numel(); ++i) {
      EXPECT_NEAR(of_sum.at(name).get(i), 3 * of_first.at(name).get(i) - of_second.at(name).get(i),
                  1e-12);
    }
  }
}

// TransformerEngine #3216: wrong from the second batch item on. Here: the same bits.
TEST(attention_regression, a_batch_item_alone_equals_itself_in_a_batch) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    AttentionRun batch = normal_run(dtype, 3, 65, 130, 4, 2, 40);
    batch.options.mask = BandMask::causal(Corner::bottom_right);
    const TensorMap all = batch();
    for (std::int64_t b = 0; b < 3; ++b) {
      AttentionRun item = batch;
      for (auto& [name, tensor] : item.inputs) tensor = slice(tensor, 0, b, 1);
      TensorMap expected;
      for (const auto& [name, tensor] : all) expected[name] = slice(tensor, 0, b, 1);
      expect_same_bits(item(), expected);
    }
  }
}

// NSA-triton #27: the map from query heads to key heads. GQA equals repeating the key heads.
TEST(attention_regression, grouped_heads_equal_repeated_heads) {
  AttentionRun grouped = normal_run(DType::f64, 2, 20, 30, 6, 2, 8);
  AttentionRun repeated = grouped;
  for (const char* name : {"k", "v"}) {
    HostTensor wide(TensorSpec::contiguous(DType::f64, {2, 30, 6, 8}));
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const std::int64_t row = i / 48, head = i / 8 % 6;
      wide.set(i, grouped.inputs[name].get((row * 2 + head / 3) * 8 + i % 8));
    }
    repeated.inputs[name] = wide;
  }
  const TensorMap a = grouped(), b = repeated();
  for (const char* name : {"out", "lse", "d_q"}) expect_near(a.at(name), b.at(name), 1e-13, name);
  for (const char* name : {"d_k", "d_v"}) {
    for (std::int64_t i = 0; i < a.at(name).numel(); ++i) {
      const std::int64_t row = i / 16, head = i / 8 % 2;
      double sum = 0;
      for (std::int64_t h = 0; h < 3; ++h) {
        sum += b.at(name).get((row * 6 + head * 3 + h) * 8 + i % 8);
      }
      EXPECT_NEAR(a.at(name).get(i), sum, 1e-13);
    }
  }
}

// Gradients that are 0, where what 16 bits make of the textbook's is 0 by luck.
TEST(attention_regression, equal_keys_have_no_d_q_but_rounding) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (std::uint64_t seed = 1; seed < 30; ++seed) {
      driver::Random random(seed);
      AttentionRun run = normal_run(dtype, 1, 1, 2, 1, 1, 2);
      const HostTensor one = driver::normal_tensor(dtype, {1, 1, 1, 2}, random);
      run.inputs["k"] = driver::broadcast(one, {1, 2, 1, 2});
      run.inputs["d_out"] = driver::normal_tensor(dtype, {1, 1, 1, 2}, random);
      const auto report = driver::verify({.op = "attention",
                                          .inputs = run.inputs,
                                          .options = {},
                                          .device = Device::cpu(1),
                                          .variant = {}});
      EXPECT_TRUE(report.passed()) << report.failures[0];
    }
  }
}

// PyTorch PR #188302: crashes when just one gradient is asked for.
TEST(attention_regression, each_gradient_alone_has_the_same_bits) {
  driver::Random random(2);
  AttentionRun run = normal_run(DType::f32, 2, 65, 70, 4, 2, 24);
  run.inputs["bias"] = driver::normal_tensor(DType::f32, {1, 4, 1, 70}, random);
  const TensorMap all = run();
  for (const char* name : {"d_q", "d_k", "d_v", "d_bias"}) {
    AttentionRun one = run;
    one.only_gradient = name;
    const TensorMap outputs = one();
    EXPECT_TRUE(outputs.contains(name));
    EXPECT_EQ(outputs.size(), 3u);  // with out and lse
    expect_same_bits(outputs, all);
  }
}

}  // namespace
}  // namespace pullback::testing

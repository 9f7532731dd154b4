// What the CPU variants' tiles, tasks and copies could get wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "driver/check.hpp"
#include "ops/attention/run_attention.hpp"

namespace pullback::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A score of -inf hides its key from d_v, also in a row whose lse is NaN, where exp(-inf - lse) is.
TEST(attention_cpu, keys_of_score_minus_infinity_are_hidden_from_rows_with_nan) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const double large = dtype == DType::f64 ? 1e200 : 1e30;  // its square is infinite
    const std::int64_t keys = 40;
    AttentionRun run;
    for (const char* name : {"q", "d_out"}) {
      run.inputs[name] = driver::filled_tensor(dtype, {1, 2, 1, 1}, 1);
    }
    for (const char* name : {"k", "v"}) {
      run.inputs[name] = driver::filled_tensor(dtype, {1, keys, 1, 1}, 1);
    }
    run.inputs["q"].set(0, large);
    run.inputs["q"].set(1, 0);
    run.inputs["k"].set(0, large);
    run.inputs["k"].set(1, -large);
    run.options.scale = 1;
    const TensorMap outputs = run();
    EXPECT_TRUE(std::isnan(outputs.at("d_v").get(0))) << name_of(dtype);
    // Of the second query alone, whose scores are all 0.
    EXPECT_NEAR(outputs.at("d_v").get(1), 1.0 / keys, 1e-4) << name_of(dtype);
  }
}

// Whether a tile goes the way of finite ones must not depend on what else its task has, as the
// threads decide that: here the sign of a 0.
TEST(attention_cpu, nan_changes_no_bits_of_other_tiles_whatever_the_threads) {
  const std::int64_t queries = 384, keys = 392, heads = 4;
  AttentionRun run;
  run.inputs["q"] = driver::filled_tensor(DType::f32, {1, queries, heads, 1}, 1);
  run.inputs["k"] = driver::filled_tensor(DType::f32, {1, keys, heads, 1}, 0);
  run.inputs["v"] = driver::filled_tensor(DType::f32, {1, keys, heads, 1}, -1);
  run.inputs["d_out"] = driver::filled_tensor(DType::f32, {1, queries, heads, 1}, 1);
  for (std::int64_t h = 0; h < heads; ++h) {
    run.inputs["q"].set((queries - 1) * heads + h, kNaN);
    for (std::int64_t key = 384; key < keys; ++key) {
      run.inputs["k"].set(key * heads + h, 200);
      run.inputs["v"].set(key * heads + h, key < 388 ? -0.0 : 1);  // those from 388 on are hidden
    }
  }
  run.options.scale = 1;
  run.options.mask.right = keys - 1 - 4;
  TensorMap first;
  for (const int threads : {1, 2, 4, 16}) {
    run.device = Device::cpu(threads);
    const TensorMap outputs = run();
    if (first.empty()) first = outputs;
    EXPECT_TRUE(driver::same_bits(outputs.at("out"), first.at("out"))) << threads << " threads";
  }
}

TEST(attention_cpu, without_d_q_no_memory_of_it_and_as_many_tasks_as_there_could_be) {
  AttentionProblem problem;
  problem.q = problem.d_out = TensorSpec::contiguous(DType::f32, {1, 8192, 32, 128});
  problem.k = problem.v = TensorSpec::contiguous(DType::f32, {1, 8192, 1, 128});
  const auto all = make_plan(Device::cpu(2), problem, Pass::backward, {"cpu"});
  problem.d_k = problem.d_v = problem.k;
  const auto some = make_plan(Device::cpu(2), problem, Pass::backward, {"cpu"});
  const std::size_t d_q_bytes = std::size_t{8192} * 32 * 128 * 4;
  EXPECT_GE(all.workspace_bytes(), d_q_bytes);
  EXPECT_LT(some.workspace_bytes(), d_q_bytes / 8);
  EXPECT_NE(some.describe().find("tasks of 576 keys, 0 partial sums"), std::string::npos)
      << some.describe();
}

TEST(attention_cpu, each_gradient_planned_alone_has_the_same_bits) {
  const AttentionRun run = normal_run(DType::f32, 2, 65, 1000, 4, 1, 24);
  const TensorMap all = run();
  for (const char* name : {"d_q", "d_k", "d_v"}) {
    AttentionRun one = run;
    one.outputs[name] = HostTensor(all.at(name).spec());
    one.only_gradient = name;
    EXPECT_TRUE(driver::same_bits(one().at(name), all.at(name))) << name;
  }
}

}  // namespace
}  // namespace pullback::testing

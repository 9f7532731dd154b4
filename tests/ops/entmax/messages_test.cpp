// What a caller is told: every message names the op, the tensor, what was expected and what it got.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>

#include "driver/case.hpp"
#include "driver/driver.hpp"
#include "pullback/entmax.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

EntmaxProblem good() {
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {2, 3, 10});
  return problem;
}

template <class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "no error";
}

std::string message(const EntmaxProblem& problem) {
  return message_of([&] { complete(problem); });
}

TEST(entmax_messages, good_problems_are_completed) {
  EntmaxProblem problem = complete(good());
  EXPECT_EQ(problem.axis, 2);
  EXPECT_EQ(problem.y.to_string(), "f32 [2, 3, 10]");
  EXPECT_EQ(problem.tau.to_string(), "f32 [2, 3]");
  EXPECT_EQ(problem.support.to_string(), "u8 [2, 3, 2]");
  EXPECT_EQ(problem.support_size.to_string(), "i32 [2, 3]");

  problem = good();
  problem.x.dtype = DType::f64;
  problem.axis = -2;
  problem.alpha = 1.5;
  problem.offsets = TensorSpec::contiguous(DType::i32, {6});
  problem = complete(problem);
  EXPECT_EQ(problem.tau.to_string(), "f64 [2, 5, 10]");
  EXPECT_FALSE(problem.support.given());
}

TEST(entmax_messages, x_and_axis) {
  EntmaxProblem problem = good();
  problem.x = {};
  EXPECT_EQ(message(problem), "entmax: x: expected a tensor, got none");
  problem.x = TensorSpec::contiguous(DType::f32, {});
  EXPECT_EQ(message(problem),
            "entmax: x: expected rank 1 to 8, got rank 0; give it a dimension of size 1");
  problem.x = TensorSpec::contiguous(DType::i64, {4});
  EXPECT_EQ(
      message(problem),
      "entmax: x: expected dtype f64 or f32 or bf16 or f16, got i64; convert the tensor first");
  problem = good();
  problem.axis = 3;
  EXPECT_EQ(message(problem), "entmax: axis: expected -3 to 2, got 3");
  problem.axis = -4;
  EXPECT_EQ(message(problem), "entmax: axis: expected -3 to 2, got -4");
}

TEST(entmax_messages, alpha) {
  EntmaxProblem problem = good();
  for (double alpha : {0.99, -1.0, std::numeric_limits<double>::quiet_NaN(),
                       std::numeric_limits<double>::infinity()}) {
    problem.alpha = alpha;
    EXPECT_NE(message(problem).find("entmax: alpha: expected a finite number of 1 or more, got"),
              std::string::npos);
  }
  problem = good();
  problem.alpha_per_row = TensorSpec::contiguous(DType::f32, {2, 10});
  EXPECT_EQ(message(problem), "entmax: alpha_per_row: expected shape [2, 3], got [2, 10]");
  problem.alpha_per_row = TensorSpec::contiguous(DType::f64, {2, 3});
  EXPECT_EQ(message(problem),
            "entmax: alpha_per_row: expected dtype f32, got f64; convert the tensor first");
}

TEST(entmax_messages, files_call_the_tensor_alpha) {
  driver::Request request;
  request.op = "entmax";
  request.inputs["x"] = driver::filled_tensor(DType::f32, {2, 3}, 0);
  request.inputs["d_y"] = request.inputs["x"];
  request.inputs["alpha"] = driver::filled_tensor(DType::f32, {3}, 1.5);
  EXPECT_EQ(message_of([&] { driver::find_driver("entmax").prepare(request); }),
            "entmax: alpha: expected shape [2], got [3]");
}

TEST(entmax_messages, an_axis_that_no_tensor_has_is_told_as_it_was_given) {
  driver::Request request;
  request.op = "entmax";
  request.inputs["x"] = driver::filled_tensor(DType::f32, {2, 3}, 0);
  request.inputs["d_y"] = request.inputs["x"];
  request.options["axis"] = "99999999999";
  EXPECT_EQ(message_of([&] { driver::find_driver("entmax").prepare(request); }),
            "entmax: --axis: expected the number of an axis of x, got 99999999999");
}

TEST(entmax_messages, tensors_like_x) {
  EntmaxProblem problem = good();
  problem.y = TensorSpec::contiguous(DType::f32, {2, 3, 9});
  EXPECT_EQ(message(problem), "entmax: y: expected shape [2, 3, 10], got [2, 3, 9]");
  problem = good();
  problem.d_y = TensorSpec::contiguous(DType::bf16, {2, 3, 10});
  EXPECT_EQ(message(problem),
            "entmax: d_y: expected dtype f32, got bf16; convert the tensor first");
  problem = good();
  problem.d_x = problem.x;
  problem.d_x.strides = {0, 10, 1};
  EXPECT_NE(message(problem).find("entmax: d_x: expected an output whose elements do not overlap"),
            std::string::npos);
  problem = good();
  problem.mask = TensorSpec::contiguous(DType::boolean, {2, 3, 1});
  EXPECT_EQ(message(problem), "entmax: mask: expected shape [2, 3, 10], got [2, 3, 1]");
}

TEST(entmax_messages, support) {
  EntmaxProblem problem = good();
  problem.support = TensorSpec::contiguous(DType::u8, {2, 3, 10});
  EXPECT_EQ(message(problem), "entmax: support: expected shape [2, 3, 2], got [2, 3, 10]");
  problem.support = TensorSpec::contiguous(DType::u8, {2, 3, 2});
  problem.alpha = 1.5;
  EXPECT_EQ(message(problem),
            "entmax: support: expected none unless alpha is 2 for all rows and rows are not "
            "ragged, got a tensor; run the backward from y");
}

TEST(entmax_messages, offsets) {
  EntmaxProblem problem = good();
  problem.offsets = TensorSpec::contiguous(DType::i32, {0});
  EXPECT_EQ(message(problem),
            "entmax: offsets: expected G + 1 elements for G rows, got 0; no rows at all is one "
            "offset");
  problem.offsets = TensorSpec::contiguous(DType::f32, {3});
  EXPECT_EQ(message(problem),
            "entmax: offsets: expected dtype i32 or i64, got f32; convert the tensor first");
}

TEST(entmax_messages, the_first_bad_offset_is_named_before_anything_is_written) {
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {6});
  problem.offsets = TensorSpec::contiguous(DType::i32, {4});
  problem.check_indices = true;
  const std::array<float, 6> x{};
  std::array<float, 6> y;
  y.fill(7);
  for (const char* variant : {"cpu", "reference"}) {
    const auto plan = make_plan(Device::cpu(1), problem, Pass::forward, {variant});
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    const auto run = [&](const std::array<std::int32_t, 4>& offsets) {
      return message_of([&] {
        plan.run({}, {.x = x.data(), .offsets = offsets.data(), .y = y.data()}, workspace.get());
      });
    };
    EXPECT_EQ(run({0, 4, 3, 6}),
              "entmax: offsets[2]: expected 4 to 6, got 3; offsets never decrease and stay within "
              "the axis");
    EXPECT_EQ(run({-1, 4, 5, 6}).substr(0, 42), "entmax: offsets[0]: expected 0 to 6, got -");
    EXPECT_EQ(run({0, 4, 5, 7}).substr(0, 42), "entmax: offsets[3]: expected 5 to 6, got 7");
    for (float value : y) EXPECT_EQ(value, 7);
  }
}

TEST(entmax_messages, pointers_that_a_run_needs) {
  const auto plan = make_plan(Device::cpu(1), good(), Pass::backward);
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  std::array<float, 60> d_y{}, d_x{};
  std::array<std::uint8_t, 12> support{};
  EntmaxTensors tensors{.d_y = d_y.data(), .d_x = d_x.data()};
  const auto run = [&] { return message_of([&] { plan.run({}, tensors, workspace.get()); }); };
  EXPECT_EQ(run(), "entmax: y: expected a data pointer, got null");
  tensors.support = support.data();
  EXPECT_EQ(run(), "entmax: support_size: expected a data pointer, got null");
  std::array<std::int32_t, 6> size{};
  std::array<float, 6> d_alpha{};
  tensors.support_size = size.data();
  EXPECT_EQ(run(), "no error");
  tensors.d_alpha = d_alpha.data();
  EXPECT_EQ(run(), "entmax: y: expected a data pointer, got null");
}

TEST(entmax_messages, options_of_the_command_line) {
  const auto x = driver::filled_tensor(DType::f32, {2, 4}, 1);
  driver::Request request;
  request.op = "entmax";
  request.inputs = {{"x", x}, {"d_y", x}};
  const auto with = [&](driver::OptionMap options) {
    request.options = std::move(options);
    return message_of([&] { driver::evaluate(request); });
  };
  EXPECT_EQ(with({{"alpha", "1.5"}, {"saved", "support"}}),
            "entmax: --saved: expected y where alpha is not 2, got support");
  EXPECT_EQ(with({{"saved", "support"}, {"d-alpha", "true"}}),
            "entmax: --saved: expected y, which d_alpha is computed from, got support; leave out "
            "--saved or --d-alpha");
  EXPECT_EQ(with({{"alpha", "0.5"}}),
            "entmax: alpha: expected a finite number of 1 or more, got 0.5");
  request.inputs["alpha"] = driver::filled_tensor(DType::f32, {2}, 1.5);
  EXPECT_EQ(with({{"alpha", "2"}}),
            "entmax: --alpha: expected no option beside the tensor alpha, got 2; pass one of the "
            "two");
}

}  // namespace
}  // namespace pullback

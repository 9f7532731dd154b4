// The checker itself: it passes what is right and notices each kind of wrong.
#include "driver/check.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace pullback::driver {
namespace {

Case toy(OptionMap options = {}) {
  return {.op = "toy",
          .name = "case",
          .options = std::move(options),
          .inputs = [](DType dtype, Random& random) {
            return TensorMap{{"x", normal_tensor(dtype, {3, 5}, random)},
                             {"d_y", normal_tensor(dtype, {3, 5}, random)}};
          }};
}

std::string failures(const Case& test, DType dtype = DType::f32) {
  std::string text;
  for (const auto& line : check_case(test, dtype, Device::cpu(2), 7).failures) text += line + "\n";
  return text;
}

bool mentions(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(check_case, passes_a_right_op_in_every_dtype) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(failures(toy({{"scale", "-2.5"}}), dtype), "");
  }
}

TEST(check_case, notices_a_wrong_output) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "wrong-output"}})), "y: error 1 exceeds"));
}

TEST(check_case, notices_a_wrong_gradient_by_reference_and_by_differences) {
  const Case wrong = toy({{"fault", "wrong-gradient"}});
  EXPECT_TRUE(mentions(failures(wrong), "d_x: error"));
  EXPECT_TRUE(mentions(failures(wrong, DType::f64), "d_x: finite difference"));
}

// Beside one large element, the others are within what 16 bits lose of that.
TEST(check_case, notices_small_elements_that_were_lost) {
  Case test = toy({{"fault", "lost-small-elements"}});
  test.inputs = [](DType dtype, Random& random) {
    TensorMap inputs = {{"x", filled_tensor(dtype, {400}, 0.1)},
                        {"d_y", normal_tensor(dtype, {400}, random)}};
    inputs["x"].set(17, 3);
    return inputs;
  };
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_TRUE(mentions(failures(test, dtype), "y: mean error")) << name_of(dtype);
  }
  test.options.clear();
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(failures(test, dtype), "");
  }
}

TEST(check_case, notices_a_write_outside_an_output) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "stray-write"}})),
                       "output y: bytes outside the tensor changed"));
}

TEST(check_case, notices_bits_that_depend_on_threads) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "thread-bits"}}), DType::f64),
                       "y: other bits with another number of threads"));
}

TEST(check_case, notices_a_missing_output) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "missing-output"}})), "y: missing output"));
  Case exact = toy({{"fault", "missing-output"}});
  exact.exact = true;
  EXPECT_TRUE(mentions(failures(exact), "y: missing output"));
}

TEST(check_case, notices_a_wrong_shape) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "wrong-shape"}})), "d_x: expected f64 [3, 5], got"));
}

TEST(check_case, notices_a_changed_input) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "changed-input"}})), "input x: changed"));
}

TEST(check_case, notices_a_nan_that_was_lost) {
  Case test = toy({{"fault", "lost-nan"}});
  test.finite_differences = false;
  test.inputs = [](DType dtype, Random&) {
    return TensorMap{{"x", tensor_of(dtype, {2}, {1, std::numeric_limits<double>::quiet_NaN()})},
                     {"d_y", tensor_of(dtype, {2}, {1, 1})}};
  };
  EXPECT_TRUE(mentions(failures(test), "y: element 1: expected nan, got 0"));
  test.options.clear();
  EXPECT_EQ(failures(test), "");
}

TEST(check_case, an_exact_case_allows_no_rounding) {
  Case test = toy();
  test.exact = true;
  test.inputs = [](DType dtype, Random& random) {
    return TensorMap{{"x", integer_tensor(dtype, {9}, random, 4)},
                     {"d_y", integer_tensor(dtype, {9}, random, 4)}};
  };
  EXPECT_EQ(failures(test, DType::bf16), "");
  test.inputs = [](DType dtype, Random&) {
    return TensorMap{{"x", filled_tensor(dtype, {1}, 1.0078125)},  // its square needs more bits
                     {"d_y", filled_tensor(dtype, {1}, 1)}};
  };
  EXPECT_TRUE(mentions(failures(test, DType::bf16), "y: not exact"));
}

TEST(check_case, failures_say_op_case_dtype_and_seed) {
  EXPECT_TRUE(mentions(failures(toy({{"fault", "wrong-output"}})), "toy 'case' f32 seed 7: "));
}

TEST(verify, passes_and_fails) {
  Random random(1);
  Request request{.op = "toy",
                  .inputs = toy().inputs(DType::f32, random),
                  .options = {},
                  .device = Device::cpu(1),
                  .variant = {}};
  const CheckReport right = verify(request);
  EXPECT_TRUE(right.passed());
  ASSERT_EQ(right.errors.size(), 2u);
  EXPECT_GT(right.errors[0].scale, 0);
  EXPECT_LE(right.errors[0].error, right.errors[0].allowed);
  request.options["fault"] = "wrong-gradient";
  EXPECT_FALSE(verify(request).passed());
}

}  // namespace
}  // namespace pullback::driver

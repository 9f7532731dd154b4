// entmax by its alpha: near 1, above 2, at the edge of the support; and the gradient of it.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/case.hpp"
#include "driver/check.hpp"
#include "ops/entmax/run_entmax.hpp"

namespace pullback::testing {
namespace {

// Nobody else has the limit; deep-spin/entmax #10 advises to stay above 1.01.
TEST(entmax_alpha, alpha_tends_to_one) {
  const std::vector<double> logits = normal_logits(200);
  Rows<double> softmax(logits, 200, 1);
  softmax.forward();
  softmax.backward();
  double last = 0.1;
  for (double distance : {1e-2, 1e-4, 1e-6, 1e-9, 1e-13}) {
    Rows<double> rows(logits, 200, 1 + distance);
    rows.forward();
    rows.backward();
    double error = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      error = std::max(error, std::abs(rows.y[i] - softmax.y[i]));
      error = std::max(error, std::abs(rows.d_x[i] - softmax.d_x[i]));
    }
    error = std::max(error, std::abs(rows.d_alpha[0] - softmax.d_alpha[0]));
    EXPECT_LT(error, 10 * distance + 1e-14);
    EXPECT_LT(error, last);
    last = error;
  }
}

// Above alpha = 2, p is as steep as one likes where an element enters the support, and its s as
// large: no threshold is near enough, and d_y less its mean cancels where it matters most.
void expect_steep_rows(const Device& device, const std::string& variant) {
  for (const double alpha : {2.5, 4.0, 10.0, 20.0, 50.0, 100.0}) {
    for (const auto& [dtype, epsilon] : {std::pair{DType::f64, 0x1p-52}, {DType::f32, 0x1p-23}}) {
      for (const double sigma : {0.01, 1.0}) {
        SCOPED_TRACE(::testing::Message() << alpha << " " << name_of(dtype) << " " << sigma);
        driver::Random random(1);
        driver::Request request{
            .op = "entmax",
            .inputs = {{"x", driver::normal_tensor(dtype, {30, 300}, random, sigma)},
                       {"d_y", driver::normal_tensor(dtype, {30, 300}, random)}},
            .options = {{"alpha", std::to_string(alpha)}},
            .device = device,
            .variant = variant};
        const driver::TensorMap got = driver::evaluate(request);
        request.device = Device::cpu(1);
        request.variant = "reference";
        const driver::TensorMap expected = driver::evaluate(request);
        const auto errors = [&](const char* name) {
          return driver::largest_errors(got.at(name), expected.at(name));
        };
        EXPECT_LE(errors("y").difference, 2 * epsilon);
        // s of the edge knows x - max as its rounding left it.
        EXPECT_LE(errors("d_x").difference, 32 * alpha * epsilon * errors("d_x").largest);
      }
    }
  }
}

TEST(entmax_alpha, steep_rows_are_known_to_the_last_digits) {
  expect_steep_rows(Device::cpu(1), "cpu");
}
TEST(entmax_alpha, steep_rows_are_known_to_the_last_digits_on_cuda) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  expect_steep_rows(Device::cuda(), "cuda");
}

// The excess of the element at the edge is q^b, here a subnormal number.
TEST(entmax_alpha, rows_whose_edge_is_too_small_for_its_digits_sum_to_1) {
  for (const auto& [alpha, second] :
       {std::pair{170.49302761096288, -0.00044310243756295886}, {171.0, -4.2e-4}, {194.3, -3e-4}}) {
    Rows<double> rows({0, second}, 2, alpha);
    rows.forward();
    EXPECT_NEAR(rows.sum(rows.y), 1, 1e-12) << alpha;
  }
}

TEST(entmax_alpha, steep_edges) {
  Rows<double> at_threshold({0, -0.5, 0.25, -3}, 2, 3);
  at_threshold.forward();
  EXPECT_EQ(at_threshold.y, (std::vector<double>{1, 0, 1, 0}));
  EXPECT_EQ(at_threshold.size, (std::vector<std::int32_t>{1, 1}));
  // The second one's p to the power 1000 is no number.
  Rows<double> far({0, -1e-5, -1e-3}, 3, 1001);
  far.forward();
  const double first = std::pow(1e-2, 1e-3);
  EXPECT_NEAR(far.y[0], first, 1e-15);
  EXPECT_NEAR(far.y[1], 1 - first, 1e-15);
  EXPECT_EQ(far.y[2], 0);
  EXPECT_EQ(far.size[0], 2);
}

// d_alpha against differences of the forward pass, on both sides of 1 + 1e-4 and beyond.
TEST(entmax_alpha, d_alpha_is_the_derivative) {
  const std::vector<double> logits = normal_logits(60, 0.7);
  for (double alpha : {1.0001, 1.01, 1.124, 1.126, 1.5, 1.9, 2.0, 2.4}) {
    const auto objective = [&](double at) {
      Rows<double> rows(logits, 60, at);
      rows.forward();
      double sum = 0;
      for (std::size_t i = 0; i < logits.size(); ++i) sum += rows.y[i] * rows.d_y[i];
      return sum;
    };
    Rows<double> rows(logits, 60, alpha);
    rows.forward();
    rows.backward();
    const double step = 1e-5;
    const double difference = (objective(alpha + step) - objective(alpha - step)) / (2 * step);
    EXPECT_NEAR(rows.d_alpha[0], difference, 1e-8 + 1e-6 * std::abs(difference)) << alpha;
  }
  // At 1 only one side exists.
  Rows<double> one(logits, 60, 1), above(logits, 60, 1 + 1e-7);
  one.forward();
  one.backward();
  above.forward();
  double difference = 0;
  for (std::size_t i = 0; i < logits.size(); ++i)
    difference += (above.y[i] - one.y[i]) * one.d_y[i];
  EXPECT_NEAR(one.d_alpha[0], difference / 1e-7, 1e-6);
}

// Sums of equal numbers round alike, and where alpha nears 2 a step after one such sum may be
// undone by the next.
TEST(entmax_alpha, steps_end_where_sums_round) {
  constexpr std::int64_t kLength = 294, kRows = 17;
  Rows<float> rows(std::vector<double>(static_cast<std::size_t>(kRows * kLength)), kRows, 2);
  rows.problem.axis = 0;
  for (int i = 0; i < 1000; ++i) {
    rows.problem.alpha = 1.9 + i * 1e-5;
    rows.run(Pass::forward, {.x = rows.x.data(), .y = rows.y.data()});
    EXPECT_NEAR(rows.y[5] * static_cast<double>(kLength), 1, 1e-5) << rows.problem.alpha;
  }
}

// y^(2 - alpha) has no bound on its slope where an element enters the support: problems whose
// textbook solution is close by luck, while one rounding of b x - tau moves the exact one further.
TEST(entmax_alpha, results_at_the_edge_are_known_as_well_as_x_is) {
  for (const std::uint64_t seed : {101000761, 102000549, 104002637}) {
    const driver::CheckReport report =
        driver::check_case(driver::entmax_fuzz(seed), DType::f32, Device::cpu(1), seed);
    for (const auto& failure : report.failures) ADD_FAILURE() << failure;
  }
}

// What that allows is far below what a wrong result is off.
TEST(entmax_alpha, a_wrong_gradient_at_the_edge_is_found) {
  const driver::Case test = driver::entmax_fuzz(101000761);
  driver::Random random(1);
  driver::Request request{.op = "entmax",
                          .inputs = test.inputs(DType::f32, random),
                          .options = test.options,
                          .device = Device::cpu(1),
                          .variant = ""};
  driver::TensorMap outputs = driver::evaluate(request);
  EXPECT_TRUE(driver::verify_outputs(request, outputs).passed());
  driver::HostTensor& d_x = outputs.find("d_x")->second;
  std::int64_t i = 0;
  while (i + 1 < d_x.numel() && d_x.get(i) == 0) ++i;
  d_x.set(i, d_x.get(i) + 1e-3);
  EXPECT_FALSE(driver::verify_outputs(request, outputs).passed());
}

}  // namespace
}  // namespace pullback::testing

// Defects that users of other libraries met, and promises of the README, by name.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/element.hpp"
#include "cuda/driver.hpp"
#include "driver/case.hpp"
#include "driver/check.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "pullback/entmax.hpp"

namespace pullback {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Contiguous rows of one length with all that can be computed of them.
template <class T>
struct Rows {
  using Statistic = std::conditional_t<std::is_same_v<T, double>, double, float>;

  Rows(std::vector<double> logits, std::int64_t length, double alpha) {
    const auto numel = static_cast<std::int64_t>(logits.size());
    const std::int64_t rows = numel / length;
    for (double logit : logits) x.push_back(from_double<T>(logit));
    problem.x = TensorSpec::contiguous(kDTypeOf<T>, {rows, length});
    problem.alpha = alpha;
    const auto count = static_cast<std::size_t>(numel), row_count = static_cast<std::size_t>(rows);
    y = d_y = d_x = std::vector<T>(count);
    tau = d_alpha = std::vector<Statistic>(row_count);
    size.resize(row_count);
    support.resize(row_count * static_cast<std::size_t>((length + 7) / 8));
    driver::Random random(3);
    for (T& g : d_y) g = from_double<T>(random.normal());
  }

  void forward() {
    run(Pass::forward, {.x = x.data(),
                        .mask = mask.empty() ? nullptr : mask.data(),
                        .y = y.data(),
                        .tau = tau.data(),
                        .support = problem.alpha == 2 ? support.data() : nullptr,
                        .support_size = size.data()});
  }
  void backward() {
    run(Pass::backward, {.y = const_cast<T*>(y.data()),
                         .d_y = d_y.data(),
                         .d_x = d_x.data(),
                         .d_alpha = d_alpha.data()});
  }
  void backward_from_support() {
    run(Pass::backward, {.support = support.data(),
                         .support_size = size.data(),
                         .d_y = d_y.data(),
                         .d_x = d_x.data()});
  }
  void run(Pass pass, const EntmaxTensors& tensors) {
    if (!mask.empty()) {
      problem.mask = TensorSpec::contiguous(DType::u8, {problem.x.shape[0], problem.x.shape[1]});
    }
    const auto plan = make_plan(Device::cpu(2), problem, pass);
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    plan.run({}, tensors, workspace.get());
  }
  double sum(const std::vector<T>& values) const {
    double total = 0;
    for (T value : values) total += to_double(value);
    return total;
  }

  EntmaxProblem problem;
  std::vector<T> x, y, d_y, d_x;
  std::vector<Statistic> tau, d_alpha;
  std::vector<std::int32_t> size;
  std::vector<std::uint8_t> mask, support;
};

std::vector<double> normal_logits(std::size_t count, double sigma = 1, double offset = 0) {
  driver::Random random(11);
  std::vector<double> logits(count);
  for (double& logit : logits) logit = offset + sigma * random.normal();
  return logits;
}

// Keras 3 summed the cumulative sums: right for supports of one element only (keras #23425).
TEST(entmax_regression, keras_sparsemax_supports_of_two_and_more) {
  Rows<float> rows({0, 0.5, 1, 0.25, 0.25, 0.25}, 3, 2);
  rows.forward();
  EXPECT_EQ(rows.y, (std::vector<float>{0, 0.25f, 0.75f, 1.0f / 3, 1.0f / 3, 1.0f / 3}));
  EXPECT_EQ(rows.size, (std::vector<std::int32_t>{2, 3}));
}

// tensorflow/addons #2314: a row of NaN at logits of 1.36e8. baracuda and Liger return logits.
TEST(entmax_regression, logits_of_1e8) {
  for (double alpha : {1.0, 1.3, 1.5, 2.0, 4.0}) {
    Rows<float> rows({1.36e8, 1.36e8, 0, -1.36e8}, 4, alpha);
    rows.forward();
    EXPECT_EQ(rows.y, (std::vector<float>{0.5f, 0.5f, 0, 0})) << "alpha " << alpha;
  }
}

// baracuda: without the maximum subtracted, row sums are off by 6e-2 at an offset of 1e5.
TEST(entmax_regression, probabilities_sum_to_one_whatever_the_offset) {
  for (double alpha : {1.0, 1.0001, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 10.0}) {
    for (double offset : {0.0, -1000.0, 1e4, 1e5}) {
      for (double sigma : {1e-3, 0.3, 1.0, 10.0}) {
        Rows<float> rows(normal_logits(1024, sigma, offset), 1024, alpha);
        rows.forward();
        EXPECT_NEAR(rows.sum(rows.y), 1, 2e-6)
            << "alpha " << alpha << " offset " << offset << " sigma " << sigma;
      }
    }
  }
}

// The rounding of f32 sums, the same in every block of equal numbers, takes a long step past the
// root by more than theta's rounding.
TEST(entmax_regression, equal_logits_of_long_rows) {
  for (double alpha : {1.0001, 1.05, 1.1, 1.12, 1.13, 1.5, 1.8, 2.0}) {
    for (std::size_t length : {135, 1024, 32000, 131071}) {
      Rows<float> rows(std::vector<double>(length), length, alpha);
      rows.forward();
      const double p = 1 / static_cast<double>(length), b = alpha - 1;
      for (float y : rows.y) ASSERT_NEAR(y, p, 3e-6 * p) << "alpha " << alpha << " of " << length;
      const double tau = -std::pow(p, b);
      EXPECT_NEAR(rows.tau[0], tau, -2e-6 * tau) << "alpha " << alpha << " of " << length;
    }
  }
}

// deep-spin/entmax #30: NaN in half precision for logits around -1000.
TEST(entmax_regression, half_precision_far_from_zero) {
  for (double alpha : {1.3, 1.5, 2.0}) {
    Rows<float16> rows(normal_logits(300, 1, -1000), 300, alpha);
    rows.forward();
    EXPECT_NEAR(rows.sum(rows.y), 1, 2e-3);
  }
}

// deep-spin/entmax #17, #19: an index of -1, or NaN, when everything is masked.
TEST(entmax_regression, rows_without_a_visible_element) {
  for (double alpha : {1.0, 1.01, 1.5, 2.0, 3.0}) {
    Rows<float> rows({1, 2, 3, -kInfinity, -kInfinity, -kInfinity}, 3, alpha);
    rows.mask = {0, 0, 0, 1, 1, 1};
    rows.forward();
    rows.d_y = {std::nanf(""), HUGE_VALF, 1, 2, 3, 4};
    rows.backward();
    const std::vector<float> zeros(6);
    EXPECT_EQ(rows.y, zeros);
    EXPECT_EQ(rows.d_x, zeros);
    EXPECT_EQ(rows.tau, (std::vector<float>(2, kInfinity)));
    EXPECT_EQ(rows.d_alpha, (std::vector<float>(2, 0)));
    EXPECT_EQ(rows.size, (std::vector<std::int32_t>(2, 0)));
    if (alpha != 2) continue;
    rows.d_x.assign(6, 5);
    rows.backward_from_support();
    EXPECT_EQ(rows.d_x, zeros);
  }
}

// baracuda and Liger: a NaN or an infinity gives something that is not a distribution, silently.
TEST(entmax_regression, nan_stays_in_its_row) {
  for (double alpha : {1.0, 1.01, 1.5, 2.0, 3.0}) {
    for (double bad : {kNaN, kInfinity}) {
      Rows<float> rows({0, 1, bad, 0.5, 0, 0.25}, 3, alpha);
      rows.forward();
      rows.backward();
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(std::isnan(rows.y[i]) && std::isnan(rows.d_x[i])) << alpha;
        EXPECT_TRUE(std::isfinite(rows.y[3 + i]) && std::isfinite(rows.d_x[3 + i])) << alpha;
      }
      EXPECT_TRUE(std::isnan(rows.tau[0]) && std::isnan(rows.d_alpha[0]));
      EXPECT_EQ(rows.size[0], -1);
      if (alpha != 2) continue;
      rows.backward_from_support();
      EXPECT_TRUE(std::isnan(rows.d_x[0]) && std::isfinite(rows.d_x[3]));
    }
  }
}

TEST(entmax_regression, hidden_nan_does_not_matter) {
  Rows<float> rows({0, kNaN, 0.5, kInfinity, 0, 0}, 3, 2);
  rows.mask = {1, 0, 1, 0, 1, 1};
  rows.forward();
  EXPECT_EQ(rows.y, (std::vector<float>{0.25f, 0, 0.75f, 0, 0.5f, 0.5f}));
}

// What arrives where p is zero must not reach the others.
TEST(entmax_regression, gradients_off_the_support_are_not_read) {
  for (double alpha : {1.2, 1.5, 2.0, 2.5}) {
    Rows<float> rows({3, 2.9, -100, -100, 3, -100}, 6, alpha);
    rows.forward();
    rows.backward();
    const std::vector<float> clean = rows.d_x;
    rows.d_y[2] = static_cast<float>(kNaN);
    rows.d_y[3] = static_cast<float>(kInfinity);
    rows.backward();
    EXPECT_EQ(rows.d_x, clean);
    EXPECT_EQ(rows.d_x[2], 0);
    if (alpha == 2) rows.backward_from_support();
    EXPECT_EQ(rows.d_x, clean);
  }
}

TEST(entmax_regression, gradients_sum_to_zero) {
  for (double alpha : {1.0, 1.01, 1.3, 1.5, 2.0, 2.5}) {
    Rows<double> rows(normal_logits(700, 0.5), 700, alpha);
    rows.forward();
    rows.backward();
    EXPECT_NEAR(rows.sum(rows.d_x), 0, 1e-13) << alpha;
  }
}

// baracuda and Liger take the support from the rounded output. Here p of the last element is
// 4 * 2^-24 / 1025, which rounds to 0 in f16; the mask still has it.
TEST(entmax_regression, support_mask_keeps_what_f16_loses) {
  std::vector<double> logits(1025, 0);
  for (int i = 0; i < 4; ++i) logits[i] = -0x1p-24;
  logits[1024] = -0x1p-10;
  Rows<float16> rows(logits, 1025, 2);
  rows.forward();
  EXPECT_EQ(to_double(rows.y[1024]), 0);
  EXPECT_EQ(rows.size[0], 1025);
  EXPECT_EQ(rows.support.back(), 1);
  rows.backward();
  EXPECT_EQ(to_double(rows.d_x[1024]), 0);
  rows.backward_from_support();
  EXPECT_NE(to_double(rows.d_x[1024]), 0);
}

TEST(entmax_regression, backward_in_place) {
  for (double alpha : {1.0, 1.3, 1.5, 2.0}) {
    Rows<float> rows(normal_logits(3 * 500, 0.3), 500, alpha);
    rows.forward();
    rows.backward();
    const std::vector<float> expected = rows.d_x;
    std::vector<float> in_place = rows.d_y;
    rows.run(Pass::backward, {.y = rows.y.data(), .d_y = in_place.data(), .d_x = in_place.data()});
    EXPECT_EQ(in_place, expected);
    if (alpha != 2) continue;
    in_place = rows.d_y;
    rows.run(Pass::backward, {.support = rows.support.data(),
                              .support_size = rows.size.data(),
                              .d_y = in_place.data(),
                              .d_x = in_place.data()});
    rows.backward_from_support();
    EXPECT_EQ(in_place, rows.d_x);
  }
}

// Nobody else has the limit; deep-spin/entmax #10 advises to stay above 1.01.
TEST(entmax_regression, alpha_tends_to_one) {
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
        SCOPED_TRACE(testing::Message() << alpha << " " << name_of(dtype) << " " << sigma);
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

TEST(entmax_regression, steep_rows_are_known_to_the_last_digits) {
  expect_steep_rows(Device::cpu(1), "cpu");
}
TEST(entmax_regression, steep_rows_are_known_to_the_last_digits_on_cuda) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  expect_steep_rows(Device::cuda(), "cuda");
}

TEST(entmax_regression, steep_edges) {
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
TEST(entmax_regression, d_alpha_is_the_derivative) {
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

// Outputs past kStreamBytes take another store path; each row must be what it is on its own.
TEST(entmax_regression, large_outputs_hold_the_same_bits) {
  const std::int64_t length = 700001;
  const std::vector<double> logits = normal_logits(static_cast<std::size_t>(4 * length));
  for (double alpha : {1.0, 1.5, 2.0}) {
    Rows<float> all(logits, length, alpha);
    all.forward();
    all.backward();
    for (std::int64_t r = 0; r < 4; ++r) {
      const auto begin = r * length;
      Rows<float> row({logits.begin() + begin, logits.begin() + begin + length}, length, alpha);
      std::copy_n(all.d_y.begin() + begin, length, row.d_y.begin());
      row.forward();
      row.backward();
      EXPECT_TRUE(std::equal(row.y.begin(), row.y.end(), all.y.begin() + begin));
      EXPECT_TRUE(std::equal(row.d_x.begin(), row.d_x.end(), all.d_x.begin() + begin));
    }
  }
}

// baracuda's forward ends at 1024; here nothing does, and equal logits keep the whole row.
TEST(entmax_regression, a_row_of_a_million_equal_logits) {
  const std::int64_t length = (1 << 20) + 3;
  for (double alpha : {1.0, 1.5, 1.7, 2.0, 3.0}) {
    Rows<float> rows(std::vector<double>(static_cast<std::size_t>(length), 4.25), length, alpha);
    rows.forward();
    EXPECT_EQ(rows.size[0], length);
    EXPECT_NEAR(rows.y[12345] * static_cast<double>(length), 1, 1e-5) << alpha;
    rows.backward();
    double mean = 0;
    for (float g : rows.d_y) mean += static_cast<double>(g) / static_cast<double>(length);
    const double s = std::pow(1.0 / static_cast<double>(length), 2 - alpha);
    EXPECT_NEAR(rows.d_x[7], s * (rows.d_y[7] - mean), 1e-4 * s) << alpha;
  }
}

TEST(entmax_regression, null_outputs_are_not_computed) {
  Rows<float> rows({0, 0.5, 1}, 3, 2);
  rows.run(Pass::forward, {.x = rows.x.data(), .tau = rows.tau.data()});
  EXPECT_EQ(rows.tau[0], 0.25f);
  rows.run(Pass::forward, {.x = rows.x.data(), .support = rows.support.data()});
  EXPECT_EQ(rows.support[0], 6);
  rows.forward();
  rows.run(Pass::backward,
           {.y = rows.y.data(), .d_y = rows.d_y.data(), .d_alpha = rows.d_alpha.data()});
  EXPECT_NE(rows.d_alpha[0], 0);
  EXPECT_EQ(rows.d_x, std::vector<float>(3));
  rows.run(Pass::forward, {.x = rows.x.data()});
}

// Without elements a tensor may be null, and y null does not mean that the support is given.
TEST(entmax_regression, gradients_of_empty_rows_need_no_memory) {
  for (const char* variant : {"cpu", "reference", "textbook"}) {
    for (const double alpha : {1.5, 2.0}) {
      EntmaxProblem problem;
      problem.x = TensorSpec::contiguous(DType::f32, {3, 0});
      problem.alpha = alpha;
      if (alpha == 2) problem.support = TensorSpec::contiguous(DType::u8, {3, 0});
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const auto plan = make_plan(Device::cpu(2), problem, pass, {.variant = variant});
        const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
        plan.run({}, {}, workspace.get());
        float nothing = 0;
        plan.run({}, {.d_x = &nothing}, workspace.get());
      }
    }
  }
}

// An alpha that means nothing counts even where there are no elements.
TEST(entmax_regression, invalid_alpha_of_rows_without_elements) {
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {2, 0});
  problem.alpha_per_row = TensorSpec::contiguous(DType::f32, {2});
  const float alphas[] = {0.5f, 2};
  for (const char* variant : {"cpu", "reference", "textbook"}) {
    const auto plan = make_plan(Device::cpu(1), problem, Pass::forward, {.variant = variant});
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    float tau[2] = {};
    std::int32_t size[2] = {7, 7};
    plan.run({}, {.alpha_per_row = alphas, .tau = tau, .support_size = size}, workspace.get());
    EXPECT_TRUE(std::isnan(tau[0])) << variant;
    EXPECT_EQ(tau[1], std::numeric_limits<float>::infinity()) << variant;
    EXPECT_EQ(size[0], -1) << variant;
    EXPECT_EQ(size[1], 0) << variant;
  }
}

// Each output by itself, at lengths that take different ways.
template <class T>
void expect_the_same_alone(std::int64_t length, double alpha) {
  SCOPED_TRACE(testing::Message() << length << " of alpha " << alpha);
  driver::Random random(length);
  std::vector<double> logits(static_cast<std::size_t>(9 * length));
  for (double& logit : logits) logit = 2 * random.normal();
  Rows<T> all(logits, length, alpha);
  all.forward();
  Rows<T> alone(logits, length, alpha);
  alone.run(Pass::forward, {.x = alone.x.data(), .tau = alone.tau.data()});
  alone.run(Pass::forward, {.x = alone.x.data(), .support_size = alone.size.data()});
  EXPECT_EQ(alone.size, all.size);
  EXPECT_EQ(alone.y, std::vector<T>(all.y.size()));
  if (alpha == 2) {
    alone.run(Pass::forward, {.x = alone.x.data(), .support = alone.support.data()});
    EXPECT_EQ(alone.support, all.support);
  }
  alone.run(Pass::forward, {.x = alone.x.data(), .y = alone.y.data()});
  for (std::size_t i = 0; i < all.y.size(); ++i) {
    EXPECT_NEAR(to_double(alone.y[i]), to_double(all.y[i]), 1e-6) << i;
  }
  all.run(Pass::forward, {.x = all.x.data(), .y = all.y.data(), .tau = all.tau.data()});
  for (std::size_t r = 0; r < all.tau.size(); ++r) {
    EXPECT_NEAR(alone.tau[r], all.tau[r], 1e-5 * (1 + std::abs(all.tau[r]))) << r;
  }
}

TEST(entmax_regression, outputs_can_be_had_alone) {
  for (const std::int64_t length : {7, 40, 300, 5000}) {
    for (const double alpha : {1.0, 1.3, 1.5, 2.0}) {
      expect_the_same_alone<float>(length, alpha);
      expect_the_same_alone<double>(length, alpha);
    }
  }
}

// Sums of equal numbers round alike, and where alpha nears 2 a step after one such sum may be
// undone by the next.
TEST(entmax_regression, steps_end_where_sums_round) {
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
TEST(entmax_regression, results_at_the_edge_are_known_as_well_as_x_is) {
  for (const std::uint64_t seed : {101000761, 102000549, 104002637}) {
    const driver::CheckReport report =
        driver::check_case(driver::entmax_fuzz(seed), DType::f32, Device::cpu(1), seed);
    for (const auto& failure : report.failures) ADD_FAILURE() << failure;
  }
}

// What that allows is far below what a wrong result is off.
TEST(entmax_regression, a_wrong_gradient_at_the_edge_is_found) {
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
}  // namespace pullback

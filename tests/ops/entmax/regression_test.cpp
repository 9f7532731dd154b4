// Defects that users of other libraries met, and promises of the README, by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/element.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "ops/entmax/run_entmax.hpp"
#include "pullback/entmax.hpp"

namespace pullback::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Keras 3 summed the cumulative sums: right for supports of one element only (keras #23425).
TEST(entmax_regression, keras_sparsemax_supports_of_two_and_more) {
  Rows<float> rows({0, 0.5, 1, 0.25, 0.25, 0.25}, 3, 2);
  rows.forward();
  EXPECT_EQ(rows.y, (std::vector<float>{0, 0.25f, 0.75f, 1.0f / 3, 1.0f / 3, 1.0f / 3}));
  EXPECT_EQ(rows.size, (std::vector<std::int32_t>{2, 3}));
}

// An element exactly at the threshold has y = 0, and is not of the support, wherever its row lies:
// the last rows of a tensor are done one by one, those before by vectors.
TEST(entmax_regression, sizes_count_what_is_above_the_threshold) {
  for (const double alpha : {1.5, 2.0}) {
    const std::int64_t count = 20, length = 5;
    std::vector<double> logits;
    for (std::int64_t row = 0; row < count; ++row) logits.insert(logits.end(), {0, 0, 0, 0, -1});
    Rows<float> rows(logits, length, alpha);
    rows.forward();
    for (std::int64_t row = 0; row < count; ++row) {
      const auto begin = rows.y.begin() + row * length;
      EXPECT_EQ(rows.size[static_cast<std::size_t>(row)],
                std::count_if(begin, begin + length, [](float y) { return y > 0; }))
          << "alpha " << alpha << " row " << row;
    }
  }
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
  SCOPED_TRACE(::testing::Message() << length << " of alpha " << alpha);
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

}  // namespace
}  // namespace pullback::testing

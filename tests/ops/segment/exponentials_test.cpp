// logsumexp and softmax: how exact they are, wherever the first rows lie.
#include <cmath>

#include "cuda/driver.hpp"
#include "driver/random.hpp"
#include "ops/segment/run_segment.hpp"

namespace pullback::testing {
namespace {

using driver::Random;

// A pass over a long segment takes powers relative to the first row, until one is too far from
// that.
TEST(segment_exponentials, of_long_segments_with_a_row_far_from_the_first) {
  Random random(5);
  const auto test = [&](double far, std::int64_t rows, std::int64_t place, std::int64_t columns) {
    TensorMap inputs;
    inputs["x"] = matrix(DType::f32, rows + 2, columns, {0});
    for (std::int64_t i = 0; i < inputs["x"].numel(); ++i) inputs["x"].set(i, random.normal());
    inputs["x"].set((1 + place) * columns + columns - 1, far);
    inputs["offsets"] = index_tensor({0, 1, rows + 1, rows + 2});
    for (const std::string reduce : {"logsumexp", "softmax"}) {
      const bool softmax = reduce == "softmax";
      inputs["d_out"] = matrix(DType::f32, softmax ? rows + 2 : 3, columns, {1});
      SCOPED_TRACE(::testing::Message() << reduce << " of " << rows << " by " << columns << ", "
                                        << far << " at " << place);
      const auto of = [&](const std::string& variant) {
        return evaluate(inputs, {{"reduce", reduce}}, variant).at("out");
      };
      expect_close(of("cpu"), of("reference"), 2e-6, softmax ? 1e-37 : 2e-6);
    }
  };
  for (const double far : {100.0, -100.0, kInfinity, -kInfinity, std::nan("")}) {
    for (const std::int64_t rows : {300, 1030, 3000, 9001}) {  // of a block, a run, several runs
      for (const std::int64_t place : {std::int64_t{0}, rows / 2, rows - 1}) {
        test(far, rows, place, 1);
      }
    }
    for (const std::int64_t place : {0, 40, 699}) test(far, 700, place, 19);
  }
}

// x - shift and shift + log(sum) lost digits where the first row, which was the shift, was far
// below the others. Errors of logsumexp, and of softmax.
void expect_rows_far_above_the_first_exact(const Device& device, double sum_error,
                                           double power_error) {
  Random random(6);
  const auto test = [&](double first, std::int64_t rows, std::int64_t columns) {
    const std::int64_t segments = 1 + 4000 / rows;
    TensorMap inputs;
    inputs["x"] = matrix(DType::f32, segments * rows, columns, {first});
    Index offsets = {0};
    for (std::int64_t n = 0; n < segments * rows; ++n) {
      if ((n + 1) % rows == 0) offsets.push_back(n + 1);
      if (n % rows == 0) continue;
      for (std::int64_t d = 0; d < columns; ++d) {
        inputs["x"].set(n * columns + d, 0.1 * random.uniform() - 0.05);
      }
    }
    inputs["offsets"] = index_tensor(offsets);
    for (const std::string reduce : {"logsumexp", "softmax"}) {
      const bool softmax = reduce == "softmax";
      SCOPED_TRACE(::testing::Message()
                   << reduce << " of " << rows << " by " << columns << " after " << first);
      inputs["d_out"] = matrix(DType::f32, softmax ? segments * rows : segments, columns, {1});
      driver::Request request{.op = "segment",
                              .inputs = inputs,
                              .options = {{"reduce", reduce}},
                              .device = device,
                              .variant = {}};
      const HostTensor out = driver::evaluate(request).at("out");
      request.device = Device::cpu(1);
      request.variant = "reference";
      expect_close(out, driver::evaluate(request).at("out"), softmax ? 0 : sum_error,
                   softmax ? power_error : sum_error);
    }
  };
  for (const double first : {-15.9, -10.0, -7.9, -4.0}) {
    for (const std::int64_t columns : {1, 2, 8, 19}) {
      for (const std::int64_t rows : {2, 4, 700}) test(first, rows, columns);
    }
  }
}
TEST(segment_exponentials, of_rows_far_above_the_first) {
  expect_rows_far_above_the_first_exact(Device::cpu(2), 2.5e-7, 1.5e-7);
}
TEST(segment_exponentials, of_rows_far_above_the_first_on_cuda) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  expect_rows_far_above_the_first_exact(Device::cuda(), 5e-7, 1e-6);
}

Values single_rows(const Device& device, std::int64_t columns, TensorMap& inputs) {
  Random random(7);
  inputs["x"] = matrix(DType::f32, 300, columns, {0});
  for (std::int64_t i = 0; i < inputs["x"].numel(); ++i) {
    inputs["x"].set(i, random.normal() * (i % 7 == 0 ? 30 : i % 7 == 1 ? 5 : 0.1));
  }
  inputs["ids"] = HostTensor(TensorSpec::contiguous(DType::i64, {300}));
  for (std::int64_t n = 0; n < 300; ++n) static_cast<std::int64_t*>(inputs["ids"].data())[n] = n;
  inputs["d_out"] = matrix(DType::f32, 300, columns, {1});
  return values_of(driver::evaluate({.op = "segment",
                                     .inputs = inputs,
                                     .options = {{"reduce", "logsumexp"}},
                                     .device = device,
                                     .variant = {}})
                       .at("out"));
}
TEST(segment_exponentials, logsumexp_of_one_row_is_that_row) {
  for (const std::int64_t columns : {2, 8, 100}) {
    TensorMap inputs;
    const Values got = single_rows(Device::cpu(2), columns, inputs);
    EXPECT_EQ(got, values_of(inputs["x"]));
  }
}
TEST(segment_exponentials, logsumexp_of_one_row_is_nearly_that_row_on_cuda) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  for (const std::int64_t columns : {1, 2, 8, 100}) {
    TensorMap inputs;
    const Values got = single_rows(Device::cuda(), columns, inputs);
    const Values x = values_of(inputs["x"]);
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(got[i], x[i], 1e-6 + 1.2e-7 * std::abs(x[i])) << columns << " columns";
    }
  }
}

}  // namespace
}  // namespace pullback::testing

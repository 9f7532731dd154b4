// entmax on a GPU where the case list does not look: rows that begin at any address, and what else
// than y and tau a forward pass gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/entmax.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

using driver::HostTensor;

struct Outputs {
  HostTensor y, tau, support_size;
};

struct Wanted {
  bool y = true, statistics = true;  // tau and support_size
};

Outputs run(const Device& device, EntmaxProblem problem, const HostTensor& x, bool unaligned,
            Wanted wanted, const std::string& variant, const HostTensor* alphas = nullptr,
            const HostTensor* mask = nullptr) {
  problem = complete(problem);
  Outputs outputs{HostTensor(problem.y), HostTensor(problem.tau), HostTensor(problem.support_size)};
  driver::TensorMemory memory(device, {.unaligned = unaligned});
  EntmaxTensors tensors{.x = memory.input(x),
                        .alpha_per_row = alphas ? memory.input(*alphas) : nullptr,
                        .mask = mask ? memory.input(*mask) : nullptr,
                        .y = wanted.y ? memory.output(outputs.y) : nullptr};
  if (wanted.statistics) {
    tensors.tau = memory.output(outputs.tau);
    tensors.support_size = memory.output(outputs.support_size);
  }
  const auto plan = make_plan(device, problem, Pass::forward, {.variant = variant});
  memory.reserve_workspace(plan.workspace_bytes());
  plan.run(memory.stream(), tensors, memory.workspace());
  memory.fetch(driver::Fetch::all);
  EXPECT_TRUE(outputs.y.guards_intact());
  EXPECT_TRUE(outputs.tau.guards_intact());
  EXPECT_TRUE(outputs.support_size.guards_intact());
  return outputs;
}

void expect_near(const HostTensor& got, const HostTensor& expected, double tolerance) {
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double a = got.get(i), b = expected.get(i);
    const bool same = a == b || (std::isnan(a) && std::isnan(b));
    ASSERT_TRUE(same || std::abs(a - b) <= tolerance * (1 + std::abs(b)))
        << "element " << i << ": " << a << ", not " << b;
  }
}

// Multiples of 1/64: no threshold is so close to one that rounding decides who is in the support.
void expect_rows(DType dtype, std::int64_t length, double alpha) {
  const std::int64_t rows = length > 100000 ? 3 : 9;
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(dtype, {rows, length});
  problem.alpha = alpha;
  const HostTensor x(problem.x);
  driver::Random random(static_cast<std::uint64_t>(length));
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const bool end = i % length == 0 || i % length == length - 1;
    const bool hidden = i / length == 1 ? end : random.chance(0.05);
    const double raised = i / length == 2 && end ? 1 : 0;
    x.set(i, hidden ? -INFINITY : std::round(32 * random.normal()) / 64 + raised);
  }
  const Outputs expected = run(Device::cpu(1), problem, x, false, {}, "reference");
  for (const bool unaligned : {false, true}) {
    for (const bool wants_y : {false, true}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << length << " alpha " << alpha
                                      << (unaligned ? " unaligned" : "") << (wants_y ? " y" : ""));
      const Outputs got = run(Device::cuda(), problem, x, unaligned, {.y = wants_y}, "cuda");
      expect_near(got.support_size, expected.support_size, 0);
      expect_near(got.tau, expected.tau, 1e-5);
      if (wants_y) expect_near(got.y, expected.y, dtype == DType::f32 ? 1e-6 : 0x1p-8);
    }
  }
}

void expect_rows_that_begin_anywhere(DType dtype) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  // The last one is aligned but for its first element's address.
  for (const std::int64_t length : {3, 8, 33, 77, 999, 9001, 4096}) {
    for (const double alpha : {1.0, 1.05, 1.25, 1.5, 1.75, 2.0}) expect_rows(dtype, length, alpha);
  }
  for (const double alpha : {1.0, 1.25, 2.0}) expect_rows(dtype, 150001, alpha);
}

TEST(entmax_cuda, rows_of_f32_begin_anywhere) { expect_rows_that_begin_anywhere(DType::f32); }
TEST(entmax_cuda, rows_of_bf16_begin_anywhere) { expect_rows_that_begin_anywhere(DType::bf16); }
TEST(entmax_cuda, rows_of_f16_begin_anywhere) { expect_rows_that_begin_anywhere(DType::f16); }

// Where alpha is not far from 2 the slope of p is steep at the edge: a y of 0 there is a wrong
// gradient. Of p, `least` is the one that must not become 0.
void expect_none_lost(DType dtype, std::int64_t length, double sigma, double alpha, double least) {
  constexpr std::int64_t kElements = 131072;
  SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << length << " sigma " << sigma
                                  << " alpha " << alpha);
  EntmaxProblem problem;
  const std::int64_t rows = kElements / length;
  problem.x = TensorSpec::contiguous(dtype, {rows, length});
  problem.alpha_per_row = TensorSpec::contiguous(DType::f32, {rows});
  const HostTensor x(problem.x), alphas(problem.alpha_per_row);
  driver::Random random(1);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, sigma * random.normal());
  for (std::int64_t i = 0; i < rows; ++i) alphas.set(i, i % 2 == 0 ? alpha : 1.25);
  // For tau thresholds are known better than y needs.
  const Wanted wanted{.statistics = false};
  const Outputs expected = run(Device::cpu(1), problem, x, false, wanted, "reference", &alphas);
  const Outputs got = run(Device::cuda(), problem, x, false, wanted, "cuda", &alphas);
  expect_near(got.y, expected.y, 0x1p-8);
  int lost = 0;
  double largest = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    if (i / length % 2 != 0 || expected.y.get(i) < least || got.y.get(i) != 0) continue;
    ++lost;
    largest = std::max(largest, expected.y.get(i));
  }
  EXPECT_EQ(lost, 0) << "of y up to " << largest;
}

TEST(entmax_cuda, elements_near_the_edge_are_not_lost) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  expect_none_lost(DType::bf16, 32, 0.3, 1.7, 3e-6);
  expect_none_lost(DType::f16, 32, 1, 1.45, 2e-5);
  expect_none_lost(DType::f16, 32, 1, 1.47, 1e-5);
  expect_none_lost(DType::f16, 128, 1, 1.49, 1e-5);
  expect_none_lost(DType::f16, 512, 3, 1.49, 1e-5);
}

// d_x in d_y's memory has the same bits as d_x apart; of alpha 0 rows have their own.
void expect_same_in_place(DType dtype, const std::vector<std::int64_t>& shape, double alpha,
                          bool from_support) {
  SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << shape[1] << " x " << shape[2]
                                  << " alpha " << alpha << (from_support ? " from support" : ""));
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(dtype, shape);
  problem.axis = 1;
  if (alpha > 0) {
    problem.alpha = alpha;
  } else {
    problem.alpha_per_row = TensorSpec::contiguous(DType::f32, {shape[0], shape[2]});
  }
  problem = complete(problem);
  const HostTensor y(problem.y), d_y(problem.d_y), d_x(problem.d_x);
  const HostTensor alphas(problem.alpha_per_row);
  const HostTensor support(problem.support), support_size(problem.support_size);
  driver::Random random(1);
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    y.set(i, std::max(0.0, 0.1 * random.normal()));
    d_y.set(i, random.normal());
  }
  constexpr double kAlphas[] = {1.3, 3, 0.5, 2, 1.7};
  for (std::int64_t i = 0; i < alphas.numel(); ++i) alphas.set(i, kAlphas[i % 5]);
  driver::TensorMemory memory(Device::cuda());
  EntmaxTensors tensors;
  if (alpha == 0) tensors.alpha_per_row = memory.input(alphas);
  if (from_support) {
    const std::int64_t length = shape[1], bytes = (length + 7) / 8;
    for (std::int64_t row = 0; row < shape[0]; ++row) {
      std::vector<int> bits(static_cast<std::size_t>(bytes));
      int size = 0;
      for (std::int64_t i = 0; i < length; ++i) {
        if (y.get(row * length + i) == 0) continue;
        bits[static_cast<std::size_t>(i / 8)] |= 1 << (i % 8);
        ++size;
      }
      for (std::int64_t i = 0; i < bytes; ++i) {
        support.set(row * bytes + i, bits[static_cast<std::size_t>(i)]);
      }
      support_size.set(row, size);
    }
    tensors.support = const_cast<void*>(memory.input(support));
    tensors.support_size = const_cast<void*>(memory.input(support_size));
  } else {
    tensors.y = const_cast<void*>(memory.input(y));
  }
  const auto plan = make_plan(Device::cuda(), problem, Pass::backward, {.variant = "cuda"});
  memory.reserve_workspace(plan.workspace_bytes());
  tensors.d_y = memory.input(d_y);
  tensors.d_x = memory.output(d_x);
  plan.run(memory.stream(), tensors, memory.workspace());
  tensors.d_x = const_cast<void*>(tensors.d_y);
  plan.run(memory.stream(), tensors, memory.workspace());
  memory.fetch(driver::Fetch::all);
  for (std::int64_t i = 0; i < d_x.numel(); ++i) {
    const double apart = d_x.get(i), in_place = d_y.get(i);
    ASSERT_TRUE(apart == in_place || (std::isnan(apart) && std::isnan(in_place)))
        << "element " << i << ": " << in_place << ", not " << apart;
  }
}

// Where a mask hides elements, a kernel may read them from where it writes y.
TEST(entmax_cuda, support_of_masked_rows_is_counted_before_y_takes_the_place_of_x) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  driver::Random random(8);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t length : {900, 13000}) {
      constexpr std::int64_t kInner = 8;
      EntmaxProblem problem;
      problem.x = TensorSpec::contiguous(dtype, {length, kInner});
      problem.mask = TensorSpec::contiguous(DType::u8, {length, kInner});
      problem.axis = 0;
      const HostTensor x(problem.x), mask(problem.mask);
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        x.set(i, std::round(8 * random.normal()) / 64);
        mask.set(i, i / kInner % 3 != 1);
      }
      for (const double alpha : {1.25, 1.5, 2.0}) {
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << length << " alpha " << alpha);
        problem.alpha = alpha;
        const Outputs expected =
            run(Device::cpu(1), problem, x, false, {}, "reference", nullptr, &mask);
        const Outputs got = run(Device::cuda(), problem, x, false, {}, "cuda", nullptr, &mask);
        expect_near(got.y, expected.y, dtype == DType::f32 ? 1e-5 : 0x1p-8);
        expect_near(got.tau, expected.tau, 1e-5);
        // Elements a rounding away from the edge may be on either side of it.
        expect_near(got.support_size, expected.support_size, 1e-3);
      }
    }
  }
}

// Rows that the first launch leaves to a second one still have their d_y when that comes.
TEST(entmax_cuda, backward_in_place_with_alphas_of_rows) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  const std::vector<std::vector<std::int64_t>> shapes{{37, 24, 1},  {3, 20, 64},  {2, 4000, 24},
                                                      {37, 250, 1}, {9, 3200, 1}, {9, 12000, 1}};
  for (const auto& shape : shapes) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_same_in_place(dtype, shape, 0, false);
    }
  }
}

TEST(entmax_cuda, backward_in_place) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  for (const std::int64_t length : {33, 512, 4096, 12000, 32768, 131072, 300008}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::vector<std::int64_t> shape{length < 1000 ? 70 : 5, length, 1};
      for (const double alpha : {1.0, 1.3, 1.5, 2.0}) {
        expect_same_in_place(dtype, shape, alpha, false);
      }
      expect_same_in_place(dtype, shape, 2, true);
      if (length <= 4096) expect_same_in_place(dtype, {2, length, 24}, 1.5, false);
    }
  }
}

TEST(entmax_cuda, more_rows_than_a_grid_has_blocks_are_refused) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  EntmaxProblem problem;
  for (const auto& [pass, length] : {std::pair(Pass::forward, 3000), {Pass::backward, 20000}}) {
    problem.x = TensorSpec::contiguous(DType::f32, {(std::int64_t{1} << 32) + 5, length});
    EXPECT_THROW(make_plan(Device::cuda(), problem, pass, {.variant = "cuda"}), Error);
  }
}

TEST(entmax_cuda, check_indices_names_the_first_bad_offset) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  for (const DType index : {DType::i32, DType::i64}) {
    for (const std::int64_t stride : {1, 2, -1}) {
      for (const bool bad : {false, true}) {
        EntmaxProblem problem;
        problem.x = TensorSpec::contiguous(DType::f32, {6});
        problem.offsets = TensorSpec::contiguous(index, {4});
        problem.offsets.strides[0] = stride;
        problem.check_indices = true;
        problem = complete(problem);
        const HostTensor x(problem.x), y(problem.y), offsets(problem.offsets);
        const double values[] = {0, 4, bad ? 3.0 : 5.0, 6};
        for (std::int64_t i = 0; i < 4; ++i) offsets.set(i, values[i]);
        for (std::int64_t i = 0; i < 6; ++i) {
          x.set(i, 1);
          y.set(i, 7);
        }
        driver::TensorMemory memory(Device::cuda());
        const EntmaxTensors tensors{.x = memory.input(x),
                                    .offsets = memory.input(offsets),
                                    .y = const_cast<void*>(memory.input(y))};
        const auto plan = make_plan(Device::cuda(), problem, Pass::forward);
        memory.reserve_workspace(plan.workspace_bytes());
        std::string message;
        try {
          plan.run(memory.stream(), tensors, memory.workspace());
        } catch (const Error& error) {
          message = error.what();
        }
        memory.fetch(driver::Fetch::all);
        EXPECT_EQ(message,
                  bad ? "entmax: offsets[2]: expected 4 to 6, got 3; offsets never decrease and "
                        "stay within the axis"
                      : "");
        EXPECT_EQ(y.get(0), bad ? 7 : 0.25) << name_of(index) << " stride " << stride;
      }
    }
  }
}

// The gradient of -ln y is past all others by any factor where y is small, and must not meet their
// weights in 32 bits.
TEST(entmax_cuda, d_alpha_of_a_loss_where_y_is_small) {
  if (const std::string none = cuda::driver_problem(); !none.empty()) GTEST_SKIP() << none;
  constexpr std::int64_t kRows = 8, kLength = 64;
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {kRows, kLength});
  problem.alpha_per_row = TensorSpec::contiguous(DType::f32, {kRows});
  problem = complete(problem);
  const HostTensor y(problem.y), d_y(problem.d_y), alphas(problem.alpha_per_row);
  driver::Random random(1);
  for (std::int64_t row = 0; row < kRows; ++row) {
    const std::int64_t first = row * kLength;
    alphas.set(row, 1 + 0.01 * static_cast<double>(row % 2));
    double sum = 0;
    for (std::int64_t i = 0; i < kLength; ++i) {
      const double p = std::exp(i == row ? -23 : random.normal());
      y.set(first + i, p);
      sum += p;
    }
    for (std::int64_t i = 0; i < kLength; ++i) y.set(first + i, y.get(first + i) / sum);
    for (std::int64_t i = 0; i < kLength; ++i) {
      d_y.set(first + i, i == row ? -1 / y.get(first + i) : 0);
    }
  }
  const auto d_alpha_of = [&](const Device& device, const std::string& variant) {
    const HostTensor d_alpha(problem.d_alpha);
    driver::TensorMemory memory(device);
    EntmaxTensors tensors;
    tensors.alpha_per_row = memory.input(alphas);
    tensors.y = const_cast<void*>(memory.input(y));
    tensors.d_y = memory.input(d_y);
    tensors.d_alpha = memory.output(d_alpha);
    const auto plan = make_plan(device, problem, Pass::backward, {.variant = variant});
    memory.reserve_workspace(plan.workspace_bytes());
    plan.run(memory.stream(), tensors, memory.workspace());
    memory.fetch();
    return d_alpha;
  };
  expect_near(d_alpha_of(Device::cuda(), "cuda"), d_alpha_of(Device::cpu(1), "reference"), 1e-5);
}

}  // namespace
}  // namespace pullback

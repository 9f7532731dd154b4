// entmax on a GPU where the case list does not look: rows that begin at any address, and what else
// than y and tau a forward pass gives.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/entmax.hpp"

namespace pullback {
namespace {

using driver::HostTensor;

struct Outputs {
  HostTensor y, tau, support_size;
};

// wants_y: else support_size and tau are had alone.
Outputs run(const Device& device, EntmaxProblem problem, const HostTensor& x, bool unaligned,
            bool wants_y, const std::string& variant) {
  problem = complete(problem);
  Outputs outputs{HostTensor(problem.y), HostTensor(problem.tau), HostTensor(problem.support_size)};
  driver::TensorMemory memory(device, {.unaligned = unaligned});
  const EntmaxTensors tensors{.x = memory.input(x),
                              .y = wants_y ? memory.output(outputs.y) : nullptr,
                              .tau = memory.output(outputs.tau),
                              .support_size = memory.output(outputs.support_size)};
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
  const Outputs expected = run(Device::cpu(1), problem, x, false, true, "reference");
  for (const bool unaligned : {false, true}) {
    for (const bool wants_y : {false, true}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << length << " alpha " << alpha
                                      << (unaligned ? " unaligned" : "") << (wants_y ? " y" : ""));
      const Outputs got = run(Device::cuda(), problem, x, unaligned, wants_y, "cuda");
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

}  // namespace
}  // namespace pullback

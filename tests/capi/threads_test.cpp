// What threads may share, and what each has to itself. Also run under ThreadSanitizer.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "capi/c_tensors.hpp"
#include "driver/case.hpp"

namespace pullback::testing {
namespace {

constexpr int kThreads = 4;
constexpr int kRuns = 8;

driver::HostTensor logits(std::uint64_t seed) {
  driver::Random random(seed);
  return driver::normal_tensor(DType::f32, {64, 200}, random);
}

CPlan sparsemax_plan(const driver::HostTensor& x, std::int32_t threads) {
  const DLTensor dl_x = describe(x);
  pullback_entmax_problem problem = PULLBACK_ENTMAX_PROBLEM_INIT;
  problem.x = &dl_x;
  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.threads = threads;
  pullback_plan* made = nullptr;
  EXPECT_EQ(pullback_entmax_plan(&problem, PULLBACK_FORWARD, &options, &made), PULLBACK_OK)
      << pullback_last_error();
  return CPlan(made);
}

driver::HostTensor sparsemax(const CPlan& plan, const driver::HostTensor& x) {
  const driver::HostTensor y = allocate(plan, "y");
  const auto workspace = workspace_of(plan);
  pullback_entmax_tensors tensors = PULLBACK_ENTMAX_TENSORS_INIT;
  tensors.x = x.data();
  tensors.y = y.data();
  EXPECT_EQ(pullback_entmax_run(plan.get(), nullptr, &tensors, workspace.get().data,
                                workspace.get().bytes),
            PULLBACK_OK)
      << pullback_last_error();
  return y;
}

template <class Body>
void on_threads(const Body& body) {
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(body, thread);
}

TEST(Threads, run_one_plan_at_once) {
  const driver::HostTensor x = logits(1);
  const CPlan plan = sparsemax_plan(x, 2);
  const driver::HostTensor expected = sparsemax(plan, x);
  on_threads([&](int) {
    for (int i = 0; i < kRuns; ++i) EXPECT_TRUE(driver::same_bits(sparsemax(plan, x), expected));
  });
}

TEST(Threads, plan_and_run_for_themselves) {
  on_threads([&](int thread) {
    const driver::HostTensor x = logits(static_cast<std::uint64_t>(thread));
    const driver::HostTensor expected = sparsemax(sparsemax_plan(x, 1), x);
    for (int i = 0; i < kRuns; ++i) {
      EXPECT_TRUE(driver::same_bits(sparsemax(sparsemax_plan(x, 3), x), expected));
    }
  });
}

TEST(Threads, keep_their_own_messages) {
  on_threads([&](int thread) {
    for (int i = 0; i < 100 * kRuns; ++i) {
      DLTensor spoiled{};
      spoiled.ndim = 100 + thread;
      pullback_entmax_problem problem = PULLBACK_ENTMAX_PROBLEM_INIT;
      problem.x = &spoiled;
      pullback_plan* made = nullptr;
      ASSERT_EQ(pullback_entmax_plan(&problem, PULLBACK_FORWARD, nullptr, &made),
                PULLBACK_INVALID_ARGUMENT);
      EXPECT_EQ(pullback_last_error(),
                "entmax: x: expected ndim from 0 to 8, got " + std::to_string(100 + thread));
    }
  });
}

TEST(Threads, may_replace_the_log_callback_meanwhile) {
  on_threads([&](int thread) {
    const pullback_log_callback ignore = [](std::int32_t, const char*, void*) {};
    for (int i = 0; i < kRuns; ++i) {
      pullback_set_log_callback(thread % 2 ? ignore : nullptr, nullptr);
      (void)sparsemax_plan(logits(1), 1);
    }
  });
  pullback_set_log_callback(nullptr, nullptr);
}

}  // namespace
}  // namespace pullback::testing

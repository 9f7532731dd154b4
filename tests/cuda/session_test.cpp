// What every op that runs on a GPU promises about its runs: they can be captured into a graph, be
// enqueued by many threads and on several streams, take tensors at any address, and give the same
// bits a thousand times.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "cuda/memory.hpp"
#include "driver/case.hpp"
#include "driver/check.hpp"
#include "driver/kernel_list.hpp"

namespace pullback::driver {
namespace {

class OnDeviceSession : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string problem = cuda::driver_problem();
    if (!problem.empty()) GTEST_SKIP() << problem;
  }

  // So many cases of every op on a GPU, from all over its list, in f32 and bf16.
  static std::vector<Request> requests(std::size_t count) {
    std::vector<Request> all;
    for (const CaseLists& lists : all_case_lists()) {
      if (!has_cuda(lists.op)) continue;
      std::vector<Case> cases = lists.cases();
      std::erase_if(cases, [](const Case& test) { return test.full_only; });
      count = std::min(count, cases.size());
      for (std::size_t taken = 0; taken < count; ++taken) {
        const Case& test = cases[taken * cases.size() / count];
        const DType dtype = taken % 2 == 0 ? DType::f32 : DType::bf16;
        if (std::find(test.dtypes.begin(), test.dtypes.end(), dtype) == test.dtypes.end()) continue;
        Random random(taken);
        all.push_back({.op = test.op,
                       .inputs = test.inputs(dtype, random),
                       .options = test.options,
                       .device = Device::cuda(),
                       .variant = {}});
      }
    }
    return all;
  }

  static void expect_same(const TensorMap& a, const TensorMap& b) {
    for (const auto& [name, tensor] : a) {
      EXPECT_TRUE(same_bits(tensor, b.find(name)->second)) << name;
    }
  }
};

TEST_F(OnDeviceSession, runs_can_be_captured_into_graphs) {
  const cuda::DeviceGuard guard(cuda::device_info(0));
  for (const Request& request : requests(40)) {
    SCOPED_TRACE(request.op);
    const TensorMap expected = evaluate(request);
    const auto session = find_driver(request.op).prepare(request);
    const auto stream = static_cast<cuda::CUstream>(session->stream().handle);
    const cuda::Driver& driver = cuda::driver();
    constexpr int kThreadLocal = 1;
    cuda::check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
    cuda::check(driver.cuStreamBeginCapture(stream, kThreadLocal), "cuStreamBeginCapture");
    session->forward();
    session->backward();
    cuda::CUgraph graph = nullptr;
    cuda::check(driver.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    cuda::CUgraphExec executable = nullptr;
    cuda::check(driver.cuGraphInstantiateWithFlags(&executable, graph, 0),
                "cuGraphInstantiateWithFlags");
    for (int i = 0; i < 2; ++i) {
      cuda::check(driver.cuGraphLaunch(executable, stream), "cuGraphLaunch");
    }
    session->fetch(Fetch::outputs);
    driver.cuGraphExecDestroy(executable);
    driver.cuGraphDestroy(graph);
    expect_same(expected, session->outputs);
  }
}

TEST_F(OnDeviceSession, threads_have_plans_of_their_own) {
  const std::vector<Request> all = requests(12);
  std::vector<TensorMap> expected;
  for (const Request& request : all) expected.push_back(evaluate(request));
  constexpr std::size_t kThreads = 6;
  std::vector<std::vector<TensorMap>> got(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (const Request& request : all) got[t].push_back(evaluate(request));
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& results : got) {
    for (std::size_t i = 0; i < all.size(); ++i) expect_same(expected[i], results[i]);
  }
}

TEST_F(OnDeviceSession, streams_work_side_by_side) {
  std::vector<Request> all = requests(12);
  std::vector<TensorMap> expected;
  std::vector<std::unique_ptr<Session>> sessions;
  for (Request& request : all) {
    expected.push_back(evaluate(request));
    request.placement.own_stream = true;
    sessions.push_back(find_driver(request.op).prepare(request));
  }
  for (int round = 0; round < 5; ++round) {
    for (const auto& session : sessions) session->forward();
    for (const auto& session : sessions) session->backward();
  }
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    SCOPED_TRACE(all[i].op);
    sessions[i]->fetch(Fetch::outputs);
    expect_same(expected[i], sessions[i]->outputs);
  }
}

TEST_F(OnDeviceSession, tensors_may_begin_anywhere) {
  for (Request& request : requests(40)) {
    SCOPED_TRACE(request.op);
    request.placement.unaligned = true;
    for (const std::string& failure : verify(request).failures) ADD_FAILURE() << failure;
  }
}

TEST_F(OnDeviceSession, a_thousand_runs_give_the_same_bits) {
  for (const Request& request : requests(8)) {
    SCOPED_TRACE(request.op);
    const TensorMap expected = evaluate(request);
    const auto session = find_driver(request.op).prepare(request);
    for (int run = 0; run < 1000 && !HasFailure(); ++run) {
      session->forward();
      session->backward();
      session->fetch(Fetch::outputs);
      expect_same(expected, session->outputs);
    }
  }
}

// Offsets beyond 32 bits; all elements are compared with those of the CPU. Needs up to 60 GB of
// memory on both sides, hence on request only: PULLBACK_HUGE_TESTS names an op, or "all".
TEST_F(OnDeviceSession, tensors_of_more_than_2_to_the_31_elements) {
  const char* asked = std::getenv("PULLBACK_HUGE_TESTS");
  if (asked == nullptr) GTEST_SKIP() << "PULLBACK_HUGE_TESTS is not set";
  const std::string_view op = asked;
  int cases = 0;
  for (const Case& test : all_cuda_benches()) {
    if (test.name.find("2^31+8") == std::string::npos || !has_cuda(test.op)) continue;
    if (op != "all" && op != test.op) continue;
    ++cases;
    for (DType dtype : test.dtypes) {
      SCOPED_TRACE(test.op + " " + test.name);
      Random random(1);
      Request request{.op = test.op,
                      .inputs = test.inputs(dtype, random),
                      .options = test.options,
                      .device = Device::cuda(),
                      .variant = {}};
      const auto session = find_driver(test.op).prepare(request);
      session->forward();
      session->backward();
      session->fetch(Fetch::outputs);
      request.device = Device::cpu();
      for (const auto& [name, expected] : evaluate(request)) {
        const auto [difference, largest] =
            largest_errors(session->outputs.find(name)->second, expected);
        // Two roundings to bf16, of values computed in another order.
        EXPECT_LE(difference, largest * 0x1p-7) << name;
        EXPECT_GT(largest, 0) << name;
      }
    }
  }
  EXPECT_GT(cases, 0) << op;
}

}  // namespace
}  // namespace pullback::driver

// Runs of segment on a GPU that OneRun (cuda_test.cpp) does not make: with pointers, rows and
// outputs of their own.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;

class segment_cuda_runs : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = cuda::driver_problem(); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }
  static void forward(driver::TensorMemory& memory, const SegmentProblem& problem,
                      const SegmentTensors& tensors) {
    const auto plan = make_plan(Device::cuda(), problem, Pass::forward);
    memory.reserve_workspace(plan.workspace_bytes());
    plan.run(memory.stream(), tensors, memory.workspace());
    memory.fetch();
  }
};

TEST_F(segment_cuda_runs, places_that_do_not_fit_an_arg_are_in_the_mask) {
  for (const std::int64_t columns : {1, 8, 40}) {
    SegmentProblem problem;
    problem.x = TensorSpec::contiguous(DType::f32, {700, columns});
    problem.offsets = TensorSpec::contiguous(DType::i64, {2});
    problem.reduce = SegmentReduce::max;
    problem.arg = TensorSpec::contiguous(DType::u8, {1, columns});
    problem.arg_mask = TensorSpec::contiguous(DType::u8, {700, (columns + 7) / 8});
    problem = complete(problem);
    HostTensor x(problem.x), offsets(problem.offsets), out(problem.out), arg(problem.arg);
    HostTensor mask(problem.arg_mask);
    for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, i / columns == 300 ? 1 : 0);
    offsets.set(0, 0);
    offsets.set(1, 700);
    driver::TensorMemory memory(Device::cuda());
    const SegmentTensors tensors{.x = memory.input(x),
                                 .offsets = memory.input(offsets),
                                 .out = memory.output(out),
                                 .arg = memory.output(arg),
                                 .arg_mask = memory.output(mask)};
    forward(memory, problem, tensors);
    for (std::int64_t i = 0; i < mask.numel(); ++i) {
      const std::int64_t row = i / mask.spec().shape[1], first = i % mask.spec().shape[1] * 8;
      const auto bits = static_cast<double>((1 << std::min<std::int64_t>(columns - first, 8)) - 1);
      ASSERT_EQ(mask.get(i), row == 300 ? bits : 0) << columns << " columns, byte " << i;
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      EXPECT_EQ(arg.get(i), 255);
      EXPECT_EQ(out.get(i), 1);
    }
  }
}

// Frameworks have no pointer for a tensor without elements.
TEST_F(segment_cuda_runs, no_ids_of_no_rows) {
  for (const std::int64_t columns : {1, 16, 128}) {
    for (const SegmentReduce reduce :
         {SegmentReduce::sum, SegmentReduce::max, SegmentReduce::softmax}) {
      SegmentProblem problem;
      problem.x = TensorSpec::contiguous(DType::bf16, {0, columns});
      problem.ids = TensorSpec::contiguous(DType::i64, {0});
      problem.num_segments = 3;
      problem.reduce = reduce;
      problem.empty = EmptySegment::zero;
      problem = complete(problem);
      HostTensor out(problem.out);
      driver::TensorMemory memory(Device::cuda());
      SegmentTensors tensors;
      tensors.out = memory.output(out);
      forward(memory, problem, tensors);
      for (std::int64_t i = 0; i < out.numel(); ++i) EXPECT_EQ(out.get(i), 0);
    }
  }
}

// Of a chunk without ends, whose rows all are so far below the first that their powers vanish, and
// the first's own when the product that its exponent begins with is rounded.
TEST_F(segment_cuda_runs, logsumexp_of_one_row_that_is_far_above) {
  for (const double top : {1e9, 1e10, 3e38}) {
    SegmentProblem problem;
    problem.x = TensorSpec::contiguous(DType::bf16, {1 << 22, 1});
    problem.offsets = TensorSpec::contiguous(DType::i64, {2});
    problem.reduce = SegmentReduce::logsumexp;
    problem.lse = TensorSpec::contiguous(DType::f32, {1, 1});
    problem = complete(problem);
    HostTensor x(problem.x), offsets(problem.offsets), out(problem.out), lse(problem.lse);
    for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, i == 0 ? top : 0);
    offsets.set(0, 0);
    offsets.set(1, 1 << 22);
    driver::TensorMemory memory(Device::cuda());
    const SegmentTensors tensors{.x = memory.input(x),
                                 .offsets = memory.input(offsets),
                                 .out = memory.output(out),
                                 .lse = memory.output(lse)};
    forward(memory, problem, tensors);
    EXPECT_EQ(out.get(0), x.get(0));
    EXPECT_NEAR(lse.get(0), x.get(0), x.get(0) * 0x1p-22);
  }
}

}  // namespace
}  // namespace pullback

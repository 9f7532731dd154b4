// Runs of segment on a GPU that OneRun (one_run.hpp) does not make: with pointers, rows and
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
  static void run(driver::TensorMemory& memory, const SegmentProblem& problem,
                  const SegmentTensors& tensors, Pass pass = Pass::forward) {
    const auto plan = make_plan(Device::cuda(), problem, pass);
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
    run(memory, problem, tensors);
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
      run(memory, problem, tensors);
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
    run(memory, problem, tensors);
    EXPECT_EQ(out.get(0), x.get(0));
    EXPECT_NEAR(lse.get(0), x.get(0), x.get(0) * 0x1p-22);
  }
}

// The last block of columns has one byte of a row's mask, so that these follow each other.
TEST_F(segment_cuda_runs, masks_whose_rows_lie_side_by_side) {
  for (const std::int64_t columns : {8, 1028, 1032, 1040}) {
    constexpr std::int64_t kRows = 40;
    SegmentProblem problem;
    problem.x = TensorSpec::contiguous(DType::f32, {kRows, columns});
    problem.offsets = TensorSpec::contiguous(DType::i64, {3});
    problem.reduce = SegmentReduce::max;
    problem.arg_mask = TensorSpec::contiguous(DType::u8, {kRows, (columns + 7) / 8});
    problem.arg_mask.strides[0] = 1;
    problem.arg_mask.strides[1] = kRows;
    problem = complete(problem);
    HostTensor x(problem.x), offsets(problem.offsets), mask(problem.arg_mask);
    HostTensor d_out(problem.d_out), d_x(problem.d_x);
    offsets.set(0, 0);
    offsets.set(1, 25);
    offsets.set(2, kRows);
    // Row (column mod 23) of the first segment and row 39 - (column mod 13) of the second.
    const auto chosen = [](std::int64_t row, std::int64_t column) {
      return row < 25 ? row == column % 23 : row == kRows - 1 - column % 13;
    };
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t byte = 0; byte < (columns + 7) / 8; ++byte) {
        int bits = 0;
        for (int bit = 0; bit < 8 && byte * 8 + bit < columns; ++bit) {
          bits |= chosen(row, byte * 8 + bit) << bit;
        }
        mask.set(row * mask.spec().shape[1] + byte, bits);
      }
    }
    for (std::int64_t i = 0; i < d_out.numel(); ++i) d_out.set(i, static_cast<double>(1 + i % 7));
    driver::TensorMemory memory(Device::cuda());
    SegmentTensors tensors;
    tensors.offsets = memory.input(offsets);
    tensors.arg_mask = const_cast<void*>(memory.input(mask));
    tensors.d_out = memory.input(d_out);
    tensors.d_x = memory.output(d_x);
    run(memory, problem, tensors, Pass::backward);
    for (std::int64_t i = 0; i < d_x.numel(); ++i) {
      const std::int64_t row = i / columns, column = i % columns;
      const double gradient = d_out.get((row < 25 ? 0 : columns) + column);
      ASSERT_EQ(d_x.get(i), chosen(row, column) ? gradient : 0)
          << columns << " columns, row " << row << " column " << column;
    }
  }
}

TEST_F(segment_cuda_runs, products_of_some_rows_may_pass_what_f32_holds) {
  constexpr double kFactors[] = {1e30, 1e30, 1, 1e-30, 1e-30};
  for (const std::int64_t columns : {1, 8, 40}) {
    for (const std::int64_t repeats : {1, 700}) {  // of each factor: one walker's, or many tiles'
      const std::int64_t rows = 5 * repeats;
      SegmentProblem problem;
      problem.x = TensorSpec::contiguous(DType::f32, {rows, columns});
      problem.offsets = TensorSpec::contiguous(DType::i64, {2});
      problem.reduce = SegmentReduce::prod;
      problem = complete(problem);
      HostTensor x(problem.x), offsets(problem.offsets), out(problem.out);
      HostTensor d_out(problem.d_out), d_x(problem.d_x);
      // In the first and last rows of their parts; all others are 1.
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        const std::int64_t row = i / columns;
        x.set(i,
              row % repeats == (row / repeats < 3 ? 0 : repeats - 1) ? kFactors[row / repeats] : 1);
      }
      offsets.set(0, 0);
      offsets.set(1, static_cast<double>(rows));
      for (std::int64_t i = 0; i < columns; ++i) d_out.set(i, 1);
      driver::TensorMemory memory(Device::cuda());
      SegmentTensors tensors{
          .x = memory.input(x), .offsets = memory.input(offsets), .out = memory.output(out)};
      run(memory, problem, tensors);
      tensors.out = nullptr;
      tensors.d_out = memory.input(d_out);
      tensors.d_x = memory.output(d_x);
      run(memory, problem, tensors, Pass::backward);
      for (std::int64_t i = 0; i < columns; ++i) EXPECT_NEAR(out.get(i), 1, 1e-6);
      for (std::int64_t i = 0; i < d_x.numel(); ++i) {
        ASSERT_NEAR(d_x.get(i) * x.get(i), 1, 1e-6) << "row " << i / columns << " of " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace pullback

// Plans of problems that no case list has: without elements, or with more of them than any memory
// holds. Nothing is run, so that a device that computes nothing will do (fake_cuda.c).
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "pullback/attention.hpp"
#include "pullback/entmax.hpp"
#include "pullback/error.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

class Plans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  }

  template <class Problem>
  static void expect_planned(const Problem& problem) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      EXPECT_FALSE(make_plan(Device::cuda(), problem, pass).describe().empty());
    }
  }
};

TEST_F(Plans, entmax_of_rows_without_elements) {
  const std::vector<std::int64_t> shapes[] = {{0}, {1, 0}, {3, 0}, {0, 5}, {1000, 0}};
  for (const auto& shape : shapes) {
    for (const DType dtype : kFloats) {
      for (const double alpha : {1.0, 1.3, 1.5, 2.0, 3.0}) {
        EntmaxProblem problem;
        problem.x = problem.d_y = TensorSpec::contiguous(dtype, shape);
        problem.alpha = alpha;
        expect_planned(problem);
      }
    }
  }
}

// The driver does not survive a fork; without a word it would crash.
TEST_F(Plans, a_forked_child_is_told) {
  EntmaxProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {4, 8});
  make_plan(Device::cuda(), problem, Pass::forward);
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      make_plan(Device::cuda(), problem, Pass::forward);
    } catch (const Error& error) {
      const bool told = std::string(error.what()).find("forked") != std::string::npos;
      status = error.code() == ErrorCode::device && told ? 0 : 2;
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Plans, attention_by_a_layout_without_heads) {
  for (const DType dtype : kFloats) {
    for (const std::int64_t batches : {0, 1, 3}) {
      AttentionProblem problem;
      problem.q = problem.k = problem.v = problem.d_out =
          TensorSpec::contiguous(dtype, {batches, 16, 0, 64});
      problem.blocks = {std::make_shared<const BlockLayout>(0, 1, 1, std::vector<std::uint8_t>{}),
                        1, 16};
      expect_planned(problem);
    }
  }
}

// Its keys would take a table of 2^27 blocks.
TEST_F(Plans, attention_of_one_query_and_all_keys_there_can_be) {
  AttentionProblem problem;
  problem.q = TensorSpec::contiguous(DType::f16, {1, 1, 1, 1});
  problem.k = problem.v = TensorSpec::contiguous(DType::f16, {1, std::int64_t{1} << 34, 1, 1});
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_THROW(make_plan(Device::cuda(), problem, pass), Error);
  }
}

// Of widths whose bytes, as 32 bits, are near 0.
TEST_F(Plans, segment_of_very_wide_rows) {
  for (const std::int64_t rows : {0, 1}) {
    for (const std::int64_t columns : {1041204192L, 3766355936L, 1L << 31, 1L << 32}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const SegmentReduce reduce :
             {SegmentReduce::sum, SegmentReduce::max, SegmentReduce::softmax}) {
          SegmentProblem problem;
          problem.x = TensorSpec::contiguous(dtype, {rows, columns});
          problem.offsets = TensorSpec::contiguous(DType::i64, {2});
          problem.reduce = reduce;
          expect_planned(problem);
        }
      }
    }
  }
}

}  // namespace
}  // namespace pullback

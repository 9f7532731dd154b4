// What a caller is told: every message names the op, the tensor, what was expected and what it got.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "driver/case.hpp"
#include "driver/driver.hpp"
#include "pullback/error.hpp"
#include "pullback/segment.hpp"
#include "support/message_of.hpp"

namespace pullback {
namespace {

SegmentProblem good() {
  SegmentProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {6, 4});
  problem.offsets = TensorSpec::contiguous(DType::i64, {4});
  return problem;
}

SegmentProblem good_ids() {
  SegmentProblem problem = good();
  problem.offsets = {};
  problem.ids = TensorSpec::contiguous(DType::i32, {6});
  problem.num_segments = 3;
  return problem;
}

template <class Problem>
std::string message(const Problem& problem) {
  try {
    complete(problem);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "no error";
}

TEST(segment_messages, good_problems_are_completed) {
  const SegmentProblem problem = complete(good());
  EXPECT_EQ(problem.num_segments, 3);
  EXPECT_EQ(problem.out.to_string(), "f32 [3, 4]");
  EXPECT_EQ(problem.d_x.to_string(), "f32 [6, 4]");
  EXPECT_EQ(message(good_ids()), "no error");
}

TEST(segment_messages, x) {
  SegmentProblem problem = good();
  problem.x = {};
  EXPECT_EQ(message(problem), "segment: x: expected a tensor, got none");
  problem.x = TensorSpec::contiguous(DType::f32, {6});
  EXPECT_EQ(message(problem), "segment: x: expected rank 2, got rank 1 [6]");
  problem.x = TensorSpec::contiguous(DType::i32, {6, 4});
  EXPECT_EQ(
      message(problem),
      "segment: x: expected dtype f64 or f32 or bf16 or f16, got i32; convert the tensor first");
  problem.x = TensorSpec::contiguous(DType::f32, {-6, 4});
  EXPECT_EQ(message(problem), "segment: x: expected sizes of 0 or more, got [-6, 4]");
}

TEST(segment_messages, indices) {
  SegmentProblem problem = good();
  problem.ids = TensorSpec::contiguous(DType::i64, {6});
  EXPECT_EQ(
      message(problem),
      "segment: offsets, ids: expected exactly one of them, or both with a permutation, got both");
  problem.offsets = problem.ids = {};
  EXPECT_EQ(
      message(problem),
      "segment: offsets, ids: expected exactly one of them, or both with a permutation, got none");
  problem = good();
  problem.offsets = TensorSpec::contiguous(DType::f32, {4});
  EXPECT_EQ(message(problem),
            "segment: offsets: expected dtype i64 or i32, got f32; convert the tensor first");
  problem.offsets = TensorSpec::contiguous(DType::i64, {0});
  EXPECT_EQ(message(problem), "segment: offsets: expected S+1 elements, so at least 1, got 0");
  problem = good();
  problem.num_segments = 4;
  EXPECT_EQ(message(problem),
            "segment: num_segments: expected 0 or 3, the length of offsets - 1, got 4");
  problem = good_ids();
  problem.ids = TensorSpec::contiguous(DType::i64, {5});
  EXPECT_EQ(message(problem), "segment: ids: expected shape [6], got [5]");
  problem = good_ids();
  problem.num_segments = -1;
  EXPECT_EQ(message(problem), "segment: num_segments: expected 0 or more, got -1");
  problem = good_ids();
  problem.permutation = TensorSpec::contiguous(DType::i64, {6});
  EXPECT_EQ(message(problem),
            "segment: offsets: expected those of the permutation, got none; pass the offsets that "
            "segment_permutation wrote");
}

TEST(segment_messages, outputs) {
  SegmentProblem problem = good();
  problem.out = TensorSpec::contiguous(DType::f32, {4, 4});
  EXPECT_EQ(message(problem), "segment: out: expected shape [3, 4], got [4, 4]");
  problem = good();
  problem.d_out = TensorSpec::contiguous(DType::f64, {3, 4});
  EXPECT_EQ(message(problem),
            "segment: d_out: expected dtype f32, got f64; convert the tensor first");
  problem = good();
  problem.d_x = TensorSpec::contiguous(DType::f32, {6, 4});
  problem.d_x.strides[0] = 0;
  EXPECT_NE(message(problem).find("segment: d_x: expected an output whose elements do not overlap"),
            std::string::npos);
  problem = good();
  problem.arg = TensorSpec::contiguous(DType::i64, {3, 4});
  EXPECT_EQ(message(problem),
            "segment: arg: expected none, as only max and min have one, got a tensor");
  problem.reduce = SegmentReduce::max;
  problem.arg.dtype = DType::f32;
  EXPECT_EQ(message(problem),
            "segment: arg: expected dtype i64 or i32 or u8, got f32; convert the tensor first");
  problem.arg = {};
  problem.arg_mask = TensorSpec::contiguous(DType::u8, {6, 4});
  EXPECT_EQ(message(problem), "segment: arg_mask: expected shape [6, 1], got [6, 4]");
  problem.arg_mask = {};
  problem.reduce = SegmentReduce::logsumexp;
  problem.lse = TensorSpec::contiguous(DType::f32, {3, 4});
  EXPECT_EQ(message(problem),
            "segment: lse: expected none, as only logsumexp of bf16 and f16 has one beside out, "
            "got a tensor");
  problem = good();
  problem.reduce = SegmentReduce::logsumexp;
  problem.x.dtype = DType::bf16;
  problem.lse = TensorSpec::contiguous(DType::bf16, {3, 4});
  EXPECT_EQ(message(problem),
            "segment: lse: expected dtype f32, got bf16; convert the tensor first");
  problem.lse = TensorSpec::contiguous(DType::f32, {4, 3});
  EXPECT_EQ(message(problem), "segment: lse: expected shape [3, 4], got [4, 3]");
}

TEST(segment_messages, permutation_plan) {
  SegmentPermutationProblem problem;
  problem.ids = TensorSpec::contiguous(DType::u8, {6});
  EXPECT_EQ(
      message(problem),
      "segment_permutation: ids: expected dtype i64 or i32, got u8; convert the tensor first");
  problem.ids = TensorSpec::contiguous(DType::i64, {6});
  problem.num_segments = -2;
  EXPECT_EQ(message(problem),
            "segment_permutation: num_segments: expected 0 or more, and below 2^56, got -2");
  problem.num_segments = 2;
  problem.offsets = TensorSpec::contiguous(DType::i64, {2});
  EXPECT_EQ(message(problem), "segment_permutation: offsets: expected shape [3], got [2]");
}

TEST(segment_messages, missing_pointers) {
  SegmentProblem problem = good();
  problem.reduce = SegmentReduce::max;
  const auto plan = make_plan(Device::cpu(1), problem, Pass::backward);
  std::vector<float> memory(24);
  const std::vector<std::int64_t> offsets = {0, 2, 4, 6};
  SegmentTensors tensors;
  tensors.offsets = offsets.data();
  tensors.d_out = memory.data();
  std::vector<float> d_x(24);
  tensors.d_x = d_x.data();
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  try {
    plan.run({}, tensors, workspace.get());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "segment: x: expected a data pointer, got null");
  }
}

std::string driver_message(const driver::OptionMap& options, const driver::TensorMap& inputs) {
  try {
    driver::evaluate(
        {.op = "segment", .inputs = inputs, .options = options, .device = {}, .variant = {}});
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(segment_messages, driver) {
  driver::TensorMap inputs;
  inputs["x"] = driver::HostTensor(TensorSpec::contiguous(DType::f32, {6, 4}));
  EXPECT_EQ(driver_message({}, inputs),
            "segment: d_out: expected a tensor [S,D], for softmax [N,D], got none");
  inputs["d_out"] = driver::HostTensor(TensorSpec::contiguous(DType::f32, {3, 4}));
  EXPECT_EQ(
      driver_message({}, inputs),
      "segment: offsets, ids: expected exactly one of them, or both with a permutation, got none");
  inputs["offsets"] = driver::HostTensor(TensorSpec::contiguous(DType::i64, {4}));
  EXPECT_EQ(driver_message({}, inputs), "no error");
  EXPECT_EQ(driver_message({{"num-segments", "0"}}, inputs),
            "segment: --num-segments: expected 3, as offsets have it, got 0; leave --num-segments "
            "out");
  inputs["offsets"] = driver::tensor_of(DType::i64, {4}, {0, 2, 1, 6});
  EXPECT_EQ(driver_message({}, inputs), "no error");
  EXPECT_EQ(driver_message({{"check-indices", "true"}}, inputs),
            "segment: offsets[2]: expected at least 2, the one before, got 1");
  inputs.erase("offsets");
  inputs["ids"] = driver::tensor_of(DType::i32, {6}, {0, 0, 1, 1, 2, 3});
  EXPECT_EQ(driver_message({}, inputs), "no error");
  EXPECT_EQ(driver_message({{"check-indices", "true"}}, inputs),
            "segment: ids[5]: expected 0 to 2, got 3; raise --num-segments, or leave "
            "--check-indices off to drop the row");
  inputs["d_out"] = driver::HostTensor(TensorSpec::contiguous(DType::f32, {0, 4}));
  EXPECT_EQ(
      driver_message({{"check-indices", "true"}}, inputs),
      "segment: ids[0]: expected none, as there are no segments, got 0; raise --num-segments, "
      "or leave --check-indices off to drop the row");
  EXPECT_EQ(
      driver_message({{"reduce", "median"}}, inputs),
      "segment: --reduce: expected sum or mean or max or min or prod or logsumexp or softmax, "
      "got 'median'");
  EXPECT_EQ(driver_message({{"num-segments", "-1"}}, inputs),
            "segment: --num-segments: expected 0 or more, got -1");
}

// ids tell the number of segments where nothing else does.
TEST(segment_messages, driver_reads_no_ids_but_indices) {
  const auto refusal = [](const driver::HostTensor& ids) {
    return message_of([&] {
      driver::evaluate(
          {.op = "segment",
           .inputs = {{"x", driver::filled_tensor(DType::f32, {ids.numel(), 1}, 1)}, {"ids", ids}},
           .options = {{"reduce", "softmax"}},
           .device = Device::cpu(1),
           .variant = {},
           .backward = false});
    });
  };
  EXPECT_EQ(refusal(driver::filled_tensor(DType::u8, {1 << 16}, 0)),
            "segment: ids: expected dtype i64 or i32, got u8; convert the tensor first");
  const driver::HostTensor largest(TensorSpec::contiguous(DType::i64, {2}));
  for (const int i : {0, 1}) {
    static_cast<std::int64_t*>(largest.data())[i] = std::numeric_limits<std::int64_t>::max() - i;
  }
  EXPECT_EQ(refusal(largest),
            "segment: ids: expected less than 16777216 where --num-segments is not given, got "
            "9223372036854775807; pass --num-segments");
}

}  // namespace
}  // namespace pullback

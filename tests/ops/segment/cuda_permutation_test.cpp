// The sort of plan_permutation on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/element.hpp"
#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "driver/tensor_memory.hpp"
#include "ops/segment/run_segment.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::Random;
using testing::Index;
using testing::index_tensor;
using testing::kHighest;
using testing::kLowest;

void expect_sorted(const Index& ids, std::int64_t count, DType id_dtype, DType dtype) {
  const auto rows = static_cast<std::int64_t>(ids.size());
  const SegmentPermutationProblem problem{.ids = TensorSpec::contiguous(id_dtype, {rows}),
                                          .num_segments = count,
                                          .permutation = TensorSpec::contiguous(dtype, {rows}),
                                          .offsets = TensorSpec::contiguous(dtype, {count + 1})};
  const HostTensor tensor = index_tensor(ids, id_dtype);
  const HostTensor permutation(problem.permutation), offsets(problem.offsets);
  driver::TensorMemory memory(Device::cuda());
  const SegmentPermutationTensors tensors{memory.input(tensor), memory.output(permutation),
                                          memory.output(offsets)};
  const auto plan = plan_permutation(Device::cuda(), problem);
  memory.reserve_workspace(plan.workspace_bytes());
  plan.run(memory.stream(), tensors, memory.workspace());
  memory.fetch(driver::Fetch::all);

  Index expected(ids.size());
  std::iota(expected.begin(), expected.end(), 0);
  const auto key = [&](std::int64_t n) {
    const std::int64_t id = ids[static_cast<std::size_t>(n)];
    return id < 0 || id >= count ? count : id;
  };
  std::ranges::stable_sort(expected, {}, key);
  for (std::int64_t r = 0; r < rows; ++r) {
    ASSERT_EQ(load_index(dtype, permutation.data(), r), expected[static_cast<std::size_t>(r)])
        << "place " << r;
  }
  Index keys(ids.size());
  std::ranges::transform(expected, keys.begin(), key);
  for (std::int64_t s = 0; s <= count; ++s) {
    ASSERT_EQ(load_index(dtype, offsets.data(), s),
              std::ranges::lower_bound(keys, s) - keys.begin())
        << "offset " << s;
  }
  EXPECT_TRUE(permutation.guards_intact());
  EXPECT_TRUE(offsets.guards_intact());
}

TEST(segment_cuda_permutation, sorts_stably) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  Random random(1);
  const auto ids = [&](std::int64_t rows, std::int64_t low, std::int64_t high) {
    Index result(static_cast<std::size_t>(rows));
    for (auto& id : result) id = random.integer(low, high);
    return result;
  };
  for (DType id_dtype : {DType::i32, DType::i64}) {
    for (DType dtype : {DType::i32, DType::i64}) {
      expect_sorted(ids(1000, 0, 30), 31, id_dtype, dtype);
    }
  }
  for (std::int64_t count : {1, 255, 256, 257, 70000}) {
    expect_sorted(ids(20000, -2, count + 2), count, DType::i64, DType::i64);
  }
  expect_sorted({kHighest, 1, kLowest, 0, -1, 2, 3, 1, kHighest, std::int64_t{1} << 32}, 3,
                DType::i64, DType::i64);
  expect_sorted({}, 0, DType::i64, DType::i64);
  expect_sorted({}, 5, DType::i32, DType::i64);
  expect_sorted({0, 3, -1}, 0, DType::i64, DType::i64);
}

}  // namespace
}  // namespace pullback

// plan_permutation: a stable sort of ids of any kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/element.hpp"
#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::Random;
using Ids = std::vector<std::int64_t>;

constexpr auto kMin = std::numeric_limits<std::int64_t>::min();
constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
const Device kTwo = Device::cpu(2);

HostTensor ids_tensor(DType dtype, const Ids& ids, std::int64_t stride) {
  TensorSpec spec = TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(ids.size())});
  spec.strides[0] = stride;
  HostTensor tensor(spec);
  for (std::size_t n = 0; n < ids.size(); ++n) {
    const std::int64_t at = static_cast<std::int64_t>(n) * stride;
    if (dtype == DType::i64) {
      static_cast<std::int64_t*>(tensor.data())[at] = ids[n];
    } else {
      static_cast<std::int32_t*>(tensor.data())[at] = static_cast<std::int32_t>(ids[n]);
    }
  }
  return tensor;
}

void expect_sorted(const Ids& ids, std::int64_t count, DType id_dtype, DType dtype,
                   const Device& device, std::int64_t stride = 1) {
  const auto rows = static_cast<std::int64_t>(ids.size());
  const HostTensor tensor = ids_tensor(id_dtype, ids, stride);
  SegmentPermutationProblem problem{.ids = tensor.spec(),
                                    .num_segments = count,
                                    .permutation = TensorSpec::contiguous(dtype, {rows}),
                                    .offsets = TensorSpec::contiguous(dtype, {count + 1})};
  problem.permutation.strides[0] = stride;
  const HostTensor permutation(problem.permutation), offsets(problem.offsets);
  driver::TensorMemory memory(device);
  const SegmentPermutationTensors tensors{memory.input(tensor), memory.output(permutation),
                                          memory.output(offsets)};
  const auto plan = plan_permutation(device, problem);
  memory.reserve_workspace(plan.workspace_bytes());
  plan.run(memory.stream(), tensors, memory.workspace());
  memory.fetch(driver::Fetch::all);

  Ids expected(ids.size());
  std::iota(expected.begin(), expected.end(), 0);
  const auto key = [&](std::int64_t n) {
    const std::int64_t id = ids[static_cast<std::size_t>(n)];
    return id < 0 || id >= count ? count : id;
  };
  std::ranges::stable_sort(expected, {}, key);
  for (std::int64_t r = 0; r < rows; ++r) {
    ASSERT_EQ(load_index(dtype, permutation.data(), r * stride),
              expected[static_cast<std::size_t>(r)])
        << "place " << r;
  }
  Ids keys(ids.size());
  std::ranges::transform(expected, keys.begin(), key);
  for (std::int64_t s = 0; s <= count; ++s) {
    ASSERT_EQ(load_index(dtype, offsets.data(), s),
              std::ranges::lower_bound(keys, s) - keys.begin())
        << "offset " << s;
  }
  EXPECT_TRUE(permutation.guards_intact());
  EXPECT_TRUE(offsets.guards_intact());
}

Ids random_ids(std::int64_t rows, std::int64_t low, std::int64_t high, std::uint64_t seed) {
  Random random(seed);
  Ids ids(static_cast<std::size_t>(rows));
  for (auto& id : ids) id = random.integer(low, high);
  return ids;
}

TEST(segment_permutation, sorts_stably) {
  for (DType id_dtype : {DType::i32, DType::i64}) {
    for (DType dtype : {DType::i32, DType::i64}) {
      expect_sorted(random_ids(1000, 0, 30, 1), 31, id_dtype, dtype, kTwo);
    }
  }
}

TEST(segment_permutation, one_two_and_three_digits) {
  for (std::int64_t count : {1, 2047, 2048, 2049, 70000, 1 << 22, (1 << 22) + 1}) {
    expect_sorted(random_ids(60000, -2, count + 2, 3), count, DType::i64, DType::i64, kTwo);
  }
}

TEST(segment_permutation, same_for_any_number_of_threads) {
  const Ids ids = random_ids(200000, 0, 900, 5);
  for (int threads : {1, 2, 3})
    expect_sorted(ids, 901, DType::i32, DType::i32, Device::cpu(threads));
}

TEST(segment_permutation, ids_out_of_range_come_last) {
  expect_sorted({kMax, 1, kMin, 0, -1, 2, 3, 1, kMax, std::int64_t{1} << 32}, 3, DType::i64,
                DType::i64, kTwo);
}

TEST(segment_permutation, sizes_of_zero) {
  expect_sorted({}, 0, DType::i64, DType::i64, kTwo);
  expect_sorted({}, 5, DType::i32, DType::i64, kTwo);
  expect_sorted({0, 3, -1}, 0, DType::i64, DType::i64, kTwo);
}

TEST(segment_permutation, strides) {
  expect_sorted(random_ids(300, 0, 9, 8), 10, DType::i32, DType::i64, kTwo, 3);
  expect_sorted(random_ids(300, 0, 9, 8), 10, DType::i64, DType::i32, kTwo, -2);
}

TEST(segment_cuda_permutation, sorts_stably) {
  if (const std::string problem = cuda::driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  const Device device = Device::cuda();
  for (DType id_dtype : {DType::i32, DType::i64}) {
    for (DType dtype : {DType::i32, DType::i64}) {
      expect_sorted(random_ids(1000, 0, 30, 1), 31, id_dtype, dtype, device);
    }
  }
  for (std::int64_t count : {1, 255, 256, 257, 70000}) {
    expect_sorted(random_ids(20000, -2, count + 2, 1), count, DType::i64, DType::i64, device);
  }
  expect_sorted({kMax, 1, kMin, 0, -1, 2, 3, 1, kMax, std::int64_t{1} << 32}, 3, DType::i64,
                DType::i64, device);
  expect_sorted({}, 0, DType::i64, DType::i64, device);
  expect_sorted({}, 5, DType::i32, DType::i64, device);
  expect_sorted({0, 3, -1}, 0, DType::i64, DType::i64, device);
}

}  // namespace
}  // namespace pullback

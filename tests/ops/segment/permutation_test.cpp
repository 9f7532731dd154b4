// plan_permutation: a stable sort of ids of any kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/element.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::Random;
using Ids = std::vector<std::int64_t>;

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

void expect_sorted(const Ids& ids, std::int64_t count, DType id_dtype, DType dtype, int threads,
                   std::int64_t stride = 1) {
  const auto rows = static_cast<std::int64_t>(ids.size());
  const HostTensor tensor = ids_tensor(id_dtype, ids, stride);
  SegmentPermutationProblem problem{.ids = tensor.spec(),
                                    .num_segments = count,
                                    .permutation = TensorSpec::contiguous(dtype, {rows}),
                                    .offsets = TensorSpec::contiguous(dtype, {count + 1})};
  problem.permutation.strides[0] = stride;
  HostTensor permutation(problem.permutation), offsets(problem.offsets);
  const auto plan = plan_permutation(Device::cpu(threads), problem);
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  plan.run({}, {tensor.data(), permutation.data(), offsets.data()}, workspace.get());

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
  for (std::int64_t s = 0; s <= count; ++s) {
    const auto below =
        std::count_if(ids.begin(), ids.end(), [&](std::int64_t id) { return id >= 0 && id < s; });
    ASSERT_EQ(load_index(dtype, offsets.data(), s), below) << "offset " << s;
    if (count > 100) s += count / 50;
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
      expect_sorted(random_ids(1000, 0, 30, 1), 31, id_dtype, dtype, 1);
    }
  }
}

TEST(segment_permutation, one_two_and_three_digits) {
  for (std::int64_t count : {1, 2047, 2048, 2049, 70000, 1 << 22, (1 << 22) + 1}) {
    expect_sorted(random_ids(60000, -2, count + 2, 3), count, DType::i64, DType::i64, 2);
  }
}

TEST(segment_permutation, same_for_any_number_of_threads) {
  const Ids ids = random_ids(200000, 0, 900, 5);
  for (int threads : {1, 2, 3}) expect_sorted(ids, 901, DType::i32, DType::i32, threads);
}

TEST(segment_permutation, ids_out_of_range_come_last) {
  constexpr auto kMin = std::numeric_limits<std::int64_t>::min();
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
  expect_sorted({kMax, 1, kMin, 0, -1, 2, 3, 1, kMax, std::int64_t{1} << 32}, 3, DType::i64,
                DType::i64, 2);
}

TEST(segment_permutation, sizes_of_zero) {
  expect_sorted({}, 0, DType::i64, DType::i64, 2);
  expect_sorted({}, 5, DType::i32, DType::i64, 2);
  expect_sorted({0, 3, -1}, 0, DType::i64, DType::i64, 2);
}

TEST(segment_permutation, strides) {
  expect_sorted(random_ids(300, 0, 9, 8), 10, DType::i32, DType::i64, 2, 3);
  expect_sorted(random_ids(300, 0, 9, 8), 10, DType::i64, DType::i32, 2, -2);
}

}  // namespace
}  // namespace pullback

// The device toolkit on a GPU, against the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "cuda/on_device.hpp"
#include "cuda/tensor_map.hpp"

namespace pullback::cuda {
namespace {

TEST_F(OnDeviceToolkit, vectors_keep_their_bytes) {
  std::vector<std::uint32_t> from(4096);
  for (std::size_t i = 0; i < from.size(); ++i)
    from[i] = static_cast<std::uint32_t>(i * 2654435761u);
  EXPECT_EQ(
      run<std::uint32_t>("vectors", "device/memory.cuh",
                         kIndex + std::string("store_vector(static_cast<float*>(b.to) + 4 * i, "
                                              "load_vector(static_cast<const float*>(b.from) "
                                              "+ 4 * i));"),
                         from, from.size(), 4, 256),
      from);
}

TEST_F(OnDeviceToolkit, hinted_vectors_keep_their_bytes) {
  std::vector<std::uint32_t> from(4096);
  for (std::size_t i = 0; i < from.size(); ++i)
    from[i] = static_cast<std::uint32_t>(i * 2654435761u);
  for (const std::string stay : {"true", "false"}) {
    EXPECT_EQ(run<std::uint32_t>("hinted_" + stay, "device/cache_hint.cuh",
                                 kIndex + ("const CacheHint<" + stay +
                                           "> hint;\nhint.store(static_cast<uint32_t*>(b.to) + 4 * "
                                           "i, hint.load(static_cast<const uint32_t*>(b.from) + 4 "
                                           "* i));"),
                                 from, from.size(), 4, 256),
              from);
  }
}

TEST_F(OnDeviceToolkit, warps_reduce_to_the_same_bits_in_all_lanes) {
  std::vector<float> from(1024);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = std::sin(static_cast<float>(i));
  from[40] = std::numeric_limits<float>::quiet_NaN();  // loses in the maximum
  const auto reduce = [&](const std::string& name) {
    return run<float>(name, "device/warp.cuh",
                      kIndex + ("static_cast<float*>(b.to)[i] = " + name +
                                "(static_cast<const float*>(b.from)[i]);"),
                      from, from.size(), 8, 128);
  };
  const auto sums = reduce("warp_sum"), maxima = reduce("warp_max");
  for (std::size_t warp = 0; warp < from.size(); warp += 32) {
    double sum = 0;
    float maximum = -std::numeric_limits<float>::infinity();
    for (std::size_t i = warp; i < warp + 32; ++i) {
      sum += from[i];
      if (from[i] > maximum) maximum = from[i];
    }
    for (std::size_t i = warp; i < warp + 32; ++i) {
      EXPECT_EQ(maxima[i], maximum);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(sums[i]), std::bit_cast<std::uint32_t>(sums[warp]));
      if (std::isnan(sum)) {
        EXPECT_TRUE(std::isnan(sums[i]));
      } else {
        EXPECT_NEAR(sums[i], sum, 1e-5);
      }
    }
  }
}

TEST_F(OnDeviceToolkit, warps_reduce_integers) {
  std::vector<std::int32_t> from(1024);
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<std::int32_t>(i * 2654435761u) / 64;
  }
  const auto reduce = [&](const std::string& name) {
    return run<std::int32_t>(
        name, "device/warp_integer.cuh",
        kIndex + ("static_cast<int*>(b.to)[i] = " + name + "(static_cast<const int*>(b.from)[i]);"),
        from, from.size(), 8, 128);
  };
  const auto sums = reduce("warp_sum_integer"), maxima = reduce("warp_max_integer");
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto first = from.begin() + static_cast<std::ptrdiff_t>(i / 32 * 32);
    EXPECT_EQ(sums[i], std::accumulate(first, first + 32, 0));
    EXPECT_EQ(maxima[i], *std::max_element(first, first + 32));
  }
}

TEST_F(OnDeviceToolkit, threads_count_in_shared_memory) {
  const std::vector<std::uint32_t> from(256);
  const auto counts = run<std::uint32_t>(
      "count_shared", "device/shared.cuh",
      kIndex + std::string("__shared__ uint32_t count[8];\n"
                           "if (i < 8) count[i] = 0;\n__syncthreads();\n"
                           "count_shared(shared_address(count + (i % 8 < 3 ? 0 : i % 8)));\n"
                           "__syncthreads();\n"
                           "if (i < 8) static_cast<uint32_t*>(b.to)[i] = count[i];"),
      from, 8, 1, 256);
  EXPECT_EQ(counts, (std::vector<std::uint32_t>{96, 0, 0, 32, 32, 32, 32, 32}));
}

TEST_F(OnDeviceToolkit, loads_that_lanes_leave_out_are_zero) {
  std::vector<std::uint16_t> from(256);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i + 1);
  const auto got = run<std::uint16_t>(
      "load_below", "device/memory.cuh",
      kIndex + std::string("static_cast<uint16_t*>(b.to)[i] = load_below(static_cast<const "
                           "uint16_t*>(b.from) + i, static_cast<int>(i % 7), 4);"),
      from, from.size(), 1, 256);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i % 7 < 4 ? i + 1 : 0) << i;
}

TEST_F(OnDeviceToolkit, bulk_copies_count_their_bytes) {
  if (device_info(0).major < 9) GTEST_SKIP() << "needs sm_90";
  std::vector<std::uint32_t> from(8192);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint32_t>(i ^ 0x5a5a5a);
  // Two rounds through one buffer and barrier: both phases of its parity.
  const auto to = run<std::uint32_t>("bulk", "device/bulk.cuh", R"(
  __shared__ alignas(128) uint32_t buffer[1024];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
  }
  __syncthreads();
  for (uint32_t round = 0; round < 2; ++round) {
    const auto begin = (int64_t{blockIdx.x} * 2 + round) * 1024;
    if (threadIdx.x == 0) {
      barrier_expect_bytes(&barrier, sizeof(buffer));
      bulk_load(buffer, static_cast<const uint32_t*>(b.from) + begin, sizeof(buffer), &barrier);
    }
    barrier_wait(&barrier, round % 2);
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
      static_cast<uint32_t*>(b.to)[begin + i] = buffer[i];
    }
    __syncthreads();
  })",
                                     from, from.size(), 4, 128);
  EXPECT_EQ(to, from);
}

// A tensor [2,3,100,40] whose rows lie apart, in boxes of 64 columns and 32 rows, the last of which
// reach beyond it; 0 there, and swizzled as products want it.
TEST_F(OnDeviceToolkit, boxes_of_a_tensor_are_copied) {
  const DeviceInfo& device = device_info(0);
  if (device.major < 9) GTEST_SKIP() << "needs sm_90";
  constexpr std::int64_t kColumns = 40, kRows = 100, kThird = 3, kFourth = 2, kStep = 48;
  constexpr int kBoxColumns = 64, kBoxRows = 32, kBoxes = 4;
  const TensorMapShape shape{DType::bf16,
                             {kColumns, kRows, kThird, kFourth},
                             {kThird * kStep, kStep, kRows * kThird * kStep},
                             kBoxColumns,
                             kBoxRows};
  ASSERT_TRUE(has_tensor_map(shape));
  std::vector<std::uint16_t> from(kFourth * kRows * kThird * kStep);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i + 1);
  struct Parameters {
    device::TensorMap map;
    void* to;
  };
  const DeviceMemory input(device, std::as_bytes(std::span(from)));
  std::vector<std::uint16_t> to(kFourth * kThird * kBoxes * kBoxRows * kBoxColumns);
  const DeviceMemory output(device, to.size() * sizeof(to[0]));
  PlannedKernel<Parameters> kernel(
      {.name = "test_boxes",
       .file = "device/boxes.cuh",
       .function = R"([](const auto& p) {
  __shared__ alignas(1024) uint16_t box[32 * 64];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 32);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect_more_bytes(&barrier, sizeof(box));
    load_box(shared_address(box), p.map, 0, blockIdx.x % 4 * 32, blockIdx.x / 4 % 3,
             blockIdx.x / 12, &barrier);
  }
  const bool early = barrier_test(&barrier, 0);
  __syncthreads();
  barrier_arrive(&barrier);
  barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < 32 * 64; i += 32) {
    const int row = i / 64, column = i % 64;
    const uint16_t value = box[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8];
    static_cast<uint16_t*>(p.to)[blockIdx.x * (32 * 64) + i] = early ? 0xffff : value;
  }
})",
       .parameters = "decltype([] { struct Parameters { TensorMap map; void* to; }; "
                     "return Parameters(); }())",
       .threads = 32},
      device);
  kernel.shape.grid[0] = kFourth * kThird * kBoxes;
  const OwnStream stream(device);
  const DeviceGuard guard(device);
  const auto map = tensor_map(shape, input.data());
  ASSERT_TRUE(map);
  kernel.launch({stream.get()}, {*map, output.data()});
  check(driver().cuMemcpyDtoHAsync(to.data(), address(output.data()), to.size() * sizeof(to[0]),
                                   stream.get()),
        "cuMemcpyDtoHAsync");
  stream.synchronize();
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(to.size()); ++i) {
    const std::int64_t column = i % kBoxColumns, row = i / kBoxColumns % (kBoxes * kBoxRows);
    const std::int64_t third = i / (kBoxColumns * kBoxRows * kBoxes) % kThird;
    const std::int64_t fourth = i / (kBoxColumns * kBoxRows * kBoxes * kThird);
    const bool exists = column < kColumns && row < kRows;
    const auto at = ((fourth * kRows + row) * kThird + third) * kStep + column;
    ASSERT_EQ(to[static_cast<std::size_t>(i)], exists ? from[static_cast<std::size_t>(at)] : 0)
        << column << ", " << row << ", " << third << ", " << fourth;
  }
}

TEST(tensor_maps, are_of_16_byte_steps) {
  const auto has = [](DType dtype, std::array<std::int64_t, 4> sizes,
                      std::array<std::int64_t, 3> strides) {
    return has_tensor_map({dtype, sizes, strides, 64, 64});
  };
  EXPECT_TRUE(has(DType::bf16, {64, 100, 2, 3}, {128, 64, 12800}));
  EXPECT_TRUE(has(DType::f16, {40, 1, 1, 1}, {0, -3, 1}));  // never stepped by
  EXPECT_FALSE(has(DType::f32, {64, 100, 2, 3}, {128, 64, 12800}));
  EXPECT_FALSE(has(DType::bf16, {64, 0, 2, 3}, {128, 64, 12800}));
  EXPECT_FALSE(has(DType::bf16, {64, 100, 2, 3}, {0, 64, 12800}));
  EXPECT_FALSE(has(DType::bf16, {64, 100, 2, 3}, {128, -64, 12800}));
  EXPECT_FALSE(has(DType::bf16, {64, 100, 2, 3}, {124, 64, 12800}));
  EXPECT_FALSE(has(DType::bf16, {64, 100, 2, 3}, {128, 64, std::int64_t{1} << 39}));
}

TEST_F(OnDeviceToolkit, bulk_copies_store_and_add) {
  if (device_info(0).major < 9) GTEST_SKIP() << "needs sm_90";
  std::vector<float> from(2048);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i) - 1000;
  const auto to = run<float>("bulk_out", "device/bulk_out.cuh", R"(
  __shared__ alignas(16) float buffer[2048];
  for (int i = threadIdx.x; i < 2048; i += 128) buffer[i] = static_cast<const float*>(b.from)[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    float* const to = static_cast<float*>(b.to);
    bulk_store(to, shared_address(buffer), sizeof(buffer));
    bulk_commit();
    bulk_wait();
    bulk_add(to, shared_address(buffer), sizeof(buffer));
    bulk_add(to, shared_address(buffer), sizeof(buffer));
    bulk_commit();
    bulk_wait_read();
    bulk_wait();
  })",
                             from, 2048, 1, 128);
  for (std::size_t i = 0; i < to.size(); ++i) EXPECT_EQ(to[i], 3 * from[i]);
}

TEST_F(OnDeviceToolkit, blocks_of_a_cluster_write_to_each_other) {
  if (device_info(0).major < 9) GTEST_SKIP() << "needs sm_90";
  const auto to = run<float>("cluster", "device/cluster.cuh", R"(
  __shared__ float slot[8];
  cluster_barrier();
  if (threadIdx.x < cluster_size()) {
    store_remote(remote_address(&slot[cluster_rank()], threadIdx.x), 1.0f + cluster_rank());
  }
  cluster_barrier();
  if (threadIdx.x < 8) static_cast<float*>(b.to)[blockIdx.x * 8 + threadIdx.x] = slot[threadIdx.x];)",
                             std::vector<float>(1), 128, 16, 32, 8);
  for (std::size_t i = 0; i < to.size(); ++i) EXPECT_EQ(to[i], 1.0f + static_cast<float>(i % 8));
}

TEST_F(OnDeviceToolkit, blocks_of_a_cluster_send_what_a_barrier_counts) {
  if (device_info(0).major < 9) GTEST_SKIP() << "needs sm_90";
  // A number of 4, of 8 and of 16 bytes from each block to each. The file has all that it takes.
  const auto to = run<float>("send", "ops/entmax/cuda/smxx_group.cuh", R"(
  struct Slot {
    float four[4];
    double one;
    float single;
  };
  __shared__ __align__(16) Slot slots[8];
  __shared__ uint64_t all_here;
  if (threadIdx.x == 0) {
    barrier_init(&all_here, 1);
    barrier_init_fence();
    barrier_expect_bytes(&all_here, cluster_size() * 28);
  }
  cluster_arrive();
  cluster_wait();
  const float own = 1.0f + cluster_rank();
  if (threadIdx.x < cluster_size()) {
    const uint32_t barrier = remote_address(&all_here, threadIdx.x);
    const Slot& slot = slots[cluster_rank()];
    send(remote_address(&slot.single, threadIdx.x), own, barrier);
    send(remote_address(&slot.one, threadIdx.x), 1.0 / own, barrier);
    const float four[] = {own, 2 * own, 3 * own, 4 * own};
    send(remote_address(slot.four, threadIdx.x), four, barrier);
  }
  barrier_wait(&all_here, 0);
  if (threadIdx.x < 8) {
    const Slot& slot = slots[threadIdx.x];
    const bool right = slot.one == 1.0 / slot.single && slot.four[0] == slot.single &&
                       slot.four[3] == 4 * slot.single;
    static_cast<float*>(b.to)[blockIdx.x * 8 + threadIdx.x] = right ? slot.single : 0;
  })",
                             std::vector<float>(1), 128, 16, 32, 8);
  for (std::size_t i = 0; i < to.size(); ++i) EXPECT_EQ(to[i], 1.0f + static_cast<float>(i % 8));
}

}  // namespace
}  // namespace pullback::cuda

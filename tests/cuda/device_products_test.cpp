// Products of warpgroups on a GPU, against the host.
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "cuda/on_device.hpp"

namespace pullback::cuda {
namespace {

// s = q kᵀ, then out = s v with s in registers: small integers, which no step rounds.
TEST_F(OnDeviceToolkit, warpgroups_multiply) {
  if (device_info(0).arch() != 90) GTEST_SKIP() << "needs sm_90";
  constexpr int kQueries = 64, kKeys = 96, kColumns = 64;
  constexpr int kInputs = (kQueries + 2 * kKeys) * kColumns;
  std::vector<int> numbers(kInputs);
  std::vector<std::uint16_t> from(kInputs);
  for (int i = 0; i < kInputs; ++i) {
    numbers[i] = (i * 7 + i / 11 + i / 64 * 3) % 5 - 2;
    from[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(float(numbers[i])) >> 16);
  }
  const auto to = run<float>("wgmma", "device/wgmma.cuh", R"(
  __shared__ alignas(1024) uint16_t tiles[256 * 64];
  for (int i = threadIdx.x; i < 256 * 64; i += 128) {
    const int row = i / 64, column = i % 64;
    tiles[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8] =
        static_cast<const uint16_t*>(b.from)[i];
  }
  fence_async_proxy();
  __syncthreads();
  const uint32_t q = static_cast<uint32_t>(__cvta_generic_to_shared(tiles));
  const uint32_t k = q + 64 * 128, v = k + 96 * 128;
  float s[12][4] = {}, out[8][4] = {};
  keep_in_place(s);
  product_fence();
  #pragma unroll
  for (int step = 0; step < 4; ++step) {
    product_of_shared<bf16>(s, MatrixAddress(q).at(step * 32), MatrixAddress(k).at(step * 32),
                            step > 0);
  }
  product_commit();
  product_wait<0>();
  keep_in_place(s);
  uint32_t a[6][4];
  #pragma unroll
  for (int i = 0; i < 24; ++i) {
    const float* const pair = &s[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
    a[i / 4][i % 4] = pack<bf16>(pair[0], pair[1]);
  }
  keep_in_place(out);
  product_fence();
  #pragma unroll
  for (int step = 0; step < 6; ++step) {
    product_of_registers<bf16>(out, a[step], MatrixAddress(v).at(step * 2048));
  }
  product_commit();
  product_wait<0>();
  keep_in_place(out);
  float* const to = static_cast<float*>(b.to);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int i = 0; i < 20 * 4; ++i) {
    const int n = i / 4, at = column + i % 2, r = row + i % 4 / 2 * 8;
    if (n < 12) to[r * 96 + n * 8 + at] = s[n % 12][i % 4];
    if (n >= 12) to[64 * 96 + r * 64 + (n - 12) * 8 + at] = out[(n + 4) % 8][i % 4];
  })",
                             from, kQueries * (kKeys + kColumns), 1, 128, 1, true);
  const int* const q = numbers.data();
  const int* const k = q + kQueries * kColumns;
  const int* const v = k + kKeys * kColumns;
  std::vector<float> expected(to.size());
  for (int i = 0; i < kQueries; ++i) {
    for (int j = 0; j < kKeys; ++j) {
      int sum = 0;
      for (int d = 0; d < kColumns; ++d) sum += q[i * kColumns + d] * k[j * kColumns + d];
      expected[i * kKeys + j] = static_cast<float>(sum);
      for (int d = 0; d < kColumns; ++d) {
        expected[kQueries * kKeys + i * kColumns + d] +=
            static_cast<float>(sum * v[j * kColumns + d]);
      }
    }
  }
  EXPECT_EQ(to, expected);
}

// d = aᵀ b, of all of b's 64 columns and of the last 32: small integers, which no step rounds.
TEST_F(OnDeviceToolkit, warpgroups_multiply_transposed) {
  if (device_info(0).arch() != 90) GTEST_SKIP() << "needs sm_90";
  constexpr int kRows = 32, kColumns = 64;
  std::vector<int> numbers(2 * kRows * kColumns);
  std::vector<std::uint16_t> from(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<int>((i * 7 + i / 11 + i / 64 * 3) % 5) - 2;
    from[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(float(numbers[i])) >> 16);
  }
  const auto to = run<float>("wgmma_transposed", "device/wgmma.cuh", R"(
  __shared__ alignas(1024) uint16_t tiles[64 * 64];
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    const int row = i / 64, column = i % 64;
    tiles[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8] =
        static_cast<const uint16_t*>(b.from)[i];
  }
  fence_async_proxy();
  __syncthreads();
  const uint32_t rows = static_cast<uint32_t>(__cvta_generic_to_shared(tiles));
  const uint32_t columns = rows + 32 * 128;
  float all[8][4] = {}, half[4][4] = {};
  keep_in_place(all);
  keep_in_place(half);
  product_fence();
  #pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint64_t a = MatrixAddress(rows).at(step * 2048);
    product_of_transposed<bf16>(all, a, MatrixAddress(columns).at(step * 2048), step > 0);
    product_of_transposed<bf16>(half, a, MatrixAddress(columns + 64).at(step * 2048), step > 0);
  }
  product_commit();
  product_wait<0>();
  keep_in_place(all);
  keep_in_place(half);
  float* const to = static_cast<float*>(b.to);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int i = 0; i < 12 * 4; ++i) {
    const int n = i / 4, at = n * 8 + column + i % 2, r = row + i % 4 / 2 * 8;
    to[r * 96 + at] = n < 8 ? all[n % 8][i % 4] : half[n % 4][i % 4];
  })",
                             from, kColumns * 96, 1, 128, 1, true);
  std::vector<float> expected(to.size());
  for (int i = 0; i < kColumns; ++i) {
    for (int at = 0; at < 96; ++at) {
      const int j = at < kColumns ? at : at - 32;
      for (int r = 0; r < kRows; ++r) {
        expected[i * 96 + at] +=
            static_cast<float>(numbers[r * kColumns + i] * numbers[(kRows + r) * kColumns + j]);
      }
    }
  }
  EXPECT_EQ(to, expected);
}

}  // namespace
}  // namespace pullback::cuda

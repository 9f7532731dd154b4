// Outputs that go past the caches have the same bits as those that do not.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/element.hpp"
#include "driver/driver.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback {
namespace {

using driver::WorkspaceBuffer;

// Rows of many lengths, none among them.
BlockLayout uneven_layout(std::int64_t blocks_aside) {
  std::vector<std::uint8_t> present;
  for (std::int64_t r = 0; r < blocks_aside; ++r) {
    for (std::int64_t c = 0; c < blocks_aside; ++c)
      present.push_back((r * 7 + c * 11) % 13 < r % 12);
  }
  return BlockLayout(1, blocks_aside, blocks_aside, present);
}

template <class T>
std::vector<T> values(std::int64_t count, std::uint32_t state) {
  std::vector<T> result(static_cast<std::size_t>(count));
  for (T& value : result) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<T>(static_cast<float>(state >> 8) / (1 << 22) - 2);
  }
  return result;
}

template <class T>
void expect_same_bits(DType dtype, std::int64_t block, std::int64_t blocks_aside) {
  BlockSoftmaxProblem p;
  p.layout = std::make_shared<const BlockLayout>(uneven_layout(blocks_aside));
  p.block = block;
  p.scale = 0.5;
  const std::int64_t nnz = p.layout->nnz(), count = nnz * block * block;
  p.x = TensorSpec::contiguous(dtype, {1, nnz, block, block});
  ASSERT_GT(count * static_cast<std::int64_t>(sizeof(T)), 32 << 20);
  const Device device = Device::cpu(2);

  auto x = values<T>(count, 1), d_y = values<T>(count, 2);
  const std::size_t bytes = x.size() * sizeof(T);
  // Aligned: else outputs do not go past the caches.
  const WorkspaceBuffer apart(bytes), in_place(bytes);
  void *const out = apart.get().data, *const both = in_place.get().data;
  const auto run = [&](Pass pass, const BlockSoftmaxTensors& tensors) {
    const auto plan = make_plan(device, p, pass);
    plan.run({}, tensors, WorkspaceBuffer(plan.workspace_bytes()).get());
  };
  run(Pass::forward, {.x = x.data(), .y = out});
  std::memcpy(both, x.data(), bytes);
  run(Pass::forward, {.x = both, .y = both});
  EXPECT_EQ(std::memcmp(out, both, bytes), 0);

  run(Pass::backward, {.y = x.data(), .d_y = d_y.data(), .d_x = out});
  std::memcpy(both, d_y.data(), bytes);
  run(Pass::backward, {.y = x.data(), .d_y = both, .d_x = both});
  EXPECT_EQ(std::memcmp(out, both, bytes), 0);
}

TEST(BlockSoftmaxStream, f32_block_16) { expect_same_bits<float>(DType::f32, 16, 290); }
TEST(BlockSoftmaxStream, f32_block_128) { expect_same_bits<float>(DType::f32, 128, 37); }
TEST(BlockSoftmaxStream, bf16_block_32) { expect_same_bits<bfloat16>(DType::bf16, 32, 205); }

}  // namespace
}  // namespace pullback

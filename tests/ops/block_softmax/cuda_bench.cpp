// Layouts of long documents; the batch is as large as brings the scores to 2^27 elements.
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "driver/block_layout.hpp"
#include "driver/case.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::driver {

std::vector<Case> block_softmax_cuda_bench() {
  std::vector<Case> cases;
  const auto add = [&](std::string name, std::int64_t b, bool full_only,
                       const std::function<BlockLayout()>& layout) {
    Case test;
    test.op = "block_softmax";
    test.name = std::move(name);
    test.options = {{"scale", "0.125"}};
    test.dtypes = {DType::f32, DType::bf16};
    test.full_only = full_only;
    test.inputs = [=](DType dtype, Random& random) {
      const BlockLayout blocks = layout();
      const std::int64_t elements = blocks.nnz() * b * b;
      const std::int64_t Z = std::max<std::int64_t>(1, (std::int64_t{1} << 27) / elements);
      return TensorMap{{"layout", layout_tensor(blocks, DType::u8)},
                       {"x", normal_tensor(dtype, {Z, blocks.nnz(), b, b}, random, 2)},
                       {"d_y", normal_tensor(dtype, {Z, blocks.nnz(), b, b}, random)}};
    };
    cases.push_back(std::move(test));
  };
  for (const std::int64_t seq_len : {4096, 16384, 65536}) {
    const std::int64_t heads = seq_len == 65536 ? 1 : 4;
    for (const std::int64_t b : {16, 32, 64, 128}) {
      const bool full_only = seq_len == 16384 || b == 32;
      // The same tokens are seen at every block size: windows of 192, and 64 random and global ones
      // each, at least one block of each kind.
      const std::int64_t each = std::max<std::int64_t>(64 / b, 1);
      add(fmt::format("BigBird block {} S {}", b, seq_len), b, full_only, [=] {
        return make_layout(BigBirdSparsity{.num_heads = heads,
                                           .block = b,
                                           .different_layout_per_head = true,
                                           .num_random_blocks = each,
                                           .num_sliding_window_blocks = 3 * each,
                                           .num_global_blocks = each},
                           seq_len);
      });
      add(fmt::format("Fixed block {} S {}", b, seq_len), b, full_only, [=] {
        return make_layout(FixedSparsity{.num_heads = heads,
                                         .block = b,
                                         .num_local_blocks = 2048 / b,
                                         .num_global_blocks = 1},
                           seq_len);
      });
    }
  }
  return cases;
}

}  // namespace pullback::driver

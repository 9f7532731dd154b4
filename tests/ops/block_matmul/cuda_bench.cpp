// The two products of attention, scores = Q Kᵀ and out = P V, over layouts of long documents; the
// batch is as large as brings the scores to 2^26 elements.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <span>

#include "driver/block_layout.hpp"
#include "driver/case.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::driver {

std::vector<Case> block_matmul_cuda_bench() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, std::int64_t b, bool full_only,
                       std::initializer_list<std::int64_t> head_dims,
                       const std::function<BlockLayout()>& layout) {
    for (const bool scores : {true, false}) {
      for (const std::int64_t head_dim : head_dims) {
        Case test;
        test.op = "block_matmul";
        test.name = fmt::format("{} D {} {}", name, head_dim, scores ? "sdd" : "dsd");
        test.options = {{"mode", scores ? "sdd" : "dsd"},
                        {"transpose-b", scores ? "true" : "false"}};
        test.dtypes = {DType::f32, DType::bf16};
        test.full_only = full_only;
        test.inputs = [=](DType dtype, Random& random) {
          const BlockLayout blocks = layout();
          const std::int64_t H = blocks.heads(), S = blocks.rows() * b;
          const std::int64_t Z =
              std::max<std::int64_t>(1, (std::int64_t{1} << 26) / (blocks.nnz() * b * b));
          const auto dense = [&] { return normal_tensor(dtype, {Z, H, S, head_dim}, random); };
          const auto sparse = [&] { return normal_tensor(dtype, {Z, blocks.nnz(), b, b}, random); };
          TensorMap inputs{{"layout", layout_tensor(blocks, DType::u8)}};
          inputs["a"] = scores ? dense() : sparse();
          inputs["b"] = dense();
          inputs["d_c"] = scores ? sparse() : dense();
          return inputs;
        };
        cases.push_back(std::move(test));
      }
    }
  };
  for (const std::int64_t seq_len : {4096, 16384, 65536}) {
    const std::int64_t heads = seq_len == 65536 ? 1 : 4;
    for (const std::int64_t b : {16, 32, 64, 128}) {
      const bool full_only = seq_len == 16384 || b == 32;
      // The same tokens are seen at every block size: windows of 192, and 64 random and global ones
      // each, at least one block of each kind.
      const std::int64_t each = std::max<std::int64_t>(64 / b, 1);
      add(fmt::format("BigBird block {} S {}", b, seq_len), b, full_only, {64, 128}, [=] {
        return make_layout(BigBirdSparsity{.num_heads = heads,
                                           .block = b,
                                           .different_layout_per_head = true,
                                           .num_random_blocks = each,
                                           .num_sliding_window_blocks = 3 * each,
                                           .num_global_blocks = each},
                           seq_len);
      });
      add(fmt::format("Fixed block {} S {}", b, seq_len), b, full_only, {64, 128}, [=] {
        return make_layout(FixedSparsity{.num_heads = heads,
                                         .block = b,
                                         .num_local_blocks = 2048 / b,
                                         .num_global_blocks = 1},
                           seq_len);
      });
    }
  }
  add("all 364 x 364 blocks of 128, more than 2^31+8 elements", 128, true, {16},
      [] { return make_layout(DenseSparsity{.block = 128}, 364 * 128); });
  for (Case& test : std::span(cases).last(2)) test.dtypes = {DType::bf16};
  return cases;
}

}  // namespace pullback::driver

// 16384 tokens of 1536 or 2048 channels in all, as the tables of FlashAttention have them:
// sequences of 512 to 16384, heads of 64 to 256. scripts/gpu_rivals.py knows these cases by their
// names.
#include <fmt/format.h>

#include <functional>

#include "driver/block_layout.hpp"
#include "ops/attention/case_setup.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::driver {
namespace {

using namespace attention_setup;

void add_dense(std::vector<Case>& cases) {
  for (const std::int64_t head_dim : {64, 96, 128, 192, 256}) {
    const std::int64_t heads = head_dim == 64 ? 32 : head_dim < 192 ? 16 : 8;
    for (const std::int64_t length : {512, 1024, 2048, 8192, 16384}) {
      const Setup setup{.batch = 16384 / length,
                        .query = length,
                        .key = length,
                        .heads = heads,
                        .kv_heads = heads,
                        .head_dim = head_dim,
                        .value_dim = head_dim,
                        .dtypes = {DType::bf16}};
      const std::string shape =
          fmt::format("B{} H{} S{} D{}", setup.batch, heads, length, head_dim);
      for (const bool causal : {false, true}) {
        OptionMap options;
        if (causal) options["causal"] = "bottom-right";
        Case test = make_case(shape + (causal ? " causal" : ""), setup, options);
        test.same_inputs = shape;
        test.full_only = length == 16384;
        cases.push_back(std::move(test));
      }
    }
  }
}

// A quarter of the blocks, anywhere, another quarter for each head; and all of them.
void add_block_sparse(std::vector<Case>& cases) {
  for (const std::int64_t head_dim : {64, 128}) {
    const Setup setup{.batch = 1,
                      .query = 16384,
                      .key = 16384,
                      .heads = 8,
                      .kv_heads = 8,
                      .head_dim = head_dim,
                      .value_dim = head_dim,
                      .dtypes = {DType::bf16}};
    const std::string shape = fmt::format("B1 H8 S16384 D{}", head_dim);
    add(cases, shape, setup);
    for (const std::int64_t block : {16, 32, 64, 128}) {
      Case test = make_case(fmt::format("{} 25 % of blocks of {}", shape, block),
                            with_blocks(setup, {.block = block, .heads = 8, .density = 0.25}),
                            {{"block", fmt::format("{}", block)}});
      test.full_only = block < 64;
      cases.push_back(std::move(test));
    }
  }
}

// Layouts of long documents: a few rows and columns have all blocks, the others 6 to 9, or 67 with
// Fixed.
void add_layouts(std::vector<Case>& cases) {
  constexpr std::int64_t kLength = 16384, kHeads = 8;
  for (const std::int64_t head_dim : {64, 128}) {
    for (const std::int64_t block : {64, 128}) {
      const auto add_one = [&](std::string_view name, const std::function<BlockLayout()>& layout) {
        Setup setup{.batch = 1,
                    .query = kLength,
                    .key = kLength,
                    .heads = kHeads,
                    .kv_heads = kHeads,
                    .head_dim = head_dim,
                    .value_dim = head_dim,
                    .dtypes = {DType::bf16}};
        setup.change = [layout](TensorMap& inputs, const Setup&, Random&) {
          inputs["layout"] = layout_tensor(layout(), DType::u8);
        };
        Case test = make_case(
            fmt::format("B1 H{} S{} D{} {} block {}", kHeads, kLength, head_dim, name, block),
            setup, {{"block", fmt::format("{}", block)}});
        test.full_only = block > 64;
        cases.push_back(std::move(test));
      };
      add_one("BigBird", [block] {
        return make_layout(BigBirdSparsity{.num_heads = kHeads,
                                           .block = block,
                                           .different_layout_per_head = true,
                                           .num_random_blocks = 3,
                                           .num_sliding_window_blocks = 3,
                                           .num_global_blocks = 1},
                           kLength);
      });
      add_one("Longformer", [block] {
        return make_layout(BSLongformerSparsity{.block = block, .num_sliding_window_blocks = 7},
                           kLength);
      });
      add_one("Fixed", [block] {
        return make_layout(
            FixedSparsity{.block = block, .num_local_blocks = 4, .num_global_blocks = 1}, kLength);
      });
    }
  }
}

}  // namespace

std::vector<Case> attention_cuda_bench() {
  std::vector<Case> cases;
  add_dense(cases);
  add_block_sparse(cases);
  add_layouts(cases);
  const auto add_one = [&](std::string name, const Setup& setup, OptionMap options = {}) {
    add(cases, std::move(name), setup, std::move(options));
  };
  Setup setup{.batch = 2,
              .query = 8192,
              .key = 8192,
              .heads = 16,
              .kv_heads = 16,
              .head_dim = 128,
              .value_dim = 128,
              .dtypes = {DType::bf16}};
  add_one("B2 H16 S8192 D128 window 1024", setup, {{"window", "1023,0"}});
  for (const std::int64_t head_dim : {64, 128}) {
    setup.head_dim = setup.value_dim = head_dim;
    add_one(fmt::format("B2 H16 S8192 D{} dropout 0.1", head_dim), setup,
            {{"dropout", "0.1"}, {"seed", "1"}});
  }
  setup.kv_heads = 2;
  add_one("B2 H16 over 2 S8192 D128 causal", setup, {{"causal", "bottom-right"}});
  setup = {.batch = 2,
           .query = 4096,
           .key = 4096,
           .heads = 16,
           .kv_heads = 16,
           .head_dim = 128,
           .value_dim = 128,
           .dtypes = {DType::f32}};
  for (const std::int64_t head_dim : {64, 128}) {
    setup.head_dim = setup.value_dim = head_dim;
    add_one(fmt::format("B2 H16 S4096 D{}", head_dim), setup);
    add_one(fmt::format("B2 H16 S4096 D{} causal", head_dim), setup, {{"causal", "bottom-right"}});
  }
  setup.dtypes = {DType::bf16};
  for (const std::int64_t head_dim : {64, 128}) {
    setup.head_dim = setup.value_dim = head_dim;
    add_one(fmt::format("B2 H16 S4096 D{} softcap 50", head_dim), setup, {{"softcap", "50"}});
  }
  for (const std::int64_t head_dim : {32, 64, 128}) {
    const std::int64_t heads = head_dim == 32 ? 8 : 16;
    setup.heads = setup.kv_heads = heads;
    setup.head_dim = setup.value_dim = head_dim;
    for (const std::int64_t batch : {2, 1}) {
      setup.bias = {batch, heads, 4096, 4096};
      add_one(fmt::format("B2 H{0} S4096 D{1} bias [{2},{0},S,S]", heads, head_dim, batch), setup);
    }
  }
  for (const std::int64_t head_dim : {64, 128}) {
    setup.head_dim = setup.value_dim = head_dim;
    setup.query = setup.key = 4096;
    setup.bias = {2, 1, 1, 4096};
    add_one(fmt::format("B2 H16 S4096 D{} bias [2,1,1,S]", head_dim), setup);
    // Rows that do not begin at 16 bytes.
    setup.query = setup.key = 4095;
    setup.bias = {1, 16, 4095, 4095};
    add_one(fmt::format("B2 H16 S4095 D{} bias [1,16,S,S]", head_dim), setup);
  }
  // Images of 197 patches, and windows of 49.
  struct Vision {
    std::int64_t batch, length, heads, head_dim;
  };
  for (const auto& [batch, length, heads, head_dim] :
       {Vision{64, 197, 12, 64}, Vision{4096, 49, 3, 32}}) {
    setup.batch = batch;
    setup.query = setup.key = length;
    setup.heads = setup.kv_heads = heads;
    setup.head_dim = setup.value_dim = head_dim;
    setup.bias = {1, heads, length, length};
    add_one(fmt::format("B{} H{} S{} D{} bias [1,{},S,S]", batch, heads, length, head_dim, heads),
            setup);
  }
  setup = {.batch = 8200,
           .query = 128,
           .key = 128,
           .heads = 32,
           .kv_heads = 4,
           .head_dim = 64,
           .value_dim = 64,
           .dtypes = {DType::bf16}};
  add_one("B8200 H32 over 4 S128 D64, more than 2^31+8 elements", setup);
  cases.back().full_only = true;
  return cases;
}

}  // namespace pullback::driver

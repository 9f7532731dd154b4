#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "driver/block_layout.hpp"
#include "driver/case.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::driver {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// What a case has besides x, layout and d_y. Sizes of 0 mean "not given".
struct Extras {
  std::int64_t rpe_z = 0, rpe_h = 0;
  bool key_padding_mask = false, attn_mask = false;
  DType keep_dtype = DType::u8;  // of masks in keep mode; f64 stands for the dtype of x
};

BlockLayout layout_from(std::int64_t heads, std::int64_t rows, std::int64_t columns,
                        std::initializer_list<std::uint8_t> present) {
  return BlockLayout(heads, rows, columns, std::span(present.begin(), present.size()));
}

BlockLayout random_blocks(std::int64_t heads, std::int64_t rows, std::int64_t columns,
                          double density, Random& random) {
  std::vector<std::uint8_t> present(static_cast<std::size_t>(heads * rows * columns));
  for (auto& value : present) value = random.chance(density);
  return BlockLayout(heads, rows, columns, present);
}

HostTensor keep_mask(DType dtype, std::initializer_list<std::int64_t> shape, Random& random) {
  HostTensor mask(TensorSpec::contiguous(dtype, shape));
  for (std::int64_t i = 0; i < mask.numel(); ++i) mask.set(i, random.chance(0.7));
  return mask;
}

TensorMap inputs_of(const BlockLayout& layout, std::int64_t Z, std::int64_t b, const Extras& extras,
                    const OptionMap& options, DType dtype, Random& random) {
  const std::int64_t rows = layout.rows() * b, columns = layout.columns() * b;
  TensorMap inputs;
  inputs["layout"] = layout_tensor(layout);
  inputs["x"] = normal_tensor(dtype, {Z, layout.nnz(), b, b}, random, 2);
  inputs["d_y"] = normal_tensor(dtype, {Z, layout.nnz(), b, b}, random);
  if (extras.rpe_z > 0) {
    inputs["rpe"] = normal_tensor(dtype, {extras.rpe_z, extras.rpe_h, rows, columns}, random);
  }
  const DType keep_dtype = extras.keep_dtype == DType::f64 ? dtype : extras.keep_dtype;
  const auto mode = [&](std::string_view option, std::string_view fallback) {
    const auto it = options.find(option);
    return it == options.end() ? std::string(fallback) : it->second;
  };
  if (extras.key_padding_mask) {
    inputs["key_padding_mask"] = mode("key-padding-mode", "add") == "add"
                                     ? normal_tensor(dtype, {Z, columns}, random)
                                     : keep_mask(keep_dtype, {Z, columns}, random);
  }
  if (extras.attn_mask) {
    inputs["attn_mask"] = mode("attn-mask-mode", "keep") == "add"
                              ? normal_tensor(dtype, {rows, columns}, random)
                              : keep_mask(keep_dtype, {rows, columns}, random);
  }
  return inputs;
}

Case make_case(std::string name, BlockLayout layout, std::int64_t Z, std::int64_t b,
               Extras extras = {}, OptionMap options = {}) {
  Case test{.op = "block_softmax", .name = std::move(name), .options = options, .inputs = {}};
  test.inputs = [=](DType dtype, Random& random) {
    return inputs_of(layout, Z, b, extras, options, dtype, random);
  };
  return test;
}

// The case with its inputs changed after they are made.
template <class Change>
Case changed(Case test, const Change& change) {
  test.inputs = [make = test.inputs, change](DType dtype, Random& random) {
    TensorMap inputs = make(dtype, random);
    change(inputs, dtype);
    return inputs;
  };
  return test;
}

Case bench_case(std::string name, const BlockLayout& layout, std::int64_t b) {
  Case test = make_case(std::move(name), layout, 1, b, {}, {{"scale", "0.125"}});
  test.dtypes = {DType::f32, DType::bf16};
  return test;
}

}  // namespace

std::vector<Case> block_softmax_cases() {
  const BlockLayout mixed = layout_from(2, 3, 3,
                                        {1, 0, 1, 0, 1, 0, 1, 1, 1,  //
                                         0, 1, 0, 0, 0, 0, 1, 0, 1});
  const OptionMap all_add = {
      {"attn-mask-mode", "add"}, {"mask-gradients", "true"}, {"scale", "0.25"}};
  const OptionMap all_keep = {{"key-padding-mode", "keep"}};

  std::vector<Case> cases;
  cases.push_back(make_case("one block", layout_from(1, 1, 1, {1}), 1, 16));
  cases.push_back(make_case("empty row, unequal counts per head", mixed, 2, 16));
  cases.push_back(make_case("no block at all", layout_from(2, 2, 1, {0, 0, 0, 0}), 2, 16, {1, 2}));
  cases.push_back(make_case("Z 0", mixed, 0, 16, {1, 1, true, true}, all_add));
  cases.push_back(make_case("H 0", BlockLayout(0, 2, 2, {}), 2, 16, {1, 1, true, true}, all_add));
  cases.push_back(make_case("rows of at most 2 blocks",
                            make_layout(LocalSlidingWindowSparsity{.num_heads = 2}, 80), 2, 16));
  cases.push_back(make_case("more columns than rows",
                            layout_from(1, 2, 4, {1, 1, 1, 1, 0, 1, 0, 0}), 1, 32, {1, 1}));
  cases.push_back(make_case("block 48", mixed, 1, 48, {1, 2, true, true}, all_add));
  cases.push_back(make_case("block 128", layout_from(1, 1, 2, {1, 1}), 1, 128));
  cases.push_back(make_case("scale", mixed, 1, 16, {}, {{"scale", "0.3"}}));
  cases.push_back(
      make_case("scale of 0 and negative rpe", mixed, 1, 16, {2 - 1, 1}, {{"scale", "0"}}));
  cases.push_back(
      changed(make_case("scale of 0, columns side by side", mixed, 2, 16, {}, {{"scale", "0"}}),
              [](TensorMap& inputs, DType) {
                TensorSpec transposed = inputs["x"].spec();
                std::swap(transposed.strides[2], transposed.strides[3]);
                inputs["x"] = relaid(inputs["x"], transposed);
              }));
  cases.push_back(make_case("rpe per batch and head", mixed, 2, 16, {2, 2}));
  cases.push_back(make_case("rpe shared by the batch", mixed, 2, 16, {1, 2}));
  cases.push_back(make_case("rpe shared by the heads", mixed, 2, 16, {2, 1}));
  cases.push_back(make_case("rpe shared by all", mixed, 2, 16, {1, 1}));
  cases.push_back(make_case("key padding added", mixed, 2, 16, {0, 0, true}, all_add));
  cases.push_back(make_case("attention mask added", mixed, 2, 16, {0, 0, false, true}, all_add));
  cases.push_back(make_case("everything added", mixed, 2, 32, {1, 2, true, true}, all_add));
  cases.push_back(
      make_case("keep masks of u8", mixed, 2, 16, {0, 0, true, true, DType::u8}, all_keep));
  cases.push_back(
      make_case("keep masks of bool", mixed, 2, 16, {1, 1, true, true, DType::boolean}, all_keep));
  cases.push_back(
      make_case("keep masks of x's dtype", mixed, 2, 16, {0, 0, true, true, DType::f64}, all_keep));

  cases.push_back(changed(
      make_case("stride 0 d_y and rpe", mixed, 2, 16, {2, 2}), [](TensorMap& inputs, DType dtype) {
        Random random(5);
        const auto& shape = inputs["d_y"].spec().shape;
        inputs["d_y"] =
            broadcast(normal_tensor(dtype, {1, 1, 16, 16}, random), {shape[0], shape[1], 16, 16});
        inputs["rpe"] = broadcast(normal_tensor(dtype, {1, 2, 1, 48}, random), {2, 2, 48, 48});
      }));
  cases.push_back(
      changed(make_case("rows that see nothing", mixed, 2, 16, {1, 1, true, true}, all_add),
              [](TensorMap& inputs, DType) {
                const HostTensor& mask = inputs["attn_mask"];  // [48, 48]
                for (std::int64_t i = 0; i < 48 * 20; ++i) mask.set(i, -kInfinity);
              }));
  cases.back().finite_differences = false;  // a step along -inf is no step
  cases.push_back(
      changed(make_case("hidden rows and columns", mixed, 2, 16, {0, 0, true, true}, all_keep),
              [](TensorMap& inputs, DType) {
                const HostTensor& rows = inputs["attn_mask"];
                for (std::int64_t i = 48 * 10; i < 48 * 17; ++i) rows.set(i, 0);
                const HostTensor& keys = inputs["key_padding_mask"];  // [2, 48]
                for (std::int64_t i = 48; i < 48 + 16; ++i) keys.set(i, 0);
              }));
  cases.push_back(
      changed(make_case("NaN that a keep mask hides", mixed, 1, 16, {0, 0, true}, all_keep),
              [](TensorMap& inputs, DType) {
                const BlockLayout layout = *layout_of("block_softmax", inputs);
                for (const auto& block : layout.blocks()) {
                  if (block.column != 2) continue;
                  for (std::int64_t i = 0; i < 256; ++i) {
                    inputs["x"].set(block.rank * 256 + i, i % 2 ? kNaN : kInfinity);
                    inputs["d_y"].set(block.rank * 256 + i, kNaN);
                  }
                }
                for (std::int64_t i = 0; i < 48; ++i) inputs["key_padding_mask"].set(i, i < 32);
              }));
  cases.back().finite_differences = false;  // 0 · NaN in the objective
  cases.push_back(changed(make_case("NaN and infinities that are seen", mixed, 1, 16),
                          [](TensorMap& inputs, DType) {
                            const HostTensor& x = inputs["x"];
                            x.set(3, kNaN);
                            x.set(16 + 4, kInfinity);
                            x.set(32 + 5, -kInfinity);
                            for (std::int64_t i = 0; i < 16; ++i) {
                              x.set(48 + i, -kInfinity);        // the row's other block is finite
                              x.set(256 + 64 + i, -kInfinity);  // here too
                              x.set(64 + i, -kInfinity);        // both blocks of this row: nothing
                            }
                          }));
  cases.back().finite_differences = false;
  cases.push_back(changed(make_case("large scores", mixed, 1, 16), [](TensorMap& inputs, DType) {
    const HostTensor& x = inputs["x"];
    for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, 3e4 + x.get(i) * 16);
  }));
  cases.back().finite_differences = false;  // the step drowns in 3e4
  // As masks hold them; of row 20 all scores, which weigh the same.
  for (const char* scale : {"1", "-0.5", "0.3", "-0.1020620727"}) {
    cases.push_back(changed(make_case(fmt::format("scores as low as they go, scale {}", scale),
                                      mixed, 1, 16, {}, {{"scale", scale}}),
                            [](TensorMap& inputs, DType dtype) {
                              const HostTensor& x = inputs["x"];
                              for (std::int64_t i = 0; i < x.numel(); ++i) {
                                const bool whole = i / 16 % 16 == 4;
                                if (whole || i % 3 == 0) x.set(i, lowest_finite(dtype));
                              }
                            }));
    cases.back().finite_differences = false;
  }
  // Scores and their differences: what subtracts first has rows of 0 and 1, what multiplies first
  // may have NaN, but no other number.
  cases.push_back(changed(make_case("scores past f32", mixed, 1, 16, {}, {{"scale", "1e36"}}),
                          [](TensorMap& inputs, DType) {
                            const HostTensor& x = inputs["x"];
                            for (std::int64_t i = 0; i < x.numel(); ++i) {
                              x.set(i, std::round(200 * x.get(i)));
                            }
                          }));
  cases.back().finite_differences = false;
  cases.push_back(changed(
      make_case("exact: even rows of 16", layout_from(1, 2, 2, {1, 0, 0, 1}), 2, 16, {1, 1}),
      [](TensorMap& inputs, DType) {
        Random random(7);
        for (const char* name : {"x", "rpe"}) {
          const HostTensor& zero = inputs[name];
          for (std::int64_t i = 0; i < zero.numel(); ++i) zero.set(i, 0);
        }
        const HostTensor& d_y = inputs["d_y"];
        for (std::int64_t i = 0; i < d_y.numel(); ++i) {
          d_y.set(i, static_cast<double>(random.integer(-2, 2)));
        }
      }));
  cases.back().exact = true;
  const auto one_row = [](std::int64_t blocks) {
    return BlockLayout(1, 1, blocks,
                       std::vector<std::uint8_t>(static_cast<std::size_t>(blocks), 1));
  };
  cases.push_back(make_case("row of 32784 elements", one_row(2049), 1, 16));
  cases.push_back(make_case("row of 32784 elements, rpe", one_row(2049), 1, 16, {1, 1}));
  // Past the shared memory of a GPU's multiprocessor.
  cases.push_back(make_case("row of 65552 elements", one_row(4097), 1, 16));
  cases.back().dtypes = {DType::f64, DType::f32};
  // And of a cluster of them.
  const std::pair<DType, std::int64_t> too_long[] = {
      {DType::f64, 14400}, {DType::f32, 28800}, {DType::bf16, 57600}, {DType::f16, 57600}};
  for (const auto& [dtype, blocks] : too_long) {
    cases.push_back(make_case(fmt::format("row of {} elements of {}", 16 * blocks, name_of(dtype)),
                              one_row(blocks), 1, 16));
    cases.back().dtypes = {dtype};
    cases.back().full_only = true;
  }
  cases.push_back(make_case(
      "BigBird",
      make_layout(BigBirdSparsity{.num_heads = 2, .different_layout_per_head = true}, 256), 2, 16,
      {2, 2, true, true}, all_add));
  return cases;
}

Case block_softmax_fuzz(std::uint64_t seed) {
  Random random(seed);
  const std::int64_t heads = random.integer(1, 3), rows = random.integer(1, 5);
  const std::int64_t columns = random.integer(1, 5), Z = random.integer(1, 3);
  const std::int64_t b = 16 * random.integer(1, random.chance(0.2) ? 8 : 3);
  const BlockLayout layout =
      random_blocks(heads, rows, columns, 0.2 + 0.7 * random.uniform(), random);
  Extras extras;
  if (random.chance(0.5)) {
    extras.rpe_z = random.chance(0.5) ? 1 : Z;
    extras.rpe_h = random.chance(0.5) ? 1 : heads;
  }
  extras.key_padding_mask = random.chance(0.5);
  extras.attn_mask = random.chance(0.5);
  extras.keep_dtype = std::array{DType::u8, DType::boolean, DType::f64}[random.bits() % 3];
  const OptionMap options = {{"scale", fmt::format("{}", random.uniform() * 2 - 1)},
                             {"key-padding-mode", random.chance(0.5) ? "add" : "keep"},
                             {"attn-mask-mode", random.chance(0.5) ? "add" : "keep"},
                             {"mask-gradients", random.chance(0.7) ? "true" : "false"}};
  return make_case(fmt::format("fuzz {}", seed), layout, Z, b, extras, options);
}

// The same tokens are seen at every block size: windows of 192, and 64 random and global ones each,
// at least one block of each kind.
std::vector<Case> block_softmax_bench() {
  constexpr std::int64_t kSeqLen = 8192, kHeads = 4;
  std::vector<Case> cases;
  for (std::int64_t b : {16, 32, 64, 128}) {
    const std::int64_t each = std::max<std::int64_t>(64 / b, 1);
    cases.push_back(bench_case(fmt::format("BigBird block {} S {} H {}", b, kSeqLen, kHeads),
                               make_layout(BigBirdSparsity{.num_heads = kHeads,
                                                           .block = b,
                                                           .different_layout_per_head = true,
                                                           .num_random_blocks = each,
                                                           .num_sliding_window_blocks = 3 * each,
                                                           .num_global_blocks = each},
                                           kSeqLen),
                               b));
  }
  for (std::int64_t b : {16, 32, 64, 128}) {
    cases.push_back(bench_case(fmt::format("Fixed block {} S {} H {}", b, kSeqLen / 2, kHeads),
                               make_layout(FixedSparsity{.num_heads = kHeads,
                                                         .block = b,
                                                         .num_local_blocks = 512 / b,
                                                         .num_global_blocks = 128 / b},
                                           kSeqLen / 2),
                               b));
  }
  return cases;
}

}  // namespace pullback::driver

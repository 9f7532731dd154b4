#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "driver/block_layout.hpp"
#include "driver/case.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::driver {
namespace {

struct Shape {
  std::string mode = "sdd";
  bool transpose_a = false, transpose_b = false, transpose_c = false;
  std::int64_t Z = 1, b = 16;
  std::int64_t dense = 1;  // the dimension that is not of the layout: K of sdd, N of dsd, M of dds
};

enum class Values { normal, small_integers };

BlockLayout layout_from(std::int64_t heads, std::int64_t rows, std::int64_t columns,
                        std::initializer_list<std::uint8_t> present) {
  return BlockLayout(heads, rows, columns, std::span(present.begin(), present.size()));
}

TensorMap inputs_of(const BlockLayout& layout, const Shape& s, Values values, DType dtype,
                    Random& random) {
  const std::int64_t H = layout.heads();
  const std::int64_t R = layout.rows() * s.b, C = layout.columns() * s.b;
  const auto filled = [&](std::initializer_list<std::int64_t> shape) {
    return values == Values::normal ? normal_tensor(dtype, shape, random)
                                    : integer_tensor(dtype, shape, random, 1);
  };
  const auto dense = [&](std::int64_t rows, std::int64_t columns, bool transposed) {
    return transposed ? filled({s.Z, H, columns, rows}) : filled({s.Z, H, rows, columns});
  };
  const auto blocks = [&] { return filled({s.Z, layout.nnz(), s.b, s.b}); };
  TensorMap inputs;
  inputs["layout"] = layout_tensor(layout);
  if (s.mode == "sdd") {
    inputs["a"] = dense(R, s.dense, s.transpose_a);
    inputs["b"] = dense(s.dense, C, s.transpose_b);
    inputs["d_c"] = blocks();
  } else if (s.mode == "dsd") {
    inputs["a"] = blocks();
    inputs["b"] = dense(s.transpose_a ? R : C, s.dense, s.transpose_b);
    inputs["d_c"] = dense(s.transpose_a ? C : R, s.dense, s.transpose_c);
  } else {
    inputs["a"] = dense(s.dense, s.transpose_b ? C : R, s.transpose_a);
    inputs["b"] = blocks();
    inputs["d_c"] = dense(s.dense, s.transpose_b ? R : C, s.transpose_c);
  }
  return inputs;
}

Case make_case(std::string name, BlockLayout layout, Shape shape, Values values = Values::normal) {
  const auto text = [](bool value) { return std::string(value ? "true" : "false"); };
  Case test{.op = "block_matmul",
            .name = shape.mode + " " + name,
            .options = {{"mode", shape.mode},
                        {"transpose-a", text(shape.transpose_a)},
                        {"transpose-b", text(shape.transpose_b)},
                        {"transpose-c", text(shape.transpose_c)}},
            .inputs = {}};
  test.inputs = [=](DType dtype, Random& random) {
    return inputs_of(layout, shape, values, dtype, random);
  };
  return test;
}

std::string transposes_text(const Shape& shape) {
  std::string text;
  if (shape.transpose_a) text += "a^T ";
  if (shape.transpose_b) text += "b^T ";
  if (shape.transpose_c) text += "c^T ";
  return text.empty() ? "as stored" : text + "transposed";
}

Case bench_case(std::string name, const BlockLayout& layout, const Shape& shape) {
  Case test = make_case(std::move(name), layout, shape);
  test.dtypes = {DType::f32, DType::bf16};
  return test;
}

}  // namespace

std::vector<Case> block_matmul_cases() {
  // An empty row, an empty column, unequal counts per head.
  const BlockLayout mixed = layout_from(2, 3, 2,
                                        {1, 0, 0, 0, 1, 1,  //
                                         0, 0, 1, 0, 1, 0});
  std::vector<Case> cases;
  for (const char* mode : {"sdd", "dsd", "dds"}) {
    for (int bits = 0; bits < 8; ++bits) {
      const Shape shape{.mode = mode,
                        .transpose_a = (bits & 1) != 0,
                        .transpose_b = (bits & 2) != 0,
                        .transpose_c = (bits & 4) != 0,
                        .Z = 2,
                        .dense = 7};
      cases.push_back(make_case(transposes_text(shape), mixed, shape));
      // In whole vectors.
      Shape wide = shape;
      wide.dense = 64;
      cases.push_back(make_case("dense dimension 64, " + transposes_text(wide), mixed, wide));
    }
    const auto add = [&](std::string name, const BlockLayout& layout, Shape shape,
                         Values values = Values::normal) -> Case& {
      shape.mode = mode;
      cases.push_back(make_case(std::move(name), layout, shape, values));
      return cases.back();
    };
    add("one block", layout_from(1, 1, 1, {1}), {.dense = 64});
    add("no block at all", layout_from(2, 1, 2, {0, 0, 0, 0}), {.dense = 3});
    add("Z 0", mixed, {.Z = 0, .dense = 5});
    add("H 0", BlockLayout(0, 2, 2, {}), {.Z = 2, .dense = 5});
    add("dense dimension 0", mixed, {.dense = 0});
    add("dense dimension 1", mixed, {.dense = 1});
    add("dense dimension 33, block 48", mixed, {.b = 48, .dense = 33});
    add("dense dimension 300", mixed, {.dense = 300});
    add("dense dimension 130, transposed", mixed,
        {.transpose_a = true, .transpose_b = true, .transpose_c = true, .dense = 130});
    add("block 128", layout_from(1, 1, 2, {1, 1}), {.b = 128, .dense = 20});
    add("rows of at most 2 blocks", make_layout(LocalSlidingWindowSparsity{.num_heads = 2}, 96),
        {.Z = 2, .dense = 16});
    // One column of 40 blocks: more than one task for a sample.
    add("column of 40 blocks", BlockLayout(1, 40, 1, std::vector<std::uint8_t>(40, 1)),
        {.dense = 8});
    // A long row, which several tasks share.
    add("row of 160 blocks", BlockLayout(1, 1, 160, std::vector<std::uint8_t>(160, 1)),
        {.dense = 8});
    // Sums of at most 16 · 2 products of -1, 0 and 1: exact even in bf16.
    add("exact: small integers", mixed, {.Z = 2, .dense = 12}, Values::small_integers).exact = true;
    // Rows that begin at multiples of 16 bytes, as slices of wider tensors do, with NaN behind
    // them.
    for (const std::int64_t dense : {60, 100, 131}) {
      Case& padded = add(fmt::format("rows of {} in longer ones", dense), mixed,
                         {.transpose_a = std::string_view(mode) == "dds",
                          .transpose_b = std::string_view(mode) == "sdd",
                          .transpose_c = std::string_view(mode) == "dds",
                          .Z = 2,
                          .dense = dense});
      padded.inputs = [make = padded.inputs](DType dtype, Random& random) {
        TensorMap inputs = make(dtype, random);
        for (auto& [name, tensor] : inputs) {
          TensorSpec spec = tensor.spec();
          if (name == "layout" || spec.shape[3] % 16 == 0) continue;
          spec.shape[3] = (spec.shape[3] + 15) / 16 * 16;
          TensorSpec padded_spec = TensorSpec::contiguous(
              dtype, {spec.shape[0], spec.shape[1], spec.shape[2], spec.shape[3]});
          padded_spec.shape[3] = tensor.spec().shape[3];
          tensor = relaid(tensor, padded_spec);
        }
        return inputs;
      };
    }
    // In rows and columns of their own; of NaN that with all bits, as GPUs make it, too.
    for (const std::int64_t dense : {7, 64}) {
      Case& special = add(fmt::format("NaN and infinities, dense dimension {}", dense), mixed,
                          {.Z = 2, .dense = dense});
      special.finite_differences = false;
      special.inputs = [make = special.inputs](DType dtype, Random& random) {
        TensorMap inputs = make(dtype, random);
        for (const char* name : {"a", "b", "d_c"}) {
          HostTensor& tensor = inputs[name];
          const std::int64_t width = tensor.spec().shape[3];
          tensor.set(0, std::numeric_limits<double>::quiet_NaN());
          tensor.set(2 * width + 1, std::numeric_limits<double>::quiet_NaN());
          if (dtype == DType::f32) static_cast<std::uint32_t*>(tensor.data())[0] = 0x7fffffff;
          if (name != std::string_view("a")) continue;
          tensor.set(4 * width + 3, std::numeric_limits<double>::infinity());
          tensor.set(5 * width + 2, -std::numeric_limits<double>::infinity());
        }
        return inputs;
      };
    }
    Case& stride_0 = add("stride 0 d_c", mixed, {.Z = 2, .dense = 9});
    stride_0.inputs = [make = stride_0.inputs](DType dtype, Random& random) {
      TensorMap inputs = make(dtype, random);
      const auto& shape = inputs["d_c"].spec().shape;
      inputs["d_c"] = broadcast(filled_tensor(dtype, {1, 1, 1, 1}, 0.5),
                                {shape[0], shape[1], shape[2], shape[3]});
      return inputs;
    };
  }
  return cases;
}

Case block_matmul_fuzz(std::uint64_t seed) {
  Random random(seed);
  const std::int64_t heads = random.integer(1, 3), rows = random.integer(1, 4);
  const std::int64_t columns = random.integer(1, 4);
  const double density = 0.2 + 0.7 * random.uniform();
  std::vector<std::uint8_t> present(static_cast<std::size_t>(heads * rows * columns));
  for (auto& value : present) value = random.chance(density);
  const Shape shape{.mode = std::array{"sdd", "dsd", "dds"}[random.bits() % 3],
                    .transpose_a = random.chance(0.5),
                    .transpose_b = random.chance(0.5),
                    .transpose_c = random.chance(0.5),
                    .Z = random.integer(1, 2),
                    .b = 16 * random.integer(1, random.chance(0.2) ? 8 : 3),
                    .dense = random.integer(1, random.chance(0.2) ? 200 : 40)};
  return make_case(fmt::format("fuzz {}", seed), BlockLayout(heads, rows, columns, present), shape);
}

std::vector<Case> block_matmul_bench() {
  constexpr std::int64_t kSeqLen = 4096, kHeads = 2, kHeadDim = 64;
  std::vector<Case> cases;
  for (std::int64_t b : {16, 32, 64, 128}) {
    const std::int64_t each = std::max<std::int64_t>(64 / b, 1);
    const BlockLayout big_bird = make_layout(BigBirdSparsity{.num_heads = kHeads,
                                                             .block = b,
                                                             .num_random_blocks = each,
                                                             .num_sliding_window_blocks = 3 * each,
                                                             .num_global_blocks = each},
                                             kSeqLen);
    const BlockLayout fixed = make_layout(FixedSparsity{.num_heads = kHeads,
                                                        .block = b,
                                                        .num_local_blocks = 512 / b,
                                                        .num_global_blocks = 128 / b},
                                          kSeqLen / 2);
    // The two products of attention: scores = Q Kᵀ, out = P V.
    const Shape scores{.mode = "sdd", .transpose_b = true, .b = b, .dense = kHeadDim};
    const Shape out{.mode = "dsd", .b = b, .dense = kHeadDim};
    for (const Shape& shape : {scores, out}) {
      cases.push_back(bench_case(fmt::format("BigBird block {} S {} D {}", b, kSeqLen, kHeadDim),
                                 big_bird, shape));
      cases.push_back(bench_case(fmt::format("Fixed block {} S {} D {}", b, kSeqLen / 2, kHeadDim),
                                 fixed, shape));
    }
  }
  return cases;
}

}  // namespace pullback::driver

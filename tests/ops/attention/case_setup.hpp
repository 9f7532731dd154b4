// Problems of attention in few words, for the case list.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "driver/case.hpp"

namespace pullback::driver::attention_setup {

// A problem in words; what is not said is small and plain. Varlen when cu_q is not empty: batch is
// then ignored, and query and key are the totals.
struct Setup {
  std::int64_t batch = 2, query = 33, key = 65, heads = 2, kv_heads = 2;
  std::int64_t head_dim = 16, value_dim = 16;
  std::vector<std::int64_t> bias = {};
  std::vector<std::int64_t> cu_q = {}, cu_k = {};
  DType index_dtype = DType::i64;
  bool d_lse = false;
  double sigma = 1;       // of q and k
  bool integers = false;  // instead of normal numbers
  bool relayout = false;  // inputs in random layouts
  bool finite_differences = true;
  std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16};
  // Changes inputs that were made as above.
  std::function<void(TensorMap& inputs, const Setup& setup, Random& random)> change = {};
};

inline HostTensor index_tensor(DType dtype, const std::vector<std::int64_t>& values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor.set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  }
  return tensor;
}

inline TensorMap inputs_of(const Setup& s, DType dtype, Random& random) {
  const bool varlen = !s.cu_q.empty();
  const auto values = [&](DType type, std::vector<std::int64_t> shape, double sigma) {
    if (varlen && shape.size() == 4) shape.erase(shape.begin());
    if (!s.integers) return normal_tensor(type, shape, random, sigma);
    HostTensor tensor(TensorSpec::contiguous(type, shape));
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.set(i, static_cast<double>(random.integer(-2, 2)));
    }
    return tensor;
  };
  TensorMap inputs;
  inputs["q"] = values(dtype, {s.batch, s.query, s.heads, s.head_dim}, s.sigma);
  inputs["k"] = values(dtype, {s.batch, s.key, s.kv_heads, s.head_dim}, s.sigma);
  inputs["v"] = values(dtype, {s.batch, s.key, s.kv_heads, s.value_dim}, 1);
  inputs["d_out"] = values(dtype, {s.batch, s.query, s.heads, s.value_dim}, 1);
  if (!s.bias.empty()) inputs["bias"] = values(dtype, s.bias, 1);
  if (s.d_lse) {
    std::vector<std::int64_t> shape = {s.batch, s.heads, s.query};
    if (varlen) shape.erase(shape.begin());
    inputs["d_lse"] = values(accumulation_dtype(dtype), shape, 1);
  }
  if (varlen) {
    inputs["cu_seqlens_q"] = index_tensor(s.index_dtype, s.cu_q);
    inputs["cu_seqlens_k"] = index_tensor(s.index_dtype, s.cu_k);
  }
  if (s.change) s.change(inputs, s, random);
  if (s.relayout) {
    for (auto& [name, tensor] : inputs)
      tensor = relaid(tensor, random_layout(tensor.spec(), random));
  }
  return inputs;
}

// A layout [batches,heads,R,C] with about the given share of blocks, for blocks of `block`.
struct Blocks {
  std::int64_t block = 16, batches = 1, heads = 1;
  double density = 0.5;
  // Of rows, besides: block row 0 of every plane is empty.
  bool empty_row = false;
  // Every so many block rows and columns have all blocks. 0: none.
  std::int64_t global = 0;
};

inline Setup with_blocks(Setup setup, const Blocks& blocks) {
  setup.change = [blocks, before = setup.change](TensorMap& inputs, const Setup& s,
                                                 Random& random) {
    if (before) before(inputs, s, random);
    const auto count = [&](std::int64_t length) {
      return (length + blocks.block - 1) / blocks.block;
    };
    const std::int64_t rows = count(s.query), columns = count(s.key);
    HostTensor layout(
        TensorSpec::contiguous(DType::u8, {blocks.batches, blocks.heads, rows, columns}));
    for (std::int64_t i = 0; i < layout.numel(); ++i) {
      const bool empty = blocks.empty_row && i / columns % rows == 0;
      const bool seen = blocks.global > 0 && (i / columns % rows % blocks.global == 1 ||
                                              i % columns % blocks.global == 1);
      layout.set(i, !empty && (seen || random.chance(blocks.density)));
    }
    inputs["layout"] = layout;
  };
  return setup;
}

// The option that says how large the layout's blocks are, beside others.
inline OptionMap with_size(std::int64_t block, OptionMap options = {}) {
  options["block"] = std::to_string(block);
  return options;
}

// The last `hidden` keys get the value in k and v, which must go nowhere when nobody sees them.
inline void poison_keys(TensorMap& inputs, std::int64_t hidden,
                        double poison = std::numeric_limits<double>::quiet_NaN()) {
  for (const char* name : {"k", "v"}) {
    const HostTensor& tensor = inputs[name];
    const auto& shape = tensor.spec().shape;
    const std::int64_t row = shape[2] * shape[3];
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      if (i / row % shape[1] >= shape[1] - hidden) tensor.set(i, poison);
    }
  }
}

inline Case make_case(std::string name, const Setup& setup, OptionMap options = {}) {
  Case result;
  result.op = "attention";
  result.name = std::move(name);
  result.options = std::move(options);
  result.exact = setup.integers;
  result.dtypes = setup.dtypes;
  result.finite_differences = setup.finite_differences;
  result.inputs = [setup](DType dtype, Random& random) { return inputs_of(setup, dtype, random); };
  return result;
}

inline void add(std::vector<Case>& cases, std::string name, const Setup& setup,
                OptionMap options = {}) {
  cases.push_back(make_case(std::move(name), setup, std::move(options)));
}

// sequence_cases.cpp
void add_varlen(std::vector<Case>& cases);

// tile_cases.cpp
void add_tiles(std::vector<Case>& cases);
void add_gpu_tiles(std::vector<Case>& cases, const Setup& wide);
void add_shared_lists(std::vector<Case>& cases);
void add_units(std::vector<Case>& cases);
void add_many_keys(std::vector<Case>& cases);
void add_odd_rows(std::vector<Case>& cases);
void add_widths(std::vector<Case>& cases);

}  // namespace pullback::driver::attention_setup

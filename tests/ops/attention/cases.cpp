#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>
#include <utility>

#include "ops/attention/case_setup.hpp"

namespace pullback::driver {
namespace {

using namespace attention_setup;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Views q, k, v of one [B,S,3,H,D] tensor.
void pack_qkv(TensorMap& inputs, const Setup& s, Random& random) {
  const std::int64_t row = s.heads * s.head_dim;
  const DType dtype = inputs["q"].spec().dtype;
  const auto packed = std::make_shared<HostTensor>(
      normal_tensor(dtype, {s.batch, s.query, 3, s.heads, s.head_dim}, random));
  TensorSpec spec = inputs["q"].spec();
  spec.strides = {s.query * 3 * row, 3 * row, s.head_dim, 1};
  std::int64_t part = 0;
  for (const char* name : {"q", "k", "v"}) {
    const auto offset = static_cast<std::size_t>(part++ * row) * size_of(dtype);
    inputs[name] =
        HostTensor::borrow(spec, static_cast<const std::byte*>(packed->data()) + offset, packed);
  }
}

// d_out of out.sum().backward(): one element with strides 0.
void expand_d_out(TensorMap& inputs, const Setup& s, Random&) {
  const HostTensor one = filled_tensor(inputs["q"].spec().dtype, {1, 1, 1, 1}, 0.5);
  inputs["d_out"] = broadcast(one, {s.batch, s.query, s.heads, s.value_dim});
}

// -inf for the last `hidden` keys (the bias's last dimension).
void mask_by_bias(TensorMap& inputs, std::int64_t hidden) {
  const HostTensor& bias = inputs["bias"];
  const std::int64_t keys = bias.spec().shape[3];
  for (std::int64_t i = 0; i < bias.numel(); ++i) {
    if (i % keys >= keys - hidden) bias.set(i, -kInf);
  }
}

void add_sizes(std::vector<Case>& cases) {
  const std::pair<std::int64_t, std::int64_t> lengths[] = {
      {1, 64}, {31, 32}, {32, 33}, {33, 31}, {63, 65}, {64, 64}, {65, 63}, {100, 7}, {130, 257}};
  for (const auto& [query, key] : lengths) {
    add(cases, fmt::format("Sq {} Sk {}", query, key), {.query = query, .key = key});
  }
  add(cases, "Sq 0", {.query = 0, .d_lse = true});
  add(cases, "Sk 0", {.key = 0, .d_lse = true});
  add(cases, "B 0", {.batch = 0});
  add(cases, "H 0", {.heads = 0, .kv_heads = 0});
  add(cases, "all sizes 0", {.batch = 0, .query = 0, .key = 0, .heads = 0, .kv_heads = 0});
  const std::pair<std::int64_t, std::int64_t> head_dims[] = {
      {1, 1},   {7, 7},   {8, 8},     {17, 31},   {64, 64}, {80, 80}, {128, 128},
      {16, 40}, {40, 16}, {192, 128}, {256, 256}, {1, 256}, {72, 72}, {104, 104}};
  for (const auto& [head_dim, value_dim] : head_dims) {
    add(cases, fmt::format("D {} Dv {}", head_dim, value_dim),
        {.batch = 1, .head_dim = head_dim, .value_dim = value_dim});
  }
  add(cases, "one head, long", {.batch = 1, .query = 300, .key = 517, .heads = 1, .kv_heads = 1});
  add(cases, "GQA 6 heads over 2", {.heads = 6});
  add(cases, "MQA 4 heads over 1", {.heads = 4, .kv_heads = 1}, {{"causal", "top-left"}});
}

void add_masks(std::vector<Case>& cases) {
  const std::pair<std::int64_t, std::int64_t> lengths[] = {{40, 70}, {64, 64}, {70, 40}};
  for (const auto& [query, key] : lengths) {
    const Setup setup{.query = query, .key = key};
    const std::string sizes = fmt::format("Sq {} Sk {}", query, key);
    for (const char* corner : {"top-left", "bottom-right"}) {
      add(cases, fmt::format("causal {} {}", corner, sizes), setup, {{"causal", corner}});
      for (const char* window : {"5,7", "9,-1", "-1,3", "1000,2"}) {
        add(cases, fmt::format("window {} {} {}", window, corner, sizes), setup,
            {{"window", window}, {"corner", corner}});
      }
      add(cases, fmt::format("causal window 12 {} {}", corner, sizes), setup,
          {{"causal", corner}, {"window", "12,-1"}});
    }
  }
  // A window of one key: probabilities are 1, so small integers have exact results. d_lse makes
  // gradients of q and k other than 0.
  const Setup exact{.query = 40, .key = 44, .heads = 4, .d_lse = true, .integers = true};
  add(cases, "exact window 0,0", exact, {{"window", "0,0"}, {"scale", "0.5"}});
  add(cases, "exact window 0,0 bottom-right", exact,
      {{"window", "0,0"}, {"corner", "bottom-right"}, {"scale", "1"}});
  add(cases, "exact Sk 1", {.key = 1, .d_lse = true, .integers = true}, {{"scale", "0.25"}});
  add(cases, "exact sizes 1",
      {.batch = 1,
       .query = 1,
       .key = 1,
       .heads = 1,
       .kv_heads = 1,
       .head_dim = 1,
       .value_dim = 1,
       .d_lse = true,
       .integers = true});
  // Queries past the keys by more than the window: no row of the second half sees any.
  add(cases, "rows past the window", {.query = 40, .key = 18, .d_lse = true},
      {{"causal", "top-left"}, {"window", "2,0"}});
}

void add_biases(std::vector<Case>& cases) {
  for (int full = 0; full < 16; ++full) {
    const Setup sizes{.batch = 3, .query = 33, .key = 40, .heads = 4};
    const std::int64_t whole[] = {sizes.batch, sizes.heads, sizes.query, sizes.key};
    Setup setup = sizes;
    // Without d_lse the sum of ds over all keys is 0: no measure for errors.
    setup.d_lse = (full & 8) == 0;
    for (int dim = 0; dim < 4; ++dim) setup.bias.push_back(full >> dim & 1 ? whole[dim] : 1);
    add(cases, fmt::format("bias [{}]", fmt::join(setup.bias, ",")), setup);
  }
  Setup setup{.query = 40, .key = 50, .bias = {1, 2, 40, 50}};
  add(cases, "bias and causal bottom-right", setup, {{"causal", "bottom-right"}});
  add(cases, "bias and window", setup, {{"window", "3,4"}});
  setup.change = [](TensorMap& inputs, const Setup&, Random& random) {
    const HostTensor& bias = inputs["bias"];
    for (std::int64_t i = 0; i < bias.numel(); ++i) {
      if (random.chance(0.4)) bias.set(i, -kInf);
    }
  };
  add(cases, "bias with -inf at random", setup);
  setup.change = [](TensorMap& inputs, const Setup& s, Random&) {
    for (std::int64_t j = 0; j < 3 * s.key; ++j) inputs["bias"].set(j, -kInf);
  };
  setup.d_lse = true;
  add(cases, "bias masks whole rows", setup, {{"causal", "top-left"}});
  setup = {.key = 70, .bias = {2, 1, 1, 70}};
  setup.change = [](TensorMap& inputs, const Setup&, Random&) {
    mask_by_bias(inputs, 13);
    poison_keys(inputs, 13);
  };
  add(cases, "NaN in keys that the bias masks", setup);
  setup = {.key = 72, .bias = {2, 2, 33, 72}, .finite_differences = false, .dtypes = {DType::bf16}};
  setup.change = [](TensorMap& inputs, const Setup&, Random&) {
    mask_by_bias(inputs, 13);
    poison_keys(inputs, 13, 3e38);
  };
  add(cases, "products beyond f32 that the bias masks", setup);
  // Padding on the left as masks that are added have it; row 3 sees nothing but one such key.
  for (const double huge : {-1e9, -1e15, -kInf}) {
    setup = {.key = 200, .bias = {2, 1, 33, 200}, .d_lse = true, .finite_differences = false};
    setup.change = [huge](TensorMap& inputs, const Setup& s, Random&) {
      const HostTensor& bias = inputs["bias"];
      const double value = huge == -kInf ? lowest_finite(bias.spec().dtype) : huge;
      for (std::int64_t i = 0; i < bias.numel(); ++i) {
        const std::int64_t key = i % s.key, row = i / s.key % s.query;
        if (row == 3) bias.set(i, key == 140 ? value : -kInf);
        if (row != 3 && key < 130 + row) bias.set(i, value);
      }
    };
    add(cases,
        fmt::format("bias of {} hides keys",
                    huge == -kInf ? "the lowest" : fmt::format("{}", huge)),
        setup);
  }
  // Weights that underflow are of keys that are seen: 0 times infinity is NaN.
  setup = {.bias = {2, 2, 33, 65}, .finite_differences = false, .dtypes = {DType::f64}};
  setup.change = [](TensorMap& inputs, const Setup& s, Random&) {
    for (std::int64_t i = 0; i < 4 * s.query; ++i) inputs["bias"].set(i * s.key + 5, -1000);
    inputs["d_out"].set(7, kInf);
  };
  add(cases, "infinite d_out beside a weight of 0", setup);
  // Where a thread block has more than one element of d_bias.
  setup = {.batch = 1,
           .query = 1100,
           .key = 1000,
           .head_dim = 2,
           .value_dim = 2,
           .bias = {1, 1, 1100, 1000},
           .finite_differences = false,
           .dtypes = {DType::f64, DType::f32}};
  add(cases, "more elements of a bias than thread blocks", setup);
  setup = {.query = 40, .key = 70};
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 30); };
  add(cases, "NaN in keys that causal masks", setup, {{"causal", "top-left"}});
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 1); };
  setup.query = 70;
  setup.finite_differences = false;
  add(cases, "NaN that only the last query sees", setup, {{"causal", "top-left"}});
}

void add_scores(std::vector<Case>& cases) {
  add(cases, "scale 0.7", {}, {{"scale", "0.7"}});
  add(cases, "scale -0.3", {}, {{"scale", "-0.3"}});
  add(cases, "scale 0", {}, {{"scale", "0"}});
  // What hides keys before the scale is there would show them.
  for (const char* scale : {"-0.3", "0"}) {
    add(cases, fmt::format("scale {}, D 64, causal", scale), {.head_dim = 64, .value_dim = 64},
        {{"scale", scale}, {"causal", "bottom-right"}});
  }
  add(cases, "softcap 1.5", {.sigma = 2}, {{"softcap", "1.5"}});
  add(cases, "softcap 30 causal bias", {.bias = {1, 2, 33, 65}, .sigma = 3},
      {{"softcap", "30"}, {"causal", "bottom-right"}});
  const Setup large{.sigma = 30, .finite_differences = false, .dtypes = {DType::f64, DType::f32}};
  add(cases, "large logits", large);
  add(cases, "large logits, softcap", large, {{"softcap", "20"}});
  // Of two tiles the largest elements, whose product no float holds, do not meet.
  Setup apart{.batch = 1,
              .query = 2,
              .key = 2,
              .heads = 1,
              .kv_heads = 1,
              .head_dim = 3,
              .d_lse = true,
              .finite_differences = false,
              .dtypes = {DType::f64, DType::f32}};
  for (const bool near : {false, true}) {
    apart.change = [near](TensorMap& inputs, const Setup&, Random&) {
      const double q[] = {0, near ? 0x1p90 : 0, 0, 0x1p100, 0, 0};
      const double k[] = {0, near ? -0x1p33 : 1, 0, 0, 0, 0x1p60};
      for (int i = 0; i < 6; ++i) {
        inputs["q"].set(i, q[i]);
        inputs["k"].set(i, k[i]);
      }
    };
    add(cases,
        near ? "products past f32 that do not meet, one near it"
             : "products past f32 that do not meet",
        apart, {{"causal", "top-left"}});
  }
  add(cases, "d_lse", {.d_lse = true});
  add(cases, "d_lse causal, Sq above Sk", {.query = 65, .key = 33, .d_lse = true},
      {{"causal", "bottom-right"}});
  for (const char* p : {"0.1", "0.5", "0.9"}) {
    add(cases, fmt::format("dropout {}", p), {.query = 65, .key = 70},
        {{"dropout", p}, {"seed", "1234567890123"}});
  }
  add(cases, "dropout below one step", {}, {{"dropout", "0.000001"}});
  add(cases, "dropout GQA causal", {.heads = 4},
      {{"dropout", "0.2"}, {"causal", "bottom-right"}, {"seed", "-7"}});
  add(cases, "everything at once",
      {.query = 70,
       .key = 45,
       .heads = 4,
       .head_dim = 24,
       .value_dim = 13,
       .bias = {1, 4, 70, 45},
       .d_lse = true},
      {{"dropout", "0.25"},
       {"seed", "3"},
       {"softcap", "4"},
       {"scale", "0.3"},
       {"window", "20,6"},
       {"corner", "bottom-right"}});
}

void add_layouts(std::vector<Case>& cases) {
  add(cases, "d_out with strides 0", {.change = expand_d_out});
  add(cases, "d_out with strides 0, causal", {.change = expand_d_out},
      {{"causal", "bottom-right"}});
  Setup packed{.query = 65, .key = 65, .change = pack_qkv};
  add(cases, "packed QKV", packed, {{"causal", "top-left"}});
  for (const std::int64_t head_dim : {20, 256}) {
    packed.head_dim = packed.value_dim = head_dim;
    add(cases, fmt::format("packed QKV, D {}", head_dim), packed);
  }
  const Setup expanded_kv{.change = [](TensorMap& inputs, const Setup& s, Random& random) {
    const DType dtype = inputs["q"].spec().dtype;
    const auto one = normal_tensor(dtype, {1, s.key, 1, s.head_dim}, random);
    inputs["k"] = broadcast(one, {s.batch, s.key, s.kv_heads, s.head_dim});
  }};
  add(cases, "k expanded over batch and heads", expanded_kv);
  const Setup expanded_bias{.change = [](TensorMap& inputs, const Setup& s, Random& random) {
    const auto one = normal_tensor(inputs["q"].spec().dtype, {1, 1, 1, s.key}, random);
    inputs["bias"] = broadcast(one, {s.batch, s.heads, s.query, s.key});
  }};
  add(cases, "bias expanded to its full shape", expanded_bias);
}

// Heads that share the keys which a task of the CPU packs, and pairs enough for that.
void add_grouped(std::vector<Case>& cases) {
  const Setup few{.batch = 4,
                  .query = 5,
                  .key = 150,
                  .heads = 16,
                  .kv_heads = 4,
                  .d_lse = true,
                  .finite_differences = false};
  add(cases, "few queries of grouped heads", few);
  add(cases, "few queries of grouped heads, blocks", with_blocks(few, {.heads = 16}),
      with_size(16));
  Setup setup = few;
  setup.bias = {1, 16, 1, 150};
  add(cases, "few queries of grouped heads, bias, dropout", setup,
      {{"causal", "bottom-right"}, {"dropout", "0.3"}, {"seed", "5"}});
  setup = few;
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 33); };
  add(cases, "few queries of grouped heads, NaN in unseen keys", setup, {{"causal", "top-left"}});
  setup = few;
  setup.batch = 1, setup.query = 20;
  setup.cu_q = {0, 3, 3, 8, 20};
  setup.cu_k = {0, 50, 70, 70, 150};
  add(cases, "few queries of grouped heads, varlen", setup, {{"causal", "bottom-right"}});
}

void add_blocks(std::vector<Case>& cases) {
  // Without d_lse the gradients of a row that sees one key cancel to 0.
  const Setup plain{.query = 70, .key = 129, .d_lse = true};
  add(cases, "blocks for all", with_blocks(plain, {}), with_size(16));
  add(cases, "blocks by head", with_blocks(plain, {.block = 32, .heads = 2}), with_size(32));
  add(cases, "blocks by batch item", with_blocks(plain, {.batches = 2}), with_size(16));
  add(cases, "blocks by batch item and head, empty rows",
      with_blocks(plain, {.block = 48, .batches = 2, .heads = 2, .empty_row = true}),
      with_size(48));
  add(cases, "no blocks at all", with_blocks(plain, {.density = 0}), with_size(16));
  add(cases, "blocks, causal", with_blocks({.query = 129, .key = 129, .d_lse = true}, {.heads = 2}),
      with_size(16, {{"causal", "top-left"}}));
  add(cases, "blocks, window, bottom right", with_blocks(plain, {.block = 32}),
      with_size(32, {{"window", "40,20"}, {"corner", "bottom-right"}}));
  add(cases, "blocks, dropout, softcap", with_blocks(plain, {.block = 64, .heads = 2}),
      with_size(64, {{"dropout", "0.3"}, {"seed", "5"}, {"softcap", "3"}}));
  Setup setup = plain;
  setup.heads = 4;
  setup.value_dim = 24;
  add(cases, "blocks by head, GQA, Dv 24", with_blocks(setup, {.heads = 4}), with_size(16));
  for (const std::vector<std::int64_t>& bias :
       {std::vector<std::int64_t>{2, 2, 70, 129}, {1, 2, 1, 129}, {1, 1, 70, 1}}) {
    setup = plain;
    setup.bias = bias;
    add(cases, fmt::format("blocks, bias {}", fmt::join(bias, "x")),
        with_blocks(setup, {.block = 32, .heads = 2}), with_size(32));
  }
  // Every query of the sequence has its NaN in blocks that are absent for it.
  setup = plain;
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 33); };
  setup = with_blocks(setup, {});
  setup.change = [before = setup.change](TensorMap& inputs, const Setup& s, Random& random) {
    before(inputs, s, random);
    const HostTensor& layout = inputs["layout"];
    const std::int64_t columns = layout.spec().shape[3];
    for (std::int64_t i = 0; i < layout.numel(); ++i) {
      if (i % columns >= columns - 3) layout.set(i, 0);
    }
  };
  setup.finite_differences = false;
  add(cases, "blocks, NaN in absent ones", setup, with_size(16));
  const Setup wide{.batch = 1,
                   .query = 410,
                   .key = 1130,
                   .head_dim = 8,
                   .value_dim = 8,
                   .d_lse = true,
                   .finite_differences = false};
  for (const std::int64_t block : {16, 64, 128}) {
    add(cases, fmt::format("tiles, blocks of {}", block),
        with_blocks(wide, {.block = block, .heads = 2, .density = 0.2}),
        with_size(block, {{"causal", "bottom-right"}}));
  }
}

}  // namespace

std::vector<Case> attention_cases() {
  std::vector<Case> cases;
  add_sizes(cases);
  add_masks(cases);
  add_biases(cases);
  add_scores(cases);
  add_layouts(cases);
  add_varlen(cases);
  add_grouped(cases);
  add_tiles(cases);
  add_blocks(cases);
  add_shared_lists(cases);
  add_units(cases);
  add_many_keys(cases);
  add_odd_rows(cases);
  add_widths(cases);
  return cases;
}

std::vector<Case> attention_bench() {
  const auto shape = [](std::int64_t heads, std::int64_t length, std::int64_t head_dim) {
    return Setup{.batch = 1,
                 .query = length,
                 .key = length,
                 .heads = heads,
                 .kv_heads = heads,
                 .head_dim = head_dim,
                 .value_dim = head_dim,
                 .dtypes = {DType::f32, DType::bf16}};
  };
  Setup with_bias = shape(8, 2048, 64);
  with_bias.bias = {1, 8, 2048, 2048};
  return {make_case("B1 H8 S2048 D64", shape(8, 2048, 64)),
          make_case("B1 H8 S2048 D64 causal", shape(8, 2048, 64), {{"causal", "bottom-right"}}),
          make_case("B1 H8 S2048 D64 bias", with_bias),
          make_case("B1 H1 S8192 D64", shape(1, 8192, 64)),
          make_case("B1 H1 S8192 D64 causal", shape(1, 8192, 64), {{"causal", "bottom-right"}}),
          make_case("B1 H4 S2048 D128", shape(4, 2048, 128))};
}

}  // namespace pullback::driver

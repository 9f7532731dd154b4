// Cases of attention that kernels of several tiles, and of several widths, are there for.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "ops/attention/case_setup.hpp"

namespace pullback::driver::attention_setup {

// Sizes of several tiles in every direction, where features meet the seams between tiles.
void add_tiles(std::vector<Case>& cases) {
  const Setup wide{.batch = 1,
                   .query = 410,
                   .key = 1130,
                   .heads = 2,
                   .kv_heads = 1,
                   .head_dim = 8,
                   .value_dim = 8,
                   .finite_differences = false};
  add(cases, "tiles, GQA", wide);
  add(cases, "tiles, causal, dropout", wide, {{"causal", "bottom-right"}, {"dropout", "0.2"}});
  add(cases, "tiles, window, softcap", wide,
      {{"window", "200,150"}, {"corner", "bottom-right"}, {"softcap", "3"}});
  add_gpu_tiles(cases, wide);
  Setup setup = wide;
  setup.bias = {1, 2, 410, 1};
  setup.d_lse = true;
  add(cases, "tiles, bias summed over keys", setup, {{"causal", "top-left"}});
  setup.bias = {1, 1, 1, 1130};
  add(cases, "tiles, bias summed over queries", setup);
  setup.bias = {1, 2, 410, 1130};
  add(cases, "tiles, whole bias", setup, {{"window", "300,-1"}});
  const auto hide_some = [](TensorMap& inputs, const Setup&, Random& random) {
    const HostTensor& bias = inputs["bias"];
    for (std::int64_t i = 0; i < bias.numel(); ++i) {
      if (random.chance(0.2)) bias.set(i, -std::numeric_limits<double>::infinity());
    }
  };
  // Rows of the bias in pieces of 16 bytes.
  for (const std::int64_t head_dim : {32, 64, 96, 128, 192, 256}) {
    setup = {.query = 200,
             .key = 264,
             .bias = {2, 2, 200, 264},
             .finite_differences = false,
             .dtypes = {DType::bf16, DType::f16}};
    setup.head_dim = setup.value_dim = head_dim;
    setup.change = hide_some;
    add(cases, fmt::format("tiles, bias in pieces, D {}", head_dim), setup);
    cases.back().full_only = head_dim != 64;  // widths of GPUs' kernels
  }
  setup.value_dim = 40;
  add(cases, "tiles, bias in pieces, causal", setup, {{"causal", "top-left"}});
  // So many heads that d_bias is summed over launches.
  for (const std::int64_t head_dim : {8, 64, 96, 128, 192, 256}) {
    setup = {.batch = 3,
             .query = 20,
             .key = 264,
             .heads = 44,
             .kv_heads = 44,
             .head_dim = head_dim,
             .value_dim = 8,
             .bias = {1, 44, 20, 264},
             .finite_differences = false,
             .dtypes = {DType::bf16, DType::f16},
             .change = hide_some};
    add(cases, fmt::format("tiles, bias summed over batch, D {}", head_dim), setup);
    cases.back().full_only = true;
    add(cases, fmt::format("tiles, bias summed over batch, dropout, D {}", head_dim), setup,
        {{"dropout", "0.2"}, {"seed", "3"}});
    cases.back().full_only = true;
  }
  add(cases, "tiles, bias summed over batch, causal", setup, {{"causal", "bottom-right"}});
  cases.back().full_only = true;
  setup = wide;
  setup.cu_q = {0, 7, 300, 300, 410};
  setup.cu_k = {0, 600, 601, 900, 1130};
  add(cases, "tiles, varlen", setup, {{"causal", "bottom-right"}});
  setup = wide;
  setup.query = 1130;
  setup.key = 410;
  add(cases, "tiles, more queries than keys", setup, {{"causal", "bottom-right"}});
}

// Block masks whose lists of tiles are so long that several thread blocks share them on a GPU. A
// CPU shares nothing: there one of each kind will do.
void add_shared_lists(std::vector<Case>& cases) {
  const auto add_blocks = [&](const std::string& name, const Setup& setup, const Blocks& blocks,
                              const OptionMap& options = {}) {
    add(cases, name, with_blocks(setup, blocks), with_size(blocks.block, options));
    cases.back().full_only = true;
  };
  const auto poison = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 5); };

  // All lists are long.
  Setup even{.batch = 1,
             .query = 2100,
             .key = 150,
             .kv_heads = 1,
             .d_lse = true,
             .finite_differences = false};
  for (const std::int64_t head_dim : {64, 96, 128}) {
    even.head_dim = even.value_dim = head_dim;
    for (const std::int64_t block : {64, 128}) {
      add_blocks(fmt::format("long lists, blocks of {}, D {}", block, head_dim), even,
                 {.block = block, .heads = 2, .density = 0.8});
      if (block == 64 && head_dim == 64) cases.back().full_only = false;
    }
  }
  even.change = poison;
  add_blocks("long lists, NaN in keys", even, {.block = 64, .heads = 2, .density = 0.8});

  // The last tile of queries has rows for one warpgroup of two.
  Setup wide = even;
  wide.change = {};
  wide.query = 140, wide.key = 5000;
  add_blocks("long lists, few queries at the end", wide,
             {.block = 128, .heads = 2, .density = 0.9});

  // Few lists are long, and the sums of d_q are several.
  Setup uneven = even;
  uneven.change = {};
  uneven.query = 1100, uneven.key = 2500;
  for (const std::int64_t head_dim : {20, 128}) {
    uneven.head_dim = uneven.value_dim = head_dim;
    for (const std::int64_t block : {16, 64, 128}) {
      add_blocks(fmt::format("global blocks of {}, D {}", block, head_dim), uneven,
                 {.block = block, .heads = 2, .density = 0.05, .global = 9});
    }
  }
  uneven.query = 2500, uneven.key = 1100;
  uneven.head_dim = uneven.value_dim = 64;
  const Blocks few{.block = 64, .density = 0.02, .global = 15};
  add_blocks("global blocks, GQA, causal", uneven, few, {{"causal", "bottom-right"}});
  cases.back().full_only = false;
  uneven.change = poison;
  add_blocks("global blocks, NaN in keys", uneven, few);

  // Neighbouring rows and columns see other blocks, with gaps of any length.
  Setup scattered{.batch = 2,
                  .query = 460,
                  .key = 2100,
                  .heads = 4,
                  .finite_differences = false,
                  .dtypes = {DType::bf16, DType::f16}};
  for (const std::int64_t head_dim : {64, 80, 128, 192, 256}) {
    scattered.head_dim = scattered.value_dim = head_dim;
    for (const std::int64_t block : {16, 48, 64, 128}) {
      add_blocks(fmt::format("scattered blocks of {}, D {}", block, head_dim), scattered,
                 {.block = block, .heads = 4, .density = block < 64 ? 0.02 : 0.2});
    }
  }
  scattered.query = 2100;
  scattered.head_dim = 72, scattered.value_dim = 128;
  const Blocks scarce{.block = 64, .batches = 2, .heads = 4, .density = 0.1, .empty_row = true};
  add_blocks("scattered blocks, causal, Dv 128", scattered, scarce, {{"causal", "bottom-right"}});
  scattered.change = poison;
  add_blocks("scattered blocks, NaN in keys", scattered, scarce, {{"window", "500,300"}});
}

// So many tiles that thread blocks for Hopper take several of them, with a causal mask two of a
// unit, of which a pair of 5 has one that is alone; and keys enough for their heads of 64. A CPU
// has nothing of the kind.
void add_units(std::vector<Case>& cases) {
  Setup setup{.batch = 3,
              .query = 600,
              .key = 530,
              .heads = 24,
              .kv_heads = 8,
              .head_dim = 128,
              .value_dim = 128,
              .finite_differences = false,
              .dtypes = {DType::bf16, DType::f16}};
  const auto add_masks = [&](const std::string& name) {
    for (const char* mask : {"none", "top-left", "bottom-right"}) {
      const bool causal = mask != std::string_view("none");
      add(cases, fmt::format("{}, {}", name, causal ? mask : "no mask"), setup,
          causal ? OptionMap{{"causal", mask}} : OptionMap{});
      cases.back().full_only = true;
    }
  };
  add_masks("units of tiles, D 128");
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 3); };
  add_masks("units of tiles, NaN in keys");
  // A tile's last rows are those of one warpgroup.
  setup.head_dim = setup.value_dim = 64;
  add_masks("units of tiles, NaN in keys, D 64");
  setup.change = {};
  add_masks("units of tiles, D 64");
  setup.head_dim = setup.value_dim = 128;
  add(cases, "units of tiles, dropout", setup, {{"dropout", "0.3"}, {"causal", "bottom-right"}});
  cases.back().full_only = true;
  setup.heads = 72, setup.kv_heads = 24;
  setup.cu_q = {0, 130, 590}, setup.cu_k = {0, 330, 520};
  add(cases, "units of tiles, varlen", setup, {{"causal", "bottom-right"}});
  cases.back().full_only = true;
  setup = {.batch = 1,
           .query = 450,
           .key = 2100,
           .heads = 3,
           .kv_heads = 3,
           .head_dim = 64,
           .value_dim = 40,
           .finite_differences = false,
           .dtypes = {DType::bf16, DType::f16}};
  add_masks("many keys, D 64");
  setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 3); };
  add_masks("many keys, NaN");
}

// Biases and dropout in several tiles for Hopper, which heads of 64 take for so many keys only.
void add_many_keys(std::vector<Case>& cases) {
  Setup setup{.batch = 2,
              .query = 140,
              .d_lse = true,
              .finite_differences = false,
              .dtypes = {DType::bf16, DType::f16}};
  const auto set_head_dim = [&](std::int64_t head_dim) {
    setup.head_dim = setup.value_dim = head_dim;
    setup.key = head_dim == 64 ? 2104 : 520;
    setup.heads = 2, setup.kv_heads = 1;
  };
  const auto add_case = [&](const std::string& name, const OptionMap& options) {
    add(cases, fmt::format("many keys, {}, D {}", name, setup.head_dim), setup, options);
    cases.back().full_only = true;
  };
  // A bias of the first and the last keys, which are NaN if it is infinite.
  using Change = decltype(setup.change);
  const auto bias_of_keys = [](double (*hidden)(DType)) -> Change {
    return [hidden](TensorMap& inputs, const Setup& s, Random&) {
      const HostTensor& bias = inputs["bias"];
      const double value = hidden(bias.spec().dtype);
      for (std::int64_t i = 0; i < bias.numel(); ++i) {
        const std::int64_t key = i % s.key;
        if (key < 150 || key >= s.key - 50) bias.set(i, value);
      }
      if (std::isinf(value)) poison_keys(inputs, 50);
    };
  };
  const Change mask_keys = bias_of_keys(lowest_finite);
  const Change hide_keys =
      bias_of_keys([](DType) { return -std::numeric_limits<double>::infinity(); });
  const OptionMap causal = {{"causal", "bottom-right"}};
  const OptionMap dropout = {{"dropout", "0.3"}, {"seed", "5"}};
  OptionMap causal_dropout = causal;
  causal_dropout.insert(dropout.begin(), dropout.end());
  for (const std::int64_t head_dim : {64, 72, 128, 192, 256}) {
    set_head_dim(head_dim);
    setup.bias = {2, 2, 140, setup.key};
    add_case("bias", {});
    add_case("bias, causal", causal);
    add_case("bias, dropout", dropout);
    add_case("bias, dropout, causal", causal_dropout);
    setup.bias = {};
    add_case("dropout", dropout);
    add_case("dropout, causal", causal_dropout);
    add_case("no mask", {});
    add_case("causal", causal);
    setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 3); };
    add_case("causal, NaN in keys", causal);
    // Of rows that some keys do not see.
    setup.change = [](TensorMap& inputs, const Setup& s, Random&) {
      const std::int64_t row = s.heads * s.head_dim, inside = 30 * row + 5;
      inputs["q"].set(inside, std::numeric_limits<double>::quiet_NaN());
      inputs["d_out"].set(inside + 70 * row, std::numeric_limits<double>::infinity());
    };
    add_case("causal, NaN in a query", causal);
    setup.change = {};
  }
  for (const std::int64_t head_dim : {64, 96, 192, 256}) {
    set_head_dim(head_dim);
    if (head_dim < 192) setup.value_dim = 48;
    if (head_dim == 256) setup.dtypes = {DType::f16};
    setup.change = [](TensorMap& inputs, const Setup&, Random&) { poison_keys(inputs, 3); };
    add_case("dropout, NaN in keys", causal_dropout);
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{2, 1, 1, setup.key}, {1, 2, 140, setup.key}}) {
      setup.bias = shape;
      const std::string_view name = shape[2] == 1 ? "bias of keys" : "bias";
      for (const bool finite : {false, true}) {
        setup.change = finite ? mask_keys : hide_keys;
        add_case(fmt::format("{} that hides {}", name, finite ? "some" : "NaN"), causal);
      }
      add_case(fmt::format("{} that hides some, dropout", name), causal_dropout);
    }
    setup.change = {};
    setup.bias = {};
  }
  setup.dtypes = {DType::bf16, DType::f16};
  // Enough tiles of keys for a launch a batch item to fill a device.
  set_head_dim(64);
  setup.query = 270;
  setup.heads = setup.kv_heads = 8;
  setup.bias = {1, 8, 270, setup.key};
  add_case("bias of all items", {});
  setup.change = hide_keys;
  add_case("bias of all items that hides NaN", causal);
  setup.change = {};
  setup.batch = 3;
  add_case("bias of three items, causal", causal);
  add_case("bias of three items, dropout", dropout);
  setup.dtypes = {DType::bf16};
  for (const std::int64_t head_dim : {192, 256}) {
    set_head_dim(head_dim);
    setup.key = 1064;
    setup.heads = setup.kv_heads = 8;
    setup.bias = {1, 8, 270, setup.key};
    head_dim == 192 ? add_case("bias of three items, causal", causal)
                    : add_case("bias of three items, dropout", dropout);
    setup.change = hide_keys;
    add_case("bias of three items that hides NaN", causal);
    setup.change = {};
  }
}

// Biases whose rows begin anywhere, in problems that are large enough for a copy of them.
void add_odd_rows(std::vector<Case>& cases) {
  Setup setup{
      .query = 730, .key = 725, .finite_differences = false, .dtypes = {DType::bf16, DType::f16}};
  const auto add_case = [&](const std::string& name, const OptionMap& options = {}) {
    add(cases, "odd rows, " + name, setup, options);
    cases.back().full_only = true;
  };
  for (const std::int64_t head_dim : {32, 128}) {
    setup.head_dim = setup.value_dim = head_dim;
    setup.bias = {2, 2, 730, 725};
    add_case(fmt::format("bias, D {}", head_dim), {{"causal", "bottom-right"}});
  }
  setup.bias = {1, 2, 730, 725};
  add_case("bias of all items", {{"dropout", "0.2"}, {"seed", "3"}});
  setup.bias = {2, 1, 1, 725};
  add_case("bias of keys");
  setup.bias = {};
  setup.change = [](TensorMap& inputs, const Setup& s, Random& random) {
    const auto one = normal_tensor(inputs["q"].spec().dtype, {1, s.heads, s.query, s.key}, random);
    inputs["bias"] = broadcast(one, {s.batch, s.heads, s.query, s.key});
  };
  add_case("expanded bias");
  setup.change = [](TensorMap& inputs, const Setup& s, Random& random) {
    const DType dtype = inputs["q"].spec().dtype;
    inputs["bias"] = normal_tensor(dtype, {s.batch, s.heads, s.query, s.key}, random);
    inputs["bias"] = relaid(inputs["bias"], random_layout(inputs["bias"].spec(), random));
  };
  add_case("any layout");
}

// Features that have kernels of their own for each width of the heads.
void add_widths(std::vector<Case>& cases) {
  for (const std::int64_t head_dim : {64, 96, 128, 192, 256}) {
    const auto name = [&](std::string_view features) {
      return fmt::format("{}, D {}", features, head_dim);
    };
    Setup setup{.batch = 1,
                .query = 40,
                .key = 136,
                .head_dim = head_dim,
                .value_dim = head_dim,
                .d_lse = true,
                .finite_differences = false,
                .dtypes = {DType::f32, DType::bf16, DType::f16}};
    const OptionMap dropout = {{"dropout", "0.2"}, {"seed", "3"}};
    add(cases, name("dropout"), setup, dropout);
    for (const std::int64_t block : {32, 64}) {
      const Setup blocks = with_blocks(setup, {.block = block, .heads = 2});
      add(cases, name(fmt::format("blocks of {}", block)), blocks, with_size(block));
      add(cases, name(fmt::format("blocks of {}, dropout", block)), blocks,
          with_size(block, dropout));
    }
    setup.bias = {1, 1, 1, 136};
    add(cases, name("bias of keys"), setup);
  }
}

}  // namespace pullback::driver::attention_setup

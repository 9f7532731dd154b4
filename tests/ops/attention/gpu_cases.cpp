// Cases of attention that kernels of GPUs alone tell apart: only they run these.
#include <fmt/format.h>

#include <initializer_list>
#include <limits>
#include <utility>

#include "ops/attention/case_setup.hpp"

namespace pullback::driver::attention_setup {

void add_gpu_tiles(std::vector<Case>& all, const Setup& wide) {
  std::vector<Case> cases;
  Setup setup;
  // The smaller the cap is, the less the weights tell of what it took.
  for (const std::int64_t head_dim : {20, 64, 96, 128, 192, 256}) {
    setup = {.batch = 1,
             .query = 330,
             .key = 410,
             .heads = 2,
             .kv_heads = 1,
             .d_lse = true,
             .sigma = 2,
             .finite_differences = false,
             .dtypes = {DType::bf16, DType::f16}};
    setup.head_dim = setup.value_dim = head_dim;
    add(cases, fmt::format("tiles, softcap, D {}", head_dim), setup, {{"softcap", "30"}});
    add(cases, fmt::format("tiles, small softcap, D {}", head_dim), setup,
        {{"softcap", head_dim < 100 ? "0.5" : "0.02"}, {"causal", "bottom-right"}});
    add(cases, fmt::format("tiles, softcap, negative scale, D {}", head_dim), setup,
        {{"softcap", "2"}, {"scale", "-0.5"}});
  }
  // Heads whose rows do not begin at 16 bytes, and pairs enough for copies of them.
  setup = wide;
  setup.query = setup.key = 1030;
  setup.head_dim = 33, setup.value_dim = 50;
  setup.dtypes = {DType::f32, DType::bf16, DType::f16};
  add(cases, "tiles, odd heads", setup, {{"causal", "bottom-right"}});
  setup.head_dim = 100, setup.value_dim = 4;
  setup.bias = {1, 2, 1, 1030};
  setup.dtypes = {DType::bf16};
  add(cases, "tiles, odd heads, bias", setup);
  setup.value_dim = 64;
  setup.bias = {};
  setup.cu_q = {0, 100, 100, 1415, 2000};
  setup.cu_k = {0, 600, 601, 900, 1030};
  setup.dtypes = {DType::f16};
  setup.query = setup.key * 2;
  add(cases, "tiles, odd heads, varlen", setup);
  // Rows of an odd number of pieces of 16 bytes, some of which begin within one and are copied: to
  // rows no wider than the others have.
  for (const std::vector<const char*>& moved :
       {std::vector{"q"}, {"k"}, {"v"}, {"q", "d_out"}, {"q", "k", "v"}}) {
    setup = wide;
    setup.query = setup.key = 1030;
    setup.head_dim = 72, setup.value_dim = 40;
    setup.d_lse = true;
    setup.change = [moved](TensorMap& inputs, const Setup&, Random&) {
      for (const char* name : moved) {
        TensorSpec layout = inputs[name].spec();
        layout.strides[1] += static_cast<std::int64_t>(8 / size_of(layout.dtype));
        layout.strides[0] = layout.shape[1] * layout.strides[1];
        inputs[name] = relaid(inputs[name], layout);
      }
    };
    setup.dtypes = {DType::bf16, DType::f16};
    const std::string names = fmt::format("{}", fmt::join(moved, ", "));
    add(cases, fmt::format("tiles, odd rows of {}", names), setup);
    setup.head_dim = 20, setup.value_dim = 36;
    setup.dtypes = {DType::f32};
    add(cases, fmt::format("tiles, odd rows of {}, D 20", names), setup);
  }
  // Heads whose rows begin within a sector of 32 bytes, every other one: boxes begin before it,
  // where the head beside has infinity.
  const auto spoil_last_columns = [](TensorMap& inputs, const Setup&, Random&) {
    for (const char* name : {"k", "v"}) {
      const HostTensor& tensor = inputs[name];
      const auto& shape = tensor.spec().shape;
      const std::int64_t heads = shape[2], columns = shape[3];
      for (std::int64_t row = 0; row < shape[0] * shape[1]; ++row) {
        tensor.set((row * heads + 1) * columns - 1, std::numeric_limits<double>::infinity());
      }
    }
  };
  for (const auto& [head_dim, value_dim] :
       std::initializer_list<std::pair<int, int>>{{72, 88}, {104, 120}, {184, 136}, {248, 200}}) {
    setup = {.query = 330, .key = 410, .heads = 4, .kv_heads = 4, .d_lse = true};
    setup.head_dim = head_dim, setup.value_dim = value_dim;
    setup.finite_differences = false;
    setup.dtypes = {DType::bf16, DType::f16};
    const std::string sizes = fmt::format("D {} Dv {}", head_dim, value_dim);
    add(cases, "tiles, heads within sectors, " + sizes, setup, {{"causal", "bottom-right"}});
    setup.change = spoil_last_columns;
    setup.dtypes = {DType::bf16};
    setup.d_lse = false;
    add(cases, "tiles, infinity beside, " + sizes, setup);
    setup.change = {};
    setup.heads = 6, setup.kv_heads = 2;
    setup.bias = {1, 6, 330, 416};
    setup.key = 416;
    add(cases, "tiles, heads within sectors, bias, " + sizes, setup);
  }
  // So few queries that several thread blocks share the keys of a tile.
  for (const std::int64_t head_dim : {40, 128}) {
    setup = wide;
    setup.query = 70, setup.key = 4100;
    setup.head_dim = setup.value_dim = head_dim;
    setup.dtypes = {DType::f32, DType::bf16, DType::f16};
    add(cases, fmt::format("tiles, few queries, D {}", head_dim), setup);
    add(cases, fmt::format("tiles, few queries, window, D {}", head_dim), setup,
        {{"window", "3000,20"}, {"corner", "bottom-right"}});
  }
  // Fewer than a warpgroup has: the others must not be waited for.
  for (const std::int64_t query : {1, 16}) {
    setup = wide;
    setup.query = query, setup.key = 4100;
    setup.head_dim = setup.value_dim = 64;
    setup.dtypes = {DType::bf16, DType::f16};
    add(cases, fmt::format("tiles, few queries, {} of D 64", query), setup);
  }
  // Odd numbers of tiles of queries, which kernels of heads of 64 take by twos.
  setup = wide;
  setup.batch = 2, setup.heads = 4, setup.kv_heads = 2;
  setup.head_dim = 64, setup.value_dim = 48;
  setup.d_lse = true;
  setup.dtypes = {DType::bf16, DType::f16};
  add(cases, "tiles by twos", setup);
  add(cases, "tiles by twos, window", setup, {{"window", "200,150"}, {"corner", "bottom-right"}});
  setup.batch = 1;
  setup.cu_q = {0, 7, 300, 300, 410};
  setup.cu_k = {0, 600, 601, 900, 1130};
  add(cases, "tiles by twos, varlen", setup);
  add(cases, "tiles by twos, varlen, causal", setup, {{"causal", "bottom-right"}});
  for (Case& test : cases) {
    test.full_only = true;
    all.push_back(std::move(test));
  }
}

}  // namespace pullback::driver::attention_setup

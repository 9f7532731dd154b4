// Rows that GPUs take many of at a time: short ones, and those across memory.
#include <fmt/format.h>

#include <utility>

#include "ops/entmax/case_setup.hpp"

namespace pullback::driver::entmax_setup {
namespace {

// Among rows that keep their values: NaN, infinity, nothing visible, and equal elements. `row_of`:
// of a flat index.
template <class RowOf>
Logit some_special(const RowOf& row_of) {
  return [=](std::int64_t i, Random& random) {
    const std::int64_t row = row_of(i);
    if (row == 20 && random.chance(0.5)) return kNaN;
    if (row == 21 && random.chance(0.5)) return kInfinity;
    if (row == 22) return -kInfinity;
    if (row % 7 == 2) return random.chance(0.5) ? 0.5 : 0.25;
    return row % 5 == 3 && random.chance(0.3) ? -kInfinity : random.normal();
  };
}

}  // namespace

void tiles(std::vector<Case>& cases) {
  const auto add = [&](const Shape& shape, OptionMap options, const Logit& logit) {
    std::string name = fmt::format("tiles {}", fmt::join(shape, "x"));
    for (const auto& [key, value] : options) name += fmt::format(" {} {}", key, value);
    cases.push_back(no_differences(make_case(name, std::move(options), shape, logit)));
    cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
    cases.back().full_only = shape[1] > 3000;
  };
  for (const char* alpha : {"1", "1.05", "1.25", "1.5", "2"}) {
    const OptionMap options{{"alpha", alpha}}, across{{"alpha", alpha}, {"axis", "1"}};
    for (const std::int64_t length : {5, 8, 10, 16, 33, 64, 101, 120}) {
      add({150, length}, options, some_special([=](std::int64_t i) { return i / length; }));
    }
    for (const auto& [length, next] :
         {std::pair{8, 64}, {64, 33}, {512, 3}, {1000, 7}, {3100, 9}}) {
      add({5, length, next}, across,
          some_special([=](std::int64_t i) { return i / (length * next) * next + i % next; }));
    }
  }
  // With gaps between rows, on 16 bytes and not.
  for (const char* alpha : {"1", "1.05", "1.25", "1.5", "2"}) {
    for (const auto& [length, step] : {std::pair{32, 40}, {19, 21}}) {
      const auto with_gaps = [=](TensorMap& inputs, DType dtype, Random& random) {
        TensorSpec spec = TensorSpec::contiguous(dtype, {40, length});
        spec.strides[0] = step;
        HostTensor x(spec);
        for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, random.normal());
        inputs["x"] = std::move(x);
      };
      cases.push_back(
          no_differences(make_case(fmt::format("tiles of rows {} apart alpha {}", step, alpha),
                                   {{"alpha", alpha}}, {40, length}, normal(1), with_gaps)));
      cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
    }
  }
  // Several rows of each thread.
  for (const std::int64_t length : {2, 3, 4}) add({6200, length}, {{"alpha", "1.5"}}, normal(1));
  // As long as they may be, and longer.
  for (const std::int64_t length : {3000, 6000, 6200}) {
    add({1, length, 9}, {{"alpha", "1.5"}, {"axis", "1"}}, normal(1));
  }
  for (const char* alpha : {"1", "1.05", "1.25", "1.5", "2"}) {
    for (const std::int64_t length : {6300, 12400}) {
      add({3, length, 9}, {{"alpha", alpha}, {"axis", "1"}},
          some_special([=](std::int64_t i) { return i / (length * 9) * 9 + i % 9; }));
    }
  }
}

}  // namespace pullback::driver::entmax_setup

// 2^27 elements in segments that are short, long, of both kinds, or one.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "driver/case.hpp"

namespace pullback::driver {
namespace {

constexpr std::int64_t kElements = std::int64_t{1} << 27;

enum class Lengths { mean_8, mean_4096, power_law, giant };

std::int64_t next_length(Lengths lengths, std::int64_t rows, Random& random) {
  switch (lengths) {
    case Lengths::mean_8:
      return random.integer(1, 15);
    case Lengths::mean_4096:
      return random.integer(1, 8191);
    case Lengths::power_law:
      // Most are short; the few long ones, of up to an eighth of all, hold most rows.
      return static_cast<std::int64_t>(
          std::min(std::pow(1 - random.uniform(), -1 / 1.1), static_cast<double>(rows) / 8));
    case Lengths::giant:
      return rows;
  }
  return rows;
}

TensorMap inputs_of(std::int64_t elements, std::int64_t columns, Lengths lengths, DType dtype,
                    Random& random) {
  const std::int64_t rows = elements / columns;
  std::vector<std::int64_t> offsets = {0};
  while (offsets.back() < rows) {
    offsets.push_back(std::min(rows, offsets.back() + next_length(lengths, rows, random)));
  }
  const auto segments = static_cast<std::int64_t>(offsets.size()) - 1;
  HostTensor offset_tensor(TensorSpec::contiguous(DType::i64, {segments + 1}));
  std::copy(offsets.begin(), offsets.end(), static_cast<std::int64_t*>(offset_tensor.data()));
  return {{"x", normal_tensor(dtype, {rows, columns}, random)},
          {"d_out", normal_tensor(dtype, {segments, columns}, random)},
          {"offsets", offset_tensor}};
}

}  // namespace

std::vector<Case> segment_cuda_bench() {
  const std::pair<Lengths, const char*> kinds[] = {{Lengths::mean_8, "mean 8"},
                                                   {Lengths::mean_4096, "mean 4096"},
                                                   {Lengths::power_law, "power law"},
                                                   {Lengths::giant, "one giant"}};
  std::vector<Case> cases;
  for (const std::int64_t columns : {128, 1, 16, 1000}) {
    for (const auto& [lengths, lengths_name] : kinds) {
      const std::string name = fmt::format("D={} {}", columns, lengths_name);
      const auto add = [&](OptionMap options, std::string what) {
        Case test;
        test.op = "segment";
        test.name = name + " " + what;
        test.options = std::move(options);
        test.dtypes = {DType::f32, DType::bf16};
        test.same_inputs = name;
        test.inputs = [columns, kind = lengths](DType dtype, Random& random) {
          return inputs_of(kElements, columns, kind, dtype, random);
        };
        test.full_only = columns == 16 || columns == 1000;
        cases.push_back(std::move(test));
      };
      add({{"reduce", "sum"}}, "sum");
      add({{"reduce", "max"}, {"arg-dtype", "i32"}}, "max from arg");
      add({{"reduce", "logsumexp"}}, "logsumexp");
      add({{"reduce", "max"}, {"ties", "even"}, {"arg-dtype", "none"}, {"saved", "mask"}},
          "max, even, from the mask");
      if (columns != 128) continue;
      add({{"reduce", "mean"}}, "mean");
      add({{"reduce", "min"}, {"arg-dtype", "i32"}}, "min from arg");
      add({{"reduce", "max"}, {"arg-dtype", "i32"}, {"saved", "mask"}}, "max from the mask");
    }
  }
  Case huge;
  huge.op = "segment";
  huge.name = "2^31+8 elements";
  huge.options = {{"reduce", "max"}};
  huge.dtypes = {DType::bf16};
  huge.full_only = true;
  huge.inputs = [](DType dtype, Random& random) {
    return inputs_of((std::int64_t{1} << 31) + 8, 136, Lengths::mean_4096, dtype, random);
  };
  cases.push_back(std::move(huge));
  return cases;
}

}  // namespace pullback::driver

// Short, long and power-law segments and one giant one, 2^27 elements each, by 128, 16, 1 and 1000
// columns.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "driver/case.hpp"

namespace pullback::driver {
namespace {

using Lengths = std::vector<std::int64_t>;

// Until they hold all rows; `length` draws the next one.
template <class Length>
Lengths fill(std::int64_t rows, const Length& length) {
  Lengths lengths;
  for (std::int64_t left = rows; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, length()));
  }
  return lengths;
}

Lengths lengths_of(std::string_view kind, std::int64_t rows, Random& random) {
  if (kind == "short") return fill(rows, [&] { return random.integer(1, 15); });
  if (kind == "long") return fill(rows, [&] { return random.integer(1, 8191); });
  if (kind == "giant") return {rows};
  return fill(rows, [&] {
    const double length = std::pow(1 - random.uniform(), -1 / 1.1);
    return static_cast<std::int64_t>(std::min(length, static_cast<double>(rows) / 8));
  });
}

}  // namespace

std::vector<Case> segment_cuda_bench() {
  constexpr std::int64_t kElements = std::int64_t{1} << 27;
  std::vector<Case> cases;
  for (const std::int64_t columns : {128, 1, 16, 1000}) {
    for (const char* kind : {"short", "long", "power law", "giant"}) {
      for (const char* reduce : {"sum", "mean", "max", "logsumexp"}) {
        const std::int64_t rows = kElements / columns;
        Case test;
        test.op = "segment";
        test.name = fmt::format("D={} {} {}", columns, kind, reduce);
        test.options = {{"reduce", reduce}, {"arg-dtype", "i32"}};
        test.dtypes = {DType::f32, DType::bf16};
        test.same_inputs = fmt::format("D={} {}", columns, kind);
        test.full_only = std::string_view(reduce) == "mean";
        test.inputs = [=](DType dtype, Random& random) {
          const Lengths lengths = lengths_of(kind, rows, random);
          const auto count = static_cast<std::int64_t>(lengths.size());
          TensorMap inputs{{"x", normal_tensor(dtype, {rows, columns}, random)},
                           {"d_out", normal_tensor(dtype, {count, columns}, random)}};
          HostTensor offsets(TensorSpec::contiguous(DType::i64, {count + 1}));
          auto* to = static_cast<std::int64_t*>(offsets.data());
          to[0] = 0;
          for (std::int64_t s = 0; s < count; ++s) {
            to[s + 1] = to[s] + lengths[static_cast<std::size_t>(s)];
          }
          inputs.emplace("offsets", offsets);
          return inputs;
        };
        cases.push_back(std::move(test));
      }
    }
  }
  return cases;
}

}  // namespace pullback::driver

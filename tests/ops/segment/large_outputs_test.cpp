// Outputs of segment that do not stay in cache and are stored past it.
#include <algorithm>

#include "core/element.hpp"
#include "ops/segment/run_segment.hpp"

namespace pullback::testing {
namespace {

// Tensors too large to stay in cache are written past it: with rows of whole cache lines, with
// other rows, and few columns; the segments of three rows straddle lines and tiles.
template <class T>
void large_outputs() {
  for (const std::int64_t columns : {64, 61, 3, 1}) {
    const std::int64_t rows = (std::int64_t{19} << 20) / 4 / columns / 3 * 3 + 2;
    const std::int64_t count = (rows + 2) / 3;
    TensorMap inputs;
    Index offsets;
    for (std::int64_t s = 0; s <= count; ++s) offsets.push_back(std::min(rows, 3 * s));
    inputs["offsets"] = index_tensor(offsets);
    inputs["x"] = HostTensor(TensorSpec::contiguous(kDTypeOf<T>, {rows, columns}));
    inputs["d_out"] = HostTensor(TensorSpec::contiguous(kDTypeOf<T>, {count, columns}));
    auto* x = static_cast<T*>(inputs["x"].data());
    auto* d_out = static_cast<T*>(inputs["d_out"].data());
    for (std::int64_t i = 0; i < rows * columns; ++i) x[i] = T(static_cast<float>(i * 7 % 13));
    for (std::int64_t i = 0; i < count * columns; ++i) d_out[i] = T(static_cast<float>(1 + i % 11));
    for (const std::string reduce : {"sum", "max"}) {
      const auto outputs = evaluate(inputs, {{"reduce", reduce}});
      const auto* out = static_cast<const T*>(outputs.at("out").data());
      const auto* d_x = static_cast<const T*>(outputs.at("d_x").data());
      std::int64_t wrong = 0;
      for (std::int64_t s = 0; s < count; ++s) {
        for (std::int64_t d = 0; d < columns; ++d) {
          float sum = 0, top = -1;
          std::int64_t row = 0;
          for (std::int64_t n = 3 * s; n < std::min(rows, 3 * s + 3); ++n) {
            const auto value = static_cast<float>(x[n * columns + d]);
            sum += value;
            if (value > top) row = n;
            top = std::max(top, value);
          }
          wrong += static_cast<float>(out[s * columns + d]) != (reduce == "sum" ? sum : top);
          for (std::int64_t n = 3 * s; n < std::min(rows, 3 * s + 3); ++n) {
            const auto g = static_cast<float>(d_out[s * columns + d]);
            const auto got = static_cast<float>(d_x[n * columns + d]);
            wrong += got != (reduce == "sum" || n == row ? g : 0);
          }
        }
      }
      EXPECT_EQ(wrong, 0) << reduce << " " << columns;
    }
  }
}
TEST(segment_streams, large_outputs) { large_outputs<float>(); }
TEST(segment_streams, large_outputs_of_16_bits) { large_outputs<bfloat16>(); }

// The same for out and arg, which have a row per segment.
TEST(segment_streams, large_out_and_arg) {
  constexpr std::int64_t kRows = 90000, kColumns = 64;
  TensorMap inputs;
  Index offsets(kRows + 1);
  for (std::int64_t s = 0; s <= kRows; ++s) offsets[static_cast<std::size_t>(s)] = s;
  offsets[5] = 4;  // one empty segment and one of two rows
  inputs["offsets"] = index_tensor(offsets);
  inputs["x"] = HostTensor(TensorSpec::contiguous(DType::f32, {kRows, kColumns}));
  inputs["d_out"] = inputs["x"];
  auto* x = static_cast<float*>(inputs["x"].data());
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) x[i] = static_cast<float>(i % 1001);
  for (const std::string reduce : {"sum", "max"}) {
    const auto outputs = evaluate(inputs, {{"reduce", reduce}, {"empty", "zero"}});
    const auto* out = static_cast<const float*>(outputs.at("out").data());
    std::int64_t wrong = 0;
    for (std::int64_t s = 6; s < kRows; ++s) {
      for (std::int64_t d = 0; d < kColumns; ++d) {
        wrong += out[s * kColumns + d] != x[s * kColumns + d];
        if (reduce == "max") {
          const auto* arg = static_cast<const std::int64_t*>(outputs.at("arg").data());
          wrong += arg[s * kColumns + d] != s;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << reduce;
    EXPECT_EQ(out[4 * kColumns], 0);
    EXPECT_TRUE(outputs.at("out").guards_intact());
  }
}

}  // namespace
}  // namespace pullback::testing

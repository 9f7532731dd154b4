// What the cases of entmax are made from.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "driver/case.hpp"

namespace pullback::driver::entmax_setup {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Shape = std::vector<std::int64_t>;
using Logit = std::function<double(std::int64_t flat, Random&)>;

inline HostTensor tensor_from(DType dtype, const Shape& shape, Random& random, const Logit& value) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  if (random.fills_nothing()) return tensor;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value(i, random));
  return tensor;
}

inline Logit normal(double sigma, double offset = 0) {
  return [=](std::int64_t, Random& random) { return offset + sigma * random.normal(); };
}

inline Logit listed(std::vector<double> values) {
  return [values = std::move(values)](std::int64_t i, Random&) {
    return values[static_cast<std::size_t>(i) % values.size()];
  };
}

// Adds optional inputs to x and d_y.
using More = std::function<void(TensorMap& inputs, DType dtype, Random& random)>;

inline Case make_case(std::string name, OptionMap options, const Shape& shape, const Logit& logit,
                      const More& more = {}) {
  Case test;
  test.op = "entmax";
  test.name = std::move(name);
  test.options = std::move(options);
  test.inputs = [=](DType dtype, Random& random) {
    TensorMap inputs;
    inputs["x"] = tensor_from(dtype, shape, random, logit);
    inputs["d_y"] = tensor_from(dtype, shape, random, normal(1));
    if (more) more(inputs, dtype, random);
    return inputs;
  };
  return test;
}

inline More mask_of(const Shape& shape, double visible) {
  return [=](TensorMap& inputs, DType, Random& random) {
    inputs["mask"] = tensor_from(DType::boolean, shape, random, [=](std::int64_t, Random& r) {
      return r.chance(visible) ? 1.0 : 0.0;
    });
  };
}

inline More alphas_of(const Shape& shape, std::vector<double> alphas) {
  return [=](TensorMap& inputs, DType dtype, Random& random) {
    inputs["alpha"] = tensor_from(accumulation_dtype(dtype), shape, random, listed(alphas));
  };
}

inline More offsets_of(DType dtype, std::vector<double> offsets) {
  return [=](TensorMap& inputs, DType, Random& random) {
    inputs["offsets"] =
        tensor_from(dtype, {static_cast<std::int64_t>(offsets.size())}, random, listed(offsets));
  };
}

inline More both(const More& first, const More& second) {
  return [=](TensorMap& inputs, DType dtype, Random& random) {
    first(inputs, dtype, random);
    second(inputs, dtype, random);
  };
}

// Differences mean nothing where the slope of p is infinite at the edge of the support, and alpha
// cannot be moved below 1.
inline Case no_differences(Case test) {
  test.finite_differences = false;
  return test;
}

// row_cases.cpp
void many_rows(std::vector<Case>& cases);
void rows_with_edges(std::vector<Case>& cases);
void long_rows(std::vector<Case>& cases);
void masked_rows(std::vector<Case>& cases);
// tile_cases.cpp
void tiles(std::vector<Case>& cases);

}  // namespace pullback::driver::entmax_setup

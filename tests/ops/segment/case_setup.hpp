// What the cases of segment are made from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/element.hpp"
#include "driver/case.hpp"

namespace pullback::driver::segment_setup {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline const std::vector<std::string> kReduces = {"sum",  "mean",      "max",    "min",
                                                  "prod", "logsumexp", "softmax"};

enum class Form { offsets_i64, offsets_i32, ids_i64, ids_i32, unsorted, unsorted_with_ids };
enum class Values {
  normal,
  integers,
  near_one,
  relu,
  wide,
  far,
  low,
  near_0,
  special,
  special_near_one,
  mostly_infinite,
  steps,
  level,
};

using Lengths = std::vector<std::int64_t>;

struct Shape {
  Lengths lengths;  // rows of each segment
  std::int64_t columns;
  Form form = Form::offsets_i64;
  std::int64_t before = 0, after = 0;  // rows in no segment
};

inline std::int64_t total(const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

inline HostTensor index_tensor(DType dtype, const Lengths& values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(dtype, tensor.data(), static_cast<std::int64_t>(i),
                  static_cast<double>(values[i]));
  }
  return tensor;
}

inline HostTensor values_tensor(DType dtype, std::int64_t rows, std::int64_t columns, Values values,
                                Random& random) {
  if (values == Values::normal || random.fills_nothing()) {
    return normal_tensor(dtype, {rows, columns}, random);
  }
  HostTensor tensor(TensorSpec::contiguous(dtype, {rows, columns}));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    double value = random.normal();
    if (values == Values::integers) value = static_cast<double>(random.integer(-3, 3));
    if (values == Values::relu) value = std::max(0.0, static_cast<double>(random.integer(-6, 1)));
    // Long products of normal numbers vanish; these wander around 1.
    if (values == Values::near_one || values == Values::special_near_one) {
      value = std::exp(0.02 * value) * (random.chance(0.5) ? -1 : 1);
    }
    // Further from each other than one shift of exponents serves.
    if (values == Values::wide) value *= 40;
    // Logarithms of small numbers, and of 0.
    if (values == Values::low) value = random.chance(0.1) ? -kInfinity : 10 * value - 80;
    // Logarithms near 0 of sums whose shift may be far from it.
    if (values == Values::near_0) value = 0.2 * value - (random.chance(0.4) ? 8 : 0);
    // Mostly the same in a column, and so far from 0 that a product with log2(e) has lost the
    // digits of exponents; the lowest of bf16 is what masks are filled with.
    if (values == Values::far && !random.chance(0.05)) {
      const double places[] = {2e9, 3, -65504, 1e10, -1e15, 2000, -3.3895313892515355e38, -900};
      value = places[i % columns % 8] + std::round(value);
    }
    // The same for many rows of a column, then something else: shifts of the rows before serve
    // none.
    if (values == Values::steps) {
      const double steps[] = {0, -200, -kInfinity, -3.3895313892515355e38, 60};
      value = steps[(i / columns / 1024 + i % columns) % 5] + value;
    }
    // Equal for 1024 rows, and far from 0 (in f16 some are infinite): the lse of one row is that
    // row to the last digit, or its gradient is not 1.
    if (values == Values::level) {
      const double levels[] = {30000, -1e5, 1e6, -700, 1e8};
      value = levels[(i / columns / 1024 + i % columns) % 5];
    }
    const bool special = values == Values::special || values == Values::special_near_one;
    if (values == Values::mostly_infinite && random.chance(0.9)) value = -kInfinity;
    if ((special && random.chance(0.02)) ||
        (values == Values::mostly_infinite && random.chance(0.05))) {
      const double specials[] = {-kInfinity, kInfinity, kNaN, 0};
      value = specials[random.integer(0, 3)];
    }
    tensor.set(i, value);
  }
  return tensor;
}

inline TensorMap make_inputs(const Shape& shape, DType dtype, Random& random, Values values,
                             bool softmax) {
  TensorMap inputs;
  const std::int64_t count = static_cast<std::int64_t>(shape.lengths.size());
  const std::int64_t rows = shape.before + total(shape.lengths) + shape.after;
  inputs["x"] = values_tensor(dtype, rows, shape.columns, values, random);
  inputs["d_out"] = values == Values::integers
                        ? integer_tensor(dtype, {softmax ? rows : count, shape.columns}, random, 4)
                        : normal_tensor(dtype, {softmax ? rows : count, shape.columns}, random);
  const bool narrow = shape.form == Form::offsets_i32 || shape.form == Form::ids_i32;
  const DType index = narrow ? DType::i32 : DType::i64;
  if (shape.form == Form::offsets_i64 || shape.form == Form::offsets_i32) {
    Lengths offsets = {shape.before};
    for (std::int64_t length : shape.lengths) offsets.push_back(offsets.back() + length);
    inputs["offsets"] = index_tensor(index, offsets);
    return inputs;
  }
  Lengths ids(static_cast<std::size_t>(shape.before), -1);
  for (std::int64_t s = 0; s < count; ++s) {
    ids.insert(ids.end(), static_cast<std::size_t>(shape.lengths[static_cast<std::size_t>(s)]), s);
  }
  ids.insert(ids.end(), static_cast<std::size_t>(shape.after), count);
  if (shape.form == Form::unsorted || shape.form == Form::unsorted_with_ids) {
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1],
                ids[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
  }
  inputs["ids"] = index_tensor(index, ids);
  return inputs;
}

inline bool extreme(const std::string& reduce) { return reduce == "max" || reduce == "min"; }

inline Values values_for(const std::string& reduce, Values values) {
  if (reduce != "prod") return values;
  if (values == Values::special) return Values::special_near_one;
  return values == Values::normal ? Values::near_one : values;
}

inline Case make_case(const std::string& name, const std::string& reduce, const Shape& shape,
                      OptionMap options = {}, Values values = Values::normal) {
  Case result;
  result.op = "segment";
  result.name = reduce + " " + name;
  options["reduce"] = reduce;
  options["num-segments"] = std::to_string(shape.lengths.size());
  if (shape.form == Form::unsorted) options["keep-ids"] = "false";
  result.options = options;
  values = values_for(reduce, values);
  const bool softmax = reduce == "softmax";
  result.inputs = [=](DType dtype, Random& random) {
    return make_inputs(shape, dtype, random, values, softmax);
  };
  // Ties are kinks, and 16-bit values tie often; only f64 is stepped, and it does not.
  result.finite_differences = values == Values::normal || values == Values::near_one;
  return result;
}

// Lengths with a heavy tail: most are short, few hold most rows.
inline Lengths power_law(std::int64_t rows, std::int64_t longest, Random& random) {
  Lengths lengths;
  for (std::int64_t left = rows; left > 0;) {
    const double length = std::pow(1 - random.uniform(), -1 / 1.1);
    lengths.push_back(
        std::clamp<std::int64_t>(static_cast<std::int64_t>(length), 0, std::min(left, longest)));
    left -= lengths.back();
  }
  return lengths;
}

// Values given one by one, for the edge rules.
inline Case edge_case(const std::string& name, const std::string& reduce,
                      std::initializer_list<double> column, std::initializer_list<double> d_out,
                      const Lengths& lengths, OptionMap options = {}) {
  Case result;
  result.op = "segment";
  result.name = reduce + " " + name;
  options["reduce"] = reduce;
  result.options = options;
  const std::vector<double> x_values(column), g_values(d_out);
  result.inputs = [=](DType dtype, Random&) {
    TensorMap inputs;
    const auto rows = static_cast<std::int64_t>(x_values.size());
    const auto out_rows = static_cast<std::int64_t>(g_values.size());
    HostTensor x(TensorSpec::contiguous(dtype, {rows, 3}));
    HostTensor g(TensorSpec::contiguous(dtype, {out_rows, 3}));
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      // The other columns see the rows in other orders.
      const std::int64_t row = (i / 3 + (i % 3 == 1 ? 1 : 0)) % rows;
      x.set(i, x_values[static_cast<std::size_t>(i % 3 == 2 ? rows - 1 - row : row)]);
    }
    for (std::int64_t i = 0; i < g.numel(); ++i) {
      g.set(i, g_values[static_cast<std::size_t>(i / 3)]);
    }
    inputs["x"] = x;
    inputs["d_out"] = g;
    Lengths offsets = {0};
    for (std::int64_t length : lengths) offsets.push_back(offsets.back() + length);
    inputs["offsets"] = index_tensor(DType::i64, offsets);
    return inputs;
  };
  result.finite_differences = false;
  return result;
}

// tile_cases.cpp
void tiles(std::vector<Case>& cases, const Lengths& skewed);
void mask_tiles(std::vector<Case>& cases, const Lengths& skewed);

}  // namespace pullback::driver::segment_setup

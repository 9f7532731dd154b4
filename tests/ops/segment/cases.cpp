// Cases of segment: every reduction, tie rule, empty rule, saved form and index form, and the sizes
// and segment lengths where kernels tend to break.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/element.hpp"
#include "driver/case.hpp"

namespace pullback::driver {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const std::vector<std::string> kReduces = {"sum",  "mean",      "max",    "min",
                                           "prod", "logsumexp", "softmax"};

enum class Form { offsets_i64, offsets_i32, ids_i64, ids_i32, unsorted };
enum class Values { normal, integers, near_one, relu, wide, special, special_near_one };

using Lengths = std::vector<std::int64_t>;

struct Shape {
  Lengths lengths;  // rows of each segment
  std::int64_t columns;
  Form form = Form::offsets_i64;
  std::int64_t before = 0, after = 0;  // rows in no segment
};

std::int64_t total(const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

HostTensor index_tensor(DType dtype, const Lengths& values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(dtype, tensor.data(), static_cast<std::int64_t>(i),
                  static_cast<double>(values[i]));
  }
  return tensor;
}

HostTensor values_tensor(DType dtype, std::int64_t rows, std::int64_t columns, Values values,
                         Random& random) {
  if (values == Values::normal) return normal_tensor(dtype, {rows, columns}, random);
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
    const bool special = values == Values::special || values == Values::special_near_one;
    if (special && random.chance(0.02)) {
      const double specials[] = {-kInfinity, kInfinity, kNaN, 0};
      value = specials[random.integer(0, 3)];
    }
    tensor.set(i, value);
  }
  return tensor;
}

TensorMap make_inputs(const Shape& shape, DType dtype, Random& random, Values values,
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
  if (shape.form == Form::unsorted) {
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1],
                ids[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
  }
  inputs["ids"] = index_tensor(index, ids);
  return inputs;
}

bool extreme(const std::string& reduce) { return reduce == "max" || reduce == "min"; }

Values values_for(const std::string& reduce, Values values) {
  if (reduce != "prod") return values;
  if (values == Values::special) return Values::special_near_one;
  return values == Values::normal ? Values::near_one : values;
}

Case make_case(const std::string& name, const std::string& reduce, const Shape& shape,
               OptionMap options = {}, Values values = Values::normal) {
  Case result;
  result.op = "segment";
  result.name = reduce + " " + name;
  options["reduce"] = reduce;
  options["num-segments"] = std::to_string(shape.lengths.size());
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
Lengths power_law(std::int64_t rows, std::int64_t longest, Random& random) {
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
Case edge_case(const std::string& name, const std::string& reduce,
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

// Kernels that hold tiles of rows: segments about the borders of tiles, longer ones, which warps
// share, and for softmax those too long for that.
void add_tiles(std::vector<Case>& cases, const Lengths& skewed) {
  const auto add = [&](const std::string& name, const std::string& reduce, const Shape& shape,
                       Values values, const OptionMap& options = {}) {
    const std::string full = name + " D=" + std::to_string(shape.columns);
    cases.push_back(make_case(full, reduce, shape, options, values));
    cases.back().finite_differences = false;
  };
  // The least tiles have 128 rows and ends.
  Lengths tiles = {125, 1,  126, 0,  0,  127, 254, 3, 1,   0, 122,
                   40,  60, 90,  33, 32, 31,  700, 1, 250, 0, 0};
  const Lengths empty(300, 0);
  tiles.insert(tiles.end(), empty.begin(), empty.end());
  tiles.push_back(129);
  for (const std::int64_t columns : {1, 2, 3, 4, 12, 33, 128}) {
    add("about tiles", "softmax", {tiles, columns, Form::ids_i32, 130, 5}, Values::normal);
    add("special short", "softmax", {skewed, columns, Form::offsets_i32}, Values::special);
    add("wide short", "softmax", {skewed, columns, Form::offsets_i64, 3, 200}, Values::wide);
  }
  for (const std::int64_t columns : {1, 2, 3, 4, 6, 8, 12, 16, 50, 67, 70, 100, 128}) {
    add("long", "softmax", {{27000 / columns, 1, 27000 / columns}, columns}, Values::normal);
  }
  for (const std::string reduce : {"sum", "mean", "max", "min", "logsumexp"}) {
    const auto values = extreme(reduce) ? Values::integers : Values::normal;
    for (const std::int64_t columns : {2, 3, 50}) {
      add("about tiles", reduce, {tiles, columns, Form::ids_i32, 130, 5}, values);
    }
    add("special about tiles", reduce, {tiles, 3, Form::offsets_i32, 130, 5}, Values::special);
    add("long", reduce, {{0, 900, 3, 257, 256, 700, 5}, 6, Form::offsets_i64, 9, 300}, values);
    if (reduce == "min" || reduce == "mean") continue;
    // Enough rows for tiles of more than a warp's part of a segment on a large GPU.
    add("many long", reduce, {Lengths(600, 300), 3}, values);
  }
  for (const std::string reduce : {"max", "min"}) {
    const OptionMap options = {{"ties", "last"}, {"arg-dtype", "i32"}};
    add("last about tiles", reduce, {tiles, 3}, Values::integers, options);
    add("last long", reduce, {{900, 3, 257, 0, 700, 5}, 10}, Values::integers, options);
  }
}

void add_edges(std::vector<Case>& cases) {
  for (const std::string reduce : {"max", "min"}) {
    for (const std::string ties : {"first", "last", "even"}) {
      for (const std::string saved : {"arg", "mask", "none"}) {
        const OptionMap options = {{"ties", ties}, {"saved", saved}};
        const std::string name = ties + " " + saved + " ";
        cases.push_back(
            edge_case(name + "NaN", reduce, {1, kNaN, 2, kNaN, 3, 0, 5}, {2, -3}, {5, 2}, options));
        cases.push_back(edge_case(name + "infinities", reduce,
                                  {-kInfinity, -kInfinity, kInfinity, 1, kInfinity, -kInfinity},
                                  {2, -3, 1}, {2, 3, 1}, options));
        cases.push_back(edge_case(name + "negative gradient of ties", reduce,
                                  {2, 2, 1, 2, 2, 0, 0, 0}, {-3, -1}, {5, 3}, options));
        cases.push_back(make_case(name + "true extreme of 0", reduce, {{4, 9, 17, 0, 40}, 5},
                                  options, Values::relu));
      }
    }
  }
  const auto edge = [&](const std::string& name, const std::string& reduce,
                        std::initializer_list<double> x, std::initializer_list<double> g,
                        const Lengths& lengths) {
    cases.push_back(edge_case(name, reduce, x, g, lengths));
  };
  edge("one zero", "prod", {2, 0, 3, -4, 5}, {2, 3}, {3, 2});
  edge("two zeros", "prod", {2, 0, 3, 0, 5, 7}, {2, 3}, {4, 2});
  edge("NaN and infinity", "prod", {2, kNaN, 3, kInfinity, 5, 1}, {2, 3, 1}, {2, 3, 1});
  for (const std::string reduce : {"logsumexp", "softmax"}) {
    const bool softmax = reduce == "softmax";
    const auto both = [&](const std::string& name, std::initializer_list<double> x,
                          const Lengths& lengths) {
      cases.push_back(softmax ? edge_case(name, reduce, x, {1, 2, 3, -1, 2, 1}, lengths)
                              : edge_case(name, reduce, x, {2, -3}, lengths));
    };
    both("all -inf", {-kInfinity, -kInfinity, -kInfinity, 1, 2, 0.5}, {3, 3});
    both("some -inf", {-kInfinity, 1, -kInfinity, 1, 2, -kInfinity}, {3, 3});
    both("+inf", {kInfinity, 1, 2, 1, kInfinity, kInfinity}, {3, 3});
    both("NaN", {kNaN, 1, 2, 1, 2, -kInfinity}, {3, 3});
    both("large", {3e4, 3e4, 2e4, -3e4, -3e4, -2.5e4}, {3, 3});
  }
}

// Rows, of up to 128 bytes and more, that are made of smaller pieces than of 16 bytes.
constexpr std::int64_t kPieceColumns[] = {2, 6, 12, 67, 70, 100};

// What backward of max and min may use, where rows are in whole vectors, many columns, or one.
void add_widths(std::vector<Case>& cases, const std::string& reduce, const std::string& ties,
                const Lengths& lengths) {
  const std::pair<const char*, const char*> forms[] = {
      {"arg", "i64"},  {"arg", "i32"}, {"arg", "u8"},   {"mask", "none"},
      {"mask", "i32"}, {"mask", "u8"}, {"none", "none"}};
  for (const auto& [saved, arg] : forms) {
    const OptionMap options = {{"ties", ties}, {"saved", saved}, {"arg-dtype", arg}};
    const auto add = [&](const std::string& name, const Shape& shape) {
      const std::string full = ties + " " + saved + ", arg " + arg + ", " + name;
      cases.push_back(make_case(full, reduce, shape, options, Values::integers));
    };
    add("D=1", {lengths, 1});
    add("D=5", {lengths, 5});
    add("D=16", {lengths, 16});
    add("D=64", {lengths, 64});
    add("D=64 unsorted", {lengths, 64, Form::unsorted});
    add("D=264", {lengths, 264});
    // Of the kernels, min has those of forward alone to itself.
    if (reduce == "min" && (arg == std::string("i32") || arg == std::string("u8"))) continue;
    for (const std::int64_t columns : kPieceColumns) {
      const std::string width = "D=" + std::to_string(columns);
      add(width, {lengths, columns});
      if (columns <= 12) add(width + " unsorted", {lengths, columns, Form::unsorted});
    }
  }
}

}  // namespace

std::vector<Case> segment_cases() {
  std::vector<Case> cases;
  const Lengths mixed = {0, 3, 1, 0, 17, 8, 40, 0, 0, 2, 64, 5, 0};
  const auto add = [&](Case test) { cases.push_back(std::move(test)); };

  for (const std::string& reduce : kReduces) {
    for (std::int64_t columns : {0, 1, 3, 31, 32, 33, 64, 512}) {
      add(make_case("D=" + std::to_string(columns), reduce, {mixed, columns}));
    }
    const std::pair<const char*, Form> forms[] = {{"offsets i32", Form::offsets_i32},
                                                  {"ids i64", Form::ids_i64},
                                                  {"ids i32", Form::ids_i32},
                                                  {"unsorted", Form::unsorted}};
    for (const auto& [name, form] : forms) add(make_case(name, reduce, {mixed, 7, form}));
    add(make_case("unsorted D=64", reduce, {mixed, 64, Form::unsorted}));
    for (const std::int64_t columns : kPieceColumns) {
      const std::string width = "D=" + std::to_string(columns);
      add(make_case(width, reduce, {mixed, columns}));
      if (columns <= 12) {
        add(make_case(width + " unsorted", reduce, {mixed, columns, Form::unsorted, 2, 3}));
      }
    }
    for (Form form : {Form::offsets_i64, Form::ids_i64, Form::unsorted}) {
      add(make_case("rows in no segment " + std::to_string(static_cast<int>(form)), reduce,
                    {mixed, 5, form, 6, 9}));
    }
    for (const std::string empty : {"zero", "nan"}) {
      add(make_case("empty " + empty, reduce, {mixed, 4}, {{"empty", empty}}));
    }
    add(make_case("S=0 N=0", reduce, {{}, 4}));
    add(make_case("S=0", reduce, {{}, 4, Form::offsets_i64, 0, 5}));
    add(make_case("S=0 ids", reduce, {{}, 4, Form::ids_i64, 3, 5}));
    add(make_case("N=0", reduce, {{0, 0, 0}, 4}));
    add(make_case("L=1", reduce, {Lengths(300, 1), 6}));
    add(make_case("one giant", reduce, {{3000}, 5}));
    add(make_case("one giant D=128", reduce, {{1500}, 128}));
    add(make_case("giants D=1", reduce, {{30000, 0, 20001, 20000}, 1}));
    add(make_case("giant among empty and short", reduce,
                  {{0, 0, 5, 2100, 1, 0, 700, 0}, 70, Form::ids_i64, 3, 4}));
    Lengths mostly_empty(5000, 0);
    mostly_empty[2500] = 300;
    mostly_empty[4999] = 3;
    add(make_case("mostly empty", reduce, {mostly_empty, 9}));
    add(make_case("many columns", reduce, {{3, 0, 600, 1}, 1100}));
    // Tasks have 1024 columns: the last one has a single column of many.
    for (Form form : {Form::offsets_i64, Form::unsorted}) {
      const std::string name = form == Form::unsorted ? "unsorted D=1025" : "D=1025";
      add(make_case(name, reduce, {{3, 0, 70, 1, 9}, 1025, form}));
    }
    Random random(7);
    add(make_case("power law", reduce, {power_law(4000, 2000, random), 17}));
    add(make_case("power law D=1", reduce, {power_law(9000, 4000, random), 1}));
  }
  Random random(9);
  const Lengths blocks = power_law(6000, 900, random);  // of one column: several blocks of a scan
  for (const std::string& reduce : kReduces) {
    add(make_case("special D=1", reduce, {blocks, 1}, {}, Values::special));
    cases.back().finite_differences = false;
    for (const std::string empty : {"zero", "nan"}) {
      add(make_case("empty " + empty + " D=1", reduce, {mixed, 1}, {{"empty", empty}}));
    }
    for (std::int64_t columns : {2, 4, 6, 8, 16, 32}) {
      const std::string name = " D=" + std::to_string(columns);
      add(make_case("narrow" + name, reduce, {blocks, columns, Form::offsets_i32, 40, 90}));
      if (reduce == "softmax") continue;
      add(make_case("special" + name, reduce, {blocks, columns}, {}, Values::special));
      cases.back().finite_differences = false;
    }
    if (reduce == "logsumexp") {
      // 16 bits only: the others have it in out.
      const OptionMap none = {{"saved", "none"}};
      for (const std::int64_t columns : {1, 16, 33, 128}) {
        add(make_case("without lse D=" + std::to_string(columns), reduce, {mixed, columns}, none));
        cases.back().dtypes = {DType::bf16, DType::f16};
      }
      add(make_case("without lse, unsorted", reduce, {mixed, 9, Form::unsorted, 2, 3}, none));
      cases.back().dtypes = {DType::bf16, DType::f16};
    }
    if (reduce == "logsumexp" || reduce == "softmax") {
      add(make_case("wide D=1", reduce, {blocks, 1}, {}, Values::wide));
    }
  }
  for (const std::string reduce : {"max", "min"}) {
    for (const std::string ties : {"first", "last", "even"}) {
      add(make_case(ties + " special D=1", reduce, {blocks, 1}, {{"ties", ties}, {"saved", "none"}},
                    Values::special));
      cases.back().finite_differences = false;
      for (const std::string saved : {"arg", "mask", "none"}) {
        const OptionMap options = {{"ties", ties}, {"saved", saved}};
        const std::string name = ties + " " + saved;
        const auto tied = [&](const std::string& what, const Shape& shape) {
          add(make_case(name + " " + what, reduce, shape, options, Values::integers));
        };
        tied("short", {mixed, 33});
        tied("short D=1", {mixed, 1});
        tied("unsorted", {mixed, 9, Form::unsorted, 2, 3});
        tied("giant", {{4, 0, 2500, 7}, 20});
        tied("giant unsorted", {{4, 0, 1300, 7}, 65, Form::unsorted});
        tied("giant D=1", {{40000, 3}, 1});
        tied("D=1025", {{3, 0, 70, 1, 9}, 1025});
        tied("empty zero", {mixed, 8, Form::ids_i32});
        cases.back().options["empty"] = "zero";
      }
      add_widths(cases, reduce, ties, mixed);
      for (const std::string arg : {"i32", "u8"}) {
        add(make_case(ties + " arg " + arg, reduce, {mixed, 33},
                      {{"ties", ties}, {"arg-dtype", arg}}, Values::integers));
        add(make_case(ties + " unsorted arg " + arg, reduce, {mixed, 5, Form::unsorted},
                      {{"ties", ties}, {"arg-dtype", arg}}, Values::integers));
      }
    }
  }
  for (const std::string reduce : {"sum", "prod", "max"}) {
    Case test = make_case("exact", reduce, {{3, 2, 0, 1, 3}, 21}, {}, Values::integers);
    test.exact = true;
    add(test);
  }
  add_tiles(cases, power_law(1500, 300, random));
  add_edges(cases);
  return cases;
}

Case segment_fuzz(std::uint64_t seed) {
  Random random(seed);
  const auto any = [&](std::initializer_list<const char*> names) {
    return std::string(
        names.begin()[random.integer(0, static_cast<std::int64_t>(names.size()) - 1)]);
  };
  Shape shape;
  // About the widths of vectors and tasks, with few rows.
  static constexpr std::int64_t kWide[] = {127, 128, 300, 512, 1000, 1023, 1024, 1025, 1040, 2049};
  const bool wide = random.chance(0.15);
  const std::int64_t kind = random.integer(0, wide ? 1 : 3);
  const std::int64_t count = random.integer(0, wide ? 6 : kind == 3 ? 4 : 60);
  for (std::int64_t s = 0; s < count; ++s) {
    shape.lengths.push_back(kind == 0   ? random.integer(0, 3)
                            : kind == 1 ? random.integer(0, 40)
                            : kind == 2 ? (random.chance(0.8) ? 0 : random.integer(1, 200))
                                        : random.integer(0, 1500));
  }
  shape.columns = wide                 ? kWide[random.integer(0, std::ssize(kWide) - 1)]
                  : random.chance(0.3) ? random.integer(0, 3)
                                       : random.integer(1, 80);
  shape.form = static_cast<Form>(random.integer(0, 4));
  if (random.chance(0.4)) shape.before = random.integer(0, 9);
  if (random.chance(0.4)) shape.after = random.integer(0, 9);
  const std::string reduce = kReduces[static_cast<std::size_t>(random.integer(0, 6))];
  OptionMap options = {{"ties", any({"first", "last", "even"})},
                       {"saved", any({"arg", "mask", "none"})},
                       {"empty", any({"identity", "zero", "nan"})}};
  Values values = extreme(reduce) && random.chance(0.5) ? Values::integers : Values::normal;
  if (reduce != "softmax" && random.chance(0.15)) values = Values::special;
  Case test = make_case("fuzz", reduce, shape, options, values);
  test.finite_differences = values == Values::normal;
  return test;
}

std::vector<Case> segment_bench() {
  // 2^20 rows of 128 in f32 are 512 MiB. All cases have about the same bytes.
  struct Size {
    const char* name;
    std::int64_t rows, columns;
  };
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const std::string& reduce, const Shape& shape,
                       OptionMap options = {}) {
    Case test = make_case(name, reduce, shape, options);
    test.dtypes = {DType::f32};
    test.finite_differences = false;
    cases.push_back(test);
  };
  for (const Size& size :
       {Size{"D=128", 1 << 19, 128}, Size{"D=16", 1 << 22, 16}, Size{"D=1", 1 << 25, 1}}) {
    Random random(11);
    const Lengths mean8(static_cast<std::size_t>(size.rows / 8), 8);
    const Lengths mean4096(static_cast<std::size_t>(size.rows / 4096), 4096);
    const Lengths skewed = power_law(size.rows, size.rows / 8, random);
    const std::string name = size.name;
    const std::pair<const char*, Lengths> kinds[] = {
        {" mean 8", mean8}, {" mean 4096", mean4096}, {" power law", skewed}};
    for (const auto& [kind, lengths] : kinds) {
      for (const std::string reduce : {"sum", "mean", "max", "logsumexp", "softmax"}) {
        add(name + kind, reduce, {lengths, size.columns});
        if (reduce != "softmax") cases.back().same_inputs = name + kind;
      }
    }
  }
  const Lengths mean8(1 << 16, 8);
  add("D=128 mean 8 recompute", "max", {mean8, 128}, {{"saved", "none"}});
  add("D=128 mean 8 unsorted", "sum", {mean8, 128, Form::unsorted});
  return cases;
}

}  // namespace pullback::driver

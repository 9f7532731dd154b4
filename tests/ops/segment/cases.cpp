// Cases of segment: every reduction, tie rule, empty rule, saved form and index form, and the sizes
// and segment lengths where kernels tend to break.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/segment/case_setup.hpp"

namespace pullback::driver {
namespace {

using namespace segment_setup;

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
    add("D=1 unsorted", {lengths, 1, Form::unsorted});
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
    for (const std::int64_t columns : {1, 5, 8, 16, 64}) {
      add(make_case("unsorted with ids D=" + std::to_string(columns), reduce,
                    {mixed, columns, Form::unsorted_with_ids, 2, 3}));
    }
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
    for (const std::int64_t columns : {8, 9}) {
      const std::string name = columns == 9 ? "" : " D=" + std::to_string(columns);
      add(make_case("mostly empty" + name, reduce, {mostly_empty, columns}));
      add(make_case("giants among empty" + name, reduce,
                    {{0, 3000, 0, 0, 1, 0, 2100, 5, 0}, columns, Form::ids_i32, 3, 4}));
    }
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
  Lengths few;  // folded in groups, with two that are longer than those read
  for (int s = 0; s < 400; ++s) few.push_back(random.integer(0, 20));
  few[100] = 300;
  few[101] = 17;
  for (const std::string& reduce : kReduces) {
    add(make_case("special D=1", reduce, {blocks, 1}, {}, Values::special));
    cases.back().finite_differences = false;
    for (const std::string ties : {"first", "last"}) {
      for (const Form form : {Form::offsets_i64, Form::offsets_i32}) {
        if (ties == "last" && !extreme(reduce)) continue;
        const std::string name = form == Form::offsets_i64 ? "i64 " : "i32 ";
        const Values values = extreme(reduce) ? Values::integers : Values::normal;
        add(make_case("few D=1 " + name + ties, reduce, {few, 1, form}, {{"ties", ties}}, values));
      }
    }
    for (const std::string empty : {"zero", "nan"}) {
      add(make_case("empty " + empty + " D=1", reduce, {mixed, 1}, {{"empty", empty}}));
    }
    for (const std::int64_t columns : {1, 3, 10, 17}) {
      const std::string name = "D=" + std::to_string(columns);
      add(make_case("unsorted blocks " + name, reduce, {blocks, columns, Form::unsorted, 40, 90}));
    }
    add(make_case("special unsorted D=1", reduce, {blocks, 1, Form::unsorted}, {},
                  Values::special));
    cases.back().finite_differences = false;
    // Longer than the blocks of rows whose ids are looked at together, and none for some.
    const Lengths long_and_none = {16383, 0, 2, 0, 0, 20000, 1, 0, 16000, 0};
    for (Form form : {Form::ids_i64, Form::ids_i32}) {
      const std::string name = form == Form::ids_i64 ? "long ids i64" : "long ids i32";
      add(make_case(name, reduce, {long_and_none, 1, form, 100, 70}));
    }
    for (std::int64_t columns : {2, 4, 6, 8, 16, 32}) {
      const std::string name = " D=" + std::to_string(columns);
      add(make_case("narrow" + name, reduce, {blocks, columns, Form::offsets_i32, 40, 90}));
      if (reduce == "softmax") continue;
      add(make_case("special" + name, reduce, {blocks, columns}, {}, Values::special));
      cases.back().finite_differences = false;
      if (columns != 16) continue;
      add(make_case("special giants" + name, reduce, {{5000, 0, 1, 3001}, columns}, {},
                    Values::special));
      cases.back().finite_differences = false;
    }
    for (const std::int64_t columns : {1, 2, 4}) {
      add(make_case("many unsorted with ids D=" + std::to_string(columns), reduce,
                    {blocks, columns, Form::unsorted_with_ids, 40, 90}));
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
      for (const Form form : {Form::offsets_i32, Form::unsorted}) {
        const std::string name =
            form == Form::unsorted ? "without lse, unsorted " : "without lse, ";
        for (const std::int64_t columns : {1, 3}) {
          const std::string full = name + "blocks D=" + std::to_string(columns);
          add(make_case(full, reduce, {blocks, columns, form, 40, 90}, none));
          cases.back().dtypes = {DType::bf16, DType::f16};
        }
      }
      add(make_case("without lse, special D=1", reduce, {blocks, 1}, none, Values::special));
      cases.back().dtypes = {DType::bf16, DType::f16};
      cases.back().finite_differences = false;
    }
    if (reduce == "logsumexp" || reduce == "softmax") {
      for (const std::int64_t columns : {1, 8, 16}) {
        add(make_case(fmt::format("steps D={}", columns), reduce,
                      {{1024, 1024, 2048, 1500, 0, 600, 3000}, columns}, {}, Values::steps));
        cases.back().finite_differences = false;
        add(make_case(fmt::format("level rows D={}", columns), reduce,
                      {Lengths(5 * 1024, 1), columns}, {}, Values::level));
        cases.back().finite_differences = false;
        add(make_case(fmt::format("level giants D={}", columns), reduce,
                      {{3000, 1, 1, 2500, 40}, columns}, {}, Values::level));
        cases.back().finite_differences = false;
      }
      const std::pair<const char*, Values> kinds[] = {{"wide", Values::wide},
                                                      {"far", Values::far},
                                                      {"low", Values::low},
                                                      {"near 0", Values::near_0},
                                                      {"special", Values::special}};
      for (const auto& [kind, values] : kinds) {
        // softmax is not that exact on a GPU, on CPUs it has a test of its own.
        if (values == Values::near_0 && reduce == "softmax") continue;
        for (const std::int64_t columns : {1, 8, 16, 128}) {
          if (values == Values::special && columns < 128) continue;  // are above
          add(make_case(fmt::format("{} D={}", kind, columns), reduce, {blocks, columns}, {},
                        values));
        }
        // Few columns with many rows a segment have ways of their own.
        for (const std::int64_t columns : {1, 8}) {
          add(make_case(fmt::format("{} giants D={}", kind, columns), reduce,
                        {{9000, 0, 300, 1, 6001}, columns}, {}, values));
          if (columns > 1) cases.back().finite_differences = false;
        }
        for (const std::int64_t columns : {9, 128}) {
          add(make_case(fmt::format("{} unsorted D={}", kind, columns), reduce,
                        {mixed, columns, Form::unsorted, 2, 3}, {}, values));
        }
      }
    }
  }
  for (const std::string reduce : {"max", "min"}) {
    for (const std::string ties : {"first", "last", "even"}) {
      add(make_case(ties + " special D=1", reduce, {blocks, 1}, {{"ties", ties}, {"saved", "none"}},
                    Values::special));
      cases.back().finite_differences = false;
      for (const std::int64_t columns : {4, 8, 16, 128, 520}) {
        const OptionMap options = {{"ties", ties}, {"saved", "arg"}};
        const std::string width = " D=" + std::to_string(columns);
        for (const Values values : {Values::special, Values::mostly_infinite}) {
          const bool many = values == Values::special;
          add(make_case(ties + (many ? " special, arg" : " infinite, arg") + width, reduce,
                        {many ? blocks : mixed, columns, Form::offsets_i64, 3, 9}, options,
                        values));
          cases.back().finite_differences = false;
        }
        add(make_case(ties + " special unsorted" + width, reduce, {mixed, columns, Form::unsorted},
                      options, Values::special));
        cases.back().finite_differences = false;
      }
      for (const std::string saved : {"arg", "mask", "none"}) {
        const OptionMap options = {{"ties", ties}, {"saved", saved}};
        const std::string name = ties + " " + saved;
        const auto tied = [&](const std::string& what, const Shape& shape) {
          add(make_case(name + " " + what, reduce, shape, options, Values::integers));
        };
        tied("short", {mixed, 33});
        tied("short D=1", {mixed, 1});
        tied("blocks D=1", {blocks, 1});
        tied("unsorted D=1", {blocks, 1, Form::unsorted, 2, 3});
        tied("unsorted", {mixed, 9, Form::unsorted, 2, 3});
        tied("unsorted with ids", {mixed, 4, Form::unsorted_with_ids, 2, 3});
        tied("giant", {{4, 0, 2500, 7}, 20});
        tied("giant unsorted", {{4, 0, 1300, 7}, 65, Form::unsorted});
        tied("giant D=1", {{40000, 3}, 1});
        tied("D=1025", {{3, 0, 70, 1, 9}, 1025});
        tied("long D=256", {{300, 0, 200}, 256});
        tied("empty zero", {mixed, 8, Form::ids_i32});
        cases.back().options["empty"] = "zero";
      }
      add_widths(cases, reduce, ties, mixed);
      for (const std::string arg : {"i32", "u8"}) {
        add(make_case(ties + " arg " + arg, reduce, {mixed, 33},
                      {{"ties", ties}, {"arg-dtype", arg}}, Values::integers));
        add(make_case(ties + " unsorted arg " + arg, reduce, {mixed, 5, Form::unsorted},
                      {{"ties", ties}, {"arg-dtype", arg}}, Values::integers));
        add(make_case(ties + " unsorted with ids, arg " + arg, reduce,
                      {mixed, 8, Form::unsorted_with_ids, 2, 3},
                      {{"ties", ties}, {"arg-dtype", arg}}, Values::integers));
      }
    }
  }
  for (const std::string reduce : {"sum", "prod", "max"}) {
    Case test = make_case("exact", reduce, {{3, 2, 0, 1, 3}, 21}, {}, Values::integers);
    test.exact = true;
    add(test);
  }
  const Lengths skewed = power_law(1500, 300, random);
  tiles(cases, skewed);
  mask_tiles(cases, skewed);
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
  shape.form = static_cast<Form>(random.integer(0, 5));
  if (random.chance(0.4)) shape.before = random.integer(0, 9);
  if (random.chance(0.4)) shape.after = random.integer(0, 9);
  const std::string reduce = kReduces[static_cast<std::size_t>(random.integer(0, 6))];
  OptionMap options = {{"ties", any({"first", "last", "even"})},
                       {"saved", any({"arg", "mask", "none"})},
                       {"empty", any({"identity", "zero", "nan"})}};
  Values values = extreme(reduce) && random.chance(0.5) ? Values::integers : Values::normal;
  if (reduce != "softmax" && random.chance(0.15)) values = Values::special;
  const bool fits_u8 = std::ranges::all_of(shape.lengths, [](auto rows) { return rows <= 255; });
  options["arg-dtype"] = any({"i64", "i32", fits_u8 ? "u8" : "i32"});
  if (options["saved"] != "arg" && random.chance(0.5)) options["arg-dtype"] = "none";
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

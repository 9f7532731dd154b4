#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "ops/entmax/case_setup.hpp"

namespace pullback::driver {
namespace {

using namespace entmax_setup;

Case exact_case(std::string name, std::vector<double> logits, std::int64_t length) {
  const auto rows = static_cast<std::int64_t>(logits.size()) / length;
  Case test = make_case("exact " + name, {{"alpha", "2"}}, {rows, length}, listed(logits));
  const auto inputs = test.inputs;
  test.inputs = [=](DType dtype, Random& random) {
    TensorMap tensors = inputs(dtype, random);
    for (std::int64_t i = 0; i < rows * length; ++i) {
      tensors["d_y"].set(i, 4 * static_cast<double>(random.integer(-8, 8)));
    }
    return tensors;
  };
  test.exact = true;
  test.finite_differences = false;
  return test;
}

void lengths_and_alphas(std::vector<Case>& cases) {
  const auto add = [&](const char* alpha, std::string name, const Shape& shape, double sigma) {
    Case test = make_case(fmt::format("alpha {} {}", alpha, name), {{"alpha", alpha}}, shape,
                          normal(sigma));
    if (std::atof(alpha) > 2) test.finite_differences = false;
    return &cases.emplace_back(std::move(test));
  };
  for (const char* alpha : {"1", "1.0001", "1.3", "1.5", "2", "2.5", "4", "10", "20", "50"}) {
    for (std::int64_t length : {1, 2, 3, 31, 32, 33, 1023, 1024, 1025, 4097}) {
      Case* test = add(alpha, fmt::format("V {}", length), {length > 100 ? 2 : 7, length}, 1);
      test->full_only = length == 1023 || length == 31;
    }
    for (const char* sigma : {"0", "0.1", "0.3", "3", "10"}) {
      add(alpha, fmt::format("sigma {}", sigma), {3, 517}, std::atof(sigma));
    }
  }
}

void layouts(std::vector<Case>& cases) {
  cases.push_back(make_case("rank 1", {{"alpha", "1.5"}}, {40}, normal(1)));
  cases.push_back(make_case("axis 0 of 2", {{"alpha", "1.5"}, {"axis", "0"}}, {70, 35}, normal(1)));
  cases.push_back(make_case("axis 1 of 3", {{"axis", "1"}}, {3, 40, 21}, normal(1)));
  cases.push_back(
      make_case("axis -3 of 3", {{"alpha", "1"}, {"axis", "-3"}}, {19, 4, 5}, normal(1)));
  cases.push_back(
      make_case("rank 5", {{"alpha", "1.3"}, {"axis", "2"}}, {2, 3, 9, 2, 3}, normal(1)));
  cases.push_back(make_case("rank 8", {{"axis", "3"}}, {2, 1, 2, 7, 1, 3, 2, 2}, normal(1)));
  cases.push_back(make_case("rank 8 last axis from support", {{"saved", "support"}},
                            {2, 1, 2, 2, 1, 3, 2, 11}, normal(1)));
  cases.push_back(make_case("zero length", {}, {3, 0}, normal(1)));
  cases.push_back(make_case("zero rows", {{"alpha", "1.5"}}, {0, 5}, normal(1)));
  cases.push_back(make_case("zero length from support", {{"saved", "support"}}, {3, 0}, normal(1)));
  Case broadcast_gradient = make_case("stride 0 d_y", {{"alpha", "1.5"}}, {4, 50}, normal(1));
  broadcast_gradient.inputs = [](DType dtype, Random& random) {
    return TensorMap{{"x", normal_tensor(dtype, {4, 50}, random)},
                     {"d_y", broadcast(filled_tensor(dtype, {1, 1}, 1), {4, 50})}};
  };
  cases.push_back(broadcast_gradient);
  Case broadcast_logits = make_case("stride 0 x", {}, {4, 50}, normal(1));
  broadcast_logits.inputs = [](DType dtype, Random& random) {
    return TensorMap{{"x", broadcast(normal_tensor(dtype, {1, 50}, random), {4, 50})},
                     {"d_y", normal_tensor(dtype, {4, 50}, random)}};
  };
  broadcast_logits.finite_differences = false;  // one element is many inputs
  cases.push_back(broadcast_logits);
}

void supports(std::vector<Case>& cases) {
  for (std::int64_t length : {1, 8, 13, 64, 700}) {
    cases.push_back(make_case(fmt::format("from support V {}", length), {{"saved", "support"}},
                              {5, length}, normal(0.3)));
  }
  cases.push_back(make_case("from support axis 0", {{"saved", "support"}, {"axis", "0"}}, {45, 6},
                            normal(0.5)));
  // Rows of one-hot results, of two, of k and of all elements.
  cases.push_back(exact_case("support 1", {9, 0, 1, 2, 0, 0, 0, 8}, 4));
  cases.push_back(exact_case("support 2", {0, 0.5, -4, -9, 3, -2, 3, 1}, 4));
  cases.push_back(exact_case("support 4", {0, 0.125, -0.125, 0, -8, -7, -9, -3}, 8));
  cases.push_back(exact_case("support all", {5, 5, 5, 5, 5, 5, 5, 5}, 8));
  cases.push_back(exact_case("tie at the threshold", {0, -1, -1, -2}, 4));
  cases.push_back(exact_case("minus infinity", {0, -kInfinity, 0, -kInfinity}, 4));
  cases.push_back(exact_case("large logits", {1024, 1024, 0, -1024}, 4));
}

void hard_values(std::vector<Case>& cases) {
  for (const char* alpha : {"1", "1.0001", "1.5", "1.7", "2", "3"}) {
    const auto add = [&](std::string name, const Shape& shape, const Logit& logit) {
      Case test =
          make_case(fmt::format("{} alpha {}", name, alpha), {{"alpha", alpha}}, shape, logit);
      test.finite_differences = false;
      return &cases.emplace_back(std::move(test));
    };
    add("logits of 1e8", {3, 40}, [](std::int64_t, Random& random) {
      return 1e8 + 32 * static_cast<double>(random.integer(-1, 1));
    })->dtypes = {DType::f64, DType::f32};
    add("offset 1e5 spread 1", {3, 300}, normal(1, 1e5))->dtypes = {DType::f64, DType::f32};
    add("minus infinity here and there", {6, 37}, [](std::int64_t, Random& random) {
      return random.chance(0.4) ? -kInfinity : random.normal();
    });
    add("nothing but minus infinity", {3, 20}, listed({-kInfinity}));
    add("one NaN", {3, 33},
        [](std::int64_t i, Random& random) { return i == 65 ? kNaN : random.normal(); });
    add("plus infinity", {3, 33},
        [](std::int64_t i, Random& random) { return i == 40 ? kInfinity : random.normal(); });
    add("equal logits", {2, 1000}, listed({0.25}));
  }
  cases.push_back(no_differences(make_case(
      "special rows from support", {{"saved", "support"}}, {4, 9},
      [](std::int64_t i, Random& random) {
        return i == 3 ? kNaN : i < 9 ? random.normal() : i < 18 ? -kInfinity : random.normal();
      })));
}

void masks_and_ragged(std::vector<Case>& cases) {
  for (const char* alpha : {"1", "1.5", "2", "4"}) {
    cases.push_back(
        no_differences(make_case(fmt::format("mask alpha {}", alpha), {{"alpha", alpha}}, {9, 45},
                                 normal(1), mask_of({9, 45}, 0.5))));
  }
  cases.push_back(make_case("mask hides rows, axis 0", {{"alpha", "1.5"}, {"axis", "0"}}, {6, 30},
                            normal(1), mask_of({6, 30}, 0.3)));
  cases.push_back(make_case("mask with stride 0", {{"alpha", "1.5"}}, {4, 30}, normal(1),
                            [](TensorMap& inputs, DType, Random& random) {
                              HostTensor row(TensorSpec::contiguous(DType::u8, {1, 30}));
                              for (std::int64_t i = 0; i < 30; ++i) row.set(i, random.chance(0.6));
                              inputs["mask"] = broadcast(row, {4, 30});
                            }));
  cases.push_back(make_case("ragged", {{"alpha", "1.5"}}, {60}, normal(1),
                            offsets_of(DType::i32, {0, 7, 7, 30, 31, 60})));
  cases.push_back(make_case("ragged with ends left out", {}, {3, 60}, normal(1),
                            offsets_of(DType::i64, {5, 9, 40, 52})));
  cases.push_back(make_case("ragged axis 0", {{"alpha", "1"}, {"axis", "0"}}, {50, 18}, normal(1),
                            offsets_of(DType::i32, {0, 0, 20, 50})));
  cases.push_back(make_case("ragged, no rows", {}, {2, 6}, normal(1), offsets_of(DType::i64, {3})));
  cases.push_back(make_case("hostile offsets", {}, {2, 40}, normal(1),
                            offsets_of(DType::i64, {-9e15, 20, 10, -3, 9e15, 30})));
  cases.push_back(
      make_case("ragged with mask and alphas", {}, {3, 60}, normal(1),
                both(both(offsets_of(DType::i32, {0, 11, 11, 37, 60}), mask_of({3, 60}, 0.7)),
                     alphas_of({3, 4}, {1.2, 1.5, 2, 1.9, 1.05}))));
}

void alphas(std::vector<Case>& cases) {
  const Shape shape{6, 50};
  cases.push_back(make_case("alpha per row", {}, shape, normal(1),
                            alphas_of({6}, {1.05, 1.3, 1.5, 1.7, 2, 1.01})));
  // Steps towards the threshold swing between two floats.
  const Logit one_zero = [](std::int64_t i, Random&) { return i % 512 == 100 ? 0.0 : -1.0; };
  cases.push_back(no_differences(
      make_case("theta between neighbours", {{"alpha", "1.99999"}}, {5, 512}, one_zero)));
  // Without d_alpha: it jumps where the y of most elements, 2e-8, becomes 0.
  cases.push_back(
      no_differences(make_case("theta between neighbours, row by row", {{"d-alpha", "false"}},
                               {5, 512}, one_zero, alphas_of({5}, {1.99999, 3, 1.05}))));
  cases.push_back(no_differences(make_case("alpha per row at the edges", {}, shape, normal(1),
                                           alphas_of({6}, {1, 1 + 0x1p-13, 2.5, 4, 1, 1.125}))));
  cases.push_back(no_differences(make_case("alpha per row invalid", {}, shape, normal(1),
                                           alphas_of({6}, {1, 0.5, 2, kNaN, kInfinity, 1.5}))));
  cases.push_back(make_case("alpha per row, axis 0 of 3", {{"axis", "0"}}, {30, 2, 3}, normal(1),
                            alphas_of({2, 3}, {1.05, 1.3, 1.5, 1.7, 2, 1.01})));
  // Sums of equal summands round alike: steps must end all the same.
  for (const char* alpha : {"1.6", "1.8", "1.9002", "1.9034", "1.9077", "1.95", "1.99"}) {
    cases.push_back(no_differences(make_case(fmt::format("equal elements alpha {}", alpha),
                                             {{"alpha", alpha}}, {17, 294}, listed({2}))));
  }
  // Neighbouring rows of which one has a small support and one a large.
  for (const char* alpha : {"1.2", "1.3", "1.4", "1.7", "1.9"}) {
    for (const std::int64_t length : {128, 512, 1000, 2048, 4096, 8192}) {
      const Logit logit = [=](std::int64_t i, Random& random) {
        return random.normal() * (i / length % 2 == 0 ? 2 : 0.05);
      };
      cases.push_back(
          no_differences(make_case(fmt::format("two kinds of rows alpha {} V {}", alpha, length),
                                   {{"alpha", alpha}}, {7, length}, logit)));
      cases.back().full_only = length > 512;
    }
  }
  // exp(-88) and less are subnormal numbers of f32 and bf16.
  cases.push_back(
      no_differences(make_case("d_alpha of subnormal probabilities", {}, {3, 10},
                               listed({0, -80, -87, -88, -89, -90, -91, -93, -95, -100}),
                               alphas_of({3}, {1, 1.001, 1.01}))));
  for (const char* alpha : {"1", "1.0001", "1.01", "1.2", "1.5", "2", "3"}) {
    cases.push_back(
        no_differences(make_case(fmt::format("d_alpha of alpha {}", alpha),
                                 {{"alpha", alpha}, {"d-alpha", "true"}}, {4, 130}, normal(1))));
  }
  // Powers of the small ones are cut.
  cases.push_back(no_differences(make_case(
      "d_alpha of alpha 301", {{"alpha", "301"}, {"d-alpha", "true"}}, {6, 8}, normal(1.0 / 301))));
  cases.back().dtypes = {DType::f64};  // others lose what tells them apart
  for (const char* alpha : {"1.99999998", "1.9999999999", "2.00000001"}) {
    cases.push_back(no_differences(make_case(fmt::format("alpha {}, almost 2", alpha),
                                             {{"alpha", alpha}}, {5, 700}, normal(1))));
  }
}

}  // namespace

std::vector<Case> entmax_cases() {
  std::vector<Case> cases;
  lengths_and_alphas(cases);
  layouts(cases);
  supports(cases);
  hard_values(cases);
  masks_and_ragged(cases);
  alphas(cases);
  many_rows(cases);
  rows_with_edges(cases);
  long_rows(cases);
  masked_rows(cases);
  tiles(cases);
  return cases;
}

Case entmax_fuzz(std::uint64_t seed) {
  Random random(seed);
  const auto rank = random.integer(1, 5);
  Shape shape;
  for (std::int64_t dim = 0; dim < rank; ++dim) shape.push_back(random.integer(1, 4));
  const auto axis = random.integer(0, rank - 1);
  const double size = random.uniform();
  const auto length = size < 0.03   ? random.integer(4000, 9000)
                      : size < 0.1  ? random.integer(600, 3000)
                      : size < 0.25 ? random.integer(70, 600)
                                    : random.integer(1, 70);
  // Groups of rows, and vectors of rows side by side.
  if (rank == 2 && length <= 600) shape[1 - axis] = random.integer(1, length <= 70 ? 1100 : 90);
  shape[static_cast<std::size_t>(axis)] = length;
  OptionMap options{{"axis", std::to_string(random.chance(0.5) ? axis : axis - rank)}};

  Shape rows = shape;
  const bool ragged = random.chance(0.3);
  More more = [](TensorMap&, DType, Random&) {};
  if (ragged) {
    std::vector<double> offsets(static_cast<std::size_t>(random.integer(1, 6)));
    for (double& offset : offsets) offset = static_cast<double>(random.integer(-3, length + 3));
    if (random.chance(0.7)) std::sort(offsets.begin(), offsets.end());
    rows[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(offsets.size()) - 1;
    more = offsets_of(random.chance(0.5) ? DType::i32 : DType::i64, offsets);
  } else {
    rows.erase(rows.begin() + axis);
  }
  if (random.chance(0.3)) more = both(more, mask_of(shape, random.uniform()));
  const double alphas[] = {1, 1.5, 2, 1 + random.uniform(), 1 + random.uniform() / 8};
  const double alpha = alphas[random.integer(0, 4)];
  if (random.chance(0.3)) {
    more = both(more, alphas_of(rows, {1 + random.uniform(), 1.5, 2, 1 + random.uniform()}));
  } else {
    options["alpha"] = fmt::format("{}", alpha);
    if (alpha == 2 && !ragged && random.chance(0.5)) options["saved"] = "support";
  }
  const double sigmas[] = {0.1, 0.5, 1, 3};
  const std::string name =
      fmt::format("fuzz {} alpha {} length {}", seed,
                  options.contains("alpha") ? options["alpha"] : "per row", length);
  Logit logit = normal(sigmas[random.integer(0, 3)]);
  if (random.chance(0.15)) {
    logit = [](std::int64_t, Random& draws) {
      const double kind = draws.uniform();
      if (kind < 0.002) return draws.chance(0.5) ? kNaN : kInfinity;
      return kind < 0.2 ? -kInfinity : kind < 0.5 ? 1.0 : draws.normal();
    };
  }
  Case test = make_case(name, options, shape, logit, more);
  test.finite_differences = false;
  return test;
}

std::vector<Case> entmax_bench() {
  std::vector<Case> cases;
  const std::pair<std::int64_t, std::int64_t> shapes[] = {
      {1048576, 32}, {32768, 512}, {8192, 4096}, {1024, 32768}, {256, 131072}};
  const auto add = [&](std::int64_t rows, std::int64_t length, OptionMap options, double sigma) {
    std::string name = fmt::format("{}x{} sigma {}", rows, length, sigma);
    for (const auto& [key, value] : options) name += fmt::format(" {} {}", key, value);
    Case test = make_case(name, options, {rows, length}, normal(sigma));
    test.inputs = [=](DType dtype, Random& random) {
      TensorMap inputs;
      inputs["x"] = normal_tensor(dtype, {rows, length}, random, sigma);
      inputs["d_y"] = normal_tensor(dtype, {rows, length}, random);
      return inputs;
    };
    test.dtypes = {DType::f32, DType::bf16};
    cases.push_back(test);
  };
  for (const auto& [rows, length] : shapes) {
    for (const char* alpha : {"2", "1.5", "1", "1.3"}) {
      add(rows, length, {{"alpha", alpha}}, 1);
      if (length == 4096) add(rows, length, {{"alpha", alpha}}, 0.3);
    }
    add(rows, length, {{"alpha", "2"}, {"saved", "support"}}, 1);
  }
  add(4096, 8192, {{"alpha", "1.5"}, {"axis", "0"}}, 1);
  return cases;
}

}  // namespace pullback::driver

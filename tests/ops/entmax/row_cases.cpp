// Rows by their number and length, as kernels and loops divide them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/entmax/case_setup.hpp"

namespace pullback::driver::entmax_setup {

// Many short rows, and long ones in neighbouring columns: they share vectors.
void many_rows(std::vector<Case>& cases) {
  const auto add = [&](const std::string& name, const Shape& shape, OptionMap options,
                       const Logit& logit) {
    std::string full = fmt::format("{} {}x{}", name, shape[0], shape[1]);
    for (const auto& [key, value] : options) full += fmt::format(" {} {}", key, value);
    cases.push_back(no_differences(make_case(full, std::move(options), shape, logit)));
  };
  for (const char* alpha : {"1", "1.0001", "1.3", "1.5", "2"}) {
    for (std::int64_t length : {1, 5, 32, 127, 128}) {
      add("many rows", {41, length}, {{"alpha", alpha}}, normal(1));
    }
    add("many columns", {300, 70}, {{"alpha", alpha}, {"axis", "0"}}, normal(0.3));
    add("many columns", {2000, 33}, {{"alpha", alpha}, {"axis", "0"}}, normal(1));
    cases.back().full_only = true;
    // The NaN and the empty row among others, which keep their values.
    const Logit special = [](std::int64_t i, Random& random) {
      if (i == 20 * 20) return kNaN;
      return i / 20 == 3 || random.chance(0.1) ? -kInfinity : random.normal();
    };
    add("many rows, some special", {50, 20}, {{"alpha", alpha}}, special);
    // Several rows share a warp: one without an answer must not keep the others waiting.
    add("many rows, a NaN beside large elements", {50, 64}, {{"alpha", alpha}},
        [](std::int64_t i, Random& random) {
          return i == 20 * 64 ? kNaN : i / 64 == 20 ? 50 : random.normal();
        });
    add("many columns, some special", {50, 20}, {{"alpha", alpha}, {"axis", "0"}}, special);
  }
  // Enough columns to look for the few of them in the support; and more than a few.
  for (const char* alpha : {"1.5", "2"}) {
    const OptionMap options{{"alpha", alpha}, {"axis", "0"}};
    add("wide columns", {520, 1030}, options, normal(1));
    add("wide columns, dense", {520, 1030}, options, normal(0.01));
    cases.back().full_only = true;
    // A column that begins with minus infinity, or is nothing else; offsets that differ.
    add("wide columns, minus infinity", {520, 1030}, options, [](std::int64_t i, Random& random) {
      const std::int64_t column = i % 1030, position = i / 1030;
      const bool hidden = column == 300 || (column == 7 && position < 400);
      return hidden ? -kInfinity : static_cast<double>(column) + random.normal();
    });
    add("wide columns, a NaN", {520, 1030}, options, [](std::int64_t i, Random& random) {
      return i == 400 * 1030 + 17 ? kNaN : random.normal();
    });
    cases.back().full_only = true;
  }
  add("wide columns", {520, 1030}, {{"alpha", "1.3"}, {"axis", "0"}}, normal(1));
  cases.back().dtypes = {DType::f32};  // whose reference takes seconds
  // Where a search begins, and how many elements it finds, differs from row to row: few or all in
  // the support, two values far apart, equal ones, hidden ones, an offset.
  for (const std::int64_t length : {9, 32, 64, 128}) {
    const Logit kinds = [=](std::int64_t i, Random& random) {
      const double x = random.normal();
      switch (i / length * 5 % 8) {
        case 0:
          return 1e-3 * x;
        case 1:
          return 0.1 * x;
        case 2:
          return 30 * x;
        case 3:
          return i % length % 7 == 3 ? 0.01 * x : -50.0;
        case 4:
          return i % length % 3 == 0 ? 0.1 * x : 0.1 * x - 1;
        case 5:
          return 0.5 * std::round(x);
        case 6:
          return random.chance(0.3) ? -kInfinity : x;
        default:
          return 1000 + x;
      }
    };
    for (const char* alpha : {"1.15", "1.3", "1.45", "1.5", "1.7", "1.9", "2"}) {
      add("rows of several kinds", {74, length}, {{"alpha", alpha}}, kinds);
    }
    add("rows of several kinds", {74, length}, {{"alpha", "2"}, {"saved", "support"}}, kinds);
  }
  add("many rows", {50, 21}, {{"alpha", "2"}, {"saved", "support"}}, normal(1));
  add("many rows", {50, 700}, {{"alpha", "2"}, {"saved", "support"}}, normal(1));
  cases.push_back(no_differences(make_case("many rows, mask", {{"alpha", "1.5"}}, {50, 20},
                                           normal(1), mask_of({50, 20}, 0.7))));
  // CPUs look at one vector in eight first, of 2 to 16 elements: here these alone are large, or
  // small.
  for (const char* alpha : {"1.2", "1.3", "1.7"}) {
    constexpr std::int64_t kLength = 4096;
    add("one vector in eight differs", {8, kLength}, {{"alpha", alpha}},
        [=](std::int64_t i, Random& random) {
          const std::int64_t row = i / kLength, lanes = std::int64_t{2} << row % 4;
          const bool seen = i % kLength % (8 * lanes) < lanes;
          return 0.1 * random.normal() + (seen == (row < 4) ? 0.4 : 0);
        });
  }
  // Softmax goes through rows in blocks: some hold nothing but minus infinity.
  add("a block of minus infinity", {2, 12000}, {{"alpha", "1"}},
      [](std::int64_t i, Random& random) {
        return i < 4096 || (i > 8000 && i < 21000) ? -kInfinity : random.normal();
      });
}

// Rows that begin anywhere, for each capacity of warps and blocks of the CUDA kernels, which give
// the elements beside the vectors to threads of their own: with what is special in these.
void rows_with_edges(std::vector<Case>& cases) {
  for (const char* alpha : {"1", "1.05", "1.25", "1.5", "2"}) {
    for (const std::int64_t length :
         {100, 257, 1001, 1601, 4095, 6401, 9001, 24001, 48001, 70001, 280001}) {
      const Logit at_the_ends = [=](std::int64_t i, Random& random) {
        const std::int64_t row = i / length, at = i % length;
        const bool first = at == 0, last = at == length - 1;
        if (row == 1 && last) return kNaN;
        if (row == 2 && first) return kInfinity;
        if (row == 3) return -kInfinity;
        if (row == 4 && (first || last)) return 2.0;
        if (row == 5 && (first || last || random.chance(0.3))) return -kInfinity;
        return 0.3 * random.normal() + (row == 6 && last ? 8 : 0);
      };
      const std::int64_t rows = length > 100000 ? 2 : 7;
      cases.push_back(no_differences(make_case(fmt::format("edges V {} alpha {}", length, alpha),
                                               {{"alpha", alpha}}, {rows, length}, at_the_ends)));
      cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
      cases.back().full_only = true;
    }
  }
}

// Rows that no warp holds: each way through the long ones, with and without ends beside the
// vectors.
void long_rows(std::vector<Case>& cases) {
  const auto add = [&](const Shape& shape, OptionMap options, double sigma) {
    std::string name = fmt::format("long rows {}x{} sigma {}", shape[0], shape[1], sigma);
    for (const auto& [key, value] : options) name += fmt::format(" {} {}", key, value);
    cases.push_back(no_differences(make_case(name, std::move(options), shape, normal(sigma))));
    cases.back().full_only = shape[0] * shape[1] > 200000;
  };
  for (const char* alpha : {"1", "1.3", "1.5", "2", "3"}) {
    add({1, 60001}, {{"alpha", alpha}}, 0.02);
    add({17, 9001}, {{"alpha", alpha}}, 1);
    add({17, 20000}, {{"alpha", alpha}}, 0.02);
    add({17, 70001}, {{"alpha", alpha}}, 0.3);
  }
  // Rows that a block of the CUDA kernel holds, or a cluster of blocks.
  const Logit special = [](std::int64_t i, Random& random) {
    if (i == 20100) return kNaN;
    return i / 20000 == 2 || random.chance(0.1) ? -kInfinity : random.normal();
  };
  for (const char* alpha : {"1", "1.0001", "1.3", "1.5", "1.9", "2"}) {
    add({3, 20000}, {{"alpha", alpha}}, 0.02);
    add({1, 131072}, {{"alpha", alpha}}, 0.3);
    cases.push_back(no_differences(make_case(fmt::format("long rows, some special alpha {}", alpha),
                                             {{"alpha", alpha}}, {4, 20000}, special)));
  }
  // One lane of a warp that reads the row once lists so many elements that the bound is raised
  // before the row's largest, read with them, is listed: where a lane has 4 neighbours, and 8.
  const Logit late = [](std::int64_t i, Random&) {
    const std::int64_t at = i % 70000;
    if (at == 532) return 1.9;
    return at < 512 && at % 128 < (at % 256 < 128 ? 8 : 4) ? 0.0 : -10.0;
  };
  for (const char* alpha : {"1.05", "1.3", "1.5", "2"}) {
    cases.push_back(
        no_differences(make_case(fmt::format("long rows, the largest listed late alpha {}", alpha),
                                 {{"alpha", alpha}}, {2, 70000}, late)));
  }
  // 16-bit rows whose values are all positive, all negative, or neither; also more of them than a
  // GPU holds at a time.
  const auto add_signs = [&](const char* alpha, std::int64_t rows, std::int64_t length) {
    cases.push_back(no_differences(
        make_case(fmt::format("long rows {}x{} of either sign alpha {}", rows, length, alpha),
                  {{"alpha", alpha}}, {rows, length}, [=](std::int64_t i, Random& random) {
                    return random.normal() + 6 * static_cast<double>(i / length % 3 - 1);
                  })));
    cases.back().dtypes = {DType::bf16, DType::f16};
  };
  for (const char* alpha : {"1.05", "1.3", "1.5", "1.7"}) {
    add_signs(alpha, 3, 8200);
    add_signs(alpha, 3, 65600);
  }
  for (const auto& [rows, length] : {std::pair{300, 8200}, {80, 65600}}) {
    add_signs("1.5", rows, length);
    cases.back().full_only = true;
  }
  // Between these, each capacity of lanes, warps and blocks of the CUDA kernels; the last is past
  // them all.
  for (const char* alpha : {"1", "1.0001", "1.3", "1.5", "1.9", "2"}) {
    for (const std::int64_t length : {200, 496, 800, 1600, 3200, 6400, 12000, 24000, 48000}) {
      add({5, length}, {{"alpha", alpha}}, 0.3);
      cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
    }
    for (const std::int64_t length : {150000, 200001, 280000})
      add({2, length}, {{"alpha", alpha}}, 1);
  }
  // The largest element is 0, as of x - max(x), and elements of both signs take part.
  for (const char* alpha : {"1.0001", "1.3", "1.5"}) {
    for (const std::int64_t length : {12000, 24000, 48000}) {
      for (const double most : {0.0, 0.25}) {
        cases.push_back(no_differences(
            make_case(fmt::format("long rows 3x{} up to {} alpha {}", length, most, alpha),
                      {{"alpha", alpha}}, {3, length}, [=](std::int64_t, Random& random) {
                        return std::min(0.2 * random.normal() - 0.4, most);
                      })));
        cases.back().full_only = length > 12000;
        cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
      }
    }
  }
  for (const Shape& shape :
       {Shape{7, 500}, {7, 1000}, {3, 6000}, {1, 60001}, {17, 9001}, {17, 20000}, {17, 70001}}) {
    cases.push_back(
        no_differences(make_case(fmt::format("rows {}x{}, alpha per row", shape[0], shape[1]), {},
                                 shape, normal(0.3), alphas_of({shape[0]}, {1.05, 1.5, 2, 3}))));
    cases.back().full_only = shape[0] * shape[1] > 200000;
  }
  // Longer than the registers of a cluster, and ragged rows longer than those of a warp.
  cases.push_back(no_differences(
      make_case("rows 17x140000 alpha 1.3", {{"alpha", "1.3"}}, {17, 140000}, normal(0.3))));
  cases.back().full_only = true;
  cases.push_back(
      no_differences(make_case("ragged rows of 9000 alpha 1.3", {{"alpha", "1.3"}}, {3, 9000},
                               normal(0.3), offsets_of(DType::i32, {0, 4000, 4001, 8990}))));
  add({5, 200}, {{"saved", "support"}}, 0.3);
  add({3, 40000}, {{"saved", "support"}}, 1e-5);
  add({3, 40000}, {{"saved", "support"}}, 1);
  for (double sigma : {1e-5, 1.0}) {
    // Several rows, or one, a warp of the CUDA kernel; 384 does not fit that.
    for (std::int64_t length : {128, 384, 512, 4096}) {
      add({37, length}, {{"saved", "support"}}, sigma);
    }
    add({1, 60001}, {{"saved", "support"}}, sigma);
    add({17, 9000}, {{"saved", "support"}}, sigma);
    add({17, 12800}, {{"saved", "support"}}, sigma);
    add({17, 20001}, {{"saved", "support"}}, sigma);
  }
}

// Masks, and alphas of rows, for each way through rows of the CUDA kernels.
void masked_rows(std::vector<Case>& cases) {
  const auto add = [&](const std::string& name, OptionMap options, const Shape& shape,
                       const More& more) {
    cases.push_back(no_differences(make_case(fmt::format("{} {}x{}", name, shape[0], shape[1]),
                                             std::move(options), shape, normal(0.5), more)));
    cases.back().dtypes = {DType::f32, DType::bf16, DType::f16};
    cases.back().full_only = shape[0] * shape[1] > 50000;
  };
  const auto rows_of = [](std::int64_t length) {
    return Shape{length < 1000 ? 37 : length < 100000 ? 3 : 1, length};
  };
  for (const char* alpha : {"1", "1.05", "1.3", "1.5", "2"}) {
    for (const std::int64_t length : {3, 24, 100, 496, 1001, 3200, 12000, 48000, 280000}) {
      const Shape shape = rows_of(length);
      add(fmt::format("masked rows, alpha {}", alpha), {{"alpha", alpha}}, shape,
          mask_of(shape, 0.6));
    }
  }
  for (const std::int64_t length : {24, 100, 496, 48000}) {
    const Shape shape = rows_of(length);
    add("masked rows, support", {{"saved", "support"}}, shape, mask_of(shape, 0.6));
  }
  for (const std::int64_t length : {3, 24, 100, 250, 496, 1001, 12000, 60000}) {
    const Shape shape = rows_of(length);
    const More alphas = alphas_of({shape[0]}, {1.2, 1.3, 1.05, 1.5, 1.7, 2, 1.95, 3});
    add("alphas of rows", {}, shape, alphas);
    add("masked rows with alphas", {}, shape, both(mask_of(shape, 0.6), alphas));
  }
  // Those that CPUs solve together, with no other among them.
  for (const std::int64_t length :
       {2, 3, 16, 24, 48, 49, 100, 250, 496, 1001, 2500, 12000, 60000}) {
    const Shape shape = rows_of(length);
    add("alphas of rows up to 2", {}, shape,
        alphas_of({shape[0]}, {1.2, 1.3, 1.125, 1.5, 1.7, 2, 1.95}));
    cases.back().dtypes.push_back(DType::f64);
    // Rows that all see much of themselves, beside some that see nothing.
    add("masked rows with alphas up to 1.5", {}, shape,
        both(mask_of(shape, 0.95), alphas_of({shape[0]}, {1.2, 1.3, 1.125, 1.5, 1.4})));
  }
  // By tiles in shared memory, by those in registers, and by columns; an alpha for each row, or one
  // for each head of all items, as attention's scores may have.
  for (const Shape& shape : {Shape{9, 5, 20}, {3, 20, 64}, {3, 200, 64}, {2, 6000, 40}}) {
    const int axis = shape[2] == 20 ? 2 : 1;
    const Shape rows{shape[0], shape[3 - axis]};
    const std::vector<double> alphas{1.2, 1.3, 1.05, 1.5, 1.7, 2, 1.95, 3, 1, 0.5};
    const auto name =
        fmt::format("alphas of rows along axis {} of {}x{}x{}", axis, shape[0], shape[1], shape[2]);
    const OptionMap options{{"axis", std::to_string(axis)}};
    cases.push_back(
        no_differences(make_case(name, options, shape, normal(0.5), alphas_of(rows, alphas))));
    cases.push_back(
        no_differences(make_case(name + ", of heads", options, shape, normal(0.5),
                                 [=](TensorMap& inputs, DType dtype, Random& random) {
                                   alphas_of({1, rows[1]}, alphas)(inputs, dtype, random);
                                   inputs["alpha"] = broadcast(inputs["alpha"], {rows[0], rows[1]});
                                 })));
  }
  cases.push_back(
      no_differences(make_case("masked rows across memory", {{"alpha", "1.5"}, {"axis", "1"}},
                               {3, 200, 64}, normal(0.5), mask_of({3, 200, 64}, 0.6))));
}

}  // namespace pullback::driver::entmax_setup

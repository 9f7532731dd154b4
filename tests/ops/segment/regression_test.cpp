// Bugs of other libraries and of this one, by name, and indices that nobody should trust.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/element.hpp"
#include "driver/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "pullback/error.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::Random;
using driver::TensorMap;
using Index = std::vector<std::int64_t>;
using Values = std::vector<double>;

constexpr auto kLowest = std::numeric_limits<std::int64_t>::min();
constexpr auto kHighest = std::numeric_limits<std::int64_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

HostTensor matrix(DType dtype, std::int64_t rows, std::int64_t columns, const Values& values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {rows, columns}));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, values[static_cast<std::size_t>(i) % values.size()]);
  }
  return tensor;
}

HostTensor index_tensor(const Index& values, DType dtype = DType::i64) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::i64) {
      static_cast<std::int64_t*>(tensor.data())[i] = values[i];
    } else {
      static_cast<std::int32_t*>(tensor.data())[i] = static_cast<std::int32_t>(values[i]);
    }
  }
  return tensor;
}

Values values_of(const HostTensor& tensor) {
  Values values;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values.push_back(tensor.get(i));
  return values;
}

TensorMap evaluate(const TensorMap& inputs, const driver::OptionMap& options,
                   const std::string& variant = {}) {
  return driver::evaluate({.op = "segment",
                           .inputs = inputs,
                           .options = options,
                           .device = Device::cpu(2),
                           .variant = variant});
}

// The op itself, without the driver's sorting. Forward, then backward from what was saved.
struct Direct {
  SegmentProblem problem;
  HostTensor x, index, permutation, d_out, out, arg, mask, d_x;
  bool saved_arg = true, saved_mask = false, writes_mask = true;
  DType arg_dtype = DType::i64;

  void run(const std::string& variant) {
    problem.x = x.spec();
    (problem.num_segments > 0 ? problem.ids : problem.offsets) = index.spec();
    if (permutation.spec().given()) problem.permutation = permutation.spec();
    problem.d_out = d_out.spec();
    SegmentProblem full = complete(problem);
    const bool extreme =
        problem.reduce == SegmentReduce::max || problem.reduce == SegmentReduce::min;
    if (extreme) {
      const std::int64_t columns = x.spec().shape[1];
      full.arg = TensorSpec::contiguous(arg_dtype, {full.num_segments, columns});
      full.arg_mask = TensorSpec::contiguous(DType::u8, {x.spec().shape[0], (columns + 7) / 8});
      arg = HostTensor(full.arg);
      mask = HostTensor(full.arg_mask);
    }
    out = HostTensor(full.out);
    d_x = HostTensor(full.d_x);
    SegmentTensors tensors;
    tensors.x = x.data();
    (full.ids.given() ? tensors.ids : tensors.offsets) = index.data();
    tensors.permutation = permutation.data();
    tensors.out = out.data();
    tensors.arg = arg.data();
    if (writes_mask) tensors.arg_mask = mask.data();
    run_pass(full, tensors, Pass::forward, variant);
    tensors.d_out = d_out.data();
    tensors.d_x = d_x.data();
    if (!saved_arg) tensors.arg = nullptr;
    if (!saved_mask) tensors.arg_mask = nullptr;
    run_pass(full, tensors, Pass::backward, variant);
  }

  static void run_pass(const SegmentProblem& full, const SegmentTensors& tensors, Pass pass,
                       const std::string& variant) {
    const auto plan = make_plan(Device::cpu(2), full, pass, {variant});
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    plan.run({}, tensors, workspace.get());
  }
};

constexpr SegmentReduce kReduces[] = {
    SegmentReduce::sum,  SegmentReduce::mean,      SegmentReduce::max,    SegmentReduce::min,
    SegmentReduce::prod, SegmentReduce::logsumexp, SegmentReduce::softmax};

// The rule for indices out of order is part of the definition, so the reference shows it too.
void expect_same_as_reference(const Index& index, std::int64_t rows, std::int64_t num_segments,
                              DType dtype, const Index& permutation = {}) {
  Random random(5);
  const std::int64_t segments =
      num_segments > 0 ? num_segments : static_cast<std::int64_t>(index.size()) - 1;
  for (SegmentReduce reduce : kReduces) {
    for (int saved = 0; saved < 3; ++saved) {
      Direct direct;
      direct.problem.reduce = reduce;
      direct.problem.num_segments = num_segments;
      direct.index = index_tensor(index, dtype);
      if (!permutation.empty()) direct.permutation = index_tensor(permutation, dtype);
      Values values(static_cast<std::size_t>(rows * 5));
      for (double& value : values) value = static_cast<double>(random.integer(-2, 2));
      values.push_back(0);
      direct.x = matrix(DType::f64, rows, 5, values);
      direct.d_out =
          matrix(DType::f64, reduce == SegmentReduce::softmax ? rows : segments, 5, {1, -2, 3});
      direct.saved_arg = saved == 0;
      direct.saved_mask = saved == 1;
      Direct expected = direct;
      direct.run("cpu");
      expected.run("reference");
      const auto near = [&](const HostTensor& a, const HostTensor& b, const char* what) {
        for (std::int64_t i = 0; i < b.numel(); ++i) {
          if (std::isfinite(b.get(i))) {
            ASSERT_NEAR(a.get(i), b.get(i), 1e-9 * (1 + std::abs(b.get(i)))) << what << " " << i;
          } else {
            ASSERT_EQ(std::isnan(a.get(i)), std::isnan(b.get(i))) << what << " " << i;
          }
        }
        ASSERT_TRUE(a.guards_intact()) << what;
      };
      // A permutation that is none leaves the rows it does not name as they were.
      const bool every_row = permutation.empty();
      if (every_row || reduce != SegmentReduce::softmax) near(direct.out, expected.out, "out");
      if (direct.arg.spec().given()) near(direct.arg, expected.arg, "arg");
      if (direct.arg.spec().given() && every_row) near(direct.mask, expected.mask, "arg_mask");
      if (every_row) near(direct.d_x, expected.d_x, "d_x");
      EXPECT_TRUE(direct.d_x.guards_intact());
    }
  }
}

TEST(segment_indices, ids_unsorted_by_mistake_count_as_the_largest_so_far) {
  Direct direct;
  direct.problem.num_segments = 3;
  direct.index = index_tensor({0, 1, 0, 2, 1, 1});
  direct.x = matrix(DType::f32, 6, 1, {1, 2, 4, 8, 16, 32});
  direct.d_out = matrix(DType::f32, 3, 1, {1, 2, 3});
  direct.run("cpu");
  EXPECT_EQ(values_of(direct.out), (Values{1, 6, 56}));
  EXPECT_EQ(values_of(direct.d_x), (Values{1, 2, 2, 3, 3, 3}));
}

TEST(segment_indices, hostile_ids) {
  for (DType dtype : {DType::i32, DType::i64}) {
    expect_same_as_reference({3, 1, 2, 0, 3, 3, 1}, 7, 4, dtype);
    expect_same_as_reference({-5, 0, 0, 1, 4, 4, 9}, 7, 4, dtype);
    expect_same_as_reference({9, 9, 9, -1, -1, 0, 1}, 7, 4, dtype);
  }
  expect_same_as_reference({kLowest, 0, 1, 3, kHighest, 2, kLowest}, 7, 4, DType::i64);
  Random random(9);
  for (int round = 0; round < 10; ++round) {
    Index ids(static_cast<std::size_t>(random.integer(1, 40000)));
    for (auto& id : ids) id = random.integer(-2, 6);
    expect_same_as_reference(ids, static_cast<std::int64_t>(ids.size()), 4, DType::i64);
  }
}

TEST(segment_indices, hostile_offsets) {
  for (DType dtype : {DType::i32, DType::i64}) {
    expect_same_as_reference({0, 5, 3, 6}, 7, 0, dtype);
    expect_same_as_reference({6, 4, 2, 0}, 7, 0, dtype);
    expect_same_as_reference({-4, 3, 900, 5}, 7, 0, dtype);
    expect_same_as_reference({7, 7, 7, 7}, 7, 0, dtype);
    expect_same_as_reference({100, 200}, 7, 0, dtype);
  }
  expect_same_as_reference({kLowest, kHighest, kLowest, 3, kHighest}, 7, 0, DType::i64);
  Random random(4);
  for (int round = 0; round < 30; ++round) {
    Index offsets(static_cast<std::size_t>(random.integer(1, 300)));
    for (auto& offset : offsets) offset = random.integer(-10, 900);
    expect_same_as_reference(offsets, 850, 0, DType::i64);
  }
}

// Each tile proves its own offsets; one bad tile has all done again.
TEST(segment_indices, one_bad_offset_among_many_tiles) {
  Random random(12);
  constexpr std::int64_t kRows = 60000, kSegments = 9000;
  Index good(kSegments + 1);
  for (auto& offset : good) offset = random.integer(0, kRows);
  std::sort(good.begin(), good.end());
  for (int round = 0; round < 12; ++round) {
    for (std::int64_t columns : {1, 3}) {
      for (SegmentReduce reduce : {SegmentReduce::sum, SegmentReduce::max}) {
        Index offsets = good;
        const std::int64_t bad[] = {kLowest, kHighest, 0, kRows, -1, kRows + 1};
        const std::int64_t at = round == 0   ? 0
                                : round == 1 ? kSegments
                                             : random.integer(0, kSegments);
        offsets[static_cast<std::size_t>(at)] = bad[random.integer(0, 5)];
        Direct direct;
        direct.problem.reduce = reduce;
        direct.writes_mask = false;
        direct.index = index_tensor(offsets);
        direct.x = matrix(DType::f32, kRows, columns, {1, -2, 3, 5, -4, 3, 2});
        direct.d_out = matrix(DType::f32, kSegments, columns, {1, -2, 3});
        Direct expected = direct;
        direct.run("cpu");
        expected.run("reference");
        EXPECT_EQ(values_of(direct.out), values_of(expected.out)) << at;
        EXPECT_EQ(values_of(direct.d_x), values_of(expected.d_x)) << at;
        EXPECT_TRUE(direct.out.guards_intact() && direct.d_x.guards_intact());
        if (reduce == SegmentReduce::max) {
          EXPECT_EQ(values_of(direct.arg), values_of(expected.arg)) << at;
        }
      }
    }
  }
}

TEST(segment_indices, hostile_permutation_is_read_as_row_0_and_written_nowhere) {
  expect_same_as_reference({0, 3, 3, 7}, 7, 0, DType::i64, {6, -1, 2, kLowest, kHighest, 0, 7});
  expect_same_as_reference({2, 9, 1, 6}, 7, 0, DType::i64, {1, 1, 1, 1, 0, 0, 0});
}

std::string checked_message(const std::function<void(Direct&)>& change) {
  Direct direct;
  direct.problem.check_indices = true;
  direct.x = matrix(DType::f32, 4, 2, {1});
  direct.d_out = matrix(DType::f32, 2, 2, {1});
  change(direct);
  try {
    direct.run("cpu");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (double value : values_of(direct.out)) EXPECT_TRUE(std::isnan(value)) << "was written";
    return error.what();
  }
  return "no error";
}

TEST(segment_indices, checked_mode_names_the_first_bad_one) {
  const auto ids = [](const Index& values) {
    return checked_message([&](Direct& direct) {
      direct.problem.num_segments = 2;
      direct.index = index_tensor(values);
    });
  };
  EXPECT_EQ(ids({0, 0, 1, 1}), "no error");
  EXPECT_EQ(ids({0, 1, 0, 0}),
            "segment: ids[2]: expected at least 1, the one before, got 0; sort with "
            "plan_permutation");
  EXPECT_EQ(
      ids({0, 1, 1, 2}),
      "segment: ids[3]: expected 0 to 1, got 2; raise num_segments, or leave check_indices off "
      "to drop the row");
  const auto offsets = [](const Index& values, const Index& permutation = {}) {
    return checked_message([&](Direct& direct) {
      direct.index = index_tensor(values);
      if (!permutation.empty()) direct.permutation = index_tensor(permutation);
    });
  };
  EXPECT_EQ(offsets({0, 1, 4}), "no error");
  EXPECT_EQ(offsets({0, 3, 2}), "segment: offsets[2]: expected at least 3, the one before, got 2");
  EXPECT_EQ(offsets({0, 3, 5}), "segment: offsets[2]: expected 0 to 4 (the rows of x), got 5");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 1, 0}), "no error");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 4, 0}),
            "segment: permutation[2]: expected 0 to 3, got 4; make it with plan_permutation");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 3, 0}),
            "segment: permutation[2]: expected a row not named before, got 3; make it with "
            "plan_permutation");
}

TEST(segment_indices, compact_arg_refuses_long_segments) {
  for (std::int64_t rows : {255, 256}) {
    Direct direct;
    direct.problem.reduce = SegmentReduce::max;
    direct.arg_dtype = DType::u8;
    direct.index = index_tensor({0, rows, rows});
    Values values(static_cast<std::size_t>(rows), 0.0);
    values.back() = 1;
    direct.x = matrix(DType::f32, rows, 1, values);
    direct.d_out = matrix(DType::f32, 2, 1, {3, 5});
    if (rows == 256) {
      EXPECT_THROW(direct.run("cpu"), Error);
      continue;
    }
    direct.run("cpu");
    EXPECT_EQ(values_of(direct.arg), (Values{254, 255}));
    EXPECT_EQ(direct.d_x.get(254), 3);
    EXPECT_EQ(direct.d_x.get(0), 0);
  }
}

// Frameworks count ties in the dtype of the values: in bf16 that stops at 256.
TEST(segment_bugs, ties_are_counted_past_256_in_bf16) {
  for (const std::string saved : {"mask", "none"}) {
    TensorMap inputs;
    inputs["x"] = matrix(DType::bf16, 1024, 3, {2});
    inputs["offsets"] = index_tensor({0, 1024});
    inputs["d_out"] = matrix(DType::bf16, 1, 3, {1});
    const auto outputs = evaluate(inputs, {{"reduce", "max"}, {"ties", "even"}, {"saved", saved}});
    for (double value : values_of(outputs.at("d_x"))) EXPECT_EQ(value, 0x1p-10);
  }
}

// The mean of half precision summed and counted in half is wrong (torch_scatter #269).
TEST(segment_bugs, mean_of_16_bits_divides_by_the_true_count) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f16, 8192, 1, {1});
  inputs["offsets"] = index_tensor({0, 8192});
  inputs["d_out"] = matrix(DType::f16, 1, 1, {1});
  const auto outputs = evaluate(inputs, {{"reduce", "mean"}});
  EXPECT_EQ(outputs.at("out").get(0), 1);
  EXPECT_EQ(outputs.at("d_x").get(8191), 0x1p-13);
}

// torch.segment_reduce divides only positive gradients among ties.
TEST(segment_bugs, even_ties_share_a_negative_gradient) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 4, 1, {7, 7, 1, 7});
  inputs["offsets"] = index_tensor({0, 4});
  inputs["d_out"] = matrix(DType::f32, 1, 1, {-6});
  for (const std::string saved : {"arg", "mask", "none"}) {
    const auto outputs = evaluate(inputs, {{"reduce", "max"}, {"ties", "even"}, {"saved", saved}});
    EXPECT_EQ(values_of(outputs.at("d_x")), (Values{-2, -2, 0, -2}));
  }
}

// scatter_reduce counts its zero-filled output as one more tie.
TEST(segment_bugs, a_true_maximum_of_0_loses_no_gradient) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 4, 1, {0, 0, 0, 0});
  inputs["offsets"] = index_tensor({0, 4});
  inputs["d_out"] = matrix(DType::f32, 1, 1, {4});
  const auto outputs = evaluate(inputs, {{"reduce", "max"}, {"ties", "even"}});
  EXPECT_EQ(values_of(outputs.at("d_x")), (Values{1, 1, 1, 1}));
}

// Division of the product by each row gives NaN here; zeroing it gives 0 for a single zero.
TEST(segment_bugs, prod_with_one_and_two_zeros) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 6, 1, {2, 0, 3, 0, 5, 0});
  inputs["offsets"] = index_tensor({0, 3, 6});
  inputs["d_out"] = matrix(DType::f32, 2, 1, {10, 10});
  const auto outputs = evaluate(inputs, {{"reduce", "prod"}});
  EXPECT_EQ(values_of(outputs.at("d_x")), (Values{0, 60, 0, 0, 0, 0}));
}

// Zeros far apart in a segment of many tiles.
TEST(segment_bugs, prod_with_zeros_in_different_tiles) {
  for (const bool two : {false, true}) {
    TensorMap inputs;
    constexpr std::int64_t kRows = 100000;
    inputs["x"] = matrix(DType::f32, kRows, 1, {1});
    inputs["x"].set(70000, 0);
    if (two) inputs["x"].set(10, 0);
    inputs["offsets"] = index_tensor({0, kRows});
    inputs["d_out"] = matrix(DType::f32, 1, 1, {3});
    const auto d_x = values_of(evaluate(inputs, {{"reduce", "prod"}}).at("d_x"));
    for (std::int64_t n = 0; n < kRows; ++n) {
      ASSERT_EQ(d_x[static_cast<std::size_t>(n)], !two && n == 70000 ? 3 : 0) << n;
    }
  }
}

// torch_scatter: lowest() and an uninitialised arg.
TEST(segment_bugs, all_minus_infinity_has_its_first_row_as_arg) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 3, 1, {-kInfinity});
  inputs["offsets"] = index_tensor({0, 0, 3});
  inputs["d_out"] = matrix(DType::f32, 2, 1, {5, 7});
  for (const std::string saved : {"arg", "mask", "none"}) {
    const auto outputs = evaluate(inputs, {{"reduce", "max"}, {"saved", saved}});
    EXPECT_EQ(values_of(outputs.at("out")), (Values{-kInfinity, -kInfinity}));
    EXPECT_EQ(values_of(outputs.at("arg")), (Values{-1, 0}));
    EXPECT_EQ(values_of(outputs.at("d_x")), (Values{7, 0, 0}));
  }
}

// torch_scatter #368: 0 and an epsilon where it should be -inf.
TEST(segment_bugs, logsumexp_of_nothing_is_minus_infinity) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 2, 1, {-kInfinity});
  inputs["offsets"] = index_tensor({0, 0, 2});
  inputs["d_out"] = matrix(DType::f32, 2, 1, {5, 7});
  const auto outputs = evaluate(inputs, {{"reduce", "logsumexp"}});
  EXPECT_EQ(values_of(outputs.at("out")), (Values{-kInfinity, -kInfinity}));
  EXPECT_EQ(values_of(outputs.at("d_x")), (Values{0, 0}));
}

// torch_scatter #118, #452: mean backward when the offsets do not cover x.
TEST(segment_bugs, offsets_that_do_not_cover_x) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 6, 1, {1, 2, 3, 4, 5, 6});
  inputs["offsets"] = index_tensor({1, 3, 3, 5}, DType::i32);
  inputs["d_out"] = matrix(DType::f32, 3, 1, {2, 9, 4});
  const auto outputs = evaluate(inputs, {{"reduce", "mean"}});
  EXPECT_EQ(values_of(outputs.at("out")), (Values{2.5, 0, 4.5}));
  EXPECT_EQ(values_of(outputs.at("d_x")), (Values{0, 1, 1, 2, 2, 0}));
}

// .sum().backward() sends a gradient with stride 0.
TEST(segment_bugs, d_out_with_stride_0) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 6, 40, {1});
  inputs["offsets"] = index_tensor({0, 2, 6});
  TensorSpec spec = TensorSpec::contiguous(DType::f32, {2, 40});
  spec.strides = {};
  const HostTensor one = matrix(DType::f32, 1, 1, {3});
  inputs["d_out"] = HostTensor::borrow(spec, one.data(), std::make_shared<HostTensor>(one));
  for (double value : values_of(evaluate(inputs, {}).at("d_x"))) EXPECT_EQ(value, 3);
}

// With ids in any order, arg names rows of x, not of the sorted order.
TEST(segment_bugs, arg_of_unsorted_ids_is_the_row_of_x) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::f32, 5, 1, {4, 1, 9, 8, 2});
  inputs["ids"] = index_tensor({1, 0, 1, 0, -3});
  inputs["d_out"] = matrix(DType::f32, 2, 1, {5, 6});
  for (const std::string saved : {"arg", "mask", "none"}) {
    const auto outputs = evaluate(inputs, {{"reduce", "max"}, {"saved", saved}});
    EXPECT_EQ(values_of(outputs.at("arg")), (Values{3, 2}));
    EXPECT_EQ(values_of(outputs.at("d_x")), (Values{0, 0, 6, 5, 0}));
  }
}

// bf16: out is rounded to 8 bits, and exp(x - out) would be off by as much as its error.
TEST(segment_bugs, logsumexp_gradients_of_16_bits_sum_to_one) {
  TensorMap inputs;
  inputs["x"] = matrix(DType::bf16, 8, 1, {40.25});
  inputs["offsets"] = index_tensor({0, 8});
  inputs["d_out"] = matrix(DType::bf16, 1, 1, {1});
  for (double value : values_of(evaluate(inputs, {{"reduce", "logsumexp"}}).at("d_x"))) {
    EXPECT_EQ(value, 0.125);
  }
}

// 70000 empty segments between two full ones are no more work for one thread than for another.
TEST(segment_bugs, many_empty_segments) {
  TensorMap inputs;
  Index offsets(70002, 1);
  offsets.front() = 0;
  offsets.back() = 2;
  inputs["x"] = matrix(DType::f32, 2, 1, {3, 4});
  inputs["offsets"] = index_tensor(offsets);
  inputs["d_out"] = matrix(DType::f32, 70001, 1, {1});
  const auto outputs = evaluate(inputs, {{"reduce", "sum"}, {"empty", "nan"}});
  EXPECT_EQ(outputs.at("out").get(0), 3);
  EXPECT_EQ(outputs.at("out").get(70000), 4);
  for (std::int64_t s = 1; s < 70000; ++s) ASSERT_TRUE(std::isnan(outputs.at("out").get(s)));
}

// Tensors too large to stay in cache are written past it: with rows of whole cache lines, with
// other rows, and one column; the segments of three rows straddle lines and tiles.
TEST(segment_streams, large_outputs) {
  for (const std::int64_t columns : {64, 61, 1}) {
    const std::int64_t rows = (std::int64_t{19} << 20) / 4 / columns / 3 * 3 + 2;
    const std::int64_t count = (rows + 2) / 3;
    TensorMap inputs;
    Index offsets;
    for (std::int64_t s = 0; s <= count; ++s) offsets.push_back(std::min(rows, 3 * s));
    inputs["offsets"] = index_tensor(offsets);
    inputs["x"] = HostTensor(TensorSpec::contiguous(DType::f32, {rows, columns}));
    inputs["d_out"] = HostTensor(TensorSpec::contiguous(DType::f32, {count, columns}));
    auto* x = static_cast<float*>(inputs["x"].data());
    auto* d_out = static_cast<float*>(inputs["d_out"].data());
    for (std::int64_t i = 0; i < rows * columns; ++i) x[i] = static_cast<float>(i * 7 % 13);
    for (std::int64_t i = 0; i < count * columns; ++i) d_out[i] = static_cast<float>(1 + i % 11);
    for (const std::string reduce : {"sum", "max"}) {
      const auto outputs = evaluate(inputs, {{"reduce", reduce}});
      const auto* out = static_cast<const float*>(outputs.at("out").data());
      const auto* d_x = static_cast<const float*>(outputs.at("d_x").data());
      std::int64_t wrong = 0;
      for (std::int64_t s = 0; s < count; ++s) {
        for (std::int64_t d = 0; d < columns; ++d) {
          float sum = 0, top = -1;
          std::int64_t row = 0;
          for (std::int64_t n = 3 * s; n < std::min(rows, 3 * s + 3); ++n) {
            const float value = x[n * columns + d];
            sum += value;
            if (value > top) row = n;
            top = std::max(top, value);
          }
          wrong += out[s * columns + d] != (reduce == "sum" ? sum : top);
          for (std::int64_t n = 3 * s; n < std::min(rows, 3 * s + 3); ++n) {
            const float g = d_out[s * columns + d];
            wrong += d_x[n * columns + d] != (reduce == "sum" || n == row ? g : 0);
          }
        }
      }
      EXPECT_EQ(wrong, 0) << reduce << " " << columns;
    }
  }
}

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
}  // namespace pullback

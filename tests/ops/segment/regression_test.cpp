// Bugs of other libraries and of this one, by name.
#include <algorithm>
#include <cmath>

#include "core/element.hpp"
#include "driver/random.hpp"
#include "ops/segment/run_segment.hpp"

namespace pullback::testing {
namespace {

using driver::Random;

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

// Backward of sum and mean folds nothing, but its plan asked for the room of partial results.
TEST(segment_bugs, gradients_of_sums_need_no_partial_results) {
  SegmentProblem problem;
  problem.x = TensorSpec::contiguous(DType::bf16, {1 << 20, 1024});
  problem.offsets = TensorSpec::contiguous(DType::i64, {1001});
  const SegmentProblem full = complete(problem);
  const auto bytes = [&](Pass pass) {
    return make_plan(Device::cpu(1), full, pass).workspace_bytes();
  };
  EXPECT_GT(bytes(Pass::forward), std::size_t{64} << 20);
  EXPECT_LT(bytes(Pass::backward), std::size_t{8} << 20);
}

TEST(segment_bugs, softmax_without_an_output) {
  for (const std::int64_t columns : {1, 3, 5, 40}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const HostTensor x = matrix(dtype, 200, columns, {1, 2, 3}),
                       index = index_tensor({0, 3, 190});
      SegmentProblem problem;
      problem.reduce = SegmentReduce::softmax;
      problem.x = x.spec();
      problem.offsets = index.spec();
      SegmentTensors tensors;
      tensors.x = x.data();
      tensors.offsets = index.data();
      EXPECT_NO_THROW(Direct::run_pass(complete(problem), tensors, Pass::forward, "cpu"));
    }
  }
}

// Tiles of 1008 rows, most of which begin within a segment: folded and finished wave by wave. Of
// segments about as long as a tile some are cut and others are not.
TEST(segment_bugs, segments_cut_by_the_tiles_of_several_waves) {
  constexpr std::int64_t kColumns = 65, kWaves = 5 * (std::int64_t{1} << 20) / kColumns;
  Random random(8);
  Index offsets = {0};
  const Index lengths = {1500, 1007, 0, 1008, 1009, 1, 2500, 5000, 70, 1900};
  for (std::size_t i = 0; offsets.back() < kWaves; ++i) {
    offsets.push_back(offsets.back() + lengths[i % lengths.size()]);
  }
  const std::int64_t rows = offsets.back();
  const auto segments = static_cast<std::int64_t>(offsets.size()) - 1;
  const auto test = [&](const std::string& reduce, const driver::OptionMap& more, double center,
                        double scale) {
    SCOPED_TRACE(reduce);
    TensorMap inputs;
    inputs["x"] = matrix(DType::f32, rows, kColumns, {0});
    for (std::int64_t i = 0; i < inputs["x"].numel(); ++i) {
      inputs["x"].set(i, center + scale * std::floor(4 * random.normal()));
    }
    inputs["offsets"] = index_tensor(offsets);
    inputs["d_out"] = matrix(DType::f32, reduce == "softmax" ? rows : segments, kColumns,
                             {1, -0.5, 0.25, 2, -1.5, 0.75, -3});
    driver::OptionMap options = more;
    options["reduce"] = reduce;
    const TensorMap got = evaluate(inputs, options, "cpu");
    const TensorMap expected = evaluate(inputs, options, "reference");
    expect_close(got.at("out"), expected.at("out"), 3e-5, 1e-30);
    expect_close(got.at("d_x"), expected.at("d_x"), 3e-5, reduce == "prod" ? 1e-5 : 1e-7);
  };
  test("softmax", {}, 0, 0.25);
  test("prod", {}, 1, 0.0005);
  test("max", {{"ties", "even"}, {"saved", "none"}, {"arg-dtype", "none"}}, 0, 1);
}

// Of two zeros, instructions for the maximum return either.
TEST(segment_bugs, out_has_the_sign_of_the_zero_at_arg) {
  Random random(3);
  for (const std::string reduce : {"max", "min"}) {
    for (const std::string ties : {"first", "last"}) {
      constexpr std::int64_t kSegments = 300;
      std::vector<std::int64_t> offsets = {0};
      Values x;
      for (std::int64_t s = 0; s < kSegments; ++s) {
        const std::int64_t rows = random.integer(1, 20);
        for (std::int64_t r = 0; r < rows; ++r) x.push_back(random.chance(0.5) ? 0.0 : -0.0);
        offsets.push_back(offsets.back() + rows);
      }
      TensorMap inputs;
      inputs["x"] = matrix(DType::f32, std::ssize(x), 1, x);
      inputs["offsets"] = index_tensor(offsets);
      inputs["d_out"] = matrix(DType::f32, kSegments, 1, {1});
      const auto outputs = evaluate(inputs, {{"reduce", reduce}, {"ties", ties}});
      for (std::int64_t s = 0; s < kSegments; ++s) {
        const auto arg = static_cast<std::int64_t>(outputs.at("arg").get(s));
        EXPECT_EQ(arg, ties == "first" ? offsets[s] : offsets[s + 1] - 1);
        EXPECT_EQ(std::signbit(outputs.at("out").get(s)), std::signbit(x[arg])) << s;
      }
    }
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

// Memory that ends where x does, so that ASan sees a read behind it; or null, without rows.
void run_one_column(std::int64_t rows, SegmentReduce reduce, Pass pass) {
  const std::vector<float> x(static_cast<std::size_t>(rows), 0.5f);
  const std::vector<std::int64_t> offsets = {0, rows, rows, rows};
  std::vector<float> out(reduce == SegmentReduce::softmax ? x.size() : 3, 7), d_x(x.size(), 7);
  const auto out_rows = static_cast<std::int64_t>(out.size());
  const std::vector<float> d_out(out.size(), 1);
  SegmentProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {rows, 1});
  problem.offsets = TensorSpec::contiguous(DType::i64, {4});
  problem.out = TensorSpec::contiguous(DType::f32, {out_rows, 1});
  problem.reduce = reduce;
  const auto plan = make_plan(Device::cpu(1), problem, pass);
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  SegmentTensors tensors{.x = rows == 0 ? nullptr : x.data(), .offsets = offsets.data()};
  tensors.out = out_rows == 0 ? nullptr : out.data();
  if (pass == Pass::backward) {
    tensors.d_out = out_rows == 0 ? nullptr : d_out.data();
    tensors.d_x = rows == 0 ? nullptr : d_x.data();
  }
  plan.run({}, tensors, workspace.get());
  for (float value : pass == Pass::forward ? out : d_x) EXPECT_NE(value, 7);
}

TEST(segment_bugs, one_column_is_read_to_its_end_at_most) {
  for (const auto reduce :
       {SegmentReduce::sum, SegmentReduce::mean, SegmentReduce::max, SegmentReduce::min,
        SegmentReduce::prod, SegmentReduce::logsumexp, SegmentReduce::softmax}) {
    for (const std::int64_t rows : {0, 1, 3, 1000}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(reduce) << ", " << rows << " rows");
      run_one_column(rows, reduce, Pass::forward);
      run_one_column(rows, reduce, Pass::backward);
    }
  }
}

TEST(segment_bugs, the_sign_of_a_product_that_is_0) {
  for (const std::int64_t columns : {1, 3}) {
    TensorMap inputs;
    inputs["x"] = HostTensor(TensorSpec::contiguous(DType::f32, {8, columns}));
    const double x[] = {1, 1, -1, 0, -3, 0, 2, 2};
    for (std::int64_t i = 0; i < 8 * columns; ++i) inputs["x"].set(i, x[i / columns]);
    inputs["offsets"] = index_tensor({0, 2, 4, 6, 8});
    inputs["d_out"] = matrix(DType::f32, 4, columns, {1});
    for (double value : values_of(evaluate(inputs, {{"reduce", "prod"}}).at("out"))) {
      EXPECT_EQ(std::signbit(value), value == 0) << value;
    }
  }
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

// With one column the bytes of contiguous, aligned masks are read many at a time.
TEST(segment_bugs, mask_of_any_stride_and_alignment) {
  for (const MaskLayout layout : {MaskLayout{3, 0}, MaskLayout{1, 1}, MaskLayout{2, 5}}) {
    Direct direct;
    direct.problem.reduce = SegmentReduce::max;
    direct.x = matrix(DType::f32, 3000, 1, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5});
    direct.index = index_tensor({0, 7, 7, 40, 1900, 3000});
    direct.d_out = matrix(DType::f32, 5, 1, {1, 2, 3, 4, 5});
    direct.saved_arg = false;
    direct.saved_mask = true;
    direct.mask_layout = layout;
    Direct expected = direct;
    direct.run({});
    expected.run("reference");
    expect_near(direct.mask, expected.mask, "arg_mask");
    expect_near(direct.d_x, expected.d_x, "d_x");
  }
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

}  // namespace
}  // namespace pullback::testing

// Indices that nobody should trust.
#include <algorithm>
#include <cmath>
#include <functional>

#include "driver/random.hpp"
#include "ops/segment/run_segment.hpp"
#include "pullback/error.hpp"

namespace pullback::testing {
namespace {

using driver::Random;

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
      // A permutation that is none leaves the rows it does not name as they were.
      const bool every_row = permutation.empty();
      if (every_row || reduce != SegmentReduce::softmax)
        expect_near(direct.out, expected.out, "out");
      if (direct.arg.spec().given()) expect_near(direct.arg, expected.arg, "arg");
      if (direct.arg.spec().given() && every_row)
        expect_near(direct.mask, expected.mask, "arg_mask");
      if (every_row) expect_near(direct.d_x, expected.d_x, "d_x");
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

// Where a tile begins within a segment whose end lies before the first row: a tile that begins
// there would have more rows than there is room for, in order as they are.
TEST(segment_indices, offsets_that_fall_where_a_tile_begins) {
  const auto test = [](std::int64_t rows, std::int64_t columns, const Index& offsets,
                       SegmentReduce reduce) {
    SCOPED_TRACE(::testing::Message() << "reduction " << static_cast<int>(reduce));
    const bool softmax = reduce == SegmentReduce::softmax;
    Direct direct;
    direct.problem.reduce = reduce;
    direct.writes_mask = false;
    direct.index = index_tensor(offsets);
    direct.x = matrix(DType::f32, rows, columns, {0, 1});
    direct.d_out =
        matrix(DType::f32, softmax ? rows : static_cast<std::int64_t>(offsets.size()) - 1, columns,
               {1, -2, 3});
    Direct expected = direct;
    direct.run("cpu");
    expected.run("reference");
    expect_near(direct.out, expected.out, "out", 1e-5);
    expect_near(direct.d_x, expected.d_x, "d_x", 1e-5);
  };
  for (const std::int64_t fall : {std::int64_t{0}, kLowest}) {
    Index offsets(601, 1000);
    offsets[256] = 999;
    offsets[257] = fall;
    for (SegmentReduce reduce : kReduces) test(1000, 256, offsets, reduce);
  }
  Index offsets(16387, 500000);
  offsets[16384] = 499999;
  offsets[16385] = 0;
  offsets[16386] = 600000;
  for (SegmentReduce reduce : kReduces) test(600000, 1, offsets, reduce);
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
            "segment_permutation");
  EXPECT_EQ(
      ids({0, 1, 1, 2}),
      "segment: ids[3]: expected 0 to 1, got 2; raise the number of segments; rows of ids that are "
      "not checked are dropped");
  const auto offsets = [](const Index& values, const Index& permutation = {},
                          const Index& row_ids = {}) {
    return checked_message([&](Direct& direct) {
      direct.index = index_tensor(values);
      if (!permutation.empty()) direct.permutation = index_tensor(permutation);
      if (!row_ids.empty()) direct.row_ids = index_tensor(row_ids);
    });
  };
  EXPECT_EQ(offsets({0, 1, 4}), "no error");
  EXPECT_EQ(offsets({0, 3, 2}), "segment: offsets[2]: expected at least 3, the one before, got 2");
  EXPECT_EQ(offsets({0, 3, 5}), "segment: offsets[2]: expected 0 to 4 (the rows of x), got 5");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 1, 0}), "no error");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 4, 0}),
            "segment: permutation[2]: expected 0 to 3, got 4; make it with segment_permutation");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 3, 0}),
            "segment: permutation[2]: expected a row not named before, got 3; make it with "
            "segment_permutation");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 1, 0}, {1, 1, 1, 0}), "no error");
  EXPECT_EQ(offsets({0, 1, 4}, {3, 2, 1, 0}, {1, 0, 1, 0}),
            "segment: ids[1]: expected 1, the segment of the row by offsets and permutation, got "
            "0; pass the ids that segment_permutation sorted");
  EXPECT_EQ(offsets({0, 1, 3}, {3, 2, 1, 0}, {2, 1, 1, 0}), "no error");
  EXPECT_EQ(offsets({0, 1, 3}, {3, 2, 1, 0}, {1, 1, 1, 0}),
            "segment: ids[0]: expected one of no segment, as the row is outside all offsets, got "
            "1; pass the ids that segment_permutation sorted");
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

}  // namespace
}  // namespace pullback::testing

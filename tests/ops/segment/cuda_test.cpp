// segment on a GPU where the case list does not look: indices that nobody should trust.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/driver.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "ops/segment/one_run.hpp"
#include "pullback/error.hpp"
#include "pullback/segment.hpp"

namespace pullback {
namespace {

using driver::HostTensor;
using driver::Random;
using testing::expect_near;
using testing::Index;
using testing::index_tensor;
using testing::kHighest;
using testing::kLowest;
using testing::kReduces;
using testing::OneRun;
using testing::Saved;

class segment_cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = cuda::driver_problem(); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }

  static void expect_same_as_reference(const Index& index, std::int64_t rows, std::int64_t columns,
                                       std::int64_t num_segments, DType dtype,
                                       const Index& permutation = {}, DType element = DType::f64,
                                       testing::MaskLayout mask_layout = {}, std::int64_t shift = 0,
                                       const Index& row_ids = {}) {
    Random random(5);
    const std::int64_t segments =
        num_segments > 0 ? num_segments : static_cast<std::int64_t>(index.size()) - 1;
    for (SegmentReduce reduce : kReduces) {
      // Of small integers these are exact in any dtype.
      const bool exact = reduce == SegmentReduce::sum || reduce == SegmentReduce::max ||
                         reduce == SegmentReduce::min;
      // Softmax has kernels of its own there.
      const bool close = reduce == SegmentReduce::softmax && element == DType::f32;
      if (element != DType::f64 && !exact && !close) continue;
      const double tolerance = element == DType::f64 || exact ? 1e-9 : 1e-6;
      struct Form {
        Saved saved;
        Ties ties;
      };
      for (const auto& [saved, ties] :
           {Form{Saved::arg, Ties::first}, Form{Saved::mask, Ties::first},
            Form{Saved::nothing, Ties::first}, Form{Saved::mask, Ties::even}}) {
        const bool extreme = reduce == SegmentReduce::max || reduce == SegmentReduce::min;
        if (ties == Ties::even && !extreme) continue;
        OneRun run;
        run.problem.reduce = reduce;
        run.problem.ties = ties;
        run.wants_arg = ties != Ties::even;
        run.problem.num_segments = num_segments;
        run.index = index_tensor(index, dtype);
        if (!permutation.empty()) run.permutation = index_tensor(permutation, dtype);
        if (!row_ids.empty()) run.row_ids = index_tensor(row_ids, dtype);
        run.mask_layout = mask_layout;
        run.shift = shift;
        run.x = HostTensor(TensorSpec::contiguous(element, {rows, columns}));
        for (std::int64_t i = 0; i < run.x.numel(); ++i) {
          run.x.set(i, static_cast<double>(random.integer(-2, 2)));
        }
        const std::int64_t out_rows = reduce == SegmentReduce::softmax ? rows : segments;
        run.d_out = HostTensor(TensorSpec::contiguous(element, {out_rows, columns}));
        for (std::int64_t i = 0; i < run.d_out.numel(); ++i) {
          run.d_out.set(i, static_cast<double>(i % 3 - 1));
        }
        run.saved = saved;
        OneRun expected = run;
        run(Device::cuda(), {});
        expected(Device::cpu(1), "reference");
        // A permutation that is none leaves the rows it does not name as they were.
        const bool every_row = permutation.empty();
        if (every_row || reduce != SegmentReduce::softmax)
          expect_near(run.out, expected.out, "out", tolerance);
        if (extreme && run.wants_arg) expect_near(run.arg, expected.arg, "arg");
        if (extreme && every_row) expect_near(run.mask, expected.mask, "arg_mask");
        if (every_row) expect_near(run.d_x, expected.d_x, "d_x", tolerance);
        EXPECT_TRUE(run.d_x.guards_intact());
        if (HasFailure()) FAIL() << "reduce " << static_cast<int>(reduce);
      }
    }
  }
};

TEST_F(segment_cuda, hostile_ids) {
  for (DType dtype : {DType::i32, DType::i64}) {
    expect_same_as_reference({3, 1, 2, 0, 3, 3, 1}, 7, 5, 4, dtype);
    expect_same_as_reference({-5, 0, 0, 1, 4, 4, 9}, 7, 5, 4, dtype);
    expect_same_as_reference({9, 9, 9, -1, -1, 0, 1}, 7, 1, 4, dtype);
  }
  expect_same_as_reference({kLowest, 0, 1, 3, kHighest, 2, kLowest}, 7, 5, 4, DType::i64);
  Random random(9);
  for (int round = 0; round < 3; ++round) {
    Index ids(static_cast<std::size_t>(random.integer(1, 9000)));
    for (auto& id : ids) id = random.integer(-2, 6);
    expect_same_as_reference(ids, static_cast<std::int64_t>(ids.size()), round + 1, 4, DType::i64);
  }
}

// Of rows that a permutation orders, and that are written in their own order.
TEST_F(segment_cuda, hostile_ids_of_permuted_rows) {
  const Index permutation = {6, 1, 2, 0, 5, 4, 3}, offsets = {0, 3, 3, 7};
  for (std::int64_t columns : {1, 4, 6}) {
    for (DType element : {DType::f64, DType::f32, DType::bf16}) {
      expect_same_as_reference(offsets, 7, columns, 0, DType::i64, permutation, element, {}, 0,
                               {kLowest, 3, kHighest, -1, 2, 1, 0});
    }
  }
  expect_same_as_reference({0, 9, 2, 7}, 7, 1, 0, DType::i32, {6, -1, 2, 9, 5, 4, 3}, DType::f32,
                           {}, 1, {-7, 3, 70, -1, 2, 1, 0});
}

// Stretches of segments without rows are filled apart from single ones.
TEST_F(segment_cuda, ids_leave_out_many) {
  constexpr std::int64_t kSegments = 6000;
  for (const Index& ids : std::vector<Index>{{5, 5, 1023, 1024, 2047, 2049, 5000, 5999},
                                             {0, 1022, 1025, 4096, 4096, 5119, 5120, 5121},
                                             {2, 40, 41, 1500, 3600, 3601, 9000, 9000},
                                             Index(8, 5999),
                                             Index(8, -1),
                                             Index(8, kSegments)}) {
    expect_same_as_reference(ids, 8, 2, kSegments, DType::i64);
  }
  Random random(11);
  Index ids(3000);
  std::int64_t id = 0;
  for (std::int64_t& of_row : ids) of_row = id += random.integer(0, 1) * random.integer(0, 8);
  expect_same_as_reference(ids, static_cast<std::int64_t>(ids.size()), 1, kSegments, DType::i32);
}

TEST_F(segment_cuda, hostile_offsets) {
  for (DType dtype : {DType::i32, DType::i64}) {
    expect_same_as_reference({0, 5, 3, 6}, 7, 5, 0, dtype);
    expect_same_as_reference({6, 4, 2, 0}, 7, 1, 0, dtype);
    expect_same_as_reference({-4, 3, 900, 5}, 7, 5, 0, dtype);
    expect_same_as_reference({100, 200}, 7, 5, 0, dtype);
  }
  expect_same_as_reference({kLowest, kHighest, kLowest, 3, kHighest}, 7, 5, 0, DType::i64);
  Random random(4);
  for (int round = 0; round < 6; ++round) {
    Index offsets(static_cast<std::size_t>(random.integer(1, 3000)));
    for (auto& offset : offsets) offset = random.integer(-10, 900);
    expect_same_as_reference(offsets, 850, 1 + round % 3, 0, DType::i64);
  }
}

TEST_F(segment_cuda, more_tiles_than_a_grid_has_blocks) {
  SegmentProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {std::int64_t{1} << 45, 3});
  problem.x.strides[0] = 0;
  problem.offsets = TensorSpec::contiguous(DType::i64, {2});
  try {
    make_plan(Device::cuda(), complete(problem), Pass::forward);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("x: expected less than 2^31 tiles of "),
              std::string::npos)
        << error.what();
  }
}

// Kernels that stream one column, and maps over rows in 16-byte pieces, find out themselves.
TEST_F(segment_cuda, hostile_offsets_where_no_kernel_looks_ahead) {
  Random random(6);
  for (const std::int64_t rows : {7, 850, 40000}) {
    for (const std::int64_t columns : {1, 3, 8}) {
      Index offsets = {0};
      while (offsets.back() < rows) offsets.push_back(offsets.back() + random.integer(0, 30));
      for (int round = 0; round < 3; ++round) {
        const std::int64_t last = static_cast<std::int64_t>(offsets.size()) - 1;
        offsets[static_cast<std::size_t>(random.integer(0, last))] =
            round == 0 ? kLowest : random.integer(-10, 2 * rows);
        expect_same_as_reference(offsets, rows, columns, 0, DType::i64, {}, DType::f32);
      }
    }
  }
}

// What puts tiles together looks for the segments that reach over them before it knows that offsets
// were repaired.
TEST_F(segment_cuda, hostile_offsets_of_segments_over_many_tiles) {
  for (const std::int64_t columns : {1, 8, 12, 128, 300}) {
    const std::int64_t rows = columns <= 12 ? 40000 : 9000;
    for (const std::int64_t disorder : {rows / 2, kLowest, kHighest}) {
      const Index offsets = {0, 5, rows / 3, disorder, rows / 2 - 7, rows / 2, rows - 3};
      expect_same_as_reference(offsets, rows, columns, 0, DType::i64, {}, DType::f32);
    }
  }
}

// Where there are some segments for each tile, they tell where tiles begin: those of a tile or
// less, of a few, which a thread sees to, and of many, which a block does; also where offsets are
// then out of order.
TEST_F(segment_cuda, segments_that_tell_where_tiles_begin) {
  constexpr std::int64_t kColumns = 129;  // tiles of some 32 rows
  Random random(8);
  Index offsets = {3};
  const auto add = [&](std::int64_t rows) { offsets.push_back(offsets.back() + rows); };
  for (int i = 0; i < 700; ++i) add(random.integer(0, 1));
  for (int i = 0; i < 70; ++i) add(random.integer(150, 200));
  add(2000);
  while (offsets.size() < 2047) add(random.integer(0, 1));
  const std::int64_t rows = offsets.back() + 70;
  expect_same_as_reference(offsets, rows, kColumns, 0, DType::i64, {}, DType::f32);
  offsets.pop_back();
  expect_same_as_reference(offsets, rows, kColumns, 0, DType::i32, {}, DType::f32);
  for (const std::int64_t disorder : {kLowest, kHighest, rows / 2}) {
    offsets[offsets.size() / 3] = disorder;
    expect_same_as_reference(offsets, rows, kColumns, 0, DType::i64, {}, DType::f32);
  }
}

// Maps that read x take runs of rows where a group of lanes, and the others of its warp, meet few
// ends, and rows one by one elsewhere. There have to be so many that groups have more than a few.
TEST_F(segment_cuda, runs_of_rows_between_ends) {
  struct Size {
    std::int64_t rows, columns;
  };
  struct Op {
    SegmentReduce reduce;
    Ties ties;
  };
  // So long on average that softmax goes over rows a second time.
  Index lengths = {1400, 400, 3, 0, 7, 600};
  lengths.insert(lengths.begin() + 1, 10, 1);
  lengths.insert(lengths.end(), 6, 2);
  for (const auto& [rows, columns] : {Size{40000, 128}, Size{24000, 264}}) {
    Index offsets = {11};
    for (std::size_t i = 0; offsets.back() + 1409 < rows; ++i) {
      offsets.push_back(offsets.back() + lengths[i % lengths.size()]);
    }
    const auto segments = static_cast<std::int64_t>(offsets.size()) - 1;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Random random(5);
      OneRun run;
      run.index = index_tensor(offsets, DType::i64);
      run.x = HostTensor(TensorSpec::contiguous(dtype, {rows, columns}));
      for (std::int64_t i = 0; i < run.x.numel(); ++i) run.x.set(i, random.normal());
      for (const auto& [reduce, ties] :
           {Op{SegmentReduce::logsumexp, Ties::first}, Op{SegmentReduce::softmax, Ties::first},
            Op{SegmentReduce::max, Ties::even}}) {
        run.problem.reduce = reduce;
        run.problem.ties = ties;
        run.saved = Saved::nothing;
        run.wants_arg = false;
        const std::int64_t out_rows = reduce == SegmentReduce::softmax ? rows : segments;
        run.d_out = HostTensor(TensorSpec::contiguous(dtype, {out_rows, columns}));
        for (std::int64_t i = 0; i < run.d_out.numel(); ++i) {
          run.d_out.set(i, static_cast<double>(i % 7 - 3) / 4);
        }
        OneRun expected = run, actual = run;
        expected(Device::cpu(2), {});
        actual(Device::cuda(), {});
        const double relative = dtype == DType::f32 ? 2e-5 : 2e-2;
        const auto expect_close = [&](const HostTensor& a, const HostTensor& b, double absolute) {
          for (std::int64_t i = 0; i < b.numel(); ++i) {
            if (std::isinf(b.get(i))) {  // of empty segments
              ASSERT_EQ(a.get(i), b.get(i)) << "element " << i << " of " << columns << " columns";
            } else {
              ASSERT_NEAR(a.get(i), b.get(i), relative * std::abs(b.get(i)) + absolute)
                  << "element " << i << " of " << columns << " columns";
            }
          }
        };
        expect_close(actual.out, expected.out, 1e-5);
        // A softmax's gradient is a difference.
        expect_close(actual.d_x, expected.d_x,
                     reduce == SegmentReduce::softmax ? relative * 1e-2 : 1e-12);
        if (HasFailure()) FAIL() << "reduce " << static_cast<int>(reduce);
      }
    }
  }
}

// The bytes of contiguous, aligned masks are read and written many at a time.
TEST_F(segment_cuda, mask_of_any_stride_and_alignment) {
  for (const testing::MaskLayout layout :
       {testing::MaskLayout{3, 0}, testing::MaskLayout{1, 1}, testing::MaskLayout{2, 5}}) {
    for (const std::int64_t columns : {1, 24, 40}) {
      expect_same_as_reference({0, 7, 7, 40, 1900, 3000}, 3000, columns, 0, DType::i64, {},
                               DType::f32, layout);
    }
  }
}

// A plan for rows of aligned pieces meets some that lie elsewhere. Elements of 2 bytes are read
// with the other half of their word, which the tensor may not have.
TEST_F(segment_cuda, rows_that_begin_anywhere) {
  for (const DType element : {DType::bf16, DType::f32}) {
    for (const std::int64_t columns : {4, 5, 6}) {
      for (const std::int64_t shift : {0, 1, 2}) {
        expect_same_as_reference({0, 7, 7, 40, 190, 301}, 301, columns, 0, DType::i64, {}, element,
                                 {}, shift);
      }
    }
  }
}

TEST_F(segment_cuda, mask_of_segments_that_are_too_long_for_an_arg_that_is_not_wanted) {
  OneRun run;
  run.problem.reduce = SegmentReduce::max;
  run.index = index_tensor({0, 700, 1000}, DType::i64);
  run.x = HostTensor(TensorSpec::contiguous(DType::f32, {1000, 3}));
  for (std::int64_t i = 0; i < run.x.numel(); ++i) run.x.set(i, static_cast<double>(i * 7 % 1999));
  run.d_out = HostTensor(TensorSpec::contiguous(DType::f32, {2, 3}));
  for (std::int64_t i = 0; i < run.d_out.numel(); ++i) run.d_out.set(i, static_cast<double>(i + 1));
  run.saved = Saved::mask;
  run.arg_dtype = DType::u8;
  run.wants_arg = false;
  OneRun expected = run;
  run(Device::cuda(), {});
  expected(Device::cpu(1), "reference");
  expect_near(run.mask, expected.mask, "arg_mask");
  expect_near(run.d_x, expected.d_x, "d_x");
}

TEST_F(segment_cuda, hostile_permutation_is_read_as_row_0_and_written_nowhere) {
  for (std::int64_t columns : {1, 5}) {
    expect_same_as_reference({0, 3, 3, 7}, 7, columns, 0, DType::i64,
                             {6, -1, 2, kLowest, kHighest, 0, 7});
  }
}

TEST_F(segment_cuda, checked_indices_are_for_the_cpu) {
  SegmentProblem problem;
  problem.x = TensorSpec::contiguous(DType::f32, {4, 2});
  problem.offsets = TensorSpec::contiguous(DType::i64, {3});
  problem.check_indices = true;
  try {
    make_plan(Device::cuda(), problem, Pass::forward);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("a plan for the CPU"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace pullback

// Writing arg: which row of each segment and column is the extreme.

#if defined(PULLBACK_SEGMENT_ARG_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_ARG_INL_HPP
#undef PULLBACK_SEGMENT_ARG_INL_HPP
#else
#define PULLBACK_SEGMENT_ARG_INL_HPP
#endif

#include "ops/segment/cpu/map-inl.hpp"
#include "ops/segment/cpu/scan-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

template <class R>
class ArgOutput {
 public:
  ArgOutput(const SegmentProblem& problem, const SegmentTensors& tensors, const Segments& segments)
      : problem_(problem),
        data_(tensors.arg),
        segments_(segments),
        streams_(Streams(problem.arg, tensors.arg)) {}

  explicit operator bool() const { return data_ != nullptr; }
  // Whether hwy::FlushStream() has to follow.
  bool streams() const { return streams_; }

  template <class A>
  Matrix<A> matrix() const {
    return Matrix<A>(problem_.arg, data_);
  }

  // Segment s: rows of the sorted order, from column `column` on. `scratch` has room for a row.
  void Write(std::int64_t s, const std::int64_t* rows, std::int64_t columns, std::int64_t column,
             void* scratch) const {
    const std::int64_t begin = segments_.begin(s);
    if (problem_.arg.dtype == DType::u8) {
      WriteAs<std::uint8_t>(s, columns, column, scratch,
                            [=](std::int64_t c) { return rows[c] - begin; });
    } else if (segments_.permuted()) {
      WriteWide(s, columns, column, scratch,
                [&](std::int64_t c) { return segments_.row(rows[c]); });
    } else {
      WriteWide(s, columns, column, scratch, [=](std::int64_t c) { return rows[c]; });
    }
  }

  // A segment without rows.
  void WriteNone(std::int64_t s, std::int64_t columns, std::int64_t column, void* scratch) const {
    if (problem_.arg.dtype == DType::u8) {
      WriteAs<std::uint8_t>(s, columns, column, scratch, [](std::int64_t) { return kNoPlace; });
    } else {
      WriteWide(s, columns, column, scratch, [](std::int64_t) { return std::int64_t{-1}; });
    }
  }

  // Of one column: places in the segments from s on, -1 for none.
  void WritePlaces(std::int64_t s, const Int<R>* HWY_RESTRICT places, std::int64_t count) const {
    const auto write = [&]<class A>(A none, const auto& row_of) {
      A rows[ColumnScan<R, SumRule<R>>::kMostWaiting];
      for (std::int64_t k = 0; k < count; ++k) {
        // An addition for all: compilers make vectors of that.
        const auto row = static_cast<A>(row_of(k, places[k]));
        rows[k] = places[k] < 0 ? none : row;
      }
      WriteColumn(matrix<A>(), s, rows, count, streams_);
    };
    const auto write_wide = [&](const auto& row_of) {
      problem_.arg.dtype == DType::i32 ? write(std::int32_t{-1}, row_of)
                                       : write(std::int64_t{-1}, row_of);
    };
    const SegmentEnds ends(segments_, s);
    if (problem_.arg.dtype == DType::u8) {
      write(std::uint8_t{kNoPlace}, [](std::int64_t, Int<R> place) { return place; });
    } else if (segments_.permuted()) {
      write_wide([&](std::int64_t k, Int<R> place) {
        return place < 0 ? -1 : segments_.row(ends[k - 1] + place);
      });
    } else if (ends.in_place != nullptr) {
      write_wide(
          [from = ends.in_place - 1](std::int64_t k, Int<R> place) { return from[k] + place; });
    } else {
      write_wide([&](std::int64_t k, Int<R> place) { return ends[k - 1] + place; });
    }
  }

 private:
  template <class F>
  void WriteWide(std::int64_t s, std::int64_t columns, std::int64_t column, void* scratch,
                 const F& value_of) const {
    problem_.arg.dtype == DType::i32 ? WriteAs<std::int32_t>(s, columns, column, scratch, value_of)
                                     : WriteAs<std::int64_t>(s, columns, column, scratch, value_of);
  }
  template <class A, class F>
  void WriteAs(std::int64_t s, std::int64_t columns, std::int64_t column, void* scratch,
               const F& value_of) const {
    const Matrix<A> arg = matrix<A>();
    A* const home = arg.at(s, column);
    A* HWY_RESTRICT to = streams_ ? static_cast<A*>(scratch) : home;
    if (arg.column_stride == 1) {
      for (std::int64_t c = 0; c < columns; ++c) to[c] = static_cast<A>(value_of(c));
    } else {
      for (std::int64_t c = 0; c < columns; ++c) {
        to[c * arg.column_stride] = static_cast<A>(value_of(c));
      }
    }
    if (streams_) StreamBytes(home, to, static_cast<std::size_t>(columns) * sizeof(A));
  }

  const SegmentProblem& problem_;
  void* data_;
  const Segments& segments_;
  bool streams_;
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

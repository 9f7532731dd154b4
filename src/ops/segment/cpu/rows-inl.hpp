// Rows of [rows, columns] blocks: reading, writing and folding them into one vector per column.
// Everything is computed in Real<T>; blocks whose elements lie as they should are used in place.

#if defined(PULLBACK_SEGMENT_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_ROWS_INL_HPP
#undef PULLBACK_SEGMENT_ROWS_INL_HPP
#else
#define PULLBACK_SEGMENT_ROWS_INL_HPP
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/ahead-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/stream-inl.hpp"
#include "ops/segment/cpu/plan.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using pullback::HWY_NAMESPACE::BitsOf;
using pullback::HWY_NAMESPACE::kHasLanes;
using pullback::HWY_NAMESPACE::LinesAhead;
using pullback::HWY_NAMESPACE::LoadFirst;
using pullback::HWY_NAMESPACE::Real;
using pullback::HWY_NAMESPACE::Store;
using pullback::HWY_NAMESPACE::StoreFirst;
using pullback::HWY_NAMESPACE::StreamBytes;

// Integers with the lanes of R: places of rows within a piece, and counts.
template <class R>
using Int = std::conditional_t<sizeof(R) == 8, std::int64_t, std::int32_t>;

template <class R>
inline constexpr R kInf = std::numeric_limits<R>::infinity();

// Runs of up to this many vectors are read and written without a loop, whose end would be a guess.
inline constexpr std::int64_t kFewVectors = 4;

// --- Columns, a vector at a time ---

// How f of ForColumns reads and writes its lanes: all of them, or the first `count`.
template <bool kStream>
struct AllLanes {
  template <class D, class T>
  HWY_INLINE hn::Vec<D> Read(D d, const T* from) const {
    // Qualified: by argument-dependent lookup it would be Highway's own, which wants alignment.
    return pullback::HWY_NAMESPACE::Load(d, from);
  }
  template <class D, class T>
  HWY_INLINE void Write(D d, hn::Vec<D> value, T* to) const {
    if constexpr (kStream) {
      hn::Stream(value, d, to);
    } else {
      Store(d, value, to);
    }
  }
  // To what is read soon, never past the caches.
  template <class D, class T>
  HWY_INLINE void Keep(D d, hn::Vec<D> value, T* to) const {
    Store(d, value, to);
  }
  // Which lanes are f's.
  template <class D>
  HWY_INLINE hn::Mask<D> Inside(D d) const {
    return hn::FirstN(d, hn::Lanes(d));
  }
  // `value`, with 0 in lanes that are none of f's.
  template <class D>
  HWY_INLINE hn::Vec<D> First(D, hn::Vec<D> value) const {
    return value;
  }
};
struct FirstLanes {
  std::size_t count;
  template <class D, class T>
  HWY_INLINE hn::Vec<D> Read(D d, const T* from) const {
    return LoadFirst(d, from, count);
  }
  template <class D, class T>
  HWY_INLINE void Write(D d, hn::Vec<D> value, T* to) const {
    StoreFirst(d, value, to, count);
  }
  template <class D, class T>
  HWY_INLINE void Keep(D d, hn::Vec<D> value, T* to) const {
    StoreFirst(d, value, to, count);
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Inside(D d) const {
    return hn::FirstN(d, count);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> First(D d, hn::Vec<D> value) const {
    return hn::IfThenElseZero(Inside(d), value);
  }
};

// Calls f(lanes, column) for all columns, Lanes(R) of them at a time.
template <class R, bool kStream = false, class F>
HWY_INLINE void ForColumns(std::int64_t columns, const F& f) {
  const auto step = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<R>()));
  std::int64_t column = 0;
  for (; column + step <= columns; column += step) f(AllLanes<kStream>(), column);
  if (column < columns) f(FirstLanes{static_cast<std::size_t>(columns - column)}, column);
}

// --- Tensors of two dimensions ---

template <class T>
struct Matrix {
  T* data = nullptr;
  std::int64_t row_stride = 0, column_stride = 1;

  Matrix() = default;
  Matrix(const TensorSpec& spec, const void* data_)
      : data(static_cast<T*>(const_cast<void*>(data_))),
        row_stride(spec.shape[0] == 1 ? 0 : spec.strides[0]),
        column_stride(spec.shape[1] == 1 ? 1 : spec.strides[1]) {}

  T* at(std::int64_t row, std::int64_t column) const {
    return data + row * row_stride + column * column_stride;
  }
};

// Rows become columns.
template <class T>
Matrix<T> Transposed(const Matrix<T>& matrix) {
  Matrix<T> result;
  result.data = matrix.data;
  result.row_stride = matrix.column_stride;
  result.column_stride = matrix.row_stride;
  return result;
}

template <class T>
HWY_INLINE Real<T> ToReal(T value) {
  return static_cast<Real<T>>(value);
}

#if HWY_TARGET != HWY_SCALAR
// A vector of every kStride-th element.
template <int kStride, class D>
HWY_INLINE hn::Vec<D> LoadEvery(D d, const hn::TFromD<D>* from) {
  if constexpr (kStride == 1) {
    return hn::LoadU(d, from);
  } else {
    constexpr int kHalf = kStride / 2;
    const auto low = LoadEvery<kHalf>(d, from);
    return hn::ConcatEven(d, LoadEvery<kHalf>(d, from + kHalf * hn::MaxLanes(d)), low);
  }
}
#endif

// Elements `stride` apart.
template <class T>
void CopyApart(const T* HWY_RESTRICT from, std::int64_t stride, std::int64_t count,
               T* HWY_RESTRICT to) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  using Bits = hwy::UnsignedFromSize<sizeof(T)>;
  const hn::ScalableTag<Bits> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const auto copy = [&]<int kStride>() HWY_ATTR {
    // The last vector would read past the last element.
    for (; i + kLanes < count; i += kLanes) {
      hn::StoreU(LoadEvery<kStride>(d, reinterpret_cast<const Bits*>(from + i * kStride)), d,
                 reinterpret_cast<Bits*>(to + i));
    }
  };
  if (stride == 2) copy.template operator()<2>();
  if (stride == 4) copy.template operator()<4>();
#endif
  for (; i < count; ++i) to[i] = from[i * stride];
}

// Elements of a row that are not side by side are copied in turn before and after conversion.
inline constexpr std::int64_t kApart = 512;

// One row into `to`, which has room for whole vectors.
template <class T>
void ReadRow(const Matrix<const T>& matrix, std::int64_t row, std::int64_t column,
             std::int64_t columns, Real<T>* HWY_RESTRICT to) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  const std::int64_t stride = matrix.column_stride;
  const auto convert = [&](const T* from, std::int64_t count, std::int64_t first) HWY_ATTR {
    ForColumns<R>(count, [&](auto lanes, std::int64_t c) {
      Store(d, lanes.Read(d, from + c), to + first + c);
    });
  };
  const T* from = matrix.at(row, column);
  if (stride == 1) {
    convert(from, columns, 0);
  } else if constexpr (std::is_same_v<T, R>) {
    CopyApart(from, stride, columns, to);
  } else {
    T values[kApart];
    for (std::int64_t c = 0; c < columns; c += kApart) {
      const std::int64_t count = std::min(kApart, columns - c);
      CopyApart(from + c * stride, stride, count, values);
      convert(values, count, c);
    }
  }
}

template <class T>
void ConvertRun(const Real<T>* HWY_RESTRICT from, std::int64_t count, T* HWY_RESTRICT to) {
  const hn::ScalableTag<Real<T>> d;
  ForColumns<Real<T>>(
      count, [&](auto lanes, std::int64_t i) { lanes.Write(d, hn::LoadU(d, from + i), to + i); });
}

template <class T>
void WriteRow(const Matrix<T>& matrix, std::int64_t row, std::int64_t column, std::int64_t columns,
              const Real<T>* HWY_RESTRICT from) {
  T* to = matrix.at(row, column);
  const std::int64_t stride = matrix.column_stride;
  if (stride == 1) {
    ConvertRun(from, columns, to);
  } else if constexpr (std::is_same_v<T, Real<T>>) {
    for (std::int64_t c = 0; c < columns; ++c) to[c * stride] = from[c];
  } else {
    T values[kApart];
    for (std::int64_t c = 0; c < columns; c += kApart) {
      const std::int64_t count = std::min(kApart, columns - c);
      ConvertRun(from + c, count, values);
      for (std::int64_t i = 0; i < count; ++i) to[(c + i) * stride] = values[i];
    }
  }
}

template <class R>
struct Block {
  const R* data;
  std::int64_t stride, rows;
  bool copied = false;  // into scratch
  const R* row(std::int64_t r) const { return data + r * stride; }
};

// Prefetches the rows behind a block, vector by vector while the block is used. Blocks that are not
// dense are left to the hardware, copies are in cache.
template <class R>
HWY_INLINE LinesAhead RowsAhead(const Block<R>& block, std::int64_t columns) {
  const bool dense = block.stride == columns && !block.copied;
  return LinesAhead(block.data, dense ? hn::Lanes(hn::ScalableTag<R>()) * sizeof(R) : 0);
}

// Prefetches rows that lie anywhere, which no hardware foresees, long before they are used, and
// into the second cache: more lines can be on their way there than to the first.
template <class T>
class GatherAhead {
 public:
  GatherAhead(const Matrix<const T>& matrix, const Segments& segments, std::int64_t column,
              std::int64_t columns)
      : matrix_(matrix),
        segments_(segments),
        column_(column),
        rows_(std::clamp<std::int64_t>(kLead / (columns * static_cast<std::int64_t>(sizeof(T))), 4,
                                       256)) {}

  // Row `row` of the sorted order is used, from column `column` on, `bytes` of it.
  HWY_INLINE void Step(std::int64_t row, std::int64_t column, std::int64_t bytes) const {
    constexpr std::int64_t kLine = 64;
    // Not past the permutation's end.
    const std::int64_t later = std::min(row + rows_, segments_.rows - 1);
    const auto* from =
        reinterpret_cast<const char*>(matrix_.at(segments_.readable_row(later), column_ + column));
    for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
  }

 private:
  static constexpr std::int64_t kLead = 16384;  // bytes

  const Matrix<const T>& matrix_;
  const Segments& segments_;
  std::int64_t column_, rows_;
};

// Calls f(r, n) for the places r of the sorted order from `begin` to `end`, whose rows of x are n;
// -1 where the permutation holds no row.
template <class F>
HWY_INLINE void ForRows(const Segments& segments, std::int64_t begin, std::int64_t end,
                        const F& f) {
  segments.permutation.visit([&](const auto& row_of) HWY_ATTR {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t n = row_of(r);
      f(r, n >= 0 && n < segments.rows ? n : -1);
    }
  });
}

// Rows [begin, begin + rows) of the sorted order; in place, or else converted into `scratch`.
template <class T>
Block<Real<T>> ReadBlock(const Matrix<const T>& matrix, const Segments& segments,
                         std::int64_t begin, std::int64_t rows, std::int64_t column,
                         std::int64_t columns, Real<T>* HWY_RESTRICT scratch) {
  using R = Real<T>;
  if constexpr (std::is_same_v<T, R>) {
    if (matrix.column_stride == 1 && !segments.permuted()) {
      return {matrix.at(begin, column), matrix.row_stride, rows};
    }
  }
  const std::int64_t stride = block_stride(columns);
  if (matrix.column_stride == 1 && matrix.row_stride == stride && stride == columns &&
      !segments.permuted()) {
    ReadRow(matrix, begin, column, rows * columns, scratch);
  } else if (matrix.column_stride != 1 && !segments.permuted() &&
             std::abs(matrix.row_stride) == 1) {
    for (std::int64_t c = 0; c < columns; ++c) {  // a transposed tensor: along its memory
      const T* from = matrix.at(begin, column + c);
      for (std::int64_t r = 0; r < rows; ++r) {
        scratch[r * stride + c] = ToReal(from[r * matrix.row_stride]);
      }
    }
  } else {
    const GatherAhead<T> ahead(matrix, segments, column, columns);
    const std::int64_t bytes =
        matrix.column_stride == 1 ? columns * static_cast<std::int64_t>(sizeof(T)) : 1;
    if (segments.permuted() && columns < kColumnAlign && matrix.column_stride == 1) {
      // Element by element: a call for each row would take most of the time, and so would whole
      // vectors that are stored over each other.
      ForRows(segments, begin, begin + rows, [&](std::int64_t r, std::int64_t n) {
        ahead.Step(r, 0, bytes);
        const T* from = matrix.at(std::max<std::int64_t>(n, 0), column);
        R* const to = scratch + (r - begin) * stride;
        for (std::int64_t c = 0; c < columns; ++c) to[c] = ToReal(from[c]);
      });
      return {scratch, stride, rows, true};
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      if (segments.permuted()) ahead.Step(begin + r, 0, bytes);
      ReadRow(matrix, segments.readable_row(begin + r), column, columns, scratch + r * stride);
    }
  }
  return {scratch, stride, rows, true};
}

// ReadBlock of a tensor with one column, with stride 1: a run.
template <class T>
const Real<T>* ReadRun(const Matrix<const T>& matrix, const Segments& segments, std::int64_t begin,
                       std::int64_t rows, Real<T>* HWY_RESTRICT scratch) {
  if constexpr (std::is_same_v<T, Real<T>>) {
    if (matrix.row_stride == 1 && !segments.permuted()) return matrix.at(begin, 0);
  }
  if (segments.permuted()) {
    const GatherAhead<T> ahead(matrix, segments, 0, 1);
    ForRows(segments, begin, begin + rows, [&](std::int64_t r, std::int64_t n) {
      ahead.Step(r, 0, 1);
      scratch[r - begin] = ToReal(*matrix.at(std::max<std::int64_t>(n, 0), 0));
    });
  } else {
    ReadRow(Transposed(matrix), 0, begin, rows, scratch);
  }
  return scratch;
}

// Elements [s, s + count) of a tensor with one column and a row for each segment, likewise.
template <class T>
const Real<T>* ReadOfSegments(const Matrix<const T>& matrix, std::int64_t s, std::int64_t count,
                              Real<T>* HWY_RESTRICT scratch) {
  return ReadRun(matrix, Segments{}, s, count, scratch);
}

// Calls f(first row, rows) for the blocks of a piece, of up to `step` rows.
template <class F>
HWY_INLINE void ForBlocks(const Piece& piece, std::int64_t step, const F& f) {
  for (std::int64_t row = piece.begin; row < piece.end; row += step) {
    f(row, std::min(step, piece.end - row));
  }
}
template <class F>
HWY_INLINE void ForRuns(const Piece& piece, const F& f) {
  for (std::int64_t row = piece.begin; row < piece.end; row += kBlockElements) {
    f(row, std::min(kBlockElements, piece.end - row));
  }
}

// Segments of so few rows that their lines may be read out of order.
inline constexpr std::int64_t kFewRows = 64;

// Calls few(piece) for those of the segments [begin, end) that have few rows, many(piece) for those
// that have more or for which that was false, and empty(segment) for the others.
template <class Few, class Many, class Empty>
HWY_INLINE void ForSegments(const Segments& segments, std::int64_t begin, std::int64_t end,
                            const Few& few, const Many& many, const Empty& empty) {
  std::int64_t row = segments.begin(begin);
  for (std::int64_t s = begin; s < end; ++s) {
    const Piece piece{s, row, segments.end(s), true, false};
    const std::int64_t rows = piece.end - row;
    if (rows == 0) {
      empty(s);
    } else if (rows > kFewRows || !few(piece)) {
      many(piece);
    }
    row = piece.end;
  }
}

// --- Folding rows into columns ---

// total[c] = op(total[c], block[r][c]) over the rows from `first` on.
template <class R, class Op>
HWY_INLINE void FoldRows(const Block<R>& block, std::int64_t first, std::int64_t columns,
                         R* HWY_RESTRICT total, const Op& op) {
  const hn::ScalableTag<R> d;
  std::int64_t r = first;
  LinesAhead ahead = RowsAhead(block, columns);
  for (; r + 4 <= block.rows; r += 4) {
    const R* rows = block.row(r);
    const std::int64_t stride = block.stride;
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      for (std::int64_t k = 0; k < 4; ++k) ahead.Step();
      // Two by two, for fewer dependent steps and less rounding.
      const auto sum01 = op(lanes.Read(d, rows + c), lanes.Read(d, rows + stride + c));
      const auto sum23 =
          op(lanes.Read(d, rows + 2 * stride + c), lanes.Read(d, rows + 3 * stride + c));
      Store(d, op(hn::LoadU(d, total + c), op(sum01, sum23)), total + c);
    });
  }
  for (; r < block.rows; ++r) {
    const R* row = block.row(r);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      Store(d, op(hn::LoadU(d, total + c), lanes.Read(d, row + c)), total + c);
    });
  }
}

// Where reductions of a few rows find them: side by side, or by a permutation.
template <class R>
class AdjacentRows {
 public:
  AdjacentRows(const Block<R>& block, std::int64_t columns)
      : block_(block), ahead_(RowsAhead(block, columns)) {}
  explicit operator bool() const { return block_.data != nullptr; }
  const Block<R>& block() const { return block_; }
  HWY_INLINE const R* Row(std::int64_t r) const { return block_.row(r); }
  HWY_INLINE void Used(std::int64_t, std::int64_t, std::int64_t vectors) {
    for (; vectors > 0; --vectors) ahead_.Step();
  }

 private:
  Block<R> block_;
  LinesAhead ahead_;
};
template <class R>
class GatheredRows {
 public:
  GatheredRows(const Matrix<const R>& matrix, const Segments& segments, std::int64_t begin,
               std::int64_t column, std::int64_t columns)
      : matrix_(matrix),
        segments_(segments),
        begin_(begin),
        column_(column),
        ahead_(matrix, segments, column, columns) {}
  explicit operator bool() const { return true; }
  HWY_INLINE const R* Row(std::int64_t r) const {
    return matrix_.at(segments_.readable_row(begin_ + r), column_);
  }
  HWY_INLINE void Used(std::int64_t r, std::int64_t column, std::int64_t vectors) {
    constexpr auto kBytes =
        static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<R>()) * sizeof(R));
    ahead_.Step(begin_ + r, column, vectors * kBytes);
  }

 private:
  const Matrix<const R>& matrix_;
  const Segments& segments_;
  std::int64_t begin_, column_;
  GatherAhead<R> ahead_;
};

// Sums of `count` > 0 rows, divided by `divisor`, straight to `to`: four vectors of columns in
// registers.
template <bool kStream, class R, class Rows>
HWY_INLINE void SumFewRows(Rows rows, std::int64_t count, std::int64_t columns, R divisor,
                           R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const auto parts = hn::Set(d, divisor);
  std::int64_t c = 0;
  for (; c + 4 * step <= columns; c += 4 * step) {
    const R* from = rows.Row(0) + c;
    auto v0 = hn::LoadU(d, from), v1 = hn::LoadU(d, from + step);
    auto v2 = hn::LoadU(d, from + 2 * step), v3 = hn::LoadU(d, from + 3 * step);
    rows.Used(0, c, 4);
    for (std::int64_t r = 1; r < count; ++r) {
      from = rows.Row(r) + c;
      rows.Used(r, c, 4);
      v0 = hn::Add(v0, hn::LoadU(d, from));
      v1 = hn::Add(v1, hn::LoadU(d, from + step));
      v2 = hn::Add(v2, hn::LoadU(d, from + 2 * step));
      v3 = hn::Add(v3, hn::LoadU(d, from + 3 * step));
    }
    const AllLanes<kStream> all;
    all.Write(d, hn::Div(v0, parts), to + c);
    all.Write(d, hn::Div(v1, parts), to + c + step);
    all.Write(d, hn::Div(v2, parts), to + c + 2 * step);
    all.Write(d, hn::Div(v3, parts), to + c + 3 * step);
  }
  ForColumns<R, kStream>(columns - c, [&](auto lanes, std::int64_t k) {
    auto sum = lanes.Read(d, rows.Row(0) + c + k);
    rows.Used(0, c + k, 1);
    for (std::int64_t r = 1; r < count; ++r) {
      rows.Used(r, c + k, 1);
      sum = hn::Add(sum, lanes.Read(d, rows.Row(r) + c + k));
    }
    lanes.Write(d, hn::Div(sum, parts), to + c + k);
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

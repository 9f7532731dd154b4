// Rows of [rows, columns] blocks: reading, writing and folding them into one vector per column.
// Everything is computed in Real<T>; blocks whose elements lie as they should are used in place.

#if defined(PULLBACK_SEGMENT_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_ROWS_INL_HPP
#undef PULLBACK_SEGMENT_ROWS_INL_HPP
#else
#define PULLBACK_SEGMENT_ROWS_INL_HPP
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/simd-inl.hpp"
#include "ops/segment/cpu/plan.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using pullback::HWY_NAMESPACE::LoadFirst;
using pullback::HWY_NAMESPACE::Real;
using pullback::HWY_NAMESPACE::Store;
using pullback::HWY_NAMESPACE::StoreFirst;

// Integers with the lanes of R: places of rows within a piece, and counts.
template <class R>
using Int = std::conditional_t<sizeof(R) == 8, std::int64_t, std::int32_t>;

template <class R>
inline constexpr R kInf = std::numeric_limits<R>::infinity();

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

// One row into `to`, which has room for whole vectors.
template <class T>
void ReadRow(const Matrix<const T>& matrix, std::int64_t row, std::int64_t column,
             std::int64_t columns, Real<T>* HWY_RESTRICT to) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  const T* from = matrix.at(row, column);
  const std::int64_t stride = matrix.column_stride;
  if (stride == 1) {
    ForColumns<R>(columns,
                  [&](auto lanes, std::int64_t c) { Store(d, lanes.Read(d, from + c), to + c); });
  } else {
    for (std::int64_t c = 0; c < columns; ++c) to[c] = ToReal(from[c * stride]);
  }
}

template <class T>
void WriteRow(const Matrix<T>& matrix, std::int64_t row, std::int64_t column, std::int64_t columns,
              const Real<T>* HWY_RESTRICT from) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  T* to = matrix.at(row, column);
  const std::int64_t stride = matrix.column_stride;
  if (stride == 1) {
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      lanes.Write(d, hn::LoadU(d, from + c), to + c);
    });
  } else {
    for (std::int64_t c = 0; c < columns; ++c) to[c * stride] = T(from[c]);
  }
}

template <class R>
struct Block {
  const R* data;
  std::int64_t stride, rows;
  const R* row(std::int64_t r) const { return data + r * stride; }
};

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
  const std::int64_t stride = padded(columns);
  if (matrix.column_stride != 1 && !segments.permuted() && std::abs(matrix.row_stride) == 1) {
    for (std::int64_t c = 0; c < columns; ++c) {  // a transposed tensor: along its memory
      const T* from = matrix.at(begin, column + c);
      for (std::int64_t r = 0; r < rows; ++r) {
        scratch[r * stride + c] = ToReal(from[r * matrix.row_stride]);
      }
    }
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      ReadRow(matrix, segments.readable_row(begin + r), column, columns, scratch + r * stride);
    }
  }
  return {scratch, stride, rows};
}

// The same of a tensor with one column, with stride 1: a run.
template <class T>
const Real<T>* ReadRun(const Matrix<const T>& matrix, const Segments& segments, std::int64_t begin,
                       std::int64_t rows, Real<T>* HWY_RESTRICT scratch) {
  if constexpr (std::is_same_v<T, Real<T>>) {
    if (matrix.row_stride == 1 && !segments.permuted()) return matrix.at(begin, 0);
  }
  if (segments.permuted()) {
    for (std::int64_t r = 0; r < rows; ++r) {
      scratch[r] = ToReal(*matrix.at(segments.readable_row(begin + r), 0));
    }
  } else {
    ReadRow(Transposed(matrix), 0, begin, rows, scratch);
  }
  return scratch;
}

// Calls f(first row, rows) for the blocks of a piece.
template <class F>
void ForBlocks(const Piece& piece, std::int64_t columns, const F& f) {
  const std::int64_t step = block_rows(columns);
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

// --- Folding rows into columns ---

// exp, infinite above all finite results, NaN of NaN (Highway's gives 0 for that).
template <class D>
HWY_INLINE hn::Vec<D> ExpOf(D d, hn::Vec<D> x) {
  using R = hn::TFromD<D>;
  const auto high = hn::Set(d, R(sizeof(R) == 8 ? 709 : 88));
  return hn::IfThenElse(hn::Lt(x, high), hn::Exp(d, x), hn::Mul(x, hn::Set(d, kInf<R>)));
}

template <class D>
HWY_INLINE hn::Vec<D> LogOf(D d, hn::Vec<D> x) {
  using R = hn::TFromD<D>;
  const auto log = hn::IfThenElse(hn::Lt(x, hn::Set(d, kInf<R>)), hn::Log(d, x), x);
  return hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -kInf<R>), log);
}

// total[c] = op(total[c], block[r][c]) over the rows from `first` on.
template <class R, class Op>
HWY_INLINE void FoldRows(const Block<R>& block, std::int64_t first, std::int64_t columns,
                         R* HWY_RESTRICT total, const Op& op) {
  const hn::ScalableTag<R> d;
  std::int64_t r = first;
  for (; r + 4 <= block.rows; r += 4) {
    const R* rows = block.row(r);
    const std::int64_t stride = block.stride;
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
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

// sum exp(x - Shift(largest)), the running state of logsumexp and softmax. The shift is finite, so
// that infinities and NaN come out of the sum as they should.
template <class R>
struct LogSum {
  R *largest, *sum;
};

template <class D>
HWY_INLINE hn::Vec<D> Shift(D d, hn::Vec<D> largest) {
  const auto infinity = hn::Set(d, kInf<hn::TFromD<D>>);
  return hn::IfThenElseZero(hn::Lt(hn::Abs(largest), infinity), largest);
}

template <class R>
void StartLogSum(const LogSum<R>& state, std::int64_t columns) {
  std::fill_n(state.largest, padded(columns), -kInf<R>);
  std::fill_n(state.sum, padded(columns), R{0});
}

// `scratch` is a vector of columns.
template <class R>
void AddLogSum(const LogSum<R>& state, const Block<R>& block, std::int64_t columns,
               R* HWY_RESTRICT scratch) {
  const hn::ScalableTag<R> d;
  R* HWY_RESTRICT largest = state.largest;
  R* HWY_RESTRICT sum = state.sum;
  ForColumns<R>(columns,
                [&](auto, std::int64_t c) { Store(d, hn::LoadU(d, largest + c), scratch + c); });
  FoldRows(block, 0, columns, largest, [](auto a, auto b) { return hn::Max(b, a); });
  ForColumns<R>(columns, [&](auto, std::int64_t c) {
    const auto before = hn::LoadU(d, scratch + c);
    const auto shift = Shift(d, hn::LoadU(d, largest + c));
    Store(d, hn::Mul(hn::LoadU(d, sum + c), ExpOf(d, hn::Sub(before, shift))), sum + c);
    Store(d, shift, scratch + c);
  });
  for (std::int64_t r = 0; r < block.rows; ++r) {
    const R* row = block.row(r);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      const auto term = ExpOf(d, hn::Sub(lanes.Read(d, row + c), hn::LoadU(d, scratch + c)));
      Store(d, hn::Add(hn::LoadU(d, sum + c), term), sum + c);
    });
  }
}

// Adds the state of later rows.
template <class R>
void MergeLogSum(const LogSum<R>& state, const LogSum<R>& later, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  ForColumns<R>(columns, [&](auto, std::int64_t c) {
    const auto a = hn::LoadU(d, state.largest + c), b = hn::LoadU(d, later.largest + c);
    const auto largest = hn::Max(a, b);
    const auto shift = Shift(d, largest);
    const auto sum = hn::Add(hn::Mul(hn::LoadU(d, state.sum + c), ExpOf(d, hn::Sub(a, shift))),
                             hn::Mul(hn::LoadU(d, later.sum + c), ExpOf(d, hn::Sub(b, shift))));
    Store(d, largest, state.largest + c);
    Store(d, sum, state.sum + c);
  });
}

// Turns the state into log sum exp x, in `largest`.
template <class R>
void FinishLogSum(const LogSum<R>& state, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  ForColumns<R>(columns, [&](auto, std::int64_t c) {
    const auto shift = Shift(d, hn::LoadU(d, state.largest + c));
    Store(d, hn::Add(shift, LogOf(d, hn::LoadU(d, state.sum + c))), state.largest + c);
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Writing a tensor with a row for each row of x: d_x, and softmax's out.
//
// A tensor too large to stay in cache is written with streaming stores, which spare the reading of
// the lines that they fill. They come in whole aligned vectors: either the rows are made of those,
// or rows are staged in scratch memory and streamed from there. Tensors of one
// column are staged whatever their size: short segments are quicker to write where the end of one
// may be written over by the next.

#if defined(PULLBACK_SEGMENT_MAP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_MAP_INL_HPP
#undef PULLBACK_SEGMENT_MAP_INL_HPP
#else
#define PULLBACK_SEGMENT_MAP_INL_HPP
#endif

#include <cstring>

#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Less than that may be read from cache soon.
inline constexpr std::int64_t kStreamBytes = std::int64_t{8} << 20;
inline constexpr std::int64_t kLine = 64;

// Whether the rows of a tensor are worth streaming and made of whole cache lines.
inline bool StreamsRows(const TensorSpec& spec, const void* data) {
  const auto size = static_cast<std::int64_t>(size_of(spec.dtype));
  return data != nullptr && spec.numel() * size >= kStreamBytes && spec.strides[1] == 1 &&
         reinterpret_cast<std::uintptr_t>(data) % kLine == 0 &&
         (spec.shape[0] == 1 || spec.strides[0] * size % kLine == 0) &&
         spec.shape[1] * size % kLine == 0;
}

// The same of a tensor with one column.
inline bool StreamsColumn(const TensorSpec& spec, const void* data) {
  const auto size = static_cast<std::int64_t>(size_of(spec.dtype));
  return data != nullptr && spec.numel() * size >= kStreamBytes && spec.shape[1] == 1 &&
         spec.strides[0] == 1;
}

// Whether a tensor with a row for each segment is written past the caches.
inline bool Streams(const TensorSpec& spec, const void* data) {
  return StreamsRows(spec, data) || StreamsColumn(spec, data);
}

// Calls f.template operator()<kStream>(). Rows that are computed in another type than theirs never
// go past the caches by themselves.
template <class T, class F>
HWY_INLINE auto WithStream(bool stream, const F& f) {
  if constexpr (std::is_same_v<T, Real<T>>) {
    if (stream) return f.template operator()<true>();
  }
  return f.template operator()<false>();
}

// Rows [s, s + count) of a tensor with one column.
template <class To, class A>
void WriteColumn(const Matrix<To>& matrix, std::int64_t s, const A* from, std::int64_t count,
                 bool stream) {
  if (stream) {
    StreamBytes(matrix.at(s, 0), from, static_cast<std::size_t>(count) * sizeof(A));
  } else if constexpr (!std::is_same_v<To, A>) {
    WriteRow(Transposed(matrix), 0, s, count, from);
  } else {
    for (std::int64_t k = 0; k < count; ++k) *matrix.at(s + k, 0) = To(from[k]);
  }
}

template <class T>
class RowOutput {
  using R = Real<T>;
  static constexpr bool kConverts = !std::is_same_v<T, R>;

 public:
  RowOutput(const TensorSpec& spec, const void* data, const Segments& segments)
      : matrix_(spec, data), segments_(segments), columns_(spec.shape[1]) {
    if (data == nullptr) return;
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const bool contiguous = spec.is_contiguous() && !segments.permuted();
    large_ = contiguous && spec.numel() * kSize >= kStreamBytes;
    streams_ = !kConverts && StreamsRows(spec, data);
    stages_ = columns_ == 1 || (!streams_ && columns_ <= kColumnBlock &&
                                (kConverts ? contiguous || segments.permuted() : large_));
    if (stages_ && contiguous) matrix_.row_stride = columns_;  // also of a single row, with any
  }

  explicit operator bool() const { return matrix_.data != nullptr; }
  bool streams() const { return streams_; }
  // Whether rows are written to a stage, where there is room for a vector more.
  bool stages() const { return stages_; }
  // Whether all rows of a tile can be written at the same time.
  bool apart() const { return stages_ || (!kConverts && matrix_.column_stride == 1); }

  // One tile's view: where its rows are written. `stage` has room for the tile's rows.
  class Tile {
   public:
    Tile(const RowOutput& output, std::int64_t column, std::int64_t columns, R* row, R* stage)
        : output_(output), column_(column), columns_(columns), row_(row), stage_(stage) {
      const Matrix<T>& matrix = output.matrix_;
      known_ = output.stages_;
      row_stride_ = columns;
      if constexpr (!kConverts) {
        if (known_ || matrix.column_stride != 1 || output.segments_.permuted()) return;
        known_ = true;
        row_stride_ = matrix.row_stride;
        rows_ = matrix.data + column;
      }
    }

    // Of the tensor: this tile may have a single one of many, too.
    bool one_column() const { return output_.columns_ == 1; }
    // To be called before the rows of a piece are written, in rising order.
    void Open(const Piece& piece) {
      if (!output_.stages_) return;
      if (end_ != piece.begin * columns_) {
        Drain();
        StageFrom(piece.begin * columns_);
      } else if (end_ - first_ >= kBlockElements) {
        DrainLines();
      }
      end_ = piece.end * columns_;
    }
    // The last row, opened by itself, is written elsewhere.
    void Drop() { end_ -= columns_; }
    void Flush() {
      Drain();
      if (output_.large_ || output_.streams_) hwy::FlushStream();
    }
    // The stage's rows go home; Flush() has to follow before others read them.
    void Drain() {
      if (output_.stages_ && end_ > first_) Send(end_ - first_);
      first_ = end_ = -1;
    }

    // Only the whole lines go home, so that each is written once.
    void DrainLines() {
      if (!output_.stages_ || end_ <= first_) return;
      if (!output_.large_) {
        Send(end_ - first_);
        return StageFrom(end_);
      }
      const std::int64_t whole = end_ - first_ - PastLine(output_.matrix_.data + end_);
      if (whole <= 0) return;
      Send(whole);
      std::copy_n(stage_ + whole, kLineElements, stage_);
      StageFrom(first_ + whole);
    }

    // Where row r of the sorted order is computed; Done() brings it home if that was elsewhere.
    HWY_INLINE R* Row(std::int64_t r) const {
      if (known_) return rows_ + r * row_stride_;
      if constexpr (!kConverts) {
        const std::int64_t n = output_.segments_.row(r);
        if (output_.matrix_.column_stride == 1 && n >= 0) return output_.matrix_.at(n, column_);
      }
      return row_;
    }
    HWY_INLINE void Done(std::int64_t r) const {
      if (known_ || (!kConverts && output_.matrix_.column_stride == 1)) return;
      const std::int64_t n = output_.segments_.row(r);
      if (n >= 0) WriteRow(output_.matrix_, n, column_, columns_, row_);
    }

    // The same for rows from r on of a tensor with one column, which are staged.
    HWY_INLINE R* Run(std::int64_t r) const { return rows_ + r; }

   private:
    static constexpr auto kLineElements = kLine / static_cast<std::int64_t>(sizeof(T));

    static std::int64_t PastLine(const T* at) {
      return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at) % kLine / sizeof(T));
    }

    void StageFrom(std::int64_t element) {
      first_ = element;
      rows_ = stage_ - element;
    }

    // The first `count` elements of the stage go home.
    void Send(std::int64_t count) const {
      const Matrix<T>& matrix = output_.matrix_;
      if (output_.segments_.permuted()) {
        const std::int64_t begin = first_ / columns_, end = begin + count / columns_;
        ForRows(output_.segments_, begin, end, [&](std::int64_t r, std::int64_t n) {
          const R* from = stage_ + (r - begin) * columns_;
          if (n < 0) return;
          if (columns_ == 1) {
            *matrix.at(n, 0) = T(*from);
          } else {
            constexpr std::int64_t kAhead = 16;
            const std::int64_t later = std::min(r + kAhead, output_.segments_.rows - 1);
            __builtin_prefetch(matrix.at(output_.segments_.readable_row(later), 0), 1, 2);
            WriteRow(matrix, n, 0, columns_, from);
          }
        });
        return;
      }
      if (matrix.row_stride != columns_) {  // of one column
        return WriteRow(Transposed(matrix), 0, first_, count, stage_);
      }
      T* const to = matrix.data + first_;
      if constexpr (!kConverts) {
        SendRun(stage_, count, to);
      } else if (!output_.large_) {
        ConvertRun(stage_, count, to);
      } else {
        constexpr std::int64_t kSpan = 1024;
        HWY_ALIGN T span[kSpan];
        for (std::int64_t i = 0; i < count;) {
          const std::int64_t n = std::min(kSpan - PastLine(to + i), count - i);
          ConvertRun(stage_ + i, n, span);
          SendRun(span, n, to + i);
          i += n;
        }
      }
    }
    void SendRun(const T* from, std::int64_t count, T* to) const {
      const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
      if (output_.large_) {
        StreamBytes(to, from, bytes);
      } else {
        std::memcpy(static_cast<void*>(to), from, bytes);
      }
    }

    const RowOutput& output_;
    std::int64_t column_, columns_;
    R* row_;
    R* stage_;
    // Row r is at rows_ + r row_stride_, if that is known for all.
    R* rows_ = nullptr;
    std::int64_t row_stride_;
    bool known_;
    std::int64_t first_ = -1, end_ = -1;  // elements on the stage, in the order of rows
  };

  // Zeros in all columns of row r of the sorted order.
  void Clear(std::int64_t r) const {
    const std::int64_t n = segments_.row(r);
    if (n < 0) return;
    for (std::int64_t c = 0; c < columns_; ++c) *matrix_.at(n, c) = T(R{0});
  }

 private:
  Matrix<T> matrix_;
  const Segments& segments_;
  std::int64_t columns_;
  bool large_ = false, streams_ = false, stages_ = false;
};

// Rows of short segments, one segment after the other: in place, or copied to scratch, as many at a
// time as are worth it.
template <class T>
class RowWindow {
  using R = Real<T>;

 public:
  // Up to `last_row` of the sorted order.
  RowWindow(const Matrix<const T>& matrix, const Segments& segments, std::int64_t last_row,
            std::int64_t column, std::int64_t columns, R* scratch)
      : matrix_(matrix),
        segments_(segments),
        last_row_(last_row),
        column_(column),
        columns_(columns),
        most_(block_rows(columns)),
        scratch_(scratch),
        in_place_(std::is_same_v<T, R> && matrix.column_stride == 1 && !segments.permuted()) {}

  // The rows of a piece behind those of the pieces before; no data if they are too many.
  HWY_INLINE Block<R> Rows(const Piece& piece) {
    const std::int64_t rows = piece.end - piece.begin;
    if constexpr (std::is_same_v<T, R>) {
      if (in_place_) return {matrix_.at(piece.begin, column_), matrix_.row_stride, rows};
    }
    if (piece.end > end_) {
      if (rows > most_) return {};
      begin_ = piece.begin;
      end_ = most_ < kFewRows ? piece.end : std::min(begin_ + most_, last_row_);
      block_ = ReadBlock(matrix_, segments_, begin_, end_ - begin_, column_, columns_, scratch_);
    }
    return {block_.row(piece.begin - begin_), block_.stride, rows, true};
  }

 private:
  const Matrix<const T>& matrix_;
  const Segments& segments_;
  std::int64_t last_row_, column_, columns_, most_;
  R* scratch_;
  bool in_place_;
  Block<R> block_{};
  std::int64_t begin_ = 0, end_ = 0;
};

// What f of MapRows computes with besides its inputs: vectors with an element per column, and the
// key of the row. In a tensor of one column the lanes hold rows instead, with one element for all.
template <class R, bool kOneColumn>
struct Lanes {
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  std::int64_t column;
  Int<R> key;

  HWY_INLINE hn::Vec<D> At(const R* vector) const {
    if constexpr (kOneColumn) return hn::Set(D(), vector[0]);
    return hn::LoadU(D(), vector + column);
  }
  HWY_INLINE hn::Vec<DI> At(const Int<R>* vector) const {
    if constexpr (kOneColumn) return hn::Set(DI(), vector[0]);
    return hn::LoadU(DI(), vector + column);
  }
  HWY_INLINE hn::Vec<DI> Key() const {
    if constexpr (kOneColumn)
      return hn::Add(hn::Iota(DI(), 0), hn::Set(DI(), static_cast<Int<R>>(key + column)));
    return hn::Set(DI(), key);
  }
};

// The inputs of a map: up to two tensors with a row for each of x, and scratch for a block of each.
template <class T>
struct MapInputs {
  const Matrix<const T>* matrix[2] = {};
  Real<T>* scratch[2] = {};
};

// output[r] = f(lanes, inputs of row r...) for the rows of a piece. key(r) names a row; only if it
// counts up by one are the rows of one column computed side by side.
template <bool kStream, int kInputs, class T, class Key, class F>
void MapRows(const Piece& piece, const Segments& segments, std::int64_t column,
             std::int64_t columns, const MapInputs<T>& inputs, typename RowOutput<T>::Tile& output,
             const Key& key, bool counts_up, const F& f) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  if (output.one_column() && counts_up) {
    ForRuns(piece, [&](std::int64_t first, std::int64_t rows) {
      output.Open(Piece{piece.segment, first, first + rows, false, false});
      const R* in[2] = {};
      for (int i = 0; i < kInputs; ++i) {
        in[i] = ReadRun(*inputs.matrix[i], segments, first, rows, inputs.scratch[i]);
      }
      R* HWY_RESTRICT to = output.Run(first);
      const Int<R> run_key = key(first);
      LinesAhead ahead[2] = {RowsAhead(Block<R>{in[0], 1, rows}, 1),
                             RowsAhead(Block<R>{in[1], 1, rows}, 1)};
      ForColumns<R>(rows, [&](auto lanes, std::int64_t c) {
        for (int i = 0; i < kInputs; ++i) ahead[i].Step();
        const Lanes<R, true> at{c, run_key};
        if constexpr (kInputs == 0) lanes.Write(d, f(at), to + c);
        if constexpr (kInputs == 1) lanes.Write(d, f(at, lanes.Read(d, in[0] + c)), to + c);
        if constexpr (kInputs == 2) {
          lanes.Write(d, f(at, lanes.Read(d, in[0] + c), lanes.Read(d, in[1] + c)), to + c);
        }
      });
      output.DrainLines();
    });
    return;
  }
  ForBlocks(piece, block_rows(columns), [&](std::int64_t first, std::int64_t rows) {
    output.Open(Piece{piece.segment, first, first + rows, false, false});
    Block<R> block[2] = {};
    for (int i = 0; i < kInputs; ++i) {
      block[i] =
          ReadBlock(*inputs.matrix[i], segments, first, rows, column, columns, inputs.scratch[i]);
    }
    LinesAhead ahead[2] = {RowsAhead(block[0], columns), RowsAhead(block[1], columns)};
    for (std::int64_t r = 0; r < rows; ++r) {
      const R* in[2] = {};
      for (int i = 0; i < kInputs; ++i) in[i] = block[i].row(r);
      const Int<R> row_key = key(first + r);
      R* HWY_RESTRICT to = output.Row(first + r);
      ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
        const Lanes<R, false> at{c, row_key};
        for (int i = 0; i < kInputs; ++i) ahead[i].Step();
        if constexpr (kInputs == 0) lanes.Write(d, f(at), to + c);
        if constexpr (kInputs == 1) lanes.Write(d, f(at, lanes.Read(d, in[0] + c)), to + c);
        if constexpr (kInputs == 2) {
          lanes.Write(d, f(at, lanes.Read(d, in[0] + c), lanes.Read(d, in[1] + c)), to + c);
        }
      });
      output.Done(first + r);
    }
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

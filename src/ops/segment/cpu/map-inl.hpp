// Writing a tensor with a row for each row of x: d_x, and softmax's out.
//
// A tensor too large to stay in cache is written with streaming stores, which spare the reading of
// the lines that they fill. They come in whole aligned vectors: either the rows are made of those,
// or a tile's rows are staged in scratch memory and streamed from there in one run. Tensors of one
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

// Rows [s, s + count) of a tensor with one column.
template <class To, class A>
void WriteColumn(const Matrix<To>& matrix, std::int64_t s, const A* from, std::int64_t count,
                 bool stream) {
  if (stream) {
    StreamBytes(matrix.at(s, 0), from, static_cast<std::size_t>(count) * sizeof(A));
  } else {
    for (std::int64_t k = 0; k < count; ++k) *matrix.at(s + k, 0) = To(from[k]);
  }
}

template <class T>
class RowOutput {
  using R = Real<T>;

 public:
  RowOutput(const TensorSpec& spec, const void* data, const Segments& segments)
      : matrix_(spec, data), segments_(segments), columns_(spec.shape[1]) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const bool in_order = spec.is_contiguous() && !segments.permuted();
    large_ = spec.numel() * kSize >= kStreamBytes;
    if (data == nullptr) return;
    streams_ = std::is_same_v<T, R> && StreamsRows(spec, data);
    stages_ = (large_ || columns_ == 1) && !streams_ && in_order && columns_ <= kColumnBlock;
    if (stages_) matrix_.row_stride = columns_;  // also of a single row, which has any
  }

  explicit operator bool() const { return matrix_.data != nullptr; }
  bool streams() const { return streams_; }
  // Whether rows are written to a stage, where there is room for a vector more.
  bool stages() const { return stages_; }
  const Matrix<T>& matrix() const { return matrix_; }

  // One tile's view: where its rows are written. `stage` has room for the tile's rows.
  class Tile {
   public:
    Tile(const RowOutput& output, std::int64_t column, std::int64_t columns, R* row, void* stage)
        : output_(output),
          matrix_(output.matrix_),
          column_(column),
          columns_(columns),
          row_(row),
          stage_(static_cast<T*>(stage)) {}

    // Of the tensor: this tile may have a single one of many, too.
    bool one_column() const { return output_.columns_ == 1; }
    // To be called before the rows of a piece are written, in rising order.
    void Open(const Piece& piece) {
      if (!output_.stages_) return;
      if (end_ != piece.begin) {
        Drain();
        first_ = piece.begin;
        matrix_.data = stage_ - first_ * columns_;
      }
      end_ = piece.end;
    }
    void Flush() {
      Drain();
      if (output_.large_) hwy::FlushStream();
    }
    // The stage's rows go home; Flush() has to follow before others read them.
    void Drain() {
      if (output_.stages_ && end_ > first_) {
        const std::size_t bytes = static_cast<std::size_t>((end_ - first_) * columns_) * sizeof(T);
        void* const to = output_.matrix_.at(first_, 0);
        if (output_.large_) {
          StreamBytes(to, stage_, bytes);
        } else {
          std::memcpy(to, stage_, bytes);
        }
      }
      first_ = end_ = -1;
    }

    // Of the rows of one column only the whole lines go home, so that each is written once.
    void DrainLines() {
      if (!output_.stages_ || end_ <= first_) return;
      if (!output_.large_) return Drain();
      constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
      const auto past = static_cast<std::int64_t>(
          reinterpret_cast<std::uintptr_t>(output_.matrix_.at(end_, 0)) % kLine);
      const std::int64_t whole = (end_ - first_) * kSize - past;
      if (whole <= 0) return;
      StreamBytes(output_.matrix_.at(first_, 0), stage_, static_cast<std::size_t>(whole));
      std::memmove(static_cast<void*>(stage_), stage_ + whole / kSize, kLine);
      first_ += whole / kSize;
      matrix_.data = stage_ - first_;
    }

    // Where row r of the sorted order is computed; Done() brings it home if that was elsewhere.
    HWY_INLINE R* Row(std::int64_t r) const {
      if constexpr (std::is_same_v<T, R>) {
        const std::int64_t n = output_.segments_.row(r);
        if (matrix_.column_stride == 1 && n >= 0) return matrix_.at(n, column_);
      }
      return row_;
    }
    HWY_INLINE void Done(std::int64_t r) const {
      if (std::is_same_v<T, R> && matrix_.column_stride == 1) return;
      const std::int64_t n = output_.segments_.row(r);
      if (n >= 0) WriteRow(matrix_, n, column_, columns_, row_);
    }

    // The same for rows [r, r + rows) of a tensor with one column, in a run of up to a block.
    HWY_INLINE R* Run(std::int64_t r, R* scratch) const {
      if constexpr (std::is_same_v<T, R>) {
        if (matrix_.row_stride == 1) return matrix_.at(r, 0);
      }
      return scratch;
    }
    HWY_INLINE void RunDone(std::int64_t r, std::int64_t rows, const R* from) const {
      if (std::is_same_v<T, R> && matrix_.row_stride == 1) return;
      WriteRow(Transposed(matrix_), 0, r, rows, from);
    }

   private:
    const RowOutput& output_;
    Matrix<T> matrix_;
    std::int64_t column_, columns_;
    R* row_;
    T* stage_;
    std::int64_t first_ = -1, end_ = -1;
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

// output[r] = f(lanes, inputs of row r...) for the rows of a piece. key(r) names a row; in a tensor
// of one column it has to count up by one.
template <bool kStream, int kInputs, class T, class Key, class F>
void MapRows(const Piece& piece, const Segments& segments, std::int64_t column,
             std::int64_t columns, const MapInputs<T>& inputs, typename RowOutput<T>::Tile& output,
             Real<T>* scratch, const Key& key, const F& f) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  const bool one_column = output.one_column() && !segments.permuted();
  const std::int64_t step = kInputs == 0 ? piece.end - piece.begin : block_rows(columns);
  if (one_column) {
    ForRuns(piece, [&](std::int64_t first, std::int64_t rows) {
      output.Open(Piece{piece.segment, first, first + rows, false, false});
      const R* in[2] = {};
      for (int i = 0; i < kInputs; ++i) {
        in[i] = ReadRun(*inputs.matrix[i], segments, first, rows, inputs.scratch[i]);
      }
      R* HWY_RESTRICT to = output.Run(first, scratch);
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
      output.RunDone(first, rows, to);
      output.DrainLines();
    });
    return;
  }
  output.Open(piece);
  ForBlocks(piece, step, [&](std::int64_t first, std::int64_t rows) {
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

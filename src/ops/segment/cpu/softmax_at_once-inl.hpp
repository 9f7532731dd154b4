// Softmax of a segment of many rows and several columns that lies in one tile, with one exponential
// for an x: powers relative to one shift wait for their sum where y is staged, or in its place.

#if defined(PULLBACK_SEGMENT_SOFTMAX_AT_ONCE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SOFTMAX_AT_ONCE_INL_HPP
#undef PULLBACK_SEGMENT_SOFTMAX_AT_ONCE_INL_HPP
#else
#define PULLBACK_SEGMENT_SOFTMAX_AT_ONCE_INL_HPP
#endif

#include "ops/segment/cpu/map-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// output[r] = power_row(r) times the factors, for the rows of a piece.
template <bool kStream, class R, class Output, class PowerRow>
void WriteProductRows(const Piece& piece, const R* HWY_RESTRICT factors, std::int64_t columns,
                      const PowerRow& power_row, Output& output) {
  const hn::ScalableTag<R> d;
  for (std::int64_t r = piece.begin; r < piece.end; ++r) {
    const R* from = power_row(r);
    R* to = output.Row(r);
    ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
      lanes.Write(d, hn::Mul(lanes.Read(d, from + c), lanes.Read(d, factors + c)), to + c);
    });
    output.Done(r);
  }
}

// False, and it is still to be done, where an x is not near the shift or not all rows of the
// output can wait. Not inline: what calls it is for short segments.
template <class T>
HWY_NOINLINE bool SoftmaxAtOnce(const Matrix<const T>& x, const Segments& segments,
                                const Piece& piece, const Task<Real<T>>& task,
                                const RowOutput<T>& rows_out, typename RowOutput<T>::Tile& output) {
  using R = Real<T>;
  if (!rows_out || !rows_out.apart()) return false;
  const hn::ScalableTag<R> d;
  const std::int64_t columns = task.columns;
  const LogSum<R> state = task.state.log_sum();
  output.Open(piece);
  const auto power_row = [&](std::int64_t r) HWY_ATTR {
    return rows_out.stages() ? output.Row(r) : task.stage + (r - piece.begin) * columns;
  };
  ReadRow(x, segments.readable_row(piece.begin), task.column, columns, state.largest);
  ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
    Store(d, NearShift(d, lanes.Read(d, state.largest + c)), state.largest + c);
    Store(d, hn::Zero(d), state.sum + c);
  });
  bool near = true;
  ForBlocks(piece, task.block_rows, [&](std::int64_t first, std::int64_t rows) {
    if (!near) return;
    const Block<R> block = ReadBlock(x, segments, first, rows, task.column, columns, task.block);
    LinesAhead ahead = RowsAhead(block, columns);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      auto sum = hn::LoadU(d, state.sum + c);
      near = near &&
             AddNearPowers<true>(d, lanes, block, c, lanes.Read(d, state.largest + c), sum, ahead,
                                 [&](std::int64_t r) HWY_ATTR { return power_row(first + r) + c; });
      Store(d, sum, state.sum + c);
    });
  });
  if (!near) return false;
  FinishSoftmax(state, columns);
  WithStream<T>(rows_out.streams(), [&]<bool kStream>() {
    WriteProductRows<kStream>(piece, state.sum, columns, power_row, output);
  });
  return true;
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Forward of segment on the CPU.
//   1. each tile folds its pieces: whole segments are finished at once, heads and tails go to slots
//   2. the pieces of longer segments are combined in order, and finished
//   3. what has a row per row of x (softmax, arg_mask) is written for heads and tails; for whole
//      segments that was part of 1, while their rows were in cache
#include "ops/segment/cpu/plan.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/segment/cpu/forward.cpp"
#include <hwy/foreach_target.h>

#include "ops/segment/cpu/arg-inl.hpp"
#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/extreme-inl.hpp"
#include "ops/segment/cpu/map-inl.hpp"
#include "ops/segment/cpu/scan-inl.hpp"
#include "ops/segment/cpu/softmax_at_once-inl.hpp"
#include "ops/segment/cpu/spread-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {
namespace {

template <class T>
class Forward {
  using R = Real<T>;
  using State = segment_cpu::HWY_NAMESPACE::State<R>;
  using Task = segment_cpu::HWY_NAMESPACE::Task<R>;

 public:
  explicit Forward(const Run& run)
      : run_(run),
        problem_(run.problem),
        segments_(run.segments),
        x_(problem_.x, run.tensors.x),
        out_(problem_.out, run.tensors.out),
        lse_(problem_.lse, run.tensors.lse),
        results_(problem_.out, run.tensors.out, in_order_),
        rows_out_(problem_.out, run.tensors.out, run.segments),
        streams_out_(std::is_same_v<T, R> && Streams(problem_.out, run.tensors.out)),
        arg_(problem_, run.tensors, run.segments) {}

  bool combines() const { return true; }
  bool writes_rows() const {
    return problem_.reduce == SegmentReduce::softmax || Mask() != nullptr;
  }

  void Fold(std::int64_t tile, const Task& task) const {
    Outputs outputs = MakeOutputs(task);
    run_.walk(
        tile,
        [&](const Piece& piece) {
          if (piece.whole) {
            Whole(piece, task, outputs);
          } else {
            FoldPiece(piece, Slot(tile, piece.head, task.column), task);
          }
        },
        [&](std::int64_t s) { WriteEmpty(s, task, outputs.results); },
        [&](std::int64_t begin, std::int64_t end) {
          if constexpr (kHasLanes) return FoldInner(begin, end, task, outputs);
          return false;
        });
    outputs.Flush();
    FinishStreams();
  }

  void Combine(std::int64_t tail_tile, const Task& task) const {
    const State& total = task.state;
    std::int64_t segment = -1;
    run_.walk_tail(tail_tile, [&](std::int64_t tile, const Piece& piece) {
      const State state = Slot(tile, piece.head, task.column);
      if (piece.head) {
        Merge(total, state, piece, task);
      } else {
        state.CopyTo(total, task.columns);
        if (Extremal()) Widen(piece, state, task);
      }
      segment = piece.segment;
    });
    if (segment < 0) return;
    Outputs outputs = MakeOutputs(task);
    WriteResults(segment, total, task, outputs.results);
    outputs.Flush();
    FinishStreams();
    if (!writes_rows()) return;
    run_.walk_tail(tail_tile, [&](std::int64_t tile, const Piece& piece) {
      const State state = Slot(tile, piece.head, task.column);
      total.CopyTo(state, task.columns);
      if (Extremal()) task.PlacesIn(piece, state.places());
    });
  }

  void Finish(std::int64_t tile, const Task& task) const {
    Outputs outputs = MakeOutputs(task);
    run_.walk_ends(tile, [&](const Piece& piece) {
      WriteRows(piece, Slot(tile, piece.head, task.column), task, outputs.rows);
    });
    outputs.Flush();
  }

  void Clear() const {
    if (!writes_rows()) return;
    ClearRows(0, segments_.first_row());
    ClearRows(segments_.last_row(), segments_.rows);
  }

 private:
  // State of a piece, by reduction:
  //   sum, mean, prod         a = total
  //   max, min                a = extreme, b = its row, counted from the piece's first
  //   logsumexp, softmax      a = largest, b = sum (LogSum)

  using Output = typename RowOutput<T>::Tile;
  struct Outputs {
    Output results, rows;
    void Flush() {
      results.Flush();
      rows.Flush();
    }
  };
  Outputs MakeOutputs(const Task& task) const {
    return {Output(results_, task.column, task.columns, task.row, task.window2),
            Output(rows_out_, task.column, task.columns, task.row, task.stage)};
  }

  std::uint8_t* Mask() const { return static_cast<std::uint8_t*>(run_.tensors.arg_mask); }
  bool Extremal() const { return is_extreme(problem_.reduce); }

  State Slot(std::int64_t tile, bool head, std::int64_t column) const {
    return SlotOf<R>(run_, tile, head, column);
  }

  // --- Folding ---

  HWY_NOINLINE void Whole(const Piece& piece, const Task& task, Outputs& outputs) const {
    if (problem_.reduce == SegmentReduce::softmax && problem_.x.shape[1] > 1 &&
        SoftmaxAtOnce(x_, segments_, piece, task, rows_out_, outputs.rows)) {
      return;
    }
    FoldPiece(piece, task.state, task);
    if (Extremal()) Widen(piece, task.state, task);
    WriteResults(piece.segment, task.state, task, outputs.results);
    if (writes_rows()) WriteRows(piece, task.state, task, outputs.rows);
  }

  // The rows of the extremes, in the sorted order, to task.wide.
  void Widen(const Piece& piece, const State& state, const Task& task) const {
    const Int<R>* HWY_RESTRICT place = state.places();
    std::int64_t* HWY_RESTRICT wide = task.wide;
    for (std::int64_t c = 0; c < task.columns; ++c) wide[c] = piece.begin + place[c];
  }

  void FoldPiece(const Piece& piece, const State& state, const Task& task) const {
    const std::int64_t columns = task.columns;
    // Not `columns`: the last task of a wide tensor may have a single one, too.
    if (problem_.x.shape[1] == 1) return FoldRun(problem_, x_, segments_, piece, state, task);
    switch (problem_.reduce) {
      case SegmentReduce::prod:
        std::fill_n(state.a, padded(columns), R{1});
        break;
      case SegmentReduce::sum:
      case SegmentReduce::mean:
        std::fill_n(state.a, padded(columns), R{0});
        break;
      default:
        break;
    }
    ForBlocks(piece, task.block_rows, [&](std::int64_t row, std::int64_t rows) {
      const Block<R> block = ReadBlock(x_, segments_, row, rows, task.column, columns, task.block);
      switch (problem_.reduce) {
        case SegmentReduce::sum:
        case SegmentReduce::mean:
          FoldRows(block, 0, columns, state.a, [](auto a, auto b) { return hn::Add(a, b); });
          break;
        case SegmentReduce::prod:
          MultiplyRows(block, columns, state.a);
          break;
        case SegmentReduce::max:
        case SegmentReduce::min:
          AddExtreme(problem_, Extreme<R>{state.a, state.places()}, block, row - piece.begin,
                     columns);
          break;
        case SegmentReduce::logsumexp:
        case SegmentReduce::softmax:
          AddLogSum(state.log_sum(), block, row == piece.begin, columns);
          break;
      }
    });
  }

  // Segments [begin, end), all whole or empty. Short ones leave no time for anything but the
  // reduction. False when others have to do it.
  bool FoldInner(std::int64_t begin, std::int64_t end, const Task& task, Outputs& outputs) const {
    if (!out_.data || Mask()) return false;
    const bool sums =
        problem_.reduce == SegmentReduce::sum || problem_.reduce == SegmentReduce::mean;
    if (problem_.x.shape[1] == 1) {
      if (sums) {
        FoldColumn<SumRule<R>>(begin, end, task, 0);
      } else if (Extremal()) {
        WithExtreme(problem_, [&]<bool kMax, bool kLast>() {
          FoldColumn<ExtremeRule<R, kMax, kLast>>(begin, end, task, -1);
        });
      } else if (problem_.reduce == SegmentReduce::prod) {
        FoldColumn<ProductRule<R>>(begin, end, task, 0);
      } else if (problem_.reduce == SegmentReduce::logsumexp) {
        FoldColumn<LogSumRule<R>>(begin, end, task, std::exp(EmptyValue()));
      } else {
        SoftmaxColumn(begin, end, task, outputs);
      }
      return true;
    }
    if (sums) {
      WithStream<T>(streams_out_,
                    [&]<bool kStream>() { SumsOfRows<kStream>(begin, end, task, outputs); });
    } else if (Extremal()) {
      return ExtremesOfRows(begin, end, task, outputs);
    } else if (problem_.reduce == SegmentReduce::logsumexp) {
      WithStream<T>(streams_out_,
                    [&]<bool kStream>() { LogSumsOfRows<kStream>(begin, end, task, outputs); });
    } else if (problem_.reduce == SegmentReduce::softmax && rows_out_.apart()) {
      WithStream<T>(rows_out_.streams(),
                    [&]<bool kStream>() { SoftmaxOfRows<kStream>(begin, end, task, outputs); });
    } else {
      return false;
    }
    return true;
  }

  void SoftmaxColumn(std::int64_t begin, std::int64_t end, const Task& task,
                     Outputs& outputs) const {
    SoftmaxOfColumn(x_, segments_, begin, end, task, outputs.rows, [&](const Piece& piece) {
      const std::int64_t rows = piece.end - piece.begin;
      if (rows > kBlockElements) return Whole(piece, task, outputs);
      const R* x = ReadRun(x_, segments_, piece.begin, rows, task.run);
      outputs.rows.Open(piece);
      SoftmaxOfRun(x, rows, outputs.rows.Run(piece.begin));
      outputs.rows.DrainLines();
    });
  }

  // False when arg is not of the kind that short segments are quick with.
  bool ExtremesOfRows(std::int64_t begin, std::int64_t end, const Task& task,
                      Outputs& outputs) const {
    const bool arg = static_cast<bool>(arg_);
    const auto fold = [&]<class A>(const Matrix<A>& matrix) {
      if (arg && matrix.column_stride != 1) return false;
      const bool stream = streams_out_ && (!arg || (arg_.streams() && !segments_.permuted()));
      WithExtreme(problem_, [&]<bool kMax, bool kLast>() {
        WithStream<T>(stream, [&]<bool kStream>() {
          ExtremesOfRowsAs<kMax, kLast, kStream>(begin, end, task, outputs, matrix);
        });
      });
      return true;
    };
    if (!arg || problem_.arg.dtype == DType::i64) return fold(arg_.template matrix<std::int64_t>());
    return problem_.arg.dtype == DType::i32 && fold(arg_.template matrix<std::int32_t>());
  }

  // ForSegments, where few are done by few(rows, how many, piece, result). With kGathers the rows
  // that a permutation names are not copied first.
  template <bool kGathers, class Few>
  void FewRows(std::int64_t begin, std::int64_t end, const Task& task, Outputs& outputs,
               const Few& few) const {
    if constexpr (kGathers && std::is_same_v<T, R>) {
      if (segments_.permuted() && x_.column_stride == 1 && task.columns >= kColumnAlign) {
        return FewRowsOf(begin, end, task, outputs, few, [&](const Piece& piece) {
          return GatheredRows<R>(x_, segments_, piece.begin, task.column, task.columns);
        });
      }
    }
    RowWindow<T> window(x_, segments_, segments_.begin(end), task.column, task.columns,
                        task.window);
    FewRowsOf(begin, end, task, outputs, few, [&](const Piece& piece) {
      return AdjacentRows<R>(window.Rows(piece), task.columns);
    });
  }
  template <class Few, class Source>
  void FewRowsOf(std::int64_t begin, std::int64_t end, const Task& task, Outputs& outputs,
                 const Few& few, const Source& source) const {
    const bool of_rows = problem_.reduce == SegmentReduce::softmax;
    Output& results = outputs.results;
    ForSegments(
        segments_, begin, end,
        [&](const Piece& piece) {
          const auto rows = source(piece);
          if (!rows) return false;
          R* to = nullptr;
          if (!of_rows) {
            results.Open(Result(piece.segment));
            to = results.Row(piece.segment);
          }
          // Called once, and so inlined.
          const bool done = few(rows, piece.end - piece.begin, piece, to);
          if (!of_rows) done ? results.Done(piece.segment) : results.Drop();
          return done;
        },
        [&](const Piece& piece) { Whole(piece, task, outputs); },
        [&](std::int64_t s) { WriteEmpty(s, task, results); });
  }
  static Piece Result(std::int64_t s) { return {s, s, s + 1, true, false}; }

  template <bool kMax, bool kLast, bool kStream, class A>
  void ExtremesOfRowsAs(std::int64_t begin, std::int64_t end, const Task& task, Outputs& outputs,
                        const Matrix<A>& arg) const {
    FewRows<true>(begin, end, task, outputs,
                  [&](const auto& rows, std::int64_t count, const Piece& piece, R* to) {
                    A* to_arg = arg.data == nullptr ? nullptr : arg.at(piece.segment, task.column);
                    if (!ExtremeOfFewRows<kMax, kLast, kStream>(rows, count, task.columns,
                                                                piece.begin, to, to_arg)) {
                      return false;
                    }
                    if (to_arg != nullptr && segments_.permuted()) {
                      A rows_of_x[kFewRows];
                      ForRows(segments_, piece.begin, piece.end,
                              [&](std::int64_t r, std::int64_t n) {
                                rows_of_x[r - piece.begin] = static_cast<A>(n);
                              });
                      for (std::int64_t c = 0; c < task.columns; ++c) {
                        to_arg[c] = rows_of_x[to_arg[c] - static_cast<A>(piece.begin)];
                      }
                    }
                    return true;
                  });
  }

  template <bool kStream>
  void LogSumsOfRows(std::int64_t begin, std::int64_t end, const Task& task,
                     Outputs& outputs) const {
    int far = 0;
    FewRows<false>(begin, end, task, outputs,
                   [&](const AdjacentRows<R>& rows, std::int64_t, const Piece& piece, R* to) {
                     if (!LogSumOfFewRows<kStream>(rows.block(), task.columns, far, to)) {
                       return false;
                     }
                     if (lse_.data != nullptr) {
                       WriteRow(lse_, piece.segment, task.column, task.columns, to);
                     }
                     return true;
                   });
  }

  template <bool kStream>
  void SoftmaxOfRows(std::int64_t begin, std::int64_t end, const Task& task,
                     Outputs& outputs) const {
    Output& output = outputs.rows;
    int far = 0;
    FewRows<false>(begin, end, task, outputs,
                   [&](const AdjacentRows<R>& rows, std::int64_t, const Piece& piece, R*) {
                     output.Open(piece);
                     return SoftmaxOfFewRows<kStream>(
                         rows.block(), task.columns, far, task.run,
                         [&](std::int64_t r) HWY_ATTR { return output.Row(piece.begin + r); });
                   });
  }

  template <bool kStream>
  void SumsOfRows(std::int64_t begin, std::int64_t end, const Task& task, Outputs& outputs) const {
    const bool mean = problem_.reduce == SegmentReduce::mean;
    FewRows<true>(
        begin, end, task, outputs, [&](const auto& rows, std::int64_t count, const Piece&, R* to) {
          SumFewRows<kStream>(rows, count, task.columns, mean ? static_cast<R>(count) : R{1}, to);
          return true;
        });
  }

  // `empty_b` belongs to EmptyValue() in the state of segments without rows.
  template <class Rule>
  void FoldColumn(std::int64_t begin, std::int64_t end, const Task& task,
                  typename Rule::B empty_b) const {
    using Scan = ColumnScan<R, Rule>;
    using B = typename Rule::B;
    constexpr std::int64_t kLong = Scan::kRows;  // better folded on its own
    Scan scan({EmptyValue(), empty_b});
    const std::int64_t last_row = segments_.begin(end);
    for (std::int64_t s = begin, row = segments_.begin(begin); s < end;) {
      const std::int64_t first = segments_.begin(s), next = segments_.end(s);
      if (next - row >= kLong) {
        FoldRun(problem_, x_, segments_, Piece{s, row, next, false, false}, task.state, task);
        Folded<R, B> folded{task.state.a[0], reinterpret_cast<const B*>(task.state.b)[0]};
        if (Rule::kPlaces) folded.b += static_cast<B>(row - first);
        scan.Add(folded, row > first);
        row = next;
        ++s;
      } else {
        std::int64_t rows = std::min(Scan::kRows, last_row - row);
        const SegmentEnds ends(segments_, s);
        const R* from = ReadRun(x_, segments_, row, rows, task.block);
        const std::int64_t taken = scan.Take(from, row, rows, ends, end - s, from != task.block);
        row += rows;
        s += taken;
      }
      // Whole lines of the outputs.
      const std::int64_t written = s - scan.waiting;
      const std::int64_t count = (s == end ? s : s / Scan::kGroup * Scan::kGroup) - written;
      if (count <= 0) continue;
      if (problem_.reduce == SegmentReduce::mean) {
        DivideByRows(SegmentEnds(segments_, written), count, scan.a);
      }
      if constexpr (Rule::kTwo && !Rule::kPlaces) Rule::Finish(scan.a, scan.b, count);
      WriteColumn(out_, written, scan.a, count, streams_out_);
      if (lse_.data != nullptr) WriteColumn(lse_, written, scan.a, count, false);
      if constexpr (Rule::kPlaces) {
        if (arg_) arg_.WritePlaces(written, scan.b, count);
      }
      scan.Used(count);
    }
  }

  // --- Combining ---

  void Merge(const State& total, const State& later, const Piece& piece, const Task& task) const {
    switch (problem_.reduce) {
      case SegmentReduce::sum:
      case SegmentReduce::mean:
        for (std::int64_t c = 0; c < task.columns; ++c) total.a[c] += later.a[c];
        break;
      case SegmentReduce::prod:
        for (std::int64_t c = 0; c < task.columns; ++c) total.a[c] *= later.a[c];
        break;
      case SegmentReduce::max:
      case SegmentReduce::min:
        for (std::int64_t c = 0; c < task.columns; ++c) {
          if (!Beats(problem_, later.a[c], total.a[c])) continue;
          total.a[c] = later.a[c];
          task.wide[c] = piece.begin + later.places()[c];
        }
        break;
      case SegmentReduce::logsumexp:
      case SegmentReduce::softmax:
        MergeLogSum(total.log_sum(), later.log_sum(), task.columns);
        break;
    }
  }

  // --- Results ---

  // Writes out and arg of a segment with rows. For max and min, task.wide has the rows.
  void WriteResults(std::int64_t s, const State& state, const Task& task, Output& results) const {
    if (problem_.reduce == SegmentReduce::softmax) return;
    if (problem_.reduce == SegmentReduce::mean) {
      const R count = static_cast<R>(segments_.end(s) - segments_.begin(s));
      for (std::int64_t c = 0; c < task.columns; ++c) state.a[c] /= count;
    }
    if (problem_.reduce == SegmentReduce::logsumexp) FinishLogSum(state.log_sum(), task.columns);
    if (streams_out_) {
      StreamBytes(out_.at(s, task.column), state.a,
                  static_cast<std::size_t>(task.columns) * sizeof(R));
    } else if (out_.data != nullptr) {
      WriteResult(s, state.a, task, results);
    }
    if (lse_.data != nullptr) WriteRow(lse_, s, task.column, task.columns, state.a);
    if (arg_) arg_.Write(s, task.wide, task.columns, task.column, task.run);
  }

  void WriteResult(std::int64_t s, const R* from, const Task& task, Output& results) const {
    results.Open(Result(s));
    std::copy_n(from, task.columns, results.Row(s));
    results.Done(s);
  }

  void FinishStreams() const {
    if (streams_out_ || arg_.streams()) hwy::FlushStream();
  }

  R EmptyValue() const { return static_cast<R>(empty_value(problem_)); }

  void WriteEmpty(std::int64_t s, const Task& task, Output& results) const {
    if (problem_.reduce == SegmentReduce::softmax) return;
    std::fill_n(task.vector, padded(task.columns), EmptyValue());
    if (out_.data != nullptr) WriteResult(s, task.vector, task, results);
    if (lse_.data != nullptr) WriteRow(lse_, s, task.column, task.columns, task.vector);
    if (arg_) arg_.WriteNone(s, task.columns, task.column, task.run);
  }

  // --- Rows ---

  void WriteRows(const Piece& piece, const State& state, const Task& task, Output& output) const {
    if (problem_.reduce != SegmentReduce::softmax) {
      WriteMask(piece, state, task);
    } else if (rows_out_) {
      WithStream<T>(rows_out_.streams(),
                    [&]<bool kStream>() { WriteSoftmax<kStream>(piece, state, task, output); });
    }
  }

  template <bool kStream>
  void WriteSoftmax(const Piece& piece, const State& state, const Task& task,
                    Output& output) const {
    const hn::ScalableTag<R> d;
    FinishSoftmax(state.log_sum(), task.columns);  // nobody reads the state again
    MapRows<kStream, 1>(
        piece, segments_, task.column, task.columns,
        MapInputs<T>{{&x_, nullptr}, {task.block, nullptr}}, output,
        [](std::int64_t) { return Int<R>{0}; }, true,
        [&](auto at, auto x) {
          // Where x is above the shift, or NaN, the other factor is NaN.
          return hn::Mul(ExpOfNonPositive(d, hn::Sub(x, at.At(state.a))), at.At(state.b));
        });
  }

  void WriteMask(const Piece& piece, const State& state, const Task& task) const {
    const Matrix<std::uint8_t> mask(problem_.arg_mask, Mask());
    const bool even = problem_.ties == Ties::even;
    ForBlocks(piece, task.block_rows, [&](std::int64_t first, std::int64_t rows) {
      Block<R> block{};
      if (even)
        block = ReadBlock(x_, segments_, first, rows, task.column, task.columns, task.block);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t n = segments_.row(first + r);
        if (n < 0) continue;
        std::uint8_t* to = mask.at(n, task.column / 8);
        if (even) {
          MaskOfEqual(block.row(r), state.a, task.columns, to, mask.column_stride);
        } else {
          MaskOfPlace(static_cast<Int<R>>(first + r - piece.begin), state.places(), task.columns,
                      to, mask.column_stride);
        }
      }
    });
  }

  // Rows of the sorted order that are in no segment.
  void ClearRows(std::int64_t begin, std::int64_t end) const {
    if (problem_.x.shape[1] == 0) return;  // however many rows there are
    run_.threads.parallel_for(
        end - begin,
        [&](std::int64_t i, int) {
          if (Mask() != nullptr) {
            ClearMask(begin + i);
          } else if (rows_out_) {
            rows_out_.Clear(begin + i);
          }
        },
        1024);
  }

  void ClearMask(std::int64_t r) const {
    const Matrix<std::uint8_t> mask(problem_.arg_mask, Mask());
    const std::int64_t n = segments_.row(r);
    if (n < 0) return;
    for (std::int64_t k = 0; k < problem_.arg_mask.shape[1]; ++k) *mask.at(n, k) = 0;
  }

  const Run& run_;
  const SegmentProblem& problem_;
  const Segments& segments_;
  Matrix<const T> x_;
  Matrix<T> out_;
  Matrix<R> lse_;
  Segments in_order_;
  RowOutput<T> results_, rows_out_;  // out of softmax has a row for each of x
  bool streams_out_;
  ArgOutput<R> arg_;
};

}  // namespace

void ForwardOf(const Run& run) {
  dispatch_floating(run.problem.x.dtype, [&]<class T>() { RunPass<Forward<T>, Real<T>>(run); });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::segment_cpu {
HWY_EXPORT(ForwardOf);
void run_forward(const Run& run) { HWY_DYNAMIC_DISPATCH(ForwardOf)(run); }
}  // namespace pullback::segment_cpu
#endif

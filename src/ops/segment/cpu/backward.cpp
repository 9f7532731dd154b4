// Backward of segment on the CPU: every row of d_x is written once, from vectors with one element
// per column of its segment:
//   sum, mean           g                        g = d_out, for mean divided by the count
//   max, min            g where the row is chosen: its place is the saved or recomputed one, or its
//                       bit is set, or (even, nothing saved) x == out; even divides g by the count
//   logsumexp           g exp(x - lse)
//   prod                g (product of earlier rows) (product of later rows)
//   softmax             out (d_out - sum out d_out)
// Where such a vector is a reduction itself (place, count, product, lse of 16-bit types, sum), the
// three steps are those of forward.cpp: fold, combine, write. Else the first step writes.
#include "ops/segment/cpu/plan.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/segment/cpu/backward.cpp"
#include <hwy/foreach_target.h>

#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/map-inl.hpp"
#include "ops/segment/cpu/product-inl.hpp"
#include "ops/segment/cpu/saved-inl.hpp"
#include "ops/segment/cpu/spread-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {
namespace {

template <class T>
class Backward {
  using R = Real<T>;
  using I = Int<R>;
  using State = segment_cpu::HWY_NAMESPACE::State<R>;
  using Task = segment_cpu::HWY_NAMESPACE::Task<R>;

 public:
  explicit Backward(const Run& run)
      : run_(run),
        problem_(run.problem),
        segments_(run.segments),
        x_(problem_.x, run.tensors.x),
        out_(problem_.out, run.tensors.out),
        lse_(out_is_lse(problem_) ? Matrix<const R>(problem_.out, run.tensors.out)
                                  : Matrix<const R>(problem_.lse, run.tensors.lse)),
        d_out_(problem_.d_out, run.tensors.d_out),
        d_x_(problem_.d_x, run.tensors.d_x, run.segments),
        saved_(problem_, run.tensors, run.segments),
        rule_(RuleOf(problem_, saved_.kind)),
        folds_(Folds(problem_, run.tensors)) {}

  bool combines() const { return folds_; }
  bool writes_rows() const { return folds_; }

  void Fold(std::int64_t tile, const Task& task) const {
    Output output = MakeOutput(task);
    if (WritesRuns()) return WriteRuns(tile, task, output);
    run_.walk(
        tile,
        [&](const Piece& piece) {
          if (!folds_) {
            WriteRows(piece, task.state, task, output);
          } else if (piece.whole) {
            Single(piece, task, output);
          } else {
            FoldPiece(piece, Slot(tile, piece.head, task.column), task);
          }
        },
        [](std::int64_t) {},
        [&](std::int64_t begin, std::int64_t end) {
          if constexpr (kHasLanes) return FoldInner(begin, end, task, output);
          return false;
        });
    output.Flush();
  }

  void Combine(std::int64_t tail_tile, const Task& task) const {
    const State& total = task.state;
    bool any = false;
    run_.walk_tail(tail_tile, [&](std::int64_t tile, const Piece& piece) {
      const State state = Slot(tile, piece.head, task.column);
      Merge(total, state, piece, task, !any);
      any = true;
    });
    if (!any) return;
    if (rule_ == Rule::product) return CombineProducts(tail_tile, task);
    Resolve(total, task);
    run_.walk_tail(tail_tile, [&](std::int64_t tile, const Piece& piece) {
      const State state = Slot(tile, piece.head, task.column);
      if (rule_ == Rule::place) {
        task.PlacesIn(piece, state.places());
      } else {
        total.CopyTo(state, task.columns);
      }
    });
  }

  void Finish(std::int64_t tile, const Task& task) const {
    Output output = MakeOutput(task);
    run_.walk_ends(tile, [&](const Piece& piece) {
      WriteRows(piece, Slot(tile, piece.head, task.column), task, output);
    });
    output.Flush();
  }

  void Clear() const {
    ClearRows(0, segments_.first_row());
    ClearRows(segments_.last_row(), segments_.rows);
  }

 private:
  using Output = typename RowOutput<T>::Tile;

  // State of a piece: what a fold makes of it, and what its rows are written from.
  //   place      b = place of the chosen row from the piece's first, or -1
  //   mask, equal   b = how many rows of the segment are chosen
  //   power      (a, b) = LogSum, then a = lse
  //   product    a = product, then a = that of the earlier pieces and b = that of the later ones
  //   softmax    a = sum of out * d_out

  Output MakeOutput(const Task& task) const {
    return Output(d_x_, task.column, task.columns, task.row, task.stage);
  }

  State Slot(std::int64_t tile, bool head, std::int64_t column) const {
    return SlotOf<R>(run_, tile, head, column);
  }

  Block<R> XBlock(std::int64_t row, std::int64_t rows, const Task& task) const {
    return ReadBlock(x_, segments_, row, rows, task.column, task.columns, task.block);
  }

  // --- 1: fold ---

  // Segments [begin, end), all whole or empty. False when others have to do it.
  bool FoldInner(std::int64_t begin, std::int64_t end, const Task& task, Output& output) const {
    if (!folds_) return false;
    if (problem_.x.shape[1] > 1) {
      const auto few = [&]<Rule kRule>() {
        WithStream<T>(d_x_.streams(),
                      [&]<bool kStream>() { FewRows<kRule, kStream>(begin, end, task, output); });
        return true;
      };
      if (!d_x_.apart()) return false;
      if (rule_ == Rule::softmax) return few.template operator()<Rule::softmax>();
      if (rule_ == Rule::product) return few.template operator()<Rule::product>();
      return rule_ == Rule::equal && few.template operator()<Rule::equal>();
    }
    const auto single = [&](const Piece& piece) { Single(piece, task, output); };
    if (rule_ == Rule::softmax) {
      SoftmaxGradientOfColumn(out_, d_out_, segments_, begin, end, task, output, single);
    } else if (rule_ == Rule::place) {
      WithExtreme(problem_, [&]<bool kMax, bool kLast>() {
        ExtremeGradientOfColumn<ExtremeRule<R, kMax, kLast>>(x_, out_, d_out_, segments_, begin,
                                                             end, task, output, single);
      });
    } else if (rule_ == Rule::equal) {
      const auto ties = [&]<bool kMax>() {
        ExtremeGradientOfColumn<TiesRule<R, kMax>>(x_, out_, d_out_, segments_, begin, end, task,
                                                   output, single);
      };
      problem_.reduce == SegmentReduce::max ? ties.template operator()<true>()
                                            : ties.template operator()<false>();
    } else if (rule_ == Rule::power) {
      PowerGradientOfColumn(x_, d_out_, segments_, begin, end, task, output, single);
    } else if (rule_ == Rule::product) {
      ProductGradientOfColumn(x_, d_out_, segments_, begin, end, task, output, single);
    } else {
      return false;
    }
    return true;
  }

  template <Rule kRule, bool kStream>
  void FewRows(std::int64_t begin, std::int64_t end, const Task& task, Output& output) const {
    constexpr bool kSoftmax = kRule == Rule::softmax;
    const std::int64_t last_row = segments_.begin(end), columns = task.columns;
    RowWindow<T> x_rows(kSoftmax ? out_ : x_, segments_, last_row, task.column, columns,
                        task.window);
    RowWindow<T> g_rows(d_out_, segments_, last_row, task.column, columns, task.window2);
    ForSegments(
        segments_, begin, end,
        [&](const Piece& piece) {
          const Block<R> x = x_rows.Rows(piece);
          const Block<R> g = kSoftmax ? g_rows.Rows(piece) : x;
          if (x.data == nullptr || g.data == nullptr) return false;
          const auto to = [&](std::int64_t r) HWY_ATTR { return output.Row(piece.begin + r); };
          output.Open(piece);
          if constexpr (kSoftmax) {
            SoftmaxGradientOfFewRows<kStream>(x, g, columns, to);
          } else {
            ReadRow(d_out_, piece.segment, task.column, columns, task.gradient);
          }
          if constexpr (kRule == Rule::product) {
            ProductGradientOfFewRows<kStream>(x, columns, task.gradient, task.run, to);
          } else if constexpr (kRule == Rule::equal) {
            ReadRow(out_, piece.segment, task.column, columns, task.value);
            TiesGradientOfFewRows<kStream>(x, columns, task.value, task.gradient, to);
          }
          return true;
        },
        [&](const Piece& piece) { Single(piece, task, output); }, [](std::int64_t) {});
  }

  HWY_NOINLINE void Single(const Piece& piece, const Task& task, Output& output) const {
    // A product of all rows is no help within a segment.
    if (rule_ != Rule::product) FoldPiece(piece, task.state, task);
    Resolve(task.state, task);
    WriteRows(piece, task.state, task, output);
  }

  void FoldPiece(const Piece& piece, const State& state, const Task& task) const {
    const bool one_column = problem_.x.shape[1] == 1;
    switch (rule_) {
      case Rule::place:
        FoldPlaces(piece, state, task);
        break;
      case Rule::mask:
      case Rule::equal:
        FoldCounts(piece, state, task);
        break;
      case Rule::product:
        if (one_column) return FoldRun(problem_, x_, segments_, piece, state, task);
        std::fill_n(state.a, padded(task.columns), R{1});
        ForBlocks(piece, task.block_rows, [&](std::int64_t row, std::int64_t rows) {
          MultiplyRows(XBlock(row, rows, task), task.columns, state.a);
        });
        break;
      case Rule::power:
        if (one_column) return FoldRun(problem_, x_, segments_, piece, state, task);
        ForBlocks(piece, task.block_rows, [&](std::int64_t row, std::int64_t rows) {
          AddLogSum(state.log_sum(), XBlock(row, rows, task), row == piece.begin, task.columns);
        });
        break;
      case Rule::softmax:
        FoldDot(piece, state, task);
        break;
      case Rule::spread:
        break;
    }
  }

  // First or last row whose x equals out; of NaN the first.
  void FoldPlaces(const Piece& piece, const State& state, const Task& task) const {
    const bool last = problem_.ties == Ties::last;
    ReadRow(out_, piece.segment, task.column, task.columns, task.value);
    I* HWY_RESTRICT places = state.places();
    std::fill_n(places, padded(task.columns), I{-1});
    if (problem_.x.shape[1] == 1) {
      ForRuns(piece, [&](std::int64_t row, std::int64_t rows) {
        if (places[0] >= 0 && (!last || std::isnan(task.value[0]))) return;
        const R* run = ReadRun(x_, segments_, row, rows, task.block);
        const std::int64_t place = PlaceOfValue(run, rows, task.value[0], last);
        if (place >= 0) places[0] = static_cast<I>(row - piece.begin + place);
      });
      return;
    }
    ForBlocks(piece, task.block_rows, [&](std::int64_t row, std::int64_t rows) {
      FindPlaces(XBlock(row, rows, task), static_cast<I>(row - piece.begin), task.columns,
                 task.value, last, places);
    });
  }

  void FoldCounts(const Piece& piece, const State& state, const Task& task) const {
    I* HWY_RESTRICT counts = state.places();
    std::fill_n(counts, padded(task.columns), I{0});
    if (rule_ == Rule::mask) {
      for (std::int64_t r = piece.begin; r < piece.end; ++r) {
        saved_.ReadBits(r, task.column, task.columns, task.bits);
        for (std::int64_t c = 0; c < task.columns; ++c) counts[c] += task.bits[c];
      }
      return;
    }
    ReadRow(out_, piece.segment, task.column, task.columns, task.value);
    if (problem_.x.shape[1] == 1) {
      ForRuns(piece, [&](std::int64_t row, std::int64_t rows) {
        const R* run = ReadRun(x_, segments_, row, rows, task.block);
        counts[0] += static_cast<I>(CountOfValue(run, rows, task.value[0]));
      });
      return;
    }
    ForBlocks(piece, task.block_rows, [&](std::int64_t first, std::int64_t rows) {
      CountTies(XBlock(first, rows, task), task.columns, task.value, counts);
    });
  }

  void FoldDot(const Piece& piece, const State& state, const Task& task) const {
    std::fill_n(state.a, padded(task.columns), R{0});
    if (problem_.x.shape[1] == 1) {
      ForRuns(piece, [&](std::int64_t row, std::int64_t rows) {
        const R* y = ReadRun(out_, segments_, row, rows, task.block);
        const R* g = ReadRun(d_out_, segments_, row, rows, task.block2);
        state.a[0] += DotOfRuns(y, g, rows);
      });
      return;
    }
    ForBlocks(piece, task.block_rows, [&](std::int64_t first, std::int64_t rows) {
      const auto [y, g] = SoftmaxBlocks(first, rows, task);
      AddDots(y, g, task.columns, state.a);
    });
  }

  std::pair<Block<R>, Block<R>> SoftmaxBlocks(std::int64_t row, std::int64_t rows,
                                              const Task& task) const {
    return {ReadBlock(out_, segments_, row, rows, task.column, task.columns, task.block),
            ReadBlock(d_out_, segments_, row, rows, task.column, task.columns, task.block2)};
  }

  // From the fold over all rows of a segment to what its only piece needs.
  void Resolve(const State& state, const Task& task) const {
    if (rule_ == Rule::power) FinishLogSum(state.log_sum(), task.columns);
    if (rule_ != Rule::product) return;
    std::fill_n(state.a, task.columns, R{1});
    std::fill_n(state.b, task.columns, R{1});
  }

  // --- 2: combine, and leave in each slot what its piece needs ---

  void Merge(const State& total, const State& later, const Piece& piece, const Task& task,
             bool first) const {
    const bool last = problem_.ties == Ties::last;
    switch (rule_) {
      case Rule::place:
        for (std::int64_t c = 0; c < task.columns; ++c) {
          if (first) task.wide[c] = -1;
          const I place = later.places()[c];
          if (place < 0) continue;
          // A later NaN never takes over; NaN found at all means that out is NaN.
          const bool nan = std::isnan(ToReal(*out_.at(piece.segment, task.column + c)));
          if (task.wide[c] < 0 || (last && !nan)) task.wide[c] = piece.begin + place;
        }
        break;
      case Rule::mask:
      case Rule::equal:
        for (std::int64_t c = 0; c < task.columns; ++c) {
          total.places()[c] = (first ? I{0} : total.places()[c]) + later.places()[c];
        }
        break;
      case Rule::power:
        if (first) {
          later.CopyTo(total, task.columns);
        } else {
          MergeLogSum(total.log_sum(), later.log_sum(), task.columns);
        }
        break;
      case Rule::softmax:
        for (std::int64_t c = 0; c < task.columns; ++c) {
          total.a[c] = (first ? R{0} : total.a[c]) + later.a[c];
        }
        break;
      case Rule::product:  // by CombineProducts
      case Rule::spread:
        break;
    }
  }

  // a: from the product of a piece to that of all earlier pieces; b: to that of all later ones.
  void CombineProducts(std::int64_t tail_tile, const Task& task) const {
    std::int64_t last_tile = tail_tile;
    R* HWY_RESTRICT running = task.vector;
    std::fill_n(running, task.columns, R{1});
    run_.walk_tail(tail_tile, [&](std::int64_t tile, const Piece& piece) {
      const State state = Slot(tile, piece.head, task.column);
      for (std::int64_t c = 0; c < task.columns; ++c) {
        state.b[c] = state.a[c];
        state.a[c] = running[c];
        running[c] *= state.b[c];
      }
      last_tile = tile;
    });
    std::fill_n(running, task.columns, R{1});
    for (std::int64_t tile = last_tile; tile >= tail_tile; --tile) {
      const State state = Slot(tile, tile != tail_tile, task.column);
      for (std::int64_t c = 0; c < task.columns; ++c) {
        const R product = state.b[c];
        state.b[c] = running[c];
        running[c] *= product;
      }
    }
  }

  // --- 3: write ---

  // Sum, mean, and max and min from arg, of one column: short segments leave no time for more than
  // a vector or four of the gradient, or for one row among zeros. Past the end of a segment that
  // writes where the next one is still to come, or where the stage has room to spare.
  bool WritesRuns() const { return problem_.x.shape[1] == 1 && !folds_ && rule_ != Rule::mask; }

  // So few at a time that memory takes their lines while the next ones are made.
  static constexpr std::int64_t kSegments = 64;

  void WriteRuns(std::int64_t tile, const Task& task, Output& output) const {
    constexpr std::int64_t kMostPowers = kBlockElements - kStagePad;
    const auto write = [&](std::int64_t begin, std::int64_t end, std::int64_t row,
                           const auto& end_of) {
      for (std::int64_t s = begin; s < end;) {
        std::int64_t stop = std::min(end, s + kSegments);
        if (rule_ == Rule::power) {  // has room for the rows of a block
          while (stop > s + 1 && end_of(stop - 1) - row > kMostPowers) stop = s + (stop - s) / 2;
        }
        const std::int64_t next = end_of(stop - 1);
        if (rule_ == Rule::power && next - row > kMostPowers) {
          WriteRows(Piece{s, row, next, true, false}, task.state, task, output);
          row = next;
          s = stop;
          continue;
        }
        output.Open(Piece{s, row, next, true, false});
        R* to = output.Run(row);
        LinesAhead ahead(d_out_.at(s, 0));
        if (d_out_.row_stride == 1) ahead.StepTo(d_out_.at(stop, 0));
        const R* gradients = ReadOfSegments(d_out_, s, stop - s, task.window2);
        const auto gradient_of = [=](std::int64_t k) { return gradients[k - s]; };
        if (rule_ == Rule::power) {
          LinesAhead lse_ahead(lse_.at(s, 0));
          if (lse_.row_stride == 1) lse_ahead.StepTo(lse_.at(stop, 0));
          const auto lse_of = [&](std::int64_t k) { return *lse_.at(k, 0); };
          SpreadPowers(s, stop, row, end_of, lse_of, gradient_of,
                       ReadRun(x_, segments_, row, next - row, task.window), task, to);
        } else if (rule_ == Rule::spread) {
          const bool mean = problem_.reduce == SegmentReduce::mean;
          SpreadGradients(segments_, mean, s, stop, row, end_of, gradients, to, task);
        } else if (saved_.by_row()) {
          PlaceInRows<R>(
              s, stop, row, end_of, to,
              [&](std::int64_t k, std::int64_t begin_of, std::int64_t stop_of) {
                return saved_.PlaceOfRow(k, begin_of, stop_of);
              },
              gradient_of);
        } else if (problem_.arg.dtype == DType::i64) {
          const auto arg = saved_.template Arg<std::int64_t>();
          LinesAhead args_ahead(arg.at(s, 0));
          if (arg.row_stride == 1) args_ahead.StepTo(arg.at(stop, 0));
          PlaceInRows<R>(
              s, stop, row, end_of, to,
              [&](std::int64_t k, std::int64_t, std::int64_t) { return *arg.at(k, 0); },
              gradient_of);
        } else {
          PlaceInRows<R>(
              s, stop, row, end_of, to,
              [&](std::int64_t k, std::int64_t, std::int64_t) { return saved_.Row(k); },
              gradient_of);
        }
        output.DrainLines();
        row = next;
        s = stop;
      }
    };
    run_.walk(
        tile,
        [&](const Piece& piece) {
          write(piece.segment, piece.segment + 1, piece.begin,
                [&](std::int64_t) { return piece.end; });
        },
        [](std::int64_t) {},
        [&](std::int64_t begin, std::int64_t end) {
          const IndexView& offsets = segments_.offsets;
          if (offsets.wide && offsets.stride == 1) {
            const auto* ends = static_cast<const std::int64_t*>(offsets.data) + 1;
            LinesAhead(ends + begin).StepTo(ends + end);
            write(begin, end, segments_.begin(begin), [=](std::int64_t s) { return ends[s]; });
          } else {
            write(begin, end, segments_.begin(begin),
                  [&](std::int64_t s) { return segments_.end(s); });
          }
          return true;
        });
    output.Flush();
  }

  void WriteRows(const Piece& piece, const State& state, const Task& task, Output& output) const {
    WithStream<T>(d_x_.streams(),
                  [&]<bool kStream>() { WriteRowsAs<kStream>(piece, state, task, output); });
  }

  template <bool kStream>
  void WriteRowsAs(const Piece& piece, const State& state, const Task& task, Output& output) const {
    if (rule_ != Rule::softmax) LoadGradient(piece, state, task);
    const hn::ScalableTag<R> d;
    const auto key = [&](std::int64_t r) { return saved_.Key(piece, r); };
    const auto map = [&]<int kInputs>(const MapInputs<T>& inputs, const auto& f) {
      MapRows<kStream, kInputs>(piece, segments_, task.column, task.columns, inputs, output, key,
                                !saved_.by_row(), f);
    };
    const MapInputs<T> x{{&x_, nullptr}, {task.block, nullptr}};
    switch (rule_) {
      case Rule::spread:
        map.template operator()<0>({}, [&](auto at) { return at.At(task.gradient); });
        break;
      case Rule::place:
        if (saved_.kind == SegmentSaved::arg)
          saved_.LoadPlaces(piece, task.column, task.columns, state.places());
        map.template operator()<0>({}, [&](auto at) {
          const auto chosen = hn::RebindMask(d, hn::Eq(at.At(state.places()), at.Key()));
          return hn::IfThenElseZero(chosen, at.At(task.gradient));
        });
        break;
      case Rule::mask:
        WriteBits(piece, task, output);
        break;
      case Rule::equal:
        ReadRow(out_, piece.segment, task.column, task.columns, task.value);
        map.template operator()<1>(x, [&](auto at, auto value) {
          return hn::IfThenElseZero(Tied(value, at.At(task.value)), at.At(task.gradient));
        });
        break;
      case Rule::power:
        LoadLse(piece, state, task);
        map.template operator()<1>(x, [&](auto at, auto value) {
          return hn::Mul(ExpOf(d, hn::Sub(value, at.At(task.value))), at.At(task.gradient));
        });
        break;
      case Rule::product:
        WriteProducts(x_, segments_, piece, state, task, output);
        break;
      case Rule::softmax:
        map.template operator()<2>(
            {{&out_, &d_out_}, {task.block, task.block2}},
            [&](auto at, auto y, auto g) { return hn::Mul(y, hn::Sub(g, at.At(state.a))); });
        break;
    }
  }

  void LoadGradient(const Piece& piece, const State& state, const Task& task) const {
    ReadRow(d_out_, piece.segment, task.column, task.columns, task.gradient);
    if (problem_.reduce == SegmentReduce::mean) {
      const R count = static_cast<R>(segments_.end(piece.segment) - segments_.begin(piece.segment));
      for (std::int64_t c = 0; c < task.columns; ++c) task.gradient[c] /= count;
    }
    if (is_extreme(problem_.reduce) && problem_.ties == Ties::even) {
      for (std::int64_t c = 0; c < task.columns; ++c) {
        task.gradient[c] /= static_cast<R>(state.places()[c]);
      }
    }
  }

  void WriteBits(const Piece& piece, const Task& task, Output& output) const {
    output.Open(piece);
    for (std::int64_t r = piece.begin; r < piece.end; ++r) {
      saved_.ReadBits(r, task.column, task.columns, task.bits);
      R* to = output.Row(r);
      for (std::int64_t c = 0; c < task.columns; ++c) {
        to[c] = task.bits[c] ? task.gradient[c] : R{0};
      }
      output.Done(r);
    }
  }

  // The logsumexp of the columns to task.value.
  void LoadLse(const Piece& piece, const State& state, const Task& task) const {
    if (folds_) {
      std::copy_n(state.a, task.columns, task.value);
    } else {
      ReadRow(lse_, piece.segment, task.column, task.columns, task.value);
    }
    // All x are -inf then: exp(-inf - 0) is the gradient 0 that they should get.
    for (std::int64_t c = 0; c < task.columns; ++c) {
      if (task.value[c] == -kInf<R>) task.value[c] = 0;
    }
  }

  // Rows of the sorted order that are in no segment.
  void ClearRows(std::int64_t begin, std::int64_t end) const {
    if (problem_.x.shape[1] == 0) return;  // however many rows there are
    run_.threads.parallel_for(
        end - begin, [&](std::int64_t i, int) { d_x_.Clear(begin + i); }, 1024);
  }

  const Run& run_;
  const SegmentProblem& problem_;
  const Segments& segments_;
  Matrix<const T> x_;
  Matrix<const T> out_;
  Matrix<const R> lse_;  // of logsumexp, unless it folds
  Matrix<const T> d_out_;
  RowOutput<T> d_x_;
  Saved<R> saved_;
  Rule rule_;
  bool folds_;
};

}  // namespace

void BackwardOf(const Run& run) {
  dispatch_floating(run.problem.x.dtype, [&]<class T>() { RunPass<Backward<T>, Real<T>>(run); });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::segment_cpu {
HWY_EXPORT(BackwardOf);
void run_backward(const Run& run) { HWY_DYNAMIC_DISPATCH(BackwardOf)(run); }
}  // namespace pullback::segment_cpu
#endif

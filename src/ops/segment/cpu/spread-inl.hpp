// Tensors of one column whose segments are short: what a segment has one of goes to each of its
// rows first, so that the rows can be computed without a look at the segments.

#if defined(PULLBACK_SEGMENT_SPREAD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SPREAD_INL_HPP
#undef PULLBACK_SEGMENT_SPREAD_INL_HPP
#else
#define PULLBACK_SEGMENT_SPREAD_INL_HPP
#endif

#include "ops/segment/cpu/product-inl.hpp"
#include "ops/segment/cpu/saved-inl.hpp"
#include "ops/segment/cpu/scan-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// to[i][r] = value_of(s, i) for the rows r of the segments [begin, end), the first of which begins
// at to[i][0] and at `row`. Past the last row four vectors may be written: the end of a short
// segment is not worth a guess.
template <int kValues, class R, class End, class ValueOf>
HWY_INLINE void SpreadToRows(std::int64_t begin, std::int64_t end, std::int64_t row,
                             const End& end_of, const ValueOf& value_of, R* const (&to)[kValues]) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t at = 0;
  for (std::int64_t s = begin; s < end; ++s) {
    const std::int64_t next = end_of(s) - row;
    const bool more = next - at > step;
    for (int i = 0; i < kValues; ++i) {
      const auto value = hn::Set(d, value_of(s, i));
      Store(d, value, to[i] + at);
      if (HWY_LIKELY(!more)) continue;
      for (std::int64_t k = 1; k < kFewVectors; ++k) Store(d, value, to[i] + at + k * step);
      for (std::int64_t r = at + kFewVectors * step; r < next; r += step) {
        Store(d, value, to[i] + r);
      }
    }
    at = next;
  }
}

// Divides a number of each of `count` segments by the rows of that.
template <class R>
void DivideByRows(const SegmentEnds& ends, std::int64_t count, R* HWY_RESTRICT numbers) {
  std::int64_t k = 0;
  if (ends.in_place != nullptr) {
    // By way of double, which is exact: compilers make no vectors of conversions to float.
    const hn::ScalableTag<std::int64_t> wide;
    const hn::ScalableTag<double> d64;
    const hn::Rebind<R, decltype(d64)> d;
    const auto step = static_cast<std::int64_t>(hn::Lanes(wide));
    for (; k + step <= count; k += step) {
      const auto end = hn::LoadU(wide, ends.in_place + k);
      const auto rows = hn::ConvertTo(d64, hn::Sub(end, hn::LoadU(wide, ends.in_place + k - 1)));
      const auto parts = hn::Max(rows, hn::Set(d64, 1.0));
      const auto number = hn::LoadU(d, numbers + k);
      if constexpr (sizeof(R) == 8) {
        hn::StoreU(hn::Div(number, parts), d, numbers + k);
      } else {
        hn::StoreU(hn::Div(number, hn::DemoteTo(d, parts)), d, numbers + k);
      }
    }
  }
  for (; k < count; ++k) {
    const std::int64_t rows = ends[k] - ends[k - 1];
    numbers[k] /= static_cast<R>(rows == 0 ? 1 : rows);
  }
}

// The gradients of the segments [begin, end), for the mean divided by their rows, to their rows.
template <class R, class End>
void SpreadGradients(const Segments& segments, bool mean, std::int64_t begin, std::int64_t end,
                     std::int64_t row, const End& end_of, const R* gradients, R* to,
                     const Task<R>& task) {
  if (mean) {
    std::copy_n(gradients, end - begin, task.block);
    DivideByRows(SegmentEnds(segments, begin), end - begin, task.block);
    gradients = task.block;
  }
  SpreadToRows<1, R>(begin, end, row, end_of,
                     [=](std::int64_t s, int) { return gradients[s - begin]; }, {to});
}

// Takes the segments [begin, end), all of them whole, in blocks of rows that a ColumnScan can fold:
//   fold(row, rows, ends, most)         folds those of the next `most` segments that end within
//                                       `rows` rows from `row` on, and returns how many those are
//   write(segment, count, row, stop, ends)   the segments that it folded have the rows up to `stop`
//   single(piece)                       a segment that would leave too much of a block unused
template <std::int64_t kRows, class Fold, class Write, class Single>
HWY_INLINE void ForBlocksOfSegments(const Segments& segments, std::int64_t begin, std::int64_t end,
                                    const Fold& fold, const Write& write, const Single& single) {
  const std::int64_t last_row = segments.begin(end);
  for (std::int64_t s = begin, row = segments.begin(begin); s < end;) {
    const std::int64_t next = segments.end(s);
    if (next - row > kRows / 4) {
      single(Piece{s, row, next, true, false});
      row = next;
      ++s;
      continue;
    }
    const SegmentEnds ends(segments, s);
    const std::int64_t count = fold(row, std::min(kRows, last_row - row), ends, end - s);
    const std::int64_t stop = ends[count - 1];
    write(s, count, row, stop, ends);
    row = stop;
    s += count;
  }
}

// The rows from `row` on, in the segments [begin, end), to `to`: 0, but for the row
// chosen(s, first row, its end) of x if that is in segment s.
template <class R, class End, class Chosen, class Gradient>
HWY_INLINE void PlaceInRows(std::int64_t begin, std::int64_t end, std::int64_t row,
                            const End& end_of, R* HWY_RESTRICT to, const Chosen& chosen,
                            const Gradient& gradient_of) {
  const hn::ScalableTag<R> d;
  const std::int64_t rows = end_of(end - 1) - row;
  for (std::int64_t i = 0; i < rows; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    Store(d, hn::Zero(d), to + i);
  }
  R nowhere;
  for (std::int64_t s = begin, first = row; s < end; ++s) {
    const std::int64_t next = end_of(s), place = chosen(s, first, next);
    // Without a branch, as it is a guess whether a segment has rows.
    R* at = place >= first && place < next ? to + (place - row) : &nowhere;
    *at = gradient_of(s);
    first = next;
  }
}

// The same rows, at x: gradient exp(x - lse).
template <class R, class End, class Lse, class Gradient>
HWY_INLINE void SpreadPowers(std::int64_t begin, std::int64_t end, std::int64_t row,
                             const End& end_of, const Lse& lse_of, const Gradient& gradient_of,
                             const R* HWY_RESTRICT x, const Task<R>& task, R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  const auto value_of = [&](std::int64_t s, int i) {
    if (i == 1) return gradient_of(s);
    const R lse = lse_of(s);
    return lse == -kInf<R> ? R{0} : lse;  // then all x are -inf too, and have no gradient
  };
  SpreadToRows<2, R>(begin, end, row, end_of, value_of, {task.block, task.block2});
  const std::int64_t rows = end_of(end - 1) - row;
  LinesAhead ahead = RowsAhead(Block<R>{x, 1, rows, x == task.window}, 1);
  ForColumns<R>(rows, [&](auto lanes, std::int64_t r) {
    ahead.Step();
    const auto power = ExpOf(d, hn::Sub(lanes.Read(d, x + r), hn::LoadU(d, task.block + r)));
    lanes.Write(d, hn::Mul(power, hn::LoadU(d, task.block2 + r)), to + r);
  });
}

// Softmax of the segments [begin, end), all of them whole; single(piece) does one of them.
template <class T, class R, class Output, class Single>
void SoftmaxOfColumn(const Matrix<const T>& matrix, const Segments& segments, std::int64_t begin,
                     std::int64_t end, const Task<R>& task, Output& output, const Single& single) {
  using Scan = ColumnScan<R, LogSumRule<R>>;
  const hn::ScalableTag<R> d;
  Scan scan({0, 0});
  const R* x = nullptr;  // of the block
  ForBlocksOfSegments<Scan::kRows>(
      segments, begin, end,
      [&](std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most) {
        x = ReadRun(matrix, segments, row, rows, task.window);
        return scan.Take(x, row, rows, ends, most, x != task.window);
      },
      [&](std::int64_t s, std::int64_t count, std::int64_t row, std::int64_t stop,
          const SegmentEnds& ends) HWY_ATTR {
        scan.Used(count);
        FinishSoftmax(LogSum<R>{scan.a, scan.b}, count);
        output.Open(Piece{s, row, stop, true, false});
        R* to = output.Run(row);
        const R* HWY_RESTRICT powers = scan.powers();
        const auto write = [&](auto lanes, std::int64_t r, auto inverse) HWY_ATTR {
          lanes.Write(d, hn::Mul(lanes.Read(d, powers + r), inverse), to + r);
        };
        if (powers != nullptr && scan.Spread(row, ends, count, scan.b, write)) {
          output.DrainLines();
          return;
        }
        ends.Visit([&](const auto& end_of) HWY_ATTR {
          if (powers != nullptr) {
            SpreadToRows<1, R>(0, count, row, end_of,
                               [&](std::int64_t k, int) { return scan.b[k]; }, {task.block});
            ForColumns<R>(stop - row, [&](auto lanes, std::int64_t r) HWY_ATTR {
              write(lanes, r, hn::LoadU(d, task.block + r));
            });
          } else {
            SpreadToRows<2, R>(
                0, count, row, end_of,
                [&](std::int64_t k, int i) { return i == 0 ? scan.b[k] : scan.a[k]; },
                {task.block, task.block2});
            ForColumns<R>(stop - row, [&](auto lanes, std::int64_t r) {
              const auto inverse = hn::LoadU(d, task.block + r);
              const auto less = hn::Sub(lanes.Read(d, x + r), hn::LoadU(d, task.block2 + r));
              lanes.Write(d, hn::Mul(ExpOfNonPositive(d, less), inverse), to + r);
            });
          }
        });
        output.DrainLines();
      },
      single);
}

// Its gradient y (g - sum y g), likewise.
template <class T, class R, class Output, class Single>
void SoftmaxGradientOfColumn(const Matrix<const T>& out, const Matrix<const T>& d_out,
                             const Segments& segments, std::int64_t begin, std::int64_t end,
                             const Task<R>& task, Output& output, const Single& single) {
  using Scan = ColumnScan<R, SumRule<R>>;
  const hn::ScalableTag<R> d;
  Scan scan({0, 0});
  const R *y = nullptr, *g = nullptr;  // of the block
  ForBlocksOfSegments<Scan::kRows>(
      segments, begin, end,
      [&](std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most)
          HWY_ATTR {
            y = ReadRun(out, segments, row, rows, task.window);
            g = ReadRun(d_out, segments, row, rows, task.window2);
            LinesAhead y_ahead = RowsAhead(Block<R>{y, 1, rows, y == task.window}, 1);
            LinesAhead g_ahead = RowsAhead(Block<R>{g, 1, rows, g == task.window2}, 1);
            ForColumns<R>(rows, [&](auto lanes, std::int64_t r) {
              y_ahead.Step();
              g_ahead.Step();
              const auto product = hn::Mul(lanes.Read(d, y + r), lanes.Read(d, g + r));
              Store(d, product, task.block + r);
            });
            return scan.Take(task.block, row, rows, ends, most, false);
          },
      [&](std::int64_t s, std::int64_t count, std::int64_t row, std::int64_t stop,
          const SegmentEnds& ends) HWY_ATTR {
        scan.Used(count);
        output.Open(Piece{s, row, stop, true, false});
        R* to = output.Run(row);
        const auto write = [&](auto lanes, std::int64_t r, auto dot) HWY_ATTR {
          const auto above = hn::Sub(lanes.Read(d, g + r), dot);
          lanes.Write(d, hn::Mul(lanes.Read(d, y + r), above), to + r);
        };
        if (!scan.Spread(row, ends, count, scan.a, write)) {
          ends.Visit([&](const auto& end_of) {
            SpreadToRows<1, R>(0, count, row, end_of,
                               [&](std::int64_t k, int) { return scan.a[k]; }, {task.block});
          });
          ForColumns<R>(stop - row, [&](auto lanes, std::int64_t r) HWY_ATTR {
            write(lanes, r, hn::LoadU(d, task.block + r));
          });
        }
        output.DrainLines();
      },
      single);
}

// The gradient of max and min with nothing saved, likewise: the places, or how many tie, are what
// forward would find, if `out` is what it found.
template <class Rule, class T, class R, class Output, class Single>
void ExtremeGradientOfColumn(const Matrix<const T>& x, const Matrix<const T>& out,
                             const Matrix<const T>& d_out, const Segments& segments,
                             std::int64_t begin, std::int64_t end, const Task<R>& task,
                             Output& output, const Single& single) {
  using Scan = ColumnScan<R, Rule>;
  const hn::ScalableTag<R> d;
  Scan scan({0, Rule::kPlaces ? -1 : 1});
  const R* run = nullptr;  // of the block
  ForBlocksOfSegments<Scan::kRows>(
      segments, begin, end,
      [&](std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most) {
        run = ReadRun(x, segments, row, rows, task.window);
        return scan.Take(run, row, rows, ends, most, run != task.window);
      },
      [&](std::int64_t s, std::int64_t count, std::int64_t row, std::int64_t stop,
          const SegmentEnds& ends) HWY_ATTR {
        scan.Used(count);
        const R* values = ReadOfSegments(out, s, count, task.run);
        const R* gradients = ReadOfSegments(d_out, s, count, task.window2);
        ends.Visit([&](const auto& end_of) HWY_ATTR {
          bool same = true;
          for (std::int64_t k = 0; k < count; ++k) {
            const R value = values[k], found = scan.a[k];
            const bool nan = std::isnan(value) && std::isnan(found);
            same = same && (value == found || nan || end_of(k) == end_of(k - 1));
          }
          if (same) {
            output.Open(Piece{s, row, stop, true, false});
            R* to = output.Run(row);
            if constexpr (Rule::kPlaces) {
              PlaceInRows<R>(
                  0, count, row, end_of, to,
                  [&](std::int64_t k, std::int64_t first, std::int64_t) {
                    return first + scan.b[k];
                  },
                  [&](std::int64_t k) { return gradients[k]; });
            } else {
              SpreadToRows<2, R>(0, count, row, end_of,
                                 [&](std::int64_t k, int i) {
                                   return i == 0 ? values[k]
                                                 : gradients[k] / static_cast<R>(scan.b[k]);
                                 },
                                 {task.block, task.block2});
              ForColumns<R>(stop - row, [&](auto lanes, std::int64_t r) HWY_ATTR {
                const auto tied = Tied(lanes.Read(d, run + r), hn::LoadU(d, task.block + r));
                lanes.Write(d, hn::IfThenElseZero(tied, hn::LoadU(d, task.block2 + r)), to + r);
              });
            }
            output.DrainLines();
            return;
          }
          for (std::int64_t k = 0; k < count; ++k) {
            const Piece piece{s + k, end_of(k - 1), end_of(k), true, false};
            if (piece.begin < piece.end) single(piece);
          }
        });
      },
      single);
}

// The gradient of logsumexp that was not saved, likewise.
template <class T, class R, class Output, class Single>
void PowerGradientOfColumn(const Matrix<const T>& x, const Matrix<const T>& d_out,
                           const Segments& segments, std::int64_t begin, std::int64_t end,
                           const Task<R>& task, Output& output, const Single& single) {
  using Scan = ColumnScan<R, LogSumRule<R>>;
  Scan scan({0, 0});
  const R* run = nullptr;  // of the block
  ForBlocksOfSegments<Scan::kRows>(
      segments, begin, end,
      [&](std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most) {
        run = ReadRun(x, segments, row, rows, task.window);
        return scan.Take(run, row, rows, ends, most, run != task.window);
      },
      [&](std::int64_t s, std::int64_t count, std::int64_t row, std::int64_t stop,
          const SegmentEnds& ends) {
        scan.Used(count);
        FinishLogSum(LogSum<R>{scan.a, scan.b}, count);
        const R* gradients = ReadOfSegments(d_out, s, count, task.window2);
        output.Open(Piece{s, row, stop, true, false});
        ends.Visit([&](const auto& end_of) {
          SpreadPowers(
              0, count, row, end_of, [&](std::int64_t k) { return scan.a[k]; },
              [&](std::int64_t k) { return gradients[k]; }, run, task, output.Run(row));
        });
        output.DrainLines();
      },
      single);
}

// The gradient of products, likewise.
template <class T, class R, class Output, class Single>
void ProductGradientOfColumn(const Matrix<const T>& x, const Matrix<const T>& d_out,
                             const Segments& segments, std::int64_t begin, std::int64_t end,
                             const Task<R>& task, Output& output, const Single& single) {
  constexpr std::int64_t kRows = kBlockElements / 2;  // what is kept of them stays in L1
  const hn::ScalableTag<R> d;
  std::uint64_t firsts[kRows / 64], lasts[kRows / 64];
  ForBlocksOfSegments<kRows>(
      segments, begin, end,
      [&](std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most) {
        std::fill_n(firsts, kRows / 64, 0);
        std::fill_n(lasts, kRows / 64, 0);
        std::int64_t k = 0;
        for (std::int64_t first = 0; k < std::min(most, kRows); ++k) {
          const std::int64_t stop = ends[k] - row;
          if (stop > rows) break;
          if (stop == first) continue;
          firsts[first / 64] |= std::uint64_t{1} << (first % 64);
          lasts[(stop - 1) / 64] |= std::uint64_t{1} << ((stop - 1) % 64);
          first = stop;
        }
        return k;
      },
      [&](std::int64_t s, std::int64_t count, std::int64_t row, std::int64_t stop,
          const SegmentEnds& ends) HWY_ATTR {
        const std::int64_t rows = stop - row;
        const R* run = ReadRun(x, segments, row, rows, task.window);
        const R* gradients = ReadOfSegments(d_out, s, count, task.window2);
        ends.Visit([&](const auto& end_of) {
          SpreadToRows<1, R>(0, count, row, end_of,
                             [&](std::int64_t k, int) { return gradients[k]; }, {task.run});
        });
        ProductsOfOthers<false>(run, firsts, rows, R{1}, task.block);
        ProductsOfOthers<true>(run, lasts, rows, R{1}, task.block2);
        output.Open(Piece{s, row, stop, true, false});
        MultiplyOthers(
            task.block, task.block2,
            [&](std::int64_t r) HWY_ATTR { return hn::LoadU(d, task.run + r); }, rows,
            output.Run(row));
        output.DrainLines();
      },
      single);
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

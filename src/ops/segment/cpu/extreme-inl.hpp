// Max and min with the place of the extreme: the first or last of equal rows, and of NaN the first.

#if defined(PULLBACK_SEGMENT_EXTREME_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_EXTREME_INL_HPP
#undef PULLBACK_SEGMENT_EXTREME_INL_HPP
#else
#define PULLBACK_SEGMENT_EXTREME_INL_HPP
#endif

#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Extreme of the rows so far and its place, counted from the first row of the piece.
template <class R>
struct Extreme {
  R* value;
  Int<R>* place;
};

template <class V>
HWY_INLINE auto Tied(V a, V b) {
  return hn::Or(hn::Eq(a, b), hn::And(hn::IsNaN(a), hn::IsNaN(b)));
}

// Whether later values take over, NaN aside.
template <bool kMax, bool kLast, class V>
HWY_INLINE auto Beats(V value, V best) {
  if constexpr (kLast) return kMax ? hn::Ge(value, best) : hn::Le(value, best);
  return kMax ? hn::Gt(value, best) : hn::Lt(value, best);
}

// `place` is that of the block's first row; 0 starts the state.
template <bool kMax, bool kLast, class R>
void AddExtreme(const Extreme<R>& state, const Block<R>& block, std::int64_t place,
                std::int64_t columns) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  R* HWY_RESTRICT value = state.value;
  Int<R>* HWY_RESTRICT where = state.place;
  LinesAhead ahead = RowsAhead(block, columns);
  std::int64_t r = 0;
  if (place == 0) {
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      Store(d, lanes.Read(d, block.data + c), value + c);
      hn::StoreU(hn::Zero(di), di, where + c);
    });
    r = 1;
  }
  for (; r + 4 <= block.rows; r += 4) {
    const R* row = block.row(r);
    const std::int64_t stride = block.stride;
    const auto first = static_cast<Int<R>>(place + r);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      const auto a = lanes.Read(d, row + c), b = lanes.Read(d, row + stride + c);
      const auto e = lanes.Read(d, row + 2 * stride + c), f = lanes.Read(d, row + 3 * stride + c);
      for (std::int64_t k = 0; k < 4; ++k) ahead.Step();
      auto best = hn::LoadU(d, value + c);
      // In a long segment four rows seldom hold a new extreme. The sum is NaN if one of them is
      // (and for opposite infinities, which costs time only).
      const auto four =
          kMax ? hn::Max(hn::Max(a, b), hn::Max(e, f)) : hn::Min(hn::Min(a, b), hn::Min(e, f));
      const auto sum = hn::Add(hn::Add(a, b), hn::Add(e, f));
      const auto nan = hn::IsNaN(sum);
      if (hn::AllFalse(d, hn::Or(Beats<kMax, kLast>(four, best), nan))) return;
      auto best_place = hn::LoadU(di, where + c);
      const bool any_nan = !hn::AllFalse(d, nan);
      const auto add = [&](auto next, Int<R> next_place) HWY_ATTR {
        auto beats = Beats<kMax, kLast>(next, best);
        if (any_nan) beats = hn::Or(beats, hn::AndNot(hn::IsNaN(best), hn::IsNaN(next)));
        best = hn::IfThenElse(beats, next, best);
        best_place = hn::IfThenElse(hn::RebindMask(di, beats), hn::Set(di, next_place), best_place);
      };
      add(a, first);
      add(b, static_cast<Int<R>>(first + 1));
      add(e, static_cast<Int<R>>(first + 2));
      add(f, static_cast<Int<R>>(first + 3));
      Store(d, best, value + c);
      hn::StoreU(best_place, di, where + c);
    });
  }
  for (; r < block.rows; ++r) {
    const R* row = block.row(r);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      const auto next = lanes.Read(d, row + c);
      const auto best = hn::LoadU(d, value + c);
      const auto beats =
          hn::Or(Beats<kMax, kLast>(next, best), hn::AndNot(hn::IsNaN(best), hn::IsNaN(next)));
      Store(d, hn::IfThenElse(beats, next, best), value + c);
      hn::StoreU(
          hn::IfThenElse(hn::RebindMask(di, beats), hn::Set(di, static_cast<Int<R>>(place + r)),
                         hn::LoadU(di, where + c)),
          di, where + c);
    });
  }
}

// All rows of a piece, when they are few: column by column, in registers.
template <bool kMax, bool kLast, class R>
void ShortExtreme(const Extreme<R>& state, const Block<R>& block, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  bool any_nan = false;
  LinesAhead ahead = RowsAhead(block, columns);
  ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
    auto best = lanes.Read(d, block.data + c);
    auto best_place = hn::Zero(di);
    auto sum = best;  // NaN if a row is
    ahead.Step();
    for (std::int64_t r = 1; r < block.rows; ++r) {
      const auto next = lanes.Read(d, block.row(r) + c);
      ahead.Step();
      const auto beats = Beats<kMax, kLast>(next, best);
      sum = hn::Add(sum, next);
      best = hn::IfThenElse(beats, next, best);
      best_place = hn::IfThenElse(hn::RebindMask(di, beats), hn::Set(di, static_cast<Int<R>>(r)),
                                  best_place);
    }
    Store(d, best, state.value + c);
    hn::StoreU(best_place, di, state.place + c);
    any_nan |= !hn::AllFalse(d, hn::IsNaN(sum));
  });
  if (any_nan) AddExtreme<kMax, kLast>(state, block, 0, columns);
}

// Places of a vector of columns as rows: `first` + place.
template <class Lanes, class DI, class A>
HWY_INLINE void WriteRowNumbers([[maybe_unused]] const Lanes& lanes, DI di, hn::Vec<DI> place,
                                std::int64_t first, A* to) {
  constexpr std::size_t kLanes = hn::MaxLanes(di);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(A) == 2 * sizeof(hn::TFromD<DI>) && !std::is_same_v<Lanes, FirstLanes>) {
    const hn::Repartition<A, DI> wide;
    const hn::Half<DI> half;
    const auto base = hn::Set(wide, static_cast<A>(first));
    lanes.Write(wide, hn::Add(hn::PromoteTo(wide, hn::LowerHalf(half, place)), base), to);
    lanes.Write(wide, hn::Add(hn::PromoteTo(wide, hn::UpperHalf(half, place)), base),
                to + kLanes / 2);
    return;
  }
#endif
  HWY_ALIGN hn::TFromD<DI> places[kLanes];
  hn::Store(place, di, places);
  std::size_t count = kLanes;
  if constexpr (std::is_same_v<Lanes, FirstLanes>) count = lanes.count;
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = static_cast<A>(first + static_cast<std::int64_t>(places[i]));
  }
}

// Extremes of a few rows straight to `to`, and the numbers of their rows to `arg` unless that is
// null; `first` is that of the first row. False, and nothing useful is written, if there is
// a NaN.
template <bool kMax, bool kLast, bool kStream, class Rows, class R, class A>
HWY_INLINE bool ExtremeOfFewRows(Rows rows, std::int64_t count, std::int64_t columns,
                                 std::int64_t first, R* HWY_RESTRICT to, A* HWY_RESTRICT arg) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  auto nan = hn::IsNaN(hn::Zero(d));
  ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
    auto best = lanes.Read(d, rows.Row(0) + c);
    auto best_place = hn::Zero(di);
    auto sum = best;  // NaN if a row is
    rows.Used(0, c, 1);
    for (std::int64_t r = 1; r < count; ++r) {
      const auto next = lanes.Read(d, rows.Row(r) + c);
      rows.Used(r, c, 1);
      const auto beats = Beats<kMax, kLast>(next, best);
      sum = hn::Add(sum, next);
      best = hn::IfThenElse(beats, next, best);
      best_place = hn::IfThenElse(hn::RebindMask(di, beats), hn::Set(di, static_cast<Int<R>>(r)),
                                  best_place);
    }
    nan = hn::Or(nan, hn::IsNaN(sum));
    lanes.Write(d, best, to + c);
    if (arg != nullptr) WriteRowNumbers(lanes, di, best_place, first, arg + c);
  });
  return hn::AllFalse(d, nan);
}

inline constexpr std::int64_t kShortRows = 64;

// Calls f.template operator()<kMax, kLast>().
template <class F>
HWY_INLINE auto WithExtreme(const SegmentProblem& problem, const F& f) {
  const bool last = problem.ties == Ties::last;
  if (problem.reduce == SegmentReduce::max) {
    return last ? f.template operator()<true, true>() : f.template operator()<true, false>();
  }
  return last ? f.template operator()<false, true>() : f.template operator()<false, false>();
}

template <class R>
void AddExtreme(const SegmentProblem& problem, const Extreme<R>& state, const Block<R>& block,
                std::int64_t place, std::int64_t columns) {
  WithExtreme(problem, [&]<bool kMax, bool kLast>() {
    if (place == 0 && block.rows <= kShortRows) {
      ShortExtreme<kMax, kLast>(state, block, columns);
    } else {
      AddExtreme<kMax, kLast>(state, block, place, columns);
    }
  });
}

// Whether a later value takes over from `best`.
template <class R>
bool Beats(const SegmentProblem& problem, R value, R best) {
  if (std::isnan(best)) return false;
  if (std::isnan(value)) return true;
  if (value == best) return problem.ties == Ties::last;
  return problem.reduce == SegmentReduce::max ? value > best : value < best;
}

// Bit c of the bytes at `to` says holds(c); the bits past the last column are 0.
template <class F>
void StoreBits(std::int64_t columns, std::uint8_t* to, std::int64_t stride, const F& holds) {
  for (std::int64_t c = 0; c < columns; c += 8) {
    unsigned bits = 0;
    for (std::int64_t k = 0; k < std::min<std::int64_t>(8, columns - c); ++k) {
      bits |= static_cast<unsigned>(holds(c + k)) << k;
    }
    to[c / 8 * stride] = static_cast<std::uint8_t>(bits);
  }
}

template <class R>
void MaskOfEqual(const R* HWY_RESTRICT x, const R* HWY_RESTRICT value, std::int64_t columns,
                 std::uint8_t* to, std::int64_t stride) {
  StoreBits(columns, to, stride, [&](std::int64_t c) {
    return x[c] == value[c] || (std::isnan(x[c]) && std::isnan(value[c]));
  });
}

template <class I>
void MaskOfPlace(I row, const I* HWY_RESTRICT place, std::int64_t columns, std::uint8_t* to,
                 std::int64_t stride) {
  StoreBits(columns, to, stride, [&](std::int64_t c) { return place[c] == row; });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

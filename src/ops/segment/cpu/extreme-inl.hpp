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

template <bool kMax, bool kLast, class V>
HWY_INLINE auto Beats(V value, V best) {
  if constexpr (kLast) {
    const auto beats = kMax ? hn::Ge(value, best) : hn::Le(value, best);
    return hn::Or(beats, hn::AndNot(hn::IsNaN(best), hn::IsNaN(value)));
  } else {
    const auto beats = kMax ? hn::Gt(value, best) : hn::Lt(value, best);
    return hn::Or(beats, hn::AndNot(hn::IsNaN(best), hn::IsNaN(value)));
  }
}

// `place` is that of the block's first row; 0 starts the state.
template <bool kMax, bool kLast, class R>
void AddExtreme(const Extreme<R>& state, const Block<R>& block, std::int64_t place,
                std::int64_t columns) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  R* HWY_RESTRICT value = state.value;
  Int<R>* HWY_RESTRICT where = state.place;
  std::int64_t r = 0;
  if (place == 0) {
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      Store(d, lanes.Read(d, block.data + c), value + c);
      hn::StoreU(hn::Zero(di), di, where + c);
    });
    r = 1;
  }
  const auto add = [&](auto rows) HWY_ATTR {
    const R* row = block.row(r);
    const std::int64_t stride = block.stride;
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      auto best = hn::LoadU(d, value + c);
      auto best_place = hn::LoadU(di, where + c);
      for (int k = 0; k < rows; ++k) {
        const auto next = lanes.Read(d, row + k * stride + c);
        const auto beats = Beats<kMax, kLast>(next, best);
        best = hn::IfThenElse(beats, next, best);
        best_place = hn::IfThenElse(hn::RebindMask(di, beats),
                                    hn::Set(di, static_cast<Int<R>>(place + r + k)), best_place);
      }
      Store(d, best, value + c);
      hn::StoreU(best_place, di, where + c);
    });
  };
  for (; r + 4 <= block.rows; r += 4) add(std::integral_constant<int, 4>());
  for (; r < block.rows; ++r) add(std::integral_constant<int, 1>());
}

template <class R>
void AddExtreme(const SegmentProblem& problem, const Extreme<R>& state, const Block<R>& block,
                std::int64_t place, std::int64_t columns) {
  const bool last = problem.ties == Ties::last;
  if (problem.reduce == SegmentReduce::max) {
    last ? AddExtreme<true, true>(state, block, place, columns)
         : AddExtreme<true, false>(state, block, place, columns);
  } else {
    last ? AddExtreme<false, true>(state, block, place, columns)
         : AddExtreme<false, false>(state, block, place, columns);
  }
}

// Whether a later value takes over from `best`.
template <class R>
bool Beats(const SegmentProblem& problem, R value, R best) {
  if (std::isnan(best)) return false;
  if (std::isnan(value)) return true;
  if (value == best) return problem.ties == Ties::last;
  return problem.reduce == SegmentReduce::max ? value > best : value < best;
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

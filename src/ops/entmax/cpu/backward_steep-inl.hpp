// <s, d_y> / S above alpha = 2, where a few s = y^(2-alpha) may outweigh all others by any factor.
// d_y less this mean is then nearly 0 where s is largest, and what rounding leaves of it would be
// multiplied by that s. So the mean is a sum of two numbers: d_y of the largest s, and the mean of
// what that leaves of d_y.

#if defined(PULLBACK_ENTMAX_BACKWARD_STEEP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_STEEP_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_STEEP_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_STEEP_INL_HPP
#endif

#include <algorithm>

#include "ops/entmax/cpu/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

struct SplitMean {
  double heaviest, rest;
};

template <class D>
HWY_INLINE hn::Vec<D> Less(D d, hn::Vec<D> g, const SplitMean& mean) {
  return hn::Sub(hn::Sub(g, hn::Set(d, mean.heaviest)), hn::Set(d, mean.rest));
}
template <class D>
HWY_INLINE hn::Vec<D> Less(D d, hn::Vec<D> g, hn::TFromD<D> mean) {
  return hn::Sub(g, hn::Set(d, mean));
}

// Keeps s in `stored`.
template <class W, class T>
SplitMean SteepMean(const W& weights, const T* d_y, std::size_t length, double* stored) {
  const hn::ScalableTag<double> d;
  const std::size_t lanes = hn::Lanes(d);
  auto largest = hn::Zero(d), of_largest = hn::Zero(d);
  for (std::size_t i = 0; i < length; i += lanes) {
    const std::size_t count = std::min(lanes, length - i);
    const auto y = weights.Load(d, i, count);
    const auto active = weights.Active(d, y);
    auto s = hn::Zero(d);
    if (!hn::AllFalse(d, active)) {
      s = hn::IfThenElseZero(active, weights.Weight(d, y));
      of_largest = hn::IfThenElse(hn::Gt(s, largest), LoadSome(d, d_y + i, count), of_largest);
      largest = hn::Max(s, largest);
    }
    hn::StoreU(s, d, stored + i);
  }
  HWY_ALIGN double in_lane[hn::MaxLanes(d)], d_y_in_lane[hn::MaxLanes(d)];
  hn::Store(largest, d, in_lane);
  hn::Store(of_largest, d, d_y_in_lane);
  SplitMean mean{d_y_in_lane[std::max_element(in_lane, in_lane + lanes) - in_lane], 0};
  auto total = hn::Zero(d), dot = hn::Zero(d);
  for (std::size_t i = 0; i < length; i += lanes) {
    const auto s = hn::LoadU(d, stored + i);
    const auto active = hn::Not(hn::Eq(s, hn::Zero(d)));
    if (hn::AllFalse(d, active)) continue;
    const auto g = Less(d, LoadSome(d, d_y + i, std::min(lanes, length - i)), mean);
    total = hn::Add(total, s);
    dot = hn::MulAdd(s, hn::IfThenElseZero(active, g), dot);
  }
  mean.rest = hn::GetLane(hn::SumOfLanes(d, dot)) / hn::GetLane(hn::SumOfLanes(d, total));
  return mean;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// d_alpha of a row.

#if defined(PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#endif

#include <algorithm>
#include <limits>

#include "ops/entmax/cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// (e^t - 1 - t) / t^2 for t >= 0.
template <class D>
HWY_INLINE hn::Vec<D> SecondRemainder(D d, hn::Vec<D> t) {
  // Below 1/2 the difference cancels, and 14 terms of the series are exact to double.
  auto series = hn::Zero(d);
  double factorial = 1307674368000.0;  // 15!
  for (int k = 15; k >= 2; --k) {
    series = hn::MulAdd(series, t, hn::Set(d, 1 / factorial));
    factorial /= k;
  }
  const auto safe = hn::Max(t, hn::Set(d, 0.5));
  const auto direct = hn::Div(hn::Sub(hn::Expm1(d, safe), safe), hn::Mul(safe, safe));
  return hn::IfThenElse(hn::Lt(t, hn::Set(d, 0.5)), series, direct);
}

// In double whatever T is: this pass is rare, and seven sums of opposite signs meet in its result.
template <class T>
double DAlphaOfRow(const T* y, const T* d_y, std::size_t length, double alpha) {
  const hn::ScalableTag<double> d;
  const std::size_t lanes = hn::Lanes(d);
  if (entmax::family_of(alpha) == Family::invalid) return std::numeric_limits<double>::quiet_NaN();
  const auto minus_b = hn::Set(d, 1 - alpha);
  const auto one = hn::Set(d, 1.0);
  auto sum_p = hn::Zero(d), sum_s = sum_p, sum_pl = sum_p, sum_pr = sum_p;
  auto g_p = sum_p, g_pl = sum_p, g_pr = sum_p;
  for (std::size_t i = 0; i < length; i += lanes) {
    const std::size_t count = std::min(lanes, length - i);
    const auto p = LoadFirstAs(d, y + i, count, Real<T>{0});
    const auto active = hn::Not(hn::Eq(p, hn::Zero(d)));
    if (hn::AllFalse(d, active)) continue;
    const auto g = hn::IfThenElseZero(active, LoadFirstAs(d, d_y + i, count, Real<T>{0}));
    const auto positive = hn::Gt(p, hn::Zero(d));
    const auto l = hn::Log(d, hn::IfThenElse(positive, p, one));
    const auto t = hn::Min(hn::Mul(minus_b, l), hn::Set(d, 600.0));
    const auto pl = hn::Mul(p, l);
    const auto pr = hn::Mul(hn::Mul(pl, l), SecondRemainder(d, t));
    sum_p = hn::Add(sum_p, p);
    sum_s = hn::MulAdd(p, hn::Exp(d, t), sum_s);
    sum_pl = hn::Add(sum_pl, pl);
    sum_pr = hn::Add(sum_pr, pr);
    g_p = hn::MulAdd(g, p, g_p);
    g_pl = hn::MulAdd(g, pl, g_pl);
    g_pr = hn::MulAdd(g, pr, g_pr);
  }
  const auto sum = [&](auto v) HWY_ATTR { return hn::GetLane(hn::SumOfLanes(d, v)); };
  const double b = alpha - 1;
  const double total = sum(sum_s);
  if (total == 0) return 0;  // nothing visible in the row
  return (sum(sum_pr) * (sum(g_p) - b * sum(g_pl)) - (sum(sum_p) - b * sum(sum_pl)) * sum(g_pr)) /
         total;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

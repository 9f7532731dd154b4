// d_alpha of a row.

#if defined(PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_ALPHA_INL_HPP
#endif

#include <algorithm>
#include <limits>

#include "ops/entmax/cpu/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// (e^t - 1 - t) / t^2 for t >= 0.
template <class D>
HWY_INLINE hn::Vec<D> SecondRemainder(D d, hn::Vec<D> t, hn::Vec<D> e_to_t) {
  using R = hn::TFromD<D>;
  // Below 1 the difference cancels, and the series is exact to R with so many terms.
  constexpr int kTerms = sizeof(R) == sizeof(double) ? 18 : 11;
  auto series = hn::Zero(d);
  double factorial = 1;
  for (int k = 2; k <= kTerms; ++k) factorial *= k;
  for (int k = kTerms; k >= 2; --k) {
    series = hn::MulAdd(series, t, hn::Set(d, static_cast<R>(1 / factorial)));
    factorial /= k;
  }
  const auto one = hn::Set(d, R{1}), safe = hn::Max(t, one);
  const auto direct = hn::Div(hn::Sub(hn::Sub(e_to_t, one), safe), hn::Mul(safe, safe));
  return hn::IfThenElse(hn::Lt(t, one), series, direct);
}

// Seven sums of opposite signs meet in the result: beyond a few vectors they are in double.
template <class R, class T>
double DAlphaOfRow(const T* y, const T* d_y, std::size_t length, double alpha) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  constexpr std::size_t kVectors = 16;
  // e to the first is finite, and the square of the second. Where e^t is cut it is by far the most
  // of what it is in, a remainder here and the sum of weights below, and cancels.
  constexpr R kMost = sizeof(R) == sizeof(double) ? 600 : 87;
  constexpr R kLongest = sizeof(R) == sizeof(double) ? R(1e150) : R(1e18);
  const auto minus_b = hn::Set(d, static_cast<R>(1 - alpha));
  const auto one = hn::Set(d, R{1}), zero = hn::Zero(d);
  double total_p = 0, total_s = 0, total_pl = 0, total_pr = 0, total_g_p = 0, total_g_pl = 0,
         total_g_pr = 0;
  for (std::size_t begin = 0; begin < length; begin += kVectors * lanes) {
    auto p_part = zero, s_part = zero, pl_part = zero, pr_part = zero;
    auto g_p = zero, g_pl = zero, g_pr = zero;
    bool any = false;
    for (std::size_t i = begin; i < std::min(length, begin + kVectors * lanes); i += lanes) {
      const std::size_t count = std::min(lanes, length - i);
      const auto p = LoadSome(d, y + i, count);
      const auto active = hn::Not(hn::Eq(p, zero));
      if (hn::AllFalse(d, active)) continue;
      any = true;
      const auto g = hn::IfThenElseZero(active, LoadSome(d, d_y + i, count));
      const auto l = hn::Log(d, hn::IfThenElse(hn::Gt(p, zero), p, one));
      const auto t = hn::Min(hn::Mul(minus_b, l), hn::Set(d, kLongest));
      const auto e_to_t = hn::Exp(d, hn::Min(t, hn::Set(d, kMost)));
      const auto pl = hn::Mul(p, l);
      const auto pr = hn::Mul(hn::Mul(pl, l), SecondRemainder(d, t, e_to_t));
      p_part = hn::Add(p_part, p);
      s_part = hn::MulAdd(p, e_to_t, s_part);
      pl_part = hn::Add(pl_part, pl);
      pr_part = hn::Add(pr_part, pr);
      g_p = hn::MulAdd(g, p, g_p);
      g_pl = hn::MulAdd(g, pl, g_pl);
      g_pr = hn::MulAdd(g, pr, g_pr);
    }
    if (!any) continue;
    const auto add = [&](auto part, double& total) HWY_ATTR {
      total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, part)));
    };
    add(p_part, total_p), add(s_part, total_s), add(pl_part, total_pl), add(pr_part, total_pr);
    add(g_p, total_g_p), add(g_pl, total_g_pl), add(g_pr, total_g_pr);
  }
  if (total_s == 0) return 0;  // nothing visible in the row
  const double b = alpha - 1;
  return (total_pr * (total_g_p - b * total_g_pl) - (total_p - b * total_pl) * total_g_pr) /
         total_s;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

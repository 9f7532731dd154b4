// The threshold of a row. With b = alpha - 1 and z = x - max(x) <= 0, find theta such that
//   f(theta) = sum_i [b z_i - theta]_+^(1/b) = 1,   -1 <= theta < 0.
// For alpha <= 2, f^b is a norm of a convex function, hence convex and decreasing: Newton steps on
// it from any theta with f >= 1 rise towards the root and never pass it (for alpha = 2 they are
// Michelot's algorithm, which is finite). With S = sum [b z_i - theta]_+^(1/b - 1) the step is
//   (f - f^(1-b)) / S.
// The threshold of a subset of the row is a lower bound of the row's (idea of Dai and Chen's
// distributed projections), so elements below it can be dropped before the rest is looked at.
// Near alpha = 1, theta stands for c with p = (1 + b (z - c))^(1/b), c >= 0; its step tends to
// ln f, which for softmax is the whole way.
// Above alpha = 2 it stands for c with p = (b (z - c))^(1/b). There p is so steep where an element
// enters the support that no number next to c may make the sum 1: the root is told by the element
// at the edge of the support, z = e, and its p = q:  p = (b (z - e) + q^b)^(1/b).

#if defined(PULLBACK_ENTMAX_SOLVE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_SOLVE_INL_HPP
#undef PULLBACK_ENTMAX_SOLVE_INL_HPP
#else
#define PULLBACK_ENTMAX_SOLVE_INL_HPP
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "cpu/compress-inl.hpp"
#include "cpu/exp-inl.hpp"
#include "cpu/power-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "ops/entmax/cpu/family.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::Family;

// f32 partial sums are this many vectors long at most; then they are added up in double.
inline constexpr std::size_t kSumVectors = 64;

// From this many vectors on, a step drops the elements that have left the support.
inline constexpr std::size_t kCompactVectors = 32;

// Loads any storage type in the lanes of d, which may be wider: f32 as f64.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadAs(D d, const T* from) {
  if constexpr (std::is_same_v<Real<T>, hn::TFromD<D>>) {
    return Load(d, from);
  } else {
    return hn::PromoteTo(d, Load(hn::Rebind<Real<T>, D>(), from));
  }
}
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadFirstAs(D d, const T* from, std::size_t count, Real<T> fill) {
  count = std::min(count, hn::Lanes(d));  // known to callers, unknown to compilers
  if constexpr (std::is_same_v<Real<T>, hn::TFromD<D>>) {
    return LoadFirst(d, from, count, fill);
  } else {
    return hn::PromoteTo(d, LoadFirst(hn::Rebind<Real<T>, D>(), from, count, fill));
  }
}
template <class D, class T>
HWY_INLINE void StoreAs(D d, hn::Vec<D> value, T* to) {
  if constexpr (std::is_same_v<Real<T>, hn::TFromD<D>>) {
    Store(d, value, to);
  } else {
    const hn::Rebind<Real<T>, D> narrow;
    Store(narrow, hn::DemoteTo(narrow, value), to);
  }
}
template <class D, class T>
HWY_INLINE void StoreFirstAs(D d, hn::Vec<D> value, T* to, std::size_t count) {
  count = std::min(count, hn::Lanes(d));  // known to callers, unknown to compilers
  if constexpr (std::is_same_v<Real<T>, hn::TFromD<D>>) {
    StoreFirst(d, value, to, count);
  } else {
    const hn::Rebind<Real<T>, D> narrow;
    StoreFirst(narrow, hn::DemoteTo(narrow, value), to, count);
  }
}

// Powers of one exponent, for the family that takes such.
struct NoPowers {
  explicit NoPowers(double) {}
};
template <Family kFamily, class R>
using PowersOf = std::conditional_t<kFamily == Family::general, FixedPower<R>, NoPowers>;

// p as a function of z and theta. R is the type of the arithmetic. Softmax has no use for it.
template <Family kFamily, class R>
struct Power {
  static constexpr Family family = kFamily;
  static constexpr bool near_one = kFamily == Family::near_one;
  static constexpr bool steep = kFamily == Family::steep;
  // Where an element enters the support, in terms of Excess().
  static constexpr R edge = near_one ? R{-1} : R{0};
  // Whether y takes Threshold::rest into account at each element, and not by the scale.
  static constexpr bool uses_rest = kFamily == Family::general || steep;
  static constexpr R start = near_one ? R{0} : R{-1};  // theta with f >= 1, in every row

  R b, inverse;  // alpha - 1 and 1 / (alpha - 1)
  // Whether Both() tells the curvature of f, which is finite where 1/b > 2.
  bool curved;
  // The f - 1 from which a step ends as close to the root as R can tell; one that minds the
  // curvature, too, if it looks at its third terms as well.
  double tolerance, curved_tolerance;

  explicit Power(double alpha)
      : b(static_cast<R>(alpha - 1)),
        inverse(static_cast<R>(1 / (alpha - 1))),
        curved(kFamily == Family::general && alpha < 1.5),
        tolerance(ToleranceOf(alpha)),
        curved_tolerance(alpha < 4.0 / 3 ? 0.05 : std::pow(kEpsilon / 8, alpha - 1) / (alpha - 1)),
        wide_b_(alpha - 1),
        powers_(1 / (alpha - 1) - (curved ? 2 : 1)) {}

  static double ToleranceOf(double alpha) { return std::pow(kEpsilon, NewtonOrder(alpha)); }

  // b z - theta, or b (z - c) near one and where steep.
  template <class D>
  HWY_INLINE hn::Vec<D> Excess(D d, hn::Vec<D> z, hn::Vec<D> theta) const {
    if constexpr (kFamily == Family::sparsemax) return hn::Sub(z, theta);
    if constexpr (near_one || steep) return hn::Mul(hn::Set(d, b), hn::Sub(z, theta));
    return hn::MulSub(hn::Set(d, b), z, theta);
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Active(D d, hn::Vec<D> excess) const {
    return hn::Gt(excess, hn::Set(d, edge));
  }
  // p, the summand of S, and excess^(1/b - 2) if `curved`; all 0 where not active.
  template <class D>
  struct Summands {
    hn::Vec<D> value, slope, bend;
  };
  template <class D>
  HWY_INLINE Summands<D> Both(D d, hn::Vec<D> excess) const {
    if constexpr (kFamily == Family::sparsemax || kFamily == Family::entmax15) {
      const auto t = hn::Max(excess, hn::Zero(d));
      return {hn::Mul(t, t), t, t};
    } else if constexpr (kFamily == Family::steep) {
      const auto value = Value(d, excess);
      const auto slope = hn::IfThenElseZero(Active(d, excess), hn::Div(value, excess));
      return {value, slope, slope};
    } else if constexpr (kFamily == Family::general) {
      // The power of what is not active counts for nothing, but has to be finite. One power, times
      // base as often as it takes.
      const auto base = hn::Max(excess, hn::Set(d, powers_.least_large()));
      const auto bend = hn::IfThenElseZero(Active(d, excess), powers_.OfLarge(d, base));
      auto slope = bend;
      if constexpr (sizeof(R) == sizeof(float)) {
        if (curved) slope = hn::Mul(bend, base);
      } else {
        // Compilers would make two loops of a choice, and not inline the longer powers of f64.
        const auto once = hn::Set(d, curved ? R{1} : R{0});
        const auto never = hn::Set(d, curved ? R{0} : R{1});
        slope = hn::Mul(bend, hn::MulAdd(base, once, never));
      }
      return {hn::Mul(slope, base), slope, bend};
    } else {
      // base^(1/b - 1), and base times that: one power for both.
      const auto slope = NearOnePower(d, excess, inverse - 1);
      const auto base = hn::Add(excess, hn::Set(d, R{1}));
      return {hn::IfThenElseZero(Active(d, excess), hn::Mul(slope, base)), slope, slope};
    }
  }
  // p; 0 where not active.
  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, hn::Vec<D> excess) const {
    if constexpr (kFamily == Family::sparsemax) {
      return hn::Max(excess, hn::Zero(d));
    } else if constexpr (kFamily == Family::entmax15) {
      const auto t = hn::Max(excess, hn::Zero(d));
      return hn::Mul(t, t);
    } else if constexpr (near_one) {
      return NearOnePower(d, excess, inverse);
    } else if constexpr (kFamily == Family::general) {
      return Both(d, excess).value;
    } else {
      const auto active = Active(d, excess);
      return hn::IfThenElseZero(active, PowerOfFraction(d, excess, hn::Set(d, inverse)));
    }
  }

  // tau of the root theta + rest. The two terms may cancel: in double, and with the rest.
  double Tau(R max, R theta, R rest) const {
    const double root = static_cast<double>(theta) + static_cast<double>(rest);
    if constexpr (steep) return wide_b_ * (max + theta) + rest;
    return wide_b_ * static_cast<double>(max) + (near_one ? wide_b_ * root - 1 : root);
  }
  // -df/dtheta.
  double Descent(double slope) const { return near_one ? slope : slope / static_cast<double>(b); }
  double Step(double f, double slope) const {
    const double wide = static_cast<double>(b);
    const double inverse_slope = 1 / slope;  // beside the root: the two take as long as one
    if constexpr (kFamily == Family::entmax15) return (f - std::sqrt(f)) * inverse_slope;
    if constexpr (near_one) return -f * std::expm1(-wide * std::log(f)) / wide * inverse_slope;
    const double step = (f - std::pow(f, 1 - wide)) * inverse_slope;
    return steep ? step / wide : step;
  }

 private:
  // (1 + excess)^exponent where active, else 0.
  template <class D>
  HWY_INLINE hn::Vec<D> NearOnePower(D d, hn::Vec<D> excess, R exponent) const {
    const auto active = Active(d, excess);
    const auto log = hn::Log1p(d, hn::IfThenElseZero(active, excess));
    return hn::IfThenElseZero(active, ExpNonPositive(d, hn::Mul(log, hn::Set(d, exponent))));
  }

  static constexpr auto kEpsilon = static_cast<double>(std::numeric_limits<R>::epsilon());
  // A step squares f - 1 where elements leave the support smoothly, 1/b >= 2; else it is raised to
  // 1/b. With the curvature it is cubed where 1/b >= 3, and else raised to 1/b; as S >= 1, elements
  // move by b (f - 1) at most.
  static double NewtonOrder(double alpha) {
    return kFamily == Family::general ? std::max(0.5, alpha - 1) : 0.5;
  }

  double wide_b_;
  PowersOf<kFamily, R> powers_;
};

// Sums over elements whose z is in `z`, padded with -inf up to whole vectors.
struct PowerSums {
  double f = 0, slope = 0;
  double z = 0;           // sparsemax only, in place of the two above
  std::size_t count = 0;  // in the support at this theta
};

template <class R>
HWY_INLINE void PadCandidates(R* z, std::size_t count) {
  const hn::ScalableTag<R> d;
  hn::StoreU(hn::Set(d, -std::numeric_limits<R>::infinity()), d, z + count);
}

// With kCompact, drops from z the elements that are not active at theta. `lift` is added to each
// excess, where steep.
template <bool kCompact, class P, class R>
PowerSums Evaluate(const P& power, R theta, R* HWY_RESTRICT z, std::size_t& count,
                   [[maybe_unused]] R lift = 0) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto at = hn::Set(d, theta);
  PowerSums sums;
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t end = std::min(count, begin + kSumVectors * lanes);
    auto first = hn::Zero(d), second = hn::Zero(d);
    for (; begin < end; begin += lanes) {
      const auto v = hn::LoadU(d, z + begin);
      auto excess = power.Excess(d, v, at);
      if constexpr (P::steep) excess = hn::Add(excess, hn::Set(d, lift));
      const auto active = power.Active(d, excess);
      if constexpr (P::family == Family::sparsemax) {
        first = hn::Add(first, hn::IfThenElseZero(active, v));
      } else {
        const auto both = power.Both(d, excess);
        first = hn::Add(first, both.value);
        second = hn::Add(second, both.slope);
      }
      if constexpr (kCompact) {
        sums.count += StoreActive(d, v, active, z + sums.count);
      } else {
        sums.count += hn::CountTrue(d, active);
      }
    }
    if constexpr (P::family == Family::sparsemax) {
      sums.z += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, first)));
    } else {
      sums.f += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, first)));
      sums.slope += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, second)));
    }
  }
  if constexpr (kCompact) {
    count = sums.count;
    PadCandidates(z, count);
  }
  return sums;
}

// The root is theta + rest, rest being less than a step of theta's type. It matters where p grows
// fast (the elements at the edge of the support), and through scale for the sum of all p.
// Where steep: e, -q^b and q.
template <class R>
struct Threshold {
  R theta = 0;
  R rest = 0;
  R scale = 1;  // 1 / f(theta)
};

// Of a lower bound of the root, which needs no digits, in place of Power::tolerance.
inline constexpr double kRough = 1;

// alpha <= 2. `theta` is a lower bound of the root. Uses up z.
template <class P, class R>
Threshold<R> Rise(const P& power, R theta, R* z, std::size_t count, double tolerance) {
  constexpr auto kEpsilon = static_cast<double>(std::numeric_limits<R>::epsilon());
  constexpr double kTiny = 4 * kEpsilon;
  while (true) {
    // A few vectors are faster summed again than moved: the next sums would wait for the stores.
    const PowerSums sums = count > kCompactVectors * hn::Lanes(hn::ScalableTag<R>())
                               ? Evaluate<true>(power, theta, z, count)
                               : Evaluate<false>(power, theta, z, count);
    if constexpr (P::family == Family::sparsemax) {
      // The threshold of this set, which is the answer when it drops nobody.
      const double k = static_cast<double>(sums.count);
      const R next = static_cast<R>((sums.z - 1) / k);
      if (!(next > theta)) return {theta};
      const double excess = (static_cast<double>(next) - static_cast<double>(theta)) * k;  // f - 1
      theta = next;
      if (tolerance > power.tolerance && excess < tolerance) return {theta};
    } else {
      const double whole = power.Step(sums.f, sums.slope);
      double step = whole;
      // Only theta's rounding passes the root; what has left the support by it may be most of the
      // slope.
      if (sums.f < 1) step = std::max(step, -kEpsilon * std::abs(static_cast<double>(theta)));
      const double root = static_cast<double>(theta) + step;
      theta = static_cast<R>(root);
      // Sums that round up would never come closer to 1.
      const bool moves = step > kTiny * std::abs(root);
      if (sums.f - 1 > tolerance && moves) continue;
      // Where y has a scale, that takes the rest of the step, too.
      const double left = P::uses_rest ? 0 : whole - step;
      const double rest = root - static_cast<double>(theta) + left;
      const double f = 1 + rest * power.Descent(sums.slope);
      return {theta, static_cast<R>(rest), static_cast<R>(1 / f)};
    }
  }
}

// alpha > 2: f^b is not convex, and Newton may pass the root or creep; a bracket is kept, and
// halved when two steps have not done so. Once no element lies in it, the support is known. Leaves
// that in z, or with it elements so close to the root that no number lies between.
template <class P, class R>
void KeepSupport(const P& power, R low, R* z, std::size_t& count) {
  low = std::max(low, -power.inverse);
  R high = 0, theta = low, width_before = high - low;
  auto at_low = count, at_high = static_cast<std::size_t>(std::count(z, z + count, R{0}));
  for (int i = 0; at_low != at_high; ++i) {
    const PowerSums sums = Evaluate<false>(power, theta, z, count);
    (sums.f >= 1 ? low : high) = theta;
    (sums.f >= 1 ? at_low : at_high) = sums.count;
    R next = theta + static_cast<R>(power.Step(sums.f, sums.slope));
    const bool slow = i % 2 == 1 && high - low > width_before / 2;
    if (i % 2 == 1) width_before = high - low;
    if (slow || !(next > low && next < high)) next = low + (high - low) / 2;
    if (!(next > low && next < high)) break;
    theta = next;
  }
  Evaluate<true>(power, low, z, count);
}

// With c_i = b (z_i - e) >= 0 the sum of (c_i + q^b)^(1/b) is convex in q, as a sum of norms: where
// its tangent at 0 meets 1, q is not below the root, and Newton's steps fall to it from there.
template <class P, class R>
Threshold<R> FromEdge(const P& power, R low, R* z, std::size_t count) {
  constexpr R kTiny = 4 * std::numeric_limits<R>::epsilon();
  KeepSupport(power, low, z, count);
  R edge = *std::min_element(z, z + count);
  PowerSums above = Evaluate<false>(power, edge, z, count);  // those at the edge have 0
  while (above.f >= 1 && above.count > 0) {
    Evaluate<true>(power, edge, z, count);
    edge = *std::min_element(z, z + count);
    above = Evaluate<false>(power, edge, z, count);
  }
  R q = static_cast<R>((1 - above.f) / static_cast<double>(count - above.count));
  R lift = std::pow(q, power.b);
  // Less than a normal number's digits would lead q astray, and counts for nothing.
  constexpr R kLeast = std::numeric_limits<R>::min();
  for (R step = q; above.count > 0 && lift >= kLeast && step > kTiny * q;) {
    const PowerSums sums = Evaluate<false>(power, edge, z, count, lift);
    step = static_cast<R>((sums.f - 1) / sums.slope) / lift * q;
    q = std::min(q, q - step);
    lift = std::pow(q, power.b);
  }
  // No less than what keeps the edge in the support, if q^b is too small for a number.
  return {edge, -std::max(lift, kLeast), q};
}

template <class P, class R>
Threshold<R> Solve(const P& power, R low, R* z, std::size_t count) {
  if constexpr (P::steep) return FromEdge(power, low, z, count);
  return Rise(power, low, z, count, power.tolerance);
}

// Some number between `low` and the threshold, closer to the latter.
template <class P, class R>
R RoughSolve(const P& power, R low, R* z, std::size_t count) {
  if constexpr (P::steep) {
    const Threshold<R> threshold = FromEdge(power, low, z, count);
    return threshold.theta + threshold.rest * power.inverse;
  }
  return Rise(power, low, z, count, kRough).theta;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

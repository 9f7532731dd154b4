// The steps of solve-inl.hpp for rows that lie in the lanes of vectors, or whose sums do.

#if defined(PULLBACK_ENTMAX_SOLVE_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_SOLVE_LANES_INL_HPP
#undef PULLBACK_ENTMAX_SOLVE_LANES_INL_HPP
#else
#define PULLBACK_ENTMAX_SOLVE_LANES_INL_HPP
#endif

#include <cmath>
#include <cstddef>
#include <limits>

#include "ops/entmax/cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class R>
using LaneTag = hn::ScalableTag<R>;
template <class R>
using Lane = hn::Vec<LaneTag<R>>;
template <class R>
inline constexpr std::size_t kLanes = hn::MaxLanes(LaneTag<R>());

// With what steps and bounds take of it. Not for single rows, which may have an alpha each: tables
// take longer to make than their steps.
template <Family kFamily, class R>
class LanePower : public Power<kFamily, R> {
 public:
  const R half_to_b;  // 2^(1 - alpha)

  explicit LanePower(double alpha)
      : Power<kFamily, R>(alpha),
        half_to_b(static_cast<R>(std::exp2(1 - alpha))),
        powers_(alpha - 1) {}

  // f - f^(1-b), by its series where that has more digits; not that far where f < 1/2.
  template <class D>
  HWY_INLINE hn::Vec<D> Over(D d, hn::Vec<D> f, hn::Vec<D> inverse_f) const {
    const auto one = hn::Set(d, R{1}), least = hn::Set(d, R{0.51});
    const auto power = powers_.OfLarge(d, hn::Min(inverse_f, hn::Div(one, least)));
    const auto far = hn::NegMulAdd(f, power, f);
    const auto more = hn::Sub(f, one);
    auto series = hn::Set(d, (this->b + 2) / 4);
    series = hn::NegMulAdd(series, more, one);
    series = hn::NegMulAdd(hn::Mul(series, more), hn::Set(d, (1 + this->b) / 3), one);
    series = hn::MulAdd(hn::Mul(series, more), hn::Set(d, (1 - this->b) / 2), one);
    series = hn::Mul(hn::Mul(series, more), hn::Set(d, this->b));
    return hn::IfThenElse(hn::Lt(hn::Abs(more), hn::Set(d, R{0.06})), series, far);
  }

 private:
  PowersOf<kFamily, R> powers_;
};

// Sums over the elements of each row that are active at its theta.
template <class R>
struct LaneSums {
  Lane<R> f, slope;  // of sparsemax: the sum of z, and how many they are
  Lane<R> bend;      // if Power::curved; of sparsemax: the least z
};

template <class P, class R>
HWY_INLINE LaneSums<R> EvaluateLanes(const P& power, Lane<R> theta, const R* HWY_RESTRICT z,
                                     std::size_t count) {
  const LaneTag<R> d;
  const auto zero = hn::Zero(d);
  LaneSums<R> sums{zero, zero, zero};
  auto lost = zero;  // what f has rounded off, block by block
  auto least0 = zero, least1 = zero, least2 = zero, least3 = zero;  // z <= 0
  const auto add = [&](std::size_t i, auto& first, auto& second, auto& least) HWY_ATTR {
    const auto v = hn::LoadU(d, z + i * kLanes<R>);
    if constexpr (P::family == Family::sparsemax) {
      const auto active = hn::Gt(v, theta);
      first = hn::IfThenElse(active, hn::Add(first, v), first);
      second = hn::IfThenElse(active, hn::Add(second, hn::Set(d, R{1})), second);
      least = hn::IfThenElse(active, hn::Min(least, v), least);
    } else {
      const auto excess = power.Excess(d, v, theta);
      const auto both = power.Both(d, excess);
      first = hn::Add(first, both.value);
      second = hn::Add(second, both.slope);
      if constexpr (P::family == Family::general) sums.bend = hn::Add(sums.bend, both.bend);
    }
  };
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t end = std::min(count, begin + kSumVectors);
    auto f0 = zero, f1 = zero, f2 = zero, f3 = zero;
    auto slope0 = zero, slope1 = zero, slope2 = zero, slope3 = zero;
    // A power takes longer than the sums: one chain of those will do, and its constants keep their
    // registers.
    constexpr bool kCheap = P::family == Family::sparsemax || P::family == Family::entmax15;
    for (; kCheap && begin + 4 <= end; begin += 4) {
      add(begin, f0, slope0, least0);
      add(begin + 1, f1, slope1, least1);
      add(begin + 2, f2, slope2, least2);
      add(begin + 3, f3, slope3, least3);
    }
    for (; begin < end; ++begin) add(begin, f0, slope0, least0);
    const auto part = hn::Add(hn::Add(f0, f1), hn::Add(f2, f3)), f = hn::Add(sums.f, part);
    lost = hn::Add(lost, hn::Sub(part, hn::Sub(f, sums.f)));
    sums.f = f;
    sums.slope = hn::Add(sums.slope, hn::Add(hn::Add(slope0, slope1), hn::Add(slope2, slope3)));
  }
  sums.f = hn::Add(sums.f, lost);
  if constexpr (P::family == Family::sparsemax) {
    sums.bend = hn::Min(hn::Min(least0, least1), hn::Min(least2, least3));
  }
  return sums;
}

// Power::Step, and by how much of itself it falls short of the root for the curvature of f^b, as
// far as that is known (a step of Chebyshev's method).
template <class R>
struct LaneMove {
  Lane<R> step, shortfall;
};
template <class P, class R>
HWY_INLINE LaneMove<R> LaneStep(const P& power, const LaneSums<R>& sums) {
  const LaneTag<R> d;
  const auto b = hn::Set(d, power.b), one = hn::Set(d, R{1});
  const auto inverse = hn::Div(one, sums.slope);  // beside the power, not after it
  if constexpr (P::near_one) {
    const auto less = hn::Expm1(d, hn::Neg(hn::Mul(b, hn::Log(d, sums.f))));
    return {hn::Neg(hn::Mul(hn::Div(hn::Mul(less, sums.f), b), inverse)), hn::Zero(d)};
  }
  if constexpr (P::family == Family::entmax15) {
    return {hn::Mul(hn::Sub(sums.f, hn::Sqrt(sums.f)), inverse), hn::Zero(d)};
  }
  if constexpr (P::family == Family::general) {
    const auto inverse_f = hn::Div(one, sums.f);
    const auto over = power.Over(d, sums.f, inverse_f);
    const auto bend = hn::MulSub(hn::Mul(sums.bend, inverse), inverse, inverse_f);
    const auto half = hn::Set(d, power.curved ? (power.inverse - 1) / 2 : R{0});
    return {hn::Mul(over, inverse), hn::Mul(hn::Mul(half, over), bend)};
  }
}

// A lower bound of the threshold of n elements, a power of two, whose z add up to `sum`, by
// Jensen's inequality.
template <class R, class P>
HWY_INLINE Lane<R> MeanBound(const P& power, Lane<R> sum, std::size_t n) {
  const LaneTag<R> d;
  const auto start = hn::Set(d, P::start);
  if constexpr (P::near_one) return start;
  R equal = 1;  // n^-b
  for (std::size_t k = n; k > 1; k /= 2) equal *= power.half_to_b;
  const auto share = hn::Set(d, power.b / static_cast<R>(n));
  return hn::Max(start, hn::MulSub(share, sum, hn::Set(d, equal)));
}

template <class R>
struct LaneThreshold {
  Lane<R> theta, rest, scale;  // as in Threshold
};

// Rows that settle take fewer.
inline constexpr int kFreeSteps = 8;

// `theta` is a lower bound of each row's root. evaluate(theta, open) returns LaneSums<R>, of which
// the open rows count. Rows that are done wait for the others.
template <class R, class P, class Evaluate>
LaneThreshold<R> SolveLanes(const P& power, Lane<R> theta, hn::Mask<LaneTag<R>> open,
                            double tolerance, const Evaluate& evaluate) {
  const LaneTag<R> d;
  const auto one = hn::Set(d, R{1});
  auto lost = hn::Zero(d), scale = one;
  if constexpr (P::family == Family::sparsemax) {
    while (true) {
      const LaneSums<R> sums = evaluate(theta, open);
      const auto next = hn::Div(hn::Sub(sums.f, one), sums.slope);
      const auto moves = hn::Gt(next, theta);
      theta = hn::IfThenElse(moves, next, theta);
      // Those that none of the summands is lost by are done, too.
      const auto loses = hn::And(moves, hn::Le(sums.bend, theta));
      if (hn::AllFalse(d, loses)) return {theta, lost, scale};
    }
  } else {
    // Not for bounds, which must stay below the root.
    const bool curved = power.curved && tolerance <= power.tolerance;
    const auto close = hn::Set(d, static_cast<R>(curved ? power.curved_tolerance : tolerance));
    const auto epsilon = hn::Set(d, std::numeric_limits<R>::epsilon());
    const auto tiny = hn::Set(d, 4 * std::numeric_limits<R>::epsilon());
    const auto descent = hn::Set(d, power.near_one ? R{1} : power.inverse);
    const auto third = hn::Set(d, power.inverse * (power.inverse - 1) * (power.inverse - 2) / 6);
    // Below this, an error that does not shrink is that of the sums.
    const auto rounding = hn::Set(d, std::sqrt(std::numeric_limits<R>::epsilon()));
    auto last_error = hn::Set(d, std::numeric_limits<R>::infinity());
    for (int number = 0;; ++number) {
      const LaneSums<R> sums = evaluate(theta, open);
      auto [step, shortfall] = LaneStep<P, R>(power, sums);
      const auto error = hn::Abs(hn::Sub(sums.f, one));  // a curved step may pass the root
      auto far = hn::Gt(error, close);
      if (curved) {
        // The third terms: of the series that these two begin, and of f, where the sum of
        // excess^(1/b - 3) is about bend^2 / slope.
        const auto squared = hn::Mul(error, hn::Mul(shortfall, shortfall));
        const auto moved = hn::Mul(step, sums.bend);
        const auto cubed = hn::Div(hn::Mul(hn::Abs(step), hn::Mul(moved, moved)), sums.slope);
        far = hn::Or(far, hn::Gt(hn::MulAdd(third, cubed, squared), epsilon));
        const auto most = hn::Set(d, R{0.5});
        step = hn::MulAdd(step, hn::Min(hn::Max(shortfall, hn::Neg(most)), most), step);
      }
      // Steps may swing between neighbours of the root for ever. After kFreeSteps theta only rises.
      const auto passed = hn::Lt(sums.f, number < kFreeSteps ? hn::Zero(d) : one);
      step = hn::IfThenZeroElse(passed, step);
      const auto root = hn::Add(theta, step);
      const auto rest = hn::Sub(step, hn::Sub(root, theta));
      const auto f =
          hn::IfThenElse(passed, sums.f, hn::MulAdd(hn::Mul(rest, descent), sums.slope, one));
      theta = hn::IfThenElse(open, root, theta);
      lost = hn::IfThenElse(open, rest, lost);
      scale = hn::IfThenElse(open, hn::Div(one, f), scale);
      const auto moves = hn::Gt(hn::Abs(step), hn::Mul(tiny, hn::Abs(root)));
      const auto shrinks = hn::Or(hn::Lt(error, last_error), hn::Gt(error, rounding));
      open = hn::And(hn::And(open, shrinks), hn::And(far, moves));
      last_error = error;
      if (hn::AllFalse(d, open)) return {theta, lost, scale};
    }
  }
}

// The same where all elements of all rows are in vectors: z[0, count * lanes).
template <class R, class P>
LaneThreshold<R> SolveLanes(const P& power, Lane<R> theta, const R* z, std::size_t count,
                            double tolerance) {
  return SolveLanes<R>(power, theta, hn::Eq(theta, theta), tolerance,
                       [&](Lane<R> at, hn::Mask<LaneTag<R>>)
                           HWY_ATTR { return EvaluateLanes(power, at, z, count); });
}

// A bound must not drop an element of the support: this covers the rounding of its sums.
template <class R, class P>
HWY_INLINE Lane<R> SafeBound(const P&, Lane<R> bound) {
  const LaneTag<R> d;
  constexpr R kSlack = 16 * std::numeric_limits<R>::epsilon();
  return hn::Max(hn::Set(d, P::start), hn::Sub(bound, hn::Set(d, kSlack)));
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

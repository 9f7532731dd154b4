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

// Sums over the elements of each row that are active at its theta.
template <class R>
struct LaneSums {
  Lane<R> f, slope;  // of sparsemax: the sum of z, and how many they are
  Lane<R> bend;      // if Power::curved; of sparsemax: the least z
};

// With what steps and bounds take of it. Not for single rows: tables take longer to make than their
// steps.
template <Family kFamily, class R>
class LanePower : public Power<kFamily, R> {
 public:
  static constexpr bool of_rows = false;

  explicit LanePower(double alpha)
      : Power<kFamily, R>(alpha),
        half_to_b_(static_cast<R>(std::exp2(1 - alpha))),
        powers_(alpha - 1) {}

  // What each row may have of its own.
  HWY_INLINE Lane<R> b_lanes() const { return hn::Set(LaneTag<R>(), this->b); }
  HWY_INLINE Lane<R> inverse_lanes() const { return hn::Set(LaneTag<R>(), this->inverse); }
  HWY_INLINE Lane<R> half_to_b() const { return hn::Set(LaneTag<R>(), half_to_b_); }  // 2^-b
  HWY_INLINE const LanePower& OfRow(std::size_t) const { return *this; }
  double TauOf(std::size_t, R max, R theta, R rest) const { return this->Tau(max, theta, rest); }

  // x^b for 0 <= x < 2.
  HWY_INLINE Lane<R> RaisedToB(Lane<R> x) const { return powers_.OfLarge(LaneTag<R>(), x); }

 private:
  R half_to_b_;
  PowersOf<kFamily, R> powers_;
};

// The same of rows that have an alpha each, from kLeastAlpha to 2: a lane of every number is a
// row's, and powers go by logarithms.
template <class R>
class RowsPower {
 public:
  static constexpr Family family = Family::general;
  static constexpr bool of_rows = true, near_one = false, steep = false, uses_rest = true;
  static constexpr bool curved = false;
  static constexpr R start = -1;
  static constexpr double kLeastAlpha = 1.125;

  // `alphas` has one for each lane.
  explicit RowsPower(const R* alphas)
      : b_(hn::Sub(hn::LoadU(LaneTag<R>(), alphas), hn::Set(LaneTag<R>(), R{1}))),
        exponent_(hn::Sub(hn::Div(hn::Set(LaneTag<R>(), R{1}), b_), hn::Set(LaneTag<R>(), R{1}))),
        tolerance(Power<Family::general, R>::ToleranceOf(
            static_cast<double>(*std::max_element(alphas, alphas + kLanes<R>)))),
        curved_tolerance(tolerance) {}

  HWY_INLINE Lane<R> b_lanes() const { return b_; }
  HWY_INLINE Lane<R> inverse_lanes() const {
    return hn::Add(exponent_, hn::Set(LaneTag<R>(), R{1}));
  }
  HWY_INLINE Lane<R> half_to_b() const {
    const LaneTag<R> d;
    return ExpNonPositive(d, hn::Mul(b_, hn::Set(d, static_cast<R>(-0.6931471805599453))));
  }
  // Every lane is of that row.
  HWY_INLINE RowsPower OfRow(std::size_t k) const {
    const LaneTag<R> d;
    RowsPower power = *this;
    power.b_ = hn::Set(d, LaneOf(b_, k));
    power.exponent_ = hn::Set(d, LaneOf(exponent_, k));
    return power;
  }
  double TauOf(std::size_t k, R max, R theta, R rest) const {
    return static_cast<double>(LaneOf(b_, k)) * static_cast<double>(max) +
           (static_cast<double>(theta) + static_cast<double>(rest));
  }
  HWY_INLINE Lane<R> RaisedToB(Lane<R> x) const {
    const LaneTag<R> d;
    return hn::Exp(d, hn::Mul(b_, hn::Log(d, x)));
  }

  // As of Power.
  template <class D>
  HWY_INLINE hn::Vec<D> Excess(D, hn::Vec<D> z, hn::Vec<D> theta) const {
    return hn::MulSub(b_, z, theta);
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Active(D d, hn::Vec<D> excess) const {
    return hn::Gt(excess, hn::Zero(d));
  }
  struct Summands {
    Lane<R> value, slope, bend;
  };
  HWY_INLINE Summands Both(LaneTag<R> d, Lane<R> excess) const {
    const auto base = hn::Max(excess, hn::Set(d, std::numeric_limits<R>::min()));
    const auto slope = hn::IfThenElseZero(Active(d, excess), PowerOfFraction(d, base, exponent_));
    return {hn::Mul(slope, base), slope, slope};
  }
  HWY_INLINE Lane<R> Value(LaneTag<R> d, Lane<R> excess) const { return Both(d, excess).value; }

 private:
  static R LaneOf(Lane<R> v, std::size_t k) {
    HWY_ALIGN R lanes[kLanes<R>];
    hn::Store(v, LaneTag<R>(), lanes);
    return lanes[k];
  }

  Lane<R> b_, exponent_;  // 1 / b - 1

 public:
  double tolerance, curved_tolerance;
};

// f - f^(1-b), by its series where that has more digits. Where f < 1/2, b (f - 1), whose step, one
// on f itself and not on f^b, leads below the root, too.
template <class R, class P>
HWY_INLINE Lane<R> Over(const P& power, Lane<R> f, Lane<R> inverse_f) {
  const LaneTag<R> d;
  const auto one = hn::Set(d, R{1}), least = hn::Set(d, R{0.51}), b = power.b_lanes();
  const auto more = hn::Sub(f, one), b_more = hn::Mul(more, b);
  const auto raised = power.RaisedToB(hn::Min(inverse_f, hn::Set(d, 1 / R{0.51})));
  const auto far = hn::IfThenElse(hn::Lt(f, least), b_more, hn::NegMulAdd(f, raised, f));
  auto series = hn::MulAdd(b, hn::Set(d, R{0.25}), hn::Set(d, R{0.5}));
  series = hn::NegMulAdd(series, more, one);
  series =
      hn::NegMulAdd(hn::Mul(series, more), hn::Mul(hn::Add(b, one), hn::Set(d, R{1} / 3)), one);
  series = hn::MulAdd(hn::Mul(series, more), hn::Mul(hn::Sub(one, b), hn::Set(d, R{0.5})), one);
  series = hn::Mul(series, b_more);
  return hn::IfThenElse(hn::Lt(hn::Abs(more), hn::Set(d, R{0.06})), series, far);
}

// z_of(i) is a vector of elements i.
template <class R, class P, class Elements>
HWY_INLINE LaneSums<R> EvaluateLanesOf(const P& power, Lane<R> theta, std::size_t count,
                                       const Elements& z_of) {
  const LaneTag<R> d;
  const auto zero = hn::Zero(d);
  LaneSums<R> sums{zero, zero, zero};
  auto lost = zero;  // what f has rounded off, block by block
  auto least0 = zero, least1 = zero, least2 = zero, least3 = zero;  // z <= 0
  const auto add = [&](std::size_t i, auto& first, auto& second, auto& least) HWY_ATTR {
    const auto v = z_of(i);
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
    if constexpr (kCheap) {
      f0 = hn::Add(hn::Add(f0, f1), hn::Add(f2, f3));
      slope0 = hn::Add(hn::Add(slope0, slope1), hn::Add(slope2, slope3));
    }
    const auto f = hn::Add(sums.f, f0);
    lost = hn::Add(lost, hn::Sub(f0, hn::Sub(f, sums.f)));
    sums.f = f;
    sums.slope = hn::Add(sums.slope, slope0);
  }
  sums.f = hn::Add(sums.f, lost);
  if constexpr (P::family == Family::sparsemax) {
    sums.bend = hn::Min(hn::Min(least0, least1), hn::Min(least2, least3));
  }
  return sums;
}

template <class P, class R>
HWY_INLINE LaneSums<R> EvaluateLanes(const P& power, Lane<R> theta, const R* HWY_RESTRICT z,
                                     std::size_t count) {
  const LaneTag<R> d;
  return EvaluateLanesOf<R>(
      power, theta, count, [&](std::size_t i) HWY_ATTR { return hn::LoadU(d, z + i * kLanes<R>); });
}

// Power::Step, and by how much of itself it falls short of the root for the curvature of f^b, as
// far as that is known (a step of Chebyshev's method).
template <class R>
struct LaneMove {
  Lane<R> step, shortfall;
  Lane<R> inverse;  // of the slope
};
template <class P, class R>
HWY_INLINE LaneMove<R> LaneStep(const P& power, const LaneSums<R>& sums) {
  const LaneTag<R> d;
  const auto b = power.b_lanes(), one = hn::Set(d, R{1});
  const auto inverse = hn::Div(one, sums.slope);  // beside the power, not after it
  if constexpr (P::near_one) {
    const auto less = hn::Expm1(d, hn::Neg(hn::Mul(b, hn::Log(d, sums.f))));
    return {hn::Neg(hn::Mul(hn::Div(hn::Mul(less, sums.f), b), inverse)), hn::Zero(d), inverse};
  }
  if constexpr (P::family == Family::entmax15) {
    return {hn::Mul(hn::Sub(sums.f, hn::Sqrt(sums.f)), inverse), hn::Zero(d), inverse};
  }
  if constexpr (P::family == Family::general) {
    const auto inverse_f = hn::Div(one, sums.f);
    const auto over = Over<R>(power, sums.f, inverse_f);
    const auto bend = hn::MulSub(hn::Mul(sums.bend, inverse), inverse, inverse_f);
    const auto half =
        hn::Mul(hn::Sub(power.inverse_lanes(), one), hn::Set(d, power.curved ? R{0.5} : R{0}));
    return {hn::Mul(over, inverse), hn::Mul(hn::Mul(half, over), bend), inverse};
  }
}

// n^-b of a power of two.
template <class R, class P>
HWY_INLINE Lane<R> EqualExcess(const P& power, std::size_t n) {
  const auto half = power.half_to_b();
  auto equal = hn::Set(LaneTag<R>(), R{1});
  for (std::size_t k = n; k > 1; k /= 2) equal = hn::Mul(equal, half);
  return equal;
}

// A lower bound of the threshold of n elements, a power of two, whose z add up to `sum`, by
// Jensen's inequality.
template <class R, class P>
HWY_INLINE Lane<R> MeanBound(const P& power, Lane<R> sum, std::size_t n) {
  const LaneTag<R> d;
  const auto start = hn::Set(d, P::start);
  if constexpr (P::near_one) return start;
  const auto share = hn::Mul(power.b_lanes(), hn::Set(d, 1 / static_cast<R>(n)));
  return hn::Max(start, hn::MulSub(share, sum, EqualExcess<R>(power, n)));
}

// About the threshold of such elements, the squares of whose z add up to `squares`. With u the mean
// excess and v its variance, f is about n u^(1/b) (1 + (1/b) (1/b - 1) / 2 v / u^2): 1 where
// u = n^-b / (1 + (1/b - 1) / 2 v / u^2), of which two rounds are taken.
template <class R, class P>
HWY_INLINE Lane<R> SpreadStart(const P& power, Lane<R> sum, Lane<R> squares, std::size_t n) {
  const LaneTag<R> d;
  const auto start = hn::Set(d, P::start), one = hn::Set(d, R{1});
  if constexpr (P::near_one) return start;
  const auto equal = EqualExcess<R>(power, n), b = power.b_lanes();
  const auto share = hn::Mul(b, hn::Set(d, 1 / static_cast<R>(n)));
  const auto mean = hn::Mul(share, sum);
  const auto variance = hn::NegMulAdd(mean, mean, hn::Mul(hn::Mul(share, b), squares));
  const auto half = hn::Mul(hn::Sub(power.inverse_lanes(), one), hn::Set(d, R{0.5}));
  const auto times = hn::Mul(variance, hn::Div(half, hn::Mul(equal, equal)));
  const auto first = hn::Add(times, one);  // n^-b / u after a round
  const auto excess = hn::Div(equal, hn::MulAdd(hn::Mul(times, first), first, one));
  const auto theta = hn::Sub(mean, excess);
  return hn::IfThenElse(hn::Gt(theta, start), theta, start);  // a NaN is not
}

template <class R>
struct LaneThreshold {
  Lane<R> theta, rest, scale;  // as in Threshold
};

// Rows that settle take fewer.
inline constexpr int kFreeSteps = 8;

// The rows of the lanes on their way to the roots, from `start`. Rows that are done wait for the
// others. Not of sparsemax.
template <class R, class P>
class LaneSolver {
 public:
  HWY_INLINE LaneSolver(const P& power, Lane<R> start, hn::Mask<LaneTag<R>> open, double tolerance)
      : power_(power),
        // Not for bounds, which must stay below the root.
        curved_(power.curved && tolerance <= power.tolerance),
        tolerance_(static_cast<R>(curved_ ? power.curved_tolerance : tolerance)),
        theta_(start),
        open_(open) {
    const LaneTag<R> d;
    lost_ = hn::Zero(d);
    scale_ = hn::Set(d, R{1});
    last_error_ = hn::Set(d, std::numeric_limits<R>::infinity());
  }

  HWY_INLINE Lane<R> theta() const { return theta_; }
  HWY_INLINE hn::Mask<LaneTag<R>> open() const { return open_; }
  HWY_INLINE LaneThreshold<R> threshold() const { return {theta_, lost_, scale_}; }

  // Takes a step from the sums at theta(). False when all rows are done.
  HWY_INLINE bool Step(const LaneSums<R>& sums) {
    const LaneTag<R> d;
    constexpr R kEpsilon = std::numeric_limits<R>::epsilon();
    const auto one = hn::Set(d, R{1});
    auto [step, shortfall, inverse] = LaneStep<P, R>(power_, sums);
    const auto error = hn::Abs(hn::Sub(sums.f, one));  // a curved step may pass the root
    auto far = hn::Gt(error, hn::Set(d, tolerance_));
    if (curved_) {
      // The third terms: of the series that these two begin, and of f, where the sum of
      // excess^(1/b - 3) is about bend^2 / slope.
      const auto q = power_.inverse_lanes(), two = hn::Set(d, R{2});
      const auto third =
          hn::Mul(hn::Mul(hn::Mul(q, hn::Set(d, R{1} / 6)), hn::Sub(q, one)), hn::Sub(q, two));
      const auto squared = hn::Mul(error, hn::Mul(shortfall, shortfall));
      const auto moved = hn::Mul(step, sums.bend);
      const auto cubed = hn::Mul(hn::Mul(hn::Abs(step), hn::Mul(moved, moved)), inverse);
      const auto both = hn::MulAdd(third, cubed, squared);
      far = hn::Or(far, hn::Gt(both, hn::Set(d, kEpsilon)));
      const auto most = hn::Set(d, R{0.5});
      step = hn::MulAdd(step, hn::Min(hn::Max(shortfall, hn::Neg(most)), most), step);
    }
    // Steps may swing between neighbours of the root for ever. After kFreeSteps theta only rises.
    const auto passed = hn::Lt(sums.f, steps_++ < kFreeSteps ? hn::Zero(d) : one);
    step = hn::IfThenZeroElse(passed, step);
    auto root = hn::Add(theta_, step);
    // From above the root a step may lead far below, where powers are not defined.
    if constexpr (P::family == Family::general) root = hn::Max(root, hn::Set(d, P::start));
    const auto rest = hn::Sub(step, hn::Sub(root, theta_));
    theta_ = hn::IfThenElse(open_, root, theta_);
    lost_ = hn::IfThenElse(open_, rest, lost_);
    if constexpr (!P::uses_rest) {
      const auto descent = P::near_one ? one : power_.inverse_lanes();
      const auto f =
          hn::IfThenElse(passed, sums.f, hn::MulAdd(hn::Mul(rest, descent), sums.slope, one));
      scale_ = hn::IfThenElse(open_, hn::Div(one, f), scale_);
    }
    const auto moves = hn::Gt(hn::Abs(step), hn::Mul(hn::Set(d, 4 * kEpsilon), hn::Abs(root)));
    // Below this, an error that does not shrink is that of the sums.
    const auto rounding = hn::Set(d, std::sqrt(kEpsilon));
    const auto shrinks = hn::Or(hn::Lt(error, last_error_), hn::Gt(error, rounding));
    open_ = hn::And(hn::And(open_, shrinks), hn::And(far, moves));
    last_error_ = error;
    return !hn::AllFalse(d, open_);
  }

 private:
  const P& power_;
  const bool curved_;
  const R tolerance_;
  int steps_ = 0;
  Lane<R> theta_, lost_, scale_, last_error_;
  hn::Mask<LaneTag<R>> open_;
};

// evaluate(theta, open) returns LaneSums<R>, of which the open rows count. Of sparsemax `theta` has
// to be a lower bound of each row's root.
template <class R, class P, class Evaluate>
LaneThreshold<R> SolveLanes(const P& power, Lane<R> theta, hn::Mask<LaneTag<R>> open,
                            double tolerance, const Evaluate& evaluate) {
  const LaneTag<R> d;
  if constexpr (P::family == Family::sparsemax) {
    const auto one = hn::Set(d, R{1});
    while (true) {
      const LaneSums<R> sums = evaluate(theta, open);
      const auto next = hn::Div(hn::Sub(sums.f, one), sums.slope);
      const auto moves = hn::Gt(next, theta);
      theta = hn::IfThenElse(moves, next, theta);
      // Those that none of the summands is lost by are done, too.
      const auto loses = hn::And(moves, hn::Le(sums.bend, theta));
      if (hn::AllFalse(d, loses)) return {theta, hn::Zero(d), one};
    }
  } else {
    LaneSolver<R, P> solver(power, theta, open, tolerance);
    while (solver.Step(evaluate(solver.theta(), solver.open()))) {
    }
    return solver.threshold();
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

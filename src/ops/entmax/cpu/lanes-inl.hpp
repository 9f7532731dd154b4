// Rows in the lanes: a vector holds one element each of as many rows, and all steps of
// solve-inl.hpp are taken for those rows together. What a row costs besides its elements, the
// latency of a dozen dependent steps, is so shared. Short rows get there by transposition, rows
// that lie across neighbouring columns by plain loads.

#if defined(PULLBACK_ENTMAX_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_LANES_INL_HPP
#undef PULLBACK_ENTMAX_LANES_INL_HPP
#else
#define PULLBACK_ENTMAX_LANES_INL_HPP
#endif

#include "ops/entmax/cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class R>
using LaneTag = hn::ScalableTag<R>;
template <class R>
using Lane = hn::Vec<LaneTag<R>>;
template <class R>
inline constexpr std::size_t kLanes = hn::MaxLanes(LaneTag<R>());

// --- Transposition ---

#if HWY_TARGET != HWY_SCALAR
// v[k] lane i becomes v[i] lane k, in each 16-byte block.
template <class D>
HWY_INLINE void TransposeBlocks(D d, hn::Vec<D>* v) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    const auto a = v[0];
    v[0] = hn::InterleaveLower(d, a, v[1]);
    v[1] = hn::InterleaveUpper(d, a, v[1]);
  } else {
    const hn::RepartitionToWide<D> wide;
    const auto low01 = hn::BitCast(wide, hn::InterleaveLower(d, v[0], v[1]));
    const auto low23 = hn::BitCast(wide, hn::InterleaveLower(d, v[2], v[3]));
    const auto up01 = hn::BitCast(wide, hn::InterleaveUpper(d, v[0], v[1]));
    const auto up23 = hn::BitCast(wide, hn::InterleaveUpper(d, v[2], v[3]));
    v[0] = hn::BitCast(d, hn::InterleaveLower(wide, low01, low23));
    v[1] = hn::BitCast(d, hn::InterleaveUpper(wide, low01, low23));
    v[2] = hn::BitCast(d, hn::InterleaveLower(wide, up01, up23));
    v[3] = hn::BitCast(d, hn::InterleaveUpper(wide, up01, up23));
  }
}

// A vector of 16-byte blocks, `step` elements apart.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const hn::TFromD<D>* from, std::int64_t step) {
  constexpr std::size_t kBlock = 16 / sizeof(hn::TFromD<D>);
  if constexpr (hn::MaxLanes(d) <= kBlock) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    constexpr auto kHalf = static_cast<std::int64_t>(hn::MaxLanes(half) / kBlock);
    return hn::Combine(d, LoadBlocks(half, from + kHalf * step, step),
                       LoadBlocks(half, from, step));
  }
}
template <class D>
HWY_INLINE void StoreBlocks(D d, hn::Vec<D> v, hn::TFromD<D>* to, std::int64_t step) {
  constexpr std::size_t kBlock = 16 / sizeof(hn::TFromD<D>);
  if constexpr (hn::MaxLanes(d) <= kBlock) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    constexpr auto kHalf = static_cast<std::int64_t>(hn::MaxLanes(half) / kBlock);
    StoreBlocks(half, hn::LowerHalf(half, v), to, step);
    StoreBlocks(half, hn::UpperHalf(half, v), to + kHalf * step, step);
  }
}

#endif

// Element i of kLanes rows to vector i.
template <class R>
void RowsToLanes(const R* from, std::int64_t row_step, std::size_t length, R* HWY_RESTRICT to) {
  [[maybe_unused]] const LaneTag<R> d;
  std::size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  constexpr std::size_t kBlock = 16 / sizeof(R);
  for (const std::size_t end = length / kBlock * kBlock; i < end; i += kBlock) {
    Lane<R> v[kBlock];
    for (std::size_t k = 0; k < kBlock; ++k) {
      // Lane k of block b is row b * kBlock + k.
      v[k] = LoadBlocks(
          d, from + static_cast<std::int64_t>(k) * row_step + static_cast<std::int64_t>(i),
          row_step * static_cast<std::int64_t>(kBlock));
    }
    TransposeBlocks(d, v);
    for (std::size_t k = 0; k < kBlock; ++k) hn::StoreU(v[k], d, to + (i + k) * kLanes<R>);
  }
#endif
  for (; i < length; ++i) {
    for (std::size_t r = 0; r < kLanes<R>; ++r) {
      to[i * kLanes<R> + r] =
          from[static_cast<std::int64_t>(r) * row_step + static_cast<std::int64_t>(i)];
    }
  }
}

template <class R>
void LanesToRows(const R* HWY_RESTRICT from, std::size_t length, R* to, std::int64_t row_step) {
  [[maybe_unused]] const LaneTag<R> d;
  std::size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  constexpr std::size_t kBlock = 16 / sizeof(R);
  for (const std::size_t end = length / kBlock * kBlock; i < end; i += kBlock) {
    Lane<R> v[kBlock];
    for (std::size_t k = 0; k < kBlock; ++k) v[k] = hn::LoadU(d, from + (i + k) * kLanes<R>);
    TransposeBlocks(d, v);
    for (std::size_t k = 0; k < kBlock; ++k) {
      StoreBlocks(d, v[k],
                  to + static_cast<std::int64_t>(k) * row_step + static_cast<std::int64_t>(i),
                  row_step * static_cast<std::int64_t>(kBlock));
    }
  }
#endif
  for (; i < length; ++i) {
    for (std::size_t r = 0; r < kLanes<R>; ++r) {
      to[static_cast<std::int64_t>(r) * row_step + static_cast<std::int64_t>(i)] =
          from[i * kLanes<R> + r];
    }
  }
}

// Adds up the lanes of each of kLanes vectors; row k's sum is lane k.
template <class R>
HWY_INLINE Lane<R> SumsOfRows(const R* rows) {
  const LaneTag<R> d;
  HWY_ALIGN R lanes[kLanes<R> * kLanes<R>];
  RowsToLanes(rows, static_cast<std::int64_t>(kLanes<R>), kLanes<R>, lanes);
  auto sum = hn::Load(d, lanes);
  for (std::size_t k = 1; k < kLanes<R>; ++k)
    sum = hn::Add(sum, hn::Load(d, lanes + k * kLanes<R>));
  return sum;
}

// --- The threshold ---

// Sums over the elements of each row that are active at its theta.
template <class R>
struct LaneSums {
  Lane<R> f, slope;  // of sparsemax: the sum of z, and how many they are
  Lane<R> bend;      // if Power::curved
};

template <class P, class R>
HWY_INLINE LaneSums<R> EvaluateLanes(const P& power, Lane<R> theta, const R* HWY_RESTRICT z,
                                     std::size_t count) {
  const LaneTag<R> d;
  const auto zero = hn::Zero(d);
  LaneSums<R> sums{zero, zero, zero};
  auto lost = zero;  // what f has rounded off, block by block
  const auto add = [&](std::size_t i, auto& first, auto& second) HWY_ATTR {
    const auto v = hn::LoadU(d, z + i * kLanes<R>);
    if constexpr (P::family == Family::sparsemax) {
      const auto active = hn::Gt(v, theta);
      first = hn::IfThenElse(active, hn::Add(first, v), first);
      second = hn::IfThenElse(active, hn::Add(second, hn::Set(d, R{1})), second);
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
      add(begin, f0, slope0);
      add(begin + 1, f1, slope1);
      add(begin + 2, f2, slope2);
      add(begin + 3, f3, slope3);
    }
    for (; begin < end; ++begin) add(begin, f0, slope0);
    const auto part = hn::Add(hn::Add(f0, f1), hn::Add(f2, f3)), f = hn::Add(sums.f, part);
    lost = hn::Add(lost, hn::Sub(part, hn::Sub(f, sums.f)));
    sums.f = f;
    sums.slope = hn::Add(sums.slope, hn::Add(hn::Add(slope0, slope1), hn::Add(slope2, slope3)));
  }
  sums.f = hn::Add(sums.f, lost);
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
  const auto inverse_f = hn::Div(one, sums.f);
  // f - f^(1-b)
  const auto over = hn::NegMulAdd(sums.f, PowerOfFraction(d, inverse_f, b), sums.f);
  const auto bend = hn::MulSub(hn::Mul(sums.bend, inverse), inverse, inverse_f);
  const auto half = hn::Set(d, power.curved ? (power.inverse - 1) / 2 : R{0});
  return {hn::Mul(over, inverse), hn::Mul(hn::Mul(half, over), bend)};
}

// A lower bound of the threshold of n elements whose z add up to `sum`, by Jensen's inequality.
template <class R, class P>
HWY_INLINE Lane<R> MeanBound(const P& power, Lane<R> sum, std::size_t n) {
  const LaneTag<R> d;
  const auto start = hn::Set(d, P::start);
  if constexpr (P::near_one) return start;
  const auto b = hn::Set(d, power.b), one_of_n = hn::Set(d, 1 / static_cast<R>(n));
  const auto equal = P::family == Family::sparsemax ? one_of_n : PowerOfFraction(d, one_of_n, b);
  return hn::Max(start, hn::MulSub(hn::Mul(b, one_of_n), sum, equal));
}

template <class R>
struct LaneThreshold {
  Lane<R> theta, rest, scale;  // as in Threshold
};

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
      if (hn::AllFalse(d, moves)) return {theta, lost, scale};
      theta = hn::IfThenElse(moves, next, theta);
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
    while (true) {
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
      const auto root = hn::Add(theta, step);
      const auto rest = hn::Sub(step, hn::Sub(root, theta));
      const auto f = hn::MulAdd(hn::Mul(rest, descent), sums.slope, one);
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

// --- Rows ---

// kLanes rows of x in `x`, an element each in a vector. y takes their place.
template <class R>
class LaneRows {
 public:
  static constexpr std::size_t kBounds = 32;  // parts, whose maxima bound a long row's threshold
  static constexpr std::size_t kMinLengthForBound = 256;

  // `candidates` has room for as many vectors as `x`.
  LaneRows(R* x, std::size_t length, R* candidates, bool wants_size)
      : x_(x), length_(length), candidates_(candidates), wants_size_(wants_size) {}

  HWY_ALIGN R max[kLanes<R>];
  HWY_ALIGN double tau[kLanes<R>];
  HWY_ALIGN R size[kLanes<R>];  // of the support, a whole number

  // The maxima, of a long row's parts too. False if a row has none that is finite, or a NaN.
  bool FindMax() {
    const LaneTag<R> d;
    const R* const x = x_;
    const std::size_t length = length_;
    const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
    const bool whole = length < kMinLengthForBound;
    const std::size_t part = whole ? length : (length + kBounds - 1) / kBounds;
    auto highest = lowest;
    auto nan = hn::IsNaN(lowest);
    const auto take = [&](std::size_t i, auto& best) HWY_ATTR {
      const auto v = hn::LoadU(d, x + i * kLanes<R>);
      best = hn::Max(best, v);
      nan = hn::Or(nan, hn::IsNaN(v));
    };
    parts_ = 0;
    for (std::size_t i = 0; i < length; ++parts_) {
      auto m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
      const std::size_t end = std::min(length, i + part);
      for (; i + 4 <= end; i += 4) {
        take(i, m0);
        take(i + 1, m1);
        take(i + 2, m2);
        take(i + 3, m3);
      }
      for (; i < end; ++i) take(i, m0);
      const auto best = hn::Max(hn::Max(m0, m1), hn::Max(m2, m3));
      if (whole) {
        const auto low = hn::Add(hn::Sub(m0, best), hn::Sub(m1, best));
        hn::Store(hn::Add(low, hn::Add(hn::Sub(m2, best), hn::Sub(m3, best))), d, four_);
      }
      hn::Store(best, d, part_max_ + parts_ * kLanes<R>);
      highest = hn::Max(highest, best);
    }
    hn::Store(highest, d, max);
    return hn::AllTrue(d, hn::IsFinite(highest)) && hn::AllFalse(d, nan);
  }

  template <class P>
  void Compute(const P& power) {
    if constexpr (P::family == Family::softmax) {
      Softmax();
    } else {
      Sparse(power);
    }
  }

 private:
  template <class P>
  void Sparse(const P& power) {
    const LaneTag<R> d;
    // Compilers take stores of vectors for stores to members.
    R *const x = x_, *const candidates = candidates_;
    const std::size_t length = length_;
    const bool wants_size = wants_size_;
    const auto shift = hn::Load(d, max);
    auto theta = hn::Set(d, power.start);
    std::size_t count = 0;
    if (length >= kMinLengthForBound) {
      theta = Bound(power);
      for (std::size_t i = 0; i < length; ++i) {
        // Stored always, kept where it is a candidate of some row.
        const auto z = hn::Sub(hn::LoadU(d, x + i * kLanes<R>), shift);
        hn::StoreU(z, d, candidates + count * kLanes<R>);
        const auto active = power.Active(d, power.Excess(d, z, theta));
        count += hn::AllFalse(d, active) ? 0 : 1;
      }
    } else {
      theta = SafeBound<R>(power, MeanBound<R>(power, hn::Load(d, four_), 4));
      for (; count < length; ++count) {
        const auto z = hn::Sub(hn::LoadU(d, x + count * kLanes<R>), shift);
        hn::StoreU(z, d, candidates + count * kLanes<R>);
      }
    }
    const auto [at, rest, scale] = SolveLanes(power, theta, candidates, count, power.tolerance);
    auto support = hn::Zero(d);
    for (std::size_t i = 0; i < length; ++i) {
      const auto z = hn::Sub(hn::LoadU(d, x + i * kLanes<R>), shift);
      auto excess = power.Excess(d, z, at);
      if constexpr (P::uses_rest) excess = hn::Sub(excess, rest);
      const auto active = power.Active(d, excess);
      if (wants_size) support = hn::Add(support, hn::IfThenElseZero(active, hn::Set(d, R{1})));
      auto y = hn::Zero(d);
      if constexpr (P::family == Family::sparsemax) {
        y = power.Value(d, excess);
      } else if (P::family == Family::entmax15 || !hn::AllFalse(d, active)) {
        y = power.Value(d, excess);
        if constexpr (!P::uses_rest) y = hn::Mul(scale, y);
      }
      hn::StoreU(y, d, x + i * kLanes<R>);
    }
    hn::Store(support, d, size);
    HWY_ALIGN R thresholds[kLanes<R>];
    HWY_ALIGN R rests[kLanes<R>];
    hn::Store(at, d, thresholds);
    hn::Store(rest, d, rests);
    for (std::size_t k = 0; k < kLanes<R>; ++k) tau[k] = power.Tau(max[k], thresholds[k], rests[k]);
  }

  // Lower bounds of the thresholds, from the maxima of parts of the rows, which it uses up.
  template <class P>
  Lane<R> Bound(const P& power) {
    const LaneTag<R> d;
    const auto shift = hn::Load(d, max);
    for (std::size_t i = 0; i < parts_ * kLanes<R>; i += kLanes<R>) {
      hn::Store(hn::Sub(hn::Load(d, part_max_ + i), shift), d, part_max_ + i);
    }
    const auto start = hn::Set(d, power.start);
    return SafeBound<R>(power, SolveLanes<R>(power, start, part_max_, parts_, kRough).theta);
  }

  void Softmax() {
    const LaneTag<R> d;
    const auto shift = hn::Load(d, max);
    auto sum = hn::Zero(d), lost = sum, support = sum;
    for (std::size_t i = 0; i < length_;) {
      auto part = hn::Zero(d);
      for (const std::size_t end = std::min(length_, i + kSumVectors); i < end; ++i) {
        const auto v = hn::LoadU(d, x_ + i * kLanes<R>);
        const auto e = ExpNonPositive(d, hn::Sub(v, shift));
        part = hn::Add(part, e);
        hn::StoreU(e, d, x_ + i * kLanes<R>);
        if (!wants_size_) continue;  // all but -inf, also where exp underflows
        const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
        support = hn::Add(support, hn::IfThenElseZero(hn::Gt(v, lowest), hn::Set(d, R{1})));
      }
      const auto next = hn::Add(sum, part);
      lost = hn::Add(lost, hn::Sub(part, hn::Sub(next, sum)));
      sum = next;
    }
    sum = hn::Add(sum, lost);
    const auto scale = hn::Div(hn::Set(d, R{1}), sum);
    for (std::size_t i = 0; i < length_; ++i) {
      hn::StoreU(hn::Mul(scale, hn::LoadU(d, x_ + i * kLanes<R>)), d, x_ + i * kLanes<R>);
    }
    hn::Store(support, d, size);
    HWY_ALIGN R logs[kLanes<R>];
    hn::Store(hn::Log(d, sum), d, logs);
    for (std::size_t k = 0; k < kLanes<R>; ++k) {
      tau[k] = static_cast<double>(max[k]) + static_cast<double>(logs[k]);
    }
  }

  R* x_;
  std::size_t length_;
  R* candidates_;
  bool wants_size_;
  std::size_t parts_ = 0;
  HWY_ALIGN R part_max_[kBounds * kLanes<R>];
  HWY_ALIGN R four_[kLanes<R>];  // of a short row: the sum of z of the maxima of four parts
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

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

#include <algorithm>
#include <limits>

#include "ops/entmax/cpu/solve_lanes-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// Up to this length, rows are computed in the lanes.
constexpr std::int64_t kLaneLength = 128;

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

// A 16-byte block each to rows `row_step` elements apart, one after the other: block b of v[k] to
// row b times as many as a block has elements + k.
template <class D>
HWY_INLINE void StoreRows(D d, const hn::Vec<D>* v, hn::TFromD<D>* to, std::int64_t row_step) {
  constexpr std::size_t kBlock = 16 / sizeof(hn::TFromD<D>);
  if constexpr (hn::MaxLanes(d) <= kBlock) {
    for (std::size_t k = 0; k < kBlock; ++k) {
      hn::StoreU(v[k], d, to + static_cast<std::int64_t>(k) * row_step);
    }
  } else {
    const hn::Half<D> half;
    hn::Vec<decltype(half)> lower[kBlock], upper[kBlock];
    for (std::size_t k = 0; k < kBlock; ++k) {
      lower[k] = hn::LowerHalf(half, v[k]);
      upper[k] = hn::UpperHalf(half, v[k]);
    }
    StoreRows(half, lower, to, row_step);
    StoreRows(half, upper, to + static_cast<std::int64_t>(hn::MaxLanes(half)) * row_step, row_step);
  }
}

#endif

// Elements 0 to 3 of kLanes rows to vectors 0 to 3.
template <class R>
HWY_INLINE void FourToLanes(const R* from, [[maybe_unused]] std::int64_t row_step, Lane<R>* v) {
  const LaneTag<R> d;
  constexpr std::size_t kBlock = HWY_TARGET == HWY_SCALAR ? 1 : 16 / sizeof(R);
  for (std::size_t i = 0; i < 4; i += kBlock) {
    for (std::size_t k = 0; k < kBlock; ++k) {
      // Lane k of block b is row b * kBlock + k.
#if HWY_TARGET == HWY_SCALAR
      v[i + k] = hn::LoadU(d, from + i + k);
#else
      v[i + k] = LoadBlocks(d, from + static_cast<std::int64_t>(k) * row_step + i,
                            row_step * static_cast<std::int64_t>(kBlock));
#endif
    }
#if HWY_TARGET != HWY_SCALAR
    TransposeBlocks(d, v + i);
#endif
  }
}

// Elements value(i) of kLanes rows to rows side by side. Writes up to three elements past them.
template <class R, class Value>
HWY_INLINE void LanesToRows(std::size_t length, R* HWY_RESTRICT to, const Value& value) {
  const LaneTag<R> d;
  constexpr std::size_t kBlock = HWY_TARGET == HWY_SCALAR ? 1 : 16 / sizeof(R);
  // From the end: what the last block has beyond its row is overwritten by the first of the next.
  for (std::size_t i = (length + kBlock - 1) / kBlock * kBlock; i > 0;) {
    i -= kBlock;
    Lane<R> v[kBlock];
    for (std::size_t k = 0; k < kBlock; ++k) v[k] = value(std::min(i + k, length - 1));
#if HWY_TARGET == HWY_SCALAR
    hn::StoreU(v[0], d, to + i);
#else
    TransposeBlocks(d, v);
    StoreRows(d, v, to + i, static_cast<std::int64_t>(length));
#endif
  }
}

// Calls take(i, v) for elements i to i + 3 of kLanes rows in vectors v[0] to v[3], those past the
// end of the rows as -inf; up to three elements past the last row are read.
template <class R, class Take>
HWY_INLINE void ForEachFourInLanes(const R* from, std::int64_t row_step, std::size_t length,
                                   const Take& take) {
  const LaneTag<R> d;
  Lane<R> v[4];
  std::size_t i = 0;
  for (; i + 4 <= length; i += 4) {
    FourToLanes(from + i, row_step, v);
    take(i, v);
  }
  if (i == length) return;
  FourToLanes(from + i, row_step, v);
  const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
  for (std::size_t k = length - i; k < 4; ++k) v[k] = lowest;
  take(i, v);
}

// Element i of kLanes rows to vector i; `to` has room for a multiple of four.
template <class R>
void RowsToLanes(const R* from, std::int64_t row_step, std::size_t length, R* HWY_RESTRICT to) {
  const LaneTag<R> d;
  ForEachFourInLanes(from, row_step, length, [&](std::size_t i, const Lane<R>* v) HWY_ATTR {
    for (std::size_t k = 0; k < 4; ++k) hn::StoreU(v[k], d, to + (i + k) * kLanes<R>);
  });
}

// kLanes rows as numbers of the arithmetic, `step` apart: the rows themselves, or copies of them,
// which have something behind them.
template <class T>
struct ShortRowsToRead {
  using R = Real<T>;

  HWY_INLINE ShortRowsToRead(const T* first, std::int64_t row_step, std::size_t length) {
    if (std::is_same_v<T, R> && length % 4 == 0) {
      from = reinterpret_cast<const R*>(first);
      step = row_step;
      return;
    }
    from = copy;
    step = static_cast<std::int64_t>(length);
    const bool adjacent = row_step == step;
    for (std::size_t k = 0; k < (adjacent ? 1 : kLanes<R>); ++k) {
      Copy(first + static_cast<std::int64_t>(k) * row_step, length * (adjacent ? kLanes<R> : 1),
           copy + k * length);
    }
  }

  const R* from;
  std::int64_t step;

 private:
  static void Copy(const T* x, std::size_t count, R* to) {
    const LaneTag<R> d;
    std::size_t i = 0;
    for (; i + kLanes<R> <= count; i += kLanes<R>) hn::StoreU(Load(d, x + i), d, to + i);
    if (i < count) hn::StoreU(LoadFirst(d, x + i, count - i), d, to + i);
  }

  HWY_ALIGN R copy[(kLaneLength + 1) * kLanes<R>];
};

// Such rows, of the arithmetic and side by side, to where they belong.
template <class T>
void WriteRows(const Real<T>* from, std::size_t length, T* to, std::int64_t row_step, bool stream) {
  using R = Real<T>;
  const LaneTag<R> d;
  const bool adjacent = row_step == static_cast<std::int64_t>(length);
  for (std::size_t k = 0; k < (adjacent ? 1 : kLanes<R>); ++k, from += length, to += row_step) {
    WriteRow(to, length * (adjacent ? kLanes<R> : 1), stream,
             [&](T* part, std::size_t begin, std::size_t count, auto store) HWY_ATTR {
               std::size_t i = 0;
               for (; i + kLanes<R> <= count; i += kLanes<R>) {
                 store(d, hn::LoadU(d, from + begin + i), part + i);
               }
               if (i == count) return;
               StoreFirst(d, hn::LoadU(d, from + begin + i), part + i, count - i);
             });
  }
}

// Lane k is what op, such as Add, makes of the lanes of vector row(kFirst + k). Pairs of vectors
// become one until a single one is left: each holds cells with one lane for each of its rows.
template <std::size_t kFirst, std::size_t kCount, class D, class Row, class Op>
HWY_INLINE hn::Vec<D> CombineRows([[maybe_unused]] D d, const Row& row,
                                  [[maybe_unused]] const Op& op) {
  if constexpr (kCount == 1) {
    return row(kFirst);
  } else {
#if HWY_TARGET != HWY_SCALAR  // where there is one row
    using R = hn::TFromD<D>;
    constexpr std::size_t kCell = kCount / 2;
    const auto a = CombineRows<kFirst, kCell>(d, row, op);
    const auto b = CombineRows<kFirst + kCell, kCell>(d, row, op);
    if constexpr (kCell * sizeof(R) < sizeof(double)) {
      return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    } else if constexpr (kCell * sizeof(R) < 16) {
      const hn::Repartition<double, D> wide;
      const auto a2 = hn::BitCast(wide, a), b2 = hn::BitCast(wide, b);
      return op(hn::BitCast(d, hn::InterleaveLower(wide, a2, b2)),
                hn::BitCast(d, hn::InterleaveUpper(wide, a2, b2)));
    } else if constexpr (kCount == hn::MaxLanes(d)) {
      return op(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
    } else {
      return op(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
    }
#endif
  }
}
struct AddLanes {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};
struct MaxLanesOf {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
};

struct MinLanesOf {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Min(a, b);
  }
};

// Adds up the lanes of each of kLanes vectors; row k's sum is lane k.
template <class R>
HWY_INLINE Lane<R> SumsOfRows(const R* rows) {
  const LaneTag<R> d;
  return CombineRows<0, kLanes<R>>(
      d, [&](std::size_t k) HWY_ATTR { return hn::Load(d, rows + k * kLanes<R>); }, AddLanes());
}

// --- Rows ---

// Of kLanes rows. rest and scale as in Threshold.
template <class R>
struct SolvedLanes {
  HWY_ALIGN R max[kLanes<R>];
  HWY_ALIGN R theta[kLanes<R>];
  HWY_ALIGN R rest[kLanes<R>];
  HWY_ALIGN R scale[kLanes<R>];
};

// kLanes rows, an element each in a vector.
template <class R>
class LaneRows : public SolvedLanes<R> {
 public:
  static constexpr std::size_t kFewParts = 8, kMostParts = 32;

  // A row is cut in parts, whose maxima bound its threshold.
  static std::size_t Parts(std::size_t length) { return length < 256 ? kFewParts : kMostParts; }

  HWY_ALIGN R part_max[kMostParts * kLanes<R>];  // to be set before Solve()
  // scale is, of softmax, 1 / the sum of exp(x - max)
  using SolvedLanes<R>::max, SolvedLanes<R>::theta, SolvedLanes<R>::rest, SolvedLanes<R>::scale;

  // False if a row has no element that is finite.
  bool SetMax(std::size_t length) {
    const LaneTag<R> d;
    parts_ = Parts(length);
    auto highest = hn::Load(d, part_max);
    for (std::size_t i = 1; i < parts_; ++i) {
      highest = hn::Max(highest, hn::Load(d, part_max + i * kLanes<R>));
    }
    hn::Store(highest, d, max);
    return hn::AllTrue(d, hn::IsFinite(highest));
  }

  // Finds theta, rest and scale of the rows in x; `candidates` has room for as many vectors. The
  // exponentials of softmax take the place of x.
  template <class P>
  void Solve(const P& power, R* HWY_RESTRICT x, std::size_t length, R* HWY_RESTRICT candidates) {
    const LaneTag<R> d;
    if constexpr (P::family == Family::softmax) {
      SumExponentials(x, length);
    } else {
      const auto shift = hn::Load(d, max);
      std::size_t count = 0;
      const auto start = Start(power, length);
      if (parts_ < kMostParts) {
        for (; count < length; ++count) {
          const auto z = hn::Sub(hn::LoadU(d, x + count * kLanes<R>), shift);
          hn::StoreU(z, d, candidates + count * kLanes<R>);
        }
        return Set(SolveLanes(power, start, candidates, count, power.tolerance));
      }
      for (std::size_t i = 0; i < length; ++i) {
        // Stored always, kept where it is a candidate of some row.
        const auto z = hn::Sub(hn::LoadU(d, x + i * kLanes<R>), shift);
        hn::StoreU(z, d, candidates + count * kLanes<R>);
        const auto active = power.Active(d, power.Excess(d, z, start));
        count += hn::AllFalse(d, active) ? 0 : 1;
      }
      Set(SolveLanes(power, start, candidates, count, power.tolerance));
    }
  }

  // The same of short rows, where z takes the place of x. Not of sparsemax and softmax.
  template <class P>
  void SolveShort(const P& power, R* x, std::size_t length) {
    const auto start = Start(power, length);
    LaneSolver<R, P> solver(power, start, hn::Eq(start, start), power.tolerance);
    bool open = solver.Step(EvaluateFirst(power, start, x, length));
    while (open) open = solver.Step(EvaluateLanes(power, solver.theta(), x, length));
    Set(solver.threshold());
  }
  // And of two times as many: the steps of the ones hide behind the sums of the others.
  template <class P>
  static void SolveShort(const P& power, LaneRows& a, R* x_a, LaneRows& b, R* x_b,
                         std::size_t length) {
    const auto start_a = a.Start(power, length), start_b = b.Start(power, length);
    const auto all = hn::Eq(start_a, start_a);
    LaneSolver<R, P> solver_a(power, start_a, all, power.tolerance);
    LaneSolver<R, P> solver_b(power, start_b, all, power.tolerance);
    bool open_a = solver_a.Step(a.EvaluateFirst(power, start_a, x_a, length));
    bool open_b = solver_b.Step(b.EvaluateFirst(power, start_b, x_b, length));
    while (open_a || open_b) {
      if (open_a) open_a = solver_a.Step(EvaluateLanes(power, solver_a.theta(), x_a, length));
      if (open_b) open_b = solver_b.Step(EvaluateLanes(power, solver_b.theta(), x_b, length));
    }
    a.Set(solver_a.threshold());
    b.Set(solver_b.threshold());
  }

  // y of the rows' elements v, which Solve() found in x or has put there.
  template <class P>
  HWY_INLINE Lane<R> Value(const P& power, Lane<R> v) const {
    const LaneTag<R> d;
    if constexpr (P::family == Family::softmax) {
      return hn::Mul(v, hn::Load(d, scale));
    } else {
      return ValueOfShifted(power, hn::Sub(v, hn::Load(d, max)));
    }
  }
  // And of what SolveShort() has put there.
  template <class P>
  HWY_INLINE Lane<R> ValueOfShifted(const P& power, Lane<R> z) const {
    const LaneTag<R> d;
    auto excess = power.Excess(d, z, hn::Load(d, theta));
    if constexpr (P::uses_rest) excess = hn::Sub(excess, hn::Load(d, rest));
    constexpr bool kCheap = P::family == Family::sparsemax || P::family == Family::entmax15;
    if (!kCheap && hn::AllFalse(d, power.Active(d, excess))) return hn::Zero(d);
    const auto p = power.Value(d, excess);
    return P::uses_rest || P::family == Family::sparsemax ? p : hn::Mul(p, hn::Load(d, scale));
  }

  // tau of the rows.
  template <class P>
  void Tau(const P& power, double* tau) const {
    const LaneTag<R> d;
    if constexpr (P::family == Family::softmax) {
      HWY_ALIGN R logs[kLanes<R>];
      hn::Store(hn::Log(d, hn::Load(d, scale)), d, logs);
      for (std::size_t k = 0; k < kLanes<R>; ++k) {
        tau[k] = static_cast<double>(max[k]) - static_cast<double>(logs[k]);
      }
    } else {
      for (std::size_t k = 0; k < kLanes<R>; ++k)
        tau[k] = power.TauOf(k, max[k], theta[k], rest[k]);
    }
  }

 private:
  // Of x, which becomes z.
  template <class P>
  HWY_INLINE LaneSums<R> EvaluateFirst(const P& power, Lane<R> at, R* x, std::size_t length) {
    const LaneTag<R> d;
    const auto shift = hn::Load(d, max);
    const auto z_of = [&](std::size_t i) HWY_ATTR {
      const auto z = hn::Sub(hn::LoadU(d, x + i * kLanes<R>), shift);
      hn::StoreU(z, d, x + i * kLanes<R>);
      return z;
    };
    if constexpr (P::family == Family::general) {
      // Stores beside powers would keep their tables out of the registers.
      for (std::size_t i = 0; i < length; ++i) z_of(i);
      return EvaluateLanes(power, at, x, length);
    }
    return EvaluateLanesOf<R>(power, at, length, z_of);
  }

  void Set(const LaneThreshold<R>& found) {
    const LaneTag<R> d;
    hn::Store(found.theta, d, theta);
    hn::Store(found.rest, d, rest);
    hn::Store(found.scale, d, scale);
  }

  // Where to begin, from the maxima of parts of the rows, which become z: of long rows lower bounds
  // of the thresholds.
  template <class P>
  Lane<R> Start(const P& power, std::size_t length) {
    const LaneTag<R> d;
    const auto shift = hn::Load(d, max);
    if (parts_ < kMostParts) {
      std::size_t parts = kFewParts;
      const auto part = [&](std::size_t i)
                            HWY_ATTR { return hn::Load(d, part_max + i * kLanes<R>); };
      if (P::family == Family::sparsemax || length < kFewParts) {
        parts /= 2;
        for (std::size_t i = 0; i < parts; ++i) {
          hn::Store(hn::Max(part(i), part(i + parts)), d, part_max + i * kLanes<R>);
        }
      }
      auto sum = hn::Zero(d), squares = sum;
      for (std::size_t i = 0; i < parts; ++i) {
        const auto z = hn::Sub(part(i), shift);
        sum = hn::Add(sum, z);
        squares = hn::MulAdd(z, z, squares);
      }
      return SpreadStart<R>(power, sum, squares, parts);
    }
    for (std::size_t i = 0; i < parts_ * kLanes<R>; i += kLanes<R>) {
      hn::Store(hn::Sub(hn::Load(d, part_max + i), shift), d, part_max + i);
    }
    const auto start = hn::Set(d, power.start);
    return SafeBound<R>(power, SolveLanes<R>(power, start, part_max, parts_, kRough).theta);
  }

  void SumExponentials(R* HWY_RESTRICT x, std::size_t length) {
    const LaneTag<R> d;
    const auto shift = hn::Load(d, max);
    auto sum = hn::Zero(d), lost = sum;
    for (std::size_t i = 0; i < length;) {
      auto part = hn::Zero(d);
      for (const std::size_t end = std::min(length, i + kSumVectors); i < end; ++i) {
        const auto e = ExpNonPositive(d, hn::Sub(hn::LoadU(d, x + i * kLanes<R>), shift));
        part = hn::Add(part, e);
        hn::StoreU(e, d, x + i * kLanes<R>);
      }
      const auto next = hn::Add(sum, part);
      lost = hn::Add(lost, hn::Sub(part, hn::Sub(next, sum)));
      sum = next;
    }
    hn::Store(hn::Div(hn::Set(d, R{1}), hn::Add(sum, lost)), d, scale);
  }

  std::size_t parts_ = 0;
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

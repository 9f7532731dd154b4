// What ColumnScan does with rows: one rule for each kind of reduction.

#if defined(PULLBACK_SEGMENT_SCAN_RULES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SCAN_RULES_INL_HPP
#undef PULLBACK_SEGMENT_SCAN_RULES_INL_HPP
#else
#define PULLBACK_SEGMENT_SCAN_RULES_INL_HPP
#endif

#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/extreme-inl.hpp"
#include "ops/segment/cpu/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// What some rows of a segment are folded to, as in State of task-inl.hpp.
template <class R, class B>
struct Folded {
  R a;
  B b;
};

// How rows are walked. Powers are rows of which exp(row - shift) was taken for a shift of the
// block. What is ordinary is up to the rule; else it has to be any.
enum class Walk { powers, ordinary, any };

// x where a segment starts, else sum + x. Each step of a walk waits for the one before: where lanes
// have masks, for one instruction.
template <class V, class M>
HWY_INLINE V AddAfterStart(M starts, V sum, V x) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (sizeof(hn::TFromV<V>) == 4) {
    return V{_mm512_mask_add_ps(x.raw, hn::Not(starts).raw, sum.raw, x.raw)};
  } else {
    return V{_mm512_mask_add_pd(x.raw, hn::Not(starts).raw, sum.raw, x.raw)};
  }
#else
  return hn::IfThenElse(starts, x, hn::Add(sum, x));
#endif
}

// A rule takes a row into each lane's state (a, b), or begins anew with it where `starts` holds,
// and it joins states. Rows are Ordinary() if their sum is. Of a rule
//   kTwo      there is a b
//   kPlaces   it is a row
//   kPowers   rows may be powers
//   kGroups   it folds groups (group-inl.hpp), too

template <class R>
struct SumRule {
  using B = Int<R>;
  static constexpr bool kTwo = false, kPlaces = false, kPowers = false, kGroups = true;

  template <class D>
  static HWY_INLINE bool Ordinary(D, hn::Vec<D>) {
    return true;
  }
  template <Walk, class D, class DB>
  static HWY_INLINE void Step(D, hn::Vec<D> x, hn::Mask<D> starts, hn::Vec<hn::RebindToSigned<D>>,
                              hn::Vec<D>& a, hn::Vec<DB>&) {
    a = AddAfterStart(starts, a, x);
  }
  template <class D, class DB>
  static HWY_INLINE void JoinLanes(D, hn::Vec<D>& a, hn::Vec<DB>&, hn::Vec<D> later_a,
                                   hn::Vec<DB>) {
    a = hn::Add(a, later_a);
  }
};

// b = row.
template <class R, bool kMax, bool kLast>
struct ExtremeRule {
  using B = Int<R>;
  static constexpr bool kTwo = true, kPlaces = true, kPowers = false, kGroups = true;

  template <class D>
  static HWY_INLINE bool Ordinary(D d, hn::Vec<D> sum) {
    return hn::AllFalse(d, hn::IsNaN(sum));
  }
  template <Walk kWalk, class D, class DB>
  static HWY_INLINE void Step(D, hn::Vec<D> x, hn::Mask<D> starts, hn::Vec<DB> row, hn::Vec<D>& a,
                              hn::Vec<DB>& b) {
    auto beats = hn::Or(starts, Beats<kMax, kLast>(x, a));
    if constexpr (kWalk == Walk::any) beats = hn::Or(beats, hn::AndNot(hn::IsNaN(a), hn::IsNaN(x)));
    // What Max and Min return of two zeros.
    constexpr bool kSecondOfEqual =
        HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128;
    if constexpr (kWalk == Walk::ordinary && kSecondOfEqual) {
      // The next step waits for no comparison.
      const auto first = kLast ? a : x, second = kLast ? x : a;
      a = hn::IfThenElse(starts, x, kMax ? hn::Max(first, second) : hn::Min(first, second));
    } else {
      a = hn::IfThenElse(beats, x, a);
    }
    b = hn::IfThenElse(hn::RebindMask(DB(), beats), row, b);
  }
  template <class D, class DB>
  static HWY_INLINE void JoinLanes(D d, hn::Vec<D>& a, hn::Vec<DB>& b, hn::Vec<D> later_a,
                                   hn::Vec<DB> later_b) {
    Step<Walk::any, D, DB>(d, later_a, hn::FirstN(d, 0), later_b, a, b);
  }
  // The same of a group of segments of x without NaN.
  template <class Group>
  static HWY_INLINE void TakeGroup(const Group& group, R* HWY_RESTRICT a, B* HWY_RESTRICT b) {
    const hn::ScalableTag<R> d;
    const auto extremes = group.template Fold<false>(kMax ? -kInf<R> : kInf<R>, [](auto v, auto w) {
      return kMax ? hn::Max(v, w) : hn::Min(v, w);
    });
    hn::StoreU(extremes, d, a);
    group.template Places<kLast>(a, b);
    // Of two zeros Max and Min may have chosen the other one.
    if (hn::AllFalse(d, hn::Eq(extremes, hn::Zero(d)))) return;
    for (std::int64_t k = 0; k < static_cast<std::int64_t>(hn::Lanes(d)); ++k) {
      if (a[k] == 0) a[k] = group.row(k, b[k]);
    }
  }
  static std::int64_t PlaceIn(const R* run, std::int64_t rows) {
    return PlaceOfExtreme<kMax, kLast>(run, rows);
  }
};

// b = how many rows are the extreme.
template <class R, bool kMax>
struct TiesRule {
  using B = Int<R>;
  static constexpr bool kTwo = true, kPlaces = false, kPowers = false, kGroups = false;

  template <class D>
  static HWY_INLINE bool Ordinary(D d, hn::Vec<D> sum) {
    return hn::AllFalse(d, hn::IsNaN(sum));
  }
  template <Walk kWalk, class D, class DB>
  static HWY_INLINE void Step(D, hn::Vec<D> x, hn::Mask<D> starts, hn::Vec<hn::RebindToSigned<D>>,
                              hn::Vec<D>& a, hn::Vec<DB>& b) {
    Count<kWalk, D, DB>(x, hn::Set(DB(), 1), starts, a, b);
  }
  template <class D, class DB>
  static HWY_INLINE void JoinLanes(D d, hn::Vec<D>& a, hn::Vec<DB>& b, hn::Vec<D> later_a,
                                   hn::Vec<DB> later_b) {
    Count<Walk::any, D, DB>(later_a, later_b, hn::FirstN(d, 0), a, b);
  }

 private:
  template <Walk kWalk, class D, class DB>
  static HWY_INLINE void Count(hn::Vec<D> x, hn::Vec<DB> rows, hn::Mask<D> starts, hn::Vec<D>& a,
                               hn::Vec<DB>& b) {
    auto beats = hn::Or(starts, Beats<kMax, false>(x, a));
    auto ties = hn::Eq(x, a);
    if constexpr (kWalk == Walk::any) {
      beats = hn::Or(beats, hn::AndNot(hn::IsNaN(a), hn::IsNaN(x)));
      ties = hn::Or(ties, hn::And(hn::IsNaN(a), hn::IsNaN(x)));
    }
    const auto sum = hn::Add(b, hn::IfThenElseZero(hn::RebindMask(DB(), ties), rows));
    a = hn::IfThenElse(beats, x, a);
    b = hn::IfThenElse(hn::RebindMask(DB(), beats), rows, sum);
  }
};

// The product is a + b: b has what the roundings of a lose, as far as there is a fused
// multiply-add.
template <class R>
struct ProductRule {
  using B = R;
  static constexpr bool kTwo = true, kPlaces = false, kPowers = false, kGroups = false;

  template <class D>
  static HWY_INLINE bool Ordinary(D, hn::Vec<D>) {
    return true;
  }
  template <Walk, class D, class DB>
  static HWY_INLINE void Step(D d, hn::Vec<D> x, hn::Mask<D> starts, hn::Vec<hn::RebindToSigned<D>>,
                              hn::Vec<D>& a, hn::Vec<D>& b) {
    JoinLanes<D, DB>(d, a, b, x, hn::Zero(d));
    a = hn::IfThenElse(starts, x, a);
    b = hn::IfThenZeroElse(starts, b);
  }
  template <class D, class DB>
  static HWY_INLINE void JoinLanes(D, hn::Vec<D>& a, hn::Vec<D>& b, hn::Vec<D> later_a,
                                   hn::Vec<D> later_b) {
    const auto product = hn::Mul(a, later_a);
    const auto lost = hn::MulSub(a, later_a, product);
    b = hn::MulAdd(b, later_a, hn::MulAdd(a, later_b, lost));
    a = product;
  }
  static void Finish(R* HWY_RESTRICT a, const R* HWY_RESTRICT b, std::int64_t count) {
    const hn::ScalableTag<R> d;
    ForColumns<R>(count, [&](auto lanes, std::int64_t k) {
      const auto product = lanes.Read(d, a + k);
      // Of infinities nothing is lost, but b is NaN; of zeros neither, but -0 + 0 is 0.
      const auto loses = hn::And(hn::IsFinite(product), hn::Ne(product, hn::Zero(d)));
      const auto whole = hn::Add(product, lanes.Read(d, b + k));
      lanes.Write(d, hn::IfThenElse(loses, whole, product), a + k);
    });
  }
};

// (a, b) = LogSum.
template <class R>
struct LogSumRule {
  using B = R;
  static constexpr bool kTwo = true, kPlaces = false, kPowers = true, kGroups = true;

  template <class D>
  static HWY_INLINE bool Ordinary(D d, hn::Vec<D> sum) {
    return hn::AllTrue(d, hn::IsFinite(sum));
  }
  template <Walk kWalk, class D, class DB>
  static HWY_INLINE void Step(D d, hn::Vec<D> x, hn::Mask<D> starts, hn::Vec<hn::RebindToSigned<D>>,
                              hn::Vec<D>& a, hn::Vec<D>& b) {
    const auto one = hn::Set(d, R{1});
    if constexpr (kWalk == Walk::powers) {
      b = AddAfterStart(starts, b, x);  // and a is the shift already
    } else if constexpr (kWalk == Walk::any) {
      a = hn::IfThenElse(starts, hn::Set(d, -kInf<R>), a);
      b = hn::IfThenZeroElse(starts, b);
      JoinLogSum(d, a, b, x, one);
    } else {
      // One exponential: of the two that a sum needs, one is exp(0).
      const auto less = hn::Sub(x, a);
      const auto power = ExpOfNonPositive(d, hn::Neg(hn::Abs(less)));
      const auto rises = hn::Gt(less, hn::Zero(d));
      const auto sum = hn::IfThenElse(rises, hn::MulAdd(b, power, one), hn::Add(b, power));
      a = hn::IfThenElse(starts, x, hn::Max(a, x));
      b = hn::IfThenElse(starts, one, sum);
    }
  }
  static void Finish(R* a, R* b, std::int64_t count) { FinishLogSum(LogSum<R>{a, b}, count); }
  template <class D, class DB>
  static HWY_INLINE void JoinLanes(D d, hn::Vec<D>& a, hn::Vec<D>& b, hn::Vec<D> later_a,
                                   hn::Vec<D> later_b) {
    if (hn::AllTrue(d, hn::Eq(a, later_a))) {  // powers of one shift
      b = hn::Add(b, later_b);
    } else {
      JoinLogSum(d, a, b, later_a, later_b);
    }
  }
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

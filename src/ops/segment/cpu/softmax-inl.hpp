// logsumexp and softmax: exponentials, the state of rows that are folded, and all at once of a few
// rows.

#if defined(PULLBACK_SEGMENT_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SOFTMAX_INL_HPP
#undef PULLBACK_SEGMENT_SOFTMAX_INL_HPP
#else
#define PULLBACK_SEGMENT_SOFTMAX_INL_HPP
#endif

#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// exp of -87 <= x <= 87; meaningless for others. In f32 within 2 ulp: with n = round(x / ln 2) and
// r = x - n ln 2, exp(r) = 1 + r + r^2 p(r) where p is a minimax fit on |r| <= ln 2 / 2 with an
// error of 2^-28, and 2^n goes to the exponent.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNear(D d, hn::Vec<D> x) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::Exp(d, x);
  } else {
    const hn::RebindToSigned<D> di;
    const auto magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23 leaves n in the lowest bits
    const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
    const auto n = hn::Sub(shifted, magic);
    // ln 2 in two parts, the first with so few bits that its product with n is exact.
    auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
    r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
    auto p = hn::MulAdd(hn::Set(d, 1.38145476e-3f), r, hn::Set(d, 8.36874824e-3f));
    p = hn::MulAdd(p, r, hn::Set(d, 4.16683927e-2f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.66665196e-1f));
    p = hn::MulAdd(p, r, hn::Set(d, 4.99999940e-1f));
    p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
    return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  }
}

// What some x are shifted by, given the first, before powers are taken of them: 0 where that will
// do, so that no digits are lost to the difference nor by shift + log(sum) where that is near 0.
template <class D>
HWY_INLINE hn::Vec<D> NearShift(D d, hn::Vec<D> first) {
  return hn::IfThenElseZero(hn::Gt(hn::Abs(first), hn::Set(d, hn::TFromD<D>{32})), first);
}

// Whether all of some x are so near their shift that x - shift is exact, as it is up to half the
// shift, and sums of powers stay finite. NaN is not.
template <class D>
class Nearness {
  using R = hn::TFromD<D>;
  using DI = hn::RebindToSigned<D>;

 public:
  HWY_INLINE Nearness() : farthest_(hn::Zero(DI())) {}
  HWY_INLINE void Add(hn::Vec<D> x) {
    // As integers, among which NaN is the largest.
    farthest_ = hn::Max(farthest_, hn::BitCast(DI(), hn::Abs(x)));
  }
  HWY_INLINE bool All(hn::Vec<D> shift) const {
    const D d;
    const auto half = hn::Mul(hn::Abs(shift), hn::Set(d, R{0.5}));
    const auto limit = hn::IfThenElse(hn::Eq(shift, hn::Zero(d)), hn::Set(d, R{48}),
                                      hn::Min(half, hn::Set(d, R{16})));
    return hn::AllTrue(d, hn::Le(hn::BitCast(d, farthest_), limit));
  }

 private:
  hn::Vec<DI> farthest_;
};

// exp of x <= 0, in f32 0 below -87; meaningless for others.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNonPositive(D d, hn::Vec<D> x) {
  const auto power = ExpOfNear(d, x);
  if constexpr (sizeof(hn::TFromD<D>) == 8) return power;
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, hn::TFromD<D>{-87})), power);
}

// exp, infinite above all finite results, NaN of NaN (Highway's gives 0 for that).
template <class D>
HWY_INLINE hn::Vec<D> ExpOf(D d, hn::Vec<D> x) {
  using R = hn::TFromD<D>;
  const auto limit = hn::Set(d, sizeof(R) == 8 ? R{709} : R{88});
  const auto overflow = hn::Mul(x, hn::Set(d, kInf<R>));
  return hn::IfThenElse(hn::Lt(x, limit), ExpOfNonPositive(d, x), overflow);
}

// shift + log of 0 < x < inf, the log in f32 of normal x within 1 ulp: with x = 2^n (1 + f),
// sqrt(1/2) <= 1 + f < sqrt(2), log(1 + f) = f - f^2 / 2 + f^3 p(f) where p is a minimax fit with
// an error of 2^-29.
template <class D>
HWY_INLINE hn::Vec<D> LogOfPositive(D d, hn::Vec<D> x, hn::Vec<D> shift) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::Add(shift, hn::Log(d, x));
  } else {
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, x);
    const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));
    const auto n = hn::ConvertTo(d, exponent);
    const auto f =
        hn::Sub(hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent))), hn::Set(d, 1.0f));
    const auto f2 = hn::Mul(f, f);
    // Even and odd powers beside each other.
    auto p = hn::MulAdd(hn::Set(d, 1.28549218e-1f), f2, hn::Set(d, 1.41900063e-1f));
    auto q = hn::MulAdd(hn::Set(d, -7.63120800e-2f), f2, hn::Set(d, -1.32078871e-1f));
    p = hn::MulAdd(p, f2, hn::Set(d, 2.00016156e-1f));
    q = hn::MulAdd(q, f2, hn::Set(d, -1.66165233e-1f));
    p = hn::MulAdd(p, f2, hn::Set(d, 3.33333284e-1f));
    q = hn::MulAdd(q, f2, hn::Set(d, -2.50010610e-1f));
    p = hn::Mul(hn::MulAdd(q, f, p), hn::Mul(f, f2));
    // ln 2 in two parts, as ExpOfNear has it.
    p = hn::MulAdd(n, hn::Set(d, -2.12194440e-4f), p);
    p = hn::NegMulAdd(f2, hn::Set(d, 0.5f), p);
    // The large terms first: they may cancel.
    return hn::Add(hn::MulAdd(n, hn::Set(d, 0.693359375f), shift), hn::Add(f, p));
  }
}

// The same of 0, infinity and NaN, too.
template <class D>
HWY_INLINE hn::Vec<D> LogOf(D d, hn::Vec<D> x, hn::Vec<D> shift) {
  using R = hn::TFromD<D>;
  const auto log = hn::IfThenElse(hn::Lt(x, hn::Set(d, kInf<R>)), LogOfPositive(d, x, shift), x);
  return hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -kInf<R>), log);
}

// sum exp(x - Shift(largest)), the running state of logsumexp and softmax. The shift is finite, so
// that infinities and NaN come out of the sum as they should. Where all x are near it need not be
// the largest (NearShift).
template <class R>
struct LogSum {
  R *largest, *sum;
};

template <class D>
HWY_INLINE hn::Vec<D> Shift(D d, hn::Vec<D> largest) {
  const auto infinity = hn::Set(d, kInf<hn::TFromD<D>>);
  return hn::IfThenElseZero(hn::Lt(hn::Abs(largest), infinity), largest);
}

// Adds exp(x - shift) of a column of the block to `sum`, and with kKeep stores them at to(row).
// False, and they mean nothing, if an x is not near the shift.
template <bool kKeep, class D, class L, class R, class To>
HWY_INLINE bool AddNearPowers(D d, L lanes, const Block<R>& block, std::int64_t column,
                              hn::Vec<D> shift, hn::Vec<D>& sum, LinesAhead& ahead, const To& to) {
  Nearness<D> near;
  const R* from = block.data + column;
  for (std::int64_t r = 0; r < block.rows;) {
    constexpr std::int64_t kLook = 32;  // rows until what is far ends this
    for (const std::int64_t stop = std::min(block.rows, r + kLook); r < stop; ++r) {
      ahead.Step();
      const auto x = hn::Sub(lanes.Read(d, from), shift);
      near.Add(x);
      const auto power = ExpOfNear(d, x);
      sum = hn::Add(sum, power);
      if constexpr (kKeep) lanes.Keep(d, power, to(r));
      from += block.stride;
    }
    if (!near.All(shift)) return false;
  }
  return true;
}

// The shift of rows of which the block has the first. A single one is its own logsumexp.
template <class D, class L, class R>
HWY_INLINE hn::Vec<D> FirstShift(D d, L lanes, const Block<R>& block, std::int64_t column) {
  const auto first = lanes.Read(d, block.data + column);
  return block.rows == 1 ? first : NearShift(d, first);
}

// `first` starts the state.
template <class R>
HWY_NOINLINE void AddLogSum(const LogSum<R>& state, const Block<R>& block, bool first,
                            std::int64_t columns) {
  const hn::ScalableTag<R> d;
  const std::int64_t stride = block.stride;
  LinesAhead ahead = RowsAhead(block, columns);
  ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
    const auto near = first ? FirstShift(d, lanes, block, c) : hn::LoadU(d, state.largest + c);
    auto near_sum = first ? hn::Zero(d) : hn::LoadU(d, state.sum + c);
    if (AddNearPowers<false>(d, lanes, block, c, near, near_sum, ahead, nullptr)) {
      Store(d, near, state.largest + c);
      Store(d, near_sum, state.sum + c);
      return;
    }
    const auto before = first ? hn::Set(d, -kInf<R>) : hn::LoadU(d, state.largest + c);
    auto largest = before;
    auto total = hn::Zero(d);  // finite only if all are
    const R* from = block.data + c;
    std::int64_t r = 0;
    for (; r + 4 <= block.rows; r += 4, from += 4 * stride) {
      const auto a = lanes.Read(d, from), b = lanes.Read(d, from + stride);
      const auto e = lanes.Read(d, from + 2 * stride), f = lanes.Read(d, from + 3 * stride);
      largest = hn::Max(hn::Max(hn::Max(a, b), hn::Max(e, f)), largest);
      total = hn::Add(total, hn::Add(hn::Add(a, b), hn::Add(e, f)));
    }
    for (; r < block.rows; ++r, from += stride) {
      const auto a = lanes.Read(d, from);
      largest = hn::Max(a, largest);
      total = hn::Add(total, a);
    }
    const auto shift = Shift(d, largest);
    auto sum = hn::Zero(d);
    if (!first) sum = hn::Mul(hn::LoadU(d, state.sum + c), ExpOf(d, hn::Sub(before, shift)));
    from = block.data + c;
    if (hn::AllTrue(d, hn::IsFinite(total))) {
      for (r = 0; r < block.rows; ++r, from += stride) {
        ahead.Step();
        sum = hn::Add(sum, ExpOfNonPositive(d, hn::Sub(lanes.Read(d, from), shift)));
      }
    } else {
      for (r = 0; r < block.rows; ++r, from += stride) {
        sum = hn::Add(sum, ExpOf(d, hn::Sub(lanes.Read(d, from), shift)));
      }
    }
    Store(d, largest, state.largest + c);
    Store(d, sum, state.sum + c);
  });
}

// Adds the state of later rows.
template <class D>
HWY_INLINE void JoinLogSum(D d, hn::Vec<D>& largest, hn::Vec<D>& sum, hn::Vec<D> later_largest,
                           hn::Vec<D> later_sum) {
  const auto before = largest;
  largest = hn::Max(largest, later_largest);
  const auto shift = Shift(d, largest);
  sum = hn::Add(hn::Mul(sum, ExpOf(d, hn::Sub(before, shift))),
                hn::Mul(later_sum, ExpOf(d, hn::Sub(later_largest, shift))));
}
template <class R>
void MergeLogSum(const LogSum<R>& state, const LogSum<R>& later, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  ForColumns<R>(columns, [&](auto, std::int64_t c) {
    auto largest = hn::LoadU(d, state.largest + c), sum = hn::LoadU(d, state.sum + c);
    JoinLogSum(d, largest, sum, hn::LoadU(d, later.largest + c), hn::LoadU(d, later.sum + c));
    Store(d, largest, state.largest + c);
    Store(d, sum, state.sum + c);
  });
}

// Turns the state into log sum exp x, in `largest`.
template <class R>
void FinishLogSum(const LogSum<R>& state, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
    const auto shift = Shift(d, lanes.Read(d, state.largest + c));
    lanes.Write(d, LogOf(d, lanes.Read(d, state.sum + c), shift), state.largest + c);
  });
}

// Turns the state into what makes softmax of a row: the shift, in `largest`, and the reciprocal of
// the sum. Both have room for whole vectors.
template <class R>
void FinishSoftmax(const LogSum<R>& state, std::int64_t columns) {
  const hn::ScalableTag<R> d;
  const auto nan = hn::Set(d, std::numeric_limits<R>::quiet_NaN());
  ForColumns<R>(columns, [&](auto, std::int64_t c) {
    const auto sum = hn::LoadU(d, state.sum + c);
    auto inverse = hn::Div(hn::Set(d, R{1}), sum);
    inverse = hn::IfThenElse(hn::Lt(sum, hn::Set(d, kInf<R>)), inverse, nan);
    Store(d, hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(d)), inverse), state.sum + c);
    Store(d, Shift(d, hn::LoadU(d, state.largest + c)), state.largest + c);
  });
}

// total[c] += sum over rows of y g.
template <class R>
HWY_NOINLINE void AddDots(const Block<R>& y, const Block<R>& g, std::int64_t columns,
                          R* HWY_RESTRICT total) {
  const hn::ScalableTag<R> d;
  LinesAhead y_ahead = RowsAhead(y, columns), g_ahead = RowsAhead(g, columns);
  ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
    auto sum = hn::LoadU(d, total + c), sum2 = hn::Zero(d);
    const auto add = [&](std::int64_t r, auto& to) HWY_ATTR {
      y_ahead.Step();
      g_ahead.Step();
      to = hn::MulAdd(lanes.Read(d, y.row(r) + c), lanes.Read(d, g.row(r) + c), to);
    };
    std::int64_t r = 0;
    for (; r + 2 <= y.rows; r += 2) {
      add(r, sum);
      add(r + 1, sum2);
    }
    if (r < y.rows) add(r, sum);
    Store(d, hn::Add(sum, sum2), total + c);
  });
}

// --- A few rows, column by column in registers ---

// The largest element of a column. False if one is not finite.
template <class D, class L, class R>
HWY_INLINE bool LargestOfFinite(D d, L lanes, const Block<R>& block, std::int64_t column,
                                hn::Vec<D>& largest) {
  const R* from = block.data + column;
  largest = lanes.Read(d, from);
  auto total = largest;  // finite only if all are
  for (std::int64_t r = 1; r < block.rows; ++r) {
    const auto next = lanes.Read(d, from += block.stride);
    largest = hn::Max(largest, next);
    total = hn::Add(total, next);
  }
  return hn::AllTrue(d, hn::IsFinite(total));
}

// Calls f(lanes, column, shift, sum of exp(x - shift)) for all columns; with kKeep their powers are
// at to(row) then. False, and f was not called for all, if an element is not finite. `far` counts
// down, from one block to the next, until rows are tried again that may be near.
template <bool kStream, bool kKeep, class R, class To, class F>
HWY_INLINE bool ForSumsOfPowers(const Block<R>& block, std::int64_t columns, int& far, const To& to,
                                const F& f) {
  const hn::ScalableTag<R> d;
  LinesAhead ahead = RowsAhead(block, columns);
  bool finite = true;
  ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
    if (!finite) return;
    auto shift = FirstShift(d, lanes, block, c);
    auto sum = hn::Zero(d);
    if (HWY_UNLIKELY(far > 0 || !AddNearPowers<kKeep>(d, lanes, block, c, shift, sum, ahead, to))) {
      constexpr int kPause = 31;
      far = far > 0 ? far - 1 : kPause;
      finite = LargestOfFinite(d, lanes, block, c, shift);
      if (!finite) return;
      sum = hn::Zero(d);
      for (std::int64_t r = 0; r < block.rows; ++r) {
        ahead.Step();
        const auto x = lanes.Read(d, block.row(r) + c);
        const auto power = ExpOfNonPositive(d, hn::Sub(x, shift));
        sum = hn::Add(sum, power);
        if constexpr (kKeep) lanes.Keep(d, power, to(r));
      }
    }
    f(lanes, c, shift, sum);
  });
  return finite;
}

// log sum exp straight to `to`.
template <bool kStream, class R>
bool LogSumOfFewRows(const Block<R>& block, std::int64_t columns, int& far, R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  return ForSumsOfPowers<kStream, false>(block, columns, far, nullptr,
                                         [&](auto lanes, std::int64_t c, auto shift, auto sum) {
                                           lanes.Write(d, LogOfPositive(d, sum, shift), to + c);
                                         });
}

// Softmax straight to rows to(r). `powers` has room for a vector of each row.
template <bool kStream, class R, class To>
HWY_INLINE bool SoftmaxOfFewRows(const Block<R>& block, std::int64_t columns, int& far,
                                 R* HWY_RESTRICT powers, const To& to) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  return ForSumsOfPowers<kStream, true>(
      block, columns, far, [=](std::int64_t r) { return powers + r * step; },
      [&](auto lanes, std::int64_t c, auto, auto sum) {
        const auto inverse = hn::Div(hn::Set(d, R{1}), sum);
        for (std::int64_t r = 0; r < block.rows; ++r) {
          lanes.Write(d, hn::Mul(hn::LoadU(d, powers + r * step), inverse), to(r) + c);
        }
      });
}

// y (g - sum y g), likewise.
template <bool kStream, class R, class To>
HWY_INLINE void SoftmaxGradientOfFewRows(const Block<R>& y, const Block<R>& g, std::int64_t columns,
                                         const To& to) {
  const hn::ScalableTag<R> d;
  LinesAhead y_ahead = RowsAhead(y, columns), g_ahead = RowsAhead(g, columns);
  ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
    auto dot = hn::Zero(d);
    for (std::int64_t r = 0; r < y.rows; ++r) {
      y_ahead.Step();
      g_ahead.Step();
      dot = hn::MulAdd(lanes.Read(d, y.row(r) + c), lanes.Read(d, g.row(r) + c), dot);
    }
    for (std::int64_t r = 0; r < y.rows; ++r) {
      const auto above = hn::Sub(lanes.Read(d, g.row(r) + c), dot);
      lanes.Write(d, hn::Mul(lanes.Read(d, y.row(r) + c), above), to(r) + c);
    }
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

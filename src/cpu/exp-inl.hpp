// The exponential of a softmax, and powers of fractions.

#if defined(PULLBACK_CPU_EXP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_EXP_INL_HPP
#undef PULLBACK_CPU_EXP_INL_HPP
#else
#define PULLBACK_CPU_EXP_INL_HPP
#endif

#include <limits>

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// exp(x) for x <= 0 and not much above it (below 88), to 1 ulp, NaN for NaN; what is below 1e-37 in
// f32 becomes 0. With no overflow and no subnormals to care for it needs half the instructions of
// Highway's.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));  // Exp() gives 0 for NaN
  } else {
    // x = n ln 2 + r; adding 1.5 * 2^23 leaves n in the lowest bits, and 127 more make it the
    // exponent of 2^n.
    const auto rounder = hn::Set(d, 12582912.0f + 127.0f);
    const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), rounder);
    const auto n = hn::Sub(shifted, rounder);
    const hn::RebindToUnsigned<D> bits;
    const auto two_to_n = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(bits, shifted)));
    auto r = hn::MulAdd(n, hn::Set(d, -0.693145751953125f), x);
    r = hn::MulAdd(n, hn::Set(d, -1.428606765330187e-6f), r);
    // Minimax for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2: 3e-9 of exp(r).
    auto q = hn::Set(d, 1.3813880505040288e-3f);
    q = hn::MulAdd(q, r, hn::Set(d, 8.369063027203083e-3f));
    q = hn::MulAdd(q, r, hn::Set(d, 4.1668422520160675e-2f));
    q = hn::MulAdd(q, r, hn::Set(d, 0.166665181517601f));
    q = hn::MulAdd(q, r, hn::Set(d, 0.4999999403953552f));
    const auto e = hn::Add(hn::MulAdd(q, hn::Mul(r, r), r), hn::Set(d, 1.0f));
    // A product and not a sum of exponents: it keeps NaN.
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), hn::Mul(e, two_to_n));
  }
}

// x^p for 0 < x <= 1 and p >= 0, to 1 + p / 2 ulp; numbers below 2^-126 count as 2^-126, in f32,
// and results below that are 0. In half the instructions of a logarithm and an exponential, as it
// needs no quotient, no overflow, no subnormals and no ln 2.
template <class D>
HWY_INLINE hn::Vec<D> PowerOfFraction(D d, hn::Vec<D> x, hn::Vec<D> p) {
  using R = hn::TFromD<D>;
  x = hn::Max(x, hn::Set(d, std::numeric_limits<R>::min()));
  if constexpr (sizeof(R) == 8) {
    return hn::Exp(d, hn::Mul(p, hn::Log(d, x)));
  } else {
    // x = 2^n m with sqrt(1/2) <= m < sqrt(2).
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, x);
    const auto n = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));
    const auto m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(n)));
    const auto r = hn::Sub(m, hn::Set(d, 1.0f));
    // Minimax for log2(1 + r) / r: 2.6e-8 of it.
    auto q = hn::Set(d, 0.1258353739976883f);
    q = hn::MulAdd(q, r, hn::Set(d, -0.20726893842220306f));
    q = hn::MulAdd(q, r, hn::Set(d, 0.21571584045886993f));
    q = hn::MulAdd(q, r, hn::Set(d, -0.23894494771957397f));
    q = hn::MulAdd(q, r, hn::Set(d, 0.28791624307632446f));
    q = hn::MulAdd(q, r, hn::Set(d, -0.3607036769390106f));
    q = hn::MulAdd(q, r, hn::Set(d, 0.48091062903404236f));
    q = hn::MulAdd(q, r, hn::Set(d, -0.7213473320007324f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.4426950216293335f));
    // p log2(x) = k + s; s from the parts, for the digits that their sum has lost. k ends up in the
    // exponent as in ExpNonPositive().
    const auto exponent = hn::ConvertTo(d, n), part = hn::Mul(p, hn::Mul(q, r));
    const auto t = hn::MulAdd(p, exponent, part);
    const auto rounder = hn::Set(d, 12582912.0f + 127.0f);
    const auto shifted = hn::Add(t, rounder);
    const auto s = hn::Add(part, hn::MulSub(p, exponent, hn::Sub(shifted, rounder)));
    const hn::RebindToUnsigned<D> du;
    const auto two_to_k = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
    // Minimax for 2^s on |s| <= 1/2: 2e-9.
    auto e = hn::Set(d, 1.534580806037411e-4f);
    e = hn::MulAdd(e, s, hn::Set(d, 1.3399930903688073e-3f));
    e = hn::MulAdd(e, s, hn::Set(d, 9.618489071726799e-3f));
    e = hn::MulAdd(e, s, hn::Set(d, 5.550328642129898e-2f));
    e = hn::MulAdd(e, s, hn::Set(d, 0.24022646248340607f));
    e = hn::MulAdd(e, s, hn::Set(d, 0.6931471824645996f));
    e = hn::MulAdd(e, s, hn::Set(d, 1.0f));
    return hn::IfThenZeroElse(hn::Lt(t, hn::Set(d, -126.0f)), hn::Mul(e, two_to_k));
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

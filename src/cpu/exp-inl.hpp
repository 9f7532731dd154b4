// The exponential of a softmax, and the logarithm of a power.

#if defined(PULLBACK_CPU_EXP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_EXP_INL_HPP
#undef PULLBACK_CPU_EXP_INL_HPP
#else
#define PULLBACK_CPU_EXP_INL_HPP
#endif

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// exp(x) for x <= 0, to 1 ulp, NaN for NaN; what is below 1e-37 in f32 becomes 0. With no overflow
// and no subnormals to care for it needs half the instructions of Highway's.
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

// log(x) for finite x > 0, to 1 ulp of max(|log x|, 1/8); subnormal x counts as the smallest normal
// one. Without a quotient it takes half as long as Highway's.
template <class D>
HWY_INLINE hn::Vec<D> LogPositive(D d, hn::Vec<D> x) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::Log(d, x);
  } else {
    // x = 2^n m with sqrt(1/2) <= m < sqrt(2).
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, hn::Max(x, hn::Set(d, 0x1p-126f)));
    const auto n = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));
    const auto m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(n)));
    const auto exponent = hn::ConvertTo(d, n);
    const auto r = hn::Sub(m, hn::Set(d, 1.0f));
    const auto square = hn::Mul(r, r);
    // The polynomial of Cephes' logf for (log(1 + r) - r + r^2 / 2) / r^3.
    auto q = hn::Set(d, 7.0376836292e-2f);
    q = hn::MulAdd(q, r, hn::Set(d, -1.1514610310e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.1676998740e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, -1.2420140846e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.4249322787e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, -1.6668057665e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 2.0000714765e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, -2.4999993993e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 3.3333331174e-1f));
    auto rest = hn::Mul(hn::Mul(q, square), r);
    rest = hn::MulAdd(exponent, hn::Set(d, -2.12194440e-4f), rest);
    rest = hn::MulAdd(square, hn::Set(d, -0.5f), rest);
    return hn::MulAdd(exponent, hn::Set(d, 0.693359375f), hn::Add(r, rest));
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

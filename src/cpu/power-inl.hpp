// Powers with one exponent for many bases.

#if defined(PULLBACK_CPU_POWER_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_POWER_INL_HPP
#undef PULLBACK_CPU_POWER_INL_HPP
#else
#define PULLBACK_CPU_POWER_INL_HPP
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// x^p for 0 < x <= 1 and p >= 0; numbers below the least normal one count as that.
template <class R>
class AnyPower {
 public:
  explicit AnyPower(double p) : p_(static_cast<R>(p)) {}

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    return PowerOfFraction(d, x, hn::Set(d, p_));
  }
  // The same for x >= least_large().
  R least_large() const { return std::numeric_limits<R>::min(); }
  template <class D>
  HWY_INLINE hn::Vec<D> OfLarge(D d, hn::Vec<D> x) const {
    return (*this)(d, x);
  }

 private:
  R p_;
};

// The same, where it takes long to make and not to use.
template <class R>
class FixedPower : public AnyPower<R> {
 public:
  using AnyPower<R>::AnyPower;
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
// For p <= 6. With x = 2^n m, 1 <= m < 2, both factors come from tables that fill a register (two
// of 512 bits): 2^(n p), of a few bits of n each, and m^p as a polynomial on the part of [1, 2)
// that m is in. Relative error at most 2.4e-7, and 4.1e-7 where p > 5. Half the instructions of a
// logarithm and an exponential. Powers below 2^(p - 125) come out as about that or 0, and not
// subnormal, as what is would cost an exception wherever it is met.
template <>
class FixedPower<float> {
 public:
  explicit FixedPower(double p)
      : least_(std::max(std::numeric_limits<float>::min(),
                        static_cast<float>(std::exp2(1 - 125 / p)))),
        least_large_(std::max(least_, kWide ? 0x1p-31f : 0x1p-63f)) {
    const hn::ScalableTag<double> d;
    const hn::Rebind<float, decltype(d)> narrow;
    constexpr double kHalf = 0.5 / kEntries;  // of a part
    const auto exponent = hn::Set(d, p);
    const auto store = [&](auto v, float* to)
                           HWY_ATTR { hn::StoreU(hn::DemoteTo(narrow, v), narrow, to); };
    for (std::size_t i = 0; i < kEntries; i += hn::Lanes(d)) {
      const auto part = hn::Iota(d, static_cast<double>(i));
      const auto middle = hn::MulAdd(part, hn::Set(d, 2 * kHalf), hn::Set(d, 1 + kHalf));
      const auto inverse = hn::Div(hn::Set(d, 1.0), middle);
      // The binomial series in v = m - middle, then shifted to v + h.
      hn::Vec<decltype(d)> a[kOrder + 2];
      a[0] = hn::Exp(d, hn::Mul(exponent, hn::Log(d, middle)));
      for (int k = 0; k <= kOrder; ++k) {
        a[k + 1] = hn::Mul(hn::Mul(a[k], inverse), hn::Set(d, (p - k) / (k + 1)));
      }
      // On |v| <= h the closest to v^4 is h^2 v^2 - h^4 / 8, to v^5 5/4 h^2 v^3 - 5/16 h^4 v.
      constexpr double kSquare = kHalf * kHalf * (kOrder == 3 ? 1 : 1.25);
      constexpr double kFourth = kHalf * kHalf * kHalf * kHalf * (kOrder == 3 ? 0.125 : 0.3125);
      a[kOrder - 3] = hn::NegMulAdd(a[kOrder + 1], hn::Set(d, kFourth), a[kOrder - 3]);
      a[kOrder - 1] = hn::MulAdd(a[kOrder + 1], hn::Set(d, kSquare), a[kOrder - 1]);
      for (int from = 0; from < kOrder; ++from) {
        for (int k = kOrder - 1; k >= from; --k) {
          a[k] = hn::MulAdd(a[k + 1], hn::Set(d, -kHalf), a[k]);
        }
      }
      for (int k = 0; k <= kOrder; ++k) store(a[k], polynomial_[k] + i);
      // Of digit k of an exponent, whose own of 1 is as below.
      for (std::size_t k = 0; k < kDigits; ++k) {
        const double of_one = (127 >> k * kIndexBits) % kEntries, unit = 1 << k * kIndexBits;
        const auto n = hn::Mul(hn::Sub(part, hn::Set(d, of_one)), hn::Set(d, unit));
        const auto log =
            hn::Mul(hn::Mul(hn::Min(n, hn::Zero(d)), exponent), hn::Set(d, 0.6931471805599453));
        store(hn::IfThenElseZero(hn::Gt(log, hn::Set(d, -87.0)), hn::Exp(d, log)), scale_[k] + i);
      }
    }
  }

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    x = hn::Max(x, hn::Set(d, least_));
    return hn::Mul(OfDigit<kDigits - 1>(d, x), OfLarge(d, x));
  }
  // The same for x >= least_large().
  float least_large() const { return least_large_; }
  template <class D>
  HWY_INLINE hn::Vec<D> OfLarge(D d, hn::Vec<D> x) const {
    const hn::RebindToUnsigned<D> du;
    constexpr int kShift = 23 - kIndexBits;
    const auto bits = hn::BitCast(du, x);
    const auto part = hn::ShiftRight<kShift>(bits);
    const auto one = hn::Set(d, 1.0f);
    // The digits of m that tell places within the part, and the exponent of 1.
    const auto unit =
        hn::OrAnd(hn::BitCast(du, one), bits, hn::Set(du, (std::uint32_t{1} << kShift) - 1));
    const auto t = hn::Sub(hn::BitCast(d, unit), one);
    auto q = LookUp(d, polynomial_[kOrder], part);
    for (int k = kOrder - 1; k >= 0; --k) q = hn::MulAdd(q, t, LookUp(d, polynomial_[k], part));
    const auto scale = OfDigit<0>(d, x);
    return hn::Mul(q, kWide ? scale : hn::Mul(scale, OfDigit<1>(d, x)));
  }

 private:
  static constexpr bool kWide = HWY_TARGET <= HWY_AVX3;
  static constexpr int kOrder = kWide ? 3 : 4;
  static constexpr int kIndexBits = kWide ? 5 : 3;  // of an index: the instructions ignore the rest
  static constexpr std::size_t kEntries = std::size_t{1} << kIndexBits;
  static constexpr std::size_t kDigits = kWide ? 2 : 3;  // of an exponent; the last one for small x

  template <class D>
  HWY_INLINE hn::Vec<D> LookUp(D d, const float* table, hn::Vec<hn::RebindToUnsigned<D>> i) const {
#if HWY_TARGET <= HWY_AVX3
    static_assert(hn::MaxLanes(d) == 16);
    return hn::Vec<D>{
        _mm512_permutex2var_ps(hn::LoadU(d, table).raw, i.raw, hn::LoadU(d, table + 16).raw)};
#else
    static_assert(hn::MaxLanes(d) == 8);
    return hn::Vec<D>{_mm256_permutevar8x32_ps(hn::LoadU(d, table).raw, i.raw)};
#endif
  }
  // What a digit of x's exponent stands for.
  template <std::size_t kDigit, class D>
  HWY_INLINE hn::Vec<D> OfDigit(D d, hn::Vec<D> x) const {
    const hn::RebindToUnsigned<D> du;
    constexpr int kShift = 23 + static_cast<int>(kDigit) * kIndexBits;
    return LookUp(d, scale_[kDigit], hn::ShiftRight<kShift>(hn::BitCast(du, x)));
  }

  float least_, least_large_;
  HWY_ALIGN float polynomial_[kOrder + 1][kEntries];  // coefficients of 1, t, t^2, ...
  HWY_ALIGN float scale_[kDigits][kEntries];
};
#endif

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

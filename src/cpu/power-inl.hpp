// Powers with one exponent for many bases.

#if defined(PULLBACK_CPU_POWER_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_POWER_INL_HPP
#undef PULLBACK_CPU_POWER_INL_HPP
#else
#define PULLBACK_CPU_POWER_INL_HPP
#endif

#include <limits>

#include "cpu/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// x^p for 0 < x <= 1 and 0 <= p <= 8; numbers below the least normal one count as that.
template <class R>
class FixedPower {
 public:
  explicit FixedPower(double p) : p_(static_cast<R>(p)) {}

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    return PowerOfFraction(d, x, hn::Set(d, p_));
  }
  // The same for x >= kLarge.
  static constexpr R kLarge = std::numeric_limits<R>::min();
  template <class D>
  HWY_INLINE hn::Vec<D> OfLarge(D d, hn::Vec<D> x) const {
    return (*this)(d, x);
  }

 private:
  R p_;
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// With x = 2^n m, 1 <= m < 2, both factors come from tables that fill two registers: 2^(n p), and
// m^p as a cubic on the 32nd part of [1, 2) that m is in. Relative error at most 2.2e-7 where
// p <= 6, 3.4e-7 where p <= 7. Half the instructions of a logarithm and an exponential.
template <>
class FixedPower<float> {
 public:
  explicit FixedPower(double p) {
    const hn::ScalableTag<double> d;
    const hn::Rebind<float, decltype(d)> narrow;
    constexpr double kHalf = 1.0 / 64;  // of a part
    const auto exponent = hn::Set(d, p);
    const auto store = [&](auto v, float* to)
                           HWY_ATTR { hn::StoreU(hn::DemoteTo(narrow, v), narrow, to); };
    // What is subnormal would cost an exception wherever it is met.
    const auto power_of_two = [&](auto n) HWY_ATTR {
      const auto log = hn::Mul(hn::Mul(n, exponent), hn::Set(d, 0.6931471805599453));
      return hn::IfThenElseZero(hn::Gt(log, hn::Set(d, -87.0)), hn::Exp(d, log));
    };
    for (std::size_t i = 0; i < kParts; i += hn::Lanes(d)) {
      const auto part = hn::Iota(d, static_cast<double>(i));
      const auto middle = hn::MulAdd(part, hn::Set(d, 2 * kHalf), hn::Set(d, 1 + kHalf));
      const auto inverse = hn::Div(hn::Set(d, 1.0), middle);
      // The binomial series in v = m - middle, whose v^4 is replaced by h^2 v^2 - h^4 / 8, the
      // closest there is on |v| <= h; then shifted to t = v + h.
      auto a0 = hn::Exp(d, hn::Mul(exponent, hn::Log(d, middle)));
      const auto next = [&](auto a, double k) HWY_ATTR {
        return hn::Mul(hn::Mul(a, inverse), hn::Set(d, (p - k) / (k + 1)));
      };
      auto a1 = next(a0, 0), a2 = next(a1, 1), a3 = next(a2, 2);
      const auto a4 = next(a3, 3);
      a0 = hn::NegMulAdd(a4, hn::Set(d, kHalf * kHalf * kHalf * kHalf / 8), a0);
      a2 = hn::MulAdd(a4, hn::Set(d, kHalf * kHalf), a2);
      const auto back = hn::Set(d, -kHalf);
      const auto b2 = hn::MulAdd(a3, back, a2), b1 = hn::MulAdd(b2, back, a1);
      const auto c2 = hn::MulAdd(a3, back, b2);
      store(hn::MulAdd(b1, back, a0), cubic_[0] + i);
      store(hn::MulAdd(c2, back, b1), cubic_[1] + i);
      store(hn::MulAdd(a3, back, c2), cubic_[2] + i);
      store(a3, cubic_[3] + i);
      store(power_of_two(hn::Sub(part, hn::Set(d, kParts - 1.0))), scale_ + i);
      const auto binades = hn::MulSub(part, hn::Set(d, kParts * 1.0), hn::Set(d, 3.0 * kParts));
      store(power_of_two(hn::Min(binades, hn::Zero(d))), coarse_scale_ + i);
    }
  }

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    x = hn::Max(x, hn::Set(d, std::numeric_limits<float>::min()));
    const hn::RebindToUnsigned<D> du;
    const auto binades = hn::ShiftRight<28>(hn::BitCast(du, x));  // 32 at a time
    return hn::Mul(LookUp(d, coarse_scale_, binades), NearOne(d, x));
  }
  // The same for x >= kLarge.
  static constexpr float kLarge = 0x1p-31f;
  template <class D>
  HWY_INLINE hn::Vec<D> OfLarge(D d, hn::Vec<D> x) const {
    return NearOne(d, x);
  }

 private:
  static constexpr std::size_t kParts = 32;

  template <class D>
  HWY_INLINE hn::Vec<D> LookUp(D d, const float* table, hn::Vec<hn::RebindToUnsigned<D>> i) const {
    static_assert(hn::MaxLanes(d) == 16);
    // The instruction looks at the lowest five bits of an index.
    return hn::Vec<D>{
        _mm512_permutex2var_ps(hn::LoadU(d, table).raw, i.raw, hn::LoadU(d, table + 16).raw)};
  }

  // For 2^-31 <= x < 2; else the exponent is off by a multiple of 32.
  template <class D>
  HWY_INLINE hn::Vec<D> NearOne(D d, hn::Vec<D> x) const {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, x);
    const auto part = hn::ShiftRight<18>(bits), exponent = hn::ShiftRight<23>(bits);
    const auto one = hn::Set(d, 1.0f);
    // The part of m that tells places within the part, and the exponent of 1.
    const hn::Vec<decltype(du)> unit{_mm512_ternarylogic_epi32(
        bits.raw, _mm512_set1_epi32((1 << 18) - 1), hn::BitCast(du, one).raw, 0xea)};
    const auto t = hn::Sub(hn::BitCast(d, unit), one);
    auto q = LookUp(d, cubic_[3], part);
    q = hn::MulAdd(q, t, LookUp(d, cubic_[2], part));
    q = hn::MulAdd(q, t, LookUp(d, cubic_[1], part));
    q = hn::MulAdd(q, t, LookUp(d, cubic_[0], part));
    return hn::Mul(q, LookUp(d, scale_, exponent));
  }

  HWY_ALIGN float cubic_[4][kParts];  // coefficients of 1, t, t^2, t^3
  HWY_ALIGN float scale_[kParts];
  HWY_ALIGN float coarse_scale_[kParts];
};
#endif

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

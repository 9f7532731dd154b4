// Where s of the backward pass comes from.

#if defined(PULLBACK_ENTMAX_WEIGHTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_WEIGHTS_INL_HPP
#undef PULLBACK_ENTMAX_WEIGHTS_INL_HPP
#else
#define PULLBACK_ENTMAX_WEIGHTS_INL_HPP
#endif

#include "ops/entmax/cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// To 1 or 2 ulp, but for subnormal y, whose inverse may come out infinite. The exact instruction
// takes longer than the memory that this pass waits for.
template <class D>
HWY_INLINE hn::Vec<D> SquareRoot(D d, hn::Vec<D> y) {
  if constexpr (sizeof(hn::TFromD<D>) == 8 || HWY_TARGET == HWY_SCALAR) {
    return hn::Sqrt(y);
  } else {
    const auto inverse = hn::Min(hn::ApproximateReciprocalSqrt(y), hn::Set(d, 0x1p64f));
    const auto root = hn::Mul(y, inverse);
    const auto error = hn::NegMulAdd(root, root, y);
    return hn::MulAdd(hn::Mul(error, hn::Set(d, 0.5f)), inverse, root);
  }
}

template <class D, class T>
HWY_INLINE hn::Vec<D> LoadSome(D d, const T* from, std::size_t count) {
  return count == hn::Lanes(d) ? LoadAs(d, from) : LoadFirstAs(d, from, count, Real<T>{0});
}

// s = y^(2-alpha) where y is not 0.
template <Family kFamily, class R, class Powers = FixedPower<R>>
class Slope {
 public:
  explicit Slope(double alpha) : power_(2 - alpha) {}

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> y) const {
    if constexpr (kFamily == Family::softmax) {
      return y;
    } else if constexpr (kFamily == Family::entmax15) {
      return SquareRoot(d, y);
    } else {
      return hn::IfThenElse(hn::IsNaN(y), y, OfNumber(d, y, hn::Set(d, R{1})));
    }
  }

 private:
  template <class D>
  HWY_INLINE hn::Vec<D> OfNumber(D d, [[maybe_unused]] hn::Vec<D> y, hn::Vec<D> one) const {
    if constexpr (kFamily == Family::sparsemax) {
      return one;
    } else if constexpr (kFamily == Family::general) {
      return power_(d, hn::Min(y, one));
    } else {
      const auto safe = hn::IfThenElse(hn::Gt(y, hn::Zero(d)), y, one);
      // The slope at the edge of the support is infinite; a finite one keeps 0 times it at 0.
      const auto log = hn::Mul(hn::Set(d, power_.exponent), hn::Log(d, safe));
      return hn::Exp(d, hn::Min(log, hn::Set(d, R{600})));
    }
  }

  struct Exponent {
    explicit Exponent(double value) : exponent(static_cast<R>(value)) {}
    R exponent;
  };
  std::conditional_t<kFamily == Family::general, Powers, Exponent> power_;
};
// Of rows too short to be worth more, which have an alpha each, up to 2.
template <class R>
using RowSlope = Slope<Family::general, R, AnyPower<R>>;

// Where s comes from: dense y.
template <class T, class S>
class DenseWeights {
 public:
  DenseWeights(const T* y, const S& slope) : y_(y), slope_(slope) {}

  // Of elements [i, i + count), count <= Lanes(d): y, which is zero where s is.
  template <class D>
  HWY_INLINE hn::Vec<D> Load(D d, std::size_t i, std::size_t count) const {
    return LoadSome(d, y_ + i, count);
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Active(D d, hn::Vec<D> y) const {
    // True for NaN (Ne would not be), which so reaches the whole row.
    return hn::Not(hn::Eq(y, hn::Zero(d)));
  }
  // s of active elements.
  template <class D>
  HWY_INLINE hn::Vec<D> Weight(D d, hn::Vec<D> y) const {
    return slope_(d, y);
  }

 private:
  const T* y_;
  const S& slope_;
};

// Where s comes from: the support mask of sparsemax. Load() gives 0, or `weight` in the support.
template <class R>
class MaskWeights {
 public:
  explicit MaskWeights(const std::uint8_t* bits, R weight = 1) : bits_(bits), weight_(weight) {}

  R weight() const { return weight_; }
  template <class D>
  HWY_INLINE hn::Mask<D> MaskAt(D d, std::size_t i, std::size_t count) const {
    if (hn::MaxLanes(d) >= 8 && count == hn::Lanes(d)) return hn::LoadMaskBits(d, bits_ + i / 8);
    std::uint8_t bytes[HWY_MAX_BYTES] = {};
    if (hn::Lanes(d) < 8) {
      bytes[0] = static_cast<std::uint8_t>(bits_[i / 8] >> i % 8);
    } else {
      std::memcpy(bytes, bits_ + i / 8, (count + 7) / 8);
    }
    return hn::And(hn::LoadMaskBits(d, bytes), hn::FirstN(d, count));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> Load(D d, std::size_t i, std::size_t count) const {
    return hn::IfThenElseZero(MaskAt(d, i, count), hn::Set(d, weight_));
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Active(D d, hn::Vec<D> s) const {
    return hn::Not(hn::Eq(s, hn::Zero(d)));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> Weight(D, hn::Vec<D> s) const {
    return s;
  }

 private:
  const std::uint8_t* bits_;
  R weight_;
};

// Where s comes from: scratch, when it took a logarithm to compute.
template <class R>
class StoredWeights {
 public:
  explicit StoredWeights(const R* s) : s_(s) {}

  template <class D>
  HWY_INLINE hn::Vec<D> Load(D d, std::size_t i, std::size_t) const {
    return hn::LoadU(d, s_ + i);  // scratch has room for whole vectors
  }
  template <class D>
  HWY_INLINE hn::Mask<D> Active(D d, hn::Vec<D> s) const {
    return hn::Not(hn::Eq(s, hn::Zero(d)));
  }
  template <class D>
  HWY_INLINE hn::Vec<D> Weight(D, hn::Vec<D> s) const {
    return s;
  }

 private:
  const R* s_;
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

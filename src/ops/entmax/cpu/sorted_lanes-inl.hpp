// The largest elements of rows in the lanes (lanes-inl.hpp), in order. Most short rows of sparsemax
// have no more of them in their support, which needs no search then: with S_k the sum of the k
// largest z, theta = max_k (S_k - 1) / k.

#if defined(PULLBACK_ENTMAX_SORTED_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_SORTED_LANES_INL_HPP
#undef PULLBACK_ENTMAX_SORTED_LANES_INL_HPP
#else
#define PULLBACK_ENTMAX_SORTED_LANES_INL_HPP
#endif

#include <limits>

#include "ops/entmax/cpu/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class R>
class LargestInLanes {
 public:
  LargestInLanes() {
    const LaneTag<R> d;
    v0_ = v1_ = v2_ = v3_ = v4_ = v5_ = v6_ = v7_ = hn::Set(d, -std::numeric_limits<R>::infinity());
  }

  // Four more elements of each row, none of them NaN.
  HWY_INLINE void Add(const Lane<R>* four) {
    auto n0 = four[0], n1 = four[1], n2 = four[2], n3 = four[3];
    Order(n0, n1), Order(n2, n3);
    Order(n0, n2), Order(n1, n3);
    Order(n1, n2);
    // The larger ones of both, which rise and fall: a bitonic merge orders them.
    v4_ = hn::Max(v4_, n3), v5_ = hn::Max(v5_, n2);
    v6_ = hn::Max(v6_, n1), v7_ = hn::Max(v7_, n0);
    Order(v0_, v4_), Order(v1_, v5_), Order(v2_, v6_), Order(v3_, v7_);
    Order(v0_, v2_), Order(v1_, v3_), Order(v4_, v6_), Order(v5_, v7_);
    Order(v0_, v1_), Order(v2_, v3_), Order(v4_, v5_), Order(v6_, v7_);
  }

  HWY_INLINE Lane<R> max() const { return v0_; }

  // The threshold of sparsemax of these elements alone, in terms of z.
  HWY_INLINE Lane<R> Theta() const {
    const LaneTag<R> d;
    const auto one = hn::Set(d, R{1});
    auto sum = hn::Zero(d), best = hn::Neg(one), best_sum = sum, count = one;
    const auto add = [&](Lane<R> v, R elements) HWY_ATTR {
      sum = hn::Add(sum, hn::Sub(v, v0_));
      const auto theta = hn::Mul(hn::Sub(sum, one), hn::Set(d, 1 / elements));
      const auto better = hn::Gt(theta, best);
      best = hn::Max(best, theta);
      best_sum = hn::IfThenElse(better, sum, best_sum);
      count = hn::IfThenElse(better, hn::Set(d, elements), count);
    };
    add(v1_, 2), add(v2_, 3), add(v3_, 4), add(v4_, 5), add(v5_, 6), add(v6_, 7), add(v7_, 8);
    return hn::Div(hn::Sub(best_sum, one), count);
  }
  // Of which rows there may be more in the support.
  HWY_INLINE hn::Mask<LaneTag<R>> Overflows(Lane<R> theta) const {
    return hn::Gt(hn::Sub(v7_, v0_), theta);
  }

 private:
  static HWY_INLINE void Order(Lane<R>& larger, Lane<R>& smaller) {
    const auto max = hn::Max(larger, smaller);
    smaller = hn::Min(larger, smaller);
    larger = max;
  }

  Lane<R> v0_, v1_, v2_, v3_, v4_, v5_, v6_, v7_;  // an array would not stay in registers
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

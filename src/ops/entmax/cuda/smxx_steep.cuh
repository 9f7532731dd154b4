// Rows above alpha = 2. With b = alpha - 1 and z = x - max(x) <= 0, p = [b (z - c)]_+^(1/b) is so
// steep where an element enters the support that no number next to c may make the sum 1. The root
// is told by the element at the edge of the support, z = e, and its p = q, as in cpu/solve-inl.hpp:
//   p(z) = (b (z - e) + q^b)^(1/b)  for z >= e,  0 below
// First a bracket of c, until no element lies in it; then Newton's steps on q, of which the sum is
// a convex function: they fall to the root. All in double. Elements come from a functor, as in
// smxx_solve.cuh.
#pragma once

#include "ops/entmax/cuda/smxx_group.cuh"

namespace pullback::entmax {

struct SteepThreshold {
  double b, edge, lift, q;  // lift: q^b

  double probability(double z) const {
    if (z == edge) return q;
    return z > edge ? pow(fma(b, z - edge, lift), 1 / b) : 0;
  }
  bool supports(double z) const { return z >= edge; }
  double tau(double largest) const { return b * (largest + edge) - lift; }
};

template <class G, class Elements>
class SteepRow {
 public:
  SteepRow(double alpha, G& group, const Elements& for_each)
      : b_(alpha - 1), inverse_(1 / (alpha - 1)), group_(group), for_each_(for_each) {}

  SteepThreshold threshold() {
    constexpr double kTiny = 0x1p-50;
    double count = 0;
    const double low = bracket(count);
    double edge = least_above(low);
    Sums above = evaluate(edge);
    // Elements so close to the root that no number lies between.
    while (above.f >= 1 && above.count > 0) {
      count = above.count;
      edge = least_above(edge);
      above = evaluate(edge);
    }
    double q = (1 - above.f) / (count - above.count), lift = pow(q, b_);
    for (double step = q; above.count > 0 && lift > 0 && step > kTiny * q;) {
      const Sums sums = evaluate(edge, lift);
      step = (sums.f - 1) / sums.slope / lift * q;
      q = step > 0 ? q - step : q;
      lift = pow(q, b_);
    }
    return {b_, edge, lift, q};
  }

 private:
  // Of p, p^(2-alpha) and 1, over the support.
  struct Sums {
    double f = 0, slope = 0, count = 0;
  };

  // With a lift, elements at c are in the support.
  Sums evaluate(double c, double lift = 0) {
    Sums sums;
    for_each_([&](double z) {
      if (!(z > c || (lift > 0 && z == c))) return;
      const double e = fma(b_, z - c, lift), p = pow(e, inverse_);
      sums.f += p;
      sums.slope += p / e;
      sums.count += 1;
    });
    group_.sum(sums.f, sums.slope, sums.count);
    return sums;
  }

  double least_above(double c) {
    double highest = -device::infinity<double>();  // of the negated ones
    for_each_([&](double z) {
      if (z > c) highest = max(highest, -z);
    });
    return -group_.max(highest);
  }

  // A lower bound of c above which are the elements of the support, `count` of them, and perhaps
  // some next to the root. Newton may pass the root or creep: the bracket is halved when two steps
  // have not done so.
  double bracket(double& count) {
    double low = -inverse_, high = 0, at_high = 0;
    for_each_([&](double z) {
      count += z > low;
      at_high += z == 0;
    });
    group_.sum(count, at_high);
    double c = low, width_before = high - low;
    for (int i = 0; count != at_high; ++i) {
      const Sums sums = evaluate(c);
      (sums.f >= 1 ? low : high) = c;
      (sums.f >= 1 ? count : at_high) = sums.count;
      // Newton's step on f^b.
      double next = c - expm1(-b_ * log(sums.f)) * sums.f / sums.slope * inverse_;
      const bool slow = i % 2 == 1 && high - low > width_before / 2;
      if (i % 2 == 1) width_before = high - low;
      if (slow || !(next > low && next < high)) next = low + (high - low) / 2;
      if (!(next > low && next < high)) break;
      c = next;
    }
    return low;
  }

  double b_, inverse_;
  G& group_;
  const Elements& for_each_;
};

}  // namespace pullback::entmax

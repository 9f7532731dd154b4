// The threshold of a row. With b = alpha - 1 and z = x - max(x) <= 0, find theta such that
//   f(theta) = sum_i [b z_i - theta]_+^(1/b) = 1,   -1 <= theta < 0.
// The method is that of cpu/solve-inl.hpp: up to alpha = 2 Newton steps on f^b from a lower bound
// rise to the root and never pass it (for alpha = 2 they are Michelot's, which are finite); what is
// above is in smxx_steep.cuh. Near alpha = 1, theta stands for c in p = (1 + b (z - c))^(1/b).
// Where a power costs more than the rest of a step, and p has a second derivative (alpha < 1.5), a
// step goes to the root of a parabola, which may lie beyond theirs by the cube of f - 1.
//
// Elements come from a functor: for_each(f) calls f(z) for all elements of this thread; f(z, kept)
// where the power of the last evaluation is to be kept; f(Several{z, count}) for equal ones.
#pragma once

#include "ops/entmax/cuda/smxx_group.cuh"
#include "ops/entmax/cuda/smxx_power.cuh"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {

inline Family family_of(double alpha) {
  if (!(alpha >= 1) || alpha == device::infinity<double>()) return Family::invalid;
  if (alpha == 1) return Family::softmax;
  if (alpha == 2) return Family::sparsemax;
  if (alpha == 1.5) return Family::entmax15;
  if (alpha < 1.125) return Family::near_one;
  return alpha < 2 ? Family::general : Family::steep;
}

inline double power_of(double x, double y) { return pow(x, y); }
inline float root_of(float x) { return device::sqrt_approx(x); }
inline double root_of(double x) { return sqrt(x); }
inline float reciprocal_of(float x) { return device::reciprocal_approx(x); }
// For b far from overflow and underflow: as exact as division, without its branches.
inline float quotient(float a, float b) {
  const float inverse = reciprocal_of(b);
  const float q = a * inverse;
  return fma(fma(-q, b, a), inverse, q);
}
inline double quotient(double a, double b) { return a / b; }
inline float magnitude(float x) { return fabsf(x); }
inline double magnitude(double x) { return fabs(x); }

template <class R>
inline constexpr R kEpsilon = sizeof(R) == 8 ? R{0x1p-52} : R{0x1p-23f};

// Of the e of an evaluation: e^(1/b), e^(1/b - 1) and, where smooth, e^(1/b - 2).
template <class R>
struct Sums {
  R f = 0, slope = 0, bend = 0;  // sparsemax: the sum and the number of the active z
};

// How powers are computed. Rough ones (see rough_power_of) will do for steps and for 16 bits; where
// p has a second derivative, that is smooth, steps go to the root of a parabola.
enum class Powers { exact, smooth, sharp };

// The root is theta + rest, rest being less than a step of theta's type; scale = 1 / f(theta) makes
// the sum of all p equal to 1.
template <class R>
struct Threshold {
  R theta, rest, scale;
  R step = 0;  // to theta, from where the sums were evaluated last
};

// p as a function of z and theta.
template <Family kFamily, class R, Powers kPowers = Powers::exact>
struct Power {
  static constexpr Family family = kFamily;
  static constexpr bool rough = kPowers != Powers::exact;
  static constexpr bool smooth = kPowers == Powers::smooth;
  static constexpr bool near_one = kFamily == Family::near_one;
  // Whether each element has its share of Threshold::rest: where p rises steeply from 0, a scale
  // for all would give to the large ones what belongs to many at the edge.
  static constexpr bool uses_rest = kFamily == Family::general;
  static constexpr R edge = near_one ? R{-1} : R{0};   // of excess(): where p leaves 0
  static constexpr R start = near_one ? R{0} : R{-1};  // theta with f >= 1, in every row
  // excess() is 0 where it would be negative: it is 1 at most, and the hardware clamps for nothing.
  static constexpr bool saturates = sizeof(R) == 4 && !near_one;

  R b, inverse;  // alpha - 1 and 1 / (alpha - 1)

  explicit Power(double alpha) : Power(static_cast<R>(alpha - 1), 1 / static_cast<R>(alpha - 1)) {
    if constexpr (kFamily == Family::sparsemax) b = inverse = 1;
    if constexpr (kFamily == Family::entmax15) {
      b = R{0.5};
      inverse = 2;
    }
  }
  Power(R b, R inverse) : b(b), inverse(inverse) {}
  // Whether p has a second derivative.
  bool has_bend() const { return inverse > 2; }
  // f(this), with rough powers where there are some. Sharp ones serve where there is a bend, too.
  template <class Use>
  auto with_rough(const Use& use) const {
    return with_rough(has_bend(), use);
  }
  template <class Use>
  auto with_rough([[maybe_unused]] bool by_bend, const Use& use) const {
    if constexpr (kFamily != Family::general || sizeof(R) != 4) {
      return use(*this);
    } else {
      return by_bend ? use(Power<kFamily, R, Powers::smooth>(b, inverse))
                     : use(Power<kFamily, R, Powers::sharp>(b, inverse));
    }
  }

  // b z - theta, or b (z - c).
  R unclamped(R z, R theta) const {
    if constexpr (near_one) return b * (z - theta);
    if constexpr (kFamily == Family::sparsemax) return z - theta;
    return fma(kFamily == Family::entmax15 ? R{0.5} : b, z, -theta);
  }
  R excess(R z, R theta) const {
    const R e = unclamped(z, theta);
    if constexpr (saturates) return __saturatef(e);
    return e;
  }
  // The same for the root itself, which may lie between two thetas.
  R excess(R z, const Threshold<R>& threshold) const {
    if constexpr (!uses_rest) return excess(z, threshold.theta);
    const R e = unclamped(z, threshold.theta) - threshold.rest;
    if constexpr (saturates) return __saturatef(e);
    return e;
  }
  static R positive(R e) { return saturates ? e : max(e, R{0}); }
  // Adds e's part to the sums, that of `weight` elements. The hardware's logarithm of 0 is -inf.
  // Returns the one power that this takes, times the weight.
  R add(Sums<R>& sums, R e, R weight = 1) const {
    if constexpr (smooth) {
      const R bend = weight * rough_power_of(e, inverse - 2), of_slope = bend * e;
      sums.f = fma(of_slope, e, sums.f);
      sums.slope += of_slope;
      sums.bend += bend;
      return bend;
    } else {
      const R of_slope = weight * slope(e);
      sums.f += value(e, of_slope);
      sums.slope += of_slope;
      return of_slope;
    }
  }
  // p from the power that add() returned before theta took its last step: with c = 1/b - 2 (or
  // 1/b - 1, less a term), e^(1/b) = (e + step)^c (e^2 - c step e + c (c + 1) / 2 step^2 - ...).
  // Near the edge, where the series is worth nothing, p is next to nothing: less than e.
  R value_after_step(R e, R power, R step) const {
    R quotient;
    if constexpr (smooth) {
      const R c = inverse - 2;
      quotient = fma(e, e - c * step, c * (c + 1) / 2 * step * step);
    } else {
      quotient = e - (inverse - 1) * step;
    }
    return min(__saturatef(power * quotient), e);
  }
  // p^(2-alpha), the summand of the slope: e^(1/b - 1), from which p costs a product. 0 where p is.
  R slope(R e) const {
    if constexpr (kFamily == Family::sparsemax) return e > 0 ? R{1} : R{0};
    if constexpr (kFamily == Family::entmax15) return positive(e);
    if constexpr (rough) return rough_power_of(e, inverse - 1);
    if (!(e > edge)) return R{0};
    if constexpr (near_one) return exp_of(log1p_of(e) * (inverse - 1));
    return power_of(e, inverse - 1);
  }
  R value(R e, R slope) const {
    if constexpr (kFamily == Family::sparsemax) return positive(e);
    return (near_one ? 1 + max(e, R{-1}) : positive(e)) * slope;  // e may be -inf
  }
  R value(R e) const {
    if constexpr (rough) return rough_power_of(e, inverse);
    return value(e, slope(e));
  }
  // From which |f - 1| on a step ends so close that p is right to `digits` bits. f - 1 is squared
  // in a step and divided by five or more, or raised to 1/b where p has no second derivative; by
  // curved steps it is cubed, and divided by 25 (alpha 1.5) to 300 (1.3) or more. The series of
  // value_after_step() leaves as much: its first ones are for that.
  R tolerance(int digits) const {
    if constexpr (sizeof(R) == 4) {
      const auto wanted = static_cast<R>(digits);
      if constexpr (kFamily != Family::general) return exp2_approx(-min(10.0f, wanted / 2 + 1));
      if constexpr (smooth)
        return exp2_approx(-0.75f - 5 * max(b, 0.3f) - 0.27f * (min(wanted, 22.0f) - 8));
      return exp2_approx(-max(b, 0.5f) * min(wanted + 1, 23.0f));
    }
    if constexpr (kFamily == Family::general) return power_of(kEpsilon<R>, max(R{0.5}, b));
    return R{0x1p-26};
  }
  // -df / dtheta.
  R descent(R slope) const { return near_one ? slope : slope * inverse; }
  // The step from f(theta), given f - 1 with more digits than f has.
  R step(const Sums<R>& sums, R f_minus_1) const {
    const R f = sums.f, slope = sums.slope;
    if constexpr (kFamily == Family::entmax15) {
      const R root = root_of(f);
      return quotient(root * f_minus_1, (root + 1) * slope);
    }
    if constexpr (rough) {
      // 1 - f^-b, by its series where the difference would have few digits.
      const R c = 1 + b;
      const R near = b * f_minus_1 * (1 - c / 2 * f_minus_1 * (1 - (1 + c) / 3 * f_minus_1));
      const R part = magnitude(f_minus_1) < 0x1p-5f ? near : 1 - rough_power_of(f, -b);
      const R over_slope = quotient(R{1}, slope);
      const R newton = part * f * over_slope;
      if constexpr (!smooth) return newton;
      // Of f^b: half its second derivative over the first.
      const R curvature = (inverse - 1) * (sums.bend * over_slope - slope * reciprocal_of(f));
      const R turn = 1 - 2 * max(curvature, R{0}) * newton;
      return 2 * newton * reciprocal_of(1 + root_of(max(turn, R{0})));
    }
    const R relative = -expm1_of(-b * log1p_of(f_minus_1)) * f / slope;  // (f - f^(1-b)) / slope
    return near_one ? relative * inverse : relative;
  }
};

// Whether y of type T comes from the powers of the last evaluation: see value_after_step().
template <class T, Family kFamily>
inline constexpr bool kByLastPowers = kFamily == Family::general && sizeof(T) == 2;

// What writes y: a 16-bit one shows no more than the rough digits.
template <class T, Family kFamily>
auto power_of_output(const Power<kFamily, float>& power) {
  if constexpr (kFamily == Family::general && sizeof(T) == 2) {
    return Power<kFamily, float, Powers::sharp>(power.b, power.inverse);
  } else {
    return power;
  }
}

// p for y of type T. In 16 bits the rest of theta does not show.
template <class T, class P, class R>
R probability(const P& power, R z, const Threshold<R>& threshold) {
  if constexpr (sizeof(T) == 2 && sizeof(R) == 4) {
    return power.value(power.excess(z, threshold.theta));
  }
  const R p = power.value(power.excess(z, threshold));
  return P::uses_rest ? p : p * threshold.scale;
}

template <class P, class R, class G>
void sum_over(Sums<R>& sums, G& group) {
  if constexpr (P::smooth) {
    group.sum(sums.f, sums.slope, sums.bend);
  } else {
    group.sum(sums.f, sums.slope);
  }
}

// At most this many f32 summands before they are added up in double: rows of any length.
inline constexpr int kPartLength = 64;

// Elements that are equal.
struct Several {
  float z, count;
};
template <class R>
R z_of(R z) {
  return z;
}
inline float z_of(Several several) { return several.z; }
template <class R>
R count_of(R) {
  return 1;
}
inline float count_of(Several several) { return several.count; }

template <class P, class R, class A, class G, class Elements>
Sums<A> evaluate(const P& power, R theta, G& group, const Elements& for_each) {
  Sums<A> sums;
  Sums<R> part;
  int length = 0;
  for_each([&](auto element, auto&... kept) {
    const R z = z_of(element), count = count_of(element);
    if constexpr (P::family == Family::sparsemax) {
      if (z > theta) {
        part.f += count * z;
        part.slope += count;
      }
    } else {
      const R of_e = power.add(part, power.excess(z, theta), count);
      ((kept = of_e), ...);
    }
    if constexpr (sizeof(A) > sizeof(R)) {
      if (++length == kPartLength) {
        sums.f += part.f;
        sums.slope += part.slope;
        sums.bend += part.bend;
        part = {};
        length = 0;
      }
    }
  });
  sums.f += part.f;
  sums.slope += part.slope;
  sums.bend += part.bend;
  sum_over<P>(sums, group);
  return sums;
}

template <class R>
inline constexpr int kAllDigits = sizeof(R) == 8 ? 53 : 24;

// Where a step from theta leads. Steps of rough powers stay where some p is not 0 and none above 1.
template <class P, class R>
R after_step(const P&, R theta, R step) {
  const R next = theta + step;
  if constexpr (P::family == Family::entmax15) return max(next, P::start);
  return P::rough ? min(max(next, P::start), theta / 8) : next;
}

// Steps of rough powers go either way. From this one on they only rise, which has an end; else
// rounding could make theta swing between two sides of the root.
inline constexpr int kFreeSteps = 8;

// alpha <= 2; `theta` is a lower bound of the root, for rough powers any estimate below 0. A is the
// type of the sums. `tolerance`: the |f - 1| from which the next step is the last. NaN ends it.
template <class A, class P, class R, class G, class Elements>
Threshold<R> rise(const P& power, R theta, G& group, const Elements& for_each, R tolerance) {
  Threshold<R> result{theta, R{0}, R{1}};
  [[maybe_unused]] R last_error = device::infinity<R>();
  bool done = false;
  for (int i = 0;; ++i) {
    const Sums<A> sums = evaluate<P, R, A>(power, result.theta, group, for_each);
    result.step = 0;
    if (!done) {
      if constexpr (P::family == Family::sparsemax) {
        // The threshold of the active set, which is the answer when it drops nobody.
        const R next = static_cast<R>(quotient(sums.f - 1, sums.slope));
        done = !(next > result.theta);
        if (!done) result.theta = next;
      } else {
        const Sums<R> rounded{static_cast<R>(sums.f), static_cast<R>(sums.slope),
                              static_cast<R>(sums.bend)};
        const R f_minus_1 = static_cast<R>(sums.f - 1);
        const bool stays = P::rough && i >= kFreeSteps && f_minus_1 < 0;
        const R step = stays ? R{0} : power.step(rounded, f_minus_1);
        const R root = after_step(power, result.theta, step);
        result.step = root - result.theta;
        result.rest = step - result.step;
        result.theta = root;
        // Sums that round up would never come closer to 1.
        bool moves = magnitude(step) > 4 * kEpsilon<R> * magnitude(root);
        const R error = magnitude(f_minus_1);
        if constexpr (P::rough) {
          // An error this small that does not shrink is that of the sums.
          moves = moves && (error < last_error || error > 0x1p-11f);
          last_error = error;
        }
        done = !(error > tolerance && moves);
        if (done) result.scale = quotient(R{1}, 1 + result.rest * power.descent(rounded.slope));
      }
    }
    if (group.all(done)) return result;
  }
}

// The same, by powers that are close enough for the sums: their errors are smaller than those of p
// and of either sign. `digits`: of p, that are wanted. `start_of`: theta, from the powers in use.
template <class A, class P, class G, class StartOf, class Elements>
auto solve(const P& power, const StartOf& start_of, G& group, const Elements& for_each,
           int digits) {
  return power.with_rough([&](const auto& rough) {
    return rise<A>(rough, start_of(rough), group, for_each, rough.tolerance(digits));
  });
}

// One step by a part of the row: the largest elements of all threads, which hold most of the sum
// where few elements do, and a sample of the others that stands for `weight` times as many. Of
// rough powers.
template <class P, class G, int kTops, class Elements>
float theta_by_sample(const P& power, float theta, const float (&tops)[kTops], float weight,
                      G& group, const Elements& sample) {
  Sums<float> sums;
  sample([&](float z) { power.add(sums, z == tops[0] ? 0.0f : power.excess(z, theta)); });
  sums.f *= weight;
  sums.slope *= weight;
  sums.bend *= weight;
#pragma unroll
  for (int i = 0; i < kTops; ++i) power.add(sums, power.excess(tops[i], theta));
  sum_over<P>(sums, group);
  return min(after_step(power, theta, power.step(sums, sums.f - 1)), theta / 8);
}

// Michelot's steps for sparsemax in f32. When the least active element stays above the next theta,
// that is the answer, and the step that would find so is saved.
template <class G, class Elements>
float rise_of_sparsemax(float theta, G& group, const Elements& for_each) {
  bool done = false;
  while (true) {
    float sum = 0, least = device::infinity<float>();
    int count = 0;
    for_each([&](float z) {
      if (z > theta) {
        sum += z;
        count += 1;
        least = min(least, z);
      }
    });
    group.sum_count_min(sum, count, least);
    if (!done) {
      const float next = quotient(sum - 1, static_cast<float>(count));
      done = !(next > theta) || least > next;
      if (next > theta) theta = next;
    }
    if (group.all(done)) return theta;
  }
}

// P: its Power, maybe const.
template <class P, class R>
R tau_of(double alpha, R largest, const Threshold<R>& threshold) {
  const double b = alpha - 1;
  const double theta = static_cast<double>(threshold.theta) + static_cast<double>(threshold.rest);
  return static_cast<R>(b * static_cast<double>(largest) + (P::near_one ? b * theta - 1 : theta));
}

}  // namespace pullback::entmax

// Lower bounds of a row's threshold from a few of its elements: the root of any subset is one.
#pragma once

#include "ops/entmax/cuda/smxx_solve.cuh"

namespace pullback::entmax {

// Sums of numbers in [0, kMost] over a warp, in units of kMost 2^-23: one instruction, not ten.
template <int kMost>
float warp_sum_of_fractions(float u) {
  const int bits = __float_as_int(fma(u, 1.0f / kMost, 1.0f)) - 0x3f800000;
  return kMost * 0x1p-23f * static_cast<float>(device::warp_sum_integer(bits));
}

// A warp as a group whose threads add up numbers in [0, kMost].
template <int kMost>
struct WarpOfFractions : SumsOneByOne<WarpOfFractions<kMost>> {
  using SumsOneByOne<WarpOfFractions>::sum;
  static constexpr int kThreads = device::kWarpSize;

  bool all(bool done) const { return done; }
  void sum(float& a) const { a = warp_sum_of_fractions<kMost>(a); }
};

// How close to 1 the f of a few elements comes, and what a step leaves of it.
inline constexpr float kBoundTolerance = 0x1p-3f;
template <class P>
inline constexpr float kBoundSlack = P::family == Family::general ? 0x1p-13f : 0x1p-18f;

// Jensen's bound: the threshold of z, kCount of each thread, were they all their mean. Of rough
// powers.
template <class P, class G, int kCount>
float bound_of_mean(const P& power, const float (&z)[kCount], G& group) {
  float above = 0;  // of b z + 1; what is below counts for nothing, from theta = -1 on
#pragma unroll
  for (int i = 0; i < kCount; ++i) above += power.excess(z[i], P::start);
  group.sum(above);
  constexpr float kAll = G::kThreads * kCount;
  return max(P::start, above / kAll - 1 - rough_power_of(kAll, -power.b));
}

// theta of the elements z of a warp, less the rounding of the sums.
template <class P, int kCount>
float warp_bound(const P& power, const float (&z)[kCount]) {
  constexpr float kSlack = 0x1p-18f * kCount;
  if constexpr (P::family == Family::sparsemax) {
    float u[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) u[i] = max(z[i] + 1, 0.0f);
    float theta = 0;  // of u
    while (true) {
      int active = 0;
      float part = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        active += __popc(__ballot_sync(device::kAllLanes, u[i] > theta));
        part += u[i] > theta ? u[i] : 0;
      }
      if (active == 0) break;
      const float sum = warp_sum_of_fractions<kCount>(part);
      const float next = quotient(sum - 1, static_cast<float>(active));
      if (!(next > theta)) break;
      theta = next;
    }
    return max(P::start, theta - 1 - kSlack);
  } else if constexpr (P::family == Family::entmax15) {
    float u[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) u[i] = max(fma(0.5f, z[i], 1.0f), 0.0f);
    float theta = 0;
    while (true) {
      float squares = 0, slope = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float d = max(u[i] - theta, 0.0f);
        squares = fma(d, d, squares);
        slope += d;
      }
      const float f = warp_sum_of_fractions<kCount>(squares);
      if (!(f > 1)) break;
      const float root = root_of(f);
      theta += quotient(root * (f - 1), (root + 1) * warp_sum_of_fractions<kCount>(slope));
      if (f < 1.1f) break;
    }
    return max(P::start, theta - 1 - 4 * kSlack);
  } else {
    WarpOfFractions<kCount> warp;
    const auto all = [&](auto use) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) use(z[i]);
    };
    const float theta = power.with_rough([&](const auto& rough) {
      float start = P::start;
      if constexpr (P::family == Family::general) start = bound_of_mean(rough, z, warp);
      return rise<float>(rough, start, warp, all, kBoundTolerance).theta;
    });
    return max(P::start, theta - kBoundSlack<P> * (1 + magnitude(theta)));
  }
}

struct Estimate {
  float theta, bound;  // of the threshold; below it
};
// Jensen's bound and, where steps are Newton's, one of them from there.
template <class P, class G, int kCount>
Estimate estimate(const P& power, const float (&z)[kCount], G& group) {
  const float theta = bound_of_mean(power, z, group);
  if constexpr (P::smooth) return {theta, theta - kBoundSlack<P>};
  const auto all = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(z[i]);
  };
  const Sums<float> sums = evaluate<P, float, float>(power, theta, group, all);
  return {after_step(power, theta, power.step(sums, sums.f - 1)), theta - kBoundSlack<P>};
}

inline float bound_slack(float largest, float edge) {
  return 8 * kEpsilon<float> * (magnitude(largest) + magnitude(edge) + 1);
}
// From a lower bound of theta, relative to `largest`, to one of the x in the support, and back.
// Both round downwards.
template <class P>
float bound_of_theta(const P& power, float largest, float theta) {
  const float edge = P::near_one ? theta - power.inverse : theta * power.inverse;
  return largest + edge - bound_slack(largest, edge);
}
template <class P>
float theta_of_bound(const P& power, float largest, float bound) {
  const float edge = bound - largest;
  const float below = edge - bound_slack(largest, edge);
  return max(P::start, P::near_one ? below + power.inverse : below * power.b);
}

// From some elements of each of a row's lanes.
template <class P, int kLanes, int kCount>
float lower_bound(const P& power, const float (&z)[kCount], LaneGroup<kLanes>& group) {
  const auto all = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(z[i]);
  };
  const float theta = power.with_rough([&](const auto& rough) {
    return rise<float>(rough, P::start, group, all, kBoundTolerance).theta;
  });
  return max(P::start, theta - kBoundSlack<P> * (1 + magnitude(theta)));
}
// From one element of each thread of a group.
template <class P, class G>
float lower_bound(const P& power, float z, G& group) {
  const float one[] = {z};
  const float bound = warp_bound(power, one);
  return G::kThreads == device::kWarpSize ? bound : group.max(bound);
}
template <class P, class G>
double lower_bound(const P& power, double z, G& group) {
  const auto one = [&](auto use) { use(z); };
  const double theta =
      rise<double>(power, P::start, group, one, power.tolerance(kAllDigits<double>)).theta;
  return max(P::start, theta - 16 * kEpsilon<double> * (1 + magnitude(theta)));
}

}  // namespace pullback::entmax

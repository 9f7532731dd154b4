// x^y in float for x in (0, 1], in a fraction of powf's instructions.
#pragma once

#include "device/float.cuh"

namespace pullback::entmax {

inline float exp_of(float x) { return expf(x); }
inline double exp_of(double x) { return exp(x); }
inline float log_of(float x) { return logf(x); }
inline double log_of(double x) { return log(x); }
inline float log1p_of(float x) { return log1pf(x); }
inline double log1p_of(double x) { return log1p(x); }
inline float expm1_of(float x) { return expm1f(x); }
inline double expm1_of(double x) { return expm1(x); }

using device::exp2_approx;

// x^y as close as the rounding of log2(x) y allows, log2 of the fraction in [2/3, 4/3) by a
// polynomial that is exact to 1e-8.
inline float power_of(float x, float y) {
  const int bits = __float_as_int(x);
  const int above = bits - 0x3f2aaaab;
  const float t = __int_as_float(bits - (above & static_cast<int>(0xff800000u))) - 1;
  const float exponent = __int_as_float((above >> 23) + 0x4b400000) - 12582912;
  float q = 0.212282702f;
  q = fma(q, t, -0.226166651f);
  q = fma(q, t, 0.199483514f);
  q = fma(q, t, -0.235942826f);
  q = fma(q, t, 0.288896978f);
  q = fma(q, t, -0.360844076f);
  q = fma(q, t, 0.480890632f);
  q = fma(q, t, -0.721345544f);
  q = fma(q, t, 1.44269514f);
  return exp2_approx(fma(exponent, y, q * t * y));
}

// To some 1e-6, by the hardware's own log and exp.
inline float rough_power_of(float x, float y) { return exp2_approx(device::log2_approx(x) * y); }

}  // namespace pullback::entmax

// Single instructions, and 16-byte pieces of rows.
#pragma once

#include "device/float.cuh"
#include "device/memory.cuh"

namespace pullback::segment_cuda {

using device::Real;

// A NaN beats everything.
inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
inline double larger(double a, double b) { return a != a || a > b ? a : b; }

// For arguments of at most 0, where its absolute error is below an ulp of 1.
inline float exponential(float x) { return __expf(x); }
inline double exponential(double x) { return exp(x); }
inline float logarithm(float x) { return logf(x); }
inline double logarithm(double x) { return log(x); }

}  // namespace pullback::segment_cuda

// The arithmetic of forward on whole vectors: y = 2^((x − m) c) / Σ 2^((x − m) c), where m is the
// maximum of a row and c = scale · log₂e (f64: powers of e, c = scale). Subtracting first is exact
// where it matters, however large the scores are. A negative scale is the vector's: its sign bits
// are flipped, and c is positive.
#pragma once

#include "device/float.cuh"
#include "device/memory.cuh"

namespace pullback::block_softmax {

using namespace device;

inline constexpr float kLog2E = 1.4426950408889634f;

inline float factor_of_scores(float scale) { return scale * kLog2E; }
inline double factor_of_scores(double scale) { return scale; }

// Results below 2^-126 are 0 in f32.
inline float power(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}
inline double power(double exponent) { return exp(exponent); }

template <class T>
union Words {
  Vector<T> vector;
  uint32_t word[4];
};

template <class T>
void negate(Vector<T>& vector) {
  Words<T> words = {vector};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 8) {
      if (w % 2 == 1) words.word[w] ^= 0x80000000u;
    } else {
      words.word[w] ^= sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
    }
  }
  vector = words.vector;
}

inline void unpack(uint32_t word, float& low, float& high, bf16) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}
inline void unpack(uint32_t word, float& low, float& high, f16) {
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(low), "=f"(high)
      : "r"(word));
}

// By words: 16-bit pieces in registers of their own would take twice the space.
template <class T>
struct Reals {
  Real<T> element[kVectorLength<T>];
};
template <class T>
Reals<T> reals(const Vector<T>& vector) {
  Reals<T> result;
  if constexpr (sizeof(T) == 2) {
    const Words<T> words = {vector};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      unpack(words.word[w], result.element[2 * w], result.element[2 * w + 1], T{});
    }
  } else {
#pragma unroll
    for (int e = 0; e < kVectorLength<T>; ++e) result.element[e] = vector.element[e];
  }
  return result;
}

inline uint32_t packed_maximum(uint32_t a, uint32_t b, bf16) {
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
inline uint32_t packed_maximum(uint32_t a, uint32_t b, f16) {
  uint32_t result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// NaN loses against any number.
inline float larger(float a, float b) { return fmaxf(a, b); }
inline double larger(double a, double b) { return fmax(a, b); }

// The maximum of a vector's elements.
template <class T>
Real<T> maximum_of(const Vector<T>& vector) {
  using R = Real<T>;
  if constexpr (sizeof(T) == 2) {
    const Words<T> words = {vector};
    const uint32_t a = packed_maximum(words.word[0], words.word[1], T{});
    const uint32_t b = packed_maximum(words.word[2], words.word[3], T{});
    const uint32_t both = packed_maximum(a, b, T{});
    R low, high;
    unpack(both, low, high, T{});
    return larger(low, high);
  } else {
    R result = vector.element[0];
#pragma unroll
    for (int e = 1; e < kVectorLength<T>; ++e) result = larger(result, vector.element[e]);
    return result;
  }
}

inline uint32_t pack(float low, float high, bf16) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
inline uint32_t pack(float low, float high, f16) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <class T, class R>
Vector<T> rounded(const R (&values)[kVectorLength<T>]) {
  Words<T> words;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words.word[w] = pack(values[2 * w], values[2 * w + 1], T{});
  } else {
#pragma unroll
    for (int e = 0; e < kVectorLength<T>; ++e) words.vector.element[e] = values[e];
  }
  return words.vector;
}

}  // namespace pullback::block_softmax

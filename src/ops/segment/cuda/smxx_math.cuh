// Single instructions, and 16-byte pieces of rows.
#pragma once

#include "device/async_copy.cuh"
#include "device/float.cuh"
#include "device/memory.cuh"
#include "device/shared.cuh"

namespace pullback::segment_cuda {

using device::async_commit;
using device::async_copy;
using device::async_wait;
using device::Real;
using device::shared_address;

// A NaN beats everything.
inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
inline double larger(double a, double b) { return a != a || a > b ? a : b; }

#if __CUDA_ARCH__ >= 900
// Whether rows of T come in pairs of columns that can be compared together.
template <class T, int kCount>
inline constexpr bool kPairs = sizeof(T) == 2 && kCount % 8 == 0;

template <class T>
struct Pair;
template <>
struct Pair<device::bf16> {
  // The larger ones; a NaN beats everything.
  static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  // All bits of a half, or none: whether a is above b, or (kEqual) no less.
  template <bool kEqual>
  static uint32_t above(uint32_t a, uint32_t b) {
    uint32_t mask;
    if constexpr (kEqual) {
      asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    } else {
      asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    }
    return mask;
  }
};
template <>
struct Pair<device::f16> {
  static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  template <bool kEqual>
  static uint32_t above(uint32_t a, uint32_t b) {
    uint32_t mask;
    if constexpr (kEqual) {
      asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    } else {
      asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    }
    return mask;
  }
};
#else
template <class T, int kCount>
inline constexpr bool kPairs = false;
#endif

constexpr int alignment_of(int bytes) { return bytes < 16 ? bytes : 16; }

// kCount neighbours of a row, as they lie in memory.
template <class T, int kCount>
struct alignas(alignment_of(sizeof(T) * kCount)) Values {
  T element[kCount];

  Real<T> real(int i) const { return device::to_real(element[i]); }
  T stored(int i) const { return element[i]; }
  static Values of(const Real<T> (&values)[kCount]) {
    Values result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.element[i] = device::from_real<T>(values[i]);
    return result;
  }
};

template <class T, int kCount>
struct alignas(alignment_of(2 * kCount)) PackedValues {
  uint32_t word[kCount / 2];

  float real(int i) const { return device::to_real(stored(i)); }
  T stored(int i) const { return {static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16))}; }
  template <class Result>
  static Result pack(const float (&values)[kCount]) {
    Result result;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      result.word[i] = device::pack<T>(values[2 * i], values[2 * i + 1]);
    }
    return result;
  }
};
template <int kCount>
  requires(kCount % 8 == 0)
struct Values<device::bf16, kCount> : PackedValues<device::bf16, kCount> {
  static Values of(const float (&values)[kCount]) {
    return PackedValues<device::bf16, kCount>::template pack<Values>(values);
  }
};
template <int kCount>
  requires(kCount % 8 == 0)
struct Values<device::f16, kCount> : PackedValues<device::f16, kCount> {
  static Values of(const float (&values)[kCount]) {
    return PackedValues<device::f16, kCount>::template pack<Values>(values);
  }
};

// 16-byte pieces pass by the first-level cache: every one is touched once.
template <class T, int kCount>
Values<T, kCount> load_once(const T* at) {
  if constexpr (sizeof(T) * kCount == 16) {
    union {
      device::Words words;
      Values<T, kCount> values;
    } piece = {device::load_words(at)};
    return piece.values;
  } else {
    return *reinterpret_cast<const Values<T, kCount>*>(at);
  }
}
template <class T, int kCount>
void store_once(T* at, const Values<T, kCount>& values) {
  if constexpr (sizeof(T) * kCount == 16) {
    union {
      Values<T, kCount> values;
      device::Words words;
    } piece = {values};
    device::store_words(at, piece.words);
  } else {
    *reinterpret_cast<Values<T, kCount>*>(at) = values;
  }
}

// Keeps the compiler from computing the value again where it is used.
inline uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
inline int64_t kept(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// 4, 8 or 16 bytes of shared memory.
template <class T>
T load_shared(uint32_t from) {
  union {
    uint32_t word[sizeof(T) / 4];
    T value;
  } piece;
  if constexpr (sizeof(T) == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]),
                   "=r"(piece.word[3])
                 : "r"(from));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1])
                 : "r"(from));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(piece.word[0]) : "r"(from));
  }
  return piece.value;
}

// Its error is below an ulp of 1 for arguments up to 0, and grows with what is above.
inline float exponential(float x) { return device::exp2_approx(x * 1.44269504088896341f); }
inline double exponential(double x) { return exp(x); }
// Off by 2e-7 at most.
inline float logarithm(float x) { return device::log2_approx(x) * 0.693147180559945309f; }
inline double logarithm(double x) { return log(x); }

}  // namespace pullback::segment_cuda

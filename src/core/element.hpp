// Storage types of the 16-bit floats, and access to elements whose dtype is known at run time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "pullback/dtype.hpp"
#include "pullback/error.hpp"

namespace pullback {

// Both round to nearest even and keep NaN a NaN.
// As with float, no value by default: scratch of these is not filled for nothing.
struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    // Adding half an ulp would carry a NaN's payload into the sign, so NaNs are only made quiet.
    bits = static_cast<std::uint16_t>(nan ? (word >> 16) | 0x40u
                                          : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

struct float16 {
  std::uint16_t bits;

  float16() = default;
  explicit float16(float value);
  explicit operator float() const;
};

inline float16::float16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
  const std::uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    bits = sign | 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    bits = sign | 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the float adder rounds to steps of 2^-24
    const float steps = std::bit_cast<float>(magnitude) + 0.5f;
    bits = sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(steps) - 0x3f000000u);
  } else {
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    bits = sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
  }
}

inline float16::operator float() const {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float steps = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -steps : steps;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// A double is rounded once: first to odd in float (13 spare bits make that exact), then to nearest.
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (!std::isfinite(nearest) || static_cast<double>(nearest) == value) return nearest;
  auto word = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --word;
  return std::bit_cast<float>(word | 1u);
}

template <class T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    return T(round_to_odd(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<bfloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<float16> {
  static constexpr DType value = DType::f16;
};
template <class T>
inline constexpr DType kDTypeOf = DTypeOf<T>::value;

// Calls f.template operator()<T>() with the C++ type of a floating dtype.
template <class F>
decltype(auto) dispatch_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f.template operator()<double>();
    case DType::f32:
      return f.template operator()<float>();
    case DType::bf16:
      return f.template operator()<bfloat16>();
    case DType::f16:
      return f.template operator()<float16>();
    default:
      throw Error(ErrorCode::internal, "dispatch_floating: not a floating dtype");
  }
}

// The element at `index` elements past `data`, as a double; integers up to 2^53 are exact.
inline double load_element(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::bf16:
      return to_double(static_cast<const bfloat16*>(data)[index]);
    case DType::f16:
      return to_double(static_cast<const float16*>(data)[index]);
    case DType::i64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    case DType::i32:
      return static_cast<const std::int32_t*>(data)[index];
    case DType::u8:
    case DType::boolean:
      return static_cast<const std::uint8_t*>(data)[index];
  }
  return 0;
}

inline void store_element(DType dtype, void* data, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::bf16:
      static_cast<bfloat16*>(data)[index] = from_double<bfloat16>(value);
      break;
    case DType::f16:
      static_cast<float16*>(data)[index] = from_double<float16>(value);
      break;
    case DType::i64:
      static_cast<std::int64_t*>(data)[index] = static_cast<std::int64_t>(value);
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case DType::u8:
    case DType::boolean:
      static_cast<std::uint8_t*>(data)[index] = static_cast<std::uint8_t>(value);
      break;
  }
}

// An index tensor's element (i32 or i64), exact.
inline std::int64_t load_index(DType dtype, const void* data, std::int64_t index) {
  return dtype == DType::i64 ? static_cast<const std::int64_t*>(data)[index]
                             : static_cast<const std::int32_t*>(data)[index];
}

}  // namespace pullback

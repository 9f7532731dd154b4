// Element types of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "pullback/export.hpp"

namespace pullback {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32, u8, boolean };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::f16; }

// "f64", "f32", "bf16", "f16", "i64", "i32", "u8", "bool".
PULLBACK_API std::string_view name_of(DType dtype);

// The type that sums and saved statistics (logsumexp, tau, delta) have: f64 for f64, else f32.
constexpr DType accumulation_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace pullback

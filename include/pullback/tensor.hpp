// TensorSpec: dtype, shape and strides of a tensor, without its data.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "pullback/dtype.hpp"
#include "pullback/export.hpp"

namespace pullback {

inline constexpr int kMaxRank = 8;

// More than any memory holds. A tensor's sizes other than 0 multiply to at most these bytes, and
// its strides reach no further, even where a size of 0 leaves it without elements.
inline constexpr std::int64_t kMaxTensorBytes = std::int64_t{1} << 50;

// A default-constructed spec means "this tensor is not given". Strides count elements and may be
// zero (a broadcast) or negative in inputs; outputs must not overlap themselves.
// The data pointer that goes with a spec points at the element with index [0, 0, …].
struct PULLBACK_API TensorSpec {
  DType dtype = DType::f32;
  int rank = -1;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  // Row-major. Throws Error when there are more than kMaxRank dimensions.
  static TensorSpec contiguous(DType dtype, std::span<const std::int64_t> shape);
  static TensorSpec contiguous(DType dtype, std::initializer_list<std::int64_t> shape);

  bool given() const { return rank >= 0; }
  std::int64_t numel() const;  // 1 for rank 0
  bool is_contiguous() const;
  // Lowest and highest element offset that an index can reach; {0, -1} for an empty tensor.
  std::array<std::int64_t, 2> offset_range() const;
  std::string to_string() const;  // "f32 [2, 128, 8, 64]", with strides when not contiguous

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

}  // namespace pullback

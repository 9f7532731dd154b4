// Sequences and the band mask, the same on host and device.
#pragma once

#include "device/types.cuh"

namespace pullback::attention {

// Rows of a batch item: within its own [S,H,D] slice, or, when varlen, within [total,H,D].
struct Sequence {
  int64_t q_begin = 0, q_length = 0;
  int64_t k_begin = 0, k_length = 0;
};

struct Range {
  int64_t begin = 0, end = 0;  // empty: begin == end
  constexpr bool empty() const { return begin == end; }
};

// Beyond every position (those are below 2^60), yet sums of three stay within 64 bits.
inline constexpr int64_t kFar = int64_t{1} << 61;

// Query i sees the keys in [i + o - left, i + o + right], o = 0 or, from the bottom right corner,
// Sk - Sq. Unbounded sides are kFar.
struct Band {
  int64_t left = kFar, right = kFar;
  bool bottom_right = false;
};

constexpr int64_t diagonal(const Band& band, const Sequence& sequence) {
  return band.bottom_right ? sequence.k_length - sequence.q_length : 0;
}

namespace detail {
constexpr int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}
constexpr Range clamped_range(int64_t first, int64_t last, int64_t length) {
  const int64_t begin = clamped(first, 0, length);
  return {begin, clamped(last + 1, begin, length)};
}
}  // namespace detail

// Keys that query i sees, positions within the sequence. Both ends never fall as i grows.
constexpr Range visible_keys(const Band& band, const Sequence& sequence, int64_t i) {
  const int64_t center = i + diagonal(band, sequence);
  return detail::clamped_range(center - band.left, center + band.right, sequence.k_length);
}

// Queries that see key j.
constexpr Range seeing_queries(const Band& band, const Sequence& sequence, int64_t j) {
  const int64_t center = j - diagonal(band, sequence);
  return detail::clamped_range(center - band.right, center + band.left, sequence.q_length);
}

}  // namespace pullback::attention

// One shift a column for the exponentials of all segments that a warp has at a time, in place of
// one for each run of rows (ExponentialSum), which every row would have to look for.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// Whether all segments that a warp has at a time may have one shift a column.
template <class Op, class T>
inline constexpr bool kSharesShift =
    kAims<Op> && (sizeof(T) == 2 || (sizeof(T) == 4 && !kStoresPair<Op>));
// Which one, and what sums are of use then.
template <class Op, class T>
struct SharedShift {
  // In 16 bits 2^(x log2(e) + turn) saves a product (kFarthestShift). Rounding of `turn` is a
  // factor of all sums, but nothing that a sum may have which is stored.
  static constexpr bool kTurns = sizeof(T) == 2 && !kStoresPair<Op>;

  static bool serves(float x) { return kTurns ? fabsf(x) <= kFarthestShift : x - x == 0; }
  // Of rows of which `largest` is. In 32 bits 0 near 0, as aim_at() has it.
  static float at(float largest) {
    return serves(largest) && (sizeof(T) == 2 || fabsf(largest) > 8) ? largest : 0;
  }
  // Whether no row is not finite or so far above the shift that its product with log2(e) loses
  // digits, and not all are so far below that powers vanish, or, in 32 bits, lose digits, too. (As
  // 0 may be the shift without being a row, the least sum has to outweigh the most that is lost
  // where the two are put together, its shift so far below that its power, 2^-126, counts for
  // nothing.)
  template <int kCount>
  static bool are_exact(const float (&sums)[kCount]) {
    uint32_t farthest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) farthest = max(farthest, __float_as_uint(sums[i]) - kLeast);
    return farthest <= kMost - kLeast;
  }

  static constexpr uint32_t power_of_2(int exponent) { return (127u + exponent) << 23; }
  static constexpr uint32_t kLeast = power_of_2(sizeof(T) == 2 ? -50 : -15);
  static constexpr uint32_t kMost = power_of_2(sizeof(T) == 2 ? 50 : 14);
};

}  // namespace pullback::segment_cuda

// What a thread's rows of scores see of a tile, on Hopper: a word for each row, as a bit costs less
// to ask for than its column's number to compare (the compiler moves seven at a time to
// predicates).
#pragma once

#include "ops/attention/cuda/smxx_scores.cuh"

namespace pullback::attention {

// How many of the thread's columns come before column `end`, which counts from its first one.
template <bool kInterleaved>
int columns_before(int end) {
  if (!kInterleaved) return ((end + 7) >> 3) + ((end + 6) >> 3);
  const int rest = end & 31;
  return (end >> 5) * 8 + (rest < 8 ? rest : 8);
}

// Of the thread's columns from `begin` to `end`, which count from its first one: bit 2 · n + c for
// column c of the n-th eight.
template <bool kInterleaved = false>
uint32_t bits_of_columns(int begin, int end) {
  const int before = columns_before<kInterleaved>(begin), up_to = columns_before<kInterleaved>(end);
  const int first = before > 0 ? before : 0, count = up_to > first ? up_to - first : 0;
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}
inline bool has_column(uint32_t bits, int n, int c) { return (bits & 1u << (2 * n + c)) != 0; }

// hide() of smxx_scores.cuh, for a warp's 16 rows.
template <bool kInterleaved, int kKeyTiles>
void hide_by_bits(float (&s)[kKeyTiles][4], int first_n, int end_n, const SequenceBand& band,
                  int query, int part_key, int lane) {
  static_assert(2 * kKeyTiles <= 32);
  // The band's edges for the warp's first row. So far away that they meet no tile, they are not
  // exact.
  const auto near = [](int64_t key) {
    constexpr int64_t kMost = 0x3fffffff;
    return static_cast<int>(key < -kMost ? -kMost : key > kMost ? kMost : key);
  };
  const int own_begin = near(int64_t{query} + band.first - part_key);
  const int own_end = near(int64_t{query} + band.end - part_key);
  const int end_key = band.keys - part_key - first_key_of<kInterleaved>(lane);
  const int row = first_row_of(lane) - first_key_of<kInterleaved>(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = own_begin + row + row_at(0, half);
    const int end = own_end + row + row_at(0, half);
    const uint32_t seen = bits_of_columns<kInterleaved>(begin, end < end_key ? end : end_key);
#pragma unroll
    for (int n = first_n; n < end_n; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[n][2 * half + e];
        x = has_column(seen, n - first_n, e) ? x : -infinity<float>();
      }
    }
  }
}

}  // namespace pullback::attention

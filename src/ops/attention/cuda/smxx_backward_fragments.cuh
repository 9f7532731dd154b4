// Fragments of the backward pass's tiles: where a lane finds its rows, products over them, and what
// is done where a row holds NaN or infinity that not every row of the other operand may see.
#pragma once

#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"

namespace pullback::attention {

using namespace device;

// For an argument that is known when compiling.
template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// The rows that a lane hands to load_matrices. In a tile whose rows are the rows of A (or, loaded
// transposed, the depth of B), 16 x 16 elements come in the order of A's registers (or of two B's).
// kSwapped: whose rows are the columns of B (or, loaded transposed, the depth of A).
template <class T, int kColumns, bool kSwapped>
struct LaneRows {
  using Layout = TileLayout<T, kColumns>;
  uint32_t row, chunk;  // bytes

  LaneRows(uint32_t tile, int lane) {
    const int r = kSwapped ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int c = kSwapped ? lane / 8 % 2 : lane / 16;
    row = tile + static_cast<uint32_t>(r * Layout::kRowBytes);
    chunk = static_cast<uint32_t>((c ^ Layout::swizzle(r)) * 16);
    // Or the compiler keeps every at() of a loop in registers that are needed for sums.
    asm volatile("" : "+r"(chunk));
  }
  // The 16 x 16 elements from (first_row, 8 · first_chunk) on; a multiple of 8, an even number.
  uint32_t at(int first_row, int first_chunk) const {
    return row + static_cast<uint32_t>(first_row * Layout::kRowBytes) +
           (chunk ^ static_cast<uint32_t>(first_chunk * 16));
  }
};

// Two 8 x 8 matrices, of lanes 0 … 15.
inline void load_two_matrices(uint32_t& a, uint32_t& b, uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(row_address)
               : "memory");
}

template <class T>
inline constexpr uint32_t kExponent = 0x7f80u;
template <>
inline constexpr uint32_t kExponent<f16> = 0x7c00u;

// NaN or infinity in the low or the high element.
template <class T>
bool low_not_finite(uint32_t pair) {
  return (pair & kExponent<T>) == kExponent<T>;
}
template <class T>
bool high_not_finite(uint32_t pair) {
  return (pair >> 16 & kExponent<T>) == kExponent<T>;
}
template <class T>
uint32_t finite_or_zero(uint32_t pair) {
  return (low_not_finite<T>(pair) ? 0 : pair & 0xffffu) |
         (high_not_finite<T>(pair) ? 0 : pair & 0xffff0000u);
}

// What weighs nothing, rather than little, is -0 in the tiles of p and ds.
inline constexpr uint32_t kUnseenBits = 0x8000u;

// sum + 0 · pair, or in bf16 sum + 2^67 · pair: not finite once a pair held NaN, infinity or, in
// bf16, 2^61 or more.
template <class T>
uint32_t add_extreme(uint32_t sum, uint32_t pair) {
  if constexpr (kExponent<T> == kExponent<f16>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0x61006100));
  }
  return sum;
}

// Whether the thread's share of some shared memory holds NaN, infinity or what may become that in
// a product: then what is not seen has to be told from what is.
template <class T, int kThreads>
bool has_extremes(uint32_t first, uint32_t bytes) {
  uint32_t sum = 0;
#pragma unroll 8
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += kThreads * 16) {
    uint32_t words[4];
    load_shared(words, first + at);
#pragma unroll
    for (const uint32_t pair : words) sum = add_extreme<T>(sum, pair);
  }
  return low_not_finite<T>(sum) || high_not_finite<T>(sum);
}

// All threads of the block: NaN and infinity in rows [first, first + count) of a tile become 0.
template <class T, int kColumns, int kThreads>
void make_finite(uint32_t tile, int first, int count) {
  constexpr uint32_t kRowBytes = TileLayout<T, kColumns>::kRowBytes;
  const uint32_t end = tile + static_cast<uint32_t>(first + count) * kRowBytes;
#pragma unroll 1
  for (uint32_t at = tile + static_cast<uint32_t>(first) * kRowBytes + thread_number<true>() * 4;
       at < end; at += kThreads * 4) {
    store_shared(at, finite_or_zero<T>(load_shared_word(at)));
  }
}

// sum += weights · rows, over the elements of rows [first, first + count) of `tile` that are not
// finite: the product will take them for 0. Unseen weights are skipped. The weights lie in
// `weight_tile` [rows of sum][rows of tile]; columns from first_chunk on.
template <class T, int kColumns, int kWeights, int kM, int kN>
void add_not_finite(float (&sum)[kM][kN][4], uint32_t weight_tile, int weight_row, uint32_t tile,
                    int first, int count, int first_chunk, int lane) {
#pragma unroll 1
  for (int i = first; i < first + count; ++i) {
    float weight[kM][2];
    bool seen[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = weight_row + 16 * m + 8 * half + lane / 4;
        const uint32_t pair =
            load_shared_word(weight_tile + TileLayout<T, kWeights>::offset(row, i / 8) +
                             static_cast<uint32_t>(i % 8 / 2 * 4));
        const uint32_t bits = i % 2 == 0 ? pair & 0xffffu : pair >> 16;
        seen[m][half] = bits != kUnseenBits;
        weight[m][half] = to_real(T{static_cast<uint16_t>(bits)});
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t pair =
          load_shared_word(tile + TileLayout<T, kColumns>::offset(i, first_chunk + n) +
                           static_cast<uint32_t>(lane % 4 * 4));
      const bool wanted[2] = {low_not_finite<T>(pair), high_not_finite<T>(pair)};
      float element[2];
      unpack<T>(pair, element[0], element[1]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (wanted[e % 2] && seen[m][e / 2]) sum[m][n][e] += weight[m][e / 2] * element[e % 2];
        }
      }
    }
  }
}

// Writes pairs of 32 rows x 8 · kN columns, as sums of products lie, to rows [first_row, + 32) of a
// tile.
template <class Layout, int kN>
void store_pairs(uint32_t tile, const uint32_t (&pairs)[2][kN][2], int first_row, int first_column,
                 int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 16 * m + 8 * half;
        store_shared(
            tile + Layout::offset(row, first_column / 8 + n) + static_cast<uint32_t>(lane % 4 * 4),
            pairs[m][n][half]);
      }
    }
  }
}

// sum [16 · kM rows, 8 · kN columns] += a · (rows of a tile), over 16 rows of the tile: depth runs
// down the tile, columns across.
template <class T, int kM, int kN, class Rows>
void multiply_rows(float (&sum)[kM][kN][4], const uint32_t (&a)[kM][4], const Rows& rows,
                   int first_row, int first_chunk) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, rows.at(first_row, first_chunk + n));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      mma_16816<T>(sum[m][n], a[m], b[0], b[1]);
      mma_16816<T>(sum[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// sum = rows [a_row, + 32) of one tile times rows [b_row, + 8 · kN) of another, across their
// columns.
template <class T, int kColumns, int kN, class ARows, class BRows>
void multiply_columns(float (&sum)[2][kN][4], const ARows& a_rows, int a_row, const BRows& b_rows,
                      int b_row) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][n][e] = 0;
    }
  }
#pragma unroll
  for (int depth = 0; depth < kColumns / 8; depth += 2) {
    uint32_t a[2][4], b[kN][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) load_matrices(a[m], a_rows.at(a_row + 16 * m, depth));
#pragma unroll
    for (int n = 0; n + 1 < kN; n += 2) {
      uint32_t both[4];
      load_matrices(both, b_rows.at(b_row + 8 * n, depth));
      b[n][0] = both[0], b[n][1] = both[1], b[n + 1][0] = both[2], b[n + 1][1] = both[3];
    }
    if constexpr (kN % 2 == 1) {
      load_two_matrices(b[kN - 1][0], b[kN - 1][1], b_rows.at(b_row + 8 * (kN - 1), depth));
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_16816<T>(sum[m][n], a[m], b[n][0], b[n][1]);
    }
  }
}

}  // namespace pullback::attention

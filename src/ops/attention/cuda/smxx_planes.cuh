// f32 on the f16 tensor cores. A number is two of f16: x = unit · (high + low), high the nearest
// f16 to x / unit and low the nearest to what is left, 22 bits in all (Ootomo, Yokota 2022). A
// product is high high + high low + low high: what is dropped is of the size of f32's own rounding.
// `unit` is a power of two that takes the largest finite element of a tile to 2^14 … 2^15: the
// largest 2^17 of magnitudes have all 22 bits, smaller elements an error of 2^-39 of the tile's
// largest.
//
// The tensor cores truncate the sums they make, so that the errors of a long sum would all point
// the same way: every 16 terms leave them and are added up in plain f32.
//
// In shared memory a tile of planes is a tile of f32 (device/shared_tile.cuh) split in place: 8
// elements, two chunks of 16 bytes, become one chunk of their high parts and one of the low.
#pragma once

#include "device/float.cuh"
#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"
#include "ops/attention/cuda/smxx_units.cuh"

namespace pullback::attention {

using namespace device;

// --- Splitting ---

struct Planes {
  uint32_t high, low;  // two neighbouring elements
};

// Infinity has NaN beside it: where one is met, products are made once more in f32.
inline Planes split_pair(float a, float b, float inverse_unit) {
  a *= inverse_unit;
  b *= inverse_unit;
  const uint32_t high = pack<f16>(a, b);
  float rounded_a, rounded_b;
  unpack<f16>(high, rounded_a, rounded_b);
  return {high, pack<f16>(a - rounded_a, b - rounded_b)};
}

// Where 8 columns of a row lie: their high parts; the low ones are at the address ^ 16.
template <int kColumns>
uint32_t plane_offset(int row, int eight) {
  return TileLayout<float, kColumns>::offset(row, 2 * eight);
}

// Splits a tile where it lies, with all threads of the block: load, a barrier, and store. kAnew: as
// thread_number() has it.
template <int kRows, int kColumns, int kThreads, bool kAnew = false>
struct TileSplitter {
  static constexpr int kPieces = (kRows * kColumns / 8 + kThreads - 1) / kThreads;
  uint32_t words[kPieces][2][4];

  // Neighbouring threads have rows in different banks.
  template <class Visit>
  static void for_each(uint32_t tile, const Visit& visit) {
    const int first = thread_number<kAnew>();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int i = first + piece * kThreads;
      if (kRows * kColumns / 8 % kThreads == 0 || i < kRows * kColumns / 8) {
        visit(piece, tile + plane_offset<kColumns>(i % kRows, i / kRows));
      }
    }
  }
  void load(uint32_t tile) {
    for_each(tile, [&](int piece, uint32_t at) {
      load_shared(words[piece][0], at);
      load_shared(words[piece][1], at ^ 16);
    });
  }
  void store(uint32_t tile, float inverse_unit) const {
    for_each(tile, [&](int piece, uint32_t at) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t(&pair)[4] = words[piece][w / 2];
        const Planes planes = split_pair(__uint_as_float(pair[w % 2 * 2]),
                                         __uint_as_float(pair[w % 2 * 2 + 1]), inverse_unit);
        high[w] = planes.high;
        low[w] = planes.low;
      }
      store_shared(at, high);
      store_shared(at ^ 16, low);
    });
  }
  // Of the thread's own words and those of its warp.
  uint32_t largest() const {
    uint32_t found = 0;
    for_each(0, [&](int piece, uint32_t) {
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const uint32_t order = finite_order(words[piece][w / 4][w % 4]);
        found = order > found ? order : found;
      }
    });
    return magnitude_of_order(__reduce_max_sync(0xffffffffu, found));
  }
};

// All threads of the block, between barriers. So many rows at a time.
template <int kRows, int kColumns, int kThreads, int kPart = kRows>
void split_tile(uint32_t tile, float inverse_unit) {
#pragma unroll 1
  for (int row = 0; row < kRows; row += kPart) {
    const uint32_t part = tile + static_cast<uint32_t>(row * kColumns * 4);
    TileSplitter<kPart, kColumns, kThreads, true> splitter;
    splitter.load(part);
    splitter.store(part, inverse_unit);
  }
}

// --- Products ---

// The rows that a lane hands to load_matrices, as LaneRows of smxx_backward_fragments.cuh.
template <int kColumns, bool kSwapped>
struct PlaneRows {
  using Layout = TileLayout<float, kColumns>;
  uint32_t row, chunk;  // bytes

  PlaneRows(uint32_t tile, int lane) {
    const int r = kSwapped ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int c = kSwapped ? lane / 8 % 2 : lane / 16;
    row = tile + static_cast<uint32_t>(r * Layout::kRowBytes);
    chunk = static_cast<uint32_t>((2 * c ^ Layout::swizzle(r)) * 16);
    // Or the compiler keeps every at() of a loop in registers that are needed for sums.
    asm volatile("" : "+r"(chunk));
  }
  // The high parts of the 16 x 16 elements from (first_row, 8 · first_eight) on; a multiple of 8,
  // an even number. The low ones are at the address ^ 16.
  uint32_t at(int first_row, int first_eight) const {
    return row + static_cast<uint32_t>(first_row * Layout::kRowBytes) +
           (chunk ^ static_cast<uint32_t>(first_eight * 32));
  }
};

// Of 16 x 16 elements.
struct PlaneMatrices {
  uint32_t high[4], low[4];

  void load(uint32_t address) {
    load_matrices(high, address);
    load_matrices(low, address ^ 16);
  }
  // The first two 8 x 8 only.
  void load_half(uint32_t address) {
    load_two_matrices(high[0], high[1], address);
    load_two_matrices(low[0], low[1], address ^ 16);
  }
  void load_transposed(uint32_t address) {
    load_matrices_transposed(high, address);
    load_matrices_transposed(low, address ^ 16);
  }
};

// sum[m][first + n] += factor[m] · a[m] · (the n-th of kCount 16 x 8 in b): 16 terms. The low parts
// of a come first, or those of b.
template <int kCount, bool kLowOfAFirst, int kM, int kN>
void add_product(float (&sum)[kM][kN][4], int first, const PlaneMatrices (&a)[kM],
                 const PlaneMatrices& b, const float (&factor)[kM]) {
  float part[kM][kCount][4] = {};
  const auto multiply = [&](bool low_of_a, const uint32_t(&right)[4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        mma_16816<f16>(part[m][n], low_of_a ? a[m].low : a[m].high, right[2 * n], right[2 * n + 1]);
      }
    }
  };
  multiply(kLowOfAFirst, kLowOfAFirst ? b.high : b.low);
  multiply(!kLowOfAFirst, kLowOfAFirst ? b.low : b.high);
  multiply(false, b.high);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[m][first + n][e] = __fmaf_rn(part[m][n][e], factor[m], sum[m][first + n][e]);
      }
    }
  }
}

// sum [16 · kM rows, 8 · kN columns] += a · (rows of a tile), over 16 rows of the tile, times a
// factor for each 16 rows of the sum: depth runs down the tile, columns across.
template <int kM, int kN, class Rows>
void multiply_plane_rows(float (&sum)[kM][kN][4], const PlaneMatrices (&a)[kM], const Rows& rows,
                         int first_row, int first_eight, const float (&factor)[kM]) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    PlaneMatrices b;
    b.load_transposed(rows.at(first_row, first_eight + n));
    add_product<2, true>(sum, n, a, b, factor);
  }
}

// sum = rows [a_row, + 16 · kM) of one tile times rows [b_row, + 8 · kN) of another, across their
// columns. The bits are the same with a and b exchanged and kKeysFirst the other way round.
template <int kColumns, bool kKeysFirst, int kM, int kN, class ARows, class BRows>
void multiply_plane_columns(float (&sum)[kM][kN][4], const ARows& a_rows, int a_row,
                            const BRows& b_rows, int b_row) {
  static_assert(kN == 1 || kN % 2 == 0);
  float factor[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    factor[m] = 1;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (float& x : sum[m][n]) x = 0;
    }
  }
#pragma unroll 2
  for (int depth = 0; depth < kColumns / 8; depth += 2) {
    PlaneMatrices a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) a[m].load(a_rows.at(a_row + 16 * m, depth));
    if constexpr (kN == 1) {
      PlaneMatrices b;
      b.load_half(b_rows.at(b_row, depth));
      add_product<1, kKeysFirst>(sum, 0, a, b, factor);
    } else {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        PlaneMatrices b;
        b.load(b_rows.at(b_row + 8 * n, depth));
        add_product<2, kKeysFirst>(sum, n, a, b, factor);
      }
    }
  }
}

// --- NaN and infinity ---

inline bool plane_not_finite(uint32_t high, int element) {
  return (high >> (16 * element) & 0x7c00u) == 0x7c00u;
}

// All threads of the block: rows with NaN or infinity in a tile get 0 for it.
template <int kRows, int kColumns, int kThreads>
void make_planes_finite(uint32_t tile) {
#pragma unroll 1
  for (int i = thread_number<true>(); i < kRows * kColumns / 2; i += kThreads) {
    const uint32_t at = tile + plane_offset<kColumns>(i % kRows, i / kRows / 4) +
                        static_cast<uint32_t>(i / kRows % 4 * 4);
    const uint32_t high = load_shared_word(at);
    const uint32_t kept =
        (plane_not_finite(high, 0) ? 0 : 0xffffu) | (plane_not_finite(high, 1) ? 0 : 0xffff0000u);
    store_shared(at, high & kept);
    store_shared(at ^ 16, load_shared_word(at ^ 16) & kept);
  }
}

// sum += weights · rows, over the elements of a tile that are not finite: the product will take
// them for 0. Unseen weights, −0, are skipped. The weights lie in `weight_tile` [rows of sum][rows
// of tile]; columns from 8 · first_eight on.
template <int kRows, int kColumns, int kM, int kN>
void add_planes_not_finite(float (&sum)[kM][kN][4], uint32_t weight_tile, int weight_row,
                           uint32_t tile, int first_eight, int lane) {
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    uint32_t weight[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = weight_row + 16 * m + 8 * half + lane / 4;
        const uint32_t pair = load_shared_word(weight_tile + plane_offset<kRows>(row, i / 8) +
                                               static_cast<uint32_t>(i % 8 / 2 * 4));
        weight[m][half] = pair >> (16 * (i % 2)) & 0xffffu;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t pair = load_shared_word(tile + plane_offset<kColumns>(i, first_eight + n) +
                                             static_cast<uint32_t>(lane % 4 * 4));
      float element[2];
      unpack<f16>(pair, element[0], element[1]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!plane_not_finite(pair, e % 2) || weight[m][e / 2] == 0x8000u) continue;
          sum[m][n][e] += to_real(f16{static_cast<uint16_t>(weight[m][e / 2])}) * element[e % 2];
        }
      }
    }
  }
}

}  // namespace pullback::attention

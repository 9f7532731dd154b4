// TDPBF16PS adds to a 16x16 f32 tile the product of a 16x32 bf16 tile and a tile of 16 pairs x 16
// columns. A block of 32x32 sums takes four tiles, its operands two and two: each tile loaded is
// used twice, so that loads (8 cycles) stay behind products (16 cycles).
// VDPBF16PS adds to 16 f32 sums the products of 16 pairs with 16 others: here a pair of a row, in
// every lane, with those of 16 columns. A block of 8x32 sums takes 16 registers, which its latency
// needs to be hidden, and ten loads for 16 products.
#include "cpu/tile_matmul_bf16.hpp"

#include <cstring>

#include "pullback/error.hpp"

#if defined(__x86_64__)

#include <hwy/base.h>
#include <immintrin.h>

#if HWY_COMPILER_GCC_ACTUAL  // GCC 12 warns of _mm512_undefined_epi32 in its own headers.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

HWY_PUSH_ATTRIBUTES("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
namespace pullback::bf16_tiles {
namespace {

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In static memory: GCC's _tile_loadconfig tells the compiler that it reads 8 bytes only, so stores
// to a local one are dropped.
constexpr TileConfig kTileConfig;

// Functions of their own: GCC does not give constructors the target attributes above.
void load_config() { _tile_loadconfig(&kTileConfig); }
void release() { _tile_release(); }

// Sixteen vectors of sixteen 32-bit elements, transposed in place.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4g + c] now holds, in 128-bit lane l, column 4l + c of rows 4g … 4g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i high0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i low1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i high1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low0, low1, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(high0, high1, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// to[c][r] = from[r][c], 16 x 16 of 32 bits; rows in units of bfloat16.
inline void transpose_block(const bfloat16* from, std::ptrdiff_t from_row, bfloat16* to,
                            std::ptrdiff_t to_row) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_row);
  transpose16(r);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_row, r[i]);
}

inline __m512bh load_pairs(const bfloat16* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

// Two elements in each of 16 lanes.
inline __m512bh repeat_pair(const bfloat16* from) {
  int pair;
  std::memcpy(&pair, from, sizeof(pair));
  // Clang 16 crashes on _mm512_set1_epi32 here.
  return reinterpret_cast<__m512bh>(_mm512_broadcastd_epi32(_mm_cvtsi32_si128(pair)));
}

// Elements 0, 16, 1, 17, …: the two halves of a vector as pairs.
inline __m512i pair_order() {
  alignas(64) std::uint16_t order[32];
  for (std::uint16_t i = 0; i < 32; ++i) order[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 16);
  return _mm512_load_si512(order);
}

}  // namespace

AmxScope::AmxScope() { load_config(); }
AmxScope::~AmxScope() { release(); }

void multiply_amx(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                  const bfloat16* left, const bfloat16* right, float* c, std::ptrdiff_t c_row,
                  bool add) {
  const std::ptrdiff_t panel = depth * 16;
  const std::ptrdiff_t c_bytes = c_row * 4, left_bytes = depth * 2;
  for (std::ptrdiff_t column = 0; column < columns; column += 32) {
    const bfloat16* const right0 = right + column / 16 * panel;
    const bfloat16* const right1 = right0 + panel;
    for (std::ptrdiff_t row = 0; row < rows; row += 32) {
      float* const c0 = c + row * c_row + column;
      float* const c1 = c0 + 16 * c_row;
      if (add) {
        _tile_loadd(0, c0, c_bytes);
        _tile_loadd(1, c0 + 16, c_bytes);
        _tile_loadd(2, c1, c_bytes);
        _tile_loadd(3, c1 + 16, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      const bfloat16* const left0 = left + row * depth;
      const bfloat16* const left1 = left0 + 16 * depth;
      for (std::ptrdiff_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, left0 + k, left_bytes);
        _tile_loadd(6, right0 + k * 16, 64);
        _tile_loadd(7, right1 + k * 16, 64);
        _tile_loadd(5, left1 + k, left_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, c_bytes);
      _tile_stored(1, c0 + 16, c_bytes);
      _tile_stored(2, c1, c_bytes);
      _tile_stored(3, c1 + 16, c_bytes);
    }
  }
}

void multiply_avx512(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                     const bfloat16* left, const bfloat16* right, float* c, std::ptrdiff_t c_row,
                     bool add) {
  constexpr int kRows = 8;
  const std::ptrdiff_t panel = depth * 16;
  for (std::ptrdiff_t column = 0; column < columns; column += 32) {
    const bfloat16* const right0 = right + column / 16 * panel;
    const bfloat16* const right1 = right0 + panel;
    for (std::ptrdiff_t row = 0; row < rows; row += kRows) {
      float* const to = c + row * c_row + column;
      const bfloat16* const from = left + row * depth;
      __m512 sums[kRows][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] = add ? _mm512_loadu_ps(to + i * c_row) : _mm512_setzero_ps();
        sums[i][1] = add ? _mm512_loadu_ps(to + i * c_row + 16) : _mm512_setzero_ps();
      }
      for (std::ptrdiff_t k = 0; k < depth; k += 2) {
        const __m512bh columns0 = load_pairs(right0 + k * 16),
                       columns1 = load_pairs(right1 + k * 16);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const __m512bh pair = repeat_pair(from + i * depth + k);
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, columns0);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, columns1);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        _mm512_storeu_ps(to + i * c_row, sums[i][0]);
        _mm512_storeu_ps(to + i * c_row + 16, sums[i][1]);
      }
    }
  }
}

void pack_pairs(const bfloat16* tile, std::ptrdiff_t rows, std::ptrdiff_t columns,
                bfloat16* right) {
  const std::ptrdiff_t row = padded(columns), depth = padded(rows);
  const __m512i order = pair_order();
  for (std::ptrdiff_t column = 0; column < row; column += 16) {
    for (std::ptrdiff_t r = 0; r < depth; r += 2, right += 32) {
      const bfloat16* const from = tile + r * row + column;
      const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + row));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
      _mm512_storeu_si512(right, _mm512_permutexvar_epi16(order, both));
    }
  }
}

void pack_transposed_pairs(const bfloat16* tile, std::ptrdiff_t rows, std::ptrdiff_t columns,
                           bfloat16* right) {
  const std::ptrdiff_t depth = padded(columns);
  for (std::ptrdiff_t r = 0; r < padded(rows); r += 16) {
    for (std::ptrdiff_t k = 0; k < depth; k += 32, right += 16 * 32) {
      transpose_block(tile + r * depth + k, depth, right, 32);
    }
  }
}

void transpose_pairs(const bfloat16* pairs, std::ptrdiff_t rows, std::ptrdiff_t columns,
                     bfloat16* left) {
  const std::ptrdiff_t depth = padded(rows);
  for (std::ptrdiff_t column = 0; column < padded(columns); column += 16) {
    for (std::ptrdiff_t k = 0; k < depth; k += 32, pairs += 16 * 32) {
      transpose_block(pairs, 32, left + column * depth + k, depth);
    }
  }
}

void convert_rows(const float* x, std::ptrdiff_t x_row, std::ptrdiff_t rows, std::ptrdiff_t columns,
                  bfloat16* left) {
  const std::ptrdiff_t width = padded(columns);
  for (std::ptrdiff_t r = 0; r < padded(rows); ++r) {
    for (std::ptrdiff_t j = 0; j < width; j += 32, left += 32) {
      __m512i value = _mm512_setzero_si512();
      if (r < rows) {
        const float* const from = x + r * x_row + j;
        value = reinterpret_cast<__m512i>(
            _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from)));
      }
      _mm512_storeu_si512(left, value);
    }
  }
}

void convert_pairs(const float* x, std::ptrdiff_t x_row, std::ptrdiff_t rows,
                   std::ptrdiff_t columns, bfloat16* right) {
  const __m512i order = pair_order();
  const __m512 zero = _mm512_setzero_ps();
  for (std::ptrdiff_t j = 0; j < padded(columns); j += 16) {
    for (std::ptrdiff_t r = 0; r < padded(rows); r += 2, right += 32) {
      const float* const from = x + r * x_row + j;
      const __m512 first = r < rows ? _mm512_loadu_ps(from) : zero;
      const __m512 second = r + 1 < rows ? _mm512_loadu_ps(from + x_row) : zero;
      const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      _mm512_storeu_si512(right, _mm512_permutexvar_epi16(order, both));
    }
  }
}

}  // namespace pullback::bf16_tiles
HWY_POP_ATTRIBUTES

#else

namespace pullback::bf16_tiles {

[[noreturn]] static void absent() {
  throw Error(ErrorCode::internal, "bf16 products on a CPU without them");
}

AmxScope::AmxScope() { absent(); }
AmxScope::~AmxScope() = default;
void multiply_amx(std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t, const bfloat16*, const bfloat16*,
                  float*, std::ptrdiff_t, bool) {
  absent();
}
void multiply_avx512(std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t, const bfloat16*,
                     const bfloat16*, float*, std::ptrdiff_t, bool) {
  absent();
}
void pack_pairs(const bfloat16*, std::ptrdiff_t, std::ptrdiff_t, bfloat16*) { absent(); }
void pack_transposed_pairs(const bfloat16*, std::ptrdiff_t, std::ptrdiff_t, bfloat16*) { absent(); }
void transpose_pairs(const bfloat16*, std::ptrdiff_t, std::ptrdiff_t, bfloat16*) { absent(); }
void convert_rows(const float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t, bfloat16*) {
  absent();
}
void convert_pairs(const float*, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t, bfloat16*) {
  absent();
}

}  // namespace pullback::bf16_tiles

#endif

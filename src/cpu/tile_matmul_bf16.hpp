// Matrix products of bf16 tiles with f32 sums, on AVX-512 BF16 or AMX. To be called only where
// cpu_has(CpuIsa::avx512_bf16), what is said to be AMX's only where cpu_has(CpuIsa::amx_bf16).
//
// Every size is padded to kMultiple, and the padding holds zeros (in C: anything).
//   left   row-major [rows, depth]
//   right  panels of 16 columns; a panel is [depth / 2][16][2]: pairs of neighbours in depth, as
//          both instruction sets want it
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/element.hpp"

namespace pullback::bf16_tiles {

inline constexpr std::ptrdiff_t kMultiple = 32;

constexpr std::ptrdiff_t padded(std::ptrdiff_t size) {
  return (size + kMultiple - 1) / kMultiple * kMultiple;
}

// While one lives, this thread's tile registers are set up for multiply_amx().
class AmxScope {
 public:
  AmxScope();
  ~AmxScope();
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// C[rows, columns] (+)= left · right. Sizes are padded ones.
void multiply_amx(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                  const bfloat16* left, const bfloat16* right, float* c, std::ptrdiff_t c_row,
                  bool add);
void multiply_avx512(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                     const bfloat16* left, const bfloat16* right, float* c, std::ptrdiff_t c_row,
                     bool add);

// From a row-major tile [padded(rows), padded(columns)]:
//   the right operand whose depth is the tile's rows
void pack_pairs(const bfloat16* tile, std::ptrdiff_t rows, std::ptrdiff_t columns, bfloat16* right);
//   its transpose as the right operand: depth is the tile's columns
void pack_transposed_pairs(const bfloat16* tile, std::ptrdiff_t rows, std::ptrdiff_t columns,
                           bfloat16* right);
//   its transpose as the left operand, from the result of pack_pairs
void transpose_pairs(const bfloat16* pairs, std::ptrdiff_t rows, std::ptrdiff_t columns,
                     bfloat16* left);

// From f32 rows, rounded to nearest even; `rows` and `columns` are exact, and x has columns up to
// padded(columns) that hold zeros:
//   a left operand
void convert_rows(const float* x, std::ptrdiff_t x_row, std::ptrdiff_t rows, std::ptrdiff_t columns,
                  bfloat16* left);
//   a right operand whose depth is the rows
void convert_pairs(const float* x, std::ptrdiff_t x_row, std::ptrdiff_t rows,
                   std::ptrdiff_t columns, bfloat16* right);

}  // namespace pullback::bf16_tiles

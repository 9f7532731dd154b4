// What tile_matmul-inl.hpp shares between instruction sets.
#pragma once

#include <cstddef>

namespace pullback {

// Element (i, j) is data[i * row + j * column].
template <class T>
struct StridedTile {
  T* data = nullptr;
  std::ptrdiff_t row = 0, column = 1;
};

// Rows of tiles are padded to a multiple of every register block: 1, 2, 3, 4 vectors wide and
// 12, 12, 8, 6 rows high.
inline constexpr int kTileRowMultiple = 24;

constexpr std::ptrdiff_t padded_rows(std::ptrdiff_t rows) {
  return (rows + kTileRowMultiple - 1) / kTileRowMultiple * kTileRowMultiple;
}

}  // namespace pullback

// A task of the backward pass, as the kernels see it.
#pragma once

#include "ops/entmax/cpu/rows.hpp"

namespace pullback::entmax {

struct BackwardTile : RowTile {
  TensorRows y, d_y, d_x, support_size, d_alpha;  // y or support
  // Scratch: packed tensors, and s.
  std::byte *packed_y, *packed_d_y, *packed_d_x, *weights;
  std::byte* stripe;         // s and d_y of a stripe of columns; or null
  bool sparse_columns;       // or cut
  std::int64_t packed_rows;  // the most that scratch has room for

  // Rows from `begin` on, as many as can be packed.
  template <class T>
  BackwardTile part(std::int64_t begin) const {
    const auto skip = [&](TensorRows tensor, std::size_t size) {
      if (tensor) tensor.data += begin * tensor.row_step * static_cast<std::int64_t>(size);
      return tensor;
    };
    BackwardTile part = *this;
    part.rows = std::min(packed_rows, rows - begin);
    part.y = skip(y, sizeof(T));
    part.d_y = skip(d_y, sizeof(T));
    part.d_x = skip(d_x, sizeof(T));
    part.support = skip(support, 1);
    part.support_size = skip(support_size, sizeof(std::int32_t));
    part.d_alpha = skip(d_alpha, size_of(accumulation_dtype(dtype)));
    return part;
  }
};

// SparseGradients looks at so many positions of the axis at once.
inline constexpr std::int64_t kColumnsChunk = 64;
// The most vectors of a group of columns that it keeps of so many positions: where more are in the
// support, narrow strips that stay in L2 are faster.
constexpr std::int64_t most_kept(std::int64_t positions) { return (2 * positions + 32) / 3; }

}  // namespace pullback::entmax

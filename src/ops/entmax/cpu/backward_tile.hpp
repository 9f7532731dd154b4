// A task of the backward pass, as the kernels see it.
#pragma once

#include "ops/entmax/cpu/rows.hpp"

namespace pullback::entmax {

struct BackwardTile : RowTile {
  RowTensor y, d_y, d_x, support_size, d_alpha;  // y or support
  // Scratch: packed tensors, and s.
  std::byte *packed_y, *packed_d_y, *packed_d_x, *weights;
  std::byte* stripe;  // s and d_y of a stripe of columns; or null
};

}  // namespace pullback::entmax

// A task of the forward pass, as the kernels see it.
#pragma once

#include "ops/entmax/cpu/rows.hpp"

namespace pullback::entmax {

struct ForwardTile : RowTile {
  RowTensor x, mask, y, tau, support_size;
  // Scratch: packed x and y, the elements that the solver works on, and a stripe of columns with
  // its candidates (or null).
  std::byte *packed_x, *packed_y, *elements, *stripe;
};

}  // namespace pullback::entmax

// Which formula serves which alpha.
#pragma once

#include <cmath>

#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {

inline Family family_of(double alpha) {
  if (!(alpha >= 1) || std::isinf(alpha)) return Family::invalid;
  if (alpha == 1) return Family::softmax;
  if (alpha == 2) return Family::sparsemax;
  if (alpha == 1.5) return Family::entmax15;
  if (alpha < 1.125) return Family::near_one;
  return alpha < 2 ? Family::general : Family::steep;
}

}  // namespace pullback::entmax

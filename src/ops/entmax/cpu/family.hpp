// Which formula serves which alpha.
#pragma once

#include <cmath>

namespace pullback::entmax {

enum class Family {
  invalid,    // alpha below 1, infinite or NaN: rows of NaN
  softmax,    // 1
  near_one,   // up to 1.125: p = exp(log1p(b (z - c)) / b), b = alpha - 1; loses nothing as b -> 0
  entmax15,   // 1.5
  general,    // up to 2: p = (b z - theta)^(1/b)
  sparsemax,  // 2
  steep,      // above 2: the same, in double: p has an infinite slope at the edge of the support
};

inline Family family_of(double alpha) {
  if (!(alpha >= 1) || std::isinf(alpha)) return Family::invalid;
  if (alpha == 1) return Family::softmax;
  if (alpha == 2) return Family::sparsemax;
  if (alpha == 1.5) return Family::entmax15;
  if (alpha < 1.125) return Family::near_one;
  return alpha < 2 ? Family::general : Family::steep;
}

}  // namespace pullback::entmax

// Arithmetic of the reference code, which is written once and instantiated with either:
//   ExactArithmetic        everything in double: the definition of the op.
//   TextbookArithmetic<T>  what a plain implementation in dtype T does: accumulates in f32 (f64 for
//                          f64) and rounds every tensor it would write to memory to T. Its error
//                          against the definition is the yardstick for the error of our kernels.
#pragma once

#include "core/element.hpp"

namespace pullback {

struct ExactArithmetic {
  using Real = double;
  static Real round(Real value) { return value; }
};

template <class T>
struct TextbookArithmetic {
  using Real = float;
  static Real round(Real value) { return static_cast<float>(T(value)); }
};
template <>
struct TextbookArithmetic<double> : ExactArithmetic {};

}  // namespace pullback

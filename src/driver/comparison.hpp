// How far a tensor is from what is expected of it.
#pragma once

#include <limits>
#include <string>

#include "driver/host_tensor.hpp"

namespace pullback::driver {

double epsilon_of(DType dtype);
double largest_finite(const HostTensor& tensor);

// Elements that are judged together, by the size of what is expected.
struct Sizes {
  double above = -1, most = std::numeric_limits<double>::max();
};
// Beside what exceeds 1e20 any other number would pass, so that is judged by itself.
inline constexpr Sizes kJudgedSizes[] = {{-1, 1e20}, {1e20}};

// The largest difference where `expected` is finite (infinite where the other is not), and the
// largest finite value expected; of elements that are finite in a third tensor, too, if there is
// one. By all cores, for large tensors.
struct LargestErrors {
  double difference = 0, largest = 0;
};
LargestErrors largest_errors(const HostTensor& got, const HostTensor& expected,
                             const HostTensor* finite = nullptr, const Sizes& sizes = {});

// The same in the mean; a difference is infinite where any is. `ratio` is 0 if nothing differs.
struct MeanErrors {
  double difference = 0, size = 0;
  double ratio() const { return difference == 0 ? 0 : difference / size; }
};
MeanErrors mean_errors(const HostTensor& got, const HostTensor& expected,
                       const HostTensor* finite = nullptr);

// The first element that is wrong, or nothing.

// A finite reference may overflow to infinity in a narrow dtype; a NaN or infinity stays one.
std::string special_mismatch(const HostTensor& got, const HostTensor& expected);
// Where plain arithmetic of the dtype overflows, although the reference does not, a result may,
// too: but a number has to be right.
std::string overflow_mismatch(const HostTensor& got, const HostTensor& expected,
                              const HostTensor& textbook, double allowed);
std::string value_mismatch(const HostTensor& got, const HostTensor& expected);

}  // namespace pullback::driver

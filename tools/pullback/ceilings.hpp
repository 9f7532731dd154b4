// The ceilings of this machine, measured: what a copy and a matrix product reach.
#pragma once

#include <cstddef>
#include <string>

#include "machine.hpp"
#include "pullback/device.hpp"

namespace pullback::tool {

struct Ceilings {
  int threads = 0;
  double copy_bytes_per_second = 0;  // read + written, by the fastest of several ways to copy
  std::string copy_method;
  std::size_t copy_bytes = 0;                   // size of the buffer that was copied
  double f32_flops_per_second = 0;              // OpenBLAS sgemm; 0 when there is no OpenBLAS
  double f64_flops_per_second = 0;              // dgemm
  std::string blas = "OpenBLAS was not found";  // its description of itself
};

// Takes some seconds; the buffers take at most an eighth of the free memory each.
Ceilings measure_ceilings(int threads, const Machine& machine, bool quick);

// Of the device: these, or those of cuda_timer.hpp.
Ceilings ceilings_of(const Device& device, const Machine& machine, bool quick);

}  // namespace pullback::tool

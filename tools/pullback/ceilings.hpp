// The ceilings of this machine, measured: what a copy and a matrix product reach.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/threads.hpp"
#include "machine.hpp"
#include "pullback/device.hpp"

namespace pullback::tool {

struct Ceilings {
  int threads = 0;
  double copy_bytes_per_second = 0;  // read + written, by the fastest of several ways to copy
  std::string copy_method;
  std::size_t copy_bytes = 0;  // size of the buffer that was copied
  // Of matrix products, 0 where none was measured: by OpenBLAS, on a GPU by cuBLAS.
  double bf16_flops_per_second = 0;  // on GPUs alone
  double f32_flops_per_second = 0;
  double f64_flops_per_second = 0;
  std::string blas = "OpenBLAS was not found";  // its description of itself
};

struct CopyRate {
  double bytes_per_second = 0;
  const char* method = "";
};

// Copies of large buffers, each at most an eighth of the free memory. Where others use the memory,
// too, its rate changes: it can be measured again beside what is compared with it.
class CopyCeiling {
 public:
  CopyCeiling(int threads, const Machine& machine);

  int threads() const { return threads_.count(); }
  std::size_t bytes() const { return bytes_; }
  // The best of so many runs of each way to copy.
  CopyRate measure(int runs) const;

 private:
  struct Buffer {
    explicit Buffer(std::size_t bytes);
    struct Free {
      void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte, Free> data;
  };
  template <class Body>
  void for_chunks(const Body& body) const;

  Threads threads_;
  std::size_t bytes_;
  Buffer from_, to_;
};

// Takes some seconds.
Ceilings measure_ceilings(const CopyCeiling& copy, bool quick);

// Of the device: these, or those of cuda_timer.hpp.
Ceilings ceilings_of(const Device& device, const Machine& machine, bool quick);

}  // namespace pullback::tool

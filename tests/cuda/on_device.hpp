// Device code run on a GPU, a few lines at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/memory.hpp"
#include "cuda/op_kernel.hpp"

namespace pullback::cuda {

struct Buffers {
  const void* from;
  void* to;
  std::int64_t count;
};
inline constexpr std::string_view kBuffers =
    "decltype([] { struct Buffers { const void* from; void* to; int64_t count; }; "
    "return Buffers(); }())";

class OnDeviceToolkit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  }

  // Runs `body`, which knows `b` (the buffers), for each element: one thread each, or as told.
  template <class To, class From>
  static std::vector<To> run(const std::string& name, std::string_view file,
                             const std::string& body, const std::vector<From>& from,
                             std::size_t results, unsigned blocks, int threads,
                             unsigned cluster = 1, bool arch_specific = false) {
    const DeviceInfo& device = device_info(0);
    const DeviceMemory input(device, std::as_bytes(std::span(from)));
    const DeviceMemory output(device, results * sizeof(To));
    PlannedKernel<Buffers> kernel({.name = "test_" + name,
                                   .file = file,
                                   .function = "[](const auto& b) {\n" + body + "\n}",
                                   .parameters = kBuffers,
                                   .threads = threads,
                                   .arch_specific = arch_specific},
                                  device);
    kernel.shape.grid[0] = blocks;
    kernel.shape.cluster = cluster;
    const OwnStream stream(device);
    const DeviceGuard guard(device);
    kernel.launch({stream.get()},
                  {input.data(), output.data(), static_cast<std::int64_t>(from.size())});
    std::vector<To> to(results);
    check(driver().cuMemcpyDtoHAsync(to.data(), address(output.data()), results * sizeof(To),
                                     stream.get()),
          "cuMemcpyDtoHAsync");
    stream.synchronize();
    return to;
  }
};

inline const char* const kIndex =
    "const auto i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;\n";

}  // namespace pullback::cuda

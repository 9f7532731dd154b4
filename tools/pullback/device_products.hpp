// What matrix products reach on a GPU.
#pragma once

#include <string>

#include "pullback/device.hpp"
#include "pullback/dtype.hpp"

namespace pullback::tool {

// cuBLAS, opened at run time: the tool needs it for this one measurement only. It is looked for
// beside NVRTC, as toolkits and Python wheels have it, and where the loader looks.
class DeviceProducts {
 public:
  explicit DeviceProducts(const Device& device);
  ~DeviceProducts();
  DeviceProducts(const DeviceProducts&) = delete;
  DeviceProducts& operator=(const DeviceProducts&) = delete;

  // Its version; or why there is none.
  const std::string& description() const { return description_; }
  // Of random square matrices of f64, f32 or bf16, with sums in f64 or f32; 0 without cuBLAS.
  double flops_per_second(DType dtype) const;

 private:
  struct Functions;
  Device device_;
  const Functions* functions_ = nullptr;
  void* handle_ = nullptr;
  std::string description_ = "cuBLAS was not found";
};

}  // namespace pullback::tool

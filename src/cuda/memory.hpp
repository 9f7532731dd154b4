// Memory on a device, owned: tables that a plan keeps, and the tensors of tests and tools. Nothing
// here is for run(), which allocates nothing.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/driver.hpp"

namespace pullback::cuda {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Aligned to 256 bytes; null when `bytes` is 0.
  DeviceMemory(const DeviceInfo& device, std::size_t bytes);
  // With a copy of `content`, complete on return.
  DeviceMemory(const DeviceInfo& device, std::span<const std::byte> content);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const DeviceInfo* device_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A stream of its own, which waits for no other.
class OwnStream {
 public:
  OwnStream() = default;
  explicit OwnStream(const DeviceInfo& device);
  ~OwnStream();
  OwnStream(OwnStream&& other) noexcept;
  OwnStream& operator=(OwnStream&& other) noexcept;

  CUstream get() const { return stream_; }
  // Waits for all work in it; throws Error(device) when some of it failed.
  void synchronize() const;

 private:
  const DeviceInfo* device_ = nullptr;
  CUstream stream_ = nullptr;
};

inline CUdeviceptr address(const void* device_memory) {
  return reinterpret_cast<CUdeviceptr>(device_memory);
}

}  // namespace pullback::cuda

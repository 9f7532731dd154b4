#include "cuda/memory.hpp"

#include <utility>

namespace pullback::cuda {

DeviceMemory::DeviceMemory(const DeviceInfo& device, std::size_t bytes)
    : device_(&device), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceGuard guard(device);
  const CaptureGuard uncaptured;
  CUdeviceptr memory = 0;
  check(driver().cuMemAlloc(&memory, bytes), "cuMemAlloc");
  data_ = reinterpret_cast<std::byte*>(memory);
}

DeviceMemory::DeviceMemory(const DeviceInfo& device, std::span<const std::byte> content)
    : DeviceMemory(device, content.size()) {
  if (content.empty()) return;
  const OwnStream stream(device);
  check(driver().cuMemcpyHtoDAsync(address(data_), content.data(), content.size(), stream.get()),
        "cuMemcpyHtoDAsync");
  stream.synchronize();
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  // A device that failed reports it to whoever waits for its work; nobody can be told here.
  try {
    const DeviceGuard guard(*device_);
    const CaptureGuard uncaptured;
    driver().cuMemFree(address(data_));
  } catch (...) {
  }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

OwnStream::OwnStream(const DeviceInfo& device) : device_(&device) {
  constexpr unsigned kNonBlocking = 1;
  const DeviceGuard guard(device);
  const CaptureGuard uncaptured;
  check(driver().cuStreamCreate(&stream_, kNonBlocking), "cuStreamCreate");
}

OwnStream::~OwnStream() {
  if (stream_ == nullptr) return;
  try {
    const DeviceGuard guard(*device_);
    driver().cuStreamDestroy(stream_);
  } catch (...) {
  }
}

OwnStream::OwnStream(OwnStream&& other) noexcept { *this = std::move(other); }

OwnStream& OwnStream::operator=(OwnStream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(stream_, other.stream_);
  return *this;
}

void OwnStream::synchronize() const {
  const DeviceGuard guard(*device_);
  const CaptureGuard uncaptured;
  check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

}  // namespace pullback::cuda

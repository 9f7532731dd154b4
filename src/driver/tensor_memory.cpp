#include "driver/tensor_memory.hpp"

#include <cstdlib>
#include <map>
#include <mutex>

namespace pullback::driver {
namespace {

// Never destroyed: at the end of the process the driver may be gone before our statics are.
cuda::CUstream shared_stream(const cuda::DeviceInfo& device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<int, cuda::OwnStream>();
  const std::lock_guard lock(mutex);
  const auto [it, inserted] = streams.try_emplace(device.ordinal);
  if (inserted) it->second = cuda::OwnStream(device);
  return it->second.get();
}

void fill_with_guards(cuda::CUdeviceptr memory, std::size_t bytes, cuda::CUstream stream) {
  cuda::check(cuda::driver().cuMemsetD8Async(memory, HostTensor::kGuard, bytes, stream),
              "cuMemsetD8Async");
}

}  // namespace

TensorMemory::TensorMemory(const Device& device, const Placement& placement)
    : placement_(placement) {
  if (device.kind == DeviceKind::cpu) return;
  device_ = &cuda::device_info(device.index);
  if (placement.own_stream) own_stream_ = cuda::OwnStream(*device_);
  stream_ = placement.own_stream ? own_stream_.get() : shared_stream(*device_);
}

void* TensorMemory::image(const HostTensor& tensor, Role role) {
  const std::size_t shift = placement_.unaligned ? size_of(tensor.spec().dtype) : 0;
  Image& image = images_.emplace_back(Image{tensor, {}, role, shift});
  if (device_ == nullptr || tensor.data() == nullptr) return tensor.data();
  const std::span<std::byte> host = tensor.memory();
  if (host.empty()) return nullptr;
  image.memory = cuda::DeviceMemory(*device_, host.size() + shift);
  const cuda::CUdeviceptr begin = image.address();
  const cuda::DeviceGuard guard(*device_);
  if (role == Role::output) {
    fill_with_guards(begin, host.size(), stream_);
  } else {
    cuda::check(cuda::driver().cuMemcpyHtoDAsync(begin, host.data(), host.size(), stream_),
                "cuMemcpyHtoDAsync");
  }
  return image.memory.data() + shift + (static_cast<std::byte*>(tensor.data()) - host.data());
}

void TensorMemory::reserve_workspace(std::size_t bytes) {
  if (bytes <= workspace().bytes) return;
  if (device_ == nullptr) {
    host_workspace_ = WorkspaceBuffer(bytes);
    return;
  }
  workspace_ = cuda::DeviceMemory(*device_, bytes);
  // Left raw for compute-sanitizer's initcheck, to which a filled byte is as good as a result.
  const char* raw = std::getenv("PULLBACK_RAW_WORKSPACE");
  if (raw != nullptr && *raw != '\0') return;
  const cuda::DeviceGuard guard(*device_);
  fill_with_guards(cuda::address(workspace_.data()), bytes, stream_);
}

Workspace TensorMemory::workspace() const {
  if (device_ == nullptr) return host_workspace_.get();
  return {workspace_.data(), workspace_.bytes()};
}

void TensorMemory::fetch(Fetch what) const {
  if (device_ == nullptr) return;
  const cuda::DeviceGuard guard(*device_);
  for (const Image& image : images_) {
    const bool wanted =
        image.role == Role::output || (what == Fetch::all && image.tensor.owns_memory());
    if (!wanted || image.memory.bytes() == 0) continue;
    const std::span<std::byte> host = image.tensor.memory();
    cuda::check(
        cuda::driver().cuMemcpyDtoHAsync(host.data(), image.address(), host.size(), stream_),
        "cuMemcpyDtoHAsync");
  }
  cuda::check(cuda::driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

}  // namespace pullback::driver

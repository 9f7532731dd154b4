#include "driver/tensor_memory.hpp"

namespace pullback::driver {

TensorMemory::TensorMemory(const Device& device) {
  if (device.kind == DeviceKind::cpu) return;
  device_ = &cuda::device_info(device.index);
  stream_ = cuda::OwnStream(*device_);
}

void* TensorMemory::image(const HostTensor& tensor, bool fetched) {
  Image& image = images_.emplace_back(Image{tensor, {}, fetched});
  if (device_ == nullptr || tensor.data() == nullptr) return tensor.data();
  const std::span<std::byte> host = tensor.memory();
  if (host.empty()) return nullptr;
  image.memory = cuda::DeviceMemory(*device_, host.size());
  const cuda::DeviceGuard guard(*device_);
  cuda::check(cuda::driver().cuMemcpyHtoDAsync(cuda::address(image.memory.data()), host.data(),
                                               host.size(), stream_.get()),
              "cuMemcpyHtoDAsync");
  return image.memory.data() + (static_cast<std::byte*>(tensor.data()) - host.data());
}

void TensorMemory::reserve_workspace(std::size_t bytes) {
  if (bytes <= workspace().bytes) return;
  if (device_ == nullptr) {
    host_workspace_ = WorkspaceBuffer(bytes);
    return;
  }
  workspace_ = cuda::DeviceMemory(*device_, bytes);
  const cuda::DeviceGuard guard(*device_);
  cuda::check(cuda::driver().cuMemsetD8Async(cuda::address(workspace_.data()), HostTensor::kGuard,
                                             bytes, stream_.get()),
              "cuMemsetD8Async");
}

Workspace TensorMemory::workspace() const {
  if (device_ == nullptr) return host_workspace_.get();
  return {workspace_.data(), workspace_.bytes()};
}

void TensorMemory::fetch() const {
  if (device_ == nullptr) return;
  const cuda::DeviceGuard guard(*device_);
  for (const Image& image : images_) {
    if (!image.fetched || image.memory.bytes() == 0) continue;
    const std::span<std::byte> host = image.tensor.memory();
    cuda::check(cuda::driver().cuMemcpyDtoHAsync(host.data(), cuda::address(image.memory.data()),
                                                 host.size(), stream_.get()),
                "cuMemcpyDtoHAsync");
  }
  stream_.synchronize();
}

}  // namespace pullback::driver

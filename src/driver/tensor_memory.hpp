// Where a session's tensors lie for its device: on the CPU the host tensors themselves, on a GPU
// images of their whole memory, guard margins and gaps included, so that a stray write of a kernel
// is found by the same checks.
#pragma once

#include <vector>

#include "cuda/memory.hpp"
#include "driver/host_tensor.hpp"
#include "pullback/device.hpp"

namespace pullback::driver {

class TensorMemory {
 public:
  // Throws Error when there is no such device.
  explicit TensorMemory(const Device& device);

  // The address that a plan's run() is given for this tensor. The content is the host's, now.
  const void* input(const HostTensor& tensor) { return image(tensor, tensor.owns_memory()); }
  // The same, and fetch() brings it back.
  void* output(const HostTensor& tensor) { return image(tensor, true); }

  // Grows the workspace; on a GPU it is filled with NaN.
  void reserve_workspace(std::size_t bytes);
  Workspace workspace() const;
  Stream stream() const { return {stream_.get()}; }

  // Waits for the stream, then copies to the host all outputs, and those inputs whose memory a
  // kernel could have changed without anybody noticing.
  void fetch() const;

 private:
  void* image(const HostTensor& tensor, bool fetched);

  struct Image {
    HostTensor tensor;
    cuda::DeviceMemory memory;
    bool fetched;
  };
  const cuda::DeviceInfo* device_ = nullptr;  // null: the CPU
  cuda::OwnStream stream_;
  std::vector<Image> images_;  // on the CPU too: they keep the tensors
  WorkspaceBuffer host_workspace_;
  cuda::DeviceMemory workspace_;
};

}  // namespace pullback::driver

// Where a session's tensors lie for its device: on the CPU the host tensors themselves, on a GPU
// images of their whole memory, guard margins and gaps included, so that a stray write of a kernel
// is found by the same checks.
#pragma once

#include <vector>

#include "cuda/memory.hpp"
#include "driver/host_tensor.hpp"
#include "pullback/device.hpp"

namespace pullback::driver {

enum class Fetch { outputs, all };

class TensorMemory {
 public:
  // Throws Error when there is no such device.
  explicit TensorMemory(const Device& device);

  // The address that a plan's run() is given for this tensor. The content is the host's, now.
  const void* input(const HostTensor& tensor) { return image(tensor, Role::input); }
  // Filled with guard bytes, as a new host tensor is; fetch() brings it back.
  void* output(const HostTensor& tensor) { return image(tensor, Role::output); }

  // Grows the workspace; on a GPU it is filled with NaN.
  void reserve_workspace(std::size_t bytes);
  Workspace workspace() const;
  // One stream a device, for all sessions of the process: their work never overlaps.
  Stream stream() const { return {stream_}; }

  // Waits for the stream, then copies outputs to the host; with `all`, inputs too (but borrowed
  // memory), so that a kernel that changed one is found out.
  void fetch(Fetch what) const;

 private:
  enum class Role { input, output };
  void* image(const HostTensor& tensor, Role role);

  struct Image {
    HostTensor tensor;
    cuda::DeviceMemory memory;
    Role role;
  };
  const cuda::DeviceInfo* device_ = nullptr;  // null: the CPU
  cuda::CUstream stream_ = nullptr;
  std::vector<Image> images_;  // on the CPU too: they keep the tensors
  WorkspaceBuffer host_workspace_;
  cuda::DeviceMemory workspace_;
};

}  // namespace pullback::driver

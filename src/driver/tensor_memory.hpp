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

// How a session uses a GPU, beside the plain way.
struct Placement {
  bool own_stream = false;  // else one a device, for all sessions of the process
  bool unaligned = false;   // tensors begin one element past an address that vectors may have
};

class TensorMemory {
 public:
  // Throws Error when there is no such device.
  explicit TensorMemory(const Device& device, const Placement& placement = {});

  // The address that a plan's run() is given for this tensor. The content is the host's, now.
  const void* input(const HostTensor& tensor) { return image(tensor, Role::input); }
  // Filled with guard bytes, as a new host tensor is; fetch() brings it back.
  void* output(const HostTensor& tensor) { return image(tensor, Role::output); }

  // Grows the workspace; on a GPU it is filled with NaN.
  void reserve_workspace(std::size_t bytes);
  Workspace workspace() const;
  Stream stream() const { return {stream_}; }

  // Waits for the stream, then copies outputs to the host; with `all`, inputs too (but borrowed
  // memory), so that a kernel that changed one is found out.
  void fetch(Fetch what = Fetch::all) const;

 private:
  enum class Role { input, output };
  void* image(const HostTensor& tensor, Role role);

  struct Image {
    HostTensor tensor;
    cuda::DeviceMemory memory;
    Role role;
    std::size_t shift;  // of the tensor's memory in `memory`
    cuda::CUdeviceptr address() const { return cuda::address(memory.data()) + shift; }
  };
  const cuda::DeviceInfo* device_ = nullptr;  // null: the CPU
  Placement placement_;
  cuda::OwnStream own_stream_;
  cuda::CUstream stream_ = nullptr;
  std::vector<Image> images_;  // on the CPU too: they keep the tensors
  WorkspaceBuffer host_workspace_;
  cuda::DeviceMemory workspace_;
};

}  // namespace pullback::driver

// Where a plan runs, and what a run is given besides its tensors.
#pragma once

#include <cstddef>

namespace pullback {

enum class DeviceKind { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;    // CUDA device ordinal
  int threads = 0;  // CPU threads of one run; 0 = as many as the process may use

  static constexpr Device cpu(int threads = 0) { return {DeviceKind::cpu, 0, threads}; }
  static constexpr Device cuda(int index = 0) { return {DeviceKind::cuda, index, 0}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// A CUstream (cudaStream_t). On the CPU it is ignored: run() returns when the work is done.
struct Stream {
  void* handle = nullptr;
};

// Scratch memory on the plan's device, owned by the caller and aligned to kWorkspaceAlignment.
// Its content before and after a run means nothing; two runs at a time need two workspaces.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

inline constexpr std::size_t kWorkspaceAlignment = 256;

}  // namespace pullback

// A kernel that is loaded and ready to launch on any device of the process.
#pragma once

#include <array>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/kernel_key.hpp"

namespace pullback::cuda {

struct LaunchShape {
  std::array<unsigned, 3> grid{1, 1, 1};
  unsigned block = 1;
  unsigned cluster = 1;       // blocks of a cluster along x
  bool programmatic = false;  // may start before the kernel ahead of it in the stream has ended
};

class Kernel {
 public:
  // Compiles if need be, loads, and allows `shared_bytes` of dynamic shared memory on the device.
  // All of it happens at plan time: launch() touches no file or attribute. The driver brings the
  // code into a context at its first launch there, where nothing has asked for its occupancy.
  static std::shared_ptr<const Kernel> load(const KernelSource& source, const DeviceInfo& device,
                                            int shared_bytes = 0);

  const std::string& name() const { return name_; }
  CUfunction function() const { return reinterpret_cast<CUfunction>(handle_); }
  int shared_bytes() const { return shared_bytes_; }
  // Blocks of this size that one multiprocessor holds at a time.
  int blocks_per_multiprocessor(const DeviceInfo& device, int block_size) const;
  // Clusters of this shape that the device holds at a time, 1 or more; blocks, where the cluster
  // is 1.
  int clusters_on_device(const DeviceInfo& device, const LaunchShape& shape) const;

 private:
  std::string name_;
  CUkernel handle_ = nullptr;
  int shared_bytes_ = 0;
};

// Kernels of a plan are compiled side by side, as that takes long: each is on its way until it is
// asked for.
using LoadingKernel = std::shared_future<std::shared_ptr<const Kernel>>;

// While one lives, what its thread loads goes on in threads of their own.
class LoadScope {
 public:
  // may_guess: what follows from a kernel that is not there yet may be guessed, not waited for.
  explicit LoadScope(bool may_guess);
  ~LoadScope();
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;
  // When all are there; throws what the first of them that failed has thrown.
  void finish();
  // Whether anything was: what came of it is to be thrown away, and made again.
  bool guessed() const { return guessed_; }

 private:
  friend LoadingKernel load_beside(const KernelSource&, const DeviceInfo&, int);
  friend bool guesses(const LoadingKernel&);
  std::vector<LoadingKernel> loading_;
  LoadScope* const outer_;
  const bool may_guess_;
  bool guessed_ = false;
};

// Kernel::load, at once where no scope is. `device` is one of device_info().
LoadingKernel load_beside(const KernelSource& source, const DeviceInfo& device,
                          int shared_bytes = 0);

// Whether the caller is to guess at what the kernel would tell.
bool guesses(const LoadingKernel& kernel);

// Whether it can be loaded: it is, or is on disk, or there is a compiler.
bool can_be_loaded(const KernelSource& source);

// `parameters` is the kernel's only argument, a struct passed by value. The device's context must
// be current (DeviceGuard).
void launch(const Kernel& kernel, const LaunchShape& shape, void* stream, const void* parameters);

}  // namespace pullback::cuda

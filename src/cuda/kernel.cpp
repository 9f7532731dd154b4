#include "cuda/kernel.hpp"

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <mutex>
#include <system_error>

#include "cuda/compiler.hpp"
#include "pullback/error.hpp"

namespace pullback::cuda {
namespace {

// Libraries stay loaded for the life of the process, and so does this: a plan may outlive any owner
// we could name, and other threads may plan while the process ends.
struct LoadedKernels {
  std::mutex mutex;
  std::map<std::string, CUkernel> by_key;

  // Null: none. The mutex is held.
  CUkernel find(const std::string& key) const {
    const auto it = by_key.find(key);
    return it != by_key.end() ? it->second : nullptr;
  }
};
LoadedKernels& loaded_kernels() {
  static auto& kernels = *new LoadedKernels();
  return kernels;
}

bool is_loaded(const KernelSource& source) {
  LoadedKernels& kernels = loaded_kernels();
  const std::string key = key_text(source);
  const std::lock_guard lock(kernels.mutex);
  return kernels.find(key) != nullptr;
}

CUkernel loaded(const KernelSource& source) {
  LoadedKernels& kernels = loaded_kernels();
  const std::string key = key_text(source);
  {
    const std::lock_guard lock(kernels.mutex);
    if (CUkernel kernel = kernels.find(key)) return kernel;
  }
  std::shared_ptr<const Cubin> cubin = compiled(source);
  const Driver& functions = driver();
  const CaptureGuard uncaptured;
  CUkernel kernel = nullptr;
  // What the driver makes of the code it may say no sooner than it is asked for the kernel.
  const auto load = [&] {
    CUlibrary library = nullptr;
    const CUresult result = functions.cuLibraryLoadData(&library, cubin->data(), nullptr, nullptr,
                                                        0, nullptr, nullptr, 0);
    if (result != kSuccess) return result;
    const CUresult found = functions.cuLibraryGetKernel(&kernel, library, source.entry.c_str());
    if (found != kSuccess) functions.cuLibraryUnload(library);
    return found;
  };
  CUresult result = load();
  if (result != kSuccess && can_compile()) {
    // What is on disk may come of a compiler that is newer than this driver.
    cubin = compiled(source, true);
    result = load();
  }
  check(result, fmt::format("loading {} for {}", source.name, arch_name(source)).c_str());
  // The first of several threads has it: another copy of the code does no harm.
  const std::lock_guard lock(kernels.mutex);
  return kernels.by_key.try_emplace(key, kernel).first->second;
}

thread_local LoadScope* current_scope = nullptr;

LaunchConfig launch_config(const Kernel& kernel, const LaunchShape& shape, void* stream,
                           LaunchAttribute (&attributes)[2]) {
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = LaunchAttribute::cluster_dimension;
    attributes[count++].value.cluster = {shape.cluster, 1, 1};
  }
  if (shape.programmatic) {
    attributes[count].id = LaunchAttribute::programmatic_stream_serialization;
    attributes[count++].value.programmatic_stream_serialization_allowed = 1;
  }
  return {shape.grid[0],
          shape.grid[1],
          shape.grid[2],
          shape.block,
          1,
          1,
          static_cast<unsigned>(kernel.shared_bytes()),
          static_cast<CUstream>(stream),
          attributes,
          count};
}

}  // namespace

std::shared_ptr<const Kernel> Kernel::load(const KernelSource& source, const DeviceInfo& device,
                                           int shared_bytes) {
  if (shared_bytes > device.max_shared_bytes) {
    throw Error(ErrorCode::unsupported,
                fmt::format("CUDA: {} needs {} bytes of shared memory, {} has {}", source.name,
                            shared_bytes, device.name, device.max_shared_bytes));
  }
  auto kernel = std::make_shared<Kernel>();
  kernel->name_ = source.name;
  kernel->handle_ = loaded(source);
  kernel->shared_bytes_ = shared_bytes;
  // Another plan may use the same kernel with more shared memory: never lower the limit, not even
  // between another thread's look at it and its change.
  static std::mutex limits;
  const std::lock_guard lock(limits);
  const CaptureGuard uncaptured;
  int allowed = 0;
  const Driver& functions = driver();
  check(functions.cuKernelGetAttribute(&allowed, kMaxDynamicSharedSizeBytes, kernel->handle_,
                                       device.handle),
        "cuKernelGetAttribute");
  if (shared_bytes > allowed) {
    check(functions.cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, shared_bytes, kernel->handle_,
                                         device.handle),
          "cuKernelSetAttribute");
  }
  return kernel;
}

LoadScope::LoadScope(bool may_guess) : outer_(current_scope), may_guess_(may_guess) {
  current_scope = this;
}
LoadScope::~LoadScope() { current_scope = outer_; }

void LoadScope::finish() {
  for (const LoadingKernel& kernel : loading_) kernel.get();
}

LoadingKernel load_beside(const KernelSource& source, const DeviceInfo& device, int shared_bytes) {
  const auto load = [source, &device, shared_bytes] {
    return Kernel::load(source, device, shared_bytes);
  };
  if (current_scope != nullptr && !is_loaded(source)) {
    try {
      current_scope->loading_.push_back(std::async(std::launch::async, load).share());
      return current_scope->loading_.back();
    } catch (const std::system_error&) {  // no more threads
    }
  }
  std::promise<std::shared_ptr<const Kernel>> now;
  now.set_value(load());
  return now.get_future().share();
}

bool guesses(const LoadingKernel& kernel) {
  if (current_scope == nullptr || !current_scope->may_guess_) return false;
  if (kernel.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return false;
  return current_scope->guessed_ = true;
}

bool can_be_loaded(const KernelSource& source) {
  return is_loaded(source) || can_be_compiled(source);
}

int Kernel::blocks_per_multiprocessor(const DeviceInfo& device, int block_size) const {
  const DeviceGuard guard(device);
  int blocks = 0;
  CUfunction function = nullptr;
  check(driver().cuKernelGetFunction(&function, handle_), "cuKernelGetFunction");
  check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks, function, block_size, static_cast<std::size_t>(shared_bytes_)),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

int Kernel::clusters_on_device(const DeviceInfo& device, const LaunchShape& shape) const {
  if (shape.cluster == 1) {
    return blocks_per_multiprocessor(device, static_cast<int>(shape.block)) *
           device.multiprocessors;
  }
  const DeviceGuard guard(device);
  CUfunction function = nullptr;
  check(driver().cuKernelGetFunction(&function, handle_), "cuKernelGetFunction");
  LaunchShape one = shape;
  one.grid = {shape.cluster, 1, 1};
  LaunchAttribute attributes[2];
  const LaunchConfig config = launch_config(*this, one, nullptr, attributes);
  int clusters = 0;
  check(driver().cuOccupancyMaxActiveClusters(&clusters, function, &config),
        "cuOccupancyMaxActiveClusters");
  // A slice of a divided GPU may have too few multiprocessors beside each other.
  if (clusters == 0) {
    throw Error(ErrorCode::unsupported,
                fmt::format("CUDA: {} needs {} blocks of {} threads that share their memory, which "
                            "{} cannot hold; a larger part of the GPU can",
                            name_, shape.cluster, shape.block, device.name));
  }
  return clusters;
}

void launch(const Kernel& kernel, const LaunchShape& shape, void* stream, const void* parameters) {
  LaunchAttribute attributes[2];
  const LaunchConfig config = launch_config(kernel, shape, stream, attributes);
  void* arguments[] = {const_cast<void*>(parameters)};
  const CUresult result = driver().cuLaunchKernelEx(&config, kernel.function(), arguments, nullptr);
  if (result != kSuccess) check(result, ("cuLaunchKernelEx of " + kernel.name()).c_str());
}

}  // namespace pullback::cuda

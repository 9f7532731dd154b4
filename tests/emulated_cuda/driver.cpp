// libcuda.so.1 with a device of the host's: kernels are what nvrtc.cpp makes of their sources,
// streams run as they are told, device memory is the host's. It shows without a GPU whether kernels
// compute what they should, and, built with AddressSanitizer, where they read and write; not how
// fast they are, nor what threads do to each other.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver_api.hpp"

namespace {

using namespace pullback::cuda;

constexpr CUresult kInvalidValue = 1, kOutOfMemory = 2, kNotSupported = 801, kNotFound = 500,
                   kCaptureUnsupported = 900;

struct Dim {
  unsigned x, y, z;
};
// As in emulated.hpp.
struct Launch {
  Dim grid, block;
  unsigned shared_bytes;
  void** parameters;
};
struct Kernel {
  void (*run)(const Launch&);
  unsigned parameter_bytes;
};

struct Graph {
  std::vector<std::function<CUresult()>> work;
};
// Null is a stream too.
struct Stream {
  Graph* capturing = nullptr;
};

std::mutex mutex;  // of the device: it does one thing at a time

// Now, or when the graph is launched.
CUresult enqueue(CUstream stream, std::function<CUresult()> work) {
  Graph* const graph = stream != nullptr ? reinterpret_cast<Stream*>(stream)->capturing : nullptr;
  if (graph != nullptr) {
    graph->work.push_back(std::move(work));
    return kSuccess;
  }
  const std::lock_guard lock(mutex);
  return work();
}

CUresult nothing() { return kSuccess; }
CUresult driver_version(int* version) { return *version = 13000, kSuccess; }
CUresult device_count(int* count) { return *count = 1, kSuccess; }
CUresult device_name(char* name, int length, CUdevice) {
  return strncpy(name, "emulated on the host", static_cast<std::size_t>(length)), kSuccess;
}
CUresult device_memory(std::size_t* bytes, CUdevice) {
  return *bytes = std::size_t{1} << 33, kSuccess;
}
// Kernels for sm_90 may ask for clusters, which there are none of.
int arch() {
  const char* text = getenv("EMULATED_CUDA_ARCH");
  return text != nullptr ? atoi(text) : 90;
}
CUresult device_attribute(int* value, int attribute, CUdevice) {
  switch (attribute) {
    case kComputeCapabilityMajor:
      return *value = arch() / 10, kSuccess;
    case kComputeCapabilityMinor:
      return *value = 0, kSuccess;
    case kMultiprocessorCount:  // few, so that small cases fill them too
      return *value = 3, kSuccess;
    case kL2CacheSize:
      return *value = 50 << 20, kSuccess;
    case kMaxSharedMemoryPerBlockOptin:
      return *value = 227 << 10, kSuccess;
    default:
      return *value = 1, kSuccess;
  }
}
CUresult error_text(CUresult, const char** text) {
  return *text = "an error of the emulated device", kSuccess;
}
CUresult context(CUcontext* made) { return *made = reinterpret_cast<CUcontext>(&mutex), kSuccess; }
CUresult device_zero(CUdevice* device) { return *device = 0, kSuccess; }

// While a stream is captured, what may wait for its work is refused to threads that have not said
// that they know what they do.
constexpr int kRelaxed = 2;
std::atomic<int> captures = 0;
thread_local int capture_mode = 0;
CUresult exchange_capture_mode(int* mode) { return std::swap(*mode, capture_mode), kSuccess; }
bool is_refused() { return captures > 0 && capture_mode != kRelaxed; }

CUresult allocate_async(CUdeviceptr* memory, std::size_t bytes, CUstream) {
  void* at = nullptr;
  if (posix_memalign(&at, 256, bytes) != 0) return kOutOfMemory;
  memset(at, 0xee, bytes);
  return *memory = reinterpret_cast<CUdeviceptr>(at), kSuccess;
}
CUresult release_async(CUdeviceptr memory, CUstream) {
  return free(reinterpret_cast<void*>(memory)), kSuccess;
}
CUresult allocate(CUdeviceptr* memory, std::size_t bytes) {
  return is_refused() ? kCaptureUnsupported : allocate_async(memory, bytes, nullptr);
}
CUresult release(CUdeviceptr memory) {
  return is_refused() ? kCaptureUnsupported : release_async(memory, nullptr);
}
CUresult copy(void* to, const void* from, std::size_t bytes, CUstream stream) {
  return enqueue(stream, [=] { return memcpy(to, from, bytes), kSuccess; });
}
CUresult fill(void* at, unsigned char value, std::size_t count, CUstream stream) {
  return enqueue(stream, [=] { return memset(at, value, count), kSuccess; });
}

// A "cubin" is its size, 8 bytes, and a shared object.
CUresult load(CUlibrary* library, const void* code, int*, void**, unsigned, int*, void**,
              unsigned) {
  if (is_refused()) return kCaptureUnsupported;
  std::uint64_t bytes = 0;
  memcpy(&bytes, code, sizeof bytes);
  char path[] = "/tmp/emulated_cuda_XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) return kInvalidValue;
  const char* const content = static_cast<const char*>(code) + sizeof bytes;
  const bool written = write(file, content, bytes) == static_cast<ssize_t>(bytes);
  close(file);
  void* const loaded = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (loaded == nullptr && written) fprintf(stderr, "emulated CUDA: %s\n", dlerror());
  unlink(path);
  *library = static_cast<CUlibrary>(loaded);
  return loaded != nullptr ? kSuccess : kInvalidValue;
}
CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  *kernel = static_cast<CUkernel>(dlsym(library, (std::string("emulated_") + name).c_str()));
  return *kernel != nullptr ? kSuccess : kNotFound;
}
CUresult same(void** to, void* from) { return *to = from, kSuccess; }
CUresult kernel_attribute(int* value, int, CUkernel, CUdevice) { return *value = 0, kSuccess; }
CUresult one(int* value) { return *value = 1, kSuccess; }

CUresult launch(const LaunchConfig* config, CUfunction function, void** parameters, void**) {
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == LaunchAttribute::cluster_dimension && attribute.value.cluster.x > 1) {
      return kNotSupported;
    }
  }
  const auto* const kernel = reinterpret_cast<const Kernel*>(function);
  const char* const from = static_cast<const char*>(parameters[0]);
  // A kernel has one parameter, which a graph keeps.
  return enqueue(config->stream,
                 [=, parameter = std::vector<char>(from, from + kernel->parameter_bytes),
                  config = *config]() mutable {
                   void* at = parameter.data();
                   kernel->run({{config.grid_x, config.grid_y, config.grid_z},
                                {config.block_x, config.block_y, config.block_z},
                                config.shared_bytes,
                                &at});
                   return kSuccess;
                 });
}

CUresult make_stream(CUstream* stream, unsigned) {
  return *stream = reinterpret_cast<CUstream>(new Stream), kSuccess;
}
CUresult end_stream(CUstream stream) { return delete reinterpret_cast<Stream*>(stream), kSuccess; }
CUresult synchronize(CUstream) { return is_refused() ? kCaptureUnsupported : kSuccess; }
CUresult begin_capture(CUstream stream, int) {
  ++captures;
  return reinterpret_cast<Stream*>(stream)->capturing = new Graph, kSuccess;
}
CUresult end_capture(CUstream stream, CUgraph* graph) {
  --captures;
  Stream& captured = *reinterpret_cast<Stream*>(stream);
  *graph = reinterpret_cast<CUgraph>(captured.capturing);
  return captured.capturing = nullptr, kSuccess;
}
CUresult instantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  return *executable = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph))),
         kSuccess;
}
CUresult launch_graph(CUgraphExec executable, CUstream) {
  const std::lock_guard lock(mutex);
  for (const auto& work : reinterpret_cast<Graph*>(executable)->work) {
    if (const CUresult result = work(); result != kSuccess) return result;
  }
  return kSuccess;
}
CUresult end_graph(Graph* graph) { return delete graph, kSuccess; }

CUresult make_event(CUevent* event, unsigned) {
  return *event = reinterpret_cast<CUevent>(&mutex), kSuccess;
}
CUresult elapsed(float* milliseconds, CUevent, CUevent) { return *milliseconds = 1, kSuccess; }

template <class Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" CUresult cuGetProcAddress_v2(const char* name, void** function, int, std::uint64_t,
                                        int* status) {
  const struct {
    const char* name;
    void* function;
  } known[] = {
      {"cuDriverGetVersion", address(driver_version)},
      {"cuGetErrorName", address(error_text)},
      {"cuGetErrorString", address(error_text)},
      {"cuDeviceGetCount", address(device_count)},
      {"cuDeviceGet", address(device_zero)},
      {"cuDeviceGetName", address(device_name)},
      {"cuDeviceGetAttribute", address(device_attribute)},
      {"cuDeviceTotalMem", address(device_memory)},
      {"cuDevicePrimaryCtxRetain", address(context)},
      {"cuCtxGetCurrent", address(context)},
      {"cuCtxGetDevice", address(device_zero)},
      {"cuCtxPopCurrent", address(context)},
      {"cuLibraryLoadData", address(load)},
      {"cuLibraryGetKernel", address(get_kernel)},
      {"cuKernelGetFunction", address(same)},
      {"cuKernelGetAttribute", address(kernel_attribute)},
      {"cuLaunchKernelEx", address(launch)},
      {"cuOccupancyMaxActiveBlocksPerMultiprocessor", address(one)},
      {"cuOccupancyMaxActiveClusters", address(one)},
      {"cuMemAlloc", address(allocate)},
      {"cuMemFree", address(release)},
      {"cuMemAllocAsync", address(allocate_async)},
      {"cuMemFreeAsync", address(release_async)},
      {"cuMemcpyHtoDAsync", address(copy)},
      {"cuMemcpyDtoHAsync", address(copy)},
      {"cuMemcpyDtoDAsync", address(copy)},
      {"cuMemsetD8Async", address(fill)},
      {"cuStreamCreate", address(make_stream)},
      {"cuStreamDestroy", address(end_stream)},
      {"cuStreamSynchronize", address(synchronize)},
      {"cuThreadExchangeStreamCaptureMode", address(exchange_capture_mode)},
      {"cuStreamBeginCapture", address(begin_capture)},
      {"cuStreamEndCapture", address(end_capture)},
      {"cuGraphInstantiateWithFlags", address(instantiate)},
      {"cuGraphLaunch", address(launch_graph)},
      {"cuGraphExecDestroy", address(end_graph)},
      {"cuGraphDestroy", address(end_graph)},
      {"cuEventCreate", address(make_event)},
      {"cuEventElapsedTime", address(elapsed)},
  };
  *function = address(nothing);
  for (const auto& entry : known) {
    if (strcmp(name, entry.name) == 0) *function = entry.function;
  }
  if (status != nullptr) *status = 0;
  return kSuccess;
}

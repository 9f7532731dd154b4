#include "cuda/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/check.hpp"

namespace pullback::cuda {
namespace {

// Library loading, context-independent kernels and tensor maps all arrived with CUDA 12.0.
constexpr int kOldestDriver = 12000;

struct State {
  Driver functions;
  std::string problem;
  pid_t process = 0;
  std::deque<DeviceInfo> devices;  // addresses stay valid
  std::mutex context_mutex;
  std::vector<CUcontext> contexts;  // by ordinal; null until used
};

using GetProcAddress = CUresult (*)(const char* name, void** function, int version,
                                    std::uint64_t flags, int* status);

std::string resolve(Driver& functions) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return fmt::format("the NVIDIA driver was not found: {}", dlerror());
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (!get) return "the NVIDIA driver is too old: CUDA 12.0 or newer is needed";
  std::string missing;
  const auto load = [&](auto& function, const char* name, int version) {
    void* address = nullptr;
    if (get(name, &address, version, 0, nullptr) != kSuccess || !address) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define PULLBACK_LOAD(name, version, parameters) load(functions.name, #name, version);
  PULLBACK_DRIVER_FUNCTIONS(PULLBACK_LOAD)
#undef PULLBACK_LOAD
  if (!missing.empty()) {
    return fmt::format("the NVIDIA driver is too old: it has no {} (CUDA 12.0 or newer is needed)",
                       missing);
  }
  return {};
}

std::string text_of(const Driver& functions, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  functions.cuGetErrorName(result, &name);
  functions.cuGetErrorString(result, &text);
  return fmt::format("{} ({})", text ? text : "unknown error", name ? name : "?");
}

int attribute(const Driver& functions, CUdevice device, DeviceAttribute which) {
  int value = 0;
  functions.cuDeviceGetAttribute(&value, which, device);
  return value;
}

std::string initialise(State& state) {
  Driver& functions = state.functions;
  std::string problem = resolve(functions);
  if (!problem.empty()) return problem;
  CUresult result = functions.cuInit(0);
  if (result != kSuccess) return "cuInit failed: " + text_of(functions, result);
  functions.cuDriverGetVersion(&functions.version);
  if (functions.version < kOldestDriver) {
    return fmt::format("the NVIDIA driver is too old: it speaks CUDA {}, 12.0 or newer is needed",
                       functions.version / 1000);
  }
  int count = 0;
  functions.cuDeviceGetCount(&count);
  if (count == 0) return "the NVIDIA driver shows no device";
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    DeviceInfo info{};
    info.ordinal = ordinal;
    functions.cuDeviceGet(&info.handle, ordinal);
    char name[128] = {};
    functions.cuDeviceGetName(name, sizeof name - 1, info.handle);
    info.name = name;
    info.major = attribute(functions, info.handle, kComputeCapabilityMajor);
    info.minor = attribute(functions, info.handle, kComputeCapabilityMinor);
    info.multiprocessors = attribute(functions, info.handle, kMultiprocessorCount);
    info.l2_bytes = attribute(functions, info.handle, kL2CacheSize);
    info.max_shared_bytes = attribute(functions, info.handle, kMaxSharedMemoryPerBlockOptin);
    functions.cuDeviceTotalMem(&info.memory_bytes, info.handle);
    state.devices.push_back(info);
  }
  state.contexts.resize(state.devices.size());
  return {};
}

// Never destroyed: plans in static objects free their memory when the process ends.
State& state() {
  static State& instance = *[] {
    auto made = std::make_unique<State>();
    made->process = getpid();
    made->problem = initialise(*made);
    return made.release();
  }();
  return instance;
}

std::string problem_of(const State& current) {
  if (current.problem.empty() && current.process != getpid()) {
    return "CUDA was initialised before this process was forked; start it with exec or spawn";
  }
  return current.problem;
}

}  // namespace

std::string driver_problem() { return problem_of(state()); }

const Driver& driver() {
  const State& current = state();
  const std::string problem = problem_of(current);
  if (!problem.empty()) throw Error(ErrorCode::device, "CUDA: " + problem);
  return current.functions;
}

void check(CUresult result, const char* call) {
  if (result != kSuccess) {
    throw Error(ErrorCode::device,
                fmt::format("CUDA: {} failed: {}", call, text_of(state().functions, result)));
  }
}

int device_count() {
  driver();
  return static_cast<int>(state().devices.size());
}

const DeviceInfo& device_info(int ordinal) {
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) {
    fail(ErrorCode::invalid_argument, "CUDA", "device", fmt::format("an index below {}", count),
         fmt::format("{}", ordinal));
  }
  return state().devices[static_cast<std::size_t>(ordinal)];
}

namespace {

// The device's primary context, created on first use and kept for the life of the process.
CUcontext primary_context(const DeviceInfo& device) {
  State& current = state();
  const std::lock_guard lock(current.context_mutex);
  CUcontext& context = current.contexts[static_cast<std::size_t>(device.ordinal)];
  if (!context) {
    check(current.functions.cuDevicePrimaryCtxRetain(&context, device.handle),
          "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

DeviceGuard::DeviceGuard(const DeviceInfo& device) {
  const Driver& functions = driver();
  CUcontext current = nullptr;
  check(functions.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  CUdevice on = -1;
  if (current && functions.cuCtxGetDevice(&on) == kSuccess && on == device.handle) return;
  check(functions.cuCtxPushCurrent(primary_context(device)), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) state().functions.cuCtxPopCurrent(&popped);
}

CaptureGuard::CaptureGuard() {
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}
CaptureGuard::~CaptureGuard() { state().functions.cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace pullback::cuda

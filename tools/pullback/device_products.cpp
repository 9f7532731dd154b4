#include "device_products.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/element.hpp"
#include "cuda/memory.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda_timer.hpp"
#include "driver/random.hpp"

namespace pullback::tool {
namespace {

// Of cublas_api.h and library_types.h.
constexpr int kNoTranspose = 0, kComputeF32 = 68, kComputeF64 = 70, kDefaultAlgorithm = -1;
int type_of(DType dtype) { return dtype == DType::f64 ? 1 : dtype == DType::f32 ? 0 : 14; }

void* open_cublas() {
  std::vector<std::filesystem::path> folders = {""};
  if (cuda::nvrtc_problem().empty()) {
    folders.insert(folders.begin(),
                   std::filesystem::path(cuda::Nvrtc::instance().path()).parent_path());
  }
  for (const auto& folder : folders) {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
      if (void* library = dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
  }
  return nullptr;
}

// Normal numbers, some of them again and again: what they are decides how fast the device's clock
// may be.
void fill(const cuda::DeviceMemory& memory, DType dtype, cuda::CUstream stream) {
  constexpr std::size_t kNumbers = std::size_t{1} << 20;
  std::vector<std::byte> some(kNumbers * size_of(dtype));
  driver::Random random(1);
  dispatch_floating(dtype, [&]<class T>() {
    T* const numbers = reinterpret_cast<T*>(some.data());
    for (std::size_t i = 0; i < kNumbers; ++i) numbers[i] = from_double<T>(random.normal());
  });
  const cuda::Driver& driver = cuda::driver();
  const cuda::CUdeviceptr to = cuda::address(memory.data());
  const std::size_t begin = std::min(some.size(), memory.bytes());
  cuda::check(driver.cuMemcpyHtoDAsync(to, some.data(), begin, stream), "cuMemcpyHtoDAsync");
  cuda::check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
  for (std::size_t done = begin; done < memory.bytes(); done *= 2) {
    const std::size_t more = std::min(done, memory.bytes() - done);
    cuda::check(driver.cuMemcpyDtoDAsync(to + done, to, more, stream), "cuMemcpyDtoDAsync");
  }
}

}  // namespace

struct DeviceProducts::Functions {
  int (*cublasCreate_v2)(void** handle);
  int (*cublasDestroy_v2)(void* handle);
  int (*cublasGetVersion_v2)(void* handle, int* version);
  int (*cublasSetStream_v2)(void* handle, cuda::CUstream stream);
  int (*cublasGemmEx)(void* handle, int transpose_a, int transpose_b, int m, int n, int k,
                      const void* alpha, const void* a, int a_type, int a_stride, const void* b,
                      int b_type, int b_stride, const void* beta, void* c, int c_type, int c_stride,
                      int compute_type, int algorithm);
};

DeviceProducts::DeviceProducts(const Device& device) : device_(device) {
  void* const library = open_cublas();
  if (library == nullptr) return;
  auto functions = std::make_unique<Functions>();
  bool all = true;
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    all &= function != nullptr;
  };
#define PULLBACK_LOAD(name) load(functions->name, #name)
  PULLBACK_LOAD(cublasCreate_v2);
  PULLBACK_LOAD(cublasDestroy_v2);
  PULLBACK_LOAD(cublasGetVersion_v2);
  PULLBACK_LOAD(cublasSetStream_v2);
  PULLBACK_LOAD(cublasGemmEx);
#undef PULLBACK_LOAD
  const cuda::DeviceGuard guard(cuda::device_info(device.index));
  int version = 0;
  if (!all || functions->cublasCreate_v2(&handle_) != 0 ||
      functions->cublasGetVersion_v2(handle_, &version) != 0) {
    description_ = "cuBLAS does not work here";
    return;
  }
  functions_ = functions.release();  // lives as long as the process, like the library itself
  description_ =
      fmt::format("cuBLAS {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

DeviceProducts::~DeviceProducts() {
  if (functions_ != nullptr) functions_->cublasDestroy_v2(handle_);
}

double DeviceProducts::flops_per_second(DType dtype) const {
  if (functions_ == nullptr) return 0;
  // Some milliseconds.
  const int n = size_of(dtype) == 2 ? 8192 : 4096;
  const cuda::DeviceInfo& info = cuda::device_info(device_.index);
  const cuda::OwnStream stream(info);
  const cuda::DeviceGuard guard(info);
  const auto bytes = static_cast<std::size_t>(n) * static_cast<std::size_t>(n) * size_of(dtype);
  const cuda::DeviceMemory a(info, bytes), b(info, bytes), c(info, bytes);
  fill(a, dtype, stream.get());
  fill(b, dtype, stream.get());
  const double ones[2] = {1, 0};
  const float ones_f32[2] = {1, 0};
  const bool in_double = dtype == DType::f64;
  const void* const alpha = in_double ? static_cast<const void*>(&ones[0]) : &ones_f32[0];
  const void* const beta = in_double ? static_cast<const void*>(&ones[1]) : &ones_f32[1];
  const int type = type_of(dtype);
  int status = functions_->cublasSetStream_v2(handle_, stream.get());
  DeviceTimes times = time_on_device(device_, {stream.get()}, 0.1, 11, 3, [&](int) {
    status |= functions_->cublasGemmEx(handle_, kNoTranspose, kNoTranspose, n, n, n, alpha,
                                       a.data(), type, n, b.data(), type, n, beta, c.data(), type,
                                       n, in_double ? kComputeF64 : kComputeF32, kDefaultAlgorithm);
  });
  if (status != 0) return 0;
  std::sort(times.seconds.begin(), times.seconds.end());
  return 2.0 * n * n * n / times.seconds[times.seconds.size() / 2];
}

}  // namespace pullback::tool

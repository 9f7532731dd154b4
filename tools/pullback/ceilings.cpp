#include "ceilings.hpp"

#include <dlfcn.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <thread>

#include "cuda_timer.hpp"

namespace pullback::tool {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Clock = std::chrono::steady_clock;

// The shortest of the runs: a ceiling is what the machine can do undisturbed.
double best_seconds(int runs, const std::function<void()>& work) {
  double best = std::numeric_limits<double>::infinity();
  work();
  for (int i = 0; i < runs; ++i) {
    const auto begin = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

// Stores that pass the caches by: they save reading the lines that will be overwritten.
void copy_streaming(const std::byte* from, std::byte* to, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t step = hn::Lanes(d);
  const auto* source = reinterpret_cast<const std::uint8_t*>(from);
  auto* target = reinterpret_cast<std::uint8_t*>(to);
  for (std::size_t i = 0; i + step <= bytes; i += step) {
    hn::Stream(hn::Load(d, source + i), d, target + i);
  }
  hwy::FlushStream();
}

void copy_cached(const std::byte* from, std::byte* to, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t step = hn::Lanes(d);
  const auto* source = reinterpret_cast<const std::uint8_t*>(from);
  auto* target = reinterpret_cast<std::uint8_t*>(to);
  for (std::size_t i = 0; i + step <= bytes; i += step) {
    hn::Store(hn::Load(d, source + i), d, target + i);
  }
}

void copy_library(const std::byte* from, std::byte* to, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

struct Method {
  const char* name;
  void (*copy)(const std::byte*, std::byte*, std::size_t);
};
constexpr Method kMethods[] = {
    {"streaming stores", copy_streaming}, {"cached stores", copy_cached}, {"memcpy", copy_library}};

constexpr std::size_t kChunk = std::size_t{1} << 20;

std::size_t copied_bytes(const Machine& machine) {
  const std::size_t wanted = std::max<std::size_t>(4 * machine.cache_bytes, 256u << 20);
  const std::size_t limit = std::min<std::size_t>(machine.memory_bytes / 8, 1u << 30);
  return std::max(kChunk, std::min(wanted, limit) / kChunk * kChunk);
}

// OpenBLAS, opened at run time: the tool needs it for this one measurement only.
void measure_products(Ceilings& ceilings, bool quick) {
  const std::string count = std::to_string(ceilings.threads);
  ::setenv("OPENBLAS_NUM_THREADS", count.c_str(), 1);  // before it starts threads of its own
  void* library = ::dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
  void (*set_threads)(int) = nullptr;
  char* (*get_config)() = nullptr;
  void (*sgemm)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                float*, int) = nullptr;
  void (*dgemm)(int, int, int, int, int, int, double, const double*, int, const double*, int,
                double, double*, int) = nullptr;
  if (!find(set_threads, "openblas_set_num_threads") || !find(get_config, "openblas_get_config") ||
      !find(sgemm, "cblas_sgemm") || !find(dgemm, "cblas_dgemm")) {
    return;
  }
  set_threads(ceilings.threads);
  ceilings.blas = get_config();
  const int n = quick ? 1024 : 2048;
  const auto rate = [&](const auto& gemm, auto zero) {
    using T = decltype(zero);
    constexpr int kRowMajor = 101, kNoTranspose = 111;
    const std::vector<T> a(static_cast<std::size_t>(n) * static_cast<std::size_t>(n), T(0.5));
    std::vector<T> c(a.size());
    const double seconds = best_seconds(quick ? 3 : 5, [&] {
      gemm(kRowMajor, kNoTranspose, kNoTranspose, n, n, n, T(1), a.data(), n, a.data(), n, T(0),
           c.data(), n);
    });
    return 2.0 * n * n * n / seconds;
  };
  ceilings.f32_flops_per_second = rate(sgemm, 0.0f);
  ceilings.f64_flops_per_second = rate(dgemm, 0.0);
  // Its threads keep spinning for a moment after a product: not in our measurements.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

}  // namespace

// Memory that no other buffer shares a page with.
CopyCeiling::Buffer::Buffer(std::size_t bytes)
    : data(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{4096}))) {}
void CopyCeiling::Buffer::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{4096});
}

CopyCeiling::CopyCeiling(int threads, const Machine& machine)
    : threads_(threads), bytes_(copied_bytes(machine)), from_(bytes_), to_(bytes_) {
  for_chunks([](std::byte* a, std::byte* b) {  // touched by the threads that will use them
    std::memset(a, 1, kChunk);
    std::memset(b, 2, kChunk);
  });
}

template <class Body>
void CopyCeiling::for_chunks(const Body& body) const {
  threads_.parallel_for(static_cast<std::int64_t>(bytes_ / kChunk), [&](std::int64_t i, int) {
    const std::size_t at = static_cast<std::size_t>(i) * kChunk;
    body(from_.data.get() + at, to_.data.get() + at);
  });
}

CopyRate CopyCeiling::measure(int runs) const {
  CopyRate best;
  for (const Method& method : kMethods) {
    const double seconds = best_seconds(
        runs, [&] { for_chunks([&](std::byte* a, std::byte* b) { method.copy(a, b, kChunk); }); });
    const double rate = 2 * static_cast<double>(bytes_) / seconds;
    if (rate > best.bytes_per_second) best = {rate, method.name};
  }
  return best;
}

Ceilings measure_ceilings(const CopyCeiling& copy, bool quick) {
  Ceilings ceilings;
  ceilings.threads = copy.threads();
  const CopyRate rate = copy.measure(quick ? 3 : 7);
  ceilings.copy_bytes = copy.bytes();
  ceilings.copy_bytes_per_second = rate.bytes_per_second;
  ceilings.copy_method = rate.method;
  measure_products(ceilings, quick);
  return ceilings;
}

Ceilings ceilings_of(const Device& device, const Machine& machine, bool quick) {
  if (device.kind == DeviceKind::cuda) return measure_device_ceilings(device);
  return measure_ceilings(CopyCeiling(device.threads, machine), quick);
}

}  // namespace pullback::tool

#include "cuda_timer.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cuda/memory.hpp"
#include "device_products.hpp"

namespace pullback::tool {
namespace {

using Clock = std::chrono::steady_clock;

class Event {
 public:
  Event() { cuda::check(cuda::driver().cuEventCreate(&event_, 0), "cuEventCreate"); }
  ~Event() {
    if (event_ != nullptr) cuda::driver().cuEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

  void record(cuda::CUstream stream) const {
    cuda::check(cuda::driver().cuEventRecord(event_, stream), "cuEventRecord");
  }
  double seconds_since(const Event& start) const {
    float milliseconds = 0;
    cuda::check(cuda::driver().cuEventElapsedTime(&milliseconds, start.event_, event_),
                "cuEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cuda::CUevent event_ = nullptr;
};

}  // namespace

DeviceTimes time_on_device(const Device& device, Stream stream, double seconds, int fewest,
                           int warm_up, const std::function<void(int)>& run) {
  const cuda::DeviceGuard guard(cuda::device_info(device.index));
  const auto on = static_cast<cuda::CUstream>(stream.handle);
  const auto synchronize = [&] {
    cuda::check(cuda::driver().cuStreamSynchronize(on), "cuStreamSynchronize");
  };
  // The stream holds the events and launches of a batch without making the caller wait.
  constexpr int kBatch = 100;
  std::vector<Event> events(2 * kBatch);
  // The device works beforehand: within a tenth of a second one at its power limit lowers its clock
  // by a fifth. No longer than it times, as who asks for little wants it soon.
  const double settling = std::min(seconds, 0.15);
  auto begin = Clock::now();
  const auto spent_since_begin = [&] {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  for (int i = 0; i < warm_up || spent_since_begin() < settling; ++i) {
    run(i);
    if (i % 4 == 3) synchronize();
  }
  synchronize();
  DeviceTimes times;
  begin = Clock::now();
  int batch = std::clamp(fewest, 1, kBatch);
  for (int count = 0; times.seconds.size() < 20000;) {
    for (int i = 0; i < batch; ++i) {
      events[static_cast<std::size_t>(2 * i)].record(on);
      const auto start = Clock::now();
      run(count + i);
      const auto stop = Clock::now();
      events[static_cast<std::size_t>(2 * i + 1)].record(on);
      times.host_seconds.push_back(std::chrono::duration<double>(stop - start).count());
    }
    synchronize();
    count += batch;
    for (int i = 0; i < batch; ++i) {
      times.seconds.push_back(events[static_cast<std::size_t>(2 * i + 1)].seconds_since(
          events[static_cast<std::size_t>(2 * i)]));
    }
    const double spent = spent_since_begin();
    if (spent >= seconds) break;
    const double each = spent / static_cast<double>(times.seconds.size());
    batch = std::clamp(static_cast<int>((seconds - spent) / each), 1, kBatch);
  }
  return times;
}

Ceilings measure_device_ceilings(const Device& device) {
  const cuda::DeviceInfo& info = cuda::device_info(device.index);
  const std::size_t bytes = std::min<std::size_t>(std::size_t{1} << 30, info.memory_bytes / 8);
  const cuda::DeviceMemory from(info, bytes), to(info, bytes);
  const cuda::OwnStream stream(info);
  const cuda::DeviceGuard guard(info);
  cuda::check(cuda::driver().cuMemsetD8Async(cuda::address(from.data()), 0x3c, bytes, stream.get()),
              "cuMemsetD8Async");
  DeviceTimes times = time_on_device(device, {stream.get()}, 0.1, 11, 3, [&](int) {
    cuda::check(cuda::driver().cuMemcpyDtoDAsync(cuda::address(to.data()),
                                                 cuda::address(from.data()), bytes, stream.get()),
                "cuMemcpyDtoDAsync");
  });
  std::sort(times.seconds.begin(), times.seconds.end());
  Ceilings ceilings;
  ceilings.copy_bytes = bytes;
  ceilings.copy_method = "the driver's copy";
  ceilings.copy_bytes_per_second =
      2 * static_cast<double>(bytes) / times.seconds[times.seconds.size() / 2];
  const DeviceProducts products(device);
  ceilings.blas = products.description();
  ceilings.bf16_flops_per_second = products.flops_per_second(DType::bf16);
  ceilings.f32_flops_per_second = products.flops_per_second(DType::f32);
  ceilings.f64_flops_per_second = products.flops_per_second(DType::f64);
  return ceilings;
}

}  // namespace pullback::tool

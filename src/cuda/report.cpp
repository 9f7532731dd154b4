#include "cuda/report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/device_sources.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/driver.hpp"
#include "cuda/nvrtc.hpp"

namespace pullback::cuda {
namespace {

std::string line(const std::string& name, const std::string& value) {
  return fmt::format("{:<18}{}\n", name, value);
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string driver_lines() {
  const std::string problem = driver_problem();
  if (!problem.empty()) return line("CUDA", "no device: " + problem);
  std::string text = line("CUDA", version_text(driver().version));
  for (int i = 0; i < device_count(); ++i) {
    const DeviceInfo& device = device_info(i);
    text += line(
        fmt::format("cuda:{}", i),
        fmt::format("{}, sm_{}, {} multiprocessors, {:.1f} GiB", device.name, device.arch(),
                    device.multiprocessors, static_cast<double>(device.memory_bytes) / (1 << 30)));
  }
  return text;
}

std::string compiler_line() {
  const std::string problem = nvrtc_problem();
  if (!problem.empty()) return line("NVRTC", "none: " + problem);
  const Nvrtc& nvrtc = Nvrtc::instance();
  return line("NVRTC", version_text(nvrtc.version()) + ", " + nvrtc.path());
}

std::string cache_lines() {
  const auto cache = DiskCache::from_environment();
  constexpr std::string_view kModes[] = {"read and written", "only read", "off"};
  const bool lost = cache.mode() == DiskCache::Mode::read_write && !cache.writable();
  const std::string_view mode =
      lost ? "only read, as it cannot be written" : kModes[static_cast<int>(cache.mode())];
  const std::string folder = cache.folder().empty() ? "no folder" : cache.folder();
  const auto shipped = DiskCache::shipped().list();
  // Those compiled from other sources are never found.
  const auto own = std::count_if(shipped.begin(), shipped.end(), [&](const auto& entry) {
    const std::string_view key = entry.key_text;
    const std::string_view source = key.substr(std::min(key.size(), key.find("\nsource\n")));
    return key.find("\nsources " + device_sources_hash(source) + "\n") != key.npos;
  });
  return line("kernel cache",
              fmt::format("{}, {} kernels, {}", folder, cache.list().size(), mode)) +
         line("shipped kernels",
              fmt::format("{}, {} of them of this version", shipped.size(), own));
}

}  // namespace

std::string report() {
  std::string text;
  for (std::string (*part)() : {driver_lines, compiler_line, cache_lines}) {
    try {
      text += part();
    } catch (const std::exception& error) {
      text += line("CUDA", error.what());
    }
  }
  return text;
}

}  // namespace pullback::cuda

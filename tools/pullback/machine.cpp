#include "machine.hpp"

#include <hwy/highway.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <sstream>

#include "core/cpu_info.hpp"

namespace pullback::tool {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::size_t last_level_cache() {
  // The highest index is the last level; its size reads like "32768K".
  for (int index = 4; index >= 0; --index) {
    const std::string text =
        first_line("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::istringstream stream(text);
    std::size_t size = 0;
    char unit = ' ';
    if (stream >> size && size > 0) {
      stream >> unit;
      return size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0);
    }
  }
  return 32 << 20;
}

std::size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream stream(line);
    std::string key;
    std::size_t kilobytes = 0;
    if (stream >> key >> kilobytes && key == "MemAvailable:") return kilobytes << 10;
  }
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 2;
}

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  …": the first word with two dots.
std::string nvidia_driver() {
  std::istringstream words(first_line("/proc/driver/nvidia/version"));
  std::string word;
  while (words >> word) {
    if (word.find('.') != std::string::npos && std::isdigit(word[0])) return word;
  }
  return {};
}

}  // namespace

Machine this_machine() {
  Machine machine;
  machine.cpu = cpu_name();
  machine.cores = available_cpus();
  // Lower bits are better targets, in Highway.
  const auto targets = static_cast<std::int64_t>(hwy::SupportedTargets() & HWY_TARGETS);
  for (int bit = 0; bit < 63; ++bit) {
    const std::int64_t target = std::int64_t{1} << bit;
    if ((targets & target) == 0) continue;
    const std::string name = hwy::TargetName(target);
    machine.simd.push_back(name.starts_with("AVX3") ? "AVX-512 (" + name + ")" : name);
  }
  if (cpu_has(CpuIsa::avx512_bf16)) machine.extra_isa.emplace_back("AVX-512 BF16");
  if (cpu_has(CpuIsa::amx_bf16)) machine.extra_isa.emplace_back("AMX BF16");
  machine.cache_bytes = last_level_cache();
  machine.memory_bytes = available_memory();
#ifdef __clang__
  machine.compiler = "clang " __clang_version__;
#else
  machine.compiler = "gcc " __VERSION__;
#endif
  machine.nvidia_driver = nvidia_driver();
  return machine;
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace pullback::tool

#include "core/cpu_info.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pullback {

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// State components that the operating system saves (XCR0).
std::uint64_t saved_state() {
  constexpr unsigned kOsxsave = 1u << 27;
  if (!(cpuid(1).ecx & kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

bool has_avx512_bf16() {
  constexpr std::uint64_t kAvx512State = 0xe6;
  constexpr unsigned kAvx512Core = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  return (saved_state() & kAvx512State) == kAvx512State &&
         (cpuid(7).ebx & kAvx512Core) == kAvx512Core && (cpuid(7, 1).eax & 1u << 5) != 0;
}

bool has_amx_bf16() {
  constexpr std::uint64_t kTileState = 3u << 17;
  constexpr unsigned kAmxBf16AndTile = 1u << 22 | 1u << 24;
  if ((saved_state() & kTileState) != kTileState) return false;
  if ((cpuid(7).edx & kAmxBf16AndTile) != kAmxBf16AndTile) return false;
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kTileDataComponent = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileDataComponent) == 0;
}

}  // namespace

bool cpu_has(CpuIsa isa) {
  static const bool avx512_bf16 = has_avx512_bf16();
  static const bool amx_bf16 = avx512_bf16 && has_amx_bf16();
  switch (isa) {
    case CpuIsa::any:
      return true;
    case CpuIsa::avx512_bf16:
      return avx512_bf16;
    case CpuIsa::amx_bf16:
      return amx_bf16;
  }
  return false;
}

std::string cpu_name() {
  char name[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i);
    std::memcpy(name + 16 * i, &r, 16);
  }
  std::string text(name);
  const auto first = text.find_first_not_of(' ');
  return first == std::string::npos ? "unknown CPU" : text.substr(first);
}

#else

bool cpu_has(CpuIsa isa) { return isa == CpuIsa::any; }

std::string cpu_name() { return "unknown CPU"; }

#endif

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails where there are more CPUs than a cpu_set_t holds.
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  const int count = CPU_COUNT(&set);
  return count > 0 ? count : 1;
}

}  // namespace pullback

// What this machine is, as far as a benchmark's reader wants to know.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pullback::tool {

struct Machine {
  std::string cpu;
  int cores = 0;                       // usable by this process
  std::vector<std::string> simd;       // Highway targets built in that this CPU has, best first
  std::vector<std::string> extra_isa;  // AVX-512 BF16, AMX BF16
  std::size_t cache_bytes = 0;         // last level
  std::size_t memory_bytes = 0;        // free for use now
  std::string compiler;
  std::string nvidia_driver;  // version; empty without one
};

Machine this_machine();

// UTC, "2031-05-17T08:30:00Z".
std::string time_now();

}  // namespace pullback::tool

// What the CPU and the operating system offer this process.
#pragma once

#include <string>

namespace pullback {

// What a variant needs of the CPU besides the baseline that the library was built for.
enum class CpuIsa { any, avx512_bf16, amx_bf16 };

// AMX asks the kernel for permission on first use, once per process.
bool cpu_has(CpuIsa isa);

std::string cpu_name();

// Cores that the process may use (its affinity mask), at least 1.
int available_cpus();

}  // namespace pullback

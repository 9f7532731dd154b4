// From a kernel's source to its machine code: memory, then disk, then NVRTC.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/disk_cache.hpp"
#include "cuda/kernel_key.hpp"

namespace pullback::cuda {

using Cubin = std::vector<char>;

// What the assembler says of a kernel, on a machine without a GPU too.
struct Resources {
  int registers = 0;
  int spill_store_bytes = 0, spill_load_bytes = 0;
  int stack_bytes = 0;
  int static_shared_bytes = 0;
};

std::vector<std::string> compile_options(const KernelSource& kernel);

// Blocks until the kernel is there. Calls for one kernel share one compilation, calls for others
// run beside it; that it fails to compile is remembered and thrown again. PULLBACK_JIT=off forbids
// compiling, PULLBACK_JIT_DUMP names a folder for sources and cubins. anew: what is on disk would
// not load, and is replaced. Throws Error(device) with the whole log.
std::shared_ptr<const Cubin> compiled(const KernelSource& kernel, bool anew = false);

// Whether there is a compiler, and it may be used.
bool can_compile();
// Whether compiled() finds the kernel on disk, or may compile it. Compiles nothing.
bool can_be_compiled(const KernelSource& kernel);

// Puts the kernel into the cache unless it is there, from the environment's cache if it is there.
// True when it was compiled. Throws Error(device) also when the cache cannot be written.
bool precompile(const KernelSource& kernel, const DiskCache& cache);

// Compiles now, past every cache, and reads what the assembler reports. For tests and tools.
struct Report {
  std::shared_ptr<const Cubin> cubin;
  Resources resources;
  std::string log;
  double seconds = 0;
};
Report compile_with_report(const KernelSource& kernel);

}  // namespace pullback::cuda

// What a compiled kernel depends on, and nothing else: no path, driver version or shape. Nor the
// release of the compiler: any one's machine code will do, so that a folder of them serves machines
// without NVRTC, and finding a kernel does not load it (50 ms).
#pragma once

#include <string>

namespace pullback::cuda {

// A kernel to compile: the generated source names the configuration and includes device sources.
struct KernelSource {
  std::string name;    // for people: "entmax_backward_f32_v4096"
  std::string entry;   // extern "C" name of the __global__ function
  std::string source;  // the generated translation unit
  int arch = 90;
  bool arch_specific = false;  // sm_90a instead of sm_90: wgmma, setmaxnreg
};

std::string arch_name(const KernelSource& kernel);  // "sm_90a"

// All that enters the key, as text that a person can read; stored in cache entries and compared on
// every read, so that equal hashes of different keys do no harm.
std::string key_text(const KernelSource& kernel);

}  // namespace pullback::cuda

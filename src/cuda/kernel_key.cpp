#include "cuda/kernel_key.hpp"

#include <fmt/format.h>

#include "cuda/compiler.hpp"
#include "cuda/device_sources.hpp"

namespace pullback::cuda {
namespace {

// Raised when the meaning of an entry changes.
constexpr int kSchema = 3;

}  // namespace

std::string arch_name(const KernelSource& kernel) {
  return fmt::format("sm_{}{}", kernel.arch, kernel.arch_specific ? "a" : "");
}

std::string key_text(const KernelSource& kernel) {
  std::string options;
  for (const std::string& option : compile_options(kernel)) options += option + " ";
  return fmt::format("schema {}\nname {}\nentry {}\narch {}\nsources {}\noptions {}\nsource\n{}",
                     kSchema, kernel.name, kernel.entry, arch_name(kernel),
                     device_sources_hash(kernel.source), options, kernel.source);
}

}  // namespace pullback::cuda

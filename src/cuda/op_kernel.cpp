#include "cuda/op_kernel.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/variant.hpp"
#include "pullback/error.hpp"

namespace pullback::cuda {

int compile_arch(const DeviceInfo& device) {
  // Within one major number, newer devices run the machine code of older ones.
  int best = device.arch();
  for (int arch : kArchs) {
    if (arch / 10 == device.major && arch <= device.arch()) best = arch;
  }
  return best;
}

std::string_view device_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "double";
    case DType::f32:
      return "float";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "int64_t";
    case DType::i32:
      return "int32_t";
    case DType::u8:
    case DType::boolean:
      return "uint8_t";
  }
  throw Error(ErrorCode::internal, "CUDA: a dtype without a name in device code");
}

KernelSource op_kernel(const OpKernel& kernel, int arch, std::size_t parameter_bytes) {
  std::string source = fmt::format("#include \"{}\"\n", kernel.file);
  source += "#include \"device/float.cuh\"\n";
  source += "namespace pullback {\nusing namespace device;\n";
  source += fmt::format("static_assert(sizeof({}) == {});\n", kernel.parameters, parameter_bytes);
  for (const auto& [name, value] : kernel.constants) {
    source += fmt::format("static_assert({} == {});\n", name, value);
  }
  source += "extern \"C\" __global__ ";
  const bool fewer = std::find(kernel.fewer_blocks_on.begin(), kernel.fewer_blocks_on.end(),
                               arch) != kernel.fewer_blocks_on.end();
  source += fmt::format("__launch_bounds__({}, {})\n", kernel.threads,
                        std::max(1, kernel.blocks - fewer));
  source +=
      fmt::format("void {}(const __grid_constant__ {} parameters) {{\n  {}(parameters);\n}}\n",
                  kernel.name, kernel.parameters, kernel.function);
  source += "}\n";
  return {.name = kernel.name,
          .entry = kernel.name,
          .source = source,
          .arch = arch,
          .arch_specific = kernel.arch_specific};
}

bool can_have(const KernelSource& kernel) {
  if (can_be_loaded(kernel)) return true;
  MissedKernels::add(kernel.name);
  return false;
}

}  // namespace pullback::cuda

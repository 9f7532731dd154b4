// What the CUDA variants of all ops share: from a function template in an op's .cuh file to a
// kernel that run() launches.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/kernel.hpp"
#include "pullback/device.hpp"
#include "pullback/dtype.hpp"
#include "pullback/plan.hpp"

namespace pullback::cuda {

// The architectures that kernels are compiled for ahead of time and checked for in the tests.
inline constexpr int kArchs[] = {80, 86, 89, 90, 100, 120};

// The one of kArchs whose machine code the device runs, else the device's own.
int compile_arch(const DeviceInfo& device);

// "float", "bf16", "int64_t", …: the dtype's name in device code. bool reads as uint8_t.
std::string_view device_type(DType dtype);

struct OpKernel {
  std::string name;       // an identifier, unique in the library: "entmax_forward_rows_bf16_16"
  std::string_view file;  // "ops/entmax/cuda/smxx_forward.cuh"
  // A device function that takes the parameters, named from namespace pullback:
  // "entmax::forward_rows<bf16, 16>".
  std::string function;
  std::string_view parameters;  // its parameter's type: "entmax::ForwardParams"
  int threads = 0;              // a block's
  int blocks = 1;               // a multiprocessor holds at least: bounds the registers
  // Where the compiler would spill within that bound: one block fewer there.
  std::vector<int> fewer_blocks_on = {};
  // For this one architecture, with what only it has: wgmma, setmaxnreg.
  bool arch_specific = false;
  // Constants that the host computed with; the device code must agree: {"entmax::kTile", kTile}.
  std::vector<std::pair<std::string_view, std::int64_t>> constants = {};
};

KernelSource op_kernel(const OpKernel& kernel, int arch, std::size_t parameter_bytes);

// The source of a kernel whose parameter is the struct Parameters, shared by host and device.
template <class Parameters>
KernelSource op_kernel(const OpKernel& kernel, int arch) {
  static_assert(std::is_trivially_copyable_v<Parameters> && sizeof(Parameters) <= 4096);
  return op_kernel(kernel, arch, sizeof(Parameters));
}

// Whether a plan can have the kernel: it is loaded or on disk, or there is a compiler. To be asked
// where a slower one serves as well; of what is missing, the plan's description tells.
bool can_have(const KernelSource& kernel);

template <class Parameters>
bool can_have(const OpKernel& kernel, const DeviceInfo& device) {
  return can_have(op_kernel<Parameters>(kernel, compile_arch(device)));
}

// A kernel loaded at plan time with the shape it is launched in.
template <class Parameters>
class PlannedKernel {
 public:
  PlannedKernel() = default;
  PlannedKernel(const OpKernel& kernel, const DeviceInfo& device, int shared_bytes = 0)
      : kernel_(load_beside(op_kernel<Parameters>(kernel, compile_arch(device)), device,
                            shared_bytes)) {
    shape.block = static_cast<unsigned>(kernel.threads);
  }

  // For the size of a grid: blocks that one multiprocessor holds at a time. One as long as the
  // kernel is on its way, so that the next ones are named meanwhile (make_body).
  int blocks_per_multiprocessor(const DeviceInfo& device) const {
    if (guesses(kernel_)) return 1;
    return kernel_.get()->blocks_per_multiprocessor(device, static_cast<int>(shape.block));
  }
  // Clusters of `shape` that the device holds at a time; blocks, where shape.cluster is 1.
  int clusters_on_device(const DeviceInfo& device) const {
    if (guesses(kernel_)) return 1;
    return kernel_.get()->clusters_on_device(device, shape);
  }
  // The device's context must be current: CudaBody sees to it.
  void launch(Stream stream, const Parameters& parameters) const {
    cuda::launch(*kernel_.get(), shape, stream.handle, &parameters);
  }

  LaunchShape shape;

 private:
  LoadingKernel kernel_;
};

// A CUDA variant's PlanBody. The constructor of the derived class loads kernels and prepares their
// parameters; enqueue() fills in pointers and launches, and does nothing that a stream's capture
// into a graph forbids.
template <class Tensors>
class CudaBody : public PlanBody<Tensors> {
 public:
  void run(Stream stream, const Tensors& tensors, Workspace workspace) const final {
    const DeviceGuard guard(device_);
    enqueue(stream, tensors, workspace);
  }

 protected:
  explicit CudaBody(const Device& device) : device_(device_info(device.index)) {}
  virtual void enqueue(Stream stream, const Tensors& tensors, Workspace workspace) const = 0;

  const DeviceInfo& device_;
};

// A plan's body with its kernels. A constructor that asks for the occupancy of a kernel that is
// still on its way is called again when all are there: the first call has told which it wants.
template <class Body, class... Arguments>
std::unique_ptr<Body> make_body(Arguments&&... arguments) {
  constexpr bool kRepeatable = (std::is_lvalue_reference_v<Arguments> && ...);
  {
    LoadScope scope(kRepeatable);
    auto body = std::make_unique<Body>(std::forward<Arguments>(arguments)...);
    scope.finish();
    if (!scope.guessed()) return body;
  }
  if constexpr (kRepeatable) return std::make_unique<Body>(arguments...);
  return nullptr;  // not reached: nothing was guessed
}

// Whether 16-byte loads and stores may begin at all of these; null pointers do not count.
inline bool vector_aligned(std::initializer_list<const void*> pointers) {
  std::uintptr_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits % 16 == 0;
}

}  // namespace pullback::cuda

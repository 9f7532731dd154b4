#include "ops/entmax/cuda/hiding.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ops/entmax/cuda/rows.hpp"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

cuda::OpKernel hide_kernel(DType dtype) {
  const auto type = cuda::device_type(dtype);
  return {
      .name = fmt::format("entmax_hide_{}", type),
      .file = "ops/entmax/cuda/smxx_hide.cuh",
      .function = fmt::format("entmax::hide<{}>", type),
      .parameters = "entmax::HideParams",
      .threads = 32 * kHideWarps,
      .constants = {{"entmax::kHideWarps", kHideWarps}, {"entmax::kHideVectors", kHideVectors}}};
}

}  // namespace

bool Hiding::serves(DType dtype, const cuda::DeviceInfo& device) {
  return std::ranges::find(kDTypes, dtype) != std::end(kDTypes) &&
         cuda::can_have<HideParams>(hide_kernel(dtype), device);
}

Hiding::Hiding(const EntmaxProblem& problem, const TensorSpec& to, const cuda::DeviceInfo& device)
    : kernel_(hide_kernel(problem.x.dtype), device) {
  std::vector<Dim> dims;
  for (int dim = 0; dim < to.rank; ++dim) {
    if (to.shape[dim] == 1) continue;
    dims.push_back(
        {to.shape[dim], {problem.x.strides[dim], problem.mask.strides[dim], to.strides[dim]}});
  }
  dims = merged(std::move(dims));
  if (dims.empty()) dims.push_back({1, {1, 1, 1}});
  const Dim axis = std::move(dims.back());
  dims.pop_back();

  Rows& rows = params_.rows;
  const std::array tensors{&params_.x, &params_.mask, &params_.to};
  rows.length = axis.size;
  rows.groups = 1;
  set_outer(dims, rows, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i]->axis = axis.steps[i];
  const auto vector_length = static_cast<std::int64_t>(16 / size_of(problem.x.dtype));
  const std::int64_t vectors = rows.count * ((rows.length + vector_length - 1) / vector_length);
  constexpr std::int64_t kBlockVectors = std::int64_t{kHideVectors} * 32 * kHideWarps;
  kernel_.shape.grid[0] = static_cast<unsigned>(
      std::max<std::int64_t>(1, (vectors + kBlockVectors - 1) / kBlockVectors));
}

void Hiding::enqueue(Stream stream, const void* x, const void* mask, void* to) const {
  HideParams params = params_;
  params.x.data = const_cast<void*>(x);
  params.mask.data = const_cast<void*>(mask);
  params.to.data = to;
  kernel_.launch(stream, params);
}

}  // namespace pullback::entmax

namespace pullback::cuda {

std::vector<KernelSource> entmax_hiding_kernels(int arch) {
  std::vector<KernelSource> kernels;
  for (const DType dtype : entmax::kDTypes) {
    kernels.push_back(op_kernel<entmax::HideParams>(entmax::hide_kernel(dtype), arch));
  }
  return kernels;
}

}  // namespace pullback::cuda

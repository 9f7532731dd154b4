// Which kernels go over rows, and in which shape.
#include <fmt/format.h>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

cuda::OpKernel kernel_of(const MapOp& op, std::string_view what, DType dtype, bool column,
                         Access access) {
  const auto element = cuda::device_type(dtype);
  const int vector = column || access == Access::any ? 1 : vector_length(dtype);
  const bool perm = access != Access::wide;
  const std::string map = fmt::format(fmt::runtime(op.type), fmt::arg("T", element),
                                      fmt::arg("V", vector), fmt::arg("P", perm));
  const std::string function =
      column ? fmt::format("segment_cuda::map_column<segment_cuda::{}, {}, {}, {}, {}>", map,
                           element, perm, access == Access::wide,
                           perm ? op.segment_bytes : op.wide_segment_bytes)
             : fmt::format("segment_cuda::map_rows<segment_cuda::{}, {}, {}, {}>", map, element,
                           vector, perm);
  const bool many = access == Access::wide && dtype != DType::f64;
  // Halves of one column would spill in the registers that more blocks leave them.
  const int blocks = !many ? 1 : column && dtype == DType::f16 ? 2 : op.blocks;
  return {.name = fmt::format("segment_{}_{}_{}", what, op.name, element),
          .file = column ? "ops/segment/cuda/smxx_map_column.cuh"
                         : "ops/segment/cuda/smxx_map_rows.cuh",
          .function = function,
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .blocks = blocks,
          .constants = {{"segment_cuda::kThreads", kThreads},
                        {"segment_cuda::kWalkerRows", kWalkerRows}}};
}

cuda::OpKernel rows_kernel(const MapOp& op, DType dtype, Access access) {
  const auto what = access == Access::wide  ? "map_rows_wide"
                    : access == Access::any ? "map_rows_any"
                                            : "map_rows_wide_permuted";
  return kernel_of(op, what, dtype, false, access);
}
cuda::OpKernel column_kernel(const MapOp& op, DType dtype, Access access) {
  return kernel_of(op, access == Access::wide ? "map_column_wide" : "map_column_any", dtype, true,
                   access);
}

int bytes(DType dtype) { return static_cast<int>(size_of(dtype)); }
int real_bytes(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

}  // namespace

MapOp spread_map(bool mean, DType dtype) {
  return {mean ? "mean" : "sum", fmt::format("Spread<{{T}}, {{V}}, {}>", mean), bytes(dtype),
          bytes(dtype)};
}
MapOp arg_map(DType arg, DType dtype) {
  return {fmt::format("arg_{}", name_of(arg)),
          fmt::format("ByArg<{{T}}, {{V}}, {}, {{P}}>", cuda::device_type(arg)),
          arg == DType::u8 ? 2 * real_bytes(dtype) : 16, 2 * real_bytes(dtype),
          size_of(arg) == 8 ? 3 : 4};
}
MapOp mask_map(bool even, DType dtype) {
  return {even ? "mask_even" : "mask", fmt::format("ByMask<{{T}}, {{V}}, {}>", even), bytes(dtype),
          bytes(dtype), 2};
}
MapOp ties_map(DType dtype) {
  return {"ties", "ByTies<{T}, {V}>", 2 * bytes(dtype), 2 * bytes(dtype), 2};
}
MapOp exponential_map(DType dtype) {
  return {"logsumexp", "ByExponential<{T}, {V}>", 2 * real_bytes(dtype), 2 * real_bytes(dtype), 3};
}
MapOp softmax_map(DType dtype) {
  return {"softmax", "Softmax<{T}, {V}>", 2 * real_bytes(dtype), 2 * real_bytes(dtype), 2};
}
MapOp softmax_gradient_map(DType dtype) {
  return {"softmax_gradient", "SoftmaxGradient<{T}, {V}>", real_bytes(dtype), real_bytes(dtype), 2};
}

Mapping::Mapping(const SegmentProblem& problem, const cuda::DeviceInfo& device, const MapOp& op,
                 Specs rows, Setup& setup)
    : problem_(problem) {
  const DType dtype = problem.x.dtype;
  const bool column = problem.x.shape[1] == 1;
  const bool perm = permuted(problem);
  bool wide = column ? !perm : dtype != DType::f64;
  for (const TensorSpec* tensor : rows) {
    const auto length = static_cast<std::size_t>(vector_length(dtype));
    wide &= column ? tensor->shape[0] == 1 || tensor->strides[0] == 1
                   : matrix(*tensor, size_of(dtype), length).vectors != 0;
  }
  if (column) {
    any_ = {column_kernel(op, dtype, Access::any), device};
    any_tiling_ = column_tiling(op.segment_bytes);
    if (wide) wide_ = {column_kernel(op, dtype, Access::wide), device};
    wide_tiling_ = column_tiling(op.wide_segment_bytes);
  } else {
    any_ = {rows_kernel(op, dtype, Access::any), device};
    any_tiling_ = rows_tiling(problem, 1);
    if (wide) {
      wide_ = {rows_kernel(op, dtype, perm ? Access::wide_permuted : Access::wide), device};
      wide_tiling_ = rows_tiling(problem, vector_length(dtype));
    }
  }
  setup.allow(any_tiling_);
  if (wide_) setup.allow(wide_tiling_);
}

void Mapping::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params) const {
  const bool column = bound_params.columns == 1;
  const bool wide = wide_ && (column ? column_in_vectors(bound_params) : in_vectors(bound_params));
  const Tiling& shape = wide ? wide_tiling_ : any_tiling_;
  const Params p = setup.tiled(launcher, bound_params, shape);
  launcher.launch(wide ? *wide_ : any_, p, p.tiles, shape.column_blocks);
}

std::vector<cuda::KernelSource> Mapping::kernels(const MapOp& op, DType dtype, int arch) {
  std::vector<cuda::KernelSource> all;
  const auto add = [&](const cuda::OpKernel& kernel) {
    all.push_back(cuda::op_kernel<Params>(kernel, arch));
  };
  add(rows_kernel(op, dtype, Access::any));
  add(column_kernel(op, dtype, Access::any));
  add(column_kernel(op, dtype, Access::wide));
  if (dtype != DType::f64) {
    add(rows_kernel(op, dtype, Access::wide));
    add(rows_kernel(op, dtype, Access::wide_permuted));
  }
  return all;
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_mapping_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const DType dtype : kDTypes) {
    for (const MapOp& op :
         {spread_map(false, dtype), spread_map(true, dtype), arg_map(DType::i64, dtype),
          arg_map(DType::i32, dtype), arg_map(DType::u8, dtype), mask_map(false, dtype),
          mask_map(true, dtype), ties_map(dtype), exponential_map(dtype), softmax_map(dtype),
          softmax_gradient_map(dtype)}) {
      for (KernelSource& kernel : Mapping::kernels(op, dtype, arch)) {
        all.push_back(std::move(kernel));
      }
    }
  }
  return all;
}

}  // namespace pullback::cuda

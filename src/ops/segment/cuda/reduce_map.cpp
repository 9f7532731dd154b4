// What reduces contiguous rows and then maps them: which kernels, and in which shape.
#include <fmt/format.h>

#include <algorithm>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

// Of the tensors that have a row for each of x, those that are read.
int inputs_of(RowRule rule) { return rule == RowRule::softmax_gradient ? 2 : 1; }
ReduceOp reduce_of(DType dtype, RowRule rule) {
  return rule == RowRule::softmax ? reduce_op(SegmentReduce::softmax, dtype)
                                  : row_product_sum(dtype);
}
// The rows that a tile has room for.
int rows_of(const SegmentProblem& problem, RowRule rule) {
  return row_tile_rows(inputs_of(rule), row_bytes(problem));
}
int vector_of(const SegmentProblem& problem) {
  if (problem.x.shape[1] == 1) return 1;
  // Contiguous, as all that is read and written.
  return matrix(problem.out, size_of(problem.x.dtype), vector_length(problem.x.dtype)).vector;
}

cuda::OpKernel kernel_of(std::string_view what, DType dtype, RowRule rule, int vector) {
  struct Names {
    std::string_view kernel, type;
  };
  const Names names = rule == RowRule::softmax ? Names{"softmax", "SoftmaxForward"}
                      : rule == RowRule::softmax_gradient
                          ? Names{"softmax_gradient", "SoftmaxBackward"}
                          : Names{"ties", "TiesBackward"};
  return {.name = fmt::format("segment_{}_{}_{}_{}", names.kernel, what,
                              name_of({vector, false}, dtype), cuda::device_type(dtype)),
          .file = "ops/segment/cuda/smxx_reduce_map.cuh",
          .function = fmt::format("segment_cuda::reduce_map_{}<segment_cuda::{}, {}, {}>", what,
                                  names.type, cuda::device_type(dtype), vector),
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .blocks = rule == RowRule::ties && vector == 8 ? 3 : 4,  // it would spill
          .constants = {{"segment_cuda::kThreads", kThreads}}};
}
cuda::OpKernel tile_kernel(DType dtype, RowRule rule, int vector) {
  return kernel_of("tile", dtype, rule, vector);
}
cuda::OpKernel border_kernel(DType dtype, RowRule rule, int vector) {
  return kernel_of("border", dtype, rule, vector);
}

Tiling tiling_of(const SegmentProblem& problem, const cuda::DeviceInfo& device, RowRule rule) {
  const int rows = rows_of(problem, rule), snap = row_tile_snap(rows);
  return row_tiling(problem, device, vector_of(problem), rows - snap, snap, 1);
}

// Whether segments are short enough: of those half as long as a tile a third of the rows is read
// twice; of those as long, all.
bool short_enough(const SegmentProblem& problem, RowRule rule) {
  // Other kernels read long segments of ties as often, and only wide rows as fast.
  if (rule == RowRule::ties && row_bytes(problem) < kRowTileWideRowBytes) return true;
  return problem.x.shape[0] <= (problem.num_segments + 1) * (rows_of(problem, rule) / 2);
}

}  // namespace

bool ReduceMap::serves(const SegmentProblem& problem, const cuda::DeviceInfo& device,
                       RowRule rule) {
  const TensorSpec& x = problem.x;
  if (x.dtype == DType::f64 || permuted(problem) || x.shape[0] == 0 || x.shape[1] == 0) {
    return false;
  }
  // One column is reduced and mapped faster by the kernels that stream it.
  if (x.shape[1] == 1 && rule != RowRule::ties) return false;
  bool all = contiguous(problem.out);
  if (rule != RowRule::softmax_gradient) all &= contiguous(x);
  if (rule != RowRule::softmax) all &= contiguous(problem.d_out) && contiguous(problem.d_x);
  if (!all || rows_of(problem, rule) < kRowTileLeastRows ||
      x.shape[1] / vector_of(problem) > kThreads || !short_enough(problem, rule)) {
    return false;
  }
  const int vector = vector_of(problem);
  return cuda::can_have<Params>(tile_kernel(x.dtype, rule, vector), device) &&
         cuda::can_have<Params>(border_kernel(x.dtype, rule, vector), device);
}

ReduceMap::ReduceMap(const SegmentProblem& problem, const cuda::DeviceInfo& device, RowRule rule,
                     Setup& setup, WorkspaceLayout& layout)
    : slot_columns_(Combining::slot_columns(problem)),
      combining_(problem, device, reduce_of(problem.x.dtype, rule)),
      tiling_(tiling_of(problem, device, rule)),
      tile_(tile_kernel(problem.x.dtype, rule, vector_of(problem)), device,
            row_tile_bytes(inputs_of(rule), row_bytes(problem))),
      border_(border_kernel(problem.x.dtype, rule, vector_of(problem)), device) {
  setup.allow(tiling_);
  const auto cells = static_cast<std::size_t>(tiles_of(problem, tiling_) * 2 * slot_columns_);
  const int state_bytes = reduce_of(problem.x.dtype, rule).state_bytes;
  slots_at_ = layout.take(cells * static_cast<std::size_t>(state_bytes));
}

bool ReduceMap::takes(const Params& p) {
  return cuda::vector_aligned({p.x.data, p.y.data, p.out.data, p.d_out.data, p.d_x.data});
}

void ReduceMap::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params) const {
  Params p = setup.tiled(launcher, bound_params, tiling_);
  p.slots = launcher.workspace + slots_at_;
  p.slot_columns = slot_columns_;
  launcher.launch(tile_, p, p.tiles, 1);
  combining_.enqueue(launcher, p);
  launcher.launch(border_, p, (p.tiles + kRowTileBorderTiles - 1) / kRowTileBorderTiles, 1);
}

std::vector<cuda::KernelSource> ReduceMap::kernels(DType dtype, RowRule rule, int arch) {
  std::vector<cuda::KernelSource> all;
  for (int vector = vector_length(dtype); vector > 0; vector /= 2) {
    for (const cuda::OpKernel& kernel :
         {tile_kernel(dtype, rule, vector), border_kernel(dtype, rule, vector)}) {
      all.push_back(cuda::op_kernel<Params>(kernel, arch));
    }
  }
  return all;
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_reduce_map_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const RowRule rule : {RowRule::softmax, RowRule::softmax_gradient, RowRule::ties}) {
      for (KernelSource& kernel : ReduceMap::kernels(dtype, rule, arch)) {
        all.push_back(std::move(kernel));
      }
    }
  }
  return all;
}

}  // namespace pullback::cuda

// softmax and its gradient over contiguous rows: which kernels, and in which shape.
#include <fmt/format.h>

#include <algorithm>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

int inputs_of(Pass pass) { return pass == Pass::forward ? 1 : 2; }
// Of rows that take less than all of a tile.
int row_bytes(const SegmentProblem& problem) {
  const auto bytes = problem.x.shape[1] * static_cast<std::int64_t>(size_of(problem.x.dtype));
  return static_cast<int>(std::min<std::int64_t>(bytes, kRowTileWideBytes));
}
ReduceOp reduce_of(DType dtype, Pass pass) {
  return pass == Pass::forward ? reduce_op(SegmentReduce::softmax, dtype) : row_product_sum(dtype);
}
// The rows that a tile has room for.
int rows_of(const SegmentProblem& problem, Pass pass) {
  return row_tile_rows(inputs_of(pass), row_bytes(problem));
}
int vector_of(const SegmentProblem& problem) {
  if (problem.x.shape[1] == 1) return 1;
  // Contiguous, as all that is read and written.
  return matrix(problem.out, size_of(problem.x.dtype), vector_length(problem.x.dtype)).vector;
}

cuda::OpKernel kernel_of(std::string_view what, DType dtype, Pass pass, int vector, int blocks) {
  const bool forward = pass == Pass::forward;
  return {
      .name = fmt::format("segment_softmax_{}{}_{}_{}", forward ? "" : "gradient_", what,
                          name_of({vector, false}, dtype), cuda::device_type(dtype)),
      .file = "ops/segment/cuda/smxx_softmax.cuh",
      .function = fmt::format("segment_cuda::softmax_{}<segment_cuda::Softmax{}, {}, {}>", what,
                              forward ? "Forward" : "Backward", cuda::device_type(dtype), vector),
      .parameters = "segment_cuda::Params",
      .threads = kThreads,
      .blocks = blocks,
      .constants = {{"segment_cuda::kThreads", kThreads}}};
}
cuda::OpKernel tile_kernel(DType dtype, Pass pass, int vector) {
  return kernel_of("tile", dtype, pass, vector, 4);
}
cuda::OpKernel border_kernel(DType dtype, Pass pass, int vector) {
  return kernel_of("border", dtype, pass, vector, 4);
}

Tiling tiling_of(const SegmentProblem& problem, const cuda::DeviceInfo& device, Pass pass) {
  const int rows = rows_of(problem, pass), snap = row_tile_snap(rows);
  return row_tiling(problem, device, vector_of(problem), rows - snap, snap, 1);
}

}  // namespace

bool SoftmaxTiles::serves(const SegmentProblem& problem, const cuda::DeviceInfo& device,
                          Pass pass) {
  const TensorSpec& x = problem.x;
  if (x.dtype == DType::f64 || permuted(problem) || x.shape[0] == 0 || x.shape[1] == 0) {
    return false;
  }
  bool all = contiguous(problem.out);
  if (pass == Pass::forward) {
    all &= contiguous(x);
  } else {
    all &= contiguous(problem.d_out) && contiguous(problem.d_x);
  }
  const std::int64_t rows = rows_of(problem, pass);
  if (!all || rows < kRowTileLeastRows || x.shape[1] / vector_of(problem) > kThreads) return false;
  // Of segments half as long as a tile a third of the rows is read twice; of those as long, all.
  // One column's that no lane has alone are summed faster by its own kernels.
  const bool column = x.shape[1] == 1 && pass == Pass::forward;
  if (x.shape[0] > (problem.num_segments + 1) * (column ? kRowTileAloneRows : rows / 2)) {
    return false;
  }
  const int vector = vector_of(problem);
  return cuda::can_have<Params>(tile_kernel(x.dtype, pass, vector), device) &&
         cuda::can_have<Params>(border_kernel(x.dtype, pass, vector), device);
}

SoftmaxTiles::SoftmaxTiles(const SegmentProblem& problem, const cuda::DeviceInfo& device, Pass pass,
                           Setup& setup, Layout& layout)
    : slot_columns_(Combining::slot_columns(problem)),
      tiling_(tiling_of(problem, device, pass)),
      tile_(tile_kernel(problem.x.dtype, pass, vector_of(problem)), device,
            row_tile_bytes(inputs_of(pass), row_bytes(problem))),
      border_(border_kernel(problem.x.dtype, pass, vector_of(problem)), device) {
  setup.allow(tiling_);
  const auto cells = static_cast<std::size_t>(tiles_of(problem, tiling_) * 2 * slot_columns_);
  const int state_bytes = reduce_of(problem.x.dtype, pass).state_bytes;
  slots_at_ = layout.take(cells * static_cast<std::size_t>(state_bytes));
}

bool SoftmaxTiles::takes(const Params& p) {
  return cuda::vector_aligned({p.x.data, p.y.data, p.d_x.data});
}

void SoftmaxTiles::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params,
                           const Combining& combining) const {
  Params p = setup.tiled(launcher, bound_params, tiling_);
  p.slots = launcher.workspace + slots_at_;
  p.slot_columns = slot_columns_;
  launcher.launch(tile_, p, p.tiles, 1);
  combining.enqueue(launcher, p);
  launcher.launch(border_, p, (p.tiles + kRowTileBorderTiles - 1) / kRowTileBorderTiles, 1);
}

std::vector<cuda::KernelSource> SoftmaxTiles::kernels(DType dtype, Pass pass, int arch) {
  std::vector<cuda::KernelSource> all;
  for (int vector = vector_length(dtype); vector > 0; vector /= 2) {
    for (const cuda::OpKernel& kernel :
         {tile_kernel(dtype, pass, vector), border_kernel(dtype, pass, vector)}) {
      all.push_back(cuda::op_kernel<Params>(kernel, arch));
    }
  }
  return all;
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_softmax_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (KernelSource& kernel : SoftmaxTiles::kernels(dtype, pass, arch)) {
        all.push_back(std::move(kernel));
      }
    }
  }
  return all;
}

}  // namespace pullback::cuda

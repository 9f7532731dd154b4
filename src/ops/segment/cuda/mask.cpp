// The mask of max and min: which kernels make it, and in which shape.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "ops/segment/cuda/mask_tuning.cuh"
#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

cuda::OpKernel kernel_of(std::string_view name, const std::string& function,
                         std::string_view file) {
  return {.name = fmt::format("segment_mask_{}", name),
          .file = file,
          .function = "segment_cuda::mask_" + function,
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .constants = {{"segment_cuda::kThreads", kThreads},
                        {"segment_cuda::kMaskImageBytes", kMaskImageBytes},
                        {"segment_cuda::kMaskBlockBytes", kMaskBlockBytes},
                        {"segment_cuda::kMaskCompareItems", kMaskCompareItems}}};
}
constexpr std::string_view kRowsFile = "ops/segment/cuda/smxx_mask.cuh";
constexpr std::string_view kTileFile = "ops/segment/cuda/smxx_mask_tile.cuh";

cuda::OpKernel arg_kernel(DType arg, bool permuted) {
  const std::string_view what = permuted ? "permuted" : "rows";
  cuda::OpKernel kernel = kernel_of(fmt::format("{}_{}", what, name_of(arg)),
                                    fmt::format("{}<{}>", what, cuda::device_type(arg)), kRowsFile);
  kernel.blocks = 5;
  return kernel;
}
cuda::OpKernel even_kernel(DType dtype) {
  const std::string_view type = cuda::device_type(dtype);
  return kernel_of(fmt::format("even_{}", type), fmt::format("even<{}>", type), kRowsFile);
}
cuda::OpKernel column_kernel(DType dtype) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("segment_mask_chunks_{}", type),
          .file = "ops/segment/cuda/smxx_map_chunks.cuh",
          .function = fmt::format(
              "segment_cuda::map_chunks<segment_cuda::TieMask<{0}>, {0}, uint8_t>", type),
          .parameters = "segment_cuda::Params",
          .threads = kStreamThreads,
          .blocks = 4};
}
cuda::OpKernel tile_kernel(DType dtype, bool min, int vector) {
  const std::string_view type = cuda::device_type(dtype);
  cuda::OpKernel kernel = kernel_of(
      fmt::format("tile_{}_{}_{}", name_of({vector, false}, dtype), min ? "min" : "max", type),
      fmt::format("tile<{}, {}, {}>", type, vector, min), kTileFile);
  kernel.blocks = 4;
  return kernel;
}
cuda::OpKernel border_kernel(DType dtype) {
  const std::string_view type = cuda::device_type(dtype);
  return kernel_of(fmt::format("border_{}", type), fmt::format("border<{}>", type), kTileFile);
}

// Of the pass that makes the mask of rows, from arg alone or (compares) row by row.
Tiling mask_tiling(const SegmentProblem& problem, const cuda::DeviceInfo& device, bool compares) {
  const std::int64_t bytes = std::max<std::int64_t>(1, (problem.x.shape[1] + 7) / 8);
  const std::int64_t block_bytes = std::min<std::int64_t>(bytes, kMaskBlockBytes);
  Tiling tiling{.items = kMaskImageBytes / block_bytes};
  if (compares) {
    tiling.items = std::min<std::int64_t>(tiling.items, kMaskCompareItems);
  } else {
    tiling.column_blocks = (bytes + block_bytes - 1) / block_bytes;
  }
  // Few rows are shared out among the multiprocessors.
  constexpr std::int64_t kLeast = 128, kBlocks = 8;
  static_assert(kLeast <= kMaskImageBytes / kMaskBlockBytes);
  const std::int64_t blocks = std::max<std::int64_t>(1, kBlocks * device.multiprocessors);
  const std::int64_t all = problem.x.shape[0] + problem.num_segments + 2;
  tiling.items = std::clamp((all + blocks - 1) / blocks, kLeast, tiling.items);
  return tiling;
}

// Columns of a piece of smxx_mask_tile.cuh: there are kernels for whole pieces of 16 bytes, words
// and single elements.
int tile_vector(const SegmentProblem& problem) {
  const std::int64_t columns = problem.x.shape[1];
  const int most = vector_length(problem.x.dtype), word = most / 4;
  return columns % most == 0 ? most : columns % word == 0 ? word : 1;
}
std::vector<int> tile_vectors(DType dtype) {
  return dtype == DType::f32 ? std::vector{4, 1} : std::vector{8, 2, 1};
}
// The rows that a tile has room for.
int tile_rows(const SegmentProblem& problem) {
  const std::int64_t pieces = problem.x.shape[1] / tile_vector(problem);
  return mask_tile_rows(row_bytes(problem),
                        static_cast<int>(std::min<std::int64_t>(pieces, kRowTileWideBytes)));
}

}  // namespace

MaskRows::MaskRows(const SegmentProblem& problem, const cuda::DeviceInfo& device, Setup& setup) {
  const bool even = problem.ties == Ties::even, compares = even || permuted(problem);
  tiling_ = mask_tiling(problem, device, compares);
  setup.allow(tiling_);
  if (even) {
    kernel_ = own_kernel_ = {even_kernel(problem.x.dtype), device};
    if (problem.x.dtype != DType::f64 && streamable(problem, {&problem.x}) &&
        cuda::can_have<Params>(column_kernel(problem.x.dtype), device)) {
      stream_ = {column_kernel(problem.x.dtype), device};
      setup.allow_stream(*stream_);
    }
    return;
  }
  if (problem.arg.given() && problem.arg.dtype != DType::u8) {
    kernel_ = {arg_kernel(problem.arg.dtype, compares), device};
  }
  own_kernel_ = {arg_kernel(own_arg_dtype(problem), compares), device};
}

DType MaskRows::own_arg_dtype(const SegmentProblem& problem) {
  return problem.x.shape[0] > std::numeric_limits<std::int32_t>::max() ? DType::i64 : DType::i32;
}

void MaskRows::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params,
                       bool own_arg) const {
  if (stream_ && streamable(bound_params)) {
    Params p = bound_params;
    p.d_x = std::exchange(p.mask, {});
    setup.stream(launcher, *stream_, p, kMapEndItems);
    return;
  }
  Params p = setup.tiled(launcher, bound_params, tiling_);
  launcher.launch(own_arg ? own_kernel_ : kernel_, p, p.tiles, tiling_.column_blocks);
}

bool MaskTiles::serves(const SegmentProblem& problem, const cuda::DeviceInfo& device) {
  const TensorSpec& x = problem.x;
  const std::int64_t columns = x.shape[1];
  if (problem.ties != Ties::even || x.dtype == DType::f64 || permuted(problem) || x.shape[0] == 0 ||
      columns == 0 || !contiguous(x) || !contiguous(problem.out)) {
    return false;
  }
  const int vector = tile_vector(problem);
  return columns / vector <= kThreads &&
         mask_tiles_serve(x.shape[0], problem.num_segments, columns, tile_rows(problem)) &&
         cuda::can_have<Params>(tile_kernel(x.dtype, problem.reduce == SegmentReduce::min, vector),
                                device) &&
         cuda::can_have<Params>(border_kernel(x.dtype), device);
}

MaskTiles::MaskTiles(const SegmentProblem& problem, const cuda::DeviceInfo& device, Setup& setup,
                     WorkspaceLayout& layout)
    : slot_columns_(Combining::slot_columns(problem)),
      vector_(tile_vector(problem)),
      combining_(problem, device, reduce_op(problem.reduce, problem.x.dtype)) {
  const int rows = tile_rows(problem), snap = row_tile_snap(rows);
  tile_ = {tile_kernel(problem.x.dtype, problem.reduce == SegmentReduce::min, vector_), device,
           row_tile_bytes(1, row_bytes(problem))};
  border_ = {border_kernel(problem.x.dtype), device};
  tiling_ = row_tiling(problem, device, vector_, rows - snap, snap, 1);
  setup.allow(tiling_);
  const auto cells = static_cast<std::size_t>(tiles_of(problem, tiling_) * 2 * slot_columns_);
  slots_at_ = layout.take(cells * sizeof(float));
}

bool MaskTiles::takes(const Params& p) const {
  return p.arg.data == nullptr && in_pieces(p, vector_) && cuda::vector_aligned({p.x.data});
}

void MaskTiles::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params) const {
  Params p = setup.tiled(launcher, bound_params, tiling_);
  p.slots = launcher.workspace + slots_at_;
  p.slot_columns = slot_columns_;
  launcher.launch(tile_, p, p.tiles, 1);
  combining_.enqueue(launcher, p);
  launcher.launch(border_, p, (p.tiles + kRowTileBorderTiles - 1) / kRowTileBorderTiles, 1);
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_mask_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  const auto add = [&](const OpKernel& kernel) { all.push_back(op_kernel<Params>(kernel, arch)); };
  for (const DType arg : {DType::i64, DType::i32}) {
    for (const bool permuted : {false, true}) add(arg_kernel(arg, permuted));
  }
  for (const DType dtype : kDTypes) {
    add(even_kernel(dtype));
    if (dtype == DType::f64) continue;
    add(border_kernel(dtype));
    add(column_kernel(dtype));
    for (const int vector : tile_vectors(dtype)) {
      for (const bool min : {false, true}) add(tile_kernel(dtype, min, vector));
    }
  }
  return all;
}

}  // namespace pullback::cuda

// Which kernels reduce, and in which shape.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

std::string element(DType dtype) { return std::string(cuda::device_type(dtype)); }

bool reads_mask(const ReduceOp& op) { return op.input == "mask"; }

// Of smxx_reduce_rows.cuh: whether it keeps states in pairs, its rings and its shared memory.
bool packs(const ReduceOp& op, DType dtype, int vector, int arch) {
  return op.pairs && arch >= 90 && size_of(dtype) == 2 && vector % 2 == 0;
}
int ring_rows(const ReduceOp& op, const SegmentProblem& problem, int vector,
              const cuda::DeviceInfo& device) {
  constexpr std::int64_t kWarp = 32;
  const bool takes_warps = problem.x.shape[1] > vector * (kWarp / 2);
  const bool deep = takes_warps || packs(op, problem.x.dtype, vector, device.arch());
  // What was timed. Other devices have less shared memory.
  const bool timed = device.arch() >= 90 && !permuted(problem) && !reads_mask(op) &&
                     vector == vector_length(problem.x.dtype);
  return deep && timed ? kDeepRingRows : kRingRows;
}
int reduce_bytes(const ReduceOp& op, DType dtype, int vector, int ring_rows,
                 const cuda::DeviceInfo& device) {
  const int states = vector * op.state_bytes;
  return reduce_rows_bytes(reads_mask(op) ? 0 : vector * static_cast<int>(size_of(dtype)), states,
                           packs(op, dtype, vector, device.arch()) ? vector * 4 : states,
                           ring_rows);
}

cuda::OpKernel kernel_of(const ReduceOp& op, std::string_view what, std::string_view file,
                         const std::string& function, DType dtype) {
  return {.name = fmt::format("segment_{}_{}_{}", what, op.name, cuda::device_type(dtype)),
          .file = file,
          .function = function,
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .constants = {{"segment_cuda::kThreads", kThreads},
                        {"segment_cuda::kWalkerRows", kWalkerRows}}};
}

cuda::OpKernel rows_kernel(const ReduceOp& op, DType dtype, Access access) {
  cuda::OpKernel kernel =
      kernel_of(op, fmt::format("reduce_rows_{}", name_of(access, dtype)),
                "ops/segment/cuda/smxx_reduce_rows.cuh",
                fmt::format("segment_cuda::reduce_rows<segment_cuda::{}, {}, {}, {}, "
                            "segment_cuda::Input::{}, {}, {}>",
                            op.type, element(dtype), op.out, access.vector, op.input,
                            access.permuted, op.state_bytes),
                dtype);
  if (access != kAnyAccess) kernel.blocks = access.permuted ? std::min(op.blocks, 3) : op.blocks;
  return kernel;
}

cuda::OpKernel column_kernel(const ReduceOp& op, DType dtype) {
  return kernel_of(op, "reduce_column", "ops/segment/cuda/smxx_reduce_column.cuh",
                   fmt::format("segment_cuda::reduce_column<segment_cuda::{}, {}, {}, "
                               "segment_cuda::Input::{}, {}>",
                               op.type, element(dtype), op.out, op.input, op.state_bytes),
                   dtype);
}

bool reads_product(const ReduceOp& op) { return op.input == "product"; }
// What smxx_reduce_chunks.cuh reads a row as.
std::string stream_element(const ReduceOp& op, DType dtype) {
  if (reads_mask(op)) return "segment_cuda::MaskByte";
  if (reads_product(op)) return fmt::format("segment_cuda::RowProduct<{}>", element(dtype));
  return element(dtype);
}
int stream_element_bytes(const ReduceOp& op, DType dtype) {
  return reads_mask(op) ? 1 : static_cast<int>(size_of(dtype));
}
cuda::OpKernel stream_kernel(const ReduceOp& op, DType dtype) {
  cuda::OpKernel kernel =
      kernel_of(op, "reduce_chunks", "ops/segment/cuda/smxx_reduce_chunks.cuh",
                fmt::format("segment_cuda::reduce_chunks<segment_cuda::{}, {}, {}, {}>", op.type,
                            stream_element(op, dtype), op.out, op.chunk_bytes),
                dtype);
  kernel.threads = kStreamThreads;
  // As registers and shared memory allow.
  kernel.blocks = stream_element_bytes(op, dtype) <= 2 ? 4 : 5;
  return kernel;
}
// What smxx_reduce_narrow.cuh keeps of a piece of a row.
int narrow_kept_bytes(const ReduceOp& op, DType dtype, int arch) {
  const int vector = vector_length(dtype);
  if (packs(op, dtype, vector, arch)) return vector / 2 * op.state_bytes;
  return vector * (op.pairs ? op.state_bytes : op.chunk_bytes);
}
cuda::OpKernel narrow_kernel(const ReduceOp& op, DType dtype, int arch) {
  const int kept_bytes = narrow_kept_bytes(op, dtype, arch);
  cuda::OpKernel kernel =
      kernel_of(op, "reduce_narrow", "ops/segment/cuda/smxx_reduce_narrow.cuh",
                fmt::format("segment_cuda::reduce_narrow<segment_cuda::{}, {}, {}, {}>", op.type,
                            element(dtype), op.out, kept_bytes),
                dtype);
  kernel.threads = kStreamThreads;
  kernel.blocks = kept_bytes <= 32 ? 3 : 2;  // as shared memory allows
  return kernel;
}
cuda::OpKernel tile_kernel(const ReduceOp& op, DType dtype, int vector) {
  return kernel_of(op, fmt::format("reduce_tile_{}", name_of({vector, false}, dtype)),
                   "ops/segment/cuda/smxx_reduce_tile.cuh",
                   fmt::format("segment_cuda::reduce_tile<segment_cuda::{}, {}, {}, {}, {}>",
                               op.type, element(dtype), op.out, vector, op.state_bytes),
                   dtype);
}
bool streams(const ReduceOp& op, DType dtype) { return op.wide && dtype != DType::f64; }
bool has_narrow(const ReduceOp& op, DType dtype) {
  return streams(op, dtype) && !reads_mask(op) && !reads_product(op);
}
// Rows in whole bytes of the mask.
constexpr Access kMaskAccess{.vector = 8, .permuted = false};
std::optional<Access> mask_access(const SegmentProblem& problem) {
  if (permuted(problem) || problem.x.shape[1] % kMaskAccess.vector != 0) return {};
  return kMaskAccess;
}
std::vector<Access> accesses_of(const ReduceOp& op, DType dtype) {
  if (reads_mask(op)) return {kAnyAccess, kMaskAccess};
  if (!op.wide) return {kAnyAccess};
  return accesses(dtype);
}

// The rows that a tile has room for, of kRowTileMostColumns at most.
int tile_rows(const SegmentProblem& problem) {
  const int columns = static_cast<int>(problem.x.shape[1]);
  return reduce_tile_rows(columns * static_cast<int>(size_of(problem.x.dtype)), columns);
}
// By which pieces smxx_reduce_tile.cuh reads rows, of segments so short that one thread puts their
// tiles together.
std::optional<int> tile_vector(const SegmentProblem& problem, const ReduceOp& op, Specs inputs) {
  if (!op.tiles || !streams(op, problem.x.dtype)) return {};
  if (problem.x.shape[1] > kRowTileMostColumns) return {};
  constexpr std::int64_t kMostTiles = 16;  // of a segment
  const std::int64_t longest = tile_rows(problem) * kMostTiles;
  if (problem.x.shape[0] > (problem.num_segments + 1) * longest) return {};
  const std::optional<int> vector = row_tile_vector(problem, inputs);
  // Wider rows by pieces of several elements are read as well where they lie; so are elements of 4
  // bytes, of segments that are longer than a tile.
  constexpr std::int64_t kWideBytes = 64;
  const auto element = static_cast<std::int64_t>(size_of(problem.x.dtype));
  const bool wide = problem.x.shape[1] * element > kWideBytes;
  const bool long_segments =
      problem.x.shape[0] > (problem.num_segments + 1) * std::int64_t{tile_rows(problem)};
  if (wide && vector && (*vector > 1 || (element == 4 && long_segments))) return {};
  return vector;
}

// Binary logarithm of the 16-byte pieces of a row, where smxx_reduce_narrow.cuh can read such rows.
std::optional<int> narrow_lane_bits(const SegmentProblem& problem) {
  const TensorSpec &x = problem.x, &offsets = problem.offsets;
  const auto row_bytes = static_cast<std::uint64_t>(x.shape[1]) * size_of(x.dtype);
  const bool dense = x.strides[1] == 1 && (x.shape[0] == 1 || x.strides[0] == x.shape[1]) &&
                     !permuted(problem) &&
                     (!offsets.given() || offsets.shape[0] == 1 || offsets.strides[0] == 1);
  if (!dense || row_bytes < 16 || row_bytes > kNarrowMostBytes || !std::has_single_bit(row_bytes)) {
    return {};
  }
  return std::bit_width(row_bytes / 16) - 1;
}

// Columns of a block of combine(): few, so that a giant segment has many threads, unless there are
// many columns and segments.
constexpr int kCombineWidths[] = {1, 8, 32};
int combine_width(std::int64_t columns, std::int64_t segments) {
  return columns == 1 ? 1 : columns <= 256 || segments <= 4 ? 8 : 32;
}

cuda::OpKernel combine_kernel(const ReduceOp& op, DType dtype, int columns) {
  return kernel_of(
      op, fmt::format("combine_{}", columns), "ops/segment/cuda/smxx_combine.cuh",
      fmt::format("segment_cuda::combine<segment_cuda::{}, {}, {}>", op.type, op.out, columns),
      dtype);
}

cuda::OpKernel shares_kernel(const ReduceOp& op, DType dtype) {
  return kernel_of(op, "combine_shares", "ops/segment/cuda/smxx_combine_shares.cuh",
                   fmt::format("segment_cuda::combine_shares<segment_cuda::{}, {}, {}>", op.type,
                               stream_element(op, dtype), op.out),
                   dtype);
}

// Blocks that look at all tiles, for so many columns each.
std::int64_t combine_blocks(const Params& p, int columns) {
  const std::int64_t looked_at = combine_tiles(columns);
  return (p.tiles + looked_at - 1) / looked_at;
}

}  // namespace

Combining::Combining(const SegmentProblem& problem, const cuda::DeviceInfo& device,
                     const ReduceOp& op)
    : columns_(combine_width(problem.x.shape[1], problem.num_segments)),
      kernel_(combine_kernel(op, problem.x.dtype, columns_), device) {}

std::int64_t Combining::slot_columns(const SegmentProblem& problem) {
  return (problem.x.shape[1] + 7) / 8 * 8;
}

void Combining::enqueue(const Launcher& launcher, Params& p) const {
  launcher.launch(kernel_, p, combine_blocks(p, columns_), (p.columns + columns_ - 1) / columns_);
}

Reduction::Reduction(const SegmentProblem& problem, const cuda::DeviceInfo& device,
                     const ReduceOp& op, Specs inputs, Setup& setup, WorkspaceLayout& layout)
    : problem_(problem), combining_(problem, device, op) {
  const DType dtype = problem.x.dtype;
  const std::int64_t columns = problem.x.shape[1];
  const bool column = columns == 1;
  const auto has = [&](const cuda::OpKernel& kernel) {
    return cuda::can_have<Params>(kernel, device);
  };
  if (column) {
    any_ = {column_kernel(op, dtype), device};
    any_tiling_ = column_tiling(op.state_bytes);
    if (streams(op, dtype) && streamable(problem, inputs) && has(stream_kernel(op, dtype)) &&
        has(shares_kernel(op, dtype))) {
      shares_ = {shares_kernel(op, dtype), device};
      const int element_bytes = stream_element_bytes(op, dtype);
      stream_ = {stream_kernel(op, dtype), device,
                 reduce_chunks_bytes(element_bytes, op.chunk_bytes, reads_product(op) ? 2 : 1)};
      stream_rows_ = chunk_rows(element_bytes);
      setup.allow_stream(*stream_);
    }
  } else {
    any_ = {rows_kernel(op, dtype, kAnyAccess), device,
            reduce_bytes(op, dtype, 1, kRingRows, device)};
    const std::optional<Access> access =
        reads_mask(op) ? mask_access(problem) : access_of(problem, inputs);
    const std::optional<int> vector = tile_vector(problem, op, inputs);
    if (vector && has(tile_kernel(op, dtype, *vector))) {
      vector_ = *vector;
      const int rows = tile_rows(problem), snap = row_tile_snap(rows);
      tile_ = {tile_kernel(op, dtype, vector_), device, kRowTileBytes};
      tile_tiling_ = row_tiling(problem, device, vector_, rows - snap, snap, 1);
      setup.allow(tile_tiling_);
    } else if (op.wide && access && has(rows_kernel(op, dtype, *access))) {
      vector_ = access->vector;
      ring_rows_ = ring_rows(op, problem, vector_, device);
      pieces_ = {rows_kernel(op, dtype, *access), device,
                 reduce_bytes(op, dtype, vector_, ring_rows_, device)};
      narrow_lane_bits_ = narrow_lane_bits(problem);
      const cuda::OpKernel narrow = narrow_kernel(op, dtype, device.arch());
      if (has_narrow(op, dtype) && narrow_lane_bits_ && has(narrow) &&
          has(shares_kernel(op, dtype))) {
        const int kept_bytes = narrow_kept_bytes(op, dtype, device.arch());
        shares_ = {shares_kernel(op, dtype), device};
        narrow_ = {narrow, device, narrow_bytes(kept_bytes)};
        stream_rows_ = kNarrowLaneRows << (5 - *narrow_lane_bits_);
        setup.allow_stream(*narrow_);
      }
      pieces_tiling_ = long_rows_tiling(problem, vector_, setup.resident(*pieces_));
      setup.allow(pieces_tiling_);
    }
    any_tiling_ = long_rows_tiling(problem, 1, setup.resident(any_));
  }
  setup.allow(any_tiling_);

  std::int64_t most_tiles = tiles_of(problem, any_tiling_);
  if (pieces_) most_tiles = std::max(most_tiles, tiles_of(problem, pieces_tiling_));
  if (tile_) most_tiles = std::max(most_tiles, tiles_of(problem, tile_tiling_));
  if (stream_) most_tiles = std::max(most_tiles, setup.shares(*stream_));
  if (narrow_) most_tiles = std::max(most_tiles, setup.shares(*narrow_));
  const std::int64_t cells = most_tiles * 2 * Combining::slot_columns(problem);
  slots_at_ =
      layout.take(static_cast<std::size_t>(cells) * static_cast<std::size_t>(op.state_bytes));
}

void Reduction::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params) const {
  Params p = bound_params;
  p.slots = launcher.workspace + slots_at_;
  p.slot_columns = Combining::slot_columns(problem_);
  if (stream_ && streamable(p)) {
    if (p.mask.data != nullptr) p.x = p.mask;
    p.row_alignment = stream_rows_;
    p = setup.stream(launcher, *stream_, p, kReduceEndItems);
    launcher.launch(*shares_, p, combine_blocks(p, 1), 1);
    return;
  }
  const bool pieces = pieces_ && in_pieces(p, vector_);
  if (pieces && narrow_) {
    p.lane_bits = *narrow_lane_bits_;
    p.row_alignment = stream_rows_;
    p = setup.stream(launcher, *narrow_, p, kNarrowEndItems);
    launcher.launch(*shares_, p, combine_blocks(p, 1), p.columns);
    return;
  }
  const bool tile = tile_ && in_pieces(p, vector_) && cuda::vector_aligned({p.x.data});
  const Tiling& shape = tile ? tile_tiling_ : pieces ? pieces_tiling_ : any_tiling_;
  p = setup.tiled(launcher, p, shape);
  p.ring_rows = pieces ? ring_rows_ : kRingRows;
  launcher.launch(tile ? *tile_ : pieces ? *pieces_ : any_, p, p.tiles, shape.column_blocks);
  combining_.enqueue(launcher, p);
}

std::vector<cuda::KernelSource> Reduction::kernels(const ReduceOp& op, DType dtype, int arch) {
  std::vector<cuda::KernelSource> all;
  const auto add = [&](const cuda::OpKernel& kernel) {
    all.push_back(cuda::op_kernel<Params>(kernel, arch));
  };
  add(column_kernel(op, dtype));
  for (const Access access : accesses_of(op, dtype)) add(rows_kernel(op, dtype, access));
  if (streams(op, dtype)) {
    add(stream_kernel(op, dtype));
    add(shares_kernel(op, dtype));
  }
  if (has_narrow(op, dtype)) {
    add(narrow_kernel(op, dtype, arch));
    for (const int vector : row_tile_vectors(dtype)) {
      if (op.tiles) add(tile_kernel(op, dtype, vector));
    }
  }
  for (const int width : kCombineWidths) add(combine_kernel(op, dtype, width));
  return all;
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_reduction_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const DType dtype : kDTypes) {
    std::vector<ReduceOp> ops = {mask_count(dtype), row_product_sum(dtype)};
    for (int reduce = 0; reduce <= static_cast<int>(SegmentReduce::softmax); ++reduce) {
      if (reduce == static_cast<int>(SegmentReduce::mean)) continue;  // a sum to the kernels
      ops.push_back(reduce_op(static_cast<SegmentReduce>(reduce), dtype));
    }
    for (const SegmentReduce reduce : {SegmentReduce::max, SegmentReduce::min}) {
      ops.push_back(extreme_place(reduce, false, dtype));
      ops.push_back(extreme_place(reduce, true, dtype));
      ops.push_back(extreme_count(reduce, dtype));
    }
    for (const ReduceOp& op : ops) {
      for (KernelSource& kernel : Reduction::kernels(op, dtype, arch)) {
        all.push_back(std::move(kernel));
      }
    }
  }
  return all;
}

}  // namespace pullback::cuda

// Which kernels go over rows, and in which shape.
#include <fmt/format.h>

#include <algorithm>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

int bytes(DType dtype) { return static_cast<int>(size_of(dtype)); }
// Of maps that read rows.
int read_walker_rows(DType dtype) { return size_of(dtype) == 2 ? kWalkerRows : kWalkerRows / 2; }
// So many lanes take a row in map_rows, at least, that kWalkerRows for each walker fit into a tile.
constexpr int kMapLaneBits = 1;
static_assert(tile_items(kMapLaneBits, kWalkerRows) <= kMostTileRows);

cuda::OpKernel kernel_of(const MapOp& op, std::string_view what, DType dtype, std::string_view file,
                         std::string function) {
  return {.name = fmt::format("segment_{}_{}_{}", what, op.name, cuda::device_type(dtype)),
          .file = file,
          .function = std::move(function),
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .constants = {{"segment_cuda::kThreads", kThreads},
                        {"segment_cuda::kWalkerRows", kWalkerRows}}};
}

std::string type_of(const MapOp& op, DType dtype, int vector, bool perm) {
  return "segment_cuda::" + fmt::format(fmt::runtime(op.type),
                                        fmt::arg("T", cuda::device_type(dtype)),
                                        fmt::arg("V", vector), fmt::arg("P", perm));
}

cuda::OpKernel rows_kernel(const MapOp& op, DType dtype, Access access) {
  const auto& [vector, perm] = access;
  cuda::OpKernel kernel = kernel_of(
      op, fmt::format("map_rows_{}", name_of(access, dtype)), dtype,
      "ops/segment/cuda/smxx_map_rows.cuh",
      fmt::format("segment_cuda::map_rows<{}, {}, {}, {}>", type_of(op, dtype, vector, perm),
                  cuda::device_type(dtype), vector, perm));
  if (!perm) kernel.blocks = op.blocks;
  return kernel;
}
bool has_rows(const MapOp& op, DType dtype, Access access) {
  return !op.only_wide || access == kAnyAccess || access.vector == vector_length(dtype);
}
// Smaller pieces than of 16 bytes are those of rows apart, where smxx_map_tile.cuh has the others.
bool has_narrow(const MapOp& op, DType dtype, Access access) {
  return op.narrow_blocks > 0 && !access.permuted &&
         !(op.tiles && access.vector < vector_length(dtype));
}
cuda::OpKernel narrow_kernel(const MapOp& op, DType dtype, Access access) {
  const int vector = access.vector;
  const bool wide = vector == vector_length(dtype);
  cuda::OpKernel kernel =
      kernel_of(op, wide ? "map_narrow" : fmt::format("map_narrow_{}", name_of(access, dtype)),
                dtype, "ops/segment/cuda/smxx_map_rows.cuh",
                fmt::format("segment_cuda::map_narrow<{}, {}, {}>",
                            type_of(op, dtype, vector, true), cuda::device_type(dtype), vector));
  kernel.blocks = op.narrow_blocks;
  return kernel;
}
cuda::OpKernel tile_kernel(const MapOp& op, DType dtype, int vector) {
  cuda::OpKernel kernel =
      kernel_of(op, fmt::format("map_tile_{}", name_of({vector, false}, dtype)), dtype,
                "ops/segment/cuda/smxx_map_tile.cuh",
                fmt::format("segment_cuda::map_tile<{}, {}, {}>", type_of(op, dtype, vector, false),
                            cuda::device_type(dtype), vector));
  kernel.blocks = 4;
  return kernel;
}
cuda::OpKernel column_kernel(const MapOp& op, DType dtype) {
  return kernel_of(op, "map_column", dtype, "ops/segment/cuda/smxx_map_column.cuh",
                   fmt::format("segment_cuda::map_column<{}, {}, {}>", type_of(op, dtype, 1, true),
                               cuda::device_type(dtype), op.segment_bytes));
}
cuda::OpKernel own_order_kernel(const MapOp& op, DType dtype, int vector) {
  return kernel_of(op, vector > 1 ? "map_ids_wide" : "map_ids", dtype,
                   "ops/segment/cuda/smxx_map_ids.cuh",
                   fmt::format("segment_cuda::map_ids<{}, {}, {}>",
                               type_of(op, dtype, vector, true), cuda::device_type(dtype), vector));
}
// Pieces of 16 bytes, or single elements.
int own_order_vector(const SegmentProblem& problem, Specs rows) {
  const std::optional<Access> access = access_of(problem, rows);
  return access && access->vector == vector_length(problem.x.dtype) ? access->vector : 1;
}
bool has_stream(const MapOp& op, DType dtype) { return op.chunk_blocks > 0 && dtype != DType::f64; }
cuda::OpKernel stream_kernel(const MapOp& op, DType dtype) {
  cuda::OpKernel kernel =
      kernel_of(op, "map_chunks", dtype, "ops/segment/cuda/smxx_map_chunks.cuh",
                fmt::format("segment_cuda::map_chunks<{}, {}>", type_of(op, dtype, 1, false),
                            cuda::device_type(dtype)));
  kernel.threads = kStreamThreads;
  kernel.blocks = op.chunk_blocks;
  return kernel;
}

// By which pieces smxx_map_tile.cuh makes rows: what it reads of segments has to be contiguous,
// too.
std::optional<int> tile_vector(const SegmentProblem& problem, const MapOp& op, Specs rows) {
  if (!op.tiles) return {};
  for (const TensorSpec* tensor : {&problem.d_out, &problem.arg, &problem.lse, &problem.out}) {
    if (tensor->given() && !contiguous(*tensor)) return {};
  }
  return row_tile_vector(problem, rows);
}

bool takes_tiles(const Params& p) {
  return cuda::vector_aligned({p.x.data, p.d_out.data, p.arg.data, p.statistic.data, p.d_x.data});
}

// The tiling of rows that 2^fewest lanes or more take by pieces of `vector` columns, for a device
// that holds `resident` blocks.
Tiling map_tiling(const SegmentProblem& problem, const MapOp& op, int vector, int fewest,
                  std::int64_t resident) {
  const Tiling tiling = rows_tiling(problem, vector, fewest);
  const std::int64_t width = std::int64_t{vector} << tiling.lane_bits;  // did rows fill all lanes
  const std::int64_t columns = std::max<std::int64_t>(1, problem.x.shape[1]);
  const std::int64_t walker_rows =
      std::clamp<std::int64_t>(op.walker_rows * width / columns, op.walker_rows, kWalkerRows);
  const auto rows = static_cast<int>(walker_rows) * map_rounds(vector * bytes(problem.x.dtype));
  return in_waves(problem, tiling, resident, tile_items(tiling.lane_bits, kLeastWalkerRows),
                  std::min(tile_items(tiling.lane_bits, rows), kMostTileRows));
}

}  // namespace

MapOp spread_map(bool mean, DType dtype) {
  return {.name = mean ? "mean" : "sum",
          .type = fmt::format("Spread<{{T}}, {{V}}, {}>", mean),
          .segment_bytes = bytes(dtype),
          .chunk_blocks = mean && size_of(dtype) == 2 ? 4 : 5,
          .narrow_blocks = 4,
          .tiles = true,
          .own_order = true};
}
MapOp arg_map(DType arg, DType dtype) {
  const int blocks = arg == DType::i32 ? 4 : 3;
  return {.name = fmt::format("arg_{}", name_of(arg)),
          .type = fmt::format("ByArg<{{T}}, {{V}}, {}, {{P}}>", cuda::device_type(arg)),
          .segment_bytes = size_of(arg) == 8 ? 16 : 2 * real_bytes(dtype),
          .blocks = blocks,
          .chunk_blocks = size_of(dtype) == 2 && arg != DType::i32 ? 4 : 5,
          .narrow_blocks = blocks,
          .tiles = arg != DType::u8,
          .own_order = arg != DType::u8};
}
MapOp mask_map(bool even, DType dtype) {
  return {.name = even ? "mask_even" : "mask",
          .type = fmt::format("ByMask<{{T}}, {{V}}, {}>", even),
          .segment_bytes = bytes(dtype),
          .blocks = 2,
          .chunk_blocks = size_of(dtype) == 2 ? 3 : 4,
          .narrow_blocks = even ? 0 : 2,
          .walker_rows = kWalkerRows};
}
MapOp ties_map(DType dtype) {
  return {.name = "ties",
          .type = "ByTies<{T}, {V}>",
          .segment_bytes = 2 * bytes(dtype),
          .blocks = 3,
          .only_wide = true,
          .walker_rows = read_walker_rows(dtype)};
}
MapOp exponential_map(DType dtype) {
  return {.name = "logsumexp",
          .type = "ByExponential<{T}, {V}>",
          .segment_bytes = 2 * real_bytes(dtype),
          .blocks = size_of(dtype) == 2 ? 3 : 4,
          .chunk_blocks = 4,
          .narrow_blocks = size_of(dtype) == 2 ? 3 : 4,
          .tiles = true,
          .own_order = true,
          .walker_rows = read_walker_rows(dtype)};
}
MapOp softmax_map(DType dtype) {
  return {.name = "softmax",
          .type = "Softmax<{T}, {V}>",
          .segment_bytes = 2 * real_bytes(dtype),
          .blocks = size_of(dtype) == 2 ? 2 : 3,
          .chunk_blocks = 4,
          .narrow_blocks = 2,
          .own_order = true,
          .walker_rows = read_walker_rows(dtype)};
}
MapOp softmax_gradient_map(DType dtype) {
  return {.name = "softmax_gradient",
          .type = "SoftmaxGradient<{T}, {V}>",
          .segment_bytes = real_bytes(dtype),
          .blocks = 2,
          .chunk_blocks = 4,
          .narrow_blocks = 2,
          .own_order = true,
          .walker_rows = read_walker_rows(dtype)};
}

Mapping::Mapping(const SegmentProblem& problem, const cuda::DeviceInfo& device, const MapOp& op,
                 Specs rows, Setup& setup)
    : problem_(problem) {
  const DType dtype = problem.x.dtype;
  const auto has = [&](const cuda::OpKernel& kernel) {
    return cuda::can_have<Params>(kernel, device);
  };
  own_order_ = op.own_order && permuted(problem) && problem.ids.given() &&
               problem.x.shape[1] * bytes(dtype) <= kOwnOrderMostBytes &&
               has(own_order_kernel(op, dtype, 1));
  if (own_order_) {
    any_ = {own_order_kernel(op, dtype, 1), device};
    any_tiling_ = rows_tiling(problem, 1);
    vector_ = own_order_vector(problem, rows);
    if (vector_ > 1 && has(own_order_kernel(op, dtype, vector_))) {
      pieces_ = {own_order_kernel(op, dtype, vector_), device};
      pieces_tiling_ = any_tiling_;
    }
  } else if (problem.x.shape[1] == 1) {
    any_ = {column_kernel(op, dtype), device};
    any_tiling_ = column_tiling(op.segment_bytes);
    if (op.wide && has_stream(op, dtype) && streamable(problem, rows) &&
        has(stream_kernel(op, dtype))) {
      stream_ = {stream_kernel(op, dtype), device};
      setup.allow_stream(*stream_);
    }
  } else {
    any_ = {rows_kernel(op, dtype, kAnyAccess), device};
    any_tiling_ = rows_tiling(problem, 1, kMapLaneBits);
    const std::optional<Access> access = access_of(problem, rows);
    // Many columns by single elements: a row takes all lanes of a block, whose one walker is slower
    // in longer tiles.
    constexpr std::int64_t kMostSingles = 128;
    const std::optional<int> vector = tile_vector(problem, op, rows);
    if (vector && has(tile_kernel(op, dtype, *vector))) {
      vector_ = *vector;
      tile_ = {tile_kernel(op, dtype, vector_), device, kRowTileBytes};
      // What is read of a segment takes no more bytes than what is kept of it.
      const int end_items = (op.segment_bytes + bytes(dtype) - 1) / bytes(dtype);
      const int row_bytes = static_cast<int>(problem.x.shape[1]) * bytes(dtype);
      tile_tiling_ =
          row_tiling(problem, device, vector_, map_tile_items(row_bytes, end_items), 0, end_items);
    } else if (op.wide && access && has_rows(op, dtype, *access) &&
               (access->vector > 1 || problem.x.shape[1] <= kMostSingles)) {
      const bool narrow =
          has_narrow(op, dtype, *access) && problem.x.shape[1] * bytes(dtype) <= kNarrowMostBytes;
      const cuda::OpKernel kernel =
          narrow ? narrow_kernel(op, dtype, *access) : rows_kernel(op, dtype, *access);
      if (has(kernel)) {
        vector_ = access->vector;
        pieces_ = {kernel, device};
        pieces_tiling_ =
            map_tiling(problem, op, vector_, narrow ? 0 : kMapLaneBits, setup.resident(*pieces_));
      }
    }
  }
  setup.allow(any_tiling_);
  if (pieces_) setup.allow(pieces_tiling_);
  if (tile_) setup.allow(tile_tiling_);
}

void Mapping::enqueue(const Setup& setup, Launcher& launcher, const Params& bound_params) const {
  if (stream_ && streamable(bound_params)) {
    setup.stream(launcher, *stream_, bound_params, kMapEndItems);
    return;
  }
  const bool pieces = pieces_ && in_pieces(bound_params, vector_);
  const bool tile = tile_ && takes_tiles(bound_params);
  const Tiling& shape = tile ? tile_tiling_ : pieces ? pieces_tiling_ : any_tiling_;
  // In their own order rows need no tiles, once offsets are proven.
  Params p =
      own_order_ && launcher.proven ? bound_params : setup.tiled(launcher, bound_params, shape);
  if (own_order_) {
    if (p.rows == 0) return;
    constexpr std::int64_t kBlockPieces = std::int64_t{kThreads} * kOwnOrderPieces;
    const std::int64_t all = p.rows * p.columns / (pieces ? vector_ : 1);
    launcher.launch(pieces ? *pieces_ : any_, p, (all + kBlockPieces - 1) / kBlockPieces, 1);
    return;
  }
  launcher.launch(tile ? *tile_ : pieces ? *pieces_ : any_, p, p.tiles, shape.column_blocks);
}

std::vector<cuda::KernelSource> Mapping::kernels(const MapOp& op, DType dtype, int arch) {
  std::vector<cuda::KernelSource> all;
  const auto add = [&](const cuda::OpKernel& kernel) {
    all.push_back(cuda::op_kernel<Params>(kernel, arch));
  };
  add(column_kernel(op, dtype));
  if (has_stream(op, dtype)) add(stream_kernel(op, dtype));
  for (const Access access : accesses(dtype)) {
    if (has_rows(op, dtype, access)) add(rows_kernel(op, dtype, access));
    if (has_narrow(op, dtype, access)) add(narrow_kernel(op, dtype, access));
  }
  for (const int vector : row_tile_vectors(dtype)) {
    if (op.tiles) add(tile_kernel(op, dtype, vector));
  }
  if (op.own_order) {
    add(own_order_kernel(op, dtype, 1));
    if (dtype != DType::f64) add(own_order_kernel(op, dtype, vector_length(dtype)));
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

// The first launches of every run (smxx_index.cuh), and what all stages share.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <utility>

#include "core/check.hpp"
#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

cuda::OpKernel index_kernel(std::string_view name, std::string_view function) {
  return {.name = fmt::format("segment_{}", name),
          .file = "ops/segment/cuda/smxx_index.cuh",
          .function = fmt::format("segment_cuda::{}", function),
          .parameters = "segment_cuda::Params",
          .threads = kThreads};
}
const cuda::OpKernel kCheckOffsets = index_kernel("check_offsets", "check_offsets");
const cuda::OpKernel kCheckIds = index_kernel("offsets_of_ids", "offsets_of_ids");
const cuda::OpKernel kStarts = index_kernel("starts", "find_all_starts");

constexpr std::int64_t kWarp = 32;  // looks for the start of a tile

// Rows and segment ends of the list.
std::int64_t items_of(const SegmentProblem& problem, const Tiling& tiling) {
  return problem.x.shape[0] + (problem.num_segments + 2) * tiling.end_items;
}

std::int64_t blocks_for(std::int64_t work) {
  return std::max<std::int64_t>(1, (work + kThreads - 1) / kThreads);
}

}  // namespace

Indices indices(const TensorSpec& spec) {
  if (!spec.given()) return {};
  return {.data = nullptr,
          .stride = spec.shape[0] == 1 ? 0 : spec.strides[0],
          .wide = spec.dtype == DType::i64};
}

std::string name_of(Access access, DType dtype) {
  if (access == kAnyAccess) return "any";
  const std::size_t bytes = static_cast<std::size_t>(access.vector) * size_of(dtype);
  return fmt::format("{}{}", bytes == 16 ? "wide" : std::to_string(bytes),
                     access.permuted ? "_permuted" : "");
}

std::vector<Access> accesses(DType dtype) {
  std::vector<Access> all = {kAnyAccess};
  if (dtype == DType::f64) return all;
  for (int vector = vector_length(dtype); vector > 0; vector /= 2) {
    all.push_back({vector, false});
    if (vector > 1) all.push_back({vector, true});
  }
  return all;
}

std::optional<Access> access_of(const SegmentProblem& problem, Specs rows) {
  const DType dtype = problem.x.dtype;
  Access access{vector_length(dtype), permuted(problem)};
  for (const TensorSpec* tensor : rows) {
    access.vector =
        std::min(access.vector, matrix(*tensor, size_of(dtype), vector_length(dtype)).vector);
  }
  if (dtype == DType::f64 || access.vector == 0 || access == kAnyAccess) return {};
  return access;
}

Matrix matrix(const TensorSpec& spec, std::size_t element_bytes, int most) {
  if (!spec.given()) return {};
  Matrix result{.data = nullptr,
                .row_stride = spec.shape[0] == 1 ? 0 : spec.strides[0],
                .column_stride = spec.shape[1] == 1 ? 0 : spec.strides[1],
                .vector = 0,
                .element_bytes = static_cast<std::int32_t>(element_bytes)};
  if (result.column_stride != 1) return result;
  const int aligned = 16 / result.element_bytes;
  const auto fits = [&](int vector) {
    return result.row_stride % std::min(aligned, vector) == 0 && spec.shape[1] % vector == 0;
  };
  result.vector = most;
  while (!fits(result.vector)) result.vector /= 2;
  return result;
}

Matrix matrix(std::int64_t rows, std::int64_t columns, int most) {
  const TensorSpec spec = TensorSpec::contiguous(DType::u8, {rows, columns});
  return matrix(spec, 1, most);
}

Matrix bound(Matrix matrix, const void* data) {
  matrix.data = const_cast<void*>(data);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto aligned = [&] {
    return address %
               static_cast<std::uintptr_t>(std::min(16, matrix.vector * matrix.element_bytes)) ==
           0;
  };
  while (matrix.vector > 1 && !aligned()) matrix.vector /= 2;
  return matrix;
}

int vector_length(DType dtype) { return static_cast<int>(16 / size_of(dtype)); }

bool permuted(const SegmentProblem& problem) { return problem.permutation.given(); }

Tiling rows_tiling(const SegmentProblem& problem, int vector, int fewest) {
  const std::int64_t columns = problem.x.shape[1];
  const auto pieces = static_cast<std::uint64_t>((columns + vector - 1) / vector);
  Tiling tiling;
  tiling.lane_bits = std::clamp(pieces == 0 ? 0 : static_cast<int>(std::bit_width(pieces - 1)),
                                fewest, kMostLaneBits);
  tiling.items = std::min(tile_items(tiling.lane_bits, kWalkerRows), kMostTileRows);
  const std::int64_t width = std::int64_t{vector} << tiling.lane_bits;
  tiling.column_blocks = (columns + width - 1) / width;
  return tiling;
}

Tiling in_waves(const SegmentProblem& problem, Tiling tiling, std::int64_t resident,
                std::int64_t least, std::int64_t most) {
  const std::int64_t all = items_of(problem, tiling);
  const std::int64_t columns = std::max<std::int64_t>(1, tiling.column_blocks);
  const std::int64_t needed = (all + most - 1) / most;
  // Of many columns, or on an unknown device, a wave may have less than a tile.
  const std::int64_t a_wave = std::max<std::int64_t>(1, resident / columns);
  const std::int64_t tiles = (needed + a_wave - 1) / a_wave * a_wave;
  tiling.items = std::max((all + tiles - 1) / tiles, std::min(least, most));
  return tiling;
}

Tiling long_rows_tiling(const SegmentProblem& problem, int vector, std::int64_t resident) {
  Tiling tiling = rows_tiling(problem, vector);
  tiling.end_items = kRowsEndItems;
  tiling.snap = kSnapRows;
  return in_waves(problem, tiling, resident, tile_items(tiling.lane_bits, kSnapRows),
                  kMostTileRows - kSnapRows);
}

Tiling column_tiling(int bytes) {
  return {.items = column_tile_items(bytes), .alignment = column_rows(bytes)};
}

std::int64_t tiles_of(const SegmentProblem& problem, const Tiling& tiling) {
  return (items_of(problem, tiling) + tiling.items - 1) / tiling.items;
}

bool contiguous(const TensorSpec& rows) {
  return (rows.shape[0] == 1 || rows.strides[0] == rows.shape[1]) &&
         (rows.shape[1] == 1 || rows.strides[1] == 1);
}

int row_bytes(const SegmentProblem& problem) {
  const auto bytes = problem.x.shape[1] * static_cast<std::int64_t>(size_of(problem.x.dtype));
  return static_cast<int>(std::min<std::int64_t>(bytes, kRowTileWideBytes));
}

Tiling row_tiling(const SegmentProblem& problem, const cuda::DeviceInfo& device, int vector,
                  int most, int snap, int end_items) {
  const auto pieces = static_cast<unsigned>(problem.x.shape[1] / vector);
  Tiling tiling{.snap = snap, .end_items = end_items};
  tiling.lane_bits = std::bit_width(pieces - 1);
  // Few items are shared out among the multiprocessors.
  const std::int64_t all = items_of(problem, tiling);
  const std::int64_t blocks = std::max(1, kRowTiles * device.multiprocessors);
  const int least = std::min(most, kRowTileLeastItems);
  tiling.items = std::clamp<std::int64_t>((all + blocks - 1) / blocks, least, most);
  return tiling;
}

std::optional<int> row_tile_vector(const SegmentProblem& problem, Specs rows) {
  const std::int64_t columns = problem.x.shape[1];
  const std::optional<Access> access = access_of(problem, rows);
  if (!access || access->permuted || problem.x.shape[0] == 0 || columns < 2 ||
      columns > kRowTileMostColumns) {
    return {};
  }
  // Contiguous rows in whole pieces of 16 bytes have kernels without barriers.
  if (columns % vector_length(problem.x.dtype) == 0) return {};
  if (!std::ranges::all_of(rows, [](const TensorSpec* tensor) { return contiguous(*tensor); })) {
    return {};
  }
  return access->vector;
}

std::vector<int> row_tile_vectors(DType dtype) {
  std::vector<int> all;
  if (dtype == DType::f64) return all;
  for (int vector = vector_length(dtype) / 2; vector > 0; vector /= 2) all.push_back(vector);
  return all;
}

void Launcher::launch(const Kernel& kernel, Params& p, std::int64_t blocks,
                      std::int64_t column_blocks) const {
  constexpr std::int64_t kMostY = 65535;
  Kernel shaped = kernel;
  shaped.shape.grid[0] = static_cast<unsigned>(blocks);
  shaped.shape.programmatic = overlapping;
  for (std::int64_t y = 0; y < column_blocks; y += kMostY) {
    p.column_block = static_cast<std::int32_t>(y);
    shaped.shape.grid[1] = static_cast<unsigned>(std::min(kMostY, column_blocks - y));
    shaped.launch(stream, p);
    p.proof = Proof::given;
  }
}

Setup::Setup(const SegmentProblem& problem, const cuda::DeviceInfo& device, WorkspaceLayout& layout)
    : device_(device),
      problem_(problem),
      check_(problem.offsets.given() ? kCheckOffsets : kCheckIds, device),
      starts_(kStarts, device),
      overlapping_(device.arch() >= 90) {
  params_.rows = problem.x.shape[0];
  params_.segments = problem.num_segments;
  params_.columns = problem.x.shape[1];
  params_.offsets = indices(problem.offsets);
  (by_ids(problem) ? params_.ids : params_.row_ids) = indices(problem.ids);
  params_.permutation = indices(problem.permutation);
  offsets_at_ = layout.take(static_cast<std::size_t>(params_.segments + 1) * sizeof(std::int64_t));
  use_at_ = layout.take(2 * sizeof(std::int32_t));
  counts_at_ = layout.take(2 * sizeof(std::uint64_t));
  std::random_device random;
  params_.key = std::uint64_t{random()} << 32 | random();
  disorder_at_ = layout.take(kCheckBlocks * sizeof(std::int32_t));
}

void Setup::allow(const Tiling& tiling) {
  most_tiles_ = std::max(most_tiles_, tiles_of(problem_, tiling));
  if (most_tiles_ > std::numeric_limits<std::int32_t>::max()) {
    fail(ErrorCode::unsupported, "segment", "x",
         fmt::format("less than 2^31 tiles of {} rows and segment ends on a CUDA device",
                     tiling.items),
         problem_.x.to_string());
  }
}

std::int64_t Setup::resident(const Kernel& kernel) const {
  return std::int64_t{device_.multiprocessors} *
         std::max(1, kernel.blocks_per_multiprocessor(device_));
}

std::int64_t Setup::shares(const Kernel& kernel) const {
  const std::int64_t items = params_.rows + (params_.segments + 2) * kReduceEndItems;
  constexpr std::int64_t kLeast = std::int64_t{kLeastShare} * kStreamWarps;
  return kStreamWarps *
         std::clamp<std::int64_t>((items + kLeast - 1) / kLeast, 1, resident(kernel));
}

void Setup::allow_stream(const Kernel& kernel) {
  most_shares_ = std::max(most_shares_, shares(kernel));
}

void Setup::reserve(WorkspaceLayout& layout) {
  starts_at_ = layout.take(static_cast<std::size_t>(most_tiles_ + 2) * sizeof(TileStart));
  const auto shares = static_cast<std::size_t>(most_shares_);
  shares_at_ = layout.take((shares + 2) * sizeof(TileStart));
  share_disorder_at_ = layout.take(shares * sizeof(std::int32_t));
}

Launcher Setup::begin(Stream stream, const SegmentTensors& tensors, void* workspace) const {
  auto* memory = static_cast<std::byte*>(workspace);
  Launcher launcher{.stream = stream, .params = params_, .workspace = memory};
  Params& p = launcher.params;
  p.offsets.data = tensors.offsets;
  // Kernels tell by the pointer whether there are ids; without rows there may be none.
  const void* ids = tensors.ids != nullptr ? tensors.ids : workspace;
  (by_ids(problem_) ? p.ids : p.row_ids).data = problem_.ids.given() ? ids : nullptr;
  p.permutation.data = tensors.permutation;
  p.own_offsets = reinterpret_cast<std::int64_t*>(memory + offsets_at_);
  p.use_own_offsets = reinterpret_cast<std::int32_t*>(memory + use_at_);
  p.repaired = p.use_own_offsets + 1;
  p.arrivals = reinterpret_cast<std::uint64_t*>(memory + counts_at_);
  p.gate = p.arrivals + 1;
  p.disorder = reinterpret_cast<std::int32_t*>(memory + disorder_at_);
  p.starts = reinterpret_cast<TileStart*>(memory + starts_at_);
  return launcher;
}

void Setup::prove(Launcher& launcher, Params& p) const {
  const std::int64_t ends = p.segments + 1;
  const std::int64_t work = by_ids(problem_) ? std::max(p.rows, ends)
                            : starts_by_segments(p.segments, p.tiles)
                                ? ends / kCheckAtOnce + 1
                                : std::max(ends / kSearchAtOnce + 1, (p.tiles + 1) * kWarp);
  p.disorder_count =
      static_cast<std::int32_t>(std::min<std::int64_t>(kCheckBlocks, blocks_for(work)));
  launcher.launch(check_, p, p.disorder_count, 1);
  launcher.overlapping = overlapping_;
  launcher.proven = true;
  p.proof = Proof::checked;
}

Params Setup::tiled(Launcher& launcher, const Params& bound_params, const Tiling& tiling) const {
  Params p = bound_params;
  p.tile_items = tiling.items;
  p.end_items = tiling.end_items;
  p.tiles = tiles_of(problem_, tiling);
  p.row_alignment = tiling.alignment;
  p.snap_rows = tiling.snap;
  p.lane_bits = tiling.lane_bits;
  const Tiling before = std::exchange(launcher.tiling, tiling);
  bool found = before.items == tiling.items && before.alignment == tiling.alignment &&
               before.snap == tiling.snap && before.end_items == tiling.end_items;
  if (!launcher.proven) {
    prove(launcher, p);
    found = !by_ids(problem_);
  }
  if (!found) launcher.launch(starts_, p, blocks_for((p.tiles + 1) * kWarp), 1);
  return p;
}

Params Setup::stream(Launcher& launcher, const Kernel& kernel, const Params& bound_params,
                     int end_items) const {
  Params p = bound_params;
  p.end_items = end_items;
  const std::int64_t items = p.rows + (p.segments + 2) * p.end_items;
  p.tiles = shares(kernel);
  const std::int64_t blocks = p.tiles / kStreamWarps;
  p.tile_items = (items + p.tiles - 1) / p.tiles;
  p.starts = reinterpret_cast<TileStart*>(launcher.workspace + shares_at_);
  if (!launcher.proven && by_ids(problem_)) prove(launcher, p);
  const bool proves = !std::exchange(launcher.proven, true);
  if (proves) {
    p.proof = Proof::wanted;
    p.disorder = reinterpret_cast<std::int32_t*>(launcher.workspace + share_disorder_at_);
    p.disorder_count = static_cast<std::int32_t>(blocks);
  }
  launcher.launch(kernel, p, blocks, 1);
  launcher.overlapping = overlapping_;
  if (proves) p.proof = Proof::checked;
  return p;
}

bool in_pieces(const Params& p, int vector) {
  for (const Matrix* matrix : {&p.x, &p.y, &p.result, &p.result2, &p.arg, &p.d_out, &p.statistic,
                               &p.statistic2, &p.out, &p.d_x}) {
    if (matrix->data != nullptr && matrix->vector < vector) return false;
  }
  return true;
}

bool streamable(const SegmentProblem& problem, Specs rows) {
  const TensorSpec& offsets = problem.offsets;
  bool dense = problem.x.shape[1] == 1 && !permuted(problem) &&
               (!offsets.given() || offsets.shape[0] == 1 || offsets.strides[0] == 1);
  for (const TensorSpec* tensor : rows) dense &= tensor->shape[0] == 1 || tensor->strides[0] == 1;
  return dense;
}

bool streamable(const Params& p) {
  return (p.mask.data == nullptr || p.mask.row_stride == 1) &&
         cuda::vector_aligned({p.offsets.data, p.x.data, p.y.data, p.mask.data, p.d_x.data});
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

std::vector<KernelSource> segment_setup_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const OpKernel& kernel : {kCheckOffsets, kCheckIds, kStarts}) {
    all.push_back(op_kernel<Params>(kernel, arch));
  }
  return all;
}

}  // namespace pullback::cuda

// Which backward kernels run: d_x by the fastest one that the layout allows, from y or from the
// support mask; d_alpha by a pass of its own, before d_x, which may be d_y's memory.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "ops/entmax/cuda/backward_kernels.hpp"
#include "ops/entmax/cuda/backward_paths.hpp"
#include "ops/entmax/cuda/rows.hpp"
#include "ops/entmax/cuda/tile_kernels.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {
namespace {

using Kernel = cuda::PlannedKernel<BackwardParams>;

class CudaBackward final : public cuda::CudaBody<EntmaxTensors> {
 public:
  CudaBackward(const EntmaxProblem& problem, const Device& device)
      : CudaBody(device), problem_(problem), offsets_(problem, device_) {
    const EntmaxProblem& p = problem_;
    params_.y = with_axis(p.y);
    params_.d_y = with_axis(p.d_y);
    params_.d_x = with_axis(p.d_x);
    params_.support = row_tensor(steps_of_support(p.support));
    params_.support_size = row_tensor(steps_per_row(p, p.support_size));
    params_.alpha = row_tensor(steps_per_row(p, p.alpha_per_row));
    params_.d_alpha = row_tensor(steps_per_row(p, p.d_alpha));
    params_.alpha_of_all = p.alpha;
    RowTensor* const tensors[] = {&params_.d_x,     &params_.d_y,   &params_.y,
                                  &params_.support, &params_.alpha, &params_.support_size,
                                  &params_.d_alpha};
    params_.rows = merged_rows(p, tensors);
    tasks_ = params_.rows.count * params_.rows.groups;
    offsets_bytes_ = (offsets_.workspace_bytes() + 255) / 256 * 256;
    workspace_bytes = offsets_.workspace_bytes();
    description = fmt::format(
        "rows of {} elements{}; accumulation {}\ndeterministic: sums are added in one order",
        params_.rows.length, p.offsets.given() ? " in ragged groups" : "",
        name_of(accumulation_dtype(p.x.dtype)));
    if (tasks_ > 0) {
      load_tile();
      load_fast();
    }
    load_any();
  }

 private:
  // One source of s, one path.
  struct Fast {
    Path path = Path::whole;
    std::int64_t chunks = 1;
    std::int32_t cached_pieces = 0;
    Kernel first, second;
  };

  RowTensor with_axis(const TensorSpec& spec) const {
    RowTensor tensor = row_tensor(steps_with_axis(problem_, spec));
    if (row_length(problem_) == 1) tensor.axis = 1;
    return tensor;
  }

  // What the others cannot take, or leave to it: rows whose own alpha is above 2, or invalid.
  void load_any() {
    const DType dtype = problem_.x.dtype;
    const auto load = [&](const OpKernel& kernel, Mapping mapping) {
      Kernel loaded(kernel, device_);
      const int of_block = rows_of_block(mapping);
      loaded.shape.grid[0] = grid_of((tasks_ + of_block - 1) / of_block);
      return loaded;
    };
    const bool wide = problem_.alpha_per_row.given() || paths_.is_steep();
    leaves_rows_ = problem_.alpha_per_row.given() && (tile_ || from_y_);
    const Mapping mapping = paths_.mapping_of_any(wide, leaves_rows_);
    any_ = load(any_kernel(dtype, wide, mapping), mapping);
    if (leaves_rows_) {
      const auto resident =
          std::int64_t{any_.blocks_per_multiprocessor(device_)} * device_.multiprocessors;
      any_.shape.grid[0] =
          static_cast<unsigned>(std::min<std::int64_t>(any_.shape.grid[0], 4 * resident));
    }
    const Mapping of_d_alpha = paths_.mapping_of_d_alpha();
    d_alpha_ = load(d_alpha_kernel(dtype, of_d_alpha), of_d_alpha);
    if (problem_.offsets.given()) {
      rest_ = Kernel(rest_kernel(dtype), device_);
      rest_.shape.grid[0] =
          grid_of(std::min<std::int64_t>(params_.rows.count, 8 * device_.multiprocessors));
    }
  }

  void load_fast() {
    if (paths_.is_steep()) return;
    if (!paths_.pieces_match(params_.d_x) || !paths_.pieces_match(params_.d_y)) return;
    const std::int64_t length = params_.rows.length;
    if (length == 0 || length > kLongestRow) return;
    if (paths_.pieces_match(params_.y) && !tile_) {
      from_y_ = fast(paths_.best_path(weights_of(problem_)), weights_of(problem_));
      if (from_y_) {
        description =
            fmt::format("{}; {}", kPathNames[static_cast<int>(from_y_->path)], description);
      }
    }
    const bool mask_possible =
        problem_.alpha == 2 && !problem_.alpha_per_row.given() && !problem_.offsets.given();
    if (!mask_possible || (params_.support.axis != 1 && length > 8)) return;
    const Path path = paths_.pieces() <= 128 ? paths_.best_path(Weights::mask)
                      : paths_.few_rows()    ? Path::chunks
                                             : Path::whole;
    from_mask_ = fast(path, Weights::mask);
    if (path == Path::chunks || length % 128 != 0 || !paths_.rows_begin_on_16_bytes()) return;
    // Pieces of f32 are short enough to load those with a bit alone.
    if (paths_.pieces() <= 128 && problem_.x.dtype == DType::f32) return;
    from_aligned_mask_ = fast(
        kMaskChunk % length == 0 && paths_.rows_side_by_side() ? Path::mask_rows : Path::mask_block,
        Weights::mask);
  }

  // Short rows and those that lie across memory, from y. Rows of 512 bytes are enough for a warp,
  // and those with gaps between them, of which tiles read and write a sector each, sooner.
  void load_tile() {
    const Weights weights = weights_of(problem_);
    const DType dtype = problem_.x.dtype;
    if (paths_.is_steep() || dtype == DType::f64 || problem_.offsets.given()) return;
    const std::array tensors{&std::as_const(params_.d_x), &std::as_const(params_.d_y),
                             &std::as_const(params_.y)};
    const TilePlanner planner(params_.rows, tensors, dtype, false, device_);
    const std::string_view name = kWeightsNames[static_cast<int>(weights)];
    const auto set = [&](const cuda::OpKernel& kernel, const TilePlan& shape) {
      if (!cuda::can_have<BackwardTileParams>(kernel, device_)) return;
      tile_.emplace(kernel, shape, params_.rows.count, device_);
      description = fmt::format("{}; {}", tile_->how(), description);
    };
    const auto plan = planner.plan();
    if (!plan) {
      if (const auto columns = planner.columns())
        set(columns_kernel("backward", dtype, "Weights", name), *columns);
      return;
    }
    const std::int64_t length = params_.rows.length;
    if (plan->staged && length * static_cast<std::int64_t>(size_of(dtype)) >= 512) return;
    if (!plan->staged && params_.d_x.axis == 1 && length > 16) return;
    set(tile_kernel("backward", dtype, "Weights", name, plan->staged), *plan);
  }

  // Nothing where there are no kernels.
  std::optional<Fast> fast(Path path, Weights weights) {
    const DType dtype = problem_.x.dtype;
    const auto kernels = kernels_of(path, dtype, served(weights, path, dtype));
    for (const OpKernel& kernel : kernels) {
      if (!cuda::can_have<BackwardParams>(kernel, device_)) return std::nullopt;
    }
    const auto threads_for = [](std::int64_t pieces_of_row) {
      return static_cast<unsigned>(
          std::clamp<std::int64_t>((pieces_of_row + 127) / 128 * 32, 32, kBlockThreads));
    };
    Fast fast;
    fast.path = path;
    cuda::LaunchShape shape{.block = static_cast<unsigned>(kernels[0].threads)};
    std::int64_t blocks = tasks_;
    switch (path) {
      case Path::mask_rows:
        blocks =
            (tasks_ * params_.rows.length + kMaskChunk * kWarpRows - 1) / (kMaskChunk * kWarpRows);
        break;
      case Path::warp2:
      case Path::warp4:
        blocks = (tasks_ + kWarpRows - 1) / kWarpRows;
        break;
      case Path::block:
        shape.block = threads_for(paths_.pieces());
        break;
      case Path::whole:
        shape.block = threads_for(paths_.pieces() / params_.rows.groups);
        break;
      case Path::cluster_registers: {
        const auto of_row = paths_.cluster_of_registers(weights);
        shape.cluster = of_row->cluster;
        shape.block = of_row->block;
        blocks = tasks_ * shape.cluster;
        break;
      }
      case Path::cluster:
        shape.cluster = static_cast<unsigned>(paths_.cluster_of(weights));
        shape.block = static_cast<unsigned>(paths_.cluster_threads(weights));
        blocks = tasks_ * shape.cluster;
        break;
      case Path::chunks:
        fast.chunks =
            std::clamp<std::int64_t>(8 * device_.multiprocessors / tasks_, 1,
                                     std::min<std::int64_t>(kMaxChunks, paths_.pieces() / 2048));
        blocks = tasks_ * fast.chunks;
        sums_bytes_ = std::max(sums_bytes_,
                               static_cast<std::size_t>(tasks_ * fast.chunks) * 2 * sizeof(double));
        workspace_bytes = offsets_bytes_ + sums_bytes_;
        break;
      case Path::mask_block:
        shape.block = static_cast<unsigned>(std::clamp<std::int64_t>(
            (params_.rows.length + kMaskChunk - 1) / kMaskChunk * 32, 32, kBlockThreads));
        break;
    }
    shape.grid[0] = grid_of(blocks);
    int shared_bytes = 0;
    if ((path == Path::whole || path == Path::cluster) && weights != Weights::mask) {
      // Half of the shared memory, by as many threads as two whole blocks have; what remains is L1,
      // which keeps its part of the row by itself.
      constexpr int kPieceBytes = 2 * 16;
      const auto per_thread = device_.max_shared_bytes / (2 * 2 * kBlockThreads * kPieceBytes);
      fast.cached_pieces = per_thread;
      shared_bytes = per_thread * kPieceBytes * static_cast<int>(shape.block);
    }
    fast.first = Kernel(kernels[0], device_, shared_bytes);
    fast.first.shape = shape;
    if (kernels.size() > 1) {
      fast.second = Kernel(kernels[1], device_);
      fast.second.shape = shape;
    }
    return fast;
  }

  void enqueue(Stream stream, const EntmaxTensors& tensors, Workspace workspace) const override {
    BackwardParams params = params_;
    const std::int64_t* offsets = offsets_.enqueue(stream, tensors.offsets, workspace);
    params.rows.offsets = offsets;
    params.alpha.data = const_cast<void*>(tensors.alpha_per_row);
    params.d_y.data = const_cast<void*>(tensors.d_y);
    params.d_x.data = tensors.d_x;
    params.d_alpha.data = tensors.d_alpha;
    params.y.data = tensors.y;
    if (tensors.d_alpha && tasks_ > 0) d_alpha_.launch(stream, params);
    if (!tensors.d_x || params.rows.count * params.rows.length == 0) return;
    if (offsets) rest_.launch(stream, params);
    if (tasks_ == 0) return;
    enqueue_rows(stream, tensors, workspace, params);
  }

  void enqueue_rows(Stream stream, const EntmaxTensors& tensors, Workspace workspace,
                    BackwardParams& params) const {
    if (tile_ && tensors.y) {
      tile_->launch(stream, params);
      return enqueue_left_rows(stream, params);
    }
    if (!tensors.y) {
      params.support.data = tensors.support;
      params.support_size.data = tensors.support_size;
    }
    const bool aligned = cuda::vector_aligned({tensors.d_y, tensors.d_x, tensors.support});
    const std::optional<Fast>& mask =
        from_aligned_mask_ && aligned ? from_aligned_mask_ : from_mask_;
    const std::optional<Fast>& fast = tensors.y ? from_y_ : mask;
    if (!fast || !aligned_alike(tensors)) return any_.launch(stream, params);
    params.chunks = fast->chunks;
    params.cached_pieces = fast->cached_pieces;
    params.partial_sums = static_cast<std::byte*>(workspace.data) + offsets_bytes_;
    fast->first.launch(stream, params);
    if (fast->path == Path::chunks) fast->second.launch(stream, params);
    enqueue_left_rows(stream, params);
  }
  void enqueue_left_rows(Stream stream, BackwardParams& params) const {
    if (!leaves_rows_) return;
    params.gentle_elsewhere = true;
    any_.launch(stream, params);
  }

  static bool aligned_alike(const EntmaxTensors& tensors) {
    const auto past = [](const void* pointer) {
      return reinterpret_cast<std::uintptr_t>(pointer) % 16;
    };
    return past(tensors.d_y) == past(tensors.d_x) &&
           (!tensors.y || past(tensors.y) == past(tensors.d_x));
  }

  // Positions of pieces fit 32 bits.
  static constexpr std::int64_t kLongestRow = std::int64_t{1} << 30;
  static constexpr std::int64_t kMaskChunk = 4096;  // elements (smxx_backward_mask.cuh)

  EntmaxProblem problem_;
  RaggedOffsets offsets_;
  BackwardParams params_{};
  BackwardPaths paths_{problem_, params_, device_};
  std::int64_t tasks_ = 0;
  std::size_t offsets_bytes_ = 0, sums_bytes_ = 0;
  bool leaves_rows_ = false;  // to any_
  Kernel any_, d_alpha_, rest_;
  std::optional<Fast> from_y_, from_mask_, from_aligned_mask_;
  std::optional<TileKernel<BackwardTileParams>> tile_;
};

}  // namespace

Body make_cuda_backward(const EntmaxProblem& problem, const Device& device) {
  return cuda::make_body<CudaBackward>(problem, device);
}

}  // namespace pullback::entmax

namespace pullback::cuda {

std::vector<KernelSource> entmax_backward_kernels(int arch) {
  using namespace entmax;
  std::vector<KernelSource> sources;
  const auto add = [&](const OpKernel& kernel) {
    sources.push_back(op_kernel<BackwardParams>(kernel, arch));
  };
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (Path path : kAllPaths) {
      if (takes_clusters(path) && arch / 10 != 9 && arch / 10 != 10) continue;
      for (Weights weights : kAllWeights) {
        if (path == Path::cluster_registers && !serves_clusters_of_registers(dtype, weights))
          continue;
        if (served(weights, path, dtype) != weights) continue;
        if (weights == Weights::mask && !serves_mask(path)) continue;
        for (const OpKernel& kernel : kernels_of(path, dtype, weights)) add(kernel);
      }
    }
    for (Weights weights : kAllWeights) {
      if (dtype == DType::f64 || weights == Weights::mask) continue;
      const auto name = kWeightsNames[static_cast<int>(weights)];
      sources.push_back(
          op_kernel<BackwardTileParams>(columns_kernel("backward", dtype, "Weights", name), arch));
      for (bool staged : {false, true}) {
        sources.push_back(op_kernel<BackwardTileParams>(
            tile_kernel("backward", dtype, "Weights", name, staged), arch));
      }
    }
    for (const Mapping mapping :
         {Mapping::block, Mapping::warp, Mapping::lanes, Mapping::thread, Mapping::across}) {
      add(d_alpha_kernel(dtype, mapping));
    }
    for (const Mapping mapping : {Mapping::block, Mapping::warp, Mapping::across}) {
      add(any_kernel(dtype, true, mapping));
      if (dtype != DType::f64 && mapping != Mapping::warp) add(any_kernel(dtype, false, mapping));
    }
    add(rest_kernel(dtype));
  }
  return sources;
}

}  // namespace pullback::cuda

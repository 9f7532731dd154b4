// The forward pass on CUDA. Rows of some dozens of elements and those across memory: by
// smxx_forward_tile.cuh. Else those with unit stride along the axis: by smxx_forward_lanes.cuh
// where they are short and lie as vectors, by smxx_forward_registers.cuh where they fit a warp or a
// block; longer ones by smxx_forward_resident.cuh, where a block or a cluster holds them, else by
// smxx_forward_stream.cuh or smxx_forward_softmax.cuh. There are two kernels of each, for rows that
// lie as vectors and for those that begin anywhere, alike in x and y. What a mask hides is first
// made -inf in a copy (smxx_hide.cuh), which is y where a kernel does not read what it has written.
// Everything else by smxx_forward_any.cuh.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "ops/entmax/cpu/family.hpp"
#include "ops/entmax/cuda/forward_kernels.hpp"
#include "ops/entmax/cuda/hiding.hpp"
#include "ops/entmax/cuda/rows.hpp"
#include "ops/entmax/cuda/tile_kernels.hpp"

namespace pullback::entmax {
namespace {

// Whether rows begin at whole vectors, given an aligned pointer.
bool rows_in_vectors(const Rows& rows, const RowTensor& tensor, std::int64_t vector_length) {
  bool whole = tensor.axis == 1 && rows.length % vector_length == 0;
  for (int dim = 0; dim < rows.rank; ++dim) whole &= tensor.outer[dim] % vector_length == 0;
  return whole;
}

// Whether multiples of 16 bytes are at the same positions of a row in both, given pointers that are
// aligned alike.
bool rows_alike(const Rows& rows, const RowTensor& x, const RowTensor& y,
                std::int64_t vector_length) {
  bool alike = x.axis == 1 && y.axis == 1;
  for (int dim = 0; dim < rows.rank; ++dim) {
    alike &= (x.outer[dim] - y.outer[dim]) % vector_length == 0;
  }
  return alike;
}

class Forward final : public cuda::CudaBody<EntmaxTensors> {
 public:
  Forward(const EntmaxProblem& problem, const Device& device)
      : CudaBody(device), offsets_(problem, device_) {
    each_ = problem.alpha_per_row.given();
    params_.alpha = each_ ? 2 : problem.alpha;
    params_.x = row_tensor(steps_with_axis(problem, problem.x));
    params_.mask = row_tensor(steps_with_axis(problem, problem.mask));
    params_.y = row_tensor(steps_with_axis(problem, problem.y));
    params_.alpha_per_row = row_tensor(steps_per_row(problem, problem.alpha_per_row));
    params_.tau = row_tensor(steps_per_row(problem, problem.tau));
    params_.support_size = row_tensor(steps_per_row(problem, problem.support_size));
    params_.support = row_tensor(steps_of_support(problem.support));
    const std::array tensors{
        &params_.x,   &params_.mask,         &params_.y,      &params_.alpha_per_row,
        &params_.tau, &params_.support_size, &params_.support};
    params_.rows = merged_rows(problem, tensors);
    workspace_bytes = offsets_.workspace_bytes();

    const Rows& rows = params_.rows;
    const bool ragged = problem.offsets.given();
    empty_ = rows.count == 0;
    if (empty_) {
      description = "no rows";
      return;
    }
    const DType dtype = problem.x.dtype;
    const Family family = each_ ? Family::invalid : family_of(problem.alpha);
    const bool masked = problem.mask.given();
    if (!ragged && !each_ && !masked && load_tile(problem, family)) {
      description = describe(tile_->how(), dtype);
      return;
    }
    load_any(dtype, family, ragged);
    if (!ragged && !masked) load_fast(dtype, each_ ? Family::general : family);
    if (!ragged && masked) load_shown(problem, device, family);
    // All are named: sizes of grids wait for them.
    set_any_grid(ragged);
    for (std::optional<Fast>* fast : {&aligned_, &anywhere_}) {
      if (*fast) set_grid(**fast);
    }
    const std::string how =
        tile_ && !prefers_aligned_ ? tile_->how()
        : aligned_                 ? aligned_->how
        : anywhere_                ? anywhere_->how
                    : fmt::format("{} threads a row, which is read in every step", 32 * any_warps_);
    description = shown_ ? "a copy with -inf where the mask is 0; " + shown_->description
                         : describe(how, dtype);
  }

 private:
  static std::string describe(std::string_view how, DType dtype) {
    return fmt::format("{}; sums in {}, in a fixed order: the same bits every run", how,
                       name_of(accumulation_dtype(dtype)));
  }

  // What computes rows of a copy of x, in which all that the mask hides is -inf.
  void load_shown(const EntmaxProblem& problem, const Device& device, Family family) {
    const DType dtype = problem.x.dtype;
    if (!problem.y.given() || family == Family::steep || !Hiding::serves(dtype, device_)) return;
    EntmaxProblem shown = problem;
    shown.mask = {};
    shown.x = problem.y;
    hiding_.emplace(problem, shown.x, device_);
    shown_ = std::make_unique<Forward>(shown, device);
    copy_in_y_ = shown_->works_in_place();
    if (!copy_in_y_) {
      const std::span shape(problem.x.shape.data(), static_cast<std::size_t>(problem.x.rank));
      shown.x = TensorSpec::contiguous(dtype, shape);
      hiding_.emplace(problem, shown.x, device_);
      shown_ = std::make_unique<Forward>(shown, device);
      workspace_bytes = static_cast<std::size_t>(params_.rows.count * params_.rows.length) *
                        static_cast<std::size_t>(size_of(dtype));
    }
    if (!shown_->tile_ && !shown_->aligned_ && !shown_->anywhere_) {
      shown_.reset();  // any_ knows masks
      workspace_bytes = 0;
    }
  }
  // Whether no kernel but any_ reads elements of x behind those of y that it has written.
  bool works_in_place() const {
    return (!aligned_ || aligned_->in_place) && (!anywhere_ || anywhere_->in_place);
  }

  // Whether tiles serve every run.
  bool load_tile(const EntmaxProblem& problem, Family family) {
    const DType dtype = problem.x.dtype;
    if (dtype == DType::f64 || family == Family::steep) return false;
    const std::array tensors{&std::as_const(params_.x), &std::as_const(params_.y)};
    const TilePlanner planner(params_.rows, tensors, dtype, true, device_);
    const auto plan = planner.plan();
    if (!plan || (family == Family::softmax && planner.reads_scattered_parts(*plan))) {
      const auto columns = planner.columns();
      const OpKernel kernel = columns_kernel("forward", dtype, "Family", name_of(family));
      if (!columns || !cuda::can_have<ForwardTileParams>(kernel, device_)) return false;
      tile_.emplace(kernel, *columns, params_.rows.count, device_);
      return !problem.support.given();
    }
    const auto vector_length = static_cast<std::int64_t>(16 / size_of(dtype));
    const bool vectors = rows_in_vectors(params_.rows, params_.x, vector_length) &&
                         rows_in_vectors(params_.rows, params_.y, vector_length);
    const OpKernel kernel = tile_kernel("forward", dtype, "Family", name_of(family), plan->staged);
    if (!cuda::can_have<ForwardTileParams>(kernel, device_)) return false;
    tile_.emplace(kernel, *plan, params_.rows.count, device_);
    // Vectors are better for rows with gaps between them, and for those of some more bytes.
    const bool powers = family == Family::near_one || family == Family::general;
    const auto bytes = params_.rows.length * static_cast<std::int64_t>(size_of(dtype));
    prefers_aligned_ = vectors && (!plan->staged || bytes > (powers ? 256 : 128));
    return !prefers_aligned_ && !problem.support.given();
  }

  void load_any(DType dtype, Family family, bool ragged) {
    const Rows& rows = params_.rows;
    const std::int64_t length = ragged && rows.groups > 0 ? rows.length / rows.groups : rows.length;
    any_warps_ = length > kWarpLength ? kAnyWarps : 1;
    any_ = {any_kernel(dtype, family, any_warps_), device_};
  }

  void set_any_grid(bool ragged) {
    const Rows& rows = params_.rows;
    const std::int64_t tasks = rows.count * (rows.groups + (ragged ? 1 : 0));
    const std::int64_t blocks = (tasks + kAnyWarps / any_warps_ - 1) / (kAnyWarps / any_warps_);
    const std::int64_t resident =
        std::int64_t{any_.blocks_per_multiprocessor(device_)} * device_.multiprocessors;
    any_.shape.grid[0] = static_cast<unsigned>(std::min(blocks, 4 * resident));
  }

  struct Fast {
    cuda::PlannedKernel<ForwardParams> kernel;
    std::int64_t rows;  // of a block, or of a cluster
    bool stays;         // its blocks, until all rows are done
    std::string how;
    bool in_place = true;  // y may be x
  };

  void set_grid(Fast& fast) {
    std::int64_t groups = (params_.rows.count + fast.rows - 1) / fast.rows;
    if (fast.stays) {
      groups = std::min<std::int64_t>(groups, fast.kernel.clusters_on_device(device_));
    }
    auto& shape = fast.kernel.shape;
    shape.grid[0] = grid_of(groups * shape.cluster);
  }

  void load_fast(DType dtype, Family family) {
    const Rows& rows = params_.rows;
    const auto vector_length = static_cast<std::int64_t>(16 / size_of(dtype));
    if (dtype == DType::f64 || family == Family::steep || rows.length == 0) return;
    if (rows_in_vectors(rows, params_.x, vector_length) &&
        rows_in_vectors(rows, params_.y, vector_length)) {
      aligned_ = fast(dtype, family, Begin::aligned);
    } else if (rows_alike(rows, params_.x, params_.y, vector_length)) {
      anywhere_ = fast(dtype, family, Begin::anywhere);
    }
  }

  // Nothing where rows are too long, or there is no kernel.
  std::optional<Fast> fast(DType dtype, Family family, Begin begin) const {
    const std::int64_t count = params_.rows.count, length = params_.rows.length;
    const auto bytes = static_cast<int>(size_of(dtype));
    const auto has = [&](const OpKernel& kernel) {
      return cuda::can_have<ForwardParams>(kernel, device_);
    };
    for (const Lanes& shape : kLanes) {
      if (begin != Begin::aligned || shape.capacity(dtype) < length) continue;
      if (!has(lanes_kernel(dtype, family, shape))) continue;
      return Fast{{lanes_kernel(dtype, family, shape), device_},
                  shape.rows(),
                  false,
                  fmt::format("rows in the registers of {} lanes", shape.lanes)};
    }
    const std::int64_t in_vectors = length * bytes / 16 * 16 / bytes;  // at most
    for (const Registers& shape : kRegisters) {
      if (shape.capacity() < in_vectors || !has_registers(shape, dtype, begin)) continue;
      if (!has(registers_kernel(dtype, family, shape, begin))) return std::nullopt;
      return Fast{{registers_kernel(dtype, family, shape, begin), device_},
                  shape.warps == 1 ? kSingleWarps : 1,
                  walks_over_rows(family, bytes, shape.warps),
                  fmt::format("rows in the registers of {} threads", 32 * shape.warps)};
    }
    const bool clusters = device_.major == 9 || device_.major == 10;
    for (const Resident& shape : kResident) {
      if ((shape.clustered && !clusters) || !serves(shape, family, dtype)) continue;
      const bool few = family == Family::general && params_.alpha > kFewSurvive;
      if (shape.large_cluster() && (each_ || few)) continue;  // alphas of rows: not timed
      int blocks = 1;
      const auto fits = [&] { return in_vectors * bytes <= blocks * shape.row_bytes(); };
      while (shape.clustered && blocks < kMaxBlocks && !fits()) blocks *= 2;
      const int shared = resident_shared(shape, family, dtype, device_.max_shared_bytes);
      if (!fits() || shared == 0) continue;
      if (!has(resident_kernel(dtype, family, shape, begin))) return std::nullopt;
      Fast fast{
          {resident_kernel(dtype, family, shape, begin), device_, shared},
          1,
          true,
          fmt::format("rows in the registers of {} blocks of {} threads", blocks, shape.threads())};
      fast.kernel.shape.cluster = static_cast<unsigned>(blocks);
      return fast;
    }
    if (each_ || length > std::numeric_limits<std::int32_t>::max() / 2) return std::nullopt;
    if (family == Family::softmax) {
      if (!has(softmax_kernel(dtype, begin))) return std::nullopt;
      return Fast{{softmax_kernel(dtype, begin), device_},
                  1,
                  false,
                  fmt::format("{} threads a row, which is read twice", 32 * kSoftmaxWarps)};
    }
    const int warps = stream_group(count, device_.multiprocessors);
    if (!has(stream_kernel(dtype, family, warps, begin))) return std::nullopt;
    return Fast{
        {stream_kernel(dtype, family, warps, begin), device_, stream_shared(warps)},
        warps == 1 ? kStreamWarps : 1,
        false,
        fmt::format("{} threads a row, which is read once if few elements survive", 32 * warps),
        false};
  }

  void enqueue(Stream stream, const EntmaxTensors& tensors, Workspace workspace) const override {
    const std::int64_t* offsets = offsets_.enqueue(stream, tensors.offsets, workspace);
    if (empty_) return;
    ForwardParams params = params_;
    params.rows.offsets = reinterpret_cast<const int64_t*>(offsets);
    params.x.data = const_cast<void*>(tensors.x);
    params.mask.data = const_cast<void*>(tensors.mask);
    params.alpha_per_row.data = const_cast<void*>(tensors.alpha_per_row);
    params.y.data = tensors.y;
    params.tau.data = tensors.tau;
    params.support.data = tensors.support;
    params.support_size.data = tensors.support_size;
    if (shown_ && tensors.y) {
      EntmaxTensors shown = tensors;
      shown.x = copy_in_y_ ? tensors.y : workspace.data;
      shown.mask = nullptr;
      // Those of any_, which reads x again for them.
      const bool counts = each_ && (tensors.support || tensors.support_size);
      if (!shown_->takes_any(shown) && !counts) {
        hiding_->enqueue(stream, tensors.x, tensors.mask, const_cast<void*>(shown.x));
        shown_->enqueue(stream, shown, {});
        return;
      }
    }
    if (takes_tile(tensors)) return tile_->launch(stream, params);
    const auto& kernel = kernel_for(tensors);
    kernel.launch(stream, params);
    if (!each_ || &kernel == &any_) return;
    params.general_elsewhere = true;
    any_.launch(stream, params);
  }

  bool takes_tile(const EntmaxTensors& tensors) const {
    const bool aligned = prefers_aligned_ && cuda::vector_aligned({tensors.x, tensors.y});
    return tile_ && !aligned && !tensors.support;
  }
  bool takes_any(const EntmaxTensors& tensors) const {
    return !takes_tile(tensors) && &kernel_for(tensors) == &any_;
  }

  const cuda::PlannedKernel<ForwardParams>& kernel_for(const EntmaxTensors& tensors) const {
    if (aligned_ && cuda::vector_aligned({tensors.x, tensors.y})) return aligned_->kernel;
    const auto past = [](const void* pointer) {
      return reinterpret_cast<std::uintptr_t>(pointer) % 16;
    };
    const bool alike = tensors.y == nullptr || past(tensors.x) == past(tensors.y);
    // A byte of the support holds the bits of elements that other threads may have.
    return anywhere_ && alike && tensors.support == nullptr ? anywhere_->kernel : any_;
  }

  RaggedOffsets offsets_;
  ForwardParams params_{};
  bool empty_ = false, each_ = false;  // each row has its own alpha
  int any_warps_ = 0;
  cuda::PlannedKernel<ForwardParams> any_;
  // For pointers aligned to 16 bytes; for those of x and y that are aligned alike.
  std::optional<Fast> aligned_, anywhere_;
  std::optional<TileKernel<ForwardTileParams>> tile_;  // without the support's bits
  bool prefers_aligned_ = false;                       // where pointers allow, to tile_
  // With a mask: of a copy of x without.
  std::unique_ptr<Forward> shown_;
  std::optional<Hiding> hiding_;
  bool copy_in_y_ = false;  // else in the workspace
};

}  // namespace

Body make_cuda_forward(const EntmaxProblem& problem, const Device& device) {
  // A solver whose power of 1 / (alpha - 1) is 1 has no slope at the edge of the support.
  const bool is_two = problem.x.dtype != DType::f64 && static_cast<float>(problem.alpha - 1) == 1;
  EntmaxProblem rounded = problem;
  if (is_two) rounded.alpha = 2;
  return cuda::make_body<Forward>(rounded, device);
}

}  // namespace pullback::entmax

namespace pullback::cuda {

std::vector<KernelSource> entmax_forward_kernels(int arch) {
  using namespace entmax;
  std::vector<KernelSource> kernels;
  const auto add = [&](const OpKernel& kernel) {
    kernels.push_back(op_kernel<ForwardParams>(kernel, arch));
  };
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const int warps : {1, kAnyWarps}) {
      add(any_kernel(dtype, Family::invalid, warps));
      for (const Family family : kFamilies) add(any_kernel(dtype, family, warps));
    }
    if (dtype == DType::f64) continue;
    for (const Family family : kFamilies) {
      if (family == Family::steep) continue;
      kernels.push_back(op_kernel<ForwardTileParams>(
          columns_kernel("forward", dtype, "Family", name_of(family)), arch));
      for (const bool staged : {false, true}) {
        kernels.push_back(op_kernel<ForwardTileParams>(
            tile_kernel("forward", dtype, "Family", name_of(family), staged), arch));
      }
      for (const Lanes& shape : kLanes) add(lanes_kernel(dtype, family, shape));
      for (const Begin begin : {Begin::aligned, Begin::anywhere}) {
        if (family == Family::softmax) {
          add(softmax_kernel(dtype, begin));
        } else {
          for (const int warps : kStreamGroups) add(stream_kernel(dtype, family, warps, begin));
        }
        for (const Registers& shape : kRegisters) {
          if (!has_registers(shape, dtype, begin)) continue;
          add(registers_kernel(dtype, family, shape, begin));
        }
        for (const Resident& shape : kResident) {
          if (shape.clustered && arch / 10 != 9 && arch / 10 != 10) continue;
          if (!serves(shape, family, dtype)) continue;
          if (resident_shared(shape, family, dtype, max_shared_bytes(arch)) == 0) continue;
          add(resident_kernel(dtype, family, shape, begin));
        }
      }
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

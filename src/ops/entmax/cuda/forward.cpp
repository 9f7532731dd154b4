// The forward pass on CUDA. Rows that lie as vectors: by smxx_forward_lanes.cuh where they are
// short, by smxx_forward_registers.cuh where they fit a warp or a block; longer ones by
// smxx_forward_resident.cuh, where a block or a cluster holds them, else by smxx_forward_stream.cuh
// or smxx_forward_softmax.cuh. Everything else, and pointers that are not aligned to 16 bytes: by
// smxx_forward_any.cuh.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>

#include "ops/entmax/cpu/family.hpp"
#include "ops/entmax/cuda/forward_kernels.hpp"
#include "ops/entmax/cuda/rows.hpp"

namespace pullback::entmax {
namespace {

// Whether rows begin at whole vectors, given an aligned pointer.
bool rows_in_vectors(const Rows& rows, const RowTensor& tensor, std::int64_t vector_length) {
  bool whole = tensor.axis == 1 && rows.length % vector_length == 0;
  for (int dim = 0; dim < rows.rank; ++dim) whole &= tensor.outer[dim] % vector_length == 0;
  return whole;
}

class Forward final : public cuda::CudaBody<EntmaxTensors> {
 public:
  Forward(const EntmaxProblem& problem, const Device& device)
      : CudaBody(device), offsets_(problem, device_) {
    params_.alpha = problem.alpha;
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
    const bool each = problem.alpha_per_row.given();
    const Family family = each ? Family::invalid : family_of(problem.alpha);
    load_any(dtype, family, ragged);
    how_ = fmt::format("{} threads a row, which is read in every step", 32 * any_warps_);
    if (!ragged && !each && !problem.mask.given()) load_fast(dtype, family);
    set_any_grid(ragged);
    description = fmt::format("{}; sums in {}, in a fixed order: the same bits every run", how_,
                              name_of(accumulation_dtype(dtype)));
  }

 private:
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

  void load_fast(DType dtype, Family family) {
    const Rows& rows = params_.rows;
    const auto vector_length = static_cast<std::int64_t>(16 / size_of(dtype));
    if (dtype == DType::f64 || family == Family::steep || rows.length == 0) return;
    if (!rows_in_vectors(rows, params_.x, vector_length) ||
        !rows_in_vectors(rows, params_.y, vector_length)) {
      return;
    }
    for (const Lanes& shape : kLanes) {
      if (shape.capacity(dtype) < rows.length) continue;
      fast_.emplace(lanes_kernel(dtype, family, shape), device_);
      set_grid(shape.rows());
      how_ = fmt::format("rows in the registers of {} lanes", shape.lanes);
      return;
    }
    const auto* shape = std::ranges::find_if(
        kRegisters, [&](const Registers& entry) { return entry.capacity() >= rows.length; });
    if (shape == std::end(kRegisters)) {
      if (!load_resident(dtype, family)) load_long(dtype, family);
      return;
    }
    fast_.emplace(registers_kernel(dtype, family, *shape), device_);
    set_grid(shape->warps == 1 ? kSingleWarps : 1);
    if (walks_over_rows(family, static_cast<int>(size_of(dtype)), shape->warps)) {
      const int resident = fast_->blocks_per_multiprocessor(device_) * device_.multiprocessors;
      fast_->shape.grid[0] = std::min(fast_->shape.grid[0], static_cast<unsigned>(resident));
    }
    how_ = fmt::format("rows in the registers of {} threads", 32 * shape->warps);
  }

  // Whether a block or a cluster can hold the rows.
  bool load_resident(DType dtype, Family family) {
    const std::int64_t bytes = params_.rows.length * static_cast<std::int64_t>(size_of(dtype));
    const bool clusters = device_.major == 9 || device_.major == 10;
    for (const Resident& shape : kResident) {
      if ((shape.clustered && !clusters) || !serves(shape, family, dtype)) continue;
      int blocks = 1;
      while (shape.clustered && blocks < kMaxBlocks && bytes > blocks * shape.row_bytes()) {
        blocks *= 2;
      }
      const int shared = resident_shared(shape, family, device_.max_shared_bytes);
      if (bytes > blocks * shape.row_bytes() || shared == 0) continue;
      fast_.emplace(resident_kernel(dtype, family, shape), device_, shared);
      fast_->shape.cluster = static_cast<unsigned>(blocks);
      const std::int64_t resident = fast_->clusters_on_device(device_);
      fast_->shape.grid[0] = static_cast<unsigned>(std::min(params_.rows.count, resident) * blocks);
      how_ =
          fmt::format("rows in the registers of {} blocks of {} threads", blocks, shape.threads());
      return true;
    }
    return false;
  }

  void load_long(DType dtype, Family family) {
    if (params_.rows.length > std::numeric_limits<std::int32_t>::max() / 2) return;
    if (family == Family::softmax) {
      fast_.emplace(softmax_kernel(dtype), device_);
      set_grid(1);
      how_ = fmt::format("{} threads a row, which is read twice", 32 * kSoftmaxWarps);
      return;
    }
    const int warps = stream_group(params_.rows.count, device_.multiprocessors);
    fast_.emplace(stream_kernel(dtype, family, warps), device_, stream_shared(warps));
    set_grid(warps == 1 ? kStreamWarps : 1);
    how_ = fmt::format("{} threads a row, which is read once if few elements survive", 32 * warps);
  }

  void set_grid(std::int64_t rows_in_block) {
    const std::int64_t blocks = (params_.rows.count + rows_in_block - 1) / rows_in_block;
    fast_->shape.grid[0] = static_cast<unsigned>(blocks);
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
    const bool aligned = cuda::vector_aligned({tensors.x, tensors.y});
    (fast_ && aligned ? *fast_ : any_).launch(stream, params);
  }

  RaggedOffsets offsets_;
  ForwardParams params_{};
  bool empty_ = false;
  int any_warps_ = 0;
  std::string how_;
  cuda::PlannedKernel<ForwardParams> any_;
  std::optional<cuda::PlannedKernel<ForwardParams>> fast_;  // for pointers aligned to 16 bytes
};

}  // namespace

Body make_cuda_forward(const EntmaxProblem& problem, const Device& device) {
  return cuda::make_body<Forward>(problem, device);
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
    add(softmax_kernel(dtype));
    for (const Family family : kFamilies) {
      if (family == Family::steep) continue;
      if (family != Family::softmax) {
        for (const int warps : kStreamGroups) add(stream_kernel(dtype, family, warps));
      }
      for (const Lanes& shape : kLanes) add(lanes_kernel(dtype, family, shape));
      for (const Registers& shape : kRegisters) {
        if (shape.capacity() <= std::end(kLanes)[-1].capacity(dtype)) continue;
        add(registers_kernel(dtype, family, shape));
      }
      for (const Resident& shape : kResident) {
        if (shape.clustered && arch / 10 != 9 && arch / 10 != 10) continue;
        if (!serves(shape, family, dtype)) continue;
        if (resident_shared(shape, family, max_shared_bytes(arch)) == 0) continue;
        add(resident_kernel(dtype, family, shape));
      }
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

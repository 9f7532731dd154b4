#include "ops/entmax/cuda/rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/memory.hpp"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {
namespace {

cuda::OpKernel offsets_kernel() {
  return {.name = "entmax_offsets",
          .file = "ops/entmax/cuda/smxx_offsets.cuh",
          .function = "entmax::clean_offsets",
          .parameters = "entmax::OffsetsParams",
          .threads = kOffsetsThreads,
          .constants = {{"entmax::kOffsetsThreads", kOffsetsThreads}}};
}

}  // namespace

unsigned grid_of(std::int64_t blocks) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (blocks > kMost) {
    fail(ErrorCode::unsupported, "entmax", "x",
         fmt::format("rows for {} thread blocks at most on a CUDA device", kMost),
         fmt::format("{}", blocks), "call it for parts of x");
  }
  return static_cast<unsigned>(std::max<std::int64_t>(blocks, 1));
}

RowTensor row_tensor(const Steps& steps) {
  RowTensor tensor{};
  for (std::size_t dim = 0; dim < steps.outer.size(); ++dim) tensor.outer[dim] = steps.outer[dim];
  tensor.axis = steps.axis;
  return tensor;
}

void set_outer(const std::vector<Dim>& dims, Rows& rows, std::span<RowTensor* const> tensors) {
  rows.rank = static_cast<int>(dims.size());
  rows.count = 1;
  for (RowTensor* tensor : tensors) std::fill_n(tensor->outer, kMaxOuterRank, 0);
  for (std::size_t dim = 0; dim < dims.size(); ++dim) {
    rows.sizes[dim] = dims[dim].size;
    rows.count *= dims[dim].size;
    for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i]->outer[dim] = dims[dim].steps[i];
  }
}

Rows merged_rows(const EntmaxProblem& problem, std::span<RowTensor* const> tensors) {
  const Outer outer(problem);
  std::vector<Dim> dims;
  for (int dim = 0; dim < outer.rank; ++dim) {
    if (outer.sizes[dim] == 1) continue;
    Dim& entry = dims.emplace_back(Dim{outer.sizes[dim], {}});
    for (const RowTensor* tensor : tensors) entry.steps.push_back(tensor->outer[dim]);
  }
  Rows rows{};
  rows.length = row_length(problem);
  rows.groups = std::max<std::int64_t>(group_count(problem), problem.offsets.given() ? 0 : 1);
  set_outer(merged(std::move(dims)), rows, tensors);
  return rows;
}

RaggedOffsets::RaggedOffsets(const EntmaxProblem& problem, const cuda::DeviceInfo& device)
    : problem_(problem) {
  if (!problem.offsets.given()) return;
  kernel_ = {offsets_kernel(), device};
  workspace_bytes_ = static_cast<std::size_t>(problem.offsets.shape[0]) * sizeof(std::int64_t);
}

const std::int64_t* RaggedOffsets::enqueue(Stream stream, const void* offsets,
                                           Workspace workspace) const {
  if (workspace_bytes_ == 0) return nullptr;
  const TensorSpec& spec = problem_.offsets;
  if (problem_.check_indices) {
    // The tensor's own steps, negative ones too, become those of a copy without gaps.
    const auto bytes = size_of(spec.dtype);
    std::vector<std::byte> copy(static_cast<std::size_t>(spec.shape[0]) * bytes);
    const auto* from = static_cast<const std::byte*>(offsets);
    const auto handle = static_cast<cuda::CUstream>(stream.handle);
    for (std::int64_t i = 0; i < spec.shape[0]; ++i) {
      const bool whole = spec.strides[0] == 1;
      cuda::check(cuda::driver().cuMemcpyDtoHAsync(
                      copy.data() + static_cast<std::size_t>(i) * bytes,
                      cuda::address(from + i * spec.strides[0] * static_cast<std::int64_t>(bytes)),
                      whole ? copy.size() : bytes, handle),
                  "cuMemcpyDtoHAsync");
      if (whole) break;
    }
    cuda::check(cuda::driver().cuStreamSynchronize(handle), "cuStreamSynchronize");
    EntmaxProblem contiguous = problem_;
    contiguous.offsets = TensorSpec::contiguous(spec.dtype, {spec.shape[0]});
    check_offsets(contiguous, copy.data());
  }
  const OffsetsParams params{.from = offsets,
                             .from_step = spec.strides[0],
                             .to = static_cast<int64_t*>(workspace.data),
                             .groups = group_count(problem_),
                             .length = row_length(problem_),
                             .wide = spec.dtype == DType::i64};
  kernel_.launch(stream, params);
  return params.to;
}

}  // namespace pullback::entmax

namespace pullback::cuda {

std::vector<KernelSource> entmax_rows_kernels(int arch) {
  return {op_kernel<entmax::OffsetsParams>(entmax::offsets_kernel(), arch)};
}

}  // namespace pullback::cuda

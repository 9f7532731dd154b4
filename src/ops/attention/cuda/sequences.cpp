#include "ops/attention/cuda/sequences.hpp"

#include <fmt/format.h>

#include "core/check.hpp"
#include "core/workspace.hpp"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {
namespace {

cuda::OpKernel sequences_kernel() {
  return {.name = "attention_sequences",
          .file = "ops/attention/cuda/smxx_sequences.cuh",
          .function = "attention::list_sequences",
          .parameters = "attention::SequencesParams",
          .threads = kSequenceThreads};
}

}  // namespace

Problem problem_params(const AttentionProblem& problem) {
  const AttentionSizes sizes = sizes_of(problem);
  if (sizes.max_query > kLongestSequence || sizes.max_key > kLongestSequence) {
    fail(ErrorCode::unsupported, "attention", "q and k",
         fmt::format("sequences of at most {} rows on a CUDA device", kLongestSequence),
         fmt::format("{} and {}", sizes.max_query, sizes.max_key));
  }
  const Dropout dropout(problem.dropout, problem.dropout_seed);
  return {.heads = static_cast<std::int32_t>(sizes.heads),
          .group = static_cast<std::int32_t>(sizes.group),
          .head_dim = static_cast<std::int32_t>(sizes.head_dim),
          .value_dim = static_cast<std::int32_t>(sizes.value_dim),
          .batch = sizes.batch,
          .query = sizes.total_query,
          .key = sizes.total_key,
          .sequences = nullptr,
          .band = band_of(problem.mask),
          .blocks = {},
          .scale = static_cast<float>(*problem.scale),
          .softcap = static_cast<float>(problem.softcap),
          .inner_scale =
              static_cast<float>(*problem.scale / (problem.softcap > 0 ? problem.softcap : 1)),
          .exact_scale = *problem.scale,
          .exact_softcap = problem.softcap,
          .dropout = dropout,
          .keep_scale = static_cast<float>(dropout.scale())};
}

HeadRows head_rows(const TensorSpec& spec) {
  const RowStrides strides = row_strides(spec);
  return {nullptr, strides.batch, strides.row, strides.head, strides.element};
}

RowValues row_values(const TensorSpec& spec) {
  const RowStrides strides = lse_strides(spec);
  return {nullptr, strides.batch, strides.head, strides.row};
}

Plane plane(const TensorSpec& spec) {
  const BiasStrides strides = bias_strides(spec);
  return {nullptr, strides.batch, strides.head, strides.query, strides.key};
}

bool has_vector_rows(const TensorSpec& spec) {
  const RowStrides strides = row_strides(spec);
  const auto vector = static_cast<std::int64_t>(16 / size_of(spec.dtype));
  return strides.element == 1 && spec.shape[spec.rank - 1] % vector == 0 &&
         strides.batch % vector == 0 && strides.row % vector == 0 && strides.head % vector == 0;
}

bool has_vector_keys(const TensorSpec& bias) {
  const BiasStrides strides = bias_strides(bias);
  const auto vector = static_cast<std::int64_t>(16 / size_of(bias.dtype));
  return strides.key == 1 && strides.batch % vector == 0 && strides.head % vector == 0 &&
         strides.query % vector == 0;
}

SequenceLister::SequenceLister(const AttentionProblem& problem, const cuda::DeviceInfo& device,
                               int q_tile, int k_tile) {
  const AttentionSizes sizes = sizes_of(problem);
  if (!sizes.varlen) return;
  const auto indices = [](const TensorSpec& spec) {
    return spec.shape[0] == 1 ? std::int64_t{0} : spec.strides[0];
  };
  kernel_.emplace(sequences_kernel(), device);
  params_ = {.cu_q = nullptr,
             .cu_k = nullptr,
             .stride_q = indices(problem.cu_seqlens_q),
             .stride_k = indices(problem.cu_seqlens_k),
             .wide_q = problem.cu_seqlens_q.dtype == DType::i64,
             .wide_k = problem.cu_seqlens_k.dtype == DType::i64,
             .sequences = sizes.batch,
             .total_q = sizes.total_query,
             .total_k = sizes.total_key,
             .max_q = sizes.max_query,
             .max_k = sizes.max_key,
             .q_tile = q_tile,
             .k_tile = k_tile,
             .table = nullptr};
  const auto entries = static_cast<std::size_t>(sizes.batch) + 2;
  bytes_ = workspace_aligned(entries * sizeof(PackedSequence));
  // Every extent wastes less than a tile, and an empty one none.
  const auto tiles = [&](std::int64_t total, int tile) {
    return std::min(total, total / tile + sizes.batch + 1);
  };
  q_tiles_ = tiles(sizes.total_query, q_tile);
  k_tiles_ = tiles(sizes.total_key, k_tile);
}

const PackedSequence* SequenceLister::list(Stream stream, const AttentionTensors& tensors,
                                           void* scratch) const {
  if (!kernel_) return nullptr;
  SequencesParams params = params_;
  params.cu_q = tensors.cu_seqlens_q;
  params.cu_k = tensors.cu_seqlens_k;
  params.table = static_cast<PackedSequence*>(scratch);
  kernel_->launch(stream, params);
  return params.table;
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_sequences_kernels(int arch) {
  return {op_kernel<attention::SequencesParams>(attention::sequences_kernel(), arch)};
}

}  // namespace pullback::cuda

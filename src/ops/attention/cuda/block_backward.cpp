// The backward pass with a block mask on Hopper: delta of every row, d_k and d_v, d_q, a launch
// each (sm90_backward_blocks.cuh).
#include "ops/attention/cuda/block_backward.hpp"

#include <algorithm>
#include <utility>

#include "ops/attention/cuda/backward_kernels.hpp"
#include "ops/attention/cuda/head_maps.hpp"
#include "ops/attention/cuda/hopper_backward.hpp"

namespace pullback::attention {
namespace {

using Kernel = cuda::PlannedKernel<BlockBackwardParams>;

constexpr int kRows = BlockBackwardTile::kRows;
// For statistics, which ask for no more than the tiles' rows.
constexpr BackwardTiles kTiles = backward_tiles(64, 90, true);
static_assert(kTiles.keys == kRows && kTiles.queries == kRows);

cuda::OpKernel block_kernel(DType dtype, const BlockBackwardTile& tile) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("attention_backward_sm90_{}_{}_blocks_{}", type, tile.width,
                              tile.owns_keys ? "keys" : "queries"),
          .file = "ops/attention/cuda/sm90_backward_blocks.cuh",
          .function =
              fmt::format("attention::block_backward<{}, attention::block_backward_tile({}, {})>",
                          type, tile.width, tile.owns_keys),
          .parameters = "attention::BlockBackwardParams",
          .threads = BlockBackwardTile::kThreads,
          .blocks = tile.resident,
          .arch_specific = true};
}

// Smaller ones leave few tiles empty, and then five products are less than seven; larger ones fill
// the tiles of sm90_backward.cuh.
constexpr std::int64_t kLeastBlock = 32;

// What the copy engine is to know: q, k, v, d_out.
HeadMaps<4> maps_of(const AttentionProblem& problem) {
  return HeadMaps<4>(
      {{{problem.q, kRows}, {problem.k, kRows}, {problem.v, kRows}, {problem.d_out, kRows}}});
}

class BlockBackward final : public BackwardBody {
 public:
  // other: for runs whose tensors do not begin at 16 bytes, or without d_k and d_v.
  BlockBackward(const AttentionProblem& problem, const Device& device, Body other)
      : BackwardBody(problem, device, kRows, kRows, at_work(device, key_tile(problem))),
        other_(std::move(other)),
        query_blocks_(problem, device_, Pass::forward, kRows, kRows,
                      at_work(device, query_tile(problem))),
        maps_(maps_of(problem)),
        row_vectors_(has_vector_rows(problem.out) && has_vector_rows(problem.d_out)) {
    const DType dtype = problem.q.dtype;
    const int width = hopper_width(problem);
    const SeenBlocksTable &keys = blocks_.get(), &queries = query_blocks_.get();
    stats_bytes_ = aligned(planes_ * params_.q_tiles * stats_bytes(kRows));
    key_counts_ = pairs_ * keys.shared_count * 2;
    params_.turn_count = key_counts_ + planes_ * queries.shared_count * 2;
    count_bytes_ = aligned(params_.turn_count * 4);
    extreme_bytes_ = aligned(pairs_ * params_.k_tiles * 4);
    key_sum_bytes_ = aligned(key_counts_ * kRows * width * 4);
    workspace_bytes = stats_bytes_ + count_bytes_ + extreme_bytes_ + key_sum_bytes_ +
                      aligned((params_.turn_count - key_counts_) * kRows * width * std::int64_t{4});
    workspace_bytes = std::max(workspace_bytes, other_->workspace_bytes);
    has_queries_ = planes_ > 0 && params_.q_tiles > 0;
    has_keys_ = pairs_ > 0 && params_.k_tiles > 0;
    if (has_queries_) {
      prepare_ = {prepare_kernel(dtype, kTiles), device_};
      set_grid(prepare_, planes_ * params_.q_tiles);
    }
    const auto load = [&](Kernel& kernel, const BlockBackwardTile& tile, std::int64_t blocks) {
      kernel = {block_kernel(dtype, tile), device_, tile.shared_bytes()};
      set_grid(kernel, blocks);
      kernel.shape.programmatic = has_queries_;  // behind prepare, which allows it
    };
    if (has_keys_) load(keys_, key_tile(problem), pairs_ * keys.owner_count);
    if (has_queries_ && problem.d_q.given()) {
      load(queries_, query_tile(problem), planes_ * queries.owner_count);
    }
    description = fmt::format(
        "Hopper's tensor cores: d_k and d_v, then d_q, of {} keys x {} queries at a time; sums in "
        "f32, in a fixed order: the same bits every run",
        kRows, kRows);
  }

 private:
  static BlockBackwardTile key_tile(const AttentionProblem& problem) {
    return block_backward_tile(hopper_width(problem), true);
  }
  static BlockBackwardTile query_tile(const AttentionProblem& problem) {
    return block_backward_tile(hopper_width(problem), false);
  }
  static OwnersAtWork at_work(const Device& device, const BlockBackwardTile& tile) {
    const std::int64_t multiprocessors = cuda::device_info(device.index).multiprocessors;
    return {.owners = 0, .everywhere = multiprocessors * tile.resident};
  }

  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    const auto maps = maps_.of_run({tensors.q, tensors.k, tensors.v, tensors.d_out});
    const bool serves = maps && (tensors.d_k || tensors.d_v) &&
                        cuda::vector_aligned({tensors.q, tensors.k, tensors.v, tensors.d_out,
                                              tensors.d_q, tensors.d_k, tensors.d_v});
    if (!serves) return other_->run(stream, tensors, workspace);
    BlockBackwardParams pass{};
    BackwardParams& params = pass.all;
    params = begin(stream, tensors, workspace);
    auto* scratch = static_cast<std::byte*>(workspace.data);
    params.stats = scratch;
    params.turns = reinterpret_cast<std::int32_t*>(scratch + stats_bytes_);
    params.parts_done = params.turns;
    scratch += stats_bytes_ + count_bytes_;
    pass.extreme_keys = reinterpret_cast<std::int32_t*>(scratch);
    params.key_sums = reinterpret_cast<float*>(scratch + extreme_bytes_);
    params.row_vectors = row_vectors_ && cuda::vector_aligned({tensors.out, tensors.d_out});
    const HeadRows d_q = params.d_q;
    params.d_q.data = nullptr;  // queries that see nothing are cleared by their owners
    if (has_queries_) prepare_.launch(stream, params);
    const auto& [q, k, v, d_out] = *maps;
    pass.own[0] = pass.listed[0] = k;
    pass.own[1] = pass.listed[1] = v;
    if (has_keys_) {
      pass.listed[0] = q;
      pass.listed[1] = d_out;
      keys_.launch(stream, pass);
    }
    if (!has_queries_ || !tensors.d_q) return;
    params.d_q = d_q;
    params.problem.blocks = query_blocks_.get();
    params.parts_done += key_counts_;
    params.key_sums = reinterpret_cast<float*>(scratch + extreme_bytes_ + key_sum_bytes_);
    pass.own[0] = q;
    pass.own[1] = d_out;
    pass.listed[0] = k;
    pass.listed[1] = v;
    queries_.launch(stream, pass);
  }

  Body other_;
  BlockTables query_blocks_;
  HeadMaps<4> maps_;
  bool row_vectors_, has_queries_ = false, has_keys_ = false;
  std::int64_t key_counts_ = 0;
  std::size_t stats_bytes_ = 0, count_bytes_ = 0, extreme_bytes_ = 0, key_sum_bytes_ = 0;
  BackwardKernel prepare_;
  Kernel keys_, queries_;
};

}  // namespace

bool block_backward_serves(const AttentionProblem& problem, const cuda::DeviceInfo& device) {
  const int width = hopper_width(problem);
  const auto can_have = [&](bool owns_keys) {
    const BlockBackwardTile tile = block_backward_tile(width, owns_keys);
    return cuda::can_have<BlockBackwardParams>(block_kernel(problem.q.dtype, tile), device);
  };
  return problem.blocks.given() && problem.blocks.block >= kLeastBlock &&
         problem.blocks.block <= kRows && size_of(problem.q.dtype) == 2 && width <= 128 &&
         (problem.d_k.given() || problem.d_v.given()) && has_hopper_features(problem) &&
         maps_of(problem).exist() && can_have(true) && can_have(false);
}

Body make_block_backward(const AttentionProblem& problem, const Device& device) {
  Body other = make_cuda_backward(problem, device, Pass::backward);
  return cuda::make_body<BlockBackward>(problem, device, std::move(other));
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_block_backward_kernels(int arch) {
  using namespace attention;
  std::vector<KernelSource> kernels;
  if (arch != 90) return kernels;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int width : {64, 96, 128}) {
      for (const bool owns_keys : {true, false}) {
        kernels.push_back(op_kernel<BlockBackwardParams>(
            block_kernel(dtype, block_backward_tile(width, owns_keys)), arch));
      }
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

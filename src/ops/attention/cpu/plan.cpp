// Plans of the CPU variants: tile sizes, tasks, workspace.
#include <fmt/format.h>

#include <algorithm>

#include "ops/attention/cpu/layout.hpp"

namespace pullback::attention {
namespace {

// Backward tasks that a problem is cut into at least, where that fits: a constant, as the bits of
// d_q depend on it.
constexpr std::int64_t kTasks = 16;

// Key tiles are as long as lets the packed operands of a tile stay in a 2 MB L2 cache, as the
// queries are packed once for each (docs/tuning/attention.md), but short enough to make
// kTasks tasks.
std::int64_t key_tile_of(const AttentionProblem& problem, const AttentionSizes& sizes, bool bf16) {
  const std::int64_t width = std::max(sizes.head_dim, sizes.value_dim);
  std::int64_t tile = 384;
  if (width > (bf16 ? 128 : 64)) tile /= 2;
  if (width > 128 && !bf16) tile /= 2;
  if (problem.q.dtype == DType::f64) tile = 96;
  const std::int64_t heads = std::min(kTasks, sizes.batch * sizes.kv_heads);
  while (tile > 96 && heads * std::min(kTasks, blocks_of(sizes.max_key, tile)) < kTasks) tile /= 2;
  return tile;
}

// Queries of a forward task: many, so that packing the keys is paid for, unless that leaves threads
// without work.
std::int64_t task_queries_of(const AttentionSizes& sizes, int threads) {
  constexpr std::int64_t kMost = 4;
  static_assert(kMost <= kMostTaskTiles);
  std::int64_t tiles = std::clamp<std::int64_t>(blocks_of(sizes.max_query, kQueryTile), 1, kMost);
  const std::int64_t rows = sizes.heads * sizes.total_query * (sizes.varlen ? 1 : sizes.batch);
  while (tiles > 1 && rows < 4 * threads * tiles * kQueryTile) --tiles;
  return tiles * kQueryTile;
}

// Heads of a forward task: few queries do not pay for packing the keys, which heads can share.
std::int64_t task_heads_of(const AttentionSizes& sizes, int threads) {
  if (sizes.max_query > kQueryTile) return 1;
  std::int64_t heads = std::min(sizes.group, kMostTaskTiles);
  const std::int64_t pairs = sizes.batch * sizes.heads;
  while (heads > 1 && (sizes.group % heads != 0 || pairs < 4 * threads * heads)) --heads;
  return std::max<std::int64_t>(heads, 1);
}

// What the chunks' copies of d_q may take together.
constexpr std::int64_t kCopiesBytes = std::int64_t{32} << 20;

}  // namespace

CpuLayout::CpuLayout(const AttentionProblem& problem_, int threads, Pass pass, CpuIsa isa_)
    : problem(problem_),
      sizes(sizes_of(problem_)),
      seen_blocks(problem),
      isa(isa_),
      key_tile(key_tile_of(problem_, sizes, isa_ != CpuIsa::any)) {
  const bool in_double = problem.q.dtype == DType::f64;
  const std::size_t real_bytes = in_double ? sizeof(double) : sizeof(float);
  task_queries = task_queries_of(sizes, threads);
  task_heads = task_heads_of(sizes, threads);

  const auto scratch = [&]<class Real>(Real) {
    Bump bump(nullptr);
    if (pass == Pass::forward) {
      ForwardScratch<Real>(bump, *this);
    } else {
      BackwardScratch<Real>(bump, *this);
    }
    return bump.bytes();
  };

  if (pass == Pass::backward) {
    std::int64_t owners = sizes.batch * sizes.kv_heads;
    if (problem.d_bias.given()) {
      const auto& shape = problem.d_bias.shape;
      bias_sums.shape = {shape[0], shape[1], shape[2], shape[3]};
      bias_sums.batch = shape[0] != sizes.batch;
      bias_sums.head = shape[1] != sizes.heads;
      bias_sums.query = shape[2] != sizes.max_query;
      bias_sums.key = shape[3] != sizes.max_key;
      if (bias_sums.batch && sizes.batch > 0) owners /= sizes.batch;
      if (bias_sums.head && sizes.kv_heads > 0) owners /= sizes.kv_heads;
    }
    const std::int64_t copy_bytes = std::max<std::int64_t>(
        1, sizes.heads * sizes.head_dim * static_cast<std::int64_t>(real_bytes) * query_rows());
    const std::int64_t wanted = blocks_of(kTasks, std::max<std::int64_t>(1, owners));
    const bool one_for_all = owners < sizes.batch * sizes.kv_heads;
    const std::int64_t affordable =
        std::max<std::int64_t>(one_for_all ? 4 : 1, kCopiesBytes / copy_bytes);
    const std::int64_t tiles = blocks_of(sizes.max_key, key_tile);
    const std::int64_t at_most = problem.d_q.given() ? std::min(wanted, affordable) : wanted;
    chunk_keys = std::max<std::int64_t>(1, blocks_of(tiles, at_most)) * key_tile;
    chunks = blocks_of(sizes.max_key, chunk_keys);
  }
  scratch_bytes = in_double ? scratch(0.0) : scratch(0.0f);

  Bump bump(nullptr);
  RunMemory(bump, *this, threads, pass);
  workspace_bytes = bump.bytes();
}

RunMemory::RunMemory(Bump& bump, const CpuLayout& layout, int threads, Pass pass) {
  const AttentionSizes& sizes = layout.sizes;
  const auto bytes = [&](std::int64_t count) { return bump.take<std::byte>(count); };
  sequence_table = bytes(static_cast<std::int64_t>(Sequences::workspace_bytes(sizes)));
  if (sizes.varlen) first_blocks = bump.take<std::int64_t>(sizes.batch + 1);
  scratch = bytes(static_cast<std::int64_t>(layout.scratch_bytes) * threads);
  if (pass == Pass::forward) return;
  const std::int64_t real_bytes = layout.problem.q.dtype == DType::f64 ? 8 : 4;
  const std::int64_t rows = sizes.heads * layout.query_rows();
  delta = bytes(rows * real_bytes);
  d_q_sums = bytes(layout.query_copies() * rows * sizes.head_dim * real_bytes);
  const CpuLayout::BiasSums& sums = layout.bias_sums;
  if (sums.any()) bias_sums = bytes((sums.key ? layout.chunks : 1) * sums.numel() * real_bytes);
}

CpuRun::CpuRun(const CpuLayout& layout_, const AttentionTensors& tensors_, const Threads& threads_,
               Pass pass, Bump workspace)
    : RunMemory(workspace, layout_, threads_.count(), pass),
      layout(layout_),
      tensors(tensors_),
      threads(threads_),
      dropout(dropout_of(layout_.problem, tensors_)),
      sequences(layout_.problem, layout_.sizes, tensors_, sequence_table) {
  const AttentionSizes& sizes = layout.sizes;
  const bool forward = pass == Pass::forward;
  const std::int64_t block = forward ? layout.task_queries : layout.chunk_keys;
  blocks.batches = sizes.batch;
  blocks.first = first_blocks;
  if (sizes.varlen) {
    for (std::int64_t b = 0; b < sizes.batch; ++b) {
      blocks.first[b] = blocks.total;
      const Sequence sequence = sequences[b];
      blocks.total += blocks_of(forward ? sequence.q_length : sequence.k_length, block);
    }
    blocks.first[sizes.batch] = blocks.total;
  } else {
    blocks.uniform = blocks_of(forward ? sizes.max_query : sizes.max_key, block);
    blocks.total = sizes.batch * blocks.uniform;
  }
}

namespace {

const char* products_on(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::amx_bf16:
      return "products of bf16 on AMX";
    case CpuIsa::avx512_bf16:
      return "products of bf16 on the vector units";
    case CpuIsa::any:
      break;
  }
  return "products on the vector units";
}

class CpuBody final : public PlanBody<AttentionTensors> {
 public:
  CpuBody(const AttentionProblem& problem, const Device& device, Pass pass, CpuIsa isa)
      : threads_(device.threads), layout_(problem, threads_.count(), pass, isa), pass_(pass) {
    workspace_bytes = layout_.workspace_bytes;
    const bool in_double = problem.q.dtype == DType::f64;
    description = fmt::format(
        "tiles of {} queries x {} keys; {}; sums in {}; {}; the same bits for any number of "
        "threads",
        kQueryTile, layout_.key_tile, products_on(isa), in_double ? "f64" : "f32",
        pass == Pass::forward
            ? fmt::format(
                  "tasks of {} queries{}", layout_.task_queries,
                  layout_.task_heads > 1 ? fmt::format(" of {} heads", layout_.task_heads) : "")
            : fmt::format("tasks of {} keys, {} partial sums of d_q", layout_.chunk_keys,
                          layout_.query_copies()));
  }

  void run(Stream, const AttentionTensors& tensors, Workspace workspace) const override {
    const CpuRun run(layout_, tensors, threads_, pass_, Bump(workspace.data));
    clear_outside_rows(layout_.problem, tensors, run.sequences, pass_);
    if (pass_ == Pass::forward) {
      cpu_forward(run);
    } else {
      cpu_backward(run);
    }
  }

 private:
  Threads threads_;
  CpuLayout layout_;
  Pass pass_;
};

}  // namespace

Body make_cpu(const AttentionProblem& problem, const Device& device, Pass pass) {
  return std::make_unique<CpuBody>(problem, device, pass, CpuIsa::any);
}

Body make_cpu_avx512_bf16(const AttentionProblem& problem, const Device& device, Pass pass) {
  return std::make_unique<CpuBody>(problem, device, pass, CpuIsa::avx512_bf16);
}

Body make_cpu_amx_bf16(const AttentionProblem& problem, const Device& device, Pass pass) {
  return std::make_unique<CpuBody>(problem, device, pass, CpuIsa::amx_bf16);
}

}  // namespace pullback::attention

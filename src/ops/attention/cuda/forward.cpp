// The forward pass on CUDA: bf16, f16 and f32 on tensor cores (smxx_forward.cuh, on Hopper also
// sm90_forward.cuh), f64 in plain loops. One launch, and for varlen another one before it that
// lists the sequences.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/check.hpp"
#include "core/workspace.hpp"
#include "cuda/memory.hpp"
#include "ops/attention/block_tables.hpp"
#include "ops/attention/cuda/aligned_rows.hpp"
#include "ops/attention/cuda/few_queries.hpp"
#include "ops/attention/cuda/forward_kernels.hpp"
#include "ops/attention/cuda/head_maps.hpp"
#include "ops/attention/cuda/sequences.hpp"

namespace pullback::attention {
namespace {

ForwardKind blocks_kind(const AttentionProblem& problem, int width, bool hopper) {
  const DType dtype = problem.q.dtype;
  const bool large = hopper && has_hopper_kernel(dtype, width, ForwardKind::blocks)
                         ? prefers_pairs(problem)
                         : problem.blocks.block >= kLargeBlock &&
                               has_kind(ForwardKind::large_blocks, width, element_bytes(dtype));
  return large ? ForwardKind::large_blocks : ForwardKind::blocks;
}

class Forward final : public cuda::CudaBody<AttentionTensors> {
 public:
  // hopper: with its own kernel, where that serves.
  Forward(const AttentionProblem& problem, const Device& device, bool hopper)
      : CudaBody(device), sizes_(sizes_of(problem)) {
    const DType dtype = problem.q.dtype;
    const int arch = cuda::compile_arch(device_);
    const int width = this->width();
    params_.problem = problem_params(problem);
    const Problem& p = params_.problem;
    const bool bias = problem.bias.given(), bias_vectors = has_vector_keys(problem.bias);
    const bool blocks = problem.blocks.given(), dropout = p.dropout.active();
    // Kernels of their own have a scale, and one of these at most; Hopper's may have two.
    const bool others =
        p.softcap > 0 || !(p.scale > kLeastScale) ||
        (bias && !(bias_vectors && has_kind(ForwardKind::bias, width, element_bytes(dtype))));
    const bool terms = others || bias + blocks + dropout > 1;
    ForwardKind kind = terms     ? ForwardKind::terms
                       : bias    ? ForwardKind::bias
                       : dropout ? ForwardKind::dropout
                       : blocks  ? blocks_kind(problem, width, hopper)
                                 : ForwardKind::plain;
    const auto tile_of = [&](ForwardKind any) {
      return forward_tile(width, element_bytes(dtype), any, arch);
    };

    params_.q = head_rows(problem.q);
    params_.k = head_rows(problem.k);
    params_.v = head_rows(problem.v);
    params_.out = head_rows(problem.out);
    params_.lse = row_values(problem.lse);
    params_.bias = plane(problem.bias);
    params_.bias_vectors = bias_vectors;

    const std::int64_t pairs = (sizes_.varlen ? 1 : sizes_.batch) * sizes_.heads;
    empty_ = pairs == 0 || sizes_.total_query == 0;
    if (empty_) {
      description = "nothing to compute";
      return;
    }
    if (dtype == DType::f64) {
      by_elements_.emplace(problem, device_, plain_forward_kernel(), 0, pairs, kPlainRows, 64);
      workspace_bytes = by_elements_->sequences.workspace_bytes();
      description = "plain loops, a warp for each query; sums in f64";
      return;
    }
    vectors_ = has_vector_rows(problem.q) && has_vector_rows(problem.k) &&
               has_vector_rows(problem.v) && has_vector_rows(problem.out);
    const auto load = [&](std::optional<Tiles>& to, ForwardKind any) {
      const ForwardTile own = tile_of(any);
      const std::int64_t at_work =
          is_blocks(any) ? std::int64_t{device_.multiprocessors} * own.blocks : 0;
      to.emplace(problem, device_, forward_kernel(dtype, width, any, arch),
                 own.shared_bytes(element_bytes(dtype), stages_bias(any, element_bytes(dtype))),
                 pairs, own.rows, part_keys(own), at_work);
      to->pair_group = pair_group(pairs, dtype);
      take_sequences(*to);
    };
    load(by_elements_, ForwardKind::elements);
    const bool only_softcap = p.softcap > 0 && bias + blocks + dropout == 0;
    const bool bias_dropout = !others && bias && dropout && !blocks;
    const ForwardKind hopper_kind = only_softcap   ? ForwardKind::softcap
                                    : bias_dropout ? ForwardKind::bias_dropout
                                                   : kind;
    if (hopper && vectors_ && hopper_serves(dtype, width, hopper_kind, pairs) &&
        cuda::can_have<HopperForwardParams>(hopper_forward_kernel(dtype, width, hopper_kind),
                                            device_)) {
      only_aligned_bias_ = kind == ForwardKind::bias || bias_dropout;
      load_hopper(problem, width, hopper_kind, pairs);
      return;
    }
    const auto has = [&](ForwardKind any) {
      return cuda::can_have<ForwardParams>(forward_kernel(dtype, width, any, arch), device_);
    };
    if (vectors_ && !has(kind)) {
      vectors_ = kind != ForwardKind::terms && has(ForwardKind::terms);
      kind = ForwardKind::terms;
    }
    only_aligned_bias_ = kind == ForwardKind::bias;
    const ForwardTile tile = tile_of(vectors_ ? kind : ForwardKind::elements);
    if (vectors_) {
      load(by_vectors_, kind);
      plan_parts(by_vectors_->blocks, pairs, tile.rows, width);
    }
    description = fmt::format(
        "tiles of {} queries by {} keys, head dims padded to {}, {} products on tensor cores{}; "
        "sums in f32, in a fixed order: the same bits every run",
        tile.rows, tile.keys, width, dtype == DType::f32 ? "three f16" : name_of(dtype),
        vectors_ ? "" : "; rows are read element by element");
  }

 private:
  // A kernel with its tiles of queries, and the parts of tiles of keys that they see.
  template <class Params>
  struct TilesOf {
    cuda::PlannedKernel<Params> kernel;
    SequenceLister sequences;
    // As in ForwardParams.
    std::int32_t q_tiles, pair_group = 1, units = 0, unit_tiles = 1, cycle_units = 1;
    BlockTables blocks;

    TilesOf(const AttentionProblem& problem, const cuda::DeviceInfo& device,
            const cuda::OpKernel& planned, int shared, std::int64_t pairs, int rows, int keys,
            std::int64_t at_work = 0)
        : kernel(planned, device, shared),
          sequences(problem, device, rows, rows),
          blocks(problem, device, Pass::forward, rows, keys, {.everywhere = at_work}) {
      const AttentionSizes sizes = sizes_of(problem);
      const std::int64_t tiles = blocks.get().given() ? blocks.get().owner_count
                                 : sizes.varlen       ? sequences.q_tiles()
                                                      : ceil_div(sizes.total_query, rows);
      if (tiles > std::numeric_limits<std::int32_t>::max() / pairs) {
        fail(ErrorCode::unsupported, "attention", "q",
             fmt::format("at most 2^31 tiles of {} queries on a CUDA device", rows),
             problem.q.to_string());
      }
      q_tiles = static_cast<std::int32_t>(tiles);
      kernel.shape.grid[0] = static_cast<unsigned>(q_tiles * pairs);
    }
  };
  using Tiles = TilesOf<ForwardParams>;
  using HopperTiles = TilesOf<HopperForwardParams>;

  int width() const {
    return head_width(static_cast<int>(sizes_.head_dim), static_cast<int>(sizes_.value_dim));
  }

  // Whether later queries see more keys than earlier ones, or fewer.
  bool is_slanted() const {
    const Band& band = params_.problem.band;
    return (band.left == kFar) != (band.right == kFar);
  }

  // With a causal mask the longest tiles of many heads come first, as many as share the
  // second-level cache; else the tiles of a head follow each other.
  std::int32_t pair_group(std::int64_t pairs, DType dtype) const {
    if (!is_slanted()) return 1;
    const std::int64_t bytes = sizes_.total_key * (sizes_.head_dim + sizes_.value_dim) *
                               element_bytes(dtype) / sizes_.group;
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(
        device_.l2_bytes / 2 / std::max<std::int64_t>(bytes, 1), 1, pairs));
  }

  // With a bias or dropout heads of 64 take one tile of queries a thread block, which shorter rows
  // do not fill.
  int least_keys(int width, ForwardKind kind) const {
    if (kind < ForwardKind::dropout || width > 64) return hopper_least_keys(width);
    const Band& band = params_.problem.band;
    const bool masked = band.left != kFar || band.right != kFar;
    return masked ? 2048 : 1024;
  }

  // Thread blocks for Hopper count tiles, which have a row each or more, by twos in 32 bits.
  bool hopper_serves(DType dtype, int width, ForwardKind kind, std::int64_t pairs) const {
    constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;
    // A thread block counts its steps in 32 bits: of 64 keys at the least, for 128 queries.
    constexpr double kMostSteps = 0x1p31;
    const double steps = static_cast<double>(sizes_.total_query) * static_cast<double>(pairs) *
                         static_cast<double>(sizes_.max_key) /
                         (128.0 * 64 * device_.multiprocessors);
    return has_hopper_kernel(dtype, width, kind) && sizes_.total_query <= kMostTiles / pairs &&
           steps < kMostSteps && (is_blocks(kind) || sizes_.max_key >= least_keys(width, kind));
  }

  // One of the kernels runs, and lists the sequences as it wants them.
  template <class Params>
  void take_sequences(const TilesOf<Params>& tiles) {
    workspace_bytes = std::max(workspace_bytes, tiles.sequences.workspace_bytes());
  }

  void load_hopper(const AttentionProblem& problem, int width, ForwardKind kind,
                   std::int64_t pairs) {
    const HopperTile tile = hopper_tile(kind, width);
    HopperTiles& own = hopper_.emplace(
        problem, device_, hopper_forward_kernel(problem.q.dtype, width, kind), tile.shared_bytes(),
        pairs, tile.rows(), tile.part_keys(),
        is_blocks(kind) ? std::int64_t{device_.multiprocessors} * tile.resident : 0);
    maps_ = HeadMaps<3>({{{problem.q, HopperTile::kGroupRows},
                          {problem.k, tile.part_keys()},
                          {problem.v, tile.part_keys()}}});
    take_sequences(own);
    plan_parts(own.blocks, pairs, tile.rows(), width);
    if (tile.persistent) {
      const std::int64_t tiles = own.q_tiles;
      // Two of a unit where that leaves enough units.
      const bool paired =
          is_slanted() && tiles >= 4 && tiles * pairs >= 2 * device_.multiprocessors;
      own.unit_tiles = paired ? 2 : 1;
      const std::int64_t pair_units = (tiles + paired) / own.unit_tiles;
      own.units = static_cast<std::int32_t>(pair_units * pairs);
      const std::int64_t blocks = std::min(own.units, device_.multiprocessors);
      own.kernel.shape.grid[0] = static_cast<unsigned>(blocks);
      own.cycle_units = static_cast<std::int32_t>(
          std::min<std::int64_t>(std::lcm(blocks, pair_units), own.units));
    } else {
      own.pair_group = pair_group(pairs, problem.q.dtype);
    }
    description = fmt::format(
        "tiles of {} queries by {} keys, head dims padded to {}, {} products on Hopper's tensor "
        "cores; sums in f32, in a fixed order: the same bits every run",
        tile.rows(), tile.keys, width, name_of(problem.q.dtype));
  }

  // What a block mask's tiles need that several thread blocks share.
  void plan_parts(const BlockTables& blocks, std::int64_t pairs, int rows, int width) {
    shared_tiles_ = pairs * blocks.get().shared_count;
    if (shared_tiles_ == 0) return;
    done_bytes_ = workspace_aligned(static_cast<std::size_t>(shared_tiles_) * 4);
    // A tile's outputs, and a maximum and a sum of each row in as many lanes as share it.
    const std::int64_t part_bytes = std::int64_t{rows} * (width + 8) * 4;
    workspace_bytes += done_bytes_ + static_cast<std::size_t>(shared_tiles_ * part_bytes);
  }

  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    if (empty_) return;
    ForwardParams params = params_;
    params.problem.dropout.seed_at = static_cast<const std::uint64_t*>(tensors.seed);
    params.q.data = const_cast<void*>(tensors.q);
    params.k.data = const_cast<void*>(tensors.k);
    params.v.data = const_cast<void*>(tensors.v);
    params.out.data = tensors.out;
    params.lse.data = tensors.lse;
    params.bias.data = const_cast<void*>(tensors.bias);
    const bool bias_aligned = cuda::vector_aligned({tensors.bias});
    if (!bias_aligned) params.bias_vectors = 0;
    const bool vectors = vectors_ && (bias_aligned || !only_aligned_bias_) &&
                         cuda::vector_aligned({tensors.q, tensors.k, tensors.v, tensors.out});
    if (vectors && shared_tiles_ > 0) {
      params.parts_done = static_cast<std::int32_t*>(workspace.data);
      params.parts =
          reinterpret_cast<float*>(static_cast<std::byte*>(workspace.data) + done_bytes_);
      cuda::check(cuda::driver().cuMemsetD8Async(cuda::address(params.parts_done), 0, done_bytes_,
                                                 static_cast<cuda::CUstream>(stream.handle)),
                  "cuMemsetD8Async");
    }
    if (vectors && hopper_) {
      HopperForwardParams with_maps{};
      if (const auto maps = maps_.of_run({tensors.q, tensors.k, tensors.v})) {
        with_maps.q = (*maps)[0];
        with_maps.k = (*maps)[1];
        with_maps.v = (*maps)[2];
        with_maps.has_maps = 1;
        with_maps.k_begins = half_sectors(params.k, params.problem.head_dim, width());
        with_maps.v_begins = half_sectors(params.v, params.problem.value_dim, width());
      }
      params.problem.sequences = hopper_->sequences.list(stream, tensors, workspace.data);
      with_maps.all = of_tiles(params, *hopper_);
      hopper_->kernel.launch(stream, with_maps);
      return;
    }
    const Tiles& tiles = vectors ? *by_vectors_ : *by_elements_;
    params.problem.sequences = tiles.sequences.list(stream, tensors, workspace.data);
    tiles.kernel.launch(stream, of_tiles(params, tiles));
  }

  template <class Params>
  static ForwardParams of_tiles(ForwardParams params, const TilesOf<Params>& tiles) {
    params.q_tiles = tiles.q_tiles;
    params.pair_group = tiles.pair_group;
    params.units = tiles.units;
    params.unit_tiles = tiles.unit_tiles;
    params.cycle_units = tiles.cycle_units;
    params.problem.blocks = tiles.blocks.get();
    return params;
  }

  AttentionSizes sizes_;
  ForwardParams params_{};
  std::optional<Tiles> by_vectors_, by_elements_;
  std::optional<HopperTiles> hopper_;  // in place of by_vectors_
  HeadMaps<3> maps_;                   // q, k and v
  std::int64_t shared_tiles_ = 0;      // of all pairs
  std::size_t done_bytes_ = 0;
  bool vectors_ = false, only_aligned_bias_ = false, empty_ = false;
};

template <bool kHopper>
Body make_forward(const AttentionProblem& problem, const Device& device) {
  const cuda::DeviceInfo& info = cuda::device_info(device.index);
  const AttentionProblem shared = with_shared_keys(problem, info);
  const AttentionSizes sizes = sizes_of(problem);
  const int width = head_width(static_cast<int>(sizes.head_dim), static_cast<int>(sizes.value_dim));
  const DType dtype = problem.q.dtype;
  const int arch = cuda::compile_arch(info);
  const auto has_blocks = [&] {
    const ForwardKind kind = blocks_kind(shared, width, kHopper);
    return kHopper && has_hopper_kernel(dtype, width, kind)
               ? cuda::can_have<HopperForwardParams>(hopper_forward_kernel(dtype, width, kind),
                                                     info)
               : cuda::can_have<ForwardParams>(forward_kernel(dtype, width, kind, arch), info);
  };
  const bool serves = problem.blocks.given() || !shared.blocks.given() || has_blocks();
  return cuda::make_body<Forward>(serves ? shared : problem, device, kHopper);
}

}  // namespace

Body make_cuda_forward(const AttentionProblem& problem, const Device& device, Pass pass) {
  return make_with_aligned_rows(problem, device, pass, make_forward<false>);
}

Body make_cuda_sm90_forward(const AttentionProblem& problem, const Device& device, Pass pass) {
  return make_with_aligned_rows(problem, device, pass, make_forward<true>);
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_forward_kernels(int arch) {
  return attention::forward_kernels(arch);
}

}  // namespace pullback::cuda

// The backward pass on CUDA. Launches: the sequences of a varlen problem, delta of every row, the
// gradients, and d_bias where it is a sum.
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "ops/attention/cuda/aligned_rows.hpp"
#include "ops/attention/cuda/backward_kernels.hpp"
#include "ops/attention/cuda/bias_chain.hpp"
#include "ops/attention/cuda/block_backward.hpp"
#include "ops/attention/cuda/dense_work.hpp"
#include "ops/attention/cuda/few_queries.hpp"
#include "ops/attention/cuda/head_maps.hpp"
#include "ops/attention/cuda/hopper_backward.hpp"
#include "ops/attention/cuda/masked_work.hpp"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {
namespace {

using Params = BackwardParams;
using Kernel = BackwardKernel;

class TileBackward final : public BackwardBody {
 public:
  // hopper: with its own kernel, where that serves.
  TileBackward(const AttentionProblem& problem, const Device& device, int arch, bool hopper)
      : TileBackward(problem, device, arch,
                     {hopper && hopper_serves(problem, cuda::device_info(device.index)),
                      hopper && hopper_sums_bias(problem)}) {}

 private:
  // Written by the kernel of d_k; stepped: summed over the batch, in a launch an item or, by
  // Hopper's kernel, in a chain of items; or summed by its own kernel.
  enum class BiasPlan { none, written, stepped, summed };
  // What kernels for Hopper do: the gradients, and a d_bias that is summed.
  struct Hopper {
    bool gradients, bias;
  };

  TileBackward(const AttentionProblem& problem, const Device& device, int arch, Hopper hopper)
      : TileBackward(problem, device, arch, hopper,
                     hopper.gradients ? hopper_width(problem) : tensor_core_width(problem)) {}

  TileBackward(const AttentionProblem& problem, const Device& device, int arch, Hopper hopper,
               int width)
      : TileBackward(problem, device, arch, hopper, width,
                     tiles_of(problem.q.dtype, width, arch,
                              !hopper.gradients && has_small_blocks(problem))) {}

  TileBackward(const AttentionProblem& problem, const Device& device, int arch, Hopper hopper,
               int width, const BackwardTiles& tiles)
      : TileBackward(
            problem, device, arch, hopper, width, tiles,
            masked_work(problem, cuda::device_info(device.index), tiles, width, hopper.gradients)) {
  }

  TileBackward(const AttentionProblem& problem, const Device& device, int arch, Hopper hopper,
               int width, const BackwardTiles& tiles, const MaskedWork& masked)
      : BackwardBody(problem, device, tiles.queries, tiles.keys, masked.owners),
        tiles_(tiles),
        masked_(masked),
        only_all_(hopper.gradients),
        step_queries_(tiles.queries) {
    vectors_ = all_have_vector_rows(problem);
    row_vectors_ = has_vector_rows(problem.out) && has_vector_rows(problem.d_out);
    bias_vectors_ = problem.q.dtype != DType::f32 && has_vector_keys(problem.bias);
    d_bias_vectors_ = has_vector_keys(problem.d_bias);
    // One kind of terms, or none, in pieces of 16 bytes.
    only_vectors_ = vectors_ && (bias_vectors_ || !problem.bias.given()) && problem.softcap == 0 &&
                    term_count(problem) <= 1;
    const SeenBlocksTable& blocks = blocks_.get();
    params_.lines = blocks.given() ? blocks.lines : params_.q_tiles;
    pair_blocks_ = blocks.given() ? blocks.lists : params_.k_tiles;
    params_.turn_count = planes_ * params_.lines + pairs_ * blocks.shared_count * std::int64_t{2};
    stats_bytes_ = aligned(planes_ * params_.q_tiles * stats_bytes(tiles_.queries));
    if (bias_elements_ > 0) plan_bias(problem, width, arch, hopper.bias);
    if (only_all_) step_queries_ = hopper_tile_of(problem, width, stepped()).queries;
    turn_bytes_ = aligned(params_.turn_count * 4);
    plan_slices(problem, width);
    workspace_bytes = sequence_bytes_ + stats_bytes_ + turn_bytes_ + sum_bytes_ + key_sum_bytes_ +
                      bias_sum_bytes_;
    plan_kernels(problem, width, arch);
    description = fmt::format(
        "{}tensor cores{}: {} keys x {} queries at a time, sums in f32, in a fixed order: the same "
        "bits every run{}{}",
        only_all_ ? "Hopper's " : "",
        problem.q.dtype == DType::f32 ? ", each product as three of f16" : "", tiles_.keys,
        step_queries_,
        slice_pairs_ < pairs_
            ? fmt::format("; {} of {} key/value heads at a time", slice_pairs_, pairs_)
            : "",
        bias_plan_ == BiasPlan::summed ? "; d_bias from scores made once more" : "");
  }

  // The f32 sums of d_q: of as many heads at a time as fit 128 MiB or a twelfth of the tensors' own
  // bytes.
  void plan_slices(const AttentionProblem& problem, int width) {
    std::int64_t own = 0;
    for (const TensorSpec* spec : {&problem.q, &problem.k, &problem.v, &problem.out, &problem.d_out,
                                   &problem.d_q, &problem.d_k, &problem.d_v}) {
      own += spec->numel() * static_cast<std::int64_t>(size_of(spec->dtype));
    }
    const std::int64_t limit = std::max<std::int64_t>(std::int64_t{128} << 20, own / 12);
    const int sum_width = only_all_ ? hopper_tile_of(problem, width, stepped()).sum_width() : width;
    const std::int64_t pair_bytes =
        sizes_.group * params_.lines * tiles_.queries * sum_width * std::int64_t{4};
    // Of a chain whole batch items, of which those of several launches have one each.
    const std::int64_t unit = stepped() ? sizes_.kv_heads : 1;
    const std::int64_t units = std::max<std::int64_t>(pairs_ / unit, 1);
    const std::int64_t fit =
        stepped() && !only_all_
            ? 1
            : std::clamp<std::int64_t>(limit / std::max<std::int64_t>(pair_bytes * unit, 1), 1,
                                       units);
    slice_pairs_ = ceil_div(units, ceil_div(units, fit)) * unit;
    sum_bytes_ = aligned(slice_pairs_ * pair_bytes);
    key_sum_bytes_ = aligned(slice_pairs_ * blocks_.get().shared_count * 2 * tiles_.keys * width *
                             std::int64_t{4});
  }

  void plan_kernels(const AttentionProblem& problem, int width, int arch) {
    const DType dtype = problem.q.dtype;
    if (planes_ > 0 && params_.q_tiles > 0) {
      prepare_ = {prepare_kernel(dtype, tiles_), device_};
      set_grid(prepare_, planes_ * params_.q_tiles);
    }
    if (pairs_ > 0 && params_.k_tiles > 0) {
      const auto load = [&](auto& kernel, const TileKernel& found) {
        kernel = {found.kernel, device_, found.shared_bytes};
        set_grid(kernel, slice_pairs_ * pair_blocks_);
        kernel.shape.cluster = static_cast<unsigned>(masked_.owners.blocks);
        kernel.shape.programmatic = device_.major >= 9 && params_.q_tiles > 0;
      };
      const auto kernel_of = [&](Features features) {
        return tile_kernel(dtype, width, features, arch,
                           tiles_.keys != tiles_of(dtype, width, arch).keys);
      };
      load(general_,
           kernel_of(problem.blocks.given() ? Features::general_blocks : Features::general));
      if (only_all_) {
        const HopperBackwardKind kind = hopper_kind(problem, stepped());
        const int queries = hopper_backward_tile(kind, width).part_queries();
        maps_ = HeadMaps<2>({{{problem.q, queries}, {problem.d_out, queries}}});
        load(hopper_kernel_, hopper_backward_kernel(dtype, kind, width));
      } else if (only_vectors_) {
        const Features features = problem.bias.given()
                                      ? stepped() ? Features::bias_sum : Features::bias
                                  : problem.blocks.given() ? Features::blocks
                                  : problem.dropout > 0    ? Features::dropout
                                                           : Features::plain;
        const TileKernel own = kernel_of(features);
        only_vectors_ = cuda::can_have<Params>(own.kernel, device_);
        if (only_vectors_) load(aligned_, own);
      }
      params_.pair_group = static_cast<std::int32_t>(
          problem.blocks.given() ? masked_.pair_group : dense_work(problem).pair_group());
    }
  }

  bool stepped() const { return bias_plan_ == BiasPlan::stepped; }

  DenseWork dense_work(const AttentionProblem& problem) const {
    return {.problem = problem,
            .sizes = sizes_,
            .pairs = pairs_,
            .rows = std::int64_t{params_.q_tiles} * tiles_.queries,
            .k_tiles = params_.k_tiles,
            .keys = tiles_.keys,
            .step_queries = step_queries_,
            .hopper = only_all_,
            .chained = params_.chain_items > 0,
            .flight = std::int64_t{device_.multiprocessors} * (only_all_ ? 1 : tiles_.blocks)};
  }

  void plan_bias(const AttentionProblem& problem, int width, int arch, bool hopper) {
    const DType dtype = problem.q.dtype;
    const BiasShape& shape = params_.bias_shape;
    const bool whole = shape.batch == sizes_.batch && shape.head == sizes_.heads &&
                       shape.query == sizes_.total_query && shape.key == sizes_.total_key;
    const bool no_work = planes_ == 0 || sizes_.total_query == 0 || sizes_.total_key == 0;
    constexpr std::int64_t kMostHelpers = 4096;
    const auto helper = [&](std::string_view what) {
      Kernel kernel(bias_helper(dtype, what), device_);
      set_grid(kernel, std::min(ceil_div(bias_elements_, kRowThreads), kMostHelpers));
      return kernel;
    };
    // Over the batch alone: an item after the other, where that fills the device. Each has to meet
    // the same tiles.
    const std::size_t step_bytes = aligned(sizes_.heads * params_.q_tiles * params_.k_tiles *
                                           tiles_.queries * tiles_.keys * 4);
    bias_sums_fit_ = step_bytes <= static_cast<std::size_t>(device_.l2_bytes) / 2;
    const int step_queries =  // of the kernel that would sum
        only_all_ ? hopper_tile_of(problem, width, true).queries : tiles_.queries;
    const std::int64_t steps = ceil_div(sizes_.total_query, step_queries) * sizes_.group;
    const std::int64_t key_tiles = sizes_.kv_heads * params_.k_tiles;
    const bool steps_pay =
        !whole && !problem.blocks.given() && shape.head == sizes_.heads &&
        shape.query == sizes_.total_query && shape.key == sizes_.total_key &&
        (only_all_
             ? chains_pay(sizes_.batch, key_tiles, steps, device_.multiprocessors,
                          bias_sums_fit_) &&
                   cuda::can_have<HopperBackwardParams>(
                       hopper_backward_kernel(dtype, hopper_kind(problem, true), width).kernel,
                       device_)
             : key_tiles >= device_.multiprocessors);
    if (whole || steps_pay || no_work) {
      bias_plan_ = whole || no_work ? BiasPlan::written : BiasPlan::stepped;
      if (stepped()) {
        bias_sum_bytes_ = step_bytes;
        if (only_all_) {
          params_.chain_items = static_cast<std::int32_t>(sizes_.batch);
          params_.turn_count += pairs_ * params_.k_tiles;
        }
      }
      clears_bias_ = no_work || problem.mask.left != BandMask::kUnbounded ||
                     problem.mask.right != BandMask::kUnbounded || problem.blocks.given();
      if (clears_bias_) clear_bias_ = helper("clear_bias");
      return;
    }
    bias_plan_ = BiasPlan::summed;
    if (dtype == DType::f32) {
      bias_ = {{bias_kernel(dtype, width, arch), device_}, 1};
      set_grid(bias_.kernel, std::min<std::int64_t>(bias_elements_, kMostPlainBlocks));
      return;
    }
    const BiasTiles tiles = bias_tiles(width, arch);
    bias_ = bias_sum(bias_kernel(dtype, width, arch), tiles.shared_bytes(width), tiles.keys,
                     tiles.queries);
    if (hopper) {
      const HopperBiasTile tile = hopper_bias_tile(width, problem.dropout > 0);
      const cuda::OpKernel kernel = hopper_bias_kernel(dtype, tile, width, arch);
      if (cuda::can_have<Params>(kernel, device_)) {
        aligned_bias_ = bias_sum(kernel, tile.shared_bytes(), tile.keys, tile.queries());
      }
    }
    const std::int32_t parts = std::max(bias_.parts, aligned_bias_.parts);
    if (parts > 1) {
      combine_bias_ = helper("combine_bias");
      bias_sum_bytes_ = aligned(parts * bias_elements_ * 4);
    }
  }

  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    Params params = begin(stream, tensors, workspace);
    std::byte* scratch = static_cast<std::byte*>(workspace.data) + sequence_bytes_;
    params.stats = scratch;
    params.turns = reinterpret_cast<std::int32_t*>(scratch + stats_bytes_);
    params.parts_done = params.turns + planes_ * params.lines;
    params.bias_turns = params.parts_done;  // one of them has no elements
    scratch += stats_bytes_ + turn_bytes_;
    params.sums = reinterpret_cast<float*>(scratch);
    params.key_sums = reinterpret_cast<float*>(scratch + sum_bytes_);
    params.bias_sums = reinterpret_cast<float*>(scratch + sum_bytes_ + key_sum_bytes_);
    params.row_vectors = row_vectors_ && cuda::vector_aligned({tensors.out, tensors.d_out});
    params.vectors =
        vectors_ && cuda::vector_aligned({tensors.q, tensors.k, tensors.v, tensors.d_out,
                                          tensors.d_q, tensors.d_k, tensors.d_v});
    params.bias_vectors = bias_vectors_ && cuda::vector_aligned({tensors.bias});
    params.d_bias_vectors = d_bias_vectors_ && cuda::vector_aligned({tensors.d_bias});
    if (planes_ > 0 && params.q_tiles > 0) prepare_.launch(stream, params);
    if (tensors.d_bias != nullptr && clears_bias_) clear_bias_.launch(stream, params);
    if (tensors.d_bias != nullptr && bias_plan_ == BiasPlan::summed) {
      const bool aligned = aligned_bias_.parts > 0 && params.vectors && params.bias_vectors;
      const BiasSum& sum = aligned ? aligned_bias_ : bias_;
      params.bias_parts = sum.parts;
      sum.kernel.launch(stream, params);
      if (sum.parts > 1) combine_bias_.launch(stream, params);
    }
    if (bias_plan_ == BiasPlan::summed) params.d_bias.data = nullptr;
    const bool any = tensors.d_q || tensors.d_k || tensors.d_v || params.d_bias.data;
    if (!any || pairs_ == 0 || params.k_tiles == 0) return;
    const bool vectors = params.vectors && (tensors.bias == nullptr || params.bias_vectors);
    const bool all = tensors.d_q && tensors.d_k && tensors.d_v;
    if (only_all_ && all && vectors) {
      HopperBackwardParams with_maps{};
      if (const auto maps = maps_.of_run({tensors.q, tensors.d_out})) {
        with_maps.q = (*maps)[0];
        with_maps.d_out = (*maps)[1];
        with_maps.has_maps = 1;
      }
      launch_slices(params, slice_pairs_, hopper_kernel_, stream,
                    [&](const Params& slice) -> const HopperBackwardParams& {
                      with_maps.all = slice;
                      return with_maps;
                    });
      return;
    }
    launch_slices(params, stepped() ? sizes_.kv_heads : slice_pairs_,
                  only_vectors_ && vectors && !only_all_ ? aligned_ : general_, stream,
                  std::identity());
  }

  template <class Kernel, class Wrap>
  void launch_slices(Params params, std::int64_t slice_pairs, Kernel kernel, Stream stream,
                     const Wrap& wrap) const {
    for (std::int64_t first = 0; first < pairs_; first += slice_pairs) {
      params.first_pair = first;
      params.pairs = static_cast<std::int32_t>(std::min(slice_pairs, pairs_ - first));
      if (stepped()) {
        params.bias_step = step_of(first);
        if (only_all_) set_chain(params);
      }
      kernel.shape.grid[0] = static_cast<unsigned>(params.pairs * pair_blocks_);
      kernel.launch(stream, wrap(params));
    }
  }

  BiasStep step_of(std::int64_t first_pair) const {
    if (first_pair == 0) return BiasStep::first;
    return first_pair + sizes_.kv_heads == pairs_ ? BiasStep::last : BiasStep::middle;
  }
  void set_chain(Params& params) const {
    const std::int64_t items = items_together(params.pairs / sizes_.kv_heads, bias_sums_fit_);
    const std::int64_t heads =
        largest_divisor(sizes_.kv_heads, std::max<std::int64_t>(params_.pair_group / items, 1));
    params.chain_heads = static_cast<std::int32_t>(heads);
    params.pair_group = static_cast<std::int32_t>(heads * items);
  }

  BackwardTiles tiles_;
  MaskedWork masked_;
  std::int64_t slice_pairs_ = 0, pair_blocks_ = 0;  // thread blocks of a pair
  std::size_t stats_bytes_ = 0, turn_bytes_ = 0, sum_bytes_ = 0, key_sum_bytes_ = 0;
  std::size_t bias_sum_bytes_ = 0;
  bool bias_vectors_ = false, d_bias_vectors_ = false;
  bool vectors_ = false, row_vectors_ = false, clears_bias_ = false, bias_sums_fit_ = false;
  // Of aligned_: rows in pieces of 16 bytes; all three gradients.
  bool only_vectors_ = false, only_all_ = false;
  int step_queries_;
  BiasPlan bias_plan_ = BiasPlan::none;
  Kernel prepare_, aligned_, general_, clear_bias_, combine_bias_;
  HopperKernel hopper_kernel_;
  HeadMaps<2> maps_;  // q and d_out
  BiasSum bias_, aligned_bias_;
};

template <bool kHopper>
Body make_backward(const AttentionProblem& problem, const Device& device) {
  const cuda::DeviceInfo& info = cuda::device_info(device.index);
  AttentionProblem shared = with_shared_keys(problem, info);
  if (shared.blocks.given() && !problem.blocks.given()) {
    const cuda::OpKernel kernel = tile_kernel(problem.q.dtype, tensor_core_width(problem),
                                              Features::general_blocks, cuda::compile_arch(info))
                                      .kernel;
    if (!cuda::can_have<Params>(kernel, info)) shared = problem;
  }
  if (kHopper && block_backward_serves(shared, info)) return make_block_backward(shared, device);
  return cuda::make_body<TileBackward>(shared, device, cuda::compile_arch(info), kHopper);
}

}  // namespace

Body make_cuda_sm90_backward(const AttentionProblem& problem, const Device& device, Pass pass) {
  return make_with_aligned_rows(problem, device, pass, make_backward<true>);
}

Body make_cuda_backward(const AttentionProblem& problem, const Device& device, Pass pass) {
  const int arch = cuda::compile_arch(cuda::device_info(device.index));
  const DType dtype = problem.q.dtype;
  const bool plain =
      dtype == DType::f64 ||
      (dtype == DType::f32 && split_tiles(tensor_core_width(problem), arch).keys == 0);
  if (plain) return make_plain_backward(problem, device);
  return make_with_aligned_rows(problem, device, pass, make_backward<false>);
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_backward_kernels(int arch) {
  return attention::backward_kernels(arch);
}

}  // namespace pullback::cuda

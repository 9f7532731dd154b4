// The backward pass of f32 and f64: delta of every row, then a kernel each for d_q, for d_k and
// d_v, and for d_bias.
#include <algorithm>

#include "ops/attention/cuda/backward_body.hpp"
#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {
namespace {

using Params = BackwardParams;
using Kernel = BackwardKernel;

// `what` is prepare, keys, queries or bias.
cuda::OpKernel plain_kernel(DType dtype, std::string_view what) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("attention_backward_plain_{}_{}", what, type),
          .file = "ops/attention/cuda/smxx_backward_plain.cuh",
          .function = what == "bias"
                          ? fmt::format("attention::plain_bias<{}, {}>", type, kPlainTile)
                          : fmt::format("attention::plain_{}<{}>", what, type),
          .parameters = kBackwardParams,
          .threads = kPlainThreads};
}

class PlainBackward final : public BackwardBody {
 public:
  PlainBackward(const AttentionProblem& problem, const Device& device)
      : BackwardBody(problem, device, kPlainTile, kPlainTile) {
    const DType dtype = problem.q.dtype;
    const std::int64_t q_tiles = planes_ * params_.q_tiles, k_tiles = pairs_ * params_.k_tiles;
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    workspace_bytes = sequence_bytes_ + aligned(q_tiles * (2 * kPlainTile * bytes + 16));
    const auto add = [&](Kernel& kernel, std::string_view what, std::int64_t blocks) {
      if (blocks == 0) return;
      kernel = {plain_kernel(dtype, what), device_};
      set_grid(kernel, blocks);
    };
    add(prepare_, "prepare", q_tiles);
    add(queries_, "queries", q_tiles);
    add(keys_, "keys", k_tiles);
    add(bias_, "bias", std::min<std::int64_t>(bias_elements_, kMostPlainBlocks));
    has_queries_ = q_tiles > 0;
    has_keys_ = k_tiles > 0;
    description = fmt::format(
        "a warp a key, query or bias element; sums in {}: the same bits "
        "every run",
        dtype == DType::f64 ? "f64" : "f32");
  }

 private:
  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    Params params = begin(stream, tensors, workspace);
    params.stats = static_cast<std::byte*>(workspace.data) + sequence_bytes_;
    if (has_queries_) prepare_.launch(stream, params);
    if (has_queries_ && tensors.d_q) queries_.launch(stream, params);
    if (has_keys_ && (tensors.d_k || tensors.d_v)) keys_.launch(stream, params);
    if (bias_elements_ > 0 && tensors.d_bias) bias_.launch(stream, params);
  }

  bool has_queries_ = false, has_keys_ = false;
  Kernel prepare_, queries_, keys_, bias_;
};

}  // namespace

Body make_plain_backward(const AttentionProblem& problem, const Device& device) {
  return cuda::make_body<PlainBackward>(problem, device);
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_plain_backward_kernels(int arch) {
  using namespace attention;
  std::vector<KernelSource> kernels;
  const bool no_tiles = std::ranges::any_of(
      kHeadWidths, [arch](int width) { return split_tiles(split_width(width), arch).keys == 0; });
  for (const DType dtype : {DType::f32, DType::f64}) {
    if (dtype == DType::f32 && !no_tiles) continue;
    for (const std::string_view what : {"prepare", "keys", "queries", "bias"}) {
      kernels.push_back(op_kernel<Params>(plain_kernel(dtype, what), arch));
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

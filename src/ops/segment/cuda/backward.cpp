// Backward on CUDA: a pass over the rows, after a reduction where what the pass needs was not
// saved.
#include <fmt/format.h>

#include <utility>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

cuda::OpKernel product_kernel(const std::string& name, const std::string& function) {
  return {.name = "segment_" + name,
          .file = "ops/segment/cuda/smxx_product.cuh",
          .function = "segment_cuda::" + function,
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .constants = {{"segment_cuda::kProductRows", kProductRows}}};
}
cuda::OpKernel product_rows_kernel(DType dtype, bool store) {
  const std::string_view type = cuda::device_type(dtype);
  return product_kernel(fmt::format("product_{}_{}", store ? "rows" : "slots", type),
                        fmt::format("product_rows<{}, {}>", type, store));
}
cuda::OpKernel product_carries_kernel() {
  return product_kernel("product_carries", fmt::format("product_carries<{}>", kProductColumns));
}

// Backward of prod: its three launches.
class ProductStage {
 public:
  ProductStage(const SegmentProblem& problem, const cuda::DeviceInfo& device, Setup& setup,
               WorkspaceLayout& layout)
      : slots_(product_rows_kernel(problem.x.dtype, false), device),
        carries_(product_carries_kernel(), device),
        rows_(product_rows_kernel(problem.x.dtype, true), device) {
    const std::int64_t columns = problem.x.shape[1];
    tiling_ = rows_tiling(problem, 1);
    if (columns == 1) tiling_.lane_bits = 0;
    tiling_.items = product_tile_items(tiling_.lane_bits);
    setup.allow(tiling_);
    slot_columns_ = Combining::slot_columns(problem);
    const auto bytes =
        static_cast<std::size_t>(tiles_of(problem, tiling_) * 2 * slot_columns_) * sizeof(double);
    slots_at_ = layout.take(bytes);
    carries_at_ = layout.take(bytes);
  }
  const Tiling& tiling() const { return tiling_; }

  void enqueue(const Launcher& launcher, Params p) const {
    p.slots = launcher.workspace + slots_at_;
    p.carries = launcher.workspace + carries_at_;
    p.slot_columns = slot_columns_;
    constexpr std::int64_t kParts = kThreads / kProductColumns;
    launcher.launch(slots_, p, p.tiles, tiling_.column_blocks);
    launcher.launch(carries_, p, (p.tiles + kParts - 1) / kParts,
                    (p.columns + kProductColumns - 1) / kProductColumns);
    launcher.launch(rows_, p, p.tiles, tiling_.column_blocks);
  }

 private:
  Kernel slots_, carries_, rows_;
  Tiling tiling_;
  std::int64_t slot_columns_;
  std::size_t slots_at_, carries_at_;
};

// What max and min have saved, and what stands for it where they have not.
struct Extremes {
  std::optional<Mapping> by_arg, by_mask, recomputed;
  std::optional<Reduction> mask_counts, recompute;
  std::optional<ReduceMap> ties;  // even ones, in place of the last two
  std::size_t statistic_at = 0, arg_at = 0;
};

class Backward final : public cuda::CudaBody<SegmentTensors> {
 public:
  Backward(const SegmentProblem& problem, const Device& device)
      : CudaBody(device), problem_(problem), setup_(problem, device_, layout_) {
    const DType dtype = problem.x.dtype;
    const auto element = size_of(dtype);
    const int length = vector_length(dtype);
    const std::size_t real = size_of(accumulation_dtype(dtype));
    const auto cells = static_cast<std::size_t>(problem.num_segments * problem.x.shape[1]);
    x_ = matrix(problem.x, element, length);
    out_ = matrix(problem.out, element, length);
    d_out_ = matrix(problem.d_out, element, length);
    d_x_ = matrix(problem.d_x, element, length);
    own_ = matrix(problem.num_segments, problem.x.shape[1], length);
    counts_ = matrix(problem.num_segments, problem.x.shape[1], 8);  // of bytes of the mask
    const auto map = [&](const MapOp& op, Specs rows) {
      map_.emplace(problem, device_, op, rows, setup_);
    };
    switch (problem.reduce) {
      case SegmentReduce::sum:
      case SegmentReduce::mean:
        map(spread_map(problem.reduce == SegmentReduce::mean, dtype), {&problem.d_x});
        break;
      case SegmentReduce::prod:
        product_.emplace(problem, device_, setup_, layout_);
        break;
      case SegmentReduce::logsumexp:
        map(exponential_map(dtype), {&problem.x, &problem.d_x});
        lse_ = out_is_lse(problem) ? out_ : matrix(problem.lse, real, length);
        if (!out_is_lse(problem)) {
          reduction_.emplace(problem, device_, reduce_op(problem.reduce, dtype), Specs{&problem.x},
                             setup_, layout_);
          statistic_at_ = layout_.take(cells * real);
        }
        break;
      case SegmentReduce::softmax: {
        ReduceOp reduce = row_product_sum(dtype);
        MapOp gradient = softmax_gradient_map(dtype);
        if (ReduceMap::serves(problem, device_, RowRule::softmax_gradient)) {
          softmax_.emplace(problem, device_, RowRule::softmax_gradient, setup_, layout_);
          reduce.wide = gradient.wide = false;  // what it does not take is rare
        }
        map(gradient, {&problem.out, &problem.d_out, &problem.d_x});
        reduction_.emplace(problem, device_, reduce, Specs{&problem.out, &problem.d_out}, setup_,
                           layout_);
        statistic_at_ = layout_.take(cells * real);
        break;
      }
      default:
        plan_extremes(cells);
    }
    setup_.reserve(layout_);
    workspace_bytes = layout_.bytes();
    description =
        fmt::format("a pass over tiles of rows{}, {} accumulation; the same bits every run",
                    softmax_     ? ", and one over segments that reach over several"
                    : reduction_ ? " after a reduction"
                                 : "",
                    name_of(accumulation_dtype(dtype)));
  }

 private:
  void plan_extremes(std::size_t cells) {
    const SegmentProblem& problem = problem_;
    const DType dtype = problem.x.dtype;
    const std::size_t real = size_of(accumulation_dtype(dtype));
    const bool even = problem.ties == Ties::even;
    own_arg_dtype_ = MaskRows::own_arg_dtype(problem);
    const int length = vector_length(dtype);
    if (problem.arg.given() && !even) {
      arg_ = matrix(problem.arg, size_of(problem.arg.dtype), length);
      extremes_.by_arg.emplace(problem, device_, arg_map(problem.arg.dtype, dtype),
                               Specs{&problem.d_x}, setup_);
    }
    if (problem.arg_mask.given()) {
      mask_ = matrix(problem.arg_mask, 1, 1);
      extremes_.by_mask.emplace(problem, device_, mask_map(even, dtype), Specs{&problem.d_x},
                                setup_);
      if (even) {
        extremes_.mask_counts.emplace(problem, device_, mask_count(dtype), Specs{}, setup_,
                                      layout_);
      }
    }
    if (even) {
      MapOp map = ties_map(dtype);
      if (ReduceMap::serves(problem, device_, RowRule::ties)) {
        extremes_.ties.emplace(problem, device_, RowRule::ties, setup_, layout_);
        map.wide = false;  // what it does not take is rare
      }
      extremes_.recompute.emplace(problem, device_, extreme_count(problem.reduce, dtype),
                                  Specs{&problem.x}, setup_, layout_);
      extremes_.recomputed.emplace(problem, device_, map, Specs{&problem.x, &problem.d_x}, setup_);
      extremes_.statistic_at = layout_.take(cells * real);
    } else {
      extremes_.recompute.emplace(problem, device_,
                                  extreme_place(problem.reduce, problem.ties == Ties::last, dtype),
                                  Specs{&problem.x}, setup_, layout_);
      extremes_.recomputed.emplace(problem, device_, arg_map(own_arg_dtype_, dtype),
                                   Specs{&problem.d_x}, setup_);
      extremes_.arg_at = layout_.take(cells * size_of(own_arg_dtype_));
    }
  }

  void enqueue(Stream stream, const SegmentTensors& tensors, Workspace workspace) const override {
    if (tensors.d_x == nullptr || problem_.x.shape[0] == 0 || problem_.x.shape[1] == 0) return;
    Launcher launcher = setup_.begin(stream, tensors, workspace.data);
    Params p = launcher.params;
    const auto own = [&](std::size_t at) { return bound(own_, launcher.workspace + at); };
    // What a reduction in front leaves for the pass over rows.
    const auto reduce = [&](const Reduction& reduction, const Matrix& to, std::size_t at) {
      p.result = bound(to, launcher.workspace + at);
      reduction.enqueue(setup_, launcher, p);
      p.statistic = std::exchange(p.result, {});
    };
    const auto map = [&](const Mapping& mapping) {
      p.d_out = bound(d_out_, tensors.d_out);
      p.d_x = bound(d_x_, tensors.d_x);
      mapping.enqueue(setup_, launcher, p);
    };
    switch (problem_.reduce) {
      case SegmentReduce::sum:
      case SegmentReduce::mean:
        map(*map_);
        return;
      case SegmentReduce::prod:
        p.x = bound(x_, tensors.x);
        p.d_out = bound(d_out_, tensors.d_out);
        p.d_x = bound(d_x_, tensors.d_x);
        product_->enqueue(launcher, setup_.tiled(launcher, p, product_->tiling()));
        return;
      case SegmentReduce::logsumexp:
        p.x = bound(x_, tensors.x);
        if (has_lse(problem_, tensors)) {
          p.statistic = bound(lse_, reduction_ ? tensors.lse : tensors.out);
        } else {
          p.result2 = own(statistic_at_);
          reduction_->enqueue(setup_, launcher, p);
          p.statistic = std::exchange(p.result2, {});
        }
        map(*map_);
        return;
      case SegmentReduce::softmax:
        p.x = bound(out_, tensors.out);
        p.y = bound(d_out_, tensors.d_out);
        if (softmax_) {
          Params q = p;
          q.d_x = bound(d_x_, tensors.d_x);
          q.result = own(statistic_at_);
          if (ReduceMap::takes(q)) {
            softmax_->enqueue(setup_, launcher, q);
            return;
          }
        }
        reduce(*reduction_, own_, statistic_at_);
        map(*map_);
        return;
      default:
        break;
    }
    const bool even = problem_.ties == Ties::even;
    switch (saved_of(problem_, tensors)) {
      case SegmentSaved::arg:
        p.arg = bound(arg_, tensors.arg);
        map(*extremes_.by_arg);
        return;
      case SegmentSaved::arg_mask:
        p.mask = bound(mask_, tensors.arg_mask);
        if (even) reduce(*extremes_.mask_counts, counts_, extremes_.statistic_at);
        map(*extremes_.by_mask);
        return;
      case SegmentSaved::nothing:
        p.x = bound(x_, tensors.x);
        if (even) {
          if (extremes_.ties) {
            Params q = p;
            q.out = bound(out_, tensors.out);
            q.d_out = bound(d_out_, tensors.d_out);
            q.d_x = bound(d_x_, tensors.d_x);
            q.result = own(extremes_.statistic_at);
            if (ReduceMap::takes(q)) {
              extremes_.ties->enqueue(setup_, launcher, q);
              return;
            }
          }
          reduce(*extremes_.recompute, own_, extremes_.statistic_at);
          p.out = bound(out_, tensors.out);
        } else {
          p.arg = own(extremes_.arg_at);
          p.arg_type = own_arg_dtype_ == DType::i64 ? ArgType::i64 : ArgType::i32;
          extremes_.recompute->enqueue(setup_, launcher, p);
          p.x = {};
        }
        map(*extremes_.recomputed);
        return;
    }
  }

  SegmentProblem problem_;
  WorkspaceLayout layout_;
  Setup setup_;
  std::optional<Mapping> map_;
  std::optional<ReduceMap> softmax_;
  std::optional<Reduction> reduction_;
  std::optional<ProductStage> product_;
  Extremes extremes_;
  Matrix x_{}, out_{}, lse_{}, d_out_{}, d_x_{}, own_{}, counts_{}, arg_{}, mask_{};
  DType own_arg_dtype_ = DType::i64;
  std::size_t statistic_at_ = 0;
};

}  // namespace
}  // namespace pullback::segment_cuda

namespace pullback {

std::unique_ptr<SegmentBody> make_segment_cuda(const SegmentProblem& problem, const Device& device,
                                               Pass pass) {
  if (pass == Pass::forward) return segment_cuda::make_forward(problem, device);
  return cuda::make_body<segment_cuda::Backward>(problem, device);
}

}  // namespace pullback

namespace pullback::cuda {

std::vector<KernelSource> segment_backward_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  for (const DType dtype : kDTypes) {
    for (const bool store : {false, true}) {
      all.push_back(op_kernel<Params>(product_rows_kernel(dtype, store), arch));
    }
  }
  all.push_back(op_kernel<Params>(product_carries_kernel(), arch));
  return all;
}

}  // namespace pullback::cuda

// Forward on CUDA: one reduction, then for softmax and for arg_mask a pass over the rows; or what
// does both in one.
#include <fmt/format.h>

#include <limits>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

class Forward final : public cuda::CudaBody<SegmentTensors> {
 public:
  Forward(const SegmentProblem& problem, const Device& device)
      : CudaBody(device), problem_(problem), setup_(problem, device_, layout_) {
    const DType dtype = problem.x.dtype;
    const auto element = size_of(dtype);
    const int length = vector_length(dtype);
    const bool softmax = problem.reduce == SegmentReduce::softmax;
    const bool even = problem.ties == Ties::even;
    const bool mask = problem.arg_mask.given();
    keeps_place_ = problem.arg.given() || (mask && !even);

    ReduceOp op = keeps_place_ ? extreme_place(problem.reduce, problem.ties == Ties::last, dtype)
                               : reduce_op(problem.reduce, dtype);
    if (softmax && ReduceMap::serves(problem, device_, RowRule::softmax)) {
      softmax_.emplace(problem, device_, RowRule::softmax, setup_, layout_);
      op.wide = false;  // what it does not take is rare
    }
    if (mask && MaskTiles::serves(problem, device_)) {
      mask_tiles_.emplace(problem, device_, setup_, layout_);
    }
    reduction_.emplace(problem, device_, op, Specs{&problem.x}, setup_, layout_);
    x_ = matrix(problem.x, element, length);
    out_ = matrix(problem.out, element, length);
    const auto cells = static_cast<std::size_t>(problem.num_segments * problem.x.shape[1]);
    own_ = matrix(problem.num_segments, problem.x.shape[1], length);
    if (softmax) {
      MapOp map = softmax_map(dtype);
      map.wide = op.wide;
      map_.emplace(problem, device_, map, Specs{&problem.x, &problem.out}, setup_);
      const std::size_t real = size_of(accumulation_dtype(dtype));
      statistic_at_ = layout_.take(cells * real);
      statistic2_at_ = layout_.take(cells * real);
    }
    if (problem.arg.given()) {
      arg_ = matrix(problem.arg, size_of(problem.arg.dtype), length);
      arg_dtype_ = problem.arg.dtype;
    }
    lse_ = matrix(problem.lse, size_of(accumulation_dtype(dtype)), length);
    if (mask) {
      mask_matrix_ = matrix(problem.arg_mask, 1, 1);
      mask_.emplace(problem, device_, setup_);
      // What the mask is made from, where the caller does not want it.
      if (even) {
        own_out_at_ = layout_.take(cells * element);
      } else {
        own_arg_dtype_ = MaskRows::own_arg_dtype(problem);
        own_arg_at_ = layout_.take(cells * size_of(own_arg_dtype_));
      }
    }
    setup_.reserve(layout_);
    workspace_bytes = layout_.bytes();
    description = fmt::format(
        "tiles of {} rows and segment ends, {} accumulation in an order that follows from the "
        "offsets: the same bits every run",
        (softmax_      ? softmax_->tiling()
         : mask_tiles_ ? mask_tiles_->tiling()
                       : reduction_->tiling())
            .items,
        name_of(accumulation_dtype(dtype)));
  }

 private:
  void enqueue(Stream stream, const SegmentTensors& tensors, Workspace workspace) const override {
    const bool softmax = problem_.reduce == SegmentReduce::softmax;
    if (tensors.out == nullptr && tensors.arg == nullptr && tensors.arg_mask == nullptr &&
        tensors.lse == nullptr) {
      return;
    }
    if (problem_.x.shape[1] == 0) return;
    Launcher launcher = setup_.begin(stream, tensors, workspace.data);
    Params p = launcher.params;
    p.x = bound(x_, tensors.x);
    p.empty_value = empty_value(problem_);
    p.mean = problem_.reduce == SegmentReduce::mean;
    const bool mask = tensors.arg_mask != nullptr;
    // Places of u8 do not tell the mask of all rows.
    const bool short_arg = mask && arg_dtype_ == DType::u8 && problem_.ties != Ties::even;
    const bool own_arg = tensors.arg == nullptr || short_arg;
    const DType arg_dtype = own_arg ? own_arg_dtype_ : arg_dtype_;
    p.arg_type = arg_dtype == DType::i64   ? ArgType::i64
                 : arg_dtype == DType::i32 ? ArgType::i32
                                           : ArgType::u8;
    const auto own = [&](std::size_t at) { return bound(own_, launcher.workspace + at); };
    if (softmax) {
      p.result = own(statistic_at_);
      p.result2 = own(statistic2_at_);
      if (softmax_) {
        Params q = p;
        q.d_x = bound(out_, tensors.out);
        if (ReduceMap::takes(q)) {
          softmax_->enqueue(setup_, launcher, q);
          return;
        }
      }
    } else {
      p.result = bound(out_, tensors.out);
      p.result2 = bound(lse_, tensors.lse);
    }
    if (!own_arg) {
      p.arg = bound(arg_, tensors.arg);
    } else if (mask && keeps_place_ && problem_.ties != Ties::even) {
      p.arg = own(own_arg_at_);
    }
    if (mask && problem_.ties == Ties::even && tensors.out == nullptr) {
      p.result = own(own_out_at_);
    }
    const auto with_mask = [&] {
      Params q = p;
      q.out = p.result;
      q.mask = bound(mask_matrix_, tensors.arg_mask);
      return q;
    };
    if (mask && mask_tiles_ && mask_tiles_->takes(p)) {
      mask_tiles_->enqueue(setup_, launcher, with_mask());
      return;
    }
    reduction_->enqueue(setup_, launcher, p);
    if (softmax) {
      p.statistic = p.result;
      p.statistic2 = p.result2;
      p.d_x = bound(out_, tensors.out);
      map_->enqueue(setup_, launcher, p);
    }
    if (mask) mask_->enqueue(setup_, launcher, with_mask(), own_arg);
    if (short_arg && tensors.arg != nullptr) {
      p.arg = bound(arg_, tensors.arg);
      p.arg_type = ArgType::u8;
      launcher.overlapping = false;  // the mask's rows read what is written anew
      reduction_->enqueue(setup_, launcher, p);
    }
  }

  SegmentProblem problem_;
  WorkspaceLayout layout_;
  Setup setup_;
  std::optional<ReduceMap> softmax_;
  std::optional<Reduction> reduction_;
  std::optional<Mapping> map_;
  std::optional<MaskTiles> mask_tiles_;
  std::optional<MaskRows> mask_;
  Matrix x_{}, out_{}, lse_{}, arg_{}, mask_matrix_{}, own_{};
  DType arg_dtype_ = DType::i64, own_arg_dtype_ = DType::i64;
  bool keeps_place_ = false;
  std::size_t statistic_at_ = 0, statistic2_at_ = 0, own_out_at_ = 0, own_arg_at_ = 0;
};

}  // namespace

std::unique_ptr<SegmentBody> make_forward(const SegmentProblem& problem, const Device& device) {
  return cuda::make_body<Forward>(problem, device);
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

// All that it launches are in the lists of its stages.
std::vector<KernelSource> segment_forward_kernels(int) { return {}; }

}  // namespace pullback::cuda

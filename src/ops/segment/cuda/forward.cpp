// Forward on CUDA: one reduction, then for softmax and for arg_mask a pass over the rows.
#include <fmt/format.h>

#include <limits>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

cuda::OpKernel mask_kernel(DType dtype, DType arg, bool even) {
  return {.name = fmt::format("segment_mask_{}_{}", even ? "even" : name_of(arg),
                              cuda::device_type(dtype)),
          .file = "ops/segment/cuda/smxx_mask.cuh",
          // Even ties are found by their values.
          .function = fmt::format("segment_cuda::write_mask<{}, {}, {}>", cuda::device_type(dtype),
                                  cuda::device_type(even ? DType::i64 : arg), even),
          .parameters = "segment_cuda::Params",
          .threads = kThreads,
          .constants = {{"segment_cuda::kMaskTileItems", kMaskTileItems}}};
}
constexpr Tiling kMaskTiling{.items = kMaskTileItems};

double empty_value(const SegmentProblem& problem) {
  if (problem.empty == EmptySegment::zero) return 0;
  if (problem.empty == EmptySegment::nan) return std::numeric_limits<double>::quiet_NaN();
  switch (problem.reduce) {
    case SegmentReduce::prod:
      return 1;
    case SegmentReduce::max:
    case SegmentReduce::logsumexp:
      return -std::numeric_limits<double>::infinity();
    case SegmentReduce::min:
      return std::numeric_limits<double>::infinity();
    default:
      return 0;
  }
}

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
    if (softmax && SoftmaxTiles::serves(problem, Pass::forward)) {
      softmax_.emplace(problem, device_, Pass::forward, setup_, layout_);
      op.wide = false;  // what it does not take is rare
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
      // u8 counts too few places for what the caller does not see.
      own_arg_dtype_ = arg_dtype_ == DType::u8 ? DType::i64 : arg_dtype_;
    }
    lse_ = matrix(problem.lse, size_of(accumulation_dtype(dtype)), length);
    if (mask) {
      mask_matrix_ = matrix(problem.arg_mask, 1, 1);
      setup_.allow(kMaskTiling);
      mask_ = {mask_kernel(dtype, arg_dtype_, even), device_};
      own_mask_ = {mask_kernel(dtype, own_arg_dtype_, even), device_};
      // What the mask is made from, where the caller does not want it.
      if (even) {
        own_out_at_ = layout_.take(cells * element);
      } else {
        own_arg_at_ = layout_.take(cells * size_of(own_arg_dtype_));
      }
    }
    setup_.reserve(layout_);
    workspace_bytes = layout_.bytes;
    description = fmt::format(
        "tiles of {} rows and segment ends, {} accumulation in an order that follows from the "
        "offsets: the same bits every run",
        (softmax_ ? softmax_->tiling() : reduction_->tiling()).items,
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
    const bool own_arg = tensors.arg == nullptr;
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
        if (SoftmaxTiles::takes(q)) {
          softmax_->enqueue(setup_, launcher, q, reduction_->combining());
          return;
        }
      }
    } else {
      p.result = bound(out_, tensors.out);
      p.result2 = bound(lse_, tensors.lse);
    }
    const bool mask = tensors.arg_mask != nullptr;
    if (!own_arg) {
      p.arg = bound(arg_, tensors.arg);
    } else if (mask && keeps_place_ && problem_.ties != Ties::even) {
      p.arg = own(own_arg_at_);
    }
    if (mask && problem_.ties == Ties::even && tensors.out == nullptr) {
      p.result = own(own_out_at_);
    }
    reduction_->enqueue(setup_, launcher, p);
    if (softmax) {
      p.statistic = p.result;
      p.statistic2 = p.result2;
      p.d_x = bound(out_, tensors.out);
      map_->enqueue(setup_, launcher, p);
    }
    if (mask) {
      Params q = setup_.tiled(launcher, p, kMaskTiling);
      q.out = p.result;
      q.mask = bound(mask_matrix_, tensors.arg_mask);
      launcher.launch(own_arg ? own_mask_ : mask_, q, q.tiles, 1);
    }
  }

  SegmentProblem problem_;
  Layout layout_;
  Setup setup_;
  std::optional<SoftmaxTiles> softmax_;
  std::optional<Reduction> reduction_;
  std::optional<Mapping> map_;
  Kernel mask_, own_mask_;  // from an arg of the caller, or of the workspace
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

std::vector<KernelSource> segment_forward_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all;
  const auto add = [&](const OpKernel& kernel) { all.push_back(op_kernel<Params>(kernel, arch)); };
  for (const DType dtype : kDTypes) {
    for (const DType arg : {DType::i64, DType::i32, DType::u8}) {
      add(mask_kernel(dtype, arg, false));
    }
    add(mask_kernel(dtype, DType::i64, true));
  }
  return all;
}

}  // namespace pullback::cuda

#include "ops/attention/cuda/bias_rows.hpp"

#include <algorithm>
#include <bit>

#include "core/workspace.hpp"
#include "cuda/op_kernel.hpp"
#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/sequences.hpp"

namespace pullback::attention {
namespace {

// Pairs of a query and a key from which on the kernels' time is more than a launch.
constexpr std::int64_t kLeastWork = std::int64_t{1} << 21;

cuda::OpKernel copy_kernel() {
  return {.name = "attention_copy_bias",
          .file = "ops/attention/cuda/smxx_bias_rows.cuh",
          .function = "attention::copy_bias",
          .parameters = "attention::BiasCopyParams",
          .threads = kBiasThreads};
}

// Not where all keys of a query have one bias: that has no rows.
bool needs_copy(const TensorSpec& spec) {
  return spec.given() && spec.numel() > 0 && bias_strides(spec).key != 0 && !has_vector_keys(spec);
}

// The same elements in rows of whole pieces of 16 bytes; what is expanded stays so.
struct AlignedRows {
  TensorSpec spec;
  BiasShape shape;  // without what is expanded
  std::size_t bytes;

  explicit AlignedRows(const TensorSpec& from) : spec(from), shape{} {
    const BiasStrides given = bias_strides(from);
    const std::int64_t piece = static_cast<std::int64_t>(16 / size_of(from.dtype));
    std::int64_t elements = 1;
    const auto take = [&](int dimension, std::int64_t given_stride, std::int64_t& size) {
      const bool own = given_stride != 0;
      size = own ? from.shape[dimension] : 1;
      spec.strides[dimension] = own ? elements : 0;
      elements *= size;
    };
    take(3, given.key, shape.key);
    elements = ceil_div(elements, piece) * piece;
    take(2, given.query, shape.query);
    take(1, given.head, shape.head);
    take(0, given.batch, shape.batch);
    bytes = workspace_aligned(static_cast<std::size_t>(elements) * size_of(from.dtype));
  }
};

class BiasRows final : public cuda::CudaBody<AttentionTensors> {
 public:
  BiasRows(const AttentionProblem& problem, const Device& device, Pass pass, BodyOf make)
      : CudaBody(device) {
    AttentionProblem inner = problem;
    const AlignedRows bias(problem.bias);
    bias_ = Copy(problem.bias, bias.spec, bias, device_);
    inner.bias = bias.spec;
    if (pass == Pass::backward && needs_copy(problem.d_bias)) {
      const AlignedRows d_bias(problem.d_bias);
      d_bias_ = Copy(d_bias.spec, problem.d_bias, d_bias, device_);
      inner.d_bias = d_bias.spec;
    }
    body_ = make(inner, device);
    workspace_bytes = bias_.bytes + d_bias_.bytes + body_->workspace_bytes;
    description = body_->description + "; the bias is copied to rows that begin at 16 bytes";
  }

 private:
  struct Copy {
    cuda::PlannedKernel<BiasCopyParams> kernel;
    BiasCopyParams params{};
    std::size_t bytes = 0;  // of the aligned rows; 0: there is no copy

    Copy() = default;
    Copy(const TensorSpec& from, const TensorSpec& to, const AlignedRows& rows,
         const cuda::DeviceInfo& device)
        : kernel(copy_kernel(), device), bytes(rows.bytes) {
      const BiasShape& shape = rows.shape;
      // As few threads of a row as have all of it, if any have.
      const auto parts = static_cast<std::uint64_t>(ceil_div(shape.key, kBiasPieces));
      const int bits = std::min<int>(std::bit_width(parts - 1), std::bit_width(kBiasThreads - 1u));
      const std::int64_t chunks = ceil_div(shape.key, std::int64_t{kBiasPieces} << bits);
      params = {.from = plane(from),
                .to = plane(to),
                .shape = shape,
                .lane_bits = bits,
                .chunks = static_cast<std::uint32_t>(chunks)};
      kernel.shape.grid[0] =
          static_cast<unsigned>(chunks * ceil_div(shape.query, kBiasThreads >> bits));
      constexpr std::int64_t kMost = 65535;
      kernel.shape.grid[1] = static_cast<unsigned>(std::min(shape.batch * shape.head, kMost));
    }
    void launch(Stream stream, const void* source, void* target) const {
      BiasCopyParams own = params;
      own.from.data = const_cast<void*>(source);
      own.to.data = target;
      kernel.launch(stream, own);
    }
  };

  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    AttentionTensors inner = tensors;
    std::byte* const scratch = static_cast<std::byte*>(workspace.data);
    const std::size_t own = bias_.bytes + d_bias_.bytes;
    bias_.launch(stream, tensors.bias, scratch);
    inner.bias = scratch;
    const bool wanted = d_bias_.bytes > 0 && tensors.d_bias != nullptr;
    if (wanted) inner.d_bias = scratch + bias_.bytes;
    body_->run(stream, inner, {scratch + own, workspace.bytes - own});
    if (wanted) d_bias_.launch(stream, inner.d_bias, tensors.d_bias);
  }

  Copy bias_, d_bias_;
  Body body_;
};

}  // namespace

Body make_with_bias_rows(const AttentionProblem& problem, const Device& device, Pass pass,
                         BodyOf make) {
  const AttentionSizes sizes = sizes_of(problem);
  const std::int64_t work = sizes.batch * sizes.heads * sizes.total_query * sizes.total_key;
  // Of a bias beside a block mask most may be hidden.
  const bool serves = size_of(problem.q.dtype) == 2 && !problem.blocks.given() &&
                      needs_copy(problem.bias) && work >= kLeastWork;
  return serves ? cuda::make_body<BiasRows>(problem, device, pass, make) : make(problem, device);
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_bias_rows_kernels(int arch) {
  return {op_kernel<attention::BiasCopyParams>(attention::copy_kernel(), arch)};
}

}  // namespace pullback::cuda

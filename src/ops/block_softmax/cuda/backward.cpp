// The backward pass on CUDA: d_x as in forward.cpp, and the gradients of the added terms from δ of
// every row, which a first pass leaves in the workspace. They come before d_x, which may overwrite
// d_y.
#include <fmt/format.h>

#include <limits>
#include <optional>
#include <string>

#include "ops/block_softmax/row_steps.hpp"

namespace pullback::block_softmax {
namespace {

using Params = BackwardParams;

Registers registers_of(DType dtype) { return backward_registers(static_cast<int>(size_of(dtype))); }

cuda::OpKernel rows_kernel(DType dtype, int arch) {
  const std::string_view type = cuda::device_type(dtype);
  const Registers registers = registers_of(dtype);
  return {.name = fmt::format("block_softmax_backward_rows_{}", type),
          .file = "ops/block_softmax/cuda/smxx_rows.cuh",
          .function = fmt::format("block_softmax::backward_rows<{}, {}>", type, registers.vectors),
          .parameters = "block_softmax::BackwardParams",
          .threads = kThreads,
          .blocks = blocks_for(registers.blocks, arch),
          .constants = {{"block_softmax::kWarps", kWarps}}};
}

cuda::OpKernel ring_kernel(DType dtype, int arch) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("block_softmax_backward_ring_{}", type),
          .file = "ops/block_softmax/cuda/smxx_ring.cuh",
          .function = fmt::format("block_softmax::backward_ring<{}>", type),
          .parameters = "block_softmax::BackwardParams",
          .threads = kRingThreads,
          .blocks = blocks_for(dtype == DType::f64 ? 1 : 2, arch),
          .constants = {{"block_softmax::kRingThreads", kRingThreads},
                        {"block_softmax::kRingBatch", kRingBatch}}};
}

cuda::OpKernel stream_kernel(DType dtype, bool vectors) {
  const std::string_view type = cuda::device_type(dtype);
  const std::size_t width = vectors ? 16 / size_of(dtype) : 1;
  return {.name = fmt::format("block_softmax_backward_stream_{}_{}", type, width),
          .file = "ops/block_softmax/cuda/smxx_stream.cuh",
          .function = fmt::format("block_softmax::backward_stream<{}, {}>", type, width),
          .parameters = "block_softmax::BackwardParams",
          .threads = kThreads,
          .constants = {{"block_softmax::kWarps", kWarps}}};
}

cuda::OpKernel term_kernel(DType dtype, std::string_view what, std::string_view width,
                           std::string_view parameters) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("block_softmax_{}_{}{}", what, type,
                              width.empty() ? "" : fmt::format("_{}", width)),
          .file = "ops/block_softmax/cuda/smxx_terms.cuh",
          .function = fmt::format("block_softmax::{}<{}{}>", what, type,
                                  width.empty() ? "" : fmt::format(", {}", width)),
          .parameters = parameters,
          .threads = kThreads,
          .constants = {{"block_softmax::kColumnChunk", kColumnChunk}}};
}
std::string width_of(DType dtype, bool vectors) {
  return std::to_string(vectors ? 16 / size_of(dtype) : 1);
}
cuda::OpKernel plane_kernel(DType dtype, bool vectors) {
  cuda::OpKernel kernel = term_kernel(dtype, "plane_gradient", width_of(dtype, vectors),
                                      "block_softmax::PlaneGradientParams");
  kernel.blocks = 4;  // most threads only store zeros: many have to wait for where blocks are
  return kernel;
}
constexpr std::string_view kColumnParams = "block_softmax::ColumnGradientParams";
cuda::OpKernel partial_kernel(DType dtype, bool vectors) {
  return term_kernel(dtype, "column_partial", width_of(dtype, vectors), kColumnParams);
}
cuda::OpKernel column_kernel(DType dtype) {
  return term_kernel(dtype, "column_gradient", {}, kColumnParams);
}

unsigned grid_of(std::int64_t items) {
  constexpr std::int64_t kMaxGrid = std::int64_t{1} << 20;
  return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, kMaxGrid));
}

class Backward final : public cuda::CudaBody<BlockSoftmaxTensors> {
 public:
  Backward(const BlockSoftmaxProblem& problem, const Device& device) : CudaBody(device) {
    const auto [Z, H, R, C, b, nnz] = sizes_of(problem);
    const BlockLayout& layout = *problem.layout;
    const DType dtype = problem.y.dtype;
    const std::int64_t block_rows = H * R;
    const bool term_gradients =
        problem.d_rpe.given() || problem.d_key_padding_mask.given() || problem.d_attn_mask.given();

    Params params{};
    params.y = block_tensor(problem.y);
    params.d_y = block_tensor(problem.d_y);
    params.d_x = block_tensor(problem.d_x);
    params.batches = Z;
    params.block = static_cast<std::int32_t>(b);
    params.scale = problem.scale;
    params.delta_batch = block_rows * b;

    if (Z > 0 && nnz > 0) {
      vectors_ =
          vector_layout(problem.y) && vector_layout(problem.d_y) && vector_layout(problem.d_x);
      if (vectors_) {
        const int arch = cuda::compile_arch(device_);
        const auto vectors = b / static_cast<std::int64_t>(16 / size_of(dtype));
        const cuda::OpKernel stream = stream_kernel(dtype, true);
        const RowChooser chooser(vectors, registers_of(dtype).vectors, 2, true, device_);
        vectors_ = vector_steps_.add_by_length(
            {rows_kernel(dtype, arch), ring_kernel(dtype, arch), stream}, layout, vectors, chooser,
            params, tables_, device_);
        if (vectors_ && term_gradients) {
          vector_delta_.add_stream(stream, layout, vectors, params, tables_, device_);
        }
      }
      element_steps_.add_stream(stream_kernel(dtype, false), layout, b, params, tables_, device_);
    }
    if (term_gradients) plan_term_gradients(problem, block_rows);
    tables_.upload(device_);
    for (RowSteps<Params>* steps : {&vector_steps_, &vector_delta_, &element_steps_}) {
      steps->resolve(tables_);
    }
    resolve_term_gradients();
    description = fmt::format(
        "rows grouped by length: {}{}; sums in {}, in a fixed order: the same bits every run",
        vectors_ ? fmt::format(
                       "in registers of 2 to {} threads up to {} KiB, longer ones in shared memory "
                       "as far as they fit",
                       kThreads, kThreads * registers_of(dtype).vectors * 16 / 1024)
                 : "read twice, element by element",
        term_gradients ? "; gradients of added terms one reading each" : "",
        dtype == DType::f64 ? "f64" : "f32");
  }

 private:
  struct Plane {
    std::optional<cuda::PlannedKernel<PlaneGradientParams>> vectors;  // where all lie so
    cuda::PlannedKernel<PlaneGradientParams> elements;
    PlaneGradientParams params;
  };

  void plan_term_gradients(const BlockSoftmaxProblem& problem, std::int64_t block_rows) {
    const Sizes sizes = sizes_of(problem);
    const auto real_bytes = static_cast<std::int64_t>(problem.y.dtype == DType::f64 ? 8 : 4);
    delta_bytes_ =
        workspace_aligned(static_cast<std::size_t>(sizes.Z * block_rows * sizes.b * real_bytes));
    workspace_bytes = delta_bytes_;
    if (problem.d_rpe.given() || problem.d_attn_mask.given()) plan_planes(problem, block_rows);
    if (problem.d_key_padding_mask.given()) {
      plan_columns(problem, block_rows);
      workspace_bytes += workspace_aligned(
          static_cast<std::size_t>(sizes.Z * columns_.chunk_count * sizes.b * real_bytes));
    }
  }

  void plan_planes(const BlockSoftmaxProblem& problem, std::int64_t block_rows) {
    const auto [Z, H, R, C, b, nnz] = sizes_of(problem);
    constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max() - kThreads;
    if (b * C * b > kMost) {  // places in a block row have 32 bits
      fail(ErrorCode::unsupported, "block_softmax", "d_rpe and d_attn_mask",
           fmt::format("block rows of at most {} elements on a CUDA device", kMost),
           fmt::format("{}", b * C * b));
    }
    const BlockLayout& layout = *problem.layout;
    std::vector<BlockRow> rows;
    rows.reserve(static_cast<std::size_t>(block_rows));
    std::vector<std::int32_t> columns;
    columns.reserve(static_cast<std::size_t>(nnz));
    for (std::int64_t head = 0; head < H; ++head) {
      for (std::int64_t row = 0; row < R; ++row) {
        const auto blocks = layout.row(head, row);
        rows.push_back({static_cast<std::int64_t>(columns.size()),
                        static_cast<std::int32_t>(blocks.size()),
                        static_cast<std::int32_t>(head * R + row)});
        for (const auto& block : blocks) columns.push_back(block.column);
      }
    }
    PlaneGradientParams params{};
    params.y = block_tensor(problem.y);
    params.d_y = block_tensor(problem.d_y);
    params.delta_batch = block_rows * b;
    params.block_rows = tables_.add(std::span<const BlockRow>(rows));
    params.columns = tables_.add(std::span<const std::int32_t>(columns));
    params.batches = Z;
    params.heads = H;
    params.block_rows_per_head = R;
    params.block_columns = C;
    params.block = static_cast<std::int32_t>(b);
    const auto add = [&](Plane& plane, const TensorSpec& spec, int rank) {
      if (spec.numel() == 0) return;
      params.per_batch = rank == 4 && spec.shape[0] != 1;
      params.per_head = rank == 4 && spec.shape[1] != 1;
      params.batch = rank == 4 ? spec.strides[0] : 0;
      params.head = rank == 4 ? spec.strides[1] : 0;
      params.row = spec.strides[static_cast<std::size_t>(rank - 2)];
      params.column = spec.strides[static_cast<std::size_t>(rank - 1)];
      plane.params = params;
      const std::int64_t planes = (params.per_batch ? Z : 1) * (params.per_head ? H : 1);
      const auto load = [&](bool vectors) {
        const DType dtype = problem.y.dtype;
        const std::int64_t width = vectors ? 16 / static_cast<std::int64_t>(size_of(dtype)) : 1;
        const std::int64_t parts = (b * C * b / width + kThreads - 1) / kThreads;
        cuda::PlannedKernel<PlaneGradientParams> kernel(plane_kernel(dtype, vectors), device_);
        kernel.shape.grid[0] = static_cast<unsigned>(planes * R * parts);
        return kernel;
      };
      plane.elements = load(false);
      const auto length = static_cast<std::int64_t>(16 / size_of(problem.y.dtype));
      if (vectors_ && params.column == 1 && params.batch % length == 0 &&
          params.head % length == 0 && params.row % length == 0) {
        plane.vectors = load(true);
      }
    };
    if (problem.d_rpe.given()) add(d_rpe_, problem.d_rpe, 4);
    if (problem.d_attn_mask.given()) add(d_attn_mask_, problem.d_attn_mask, 2);
  }

  void plan_columns(const BlockSoftmaxProblem& problem, std::int64_t block_rows) {
    const auto [Z, H, R, C, b, nnz] = sizes_of(problem);
    const BlockLayout& layout = *problem.layout;
    std::vector<ColumnBlock> blocks;
    blocks.reserve(static_cast<std::size_t>(nnz));
    std::vector<ColumnChunk> chunks;
    std::vector<std::int32_t> first_chunk = {0};
    for (std::int64_t column = 0; column < C; ++column) {
      const std::size_t begin = blocks.size();
      for (std::int64_t head = 0; head < H; ++head) {
        for (const auto& block : layout.column(head, column)) {
          blocks.push_back({block.rank, static_cast<std::int32_t>(head * R + block.row), 0});
        }
      }
      for (std::size_t first = begin; first < blocks.size(); first += kColumnChunk) {
        const std::size_t count = std::min<std::size_t>(kColumnChunk, blocks.size() - first);
        chunks.push_back({static_cast<std::int64_t>(first), static_cast<std::int32_t>(count),
                          static_cast<std::int32_t>(column)});
      }
      first_chunk.push_back(static_cast<std::int32_t>(chunks.size()));
    }
    columns_.y = block_tensor(problem.y);
    columns_.d_y = block_tensor(problem.d_y);
    columns_.delta_batch = block_rows * b;
    columns_.blocks = tables_.add(std::span<const ColumnBlock>(blocks));
    columns_.chunks = tables_.add(std::span<const ColumnChunk>(chunks));
    columns_.first_chunk = tables_.add(std::span<const std::int32_t>(first_chunk));
    columns_.batches = problem.d_key_padding_mask.numel() == 0 ? 0 : Z;
    columns_.chunk_count = static_cast<std::int64_t>(chunks.size());
    columns_.block_columns = C;
    columns_.block = static_cast<std::int32_t>(b);
    columns_.batch = problem.d_key_padding_mask.strides[0];
    columns_.column = problem.d_key_padding_mask.strides[1];
    if (columns_.batches == 0) return;
    const DType dtype = problem.y.dtype;
    for (const bool vectors : {false, true}) {
      if (vectors && !vectors_) break;
      auto& kernel = partial_kernels_[vectors ? 1 : 0];
      kernel = {partial_kernel(dtype, vectors), device_};
      kernel.shape.grid[0] = grid_of(Z * columns_.chunk_count);
    }
    column_kernel_ = {column_kernel(dtype), device_};
    column_kernel_.shape.grid[0] = grid_of((Z * C * b + kThreads - 1) / kThreads);
  }

  void resolve_term_gradients() {
    for (Plane* plane : {&d_rpe_, &d_attn_mask_}) {
      tables_.resolve(plane->params.block_rows);
      tables_.resolve(plane->params.columns);
    }
    tables_.resolve(columns_.blocks);
    tables_.resolve(columns_.chunks);
    tables_.resolve(columns_.first_chunk);
  }

  void enqueue(Stream stream, const BlockSoftmaxTensors& tensors,
               Workspace workspace) const override {
    const bool vectors = vectors_ && cuda::vector_aligned({tensors.y, tensors.d_y, tensors.d_x});
    if (tensors.d_rpe || tensors.d_attn_mask || tensors.d_key_padding_mask) {
      for (const auto& step : vectors ? vector_delta_ : element_steps_) {
        launch_rows(stream, step, tensors, nullptr, workspace.data);
      }
      launch_plane(stream, d_rpe_, tensors, tensors.d_rpe, workspace.data, vectors);
      launch_plane(stream, d_attn_mask_, tensors, tensors.d_attn_mask, workspace.data, vectors);
      launch_columns(stream, tensors, workspace.data, vectors);
    }
    if (tensors.d_x == nullptr) return;
    for (const auto& step : vectors ? vector_steps_ : element_steps_) {
      launch_rows(stream, step, tensors, tensors.d_x, nullptr);
    }
  }

  static void launch_rows(Stream stream, const RowSteps<Params>::Step& step,
                          const BlockSoftmaxTensors& tensors, void* d_x, void* delta) {
    Params params = step.params;
    params.y.data = tensors.y;
    params.d_y.data = const_cast<void*>(tensors.d_y);
    params.d_x.data = d_x;
    params.delta = delta;
    step.kernel.launch(stream, params);
  }

  static void launch_plane(Stream stream, const Plane& plane, const BlockSoftmaxTensors& tensors,
                           void* gradient, const void* delta, bool vectors) {
    if (gradient == nullptr || plane.params.block == 0) return;
    PlaneGradientParams params = plane.params;
    params.y.data = tensors.y;
    params.d_y.data = const_cast<void*>(tensors.d_y);
    params.delta = delta;
    params.gradient = gradient;
    const bool by_vectors = vectors && plane.vectors && cuda::vector_aligned({gradient});
    (by_vectors ? *plane.vectors : plane.elements).launch(stream, params);
  }

  void launch_columns(Stream stream, const BlockSoftmaxTensors& tensors, void* workspace,
                      bool vectors) const {
    if (tensors.d_key_padding_mask == nullptr || columns_.batches == 0) return;
    ColumnGradientParams params = columns_;
    params.y.data = tensors.y;
    params.d_y.data = const_cast<void*>(tensors.d_y);
    params.delta = workspace;
    params.partial = static_cast<std::byte*>(workspace) + delta_bytes_;
    params.gradient = tensors.d_key_padding_mask;
    if (params.chunk_count > 0) partial_kernels_[vectors ? 1 : 0].launch(stream, params);
    column_kernel_.launch(stream, params);
  }

  DeviceTables tables_;
  RowSteps<Params> vector_steps_, vector_delta_, element_steps_;
  Plane d_rpe_{}, d_attn_mask_{};
  cuda::PlannedKernel<ColumnGradientParams> partial_kernels_[2], column_kernel_;  // by vectors: 1
  ColumnGradientParams columns_{};
  std::size_t delta_bytes_ = 0;
  bool vectors_ = false;
};

}  // namespace

std::unique_ptr<Body> make_cuda_backward(const BlockSoftmaxProblem& problem, const Device& device) {
  return cuda::make_body<Backward>(problem, device);
}

}  // namespace pullback::block_softmax

namespace pullback::cuda {

std::vector<KernelSource> block_softmax_backward_kernels(int arch) {
  using namespace block_softmax;
  std::vector<KernelSource> kernels;
  for (const DType dtype : kFloatingDTypes) {
    kernels.push_back(op_kernel<BackwardParams>(rows_kernel(dtype, arch), arch));
    kernels.push_back(op_kernel<BackwardParams>(ring_kernel(dtype, arch), arch));
    kernels.push_back(op_kernel<BackwardParams>(stream_kernel(dtype, true), arch));
    kernels.push_back(op_kernel<BackwardParams>(stream_kernel(dtype, false), arch));
    for (const bool vectors : {false, true}) {
      kernels.push_back(op_kernel<PlaneGradientParams>(plane_kernel(dtype, vectors), arch));
      kernels.push_back(op_kernel<ColumnGradientParams>(partial_kernel(dtype, vectors), arch));
    }
    kernels.push_back(op_kernel<ColumnGradientParams>(column_kernel(dtype), arch));
  }
  return kernels;
}

}  // namespace pullback::cuda

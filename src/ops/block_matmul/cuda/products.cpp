// The products of a pass on CUDA. f32, bf16 and f16 whose matrices have neighbours in memory and
// rows (or columns) that begin at multiples of 16 bytes: tensor cores, smxx_spread.cuh and
// smxx_sample.cuh. The rest: smxx_plain.cuh.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cuda/device_tables.hpp"
#include "cuda/op_kernel.hpp"
#include "ops/block_matmul/cuda/tuning.hpp"
#include "ops/block_matmul/schedule.hpp"
#include "pullback/error.hpp"

namespace pullback::block_matmul {
namespace {

bool on_tensor_cores(DType dtype) { return dtype != DType::f64; }
int element_bytes(DType dtype) { return static_cast<int>(size_of(dtype)); }

std::vector<std::pair<std::string_view, std::int64_t>> shared_constants() {
  return {{"block_matmul::kGroupRows", kGroupRows},
          {"block_matmul::kStepColumns", kStepColumns},
          {"block_matmul::kMostSteps", kMostSteps},
          {"block_matmul::kThreads", kThreads},
          {"block_matmul::kPlainThreads", kPlainThreads}};
}

std::string_view order_name(bool along) { return along ? "along" : "across"; }

cuda::OpKernel spread_kernel(DType dtype, int columns, bool sparse_along, bool in_along, int arch) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("block_matmul_spread_{}_{}_{}_{}", type, columns,
                              order_name(sparse_along), order_name(in_along)),
          .file = "ops/block_matmul/cuda/smxx_spread.cuh",
          .function = fmt::format("block_matmul::spread_tiles<{}, {}, {}, {}, {}>", type, columns,
                                  spread_stages(columns, arch), sparse_along, in_along),
          .parameters = "block_matmul::SpreadParams",
          .threads = kThreads,
          .blocks = kSpreadBlocks,
          .constants = shared_constants()};
}

cuda::OpKernel sample_kernel(DType dtype, int depth, bool left_along, bool right_along) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("block_matmul_sample_{}_{}_{}_{}", type, depth,
                              order_name(left_along), order_name(right_along)),
          .file = "ops/block_matmul/cuda/smxx_sample.cuh",
          .function = fmt::format("block_matmul::sample_tiles<{}, {}, {}, {}>", type, depth,
                                  left_along, right_along),
          .parameters = "block_matmul::SampleParams",
          .threads = kThreads,
          .blocks = sample_blocks(depth),
          .constants = shared_constants()};
}

cuda::OpKernel plain_kernel(DType dtype, std::string_view what, std::string_view function,
                            std::string_view parameters) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("block_matmul_{}_{}", what, type),
          .file = "ops/block_matmul/cuda/smxx_plain.cuh",
          .function = fmt::format("block_matmul::{}<{}>", function, type),
          .parameters = parameters,
          .threads = kPlainThreads,
          .constants = shared_constants()};
}
cuda::OpKernel plain_spread_kernel(DType dtype) {
  return plain_kernel(dtype, "spread_plain", "spread_plain", "block_matmul::SpreadParams");
}
cuda::OpKernel plain_sample_kernel(DType dtype) {
  return plain_kernel(dtype, "sample_plain", "sample_plain", "block_matmul::SampleParams");
}
cuda::OpKernel combine_kernel(DType dtype) {
  return plain_kernel(dtype, "combine", "combine", "block_matmul::CombineParams");
}

// Whether all steps keep the 16-byte alignment of the tensor's beginning.
bool aligned_steps(DType dtype, std::initializer_list<std::int64_t> steps) {
  const auto length = static_cast<std::int64_t>(16 / size_of(dtype));
  return std::ranges::all_of(steps, [&](std::int64_t step) { return step % length == 0; });
}

enum class Order { rows, columns, neither };  // whose neighbours are neighbours in memory

Order order_of(DType dtype, const Dense& dense) {
  if (!aligned_steps(dtype, {dense.z_stride, dense.h_stride})) return Order::neither;
  if (dense.column_stride == 1 && aligned_steps(dtype, {dense.row_stride})) return Order::rows;
  if (dense.row_stride == 1 && aligned_steps(dtype, {dense.column_stride})) return Order::columns;
  return Order::neither;
}

// Of op(S).
Order order_of(DType dtype, const Sparse& sparse) {
  if (!aligned_steps(dtype, {sparse.z_stride, sparse.block_stride})) return Order::neither;
  if (sparse.column_stride == 1 && aligned_steps(dtype, {sparse.row_stride})) {
    return sparse.transposed ? Order::columns : Order::rows;
  }
  if (sparse.row_stride == 1 && aligned_steps(dtype, {sparse.column_stride})) {
    return sparse.transposed ? Order::rows : Order::columns;
  }
  return Order::neither;
}

unsigned grid_of(std::int64_t blocks, std::int64_t batches) {
  constexpr std::int64_t kMost = 0x7fffffff;
  if (blocks > kMost / batches) {
    throw Error(ErrorCode::unsupported,
                fmt::format("block_matmul: layout and dense dimension: expected at most 2^31-1 "
                            "tiles of the result for CUDA, got {} in each of {} batch entries",
                            blocks, batches));
  }
  return static_cast<unsigned>(blocks * batches);
}

DenseTensor tensor_of(const Dense& dense) {
  return {nullptr,        dense.rows,       dense.columns,      dense.z_stride,
          dense.h_stride, dense.row_stride, dense.column_stride};
}
SparseTensor tensor_of(const Sparse& sparse) {
  return sparse.transposed
             ? SparseTensor{nullptr, sparse.z_stride, sparse.column_stride, sparse.row_stride}
             : SparseTensor{nullptr, sparse.z_stride, sparse.row_stride, sparse.column_stride};
}

template <class Params>
struct Launch {
  cuda::PlannedKernel<Params> kernel;
  Params params{};
};

// On tensor cores where strides allow it, and otherwise or where pointers are not aligned, plain.
struct SpreadStep {
  Spread form;
  std::optional<Launch<SpreadParams>> fast;
  Launch<SpreadParams> plain;
  std::optional<Launch<CombineParams>> combine_fast, combine_plain;
};
struct SampleStep {
  Sample form;
  std::optional<Launch<SampleParams>> fast;
  Launch<SampleParams> plain;
};

class Cuda final : public cuda::CudaBody<BlockMatmulTensors> {
 public:
  Cuda(const BlockMatmulProblem& problem, const Device& device, Pass pass)
      : CudaBody(device), dtype_(problem.a.dtype), batches_(problem.a.shape[0]) {
    const std::shared_ptr<const BlockLayout> layout = layout_of_products(problem);
    for (const Product& product : products_of(problem, pass)) {
      std::visit([&](const auto& form) { plan(form, *layout, problem.block); }, product);
    }
    tables_.upload(device_);
    bool on_tensor_cores = true;
    const auto resolve = [&](auto& step) {
      on_tensor_cores = on_tensor_cores && step.fast.has_value();
      if (step.fast) resolve_tables(step.fast->params.steps);
      resolve_tables(step.plain.params.steps);
    };
    for (SampleStep& step : samples_) resolve(step);
    for (SpreadStep& step : spreads_) {
      resolve(step);
      for (auto* combine : {&step.combine_fast, &step.combine_plain}) {
        if (*combine) tables_.resolve((*combine)->params.splits);
      }
    }
    description = fmt::format(
        "{}, groups of {} rows, {} columns a step; sums in {}, rounded once, parts of long rows "
        "added in a fixed order: the same bits every run",
        on_tensor_cores ? "tensor cores" : "plain arithmetic", kGroupRows, kStepColumns,
        name_of(accumulation_dtype(dtype_)));
  }

 private:
  Steps add_tables(const Schedule& schedule) {
    return {.items = tables_.add(std::span<const Item>(schedule.items)),
            .count = static_cast<std::uint32_t>(schedule.items.size()),
            .long_items = schedule.long_items,
            .masks = tables_.add(std::span<const std::uint32_t>(schedule.masks)),
            .squares = tables_.add(std::span<const std::int64_t>(schedule.squares)),
            .lines = tables_.add(std::span<const std::int64_t>(schedule.lines))};
  }
  void resolve_tables(Steps& steps) const {
    tables_.resolve(steps.items);
    tables_.resolve(steps.masks);
    tables_.resolve(steps.squares);
    tables_.resolve(steps.lines);
  }

  // `blocks`: of a batch entry.
  template <class Params>
  Launch<Params> launch_of(const cuda::OpKernel& kernel, const Params& params, std::int64_t blocks,
                           int shared_bytes = 0) {
    Launch<Params> launch{{kernel, device_, shared_bytes}, params};
    launch.kernel.shape.grid[0] = grid_of(blocks, batches_);
    return launch;
  }

  void plan(const Sample& form, const BlockLayout& layout, std::int64_t block) {
    const Schedule schedule =
        make_schedule(layout, block, form.sparse, form.right.column_stride, false);
    const auto blocks = static_cast<std::int64_t>(schedule.items.size());
    if (blocks == 0 || batches_ == 0) return;
    SampleParams params{};
    params.steps = add_tables(schedule);
    params.sparse = tensor_of(form.sparse);
    params.left = tensor_of(form.left);
    params.right = tensor_of(form.right);
    params.batches = static_cast<std::int32_t>(batches_);
    SampleStep step{form, {}, launch_of(plain_sample_kernel(dtype_), params, blocks)};
    const Order left = order_of(dtype_, form.left), right = order_of(dtype_, form.right);
    if (on_tensor_cores(dtype_) && order_of(dtype_, form.sparse) == Order::rows &&
        left != Order::neither && right != Order::neither) {
      const bool left_along = left == Order::rows, right_along = right == Order::columns;
      const std::int64_t length = form.left.columns;
      const bool passes =
          !left_along || !right_along || length > kDepths[1] || element_bytes(dtype_) > 2;
      const int depth = passes ? 0 : length > kDepths[0] ? kDepths[1] : kDepths[0];
      const cuda::OpKernel kernel = sample_kernel(dtype_, depth, left_along, right_along);
      if (cuda::can_have<SampleParams>(kernel, device_)) {
        step.fast = launch_of(
            kernel, params, blocks,
            sample_operand_bytes(depth) + staging_bytes(element_bytes(dtype_)) + kTableBytes);
      }
    }
    samples_.push_back(std::move(step));
  }

  void plan(const Spread& form, const BlockLayout& layout, std::int64_t block) {
    if (form.out.columns == 0 || batches_ == 0) return;
    const Schedule schedule = make_schedule(layout, block, form.sparse, form.in.row_stride, true);
    const auto items = static_cast<std::int64_t>(schedule.items.size());
    if (items == 0) return;
    SpreadParams params{};
    params.steps = add_tables(schedule);
    params.sparse = tensor_of(form.sparse);
    params.in = tensor_of(form.in);
    params.out = tensor_of(form.out);
    params.batches = static_cast<std::int32_t>(batches_);
    params.vectors = order_of(dtype_, form.out) != Order::neither;

    const auto splits = static_cast<std::int64_t>(schedule.splits.size());
    CombineParams combine{};
    combine.splits = tables_.add(std::span<const Split>(schedule.splits));
    combine.out = params.out;
    combine.batches = batches_;
    const auto add = [&](const cuda::OpKernel& kernel, int columns, int shared_bytes,
                         std::optional<Launch<CombineParams>>& combine_launch) {
      const std::int64_t tiles = (form.out.columns + columns - 1) / columns;
      params.column_tiles = combine.column_tiles = static_cast<std::int32_t>(tiles);
      combine.tile_columns = columns;
      if (splits > 0) {
        combine_launch =
            launch_of(combine_kernel(dtype_), combine, splits * (kGroupRows / kCombineRows));
        combine_launch->kernel.shape.programmatic = device_.major >= 9;
        workspace_bytes = std::max(
            workspace_bytes,
            static_cast<std::size_t>(schedule.slots * batches_ * tiles * kGroupRows * columns) *
                size_of(accumulation_dtype(dtype_)));
      }
      return launch_of(kernel, params, items * tiles, shared_bytes);
    };
    SpreadStep step{form, {}, {}, {}, {}};
    const Order sparse = order_of(dtype_, form.sparse), in = order_of(dtype_, form.in);
    if (on_tensor_cores(dtype_) && sparse != Order::neither && in != Order::neither) {
      const bool sparse_along = sparse == Order::rows, in_along = in == Order::columns;
      const int arch = cuda::compile_arch(device_);
      const bool wide = element_bytes(dtype_) == 2 && !in_along && form.out.columns > kNarrow &&
                        spread_operand_bytes(kWide, spread_stages(kWide, arch)) + kTableBytes <=
                            device_.max_shared_bytes;
      const int columns = wide ? kWide : kNarrow;
      const cuda::OpKernel kernel = spread_kernel(dtype_, columns, sparse_along, in_along, arch);
      if (cuda::can_have<SpreadParams>(kernel, device_)) {
        step.fast = add(kernel, columns,
                        spread_operand_bytes(columns, spread_stages(columns, arch)) + kTableBytes,
                        step.combine_fast);
      }
    }
    step.plain = add(plain_spread_kernel(dtype_), kPlainColumns, 0, step.combine_plain);
    spreads_.push_back(std::move(step));
  }

  void enqueue(Stream stream, const BlockMatmulTensors& tensors,
               Workspace workspace) const override {
    for (const SampleStep& step : samples_) {
      void* const sparse = data_of(tensors, step.form.sparse.role);
      void* const left = data_of(tensors, step.form.left.role);
      void* const right = data_of(tensors, step.form.right.role);
      if (sparse == nullptr) continue;
      const Launch<SampleParams>& launch =
          step.fast && cuda::vector_aligned({sparse, left, right}) ? *step.fast : step.plain;
      SampleParams params = launch.params;
      params.sparse.data = sparse;
      params.left.data = left;
      params.right.data = right;
      launch.kernel.launch(stream, params);
    }
    for (const SpreadStep& step : spreads_) {
      void* const sparse = data_of(tensors, step.form.sparse.role);
      void* const in = data_of(tensors, step.form.in.role);
      void* const out = data_of(tensors, step.form.out.role);
      if (out == nullptr) continue;
      const bool fast = step.fast && cuda::vector_aligned({sparse, in});
      const Launch<SpreadParams>& launch = fast ? *step.fast : step.plain;
      SpreadParams params = launch.params;
      params.sparse.data = sparse;
      params.in.data = in;
      params.out.data = out;
      params.partial = workspace.data;
      if (!cuda::vector_aligned({out})) params.vectors = 0;
      launch.kernel.launch(stream, params);
      if (const auto& combine = fast ? step.combine_fast : step.combine_plain) {
        CombineParams sums = combine->params;
        sums.out.data = out;
        sums.partial = workspace.data;
        combine->kernel.launch(stream, sums);
      }
    }
  }

  DType dtype_;
  std::int64_t batches_;
  cuda::DeviceTables tables_;
  std::vector<SampleStep> samples_;
  std::vector<SpreadStep> spreads_;
};

}  // namespace

std::unique_ptr<Body> make_cuda(const BlockMatmulProblem& problem, const Device& device,
                                Pass pass) {
  return cuda::make_body<Cuda>(problem, device, pass);
}

}  // namespace pullback::block_matmul

namespace pullback::cuda {

std::vector<KernelSource> block_matmul_products_kernels(int arch) {
  using namespace block_matmul;
  std::vector<KernelSource> kernels;
  for (const DType dtype : kFloatingDTypes) {
    kernels.push_back(op_kernel<SpreadParams>(plain_spread_kernel(dtype), arch));
    kernels.push_back(op_kernel<SampleParams>(plain_sample_kernel(dtype), arch));
    kernels.push_back(op_kernel<CombineParams>(combine_kernel(dtype), arch));
    if (!on_tensor_cores(dtype)) continue;
    for (const bool first : {false, true}) {
      for (const bool second : {false, true}) {
        kernels.push_back(
            op_kernel<SpreadParams>(spread_kernel(dtype, kNarrow, first, second, arch), arch));
        kernels.push_back(op_kernel<SampleParams>(sample_kernel(dtype, 0, first, second), arch));
      }
    }
    if (element_bytes(dtype) > 2) continue;
    for (const bool along : {false, true}) {
      kernels.push_back(
          op_kernel<SpreadParams>(spread_kernel(dtype, kWide, along, false, arch), arch));
    }
    for (const int depth : kDepths) {
      kernels.push_back(op_kernel<SampleParams>(sample_kernel(dtype, depth, true, true), arch));
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

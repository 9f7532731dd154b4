#include "ops/attention/cuda/aligned_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "core/workspace.hpp"
#include "cuda/op_kernel.hpp"
#include "ops/attention/cuda/backward_body.hpp"
#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/sequences.hpp"

namespace pullback::attention {
namespace {

// Pairs of a query and a key from which on the kernels' time is more than the launches.
constexpr std::int64_t kLeastWork = std::int64_t{1} << 21;

cuda::OpKernel copy_kernel(std::size_t word_bytes) {
  const std::size_t bits = 8 * word_bytes;
  return {.name = fmt::format("attention_align_rows_{}", bits),
          .file = "ops/attention/cuda/smxx_aligned_rows.cuh",
          .function = fmt::format("attention::align_rows<uint{}_t>", bits),
          .parameters = "attention::RowCopyParams",
          .threads = kCopyThreads};
}
constexpr std::size_t kWordBytes[] = {8, 4, 2};

// Not where all keys of a query have one bias: that has no rows.
bool needs_copy(const TensorSpec& bias) {
  return bias.given() && bias.numel() > 0 && bias_strides(bias).key != 0 && !has_vector_keys(bias);
}

// A tensor with a row for each batch item, head and query, or key, and the same elements in rows of
// whole pieces of 16 bytes.
struct AlignedRows {
  TensorSpec spec;
  Plane given, aligned;
  BiasShape shape;     // what is copied
  std::int64_t width;  // of an aligned row
  std::size_t bytes;

  static AlignedRows heads(const TensorSpec& from) {
    std::vector<std::int64_t> sizes(from.shape.begin(), from.shape.begin() + from.rank);
    const std::int64_t columns = sizes.back();
    // The copy engine reads rows of whole sectors of 32 bytes a third faster. But rows of whole
    // pieces of 16 keep their width, as other tensors of it may stay where they are.
    const bool in_pieces = whole_pieces(from, columns, 16) == columns;
    sizes.back() = in_pieces ? columns : whole_pieces(from, columns, 32);
    const TensorSpec spec = TensorSpec::contiguous(from.dtype, sizes);
    const auto plane_of = [](const TensorSpec& of) {
      const RowStrides strides = row_strides(of);
      return Plane{nullptr, strides.batch, strides.head, strides.row, strides.element};
    };
    const std::int64_t batch = from.rank == 4 ? sizes[0] : 1;
    const BiasShape shape{batch, sizes[from.rank - 2], sizes[from.rank - 3], columns};
    return {spec,  plane_of(from), plane_of(spec),
            shape, sizes.back(),   bytes_of(from, spec.numel())};
  }
  // What is expanded stays so. A row may end within a piece.
  static AlignedRows bias(const TensorSpec& from) {
    const BiasStrides given = bias_strides(from);
    TensorSpec spec = from;
    BiasShape shape{};
    std::int64_t elements = 1;
    const auto take = [&](int dimension, std::int64_t given_stride, std::int64_t& size) {
      const bool own = given_stride != 0;
      size = own ? from.shape[dimension] : 1;
      spec.strides[dimension] = own ? elements : 0;
      elements *= size;
    };
    take(3, given.key, shape.key);
    elements = whole_pieces(from, elements, 16);
    take(2, given.query, shape.query);
    take(1, given.head, shape.head);
    take(0, given.batch, shape.batch);
    return {spec, plane(from), plane(spec), shape, shape.key, bytes_of(from, elements)};
  }

 private:
  static std::int64_t whole_pieces(const TensorSpec& spec, std::int64_t elements,
                                   std::size_t piece_bytes) {
    const auto piece = static_cast<std::int64_t>(piece_bytes / size_of(spec.dtype));
    return ceil_div(elements, piece) * piece;
  }
  static std::size_t bytes_of(const TensorSpec& spec, std::int64_t elements) {
    return workspace_aligned(static_cast<std::size_t>(elements) * size_of(spec.dtype));
  }
};

// One launch of several copies.
class RowCopies {
 public:
  // `back`: from aligned rows.
  void add(const AlignedRows& rows, bool back) {
    RowCopy copy{.from = back ? rows.aligned : rows.given,
                 .to = back ? rows.given : rows.aligned,
                 .shape = rows.shape,
                 .width = back ? rows.shape.key : rows.width,
                 .lane_bits = 0,
                 .chunks = 1,
                 .blocks = 0};
    merge(copy);
    params_.copies[count_++] = copy;
    element_bytes_ = size_of(rows.spec.dtype);
  }
  int count() const { return count_; }

  // Behind the last add(). By the largest words that rows are made of, and where pointers do not
  // allow them by elements.
  void plan(const cuda::DeviceInfo& device) {
    for (const std::size_t bytes : kWordBytes) {
      const bool smallest = bytes == element_bytes_;
      if (bytes < element_bytes_ || (!smallest && !made_of(bytes))) continue;
      launches_.push_back(launch_of(bytes, device));
      if (smallest) return;
    }
  }
  // `from` and `to` of each.
  void launch(Stream stream, const void* const (&from)[kMostCopies],
              void* const (&to)[kMostCopies]) const {
    std::uintptr_t bits = 0;
    for (int i = 0; i < count_; ++i) {
      bits |= reinterpret_cast<std::uintptr_t>(from[i]) | reinterpret_cast<std::uintptr_t>(to[i]);
    }
    for (const Launch& own : launches_) {
      if (bits % own.word_bytes != 0) continue;
      RowCopyParams params = own.params;
      for (int i = 0; i < count_; ++i) {
        params.copies[i].from.data = const_cast<void*>(from[i]);
        params.copies[i].to.data = to[i];
        if (from[i] == nullptr) params.copies[i].blocks = 0;
      }
      own.kernel.launch(stream, params);
      return;
    }
  }

 private:
  struct Launch {
    std::size_t word_bytes;
    cuda::PlannedKernel<RowCopyParams> kernel;
    RowCopyParams params;
  };

  // Heads and batch items become rows where they follow each other in both tensors.
  static void merge(RowCopy& copy) {
    BiasShape& shape = copy.shape;
    const auto follow = [&](int64_t Plane::*outer, int64_t Plane::*inner, std::int64_t count) {
      return copy.from.*outer == count * copy.from.*inner &&
             copy.to.*outer == count * copy.to.*inner;
    };
    if (!follow(&Plane::query, &Plane::head, shape.head)) return;
    shape.query *= shape.head;
    shape.head = 1;
    for (Plane* plane : {&copy.from, &copy.to}) plane->query = plane->head;
    if (shape.batch > 1 && !follow(&Plane::batch, &Plane::query, shape.query)) return;
    shape.query *= shape.batch;
    shape.batch = 1;
  }

  bool made_of(std::size_t bytes) const {
    const auto elements = static_cast<std::int64_t>(bytes / element_bytes_);
    bool all = true;
    for (int i = 0; i < count_; ++i) {
      const RowCopy& copy = params_.copies[i];
      all = all && copy.shape.key % elements == 0;
      for (const Plane* plane : {&copy.from, &copy.to}) {
        all = all && plane->key == 1 && plane->batch % elements == 0 &&
              plane->head % elements == 0 && plane->query % elements == 0;
      }
    }
    return all;
  }

  Launch launch_of(std::size_t bytes, const cuda::DeviceInfo& device) const {
    const auto elements = static_cast<std::int64_t>(bytes / element_bytes_);
    Launch own{bytes, {copy_kernel(bytes), device}, params_};
    std::int64_t blocks = 1, pairs = 1;
    for (int i = 0; i < count_; ++i) {
      RowCopy& copy = own.params.copies[i];
      for (Plane* plane : {&copy.from, &copy.to}) {
        plane->batch /= elements, plane->head /= elements, plane->query /= elements;
      }
      copy.shape.key /= elements;
      copy.width /= elements;
      // As few threads of a row as have all of it, if any have.
      const auto parts = static_cast<std::uint64_t>(ceil_div(copy.width, kCopyPieces));
      copy.lane_bits = std::min<int>(std::bit_width(parts - 1), std::bit_width(kCopyThreads - 1u));
      const std::int64_t chunks = ceil_div(copy.width, std::int64_t{kCopyPieces} << copy.lane_bits);
      copy.chunks = static_cast<std::uint32_t>(chunks);
      copy.blocks = static_cast<std::uint32_t>(
          chunks * ceil_div(copy.shape.query, kCopyThreads >> copy.lane_bits));
      blocks = std::max<std::int64_t>(blocks, copy.blocks);
      pairs = std::max(pairs, copy.shape.batch * copy.shape.head);
    }
    constexpr std::int64_t kMost = 65535;
    own.kernel.shape.grid[0] = static_cast<unsigned>(blocks);
    own.kernel.shape.grid[1] = static_cast<unsigned>(std::min(pairs, kMost));
    own.kernel.shape.grid[2] = static_cast<unsigned>(count_);
    return own;
  }

  RowCopyParams params_{};
  int count_ = 0;
  std::size_t element_bytes_ = 2;
  std::vector<Launch> launches_;
};

bool has_aligned_heads(const AttentionProblem& problem, Pass pass) {
  if (!has_vector_rows(problem.out)) return false;
  if (pass == Pass::backward) return all_have_vector_rows(problem);
  return has_vector_rows(problem.q) && has_vector_rows(problem.k) && has_vector_rows(problem.v);
}

class AlignedBody final : public cuda::CudaBody<AttentionTensors> {
 public:
  AlignedBody(const AttentionProblem& problem, const Device& device, Pass pass, bool heads,
              bool bias, BodyOf make)
      : CudaBody(device) {
    using Problem = AttentionProblem;
    using Tensors = AttentionTensors;
    AttentionProblem inner = problem;
    if (heads) {
      const bool back = pass == Pass::forward;  // whether out is a result
      add_heads<&Problem::q, &Tensors::q>(inner, false);
      add_heads<&Problem::k, &Tensors::k>(inner, false);
      add_heads<&Problem::v, &Tensors::v>(inner, false);
      add_heads<&Problem::out, &Tensors::out>(inner, back);
      if (pass == Pass::backward) {
        add_heads<&Problem::d_out, &Tensors::d_out>(inner, false);
        add_heads<&Problem::d_q, &Tensors::d_q>(inner, true);
        add_heads<&Problem::d_k, &Tensors::d_k>(inner, true);
        add_heads<&Problem::d_v, &Tensors::d_v>(inner, true);
      }
    }
    if (bias) {
      add<&Problem::bias, &Tensors::bias>(inner, false, AlignedRows::bias(problem.bias));
      if (pass == Pass::backward && needs_copy(problem.d_bias)) {
        add<&Problem::d_bias, &Tensors::d_bias>(inner, true, AlignedRows::bias(problem.d_bias));
      }
    }
    in_.plan(device_);
    out_.plan(device_);
    copy_bytes_ = workspace_bytes;
    body_ = make(inner, device);
    workspace_bytes += body_->workspace_bytes;
    description = fmt::format("{}; {} copied to rows that begin at 16 bytes", body_->description,
                              !bias   ? "heads are"
                              : heads ? "heads and the bias are"
                                      : "the bias is");
  }

 private:
  struct Copy {
    std::size_t at;  // of the workspace
    bool back;       // from there, behind the body's work
    const void* (*tensor)(const AttentionTensors& tensors);
    void (*set)(AttentionTensors& tensors, void* data);
  };

  template <auto kSpec, auto kTensor>
  void add_heads(AttentionProblem& inner, bool back) {
    if (has_vector_rows(inner.*kSpec) || (inner.*kSpec).numel() == 0) return;
    add<kSpec, kTensor>(inner, back, AlignedRows::heads(inner.*kSpec));
  }
  template <auto kSpec, auto kTensor>
  void add(AttentionProblem& inner, bool back, const AlignedRows& rows) {
    inner.*kSpec = rows.spec;
    (back ? out_ : in_).add(rows, back);
    copies_.push_back(
        {.at = workspace_bytes,
         .back = back,
         .tensor = [](const AttentionTensors& tensors) -> const void* { return tensors.*kTensor; },
         .set = [](AttentionTensors& tensors, void* data) { tensors.*kTensor = data; }});
    workspace_bytes += rows.bytes;
  }

  void enqueue(Stream stream, const AttentionTensors& tensors, Workspace workspace) const override {
    AttentionTensors inner = tensors;
    std::byte* const scratch = static_cast<std::byte*>(workspace.data);
    // Of both launches; of a result that is not wanted null.
    const void* from[2][kMostCopies] = {};
    void* to[2][kMostCopies] = {};
    int count[2] = {};
    for (const Copy& copy : copies_) {
      const int at = count[copy.back]++;
      void* const given = const_cast<void*>(copy.tensor(tensors));
      if (given == nullptr) continue;
      void* const aligned = scratch + copy.at;
      copy.set(inner, aligned);
      from[copy.back][at] = copy.back ? aligned : given;
      to[copy.back][at] = copy.back ? given : aligned;
    }
    if (in_.count() > 0) in_.launch(stream, from[0], to[0]);
    body_->run(stream, inner, {scratch + copy_bytes_, workspace.bytes - copy_bytes_});
    if (out_.count() > 0) out_.launch(stream, from[1], to[1]);
  }

  std::vector<Copy> copies_;
  RowCopies in_, out_;
  std::size_t copy_bytes_ = 0;
  Body body_;
};

}  // namespace

Body make_with_aligned_rows(const AttentionProblem& problem, const Device& device, Pass pass,
                            BodyOf make) {
  const AttentionSizes sizes = sizes_of(problem);
  const double work = static_cast<double>((sizes.varlen ? 1 : sizes.batch) * sizes.heads) *
                      static_cast<double>(sizes.total_query) * static_cast<double>(sizes.max_key);
  const DType dtype = problem.q.dtype;
  const bool large = work >= kLeastWork && dtype != DType::f64;
  const bool heads = large && !has_aligned_heads(problem, pass);
  // Of a bias beside a block mask most may be hidden.
  const bool bias =
      large && size_of(dtype) == 2 && !problem.blocks.given() && needs_copy(problem.bias);
  if (!heads && !bias) return make(problem, device);
  return cuda::make_body<AlignedBody>(problem, device, pass, heads, bias, make);
}

}  // namespace pullback::attention

namespace pullback::cuda {

std::vector<KernelSource> attention_aligned_rows_kernels(int arch) {
  using namespace attention;
  std::vector<KernelSource> kernels;
  for (const std::size_t bytes : kWordBytes) {
    kernels.push_back(op_kernel<RowCopyParams>(copy_kernel(bytes), arch));
  }
  return kernels;
}

}  // namespace pullback::cuda

// The forward pass on CUDA. Contiguous tensors: rows that fit in registers by smxx_rows.cuh, longer
// ones by smxx_ring.cuh, or with added terms by smxx_stream.cuh in vectors. Other strides, and
// pointers that are not aligned to 16 bytes: smxx_stream.cuh element by element.
#include <fmt/format.h>

#include "ops/block_softmax/row_steps.hpp"

namespace pullback::block_softmax {
namespace {

using Params = ForwardParams;

std::string dtype_name(DType dtype) { return std::string(cuda::device_type(dtype)); }

Registers registers_of(DType dtype, bool terms) {
  return forward_registers(static_cast<int>(size_of(dtype)), terms);
}

cuda::OpKernel rows_kernel(DType dtype, bool terms, int arch) {
  const std::string type = dtype_name(dtype);
  const Registers registers = registers_of(dtype, terms);
  return {.name = fmt::format("block_softmax_forward_rows_{}{}", type, terms ? "_terms" : ""),
          .file = "ops/block_softmax/cuda/smxx_rows.cuh",
          .function = fmt::format("block_softmax::forward_rows<{}, {}, {}>", type,
                                  registers.vectors, terms),
          .parameters = "block_softmax::ForwardParams",
          .threads = kThreads,
          .blocks = blocks_for(registers.blocks, arch),
          .constants = {{"block_softmax::kWarps", kWarps}}};
}

cuda::OpKernel ring_kernel(DType dtype, int arch) {
  const std::string type = dtype_name(dtype);
  return {.name = fmt::format("block_softmax_forward_ring_{}", type),
          .file = "ops/block_softmax/cuda/smxx_ring.cuh",
          .function = fmt::format("block_softmax::forward_ring<{}>", type),
          .parameters = "block_softmax::ForwardParams",
          .threads = kRingThreads,
          .blocks = blocks_for(dtype == DType::f64 ? 1 : 2, arch),
          .constants = {{"block_softmax::kRingThreads", kRingThreads},
                        {"block_softmax::kRingBatch", kRingBatch}}};
}

cuda::OpKernel stream_kernel(DType dtype, bool vectors, bool terms) {
  const std::string type = dtype_name(dtype);
  const std::size_t width = vectors ? 16 / size_of(dtype) : 1;
  return {.name = fmt::format("block_softmax_forward_stream_{}_{}{}", type, width,
                              terms ? "_terms" : ""),
          .file = "ops/block_softmax/cuda/smxx_stream.cuh",
          .function = fmt::format("block_softmax::forward_stream<{}, {}, {}>", type, width, terms),
          .parameters = "block_softmax::ForwardParams",
          .threads = kThreads,
          .constants = {{"block_softmax::kWarps", kWarps}}};
}

Term term_of(const TensorSpec& spec, MaskMode mode) {
  Term term{};
  if (!spec.given()) return term;
  const bool bytes = spec.dtype == DType::u8 || spec.dtype == DType::boolean;
  term.kind = mode == MaskMode::add ? TermKind::add : bytes ? TermKind::keep_bytes : TermKind::keep;
  return term;
}

class Forward final : public cuda::CudaBody<BlockSoftmaxTensors> {
 public:
  Forward(const BlockSoftmaxProblem& problem, const Device& device) : CudaBody(device) {
    const auto [Z, H, R, C, b, nnz] = sizes_of(problem);
    const BlockLayout& layout = *problem.layout;
    const DType dtype = problem.x.dtype;
    const bool terms =
        problem.rpe.given() || problem.key_padding_mask.given() || problem.attn_mask.given();

    Params params{};
    params.x = block_tensor(problem.x);
    params.y = block_tensor(problem.y);
    params.batches = Z;
    params.block = static_cast<std::int32_t>(b);
    params.scale = problem.scale;
    params.rows = static_cast<std::int32_t>(R);
    if (terms) {
      std::vector<std::int32_t> columns;
      columns.reserve(static_cast<std::size_t>(nnz));
      for (const auto& block : layout.blocks()) columns.push_back(block.column);
      columns_ = tables_.add(std::span<const std::int32_t>(columns));
      set_terms(problem, params);
    }

    if (Z > 0 && nnz > 0) {
      vectors_ = vector_layout(problem.x) && vector_layout(problem.y);
      if (vectors_) {
        const int arch = cuda::compile_arch(device_);
        const auto vectors = b / static_cast<std::int64_t>(16 / size_of(dtype));
        const RowChooser chooser(vectors, registers_of(dtype, terms).vectors, 1, !terms, device_);
        vectors_ =
            vector_steps_.add_by_length({rows_kernel(dtype, terms, arch), ring_kernel(dtype, arch),
                                         stream_kernel(dtype, true, terms)},
                                        layout, vectors, chooser, params, tables_, device_);
      }
      element_steps_.add_stream(stream_kernel(dtype, false, terms), layout, b, params, tables_,
                                device_);
    }
    tables_.upload(device_);
    for (RowSteps<Params>* steps : {&vector_steps_, &element_steps_}) steps->resolve(tables_);
    if (terms) tables_.resolve(columns_);
    description = fmt::format(
        "rows grouped by length: {}; sums in {}, in a fixed order: the same bits every run",
        vectors_ ? fmt::format("in registers of 2 to {} threads up to {} KiB, longer ones {}",
                               kThreads, kThreads * registers_of(dtype, terms).vectors * 16 / 1024,
                               terms ? "read twice" : "in shared memory as far as they fit")
                 : "read twice, element by element",
        dtype == DType::f64 ? "f64" : "f32");
  }

 private:
  // A vector of x is `length` columns, of 1 byte in u8 and bool masks; their rows and planes must
  // keep the alignment that enqueue() sees to at the beginning.
  static void set_vectors(Term& term, std::int64_t length) {
    term.vectors = term.kind != TermKind::none && term.column == 1 && term.batch % length == 0 &&
                   term.head % length == 0 && term.row % length == 0;
  }

  static void set_terms(const BlockSoftmaxProblem& problem, Params& params) {
    Term& rpe = params.terms[0] = term_of(problem.rpe, MaskMode::add);
    if (problem.rpe.given()) {
      rpe.batch = problem.rpe.shape[0] == 1 ? 0 : problem.rpe.strides[0];
      rpe.head = problem.rpe.shape[1] == 1 ? 0 : problem.rpe.strides[1];
      rpe.row = problem.rpe.strides[2];
      rpe.column = problem.rpe.strides[3];
    }
    Term& keys = params.terms[1] = term_of(problem.key_padding_mask, problem.key_padding_mode);
    if (problem.key_padding_mask.given()) {
      keys.batch = problem.key_padding_mask.strides[0];
      keys.column = problem.key_padding_mask.strides[1];
    }
    Term& attn = params.terms[2] = term_of(problem.attn_mask, problem.attn_mask_mode);
    if (problem.attn_mask.given()) {
      attn.row = problem.attn_mask.strides[0];
      attn.column = problem.attn_mask.strides[1];
    }
    const auto length = static_cast<std::int64_t>(16 / size_of(problem.x.dtype));
    for (Term& term : params.terms) set_vectors(term, length);
  }

  void enqueue(Stream stream, const BlockSoftmaxTensors& tensors, Workspace) const override {
    const bool vectors = vectors_ && cuda::vector_aligned({tensors.x, tensors.y});
    for (const auto& step : vectors ? vector_steps_ : element_steps_) {
      Params params = step.params;
      params.columns = columns_;
      params.x.data = const_cast<void*>(tensors.x);
      params.y.data = tensors.y;
      const void* const terms[kTerms] = {tensors.rpe, tensors.key_padding_mask, tensors.attn_mask};
      for (int t = 0; t < kTerms; ++t) {
        params.terms[t].data = terms[t];
        if (!cuda::vector_aligned({terms[t]})) params.terms[t].vectors = 0;
      }
      step.kernel.launch(stream, params);
    }
  }

  DeviceTables tables_;
  const std::int32_t* columns_ = nullptr;  // with terms
  RowSteps<Params> vector_steps_, element_steps_;
  bool vectors_ = false;
};

}  // namespace

std::unique_ptr<Body> make_cuda_forward(const BlockSoftmaxProblem& problem, const Device& device) {
  return cuda::make_body<Forward>(problem, device);
}

}  // namespace pullback::block_softmax

namespace pullback::cuda {

std::vector<KernelSource> block_softmax_forward_kernels(int arch) {
  using namespace block_softmax;
  std::vector<KernelSource> kernels;
  for (const DType dtype : kFloatingDTypes) {
    kernels.push_back(op_kernel<ForwardParams>(ring_kernel(dtype, arch), arch));
    kernels.push_back(op_kernel<ForwardParams>(stream_kernel(dtype, true, true), arch));
    for (const bool terms : {false, true}) {
      kernels.push_back(op_kernel<ForwardParams>(rows_kernel(dtype, terms, arch), arch));
      kernels.push_back(op_kernel<ForwardParams>(stream_kernel(dtype, false, terms), arch));
    }
  }
  return kernels;
}

}  // namespace pullback::cuda

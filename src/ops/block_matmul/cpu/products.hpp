// The two products that all modes, transposes and gradients of block_matmul come down to.
//   spread: Y = op(S) · X, S sparse, X and Y dense
//   sample: S = A · B at the blocks of the layout
// dds is spread with everything transposed: Yᵀ = op(S)ᵀ · Xᵀ. With Y = S · X, dS = sample(dY, Xᵀ)
// and dX = spread(Sᵀ, dY); with S = sample(A, B), dA = spread(dS, Bᵀ) and dBᵀ = spread(dSᵀ, A).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/threads.hpp"
#include "ops/block_matmul/problem.hpp"

namespace pullback::block_matmul {

// Logical [rows, columns] for each (z, h). A transpose exchanges the last two strides.
struct Dense {
  void* data = nullptr;
  std::int64_t rows = 0, columns = 0;
  std::int64_t z_stride = 0, h_stride = 0, row_stride = 0, column_stride = 0;

  static Dense of(const TensorSpec& spec, const void* data, bool transposed) {
    const Dense stored{const_cast<void*>(data), spec.shape[2],   spec.shape[3],  spec.strides[0],
                       spec.strides[1],         spec.strides[2], spec.strides[3]};
    return transposed ? stored.transpose() : stored;
  }
  Dense transpose() const {
    return {data, columns, rows, z_stride, h_stride, column_stride, row_stride};
  }
};

// [Z,nnz,b,b] over the layout, or with `transposed` the transpose of that.
struct Sparse {
  void* data = nullptr;
  std::int64_t z_stride = 0, block_stride = 0, row_stride = 0, column_stride = 0;
  bool transposed = false;

  static Sparse of(const TensorSpec& spec, const void* data, bool transposed) {
    return {const_cast<void*>(data), spec.strides[0], spec.strides[1],
            spec.strides[2],         spec.strides[3], transposed};
  }
  Sparse transpose() const {
    Sparse other = *this;
    other.transposed = !transposed;
    return other;
  }
};

// The tensors of one pass, brought into the form of one of the two products.
struct SampleForm {  // sparse = left · right
  Dense left, right;
  Sparse sparse;
};
struct SpreadForm {  // out = sparse · in
  Sparse sparse;
  Dense in, out;
};
// For sdd. With transpose_c it is over the transposed layout.
SampleForm sample_form(const BlockMatmulProblem& problem, const void* a, const void* b,
                       const TensorSpec& c_spec, const void* c);
// For dsd and dds.
SpreadForm spread_form(const BlockMatmulProblem& problem, const void* a, const void* b,
                       const TensorSpec& c_spec, const void* c);

// Runs them. Every output element belongs to one task, which sums in a fixed order.
class Products {
 public:
  Products(const BlockMatmulProblem& problem, const Device& device);

  std::size_t workspace_bytes() const;
  std::string description() const;
  void sample(const SampleForm& form, Workspace workspace) const;
  void spread(const SpreadForm& form, Workspace workspace) const;

 private:
  // Blocks [first, first + count) of a block column.
  struct ColumnPart {
    std::int32_t head, column;
    std::int64_t first, count;
  };

  DType dtype_;
  std::int64_t Z_, b_;
  std::shared_ptr<const BlockLayout> layout_;
  Threads threads_;
  std::vector<ColumnPart> parts_;
};

}  // namespace pullback::block_matmul

// The two products that all modes, transposes and gradients of block_matmul come down to.
//   spread: Y = op(S) · X, S sparse, X and Y dense
//   sample: S = A · B at the blocks of the layout
// dds is spread with everything transposed: Yᵀ = op(S)ᵀ · Xᵀ. With Y = S · X, dS = sample(dY, Xᵀ)
// and dX = spread(Sᵀ, dY); with S = sample(A, B), dA = spread(dS, Bᵀ) and dBᵀ = spread(dSᵀ, A).
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "ops/block_matmul/problem.hpp"

namespace pullback::block_matmul {

enum class Role { a, b, c, d_c, d_a, d_b };

inline void* data_of(const BlockMatmulTensors& tensors, Role role) {
  const void* const pointers[] = {tensors.a,   tensors.b,   tensors.c,
                                  tensors.d_c, tensors.d_a, tensors.d_b};
  return const_cast<void*>(pointers[static_cast<int>(role)]);
}

// Logical [rows, columns] for each (z, h). A transpose exchanges the last two strides.
struct Dense {
  Role role{};
  std::int64_t rows = 0, columns = 0;
  std::int64_t z_stride = 0, h_stride = 0, row_stride = 0, column_stride = 0;

  static Dense of(Role role, const TensorSpec& spec, bool transposed) {
    const Dense stored{role,
                       spec.shape[2],
                       spec.shape[3],
                       spec.strides[0],
                       spec.strides[1],
                       spec.strides[2],
                       spec.strides[3]};
    return transposed ? stored.transpose() : stored;
  }
  Dense transpose() const {
    return {role, columns, rows, z_stride, h_stride, column_stride, row_stride};
  }
};

// [Z,nnz,b,b] over the layout, or with `transposed` the transpose of that.
struct Sparse {
  Role role{};
  std::int64_t z_stride = 0, block_stride = 0, row_stride = 0, column_stride = 0;
  bool transposed = false;

  static Sparse of(Role role, const TensorSpec& spec, bool transposed) {
    return {role, spec.strides[0], spec.strides[1], spec.strides[2], spec.strides[3], transposed};
  }
  Sparse transpose() const {
    Sparse other = *this;
    other.transposed = !transposed;
    return other;
  }
};

struct Sample {  // sparse = left · right; sparse is not transposed
  Dense left, right;
  Sparse sparse;

  Role output() const { return sparse.role; }
};
struct Spread {  // out = sparse · in
  Sparse sparse;
  Dense in, out;

  Role output() const { return out.role; }
};
using Product = std::variant<Sample, Spread>;

// One for each output of the pass; one whose output is null is left out when it runs.
std::vector<Product> products_of(const BlockMatmulProblem& problem, Pass pass);

// What they run over: the problem's layout, or its transpose for sdd with transpose_c.
std::shared_ptr<const BlockLayout> layout_of_products(const BlockMatmulProblem& problem);

}  // namespace pullback::block_matmul

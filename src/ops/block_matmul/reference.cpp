// The definition, in plain loops. For every (z, h), over the places (i, j, k) where the sparse
// matrix has a block:
//   c_ij = sum over k of a_ik b_kj;  d_a_ik = sum over j of d_c_ij b_kj;  d_b_kj = sum over i of
//   a_ik d_c_ij
// with a = op(a), b = op(b) and c as logical matrices.
#include "core/view.hpp"
#include "ops/block_matmul/problem.hpp"

namespace pullback::block_matmul {
namespace {

// A logical matrix per (z, h), stored densely or by blocks, as it is or transposed.
class Matrix {
 public:
  Matrix(const TensorSpec& spec, const void* data, const BlockLayout* layout, std::int64_t block,
         bool transposed)
      : view_(spec, data), layout_(layout), block_(block), transposed_(transposed) {}

  Matrix transpose() const {
    Matrix other = *this;
    other.transposed_ = !transposed_;
    return other;
  }
  explicit operator bool() const { return static_cast<bool>(view_); }

  // The rank of the block that holds (row, column): -1 where none is. Dense matrices have one.
  std::int64_t block_at(std::int64_t h, std::int64_t row, std::int64_t column) const {
    if (layout_ == nullptr) return 0;
    if (transposed_) std::swap(row, column);
    return layout_->rank(h, row / block_, column / block_);
  }
  double get(std::int64_t z, std::int64_t h, std::int64_t rank, std::int64_t row,
             std::int64_t column) const {
    if (transposed_) std::swap(row, column);
    return layout_ == nullptr ? view_.get(z, h, row, column)
                              : view_.get(z, rank, row % block_, column % block_);
  }
  void set(double value, std::int64_t z, std::int64_t h, std::int64_t rank, std::int64_t row,
           std::int64_t column) const {
    if (transposed_) std::swap(row, column);
    if (layout_ == nullptr) {
      view_.set(value, z, h, row, column);
    } else {
      view_.set(value, z, rank, row % block_, column % block_);
    }
  }

 private:
  View view_;
  const BlockLayout* layout_;  // null: dense
  std::int64_t block_;
  bool transposed_;
};

template <class Arithmetic>
class Reference final : public Body {
  using Real = typename Arithmetic::Real;

 public:
  Reference(const BlockMatmulProblem& problem, Pass pass)
      : problem_(problem), sizes_(sizes_of(problem)), pass_(pass) {
    this->description = "plain loops, one thread";
    // A transposed sdd result is ordered by the transposed layout.
    if (problem.mode == BlockMatmulMode::sdd && problem.transpose_c) {
      transposed_layout_ = std::make_unique<BlockLayout>(problem.layout->transposed());
    }
  }

  void run(Stream, const BlockMatmulTensors& tensors, Workspace) const override {
    const BlockMatmulProblem& p = problem_;
    const auto matrix = [&](BlockMatmulMode sparse_in, const TensorSpec& spec, const void* data,
                            bool transposed) {
      const BlockLayout* layout = p.mode == sparse_in ? p.layout.get() : nullptr;
      if (layout != nullptr && transposed_layout_) layout = transposed_layout_.get();
      return Matrix(spec, data, layout, p.block, transposed);
    };
    const Matrix a = matrix(BlockMatmulMode::dsd, p.a, tensors.a, p.transpose_a);
    const Matrix b = matrix(BlockMatmulMode::dds, p.b, tensors.b, p.transpose_b);
    const auto& [Z, H, M, N, K, block, nnz] = sizes_;
    if (pass_ == Pass::forward) {
      product(matrix(BlockMatmulMode::sdd, p.c, tensors.c, p.transpose_c), a, b, M, N, K);
      return;
    }
    const Matrix d_c = matrix(BlockMatmulMode::sdd, p.d_c, tensors.d_c, p.transpose_c);
    const Matrix d_a = matrix(BlockMatmulMode::dsd, p.d_a, tensors.d_a, p.transpose_a);
    const Matrix d_b = matrix(BlockMatmulMode::dds, p.d_b, tensors.d_b, p.transpose_b);
    if (d_a) product(d_a, d_c, b.transpose(), M, K, N);
    if (d_b) product(d_b, a.transpose(), d_c, K, N, M);
  }

 private:
  // result [rows, columns] = left [rows, depth] · right [depth, columns], where blocks are.
  void product(const Matrix& result, const Matrix& left, const Matrix& right, std::int64_t rows,
               std::int64_t columns, std::int64_t depth) const {
    for (std::int64_t z = 0; z < sizes_.Z; ++z) {
      for (std::int64_t h = 0; h < sizes_.H; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < columns; ++j) {
            const std::int64_t at = result.block_at(h, i, j);
            if (at >= 0) result.set(dot(left, right, z, h, i, j, depth), z, h, at, i, j);
          }
        }
      }
    }
  }

  double dot(const Matrix& left, const Matrix& right, std::int64_t z, std::int64_t h,
             std::int64_t i, std::int64_t j, std::int64_t depth) const {
    Real sum = 0;
    for (std::int64_t k0 = 0; k0 < depth; k0 += sizes_.b) {
      const std::int64_t left_at = left.block_at(h, i, k0), right_at = right.block_at(h, k0, j);
      if (left_at < 0 || right_at < 0) continue;
      for (std::int64_t k = k0; k < std::min(k0 + sizes_.b, depth); ++k) {
        sum += static_cast<Real>(left.get(z, h, left_at, i, k)) *
               static_cast<Real>(right.get(z, h, right_at, k, j));
      }
    }
    return static_cast<double>(sum);
  }

  BlockMatmulProblem problem_;
  Sizes sizes_;
  Pass pass_;
  std::unique_ptr<BlockLayout> transposed_layout_;
};

}  // namespace

std::unique_ptr<Body> make_reference(const BlockMatmulProblem& problem, const Device&, Pass pass) {
  return std::make_unique<Reference<ExactArithmetic>>(problem, pass);
}

std::unique_ptr<Body> make_textbook(const BlockMatmulProblem& problem, const Device&, Pass pass) {
  return dispatch_floating(problem.a.dtype, [&]<class T>() -> std::unique_ptr<Body> {
    return std::make_unique<Reference<TextbookArithmetic<T>>>(problem, pass);
  });
}

}  // namespace pullback::block_matmul

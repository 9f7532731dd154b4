// The rows of a problem, sorted into tiles of neighbours.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/entmax/dims.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {

// One tensor's part of a tile: the first element of its first row, and the steps in elements.
struct TensorRows {
  std::byte* data = nullptr;  // null: not computed, or not given
  std::int64_t row_step = 0;
  std::int64_t step = 0;  // along the axis

  explicit operator bool() const { return data != nullptr; }
  bool contiguous() const { return step == 1; }

  template <class T>
  T* row(std::int64_t r) const {
    return reinterpret_cast<T*>(data) + r * row_step;
  }
};

// A tensor of the problem on its way through the rows.
struct WalkTensor {
  DType dtype = DType::f32;
  Steps steps;
};

inline WalkTensor walk_with_axis(const EntmaxProblem& problem, const TensorSpec& spec) {
  WalkTensor tensor{spec.dtype, steps_with_axis(problem, spec)};
  if (row_length(problem) == 1) tensor.steps.axis = 1;
  return tensor;
}
inline WalkTensor walk_per_row(const EntmaxProblem& problem, const TensorSpec& spec) {
  return {spec.dtype, steps_per_row(problem, spec)};
}
inline WalkTensor walk_support(const TensorSpec& spec) {
  WalkTensor tensor{DType::u8, steps_of_support(spec)};
  if (spec.rank > 0 && spec.shape[spec.rank - 1] == 1) tensor.steps.axis = 1;
  return tensor;
}

// The dimensions without the axis, sorted so that neighbours in memory are neighbours in the walk,
// and merged where every tensor allows.
class Walk {
 public:
  // The first tensor decides the order.
  Walk(const Outer& outer, std::vector<WalkTensor> tensors) : tensors_(std::move(tensors)) {
    std::vector<Dim> dims;
    for (int dim = 0; dim < outer.rank; ++dim) {
      rows_ *= outer.sizes[dim];
      if (outer.sizes[dim] == 1) continue;
      Dim& entry = dims.emplace_back(Dim{outer.sizes[dim], {}});
      for (const WalkTensor& tensor : tensors_) entry.steps.push_back(tensor.steps.outer[dim]);
    }
    dims = merged(std::move(dims));
    rank_ = static_cast<int>(dims.size());
    for (int dim = 0; dim < rank_; ++dim) sizes_[dim] = dims[dim].size;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].steps.outer.fill(0);
      for (int dim = 0; dim < rank_; ++dim) tensors_[i].steps.outer[dim] = dims[dim].steps[i];
    }
  }

  void set_tile_rows(std::int64_t rows) {
    tile_rows_ = std::max<std::int64_t>(1, std::min(rows, inner()));
  }
  std::int64_t tile_rows() const { return tile_rows_; }
  std::int64_t tiles() const {
    if (rows_ == 0) return 0;
    return rows_ / inner() * tiles_in_inner();
  }

  struct Tile {
    std::array<std::int64_t, kMaxRank - 1> index;  // of its first row
    std::int64_t rows;
  };
  Tile tile(std::int64_t number) const {
    Tile tile{};
    const std::int64_t first = number % tiles_in_inner() * tile_rows_;
    number /= tiles_in_inner();
    tile.rows = std::min(tile_rows_, inner() - first);
    if (rank_ == 0) return tile;
    tile.index[rank_ - 1] = first;
    for (int dim = rank_ - 2; dim >= 0; --dim) {
      tile.index[dim] = number % sizes_[dim];
      number /= sizes_[dim];
    }
    return tile;
  }
  // Tensor number `which` from position `along` of the axis on, in the first row of the tile.
  TensorRows place(std::size_t which, const void* data, const Tile& tile,
                   std::int64_t along) const {
    if (data == nullptr) return {};
    const auto& [dtype, steps] = tensors_[which];
    std::int64_t offset = along * steps.axis;
    for (int dim = 0; dim < rank_; ++dim) offset += tile.index[dim] * steps.outer[dim];
    auto* base = static_cast<std::byte*>(const_cast<void*>(data));
    return {base + offset * static_cast<std::int64_t>(size_of(dtype)),
            rank_ > 0 ? steps.outer[rank_ - 1] : 0, steps.axis};
  }
  bool contiguous(std::size_t which) const { return tensors_[which].steps.axis == 1; }
  // Whether the rows of a tile lie side by side.
  bool adjacent(std::size_t which) const {
    return rank_ > 0 && tensors_[which].steps.outer[static_cast<std::size_t>(rank_) - 1] == 1;
  }

  std::int64_t inner() const { return rank_ > 0 ? sizes_[rank_ - 1] : 1; }

 private:
  std::int64_t tiles_in_inner() const { return (inner() + tile_rows_ - 1) / tile_rows_; }

  std::vector<WalkTensor> tensors_;
  int rank_ = 0;
  std::array<std::int64_t, kMaxRank - 1> sizes_{};
  std::int64_t rows_ = 1, tile_rows_ = 1;
};

}  // namespace pullback::entmax

// The shape of a CPU plan: tiles, tasks, and where everything lies in the workspace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/cpu_info.hpp"
#include "core/threads.hpp"
#include "core/workspace.hpp"
#include "cpu/tile_matmul.hpp"
#include "ops/attention/dropout.cuh"
#include "ops/attention/problem.hpp"

namespace pullback::attention {

// A tile's rows in a strided tensor. Strides and offset count elements.
struct TileSource {
  DType dtype = DType::f32;
  const void* data = nullptr;
  std::int64_t offset = 0, row = 0, element = 0;
  std::ptrdiff_t rows = 0, columns = 0;
};

// Hands out memory from `base` on; with base null it only counts.
class Bump {
 public:
  explicit Bump(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    T* const result = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += workspace_aligned(static_cast<std::size_t>(count) * sizeof(T));
    return result;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

// Queries of a tile: a multiple of every register block (cpu/tile_matmul.hpp) and of the 32 of bf16
// products.
inline constexpr std::int64_t kQueryTile = 96;
// Tiles of queries that a forward task has at most, of one head or of several.
inline constexpr std::int64_t kMostTaskTiles = 8;
// Widths of packed tiles are rounded up to it: no vector and no AMX tile is wider.
inline constexpr std::int64_t kWidthMultiple = 32;

constexpr std::int64_t padded_width(std::int64_t width) {
  return (width + kWidthMultiple - 1) / kWidthMultiple * kWidthMultiple;
}
constexpr std::int64_t blocks_of(std::int64_t length, std::int64_t block) {
  return (length + block - 1) / block;
}

struct CpuLayout {
  CpuLayout(const AttentionProblem& problem, int threads, Pass pass, CpuIsa isa);

  AttentionProblem problem;
  AttentionSizes sizes;
  SeenBlocks seen_blocks;
  CpuIsa isa = CpuIsa::any;   // any: products in Real; else of bf16 by these instructions
  std::int64_t key_tile = 0;  // a multiple of kQueryTile

  // Forward: one task computes this many queries of each of so many heads, which share their keys.
  // Does not change any bits.
  std::int64_t task_queries = 0, task_heads = 1;
  std::int64_t task_rows() const { return task_heads * task_queries; }

  // Backward: one task computes this many keys of a head, and adds to its chunk's own copy of d_q.
  std::int64_t chunk_keys = 0;
  std::int64_t chunks = 0;
  std::int64_t query_copies() const { return problem.d_q.given() ? chunks : 0; }

  // d_bias when it is a sum over some dimension: sums in Real, [chunks or 1][its own shape]; the
  // leading dimension counts chunks when the sum is over keys.
  struct BiasSums {
    bool batch = false, head = false, query = false, key = false;  // dimensions summed over
    std::array<std::int64_t, 4> shape{};
    bool any() const { return batch || head || query || key; }
    std::int64_t numel() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  } bias_sums;

  std::size_t scratch_bytes = 0;  // of one thread
  std::size_t workspace_bytes = 0;

  // Rows of q in all batch items.
  std::int64_t query_rows() const {
    return sizes.varlen ? sizes.total_query : sizes.batch * sizes.total_query;
  }
};

// Prefix sums of blocks per sequence, so that tasks of varlen problems are all of one size.
struct BlockTable {
  std::int64_t* first = nullptr;  // [B+1]; null: every sequence has `uniform` blocks
  std::int64_t uniform = 0, total = 0;

  struct Place {
    std::int64_t batch, block;
  };
  Place operator[](std::int64_t i) const {
    if (first == nullptr) return {i / uniform, i % uniform};
    std::int64_t low = 0, high = batches;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first[middle] <= i ? low : high) = middle;
    }
    return {low, i - first[low]};
  }

  std::int64_t batches = 0;
};

// What a run keeps in the workspace.
struct RunMemory {
  RunMemory(Bump& bump, const CpuLayout& layout, int threads, Pass pass);

  void* sequence_table;
  std::int64_t* first_blocks = nullptr;  // BlockTable
  std::byte* scratch;                    // of all threads
  // Backward, all in Real
  void* delta = nullptr;      // [H][query rows]
  void* d_q_sums = nullptr;   // [chunks][H][query rows][D]
  void* bias_sums = nullptr;  // BiasSums
};

// A run: the plan's layout with the pointers of tensors and workspace.
struct CpuRun : RunMemory {
  const CpuLayout& layout;
  const AttentionTensors& tensors;
  const Threads& threads;
  Dropout dropout;
  Sequences sequences;
  BlockTable blocks;  // of task_queries queries (forward) or chunk_keys keys (backward)

  CpuRun(const CpuLayout& layout, const AttentionTensors& tensors, const Threads& threads,
         Pass pass, Bump workspace);

  // The first row of q of item b.
  std::int64_t first_query_row(std::int64_t b, const Sequence& sequence) const {
    return layout.sizes.varlen ? sequence.q_begin : b * layout.sizes.total_query;
  }
};

// Rows [begin, …) of sequence-relative position `begin` of head h in q, k, v, out or a gradient.
inline TileSource tile_source(const TensorSpec& spec, const void* data, std::int64_t b,
                              std::int64_t row, std::int64_t h, std::int64_t rows) {
  const RowStrides strides = row_strides(spec);
  return {spec.dtype,
          data,
          b * strides.batch + row * strides.row + h * strides.head,
          strides.row,
          strides.element,
          static_cast<std::ptrdiff_t>(rows),
          static_cast<std::ptrdiff_t>(spec.shape[spec.rank - 1])};
}

template <class Real>
struct EngineScratch {
  Real *rows, *pairs, *converted;
  std::ptrdiff_t converted_size;  // elements

  EngineScratch(Bump& bump, const CpuLayout& layout) {
    const std::int64_t width =
        padded_width(std::max(layout.sizes.head_dim, layout.sizes.value_dim));
    rows = bump.take<Real>(layout.key_tile * width);
    pairs = layout.isa != CpuIsa::any ? bump.take<Real>(kQueryTile * width) : nullptr;
    converted_size = kQueryTile * layout.key_tile;
    converted = layout.isa != CpuIsa::any ? bump.take<Real>(converted_size) : nullptr;
  }
};

// Rows of a score tile's terms, made for one query at a time.
template <class Real>
struct RowScratch {
  Real *bias, *keep;
  std::uint16_t* draws;

  RowScratch(Bump& bump, const CpuLayout& layout) {
    bias = bump.take<Real>(layout.key_tile);
    keep = bump.take<Real>(layout.key_tile);
    draws = bump.take<std::uint16_t>(layout.key_tile + 64);
  }
};

template <class Real>
struct ForwardScratch {
  EngineScratch<Real> engine;
  RowScratch<Real> row;
  Real *q, *k, *v;  // packed
  Real *scores, *out, *largest, *sum;
  std::int32_t* non_finite;

  ForwardScratch(Bump& bump, const CpuLayout& layout) : engine(bump, layout), row(bump, layout) {
    const std::int64_t width = padded_width(layout.sizes.head_dim);
    const std::int64_t value_width = padded_width(layout.sizes.value_dim);
    q = bump.take<Real>(layout.task_rows() * width);
    k = bump.take<Real>(layout.key_tile * width);
    v = bump.take<Real>(layout.key_tile * value_width);
    scores = bump.take<Real>(kQueryTile * layout.key_tile);
    out = bump.take<Real>(layout.task_rows() * value_width);
    largest = bump.take<Real>(layout.task_rows());
    sum = bump.take<Real>(layout.task_rows());
    non_finite = bump.take<std::int32_t>(3 * layout.key_tile);
  }
};

template <class Real>
struct BackwardScratch {
  EngineScratch<Real> engine;
  RowScratch<Real> row;
  Real *k_transposed, *k_right, *v_transposed;            // packed keys
  Real *q_left, *q_columns, *d_out_left, *d_out_columns;  // packed queries
  Real *p, *ds, *d_bias;                                  // tiles; one row of d_bias
  Real *d_q, *d_k, *d_v, *line;                           // sums; one row of d_k or d_v
  std::int32_t* non_finite;

  BackwardScratch(Bump& bump, const CpuLayout& layout) : engine(bump, layout), row(bump, layout) {
    const std::int64_t width = padded_width(layout.sizes.head_dim);
    const std::int64_t value_width = padded_width(layout.sizes.value_dim);
    k_transposed = bump.take<Real>(layout.key_tile * width);
    k_right = bump.take<Real>(layout.key_tile * width);
    v_transposed = bump.take<Real>(layout.key_tile * value_width);
    q_left = bump.take<Real>(kQueryTile * width);
    q_columns = bump.take<Real>(kQueryTile * width);
    d_out_left = bump.take<Real>(kQueryTile * value_width);
    d_out_columns = bump.take<Real>(kQueryTile * value_width);
    p = bump.take<Real>(kQueryTile * layout.key_tile);
    ds = bump.take<Real>(kQueryTile * layout.key_tile);
    d_bias = bump.take<Real>(layout.key_tile);
    d_q = bump.take<Real>(kQueryTile * width);
    d_k = bump.take<Real>(layout.key_tile * width);
    d_v = bump.take<Real>(layout.key_tile * value_width);
    line = bump.take<Real>(std::max(width, value_width));
    non_finite = bump.take<std::int32_t>(4 * layout.key_tile);
  }
};

// forward.cpp, backward.cpp
void cpu_forward(const CpuRun& run);
void cpu_backward(const CpuRun& run);

}  // namespace pullback::attention

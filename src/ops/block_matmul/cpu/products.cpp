// spread: a task is one block row of the output by at most kTile columns. It walks the row's blocks
//   and adds block (b × b) · panel of X (b × tile) to its accumulators.
// sample: a task is up to kMostBlocks blocks of one block column. They share a panel of the right
//   matrix (kDepth × b at a time), which is brought into order once.
// Accumulators and panels are Real in the slot's scratch, and stay in the second-level cache.
//
// Load() of simd-inl.hpp is called by its full name: Highway's own Load(), which wants aligned
// memory, is found through its arguments otherwise.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/block_matmul/cpu/products.cpp"
#include <hwy/foreach_target.h>

#include "core/threads.hpp"
#include "cpu/tile_pack-inl.hpp"
#include "ops/block_matmul/products.hpp"

#ifndef PULLBACK_BLOCK_MATMUL_TASKS
#define PULLBACK_BLOCK_MATMUL_TASKS
namespace pullback::block_matmul {

inline constexpr std::int64_t kMaxBlock = 128;
inline constexpr std::int64_t kTile = 128;   // columns of a spread task
inline constexpr std::int64_t kDepth = 128;  // terms of a sample summed between panels
inline constexpr std::int64_t kMostBlocks = 32;
// Elements of Real in a slot's scratch: the accumulators of a task, then a left and a right panel.
inline constexpr std::int64_t kSums = 64 * 1024;
inline constexpr std::int64_t kLeftPanel = kMaxBlock * kDepth;
inline constexpr std::int64_t kRightPanel = kDepth * kTile;
inline constexpr std::int64_t kScratch = kSums + kLeftPanel + kRightPanel;

struct SpreadTask {
  DType dtype;
  const BlockLayout* layout;
  std::int64_t b;
  const Spread* form;
  const BlockMatmulTensors* tensors;
  std::int64_t z, h, block_row, tile;  // block_row of op(S)
  void* scratch;
};

struct SampleTask {
  DType dtype;
  const BlockLayout* layout;
  std::int64_t b;
  const Sample* form;
  const BlockMatmulTensors* tensors;
  std::int64_t z, h, block_column, first, count;
  void* scratch;
};

}  // namespace pullback::block_matmul
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using namespace block_matmul;

// Divides every block size.
inline constexpr int kBlockMultiple = 16;

// Left operands are tiles of any strides; right ones are row-major, with rows `row` apart.
template <class R>
using Panel = StridedTile<const R>;

// The matrix [rows, columns] at `from` as Real: itself, or a copy in `scratch` that keeps the order
// of memory.
template <class T, class R = Real<T>>
Panel<R> LeftPanel(const T* from, std::int64_t row_stride, std::int64_t column_stride,
                   std::int64_t rows, std::int64_t columns, R* scratch) {
  if constexpr (std::is_same_v<T, R>) {
    // The product steps past the last column, and the stride of a single one may be anything.
    return {from, rows > 1 ? row_stride : 0, columns > 1 ? column_stride : 0};
  } else {
    const TileVector<R> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    if (row_stride == 1 && column_stride != 1) {
      const Panel<R> flipped = LeftPanel(from, column_stride, row_stride, columns, rows, scratch);
      return {flipped.data, flipped.column, flipped.row};
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* row = from + i * row_stride;
      R* to = scratch + i * columns;
      std::int64_t k = 0;
      if (column_stride == 1) {
        for (; k + lanes <= columns; k += lanes)
          hn::StoreU(HWY_NAMESPACE::Load(d, row + k), d, to + k);
      }
      for (; k < columns; ++k) to[k] = static_cast<R>(row[k * column_stride]);
    }
    return {scratch, columns, 1};
  }
}

// The same with rows of neighbours, padded with zeros to `padded` columns.
template <class T, class R = Real<T>>
Panel<R> RightPanel(const T* from, std::int64_t row_stride, std::int64_t column_stride,
                    std::int64_t rows, std::int64_t columns, std::int64_t padded, R* scratch) {
  // Rows that are far apart compete for the same cache sets: they are worth a copy.
  constexpr std::int64_t kNear = 1024 / sizeof(R);
  if constexpr (std::is_same_v<T, R>) {
    if (column_stride == 1 && columns == padded && row_stride <= kNear && row_stride >= -kNear) {
      return {from, row_stride, 1};
    }
  }
  const TileVector<R> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (column_stride == 1) {
    for (std::int64_t k = 0; k < rows; ++k) {
      const T* row = from + k * row_stride;
      R* to = scratch + k * padded;
      std::int64_t j = 0;
      for (; j + lanes <= columns; j += lanes)
        hn::StoreU(HWY_NAMESPACE::Load(d, row + j), d, to + j);
      for (; j < padded; ++j) to[j] = j < columns ? static_cast<R>(row[j]) : R{0};
    }
    return {scratch, padded, 1};
  }
  // Reads down the columns, a few rows at a time, so that a cache line of either side is used
  // whole.
  constexpr std::int64_t kRows = 16, kSide = kTransposeBlock<R>;
  for (std::int64_t k0 = 0; k0 < rows; k0 += kRows) {
    const std::int64_t k1 = std::min(k0 + kRows, rows);
    std::int64_t j = 0;
    if (row_stride == 1 && k1 - k0 == kRows) {
      R staged[kSide * kRows];
      for (; j + kSide <= columns; j += kSide) {
        const R* square = staged;
        std::int64_t square_row = kRows;
        if constexpr (std::is_same_v<T, R>) {
          square = from + j * column_stride + k0;
          square_row = column_stride;
        } else {
          for (std::int64_t i = 0; i < kSide; ++i) {
            const T* column = from + (j + i) * column_stride + k0;
            for (std::int64_t k = 0; k < kRows; k += lanes) {
              hn::StoreU(HWY_NAMESPACE::Load(d, column + k), d, staged + i * kRows + k);
            }
          }
        }
        for (std::int64_t k = 0; k < kRows; k += kSide) {
          TransposeBlock(square + k, square_row, scratch + (k0 + k) * padded + j, padded);
        }
      }
    }
    for (; j < columns; ++j) {
      const T* column = from + j * column_stride;
      for (std::int64_t k = k0; k < k1; ++k) {
        scratch[k * padded + j] = static_cast<R>(column[k * row_stride]);
      }
    }
    for (std::int64_t k = k0; k < k1; ++k) {
      for (j = columns; j < padded; ++j) scratch[k * padded + j] = 0;
    }
  }
  return {scratch, padded, 1};
}

// Rounds accumulators [rows, columns] into a matrix of any strides.
template <class T, class R = Real<T>>
void StoreTile(const R* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, T* to,
               std::int64_t row_stride, std::int64_t column_stride) {
  const TileVector<R> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (column_stride == 1) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const R* row = from + i * stride;
      T* out = to + i * row_stride;
      std::int64_t j = 0;
      for (; j + lanes <= columns; j += lanes) Store(d, hn::LoadU(d, row + j), out + j);
      for (; j < columns; ++j) out[j] = static_cast<T>(row[j]);
    }
    return;
  }
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      to[i * row_stride + j * column_stride] = static_cast<T>(from[i * stride + j]);
    }
  }
}

template <class T>
void SpreadRows(const SpreadTask& task) {
  using R = Real<T>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(TileVector<R>()));
  const auto& [sparse, in, out] = *task.form;
  const std::int64_t b = task.b, first = task.tile * kTile;
  const std::int64_t columns = std::min(kTile, out.columns - first);
  const std::int64_t padded = (columns + lanes - 1) / lanes * lanes;
  R* accumulators = static_cast<R*>(task.scratch);
  R* left_scratch = accumulators + kSums;
  R* right_scratch = left_scratch + kLeftPanel;

  std::fill(accumulators, accumulators + b * padded, R{0});
  // Offsets, not pointers: without blocks the tensors may be empty and null.
  const T* s = static_cast<const T*>(data_of(*task.tensors, sparse.role));
  const T* x = static_cast<const T*>(data_of(*task.tensors, in.role));
  const std::int64_t s_begin = task.z * sparse.z_stride;
  const std::int64_t x_begin =
      task.z * in.z_stride + task.h * in.h_stride + first * in.column_stride;
  const auto blocks = sparse.transposed ? task.layout->column(task.h, task.block_row)
                                        : task.layout->row(task.h, task.block_row);
  for (const auto& block : blocks) {
    const std::int64_t row_stride = sparse.transposed ? sparse.column_stride : sparse.row_stride;
    const std::int64_t column_stride = sparse.transposed ? sparse.row_stride : sparse.column_stride;
    const std::int64_t x_row = (sparse.transposed ? block.row : block.column) * b;
    const auto left = LeftPanel(s + s_begin + block.rank * sparse.block_stride, row_stride,
                                column_stride, b, b, left_scratch);
    const auto right = RightPanel(x + x_begin + x_row * in.row_stride, in.row_stride,
                                  in.column_stride, b, columns, padded, right_scratch);
    RowMajorMatmul<kBlockMultiple, R>(b, padded, b, left, right.data, right.row, accumulators,
                                      padded, true);
  }
  T* y = static_cast<T*>(data_of(*task.tensors, out.role)) + task.z * out.z_stride +
         task.h * out.h_stride + task.block_row * b * out.row_stride + first * out.column_stride;
  StoreTile(accumulators, padded, b, columns, y, out.row_stride, out.column_stride);
}

template <class T>
void SampleBlocks(const SampleTask& task) {
  using R = Real<T>;
  const auto& [left, right, sparse] = *task.form;
  const std::int64_t b = task.b, depth = left.columns;
  R* accumulators = static_cast<R*>(task.scratch);
  R* left_scratch = accumulators + kSums;
  R* right_scratch = left_scratch + kLeftPanel;
  const auto blocks =
      task.layout->column(task.h, task.block_column)
          .subspan(static_cast<std::size_t>(task.first), static_cast<std::size_t>(task.count));

  std::fill(accumulators, accumulators + task.count * b * b, R{0});
  // Offsets, not pointers: without depth the tensors may be empty and null.
  const T* from_left = static_cast<const T*>(data_of(*task.tensors, left.role));
  const T* from_right = static_cast<const T*>(data_of(*task.tensors, right.role));
  const std::int64_t left_begin = task.z * left.z_stride + task.h * left.h_stride;
  const std::int64_t right_begin = task.z * right.z_stride + task.h * right.h_stride +
                                   task.block_column * b * right.column_stride;
  for (std::int64_t k = 0; k < depth; k += kDepth) {
    const std::int64_t terms = std::min(kDepth, depth - k);
    const auto right_panel =
        RightPanel(from_right + right_begin + k * right.row_stride, right.row_stride,
                   right.column_stride, terms, b, b, right_scratch);
    R* to = accumulators;
    for (const auto& block : blocks) {
      const auto left_panel = LeftPanel(
          from_left + left_begin + block.row * b * left.row_stride + k * left.column_stride,
          left.row_stride, left.column_stride, b, terms, left_scratch);
      RowMajorMatmul<kBlockMultiple, R>(b, b, terms, left_panel, right_panel.data, right_panel.row,
                                        to, b, true);
      to += b * b;
    }
  }
  const R* from = accumulators;
  for (const auto& block : blocks) {
    StoreTile(from, b, b, b,
              static_cast<T*>(data_of(*task.tensors, sparse.role)) + task.z * sparse.z_stride +
                  block.rank * sparse.block_stride,
              sparse.row_stride, sparse.column_stride);
    from += b * b;
  }
}

void RunSpread(const SpreadTask& task) {
  dispatch_floating(task.dtype, [&]<class T>() { SpreadRows<T>(task); });
}
void RunSample(const SampleTask& task) {
  dispatch_floating(task.dtype, [&]<class T>() { SampleBlocks<T>(task); });
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback {
HWY_EXPORT(RunSpread);
HWY_EXPORT(RunSample);

namespace block_matmul {
namespace {

// Every output element belongs to one task, which sums in a fixed order.
class Cpu final : public Body {
 public:
  Cpu(const BlockMatmulProblem& problem, const Device& device, Pass pass)
      : dtype_(problem.a.dtype),
        Z_(problem.a.shape[0]),
        b_(problem.block),
        layout_(layout_of_products(problem)),
        products_(products_of(problem, pass)),
        threads_(device.threads) {
    const std::int64_t most = std::min(kMostBlocks, kSums / (b_ * b_));
    for (std::int64_t h = 0; h < layout_->heads(); ++h) {
      for (std::int64_t c = 0; c < layout_->columns(); ++c) {
        const auto count = static_cast<std::int64_t>(layout_->column(h, c).size());
        for (std::int64_t first = 0; first < count; first += most) {
          parts_.push_back({static_cast<std::int32_t>(h), static_cast<std::int32_t>(c), first,
                            std::min(most, count - first)});
        }
      }
    }
    workspace_bytes =
        static_cast<std::size_t>(kScratch * threads_.count()) * size_of(accumulation_dtype(dtype_));
    description = "register tiles over panels in cache; sums in " +
                  std::string(name_of(accumulation_dtype(dtype_))) +
                  ", rounded once; same bits for any number of threads";
  }

  void run(Stream, const BlockMatmulTensors& tensors, Workspace workspace) const override {
    for (const Product& product : products_) {
      std::visit(
          [&](const auto& form) {
            if (data_of(tensors, form.output()) != nullptr) run_product(form, tensors, workspace);
          },
          product);
    }
  }

 private:
  // Blocks [first, first + count) of a block column.
  struct ColumnPart {
    std::int32_t head, column;
    std::int64_t first, count;
  };

  void* scratch_of(Workspace workspace, int slot) const {
    const auto slot_bytes = workspace_bytes / static_cast<std::size_t>(threads_.count());
    return static_cast<std::byte*>(workspace.data) + static_cast<std::size_t>(slot) * slot_bytes;
  }

  void run_product(const Sample& form, const BlockMatmulTensors& tensors,
                   Workspace workspace) const {
    const auto count = static_cast<std::int64_t>(parts_.size());
    threads_.parallel_for(Z_ * count, [&](std::int64_t index, int slot) {
      const ColumnPart& part = parts_[static_cast<std::size_t>(index % count)];
      const SampleTask task{.dtype = dtype_,
                            .layout = layout_.get(),
                            .b = b_,
                            .form = &form,
                            .tensors = &tensors,
                            .z = index / count,
                            .h = part.head,
                            .block_column = part.column,
                            .first = part.first,
                            .count = part.count,
                            .scratch = scratch_of(workspace, slot)};
      HWY_DYNAMIC_DISPATCH(RunSample)(task);
    });
  }

  void run_product(const Spread& form, const BlockMatmulTensors& tensors,
                   Workspace workspace) const {
    const std::int64_t H = layout_->heads();
    const std::int64_t block_rows = form.out.rows / b_;
    const std::int64_t tiles = (form.out.columns + kTile - 1) / kTile;
    threads_.parallel_for(Z_ * H * block_rows * tiles, [&](std::int64_t index, int slot) {
      const std::int64_t row_index = index / tiles;
      const SpreadTask task{.dtype = dtype_,
                            .layout = layout_.get(),
                            .b = b_,
                            .form = &form,
                            .tensors = &tensors,
                            .z = row_index / block_rows / H,
                            .h = row_index / block_rows % H,
                            .block_row = row_index % block_rows,
                            .tile = index % tiles,
                            .scratch = scratch_of(workspace, slot)};
      HWY_DYNAMIC_DISPATCH(RunSpread)(task);
    });
  }

  DType dtype_;
  std::int64_t Z_, b_;
  std::shared_ptr<const BlockLayout> layout_;
  std::vector<Product> products_;
  Threads threads_;
  std::vector<ColumnPart> parts_;
};

}  // namespace

std::unique_ptr<Body> make_cpu(const BlockMatmulProblem& problem, const Device& device, Pass pass) {
  return std::make_unique<Cpu>(problem, device, pass);
}

}  // namespace block_matmul
}  // namespace pullback
#endif

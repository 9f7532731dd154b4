// Both products for every dtype and any strides, on ordinary arithmetic, and the sum of partial
// results.
//
// A thread block brings pieces of the operands, kPlainDepth of the sum at a time, into shared
// memory as Real; a thread sums 8 rows by 4 columns of kGroupRows by kPlainColumns. Both lie within
// one square of 16 by 16, so that squares that are not there are left out.
#pragma once

#include "device/dependent.cuh"
#include "device/float.cuh"
#include "ops/block_matmul/cuda/params.cuh"
#include "ops/block_matmul/cuda/tuning.hpp"

namespace pullback::block_matmul {

using namespace device;

inline constexpr int kThreadRows = 8, kThreadColumns = 4;

template <class R>
struct PlainPieces {
  R left[kPlainDepth][kGroupRows + 4], right[kPlainDepth][kPlainColumns + 4];
};

struct PlainPlace {
  int row = static_cast<int>(threadIdx.x) / 16 * kThreadRows;
  int column = static_cast<int>(threadIdx.x) % 16 * kThreadColumns;
};

// Fills piece[k][line] with value(line, k). Threads side by side take neighbours in memory.
template <int kLines, class R, int kStride, class Value>
void fill_piece(R (&piece)[kPlainDepth][kStride], bool neighbours_along_sum, Value value) {
  for (int i = threadIdx.x; i < kLines * kPlainDepth; i += kPlainThreads) {
    const int k = neighbours_along_sum ? i % kPlainDepth : i / kLines;
    const int line = neighbours_along_sum ? i / kPlainDepth : i % kLines;
    piece[k][line] = value(line, k);
  }
}

template <class R>
void multiply_pieces(R (&sums)[kThreadRows][kThreadColumns], const PlainPieces<R>& pieces,
                     const PlainPlace& place) {
#pragma unroll
  for (int k = 0; k < kPlainDepth; ++k) {
    R left[kThreadRows], right[kThreadColumns];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) left[i] = pieces.left[k][place.row + i];
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) right[j] = pieces.right[k][place.column + j];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) sums[i][j] += left[i] * right[j];
    }
  }
}

// What a step's tables say about (row of the group, column of the step).
struct PlainStep {
  const int64_t *squares, *lines;
  uint32_t mask;

  PlainStep(const Steps& steps, int64_t step)
      : squares(steps.squares + step * kStepSquares),
        lines(steps.lines + step * (kStepColumns / 16)),
        mask(steps.masks[step]) {}

  bool covers(int row, int column) const { return (mask >> (column / 16 * 8 + row / 16) & 1) != 0; }
  // Only where covered.
  int64_t element(int row, int column, const SparseTensor& sparse) const {
    return squares[column / 16 * (kGroupRows / 16) + row / 16] + row % 16 * sparse.row +
           column % 16 * sparse.column;
  }
};

template <class T>
void spread_plain(const SpreadParams& p) {
  using R = Real<T>;
  __shared__ PlainPieces<R> pieces;
  const Turn turn = turn_of(p.steps, blockIdx.x / p.column_tiles, p.batches);
  const Item item = p.steps.items[turn.item];
  const int64_t batch = turn.batch;
  const int column_tile = static_cast<int>(blockIdx.x % p.column_tiles);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kPlainColumns;
  const PlainPlace place;

  const T* sparse = static_cast<const T*>(p.sparse.data) + batch * p.sparse.batch;
  const T* in = static_cast<const T*>(p.in.data) + batch * p.in.batch + item.head * p.in.head;
  R sums[kThreadRows][kThreadColumns] = {};
  for (int s = 0; s < item.steps; ++s) {
    const PlainStep step(p.steps, item.first_step + s);
    for (int first = 0; first < kStepColumns; first += kPlainDepth) {
      if ((step.mask >> first / 16 * 8 & 0xff) == 0) continue;
      fill_piece<kGroupRows>(pieces.left, p.sparse.column == 1, [&](int row, int k) {
        if (!step.covers(row, first)) return R{0};
        return to_real(sparse[step.element(row, first + k, p.sparse)]);
      });
      fill_piece<kPlainColumns>(pieces.right, p.in.row == 1, [&](int line, int k) {
        const int64_t column = first_column + line;
        if (column >= p.in.columns) return R{0};
        return to_real(in[step.lines[first / 16] + k * p.in.row + column * p.in.column]);
      });
      __syncthreads();
      if (step.covers(place.row, first)) multiply_pieces(sums, pieces, place);
      __syncthreads();
    }
  }

  R* partial = static_cast<R*>(p.partial) +
               ((item.slot * p.batches + batch) * p.column_tiles + column_tile) *
                   (kGroupRows * kPlainColumns);
  T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + item.head * p.out.head;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) {
      const int64_t row = item.first_row + place.row + i, column = first_column + place.column + j;
      if (item.slot >= 0) {
        partial[(place.row + i) * kPlainColumns + place.column + j] = sums[i][j];
      } else if (row < p.out.rows && column < p.out.columns) {
        out[row * p.out.row + column * p.out.column] = from_real<T>(sums[i][j]);
      }
    }
  }
}

template <class T>
void sample_plain(const SampleParams& p) {
  using R = Real<T>;
  __shared__ PlainPieces<R> pieces;
  const Turn turn = turn_of(p.steps, blockIdx.x, p.batches);
  const Item item = p.steps.items[turn.item];
  const int64_t batch = turn.batch;
  const PlainPlace place;
  const int64_t depth = p.left.columns;

  T* sparse = static_cast<T*>(p.sparse.data) + batch * p.sparse.batch;
  const T* left =
      static_cast<const T*>(p.left.data) + batch * p.left.batch + item.head * p.left.head;
  const T* right =
      static_cast<const T*>(p.right.data) + batch * p.right.batch + item.head * p.right.head;
  for (int s = 0; s < item.steps; ++s) {
    const PlainStep step(p.steps, item.first_step + s);
    const bool covered = step.covers(place.row, place.column);
    R sums[kThreadRows][kThreadColumns] = {};
    for (int64_t first = 0; first < depth; first += kPlainDepth) {
      fill_piece<kGroupRows>(pieces.left, p.left.column == 1, [&](int line, int k) {
        const int64_t row = item.first_row + line;
        if (row >= p.left.rows || first + k >= depth) return R{0};
        return to_real(left[row * p.left.row + (first + k) * p.left.column]);
      });
      fill_piece<kPlainColumns>(pieces.right, p.right.row == 1, [&](int line, int k) {
        const int64_t column = step.lines[line / 16];
        if (column == kNowhere || first + k >= depth) return R{0};
        return to_real(right[column + line % 16 * p.right.column + (first + k) * p.right.row]);
      });
      __syncthreads();
      if (covered) multiply_pieces(sums, pieces, place);
      __syncthreads();
    }
    if (!covered) continue;
    T* to = sparse + step.element(place.row, place.column, p.sparse);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) {
        to[i * p.sparse.row + j * p.sparse.column] = from_real<T>(sums[i][j]);
      }
    }
  }
}

// The partial sums of a split group, added in the order of their steps. A thread block takes
// kCombineRows rows of a group.
template <class T>
void combine(const CombineParams& p) {
  using R = Real<T>;
  wait_for_previous_kernel();
  constexpr uint32_t kParts = kGroupRows / kCombineRows;
  const uint32_t number = blockIdx.x / kParts;
  const Split split = p.splits[number / static_cast<uint32_t>(p.batches)];
  const int64_t batch = number % static_cast<uint32_t>(p.batches);
  const int first_row = static_cast<int>(blockIdx.x % kParts) * kCombineRows;
  const int64_t tile_size = static_cast<int64_t>(kGroupRows) * p.tile_columns;
  T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + split.head * p.out.head;
  for (int64_t i = threadIdx.x; i < kCombineRows * p.out.columns; i += kPlainThreads) {
    const int64_t column = i % p.out.columns, row = first_row + i / p.out.columns;
    if (split.first_row + row >= p.out.rows) break;
    const R* partial =
        static_cast<const R*>(p.partial) +
        ((split.first_slot * p.batches + batch) * p.column_tiles + column / p.tile_columns) *
            tile_size +
        row * p.tile_columns + column % p.tile_columns;
    R sum = 0;
    for (int slot = 0; slot < split.slots; ++slot) {
      sum += partial[slot * p.batches * p.column_tiles * tile_size];
    }
    out[(split.first_row + row) * p.out.row + column * p.out.column] = from_real<T>(sum);
  }
}

}  // namespace pullback::block_matmul

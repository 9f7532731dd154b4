// The backward of rows of a few elements, and of rows that lie across memory, from y: many rows a
// block, each in the registers of one thread or of several (smxx_tile.cuh).
//   d_x = s (d_y - <s, d_y> / S),  s = y^(2-alpha), S = sum of s
// Staged, y and d_y have a tile each, and d_x takes d_y's; of rows that smxx_backward_any.cuh is to
// take, d_y stays there.
#pragma once

#include "ops/entmax/cuda/backward_row.cuh"
#include "ops/entmax/cuda/smxx_tile.cuh"

namespace pullback::entmax {

// Whether there is a row for this kernel, and its alpha.
template <class T, Weights kWeights>
struct TileRow {
  double alpha;
  bool exists;

  TileRow(const BackwardParams& p, int64_t row)
      : alpha(p.alpha_of_all), exists(row < p.rows.count) {
    if (kWeights != Weights::power || !exists) return;
    alpha = alpha_of_row<T>(p, row);
    exists = is_gentle(alpha);
  }
};

// One row's part of this thread. Without a row the slices have no elements.
template <class T, Weights kWeights, class G, class Slice>
void backward_of_tile(double alpha, G& group, const Slice& y, const Slice& d_y, const Slice& d_x) {
  constexpr int kHeld = kBackwardTileHeld;
  float s[kHeld], gradients[kHeld];
  y.load(s, 0);
  d_y.load(gradients, 0);
  Sums<float> sums;
  for_fours<kHeld>(y.count(), [&](int first) {
    to_slopes<T, kWeights>(reinterpret_cast<float(&)[4]>(s[first]), alpha);
#pragma unroll
    for (int k = first; k < first + 4; ++k) add(sums, s[k], gradients[k]);
  });
  group.sum(sums.s, sums.s_d_y);
  const float mean = sums.s_d_y / sums.s;
  d_x.template store<kHeld>([&](int k) { return gradient(s[k], gradients[k], mean); });
}

template <class T, Weights kWeights, bool kStaged>
void backward_tile(const BackwardTileParams& params) {
  const BackwardParams& p = params.op;
  const TileShape& shape = params.shape;
  const int length = static_cast<int>(p.rows.length);
  const auto threads = static_cast<int>(blockDim.x);
  if constexpr (kStaged) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int rows_of_pass = threads / kWarpSize * shape.columns;
    const int rows_of_block = rows_of_pass * shape.passes;
    T* y = reinterpret_cast<T*>(memory);
    T* d_y = y + rows_of_block * shape.pitch;
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * rows_of_block;
    const auto rows =
        static_cast<int>(min(p.rows.count - begin, static_cast<int64_t>(rows_of_block)));
    const Staging<T> staging_y(y, rows * length, shape.per_row);
    const Staging<T> staging_d_y(d_y, rows * length, shape.per_row);
    staging_y.load(static_cast<const T*>(p.y.data) + begin * length);
    staging_d_y.load(static_cast<const T*>(p.d_y.data) + begin * length);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < rows; first += rows_of_pass) {
      TileGroup<false> group(shape, nullptr);
      const int row = first + group.row();
      const TileRow<T, kWeights> place(p, begin + row);
      const auto slice = [&](T* tile) {
        return TileSlice<T, true>(tile + row * shape.pitch, 1, shape, group,
                                  place.exists ? length : 0);
      };
      backward_of_tile<T, kWeights>(place.alpha, group, slice(y), slice(d_y), slice(d_y));
    }
    __syncthreads();
    staging_d_y.store(static_cast<T*>(p.d_x.data) + begin * length);
  } else {
    using Group = TileGroup<true>;
    __shared__ float scratch[2 * Group::kMostValues * kTileScratch];
    Group group(shape, scratch);
    const int rows_of_block = shape.columns * (shape.warps == 1 ? threads / kWarpSize : 1);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_block + group.row();
    const TileRow<T, kWeights> place(p, row);
    int64_t at[3];
    row_offsets(p.rows, place.exists ? row : 0, {&p.y, &p.d_y, &p.d_x}, at);
    const auto slice = [&](const RowTensor& tensor, int64_t offset) {
      return TileSlice<T, false>(static_cast<T*>(tensor.data) + offset, tensor.axis, shape, group,
                                 place.exists ? length : 0);
    };
    backward_of_tile<T, kWeights>(place.alpha, group, slice(p.y, at[0]), slice(p.d_y, at[1]),
                                  slice(p.d_x, at[2]));
  }
}

}  // namespace pullback::entmax

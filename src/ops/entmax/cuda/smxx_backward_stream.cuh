// Long rows with unit stride along the axis: d_x = s (d_y - <s, d_y> / S), S = sum of s.
// whole: a block a row. chunk_sums and chunk_gradients: a row over many blocks, where rows are few;
// the chunks' sums go through global memory and are added in an order of their own.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

template <class T, Weights kWeights>
void backward_whole(const BackwardParams& p) {
  using R = Real<T>;
  const RowPlace place = place_of<T, kWeights>(p, static_cast<int64_t>(blockIdx.x));
  if (place.elsewhere) return;
  __shared__ Sums<R> scratch[kWarpSize];
  const PieceRow<T, kWeights> row(p, place);
  if (place.nan) return fill_nan(row, threadIdx.x, blockDim.x);
  Slice<T, kWeights> slice(row, place.alpha, 0, row.pieces, true, p.cached_pieces);
  const Sums<R> sums = block_sum(slice.template collect<true>(), scratch);
  slice.template write<true>(sums.s_d_y / sums.s);
}

// Grid: chunks, rows.
template <class T, Weights kWeights>
struct Chunk {
  using R = Real<T>;

  explicit Chunk(const BackwardParams& p)
      : task(static_cast<int64_t>(blockIdx.x) / p.chunks),
        index(static_cast<int64_t>(blockIdx.x) - task * p.chunks),
        place(place_of<T, kWeights>(p, task)),
        row(p, place),
        share(static_cast<int>((row.pieces + p.chunks - 1) / p.chunks)),
        begin(share * static_cast<int>(index)),
        end(begin + share < row.pieces ? begin + share : row.pieces),
        sums(static_cast<Sums<R>*>(p.partial_sums) + task * p.chunks) {}

  int64_t task, index;
  RowPlace place;
  PieceRow<T, kWeights> row;
  int share, begin, end;
  Sums<R>* sums;
};

template <class T, Weights kWeights>
void backward_chunk_sums(const BackwardParams& p) {
  using R = Real<T>;
  __shared__ Sums<R> scratch[kWarpSize];
  const Chunk<T, kWeights> chunk(p);
  if (chunk.place.elsewhere) return;
  Slice<T, kWeights> slice(chunk.row, chunk.place.alpha, chunk.begin, chunk.end, chunk.index == 0,
                           0);
  const Sums<R> sums = block_sum(slice.template collect<false>(), scratch);
  if (threadIdx.x == 0) chunk.sums[chunk.index] = sums;
}

template <class T, Weights kWeights>
void backward_chunk_gradients(const BackwardParams& p) {
  using R = Real<T>;
  __shared__ Sums<R> scratch[kWarpSize];
  const Chunk<T, kWeights> chunk(p);
  if (chunk.place.elsewhere) return;
  if (chunk.place.nan) {
    return fill_nan(chunk.row, chunk.index * blockDim.x + threadIdx.x, p.chunks * blockDim.x);
  }
  Sums<R> sums;
  for (int64_t i = threadIdx.x; i < p.chunks; i += blockDim.x) {
    sums.s += chunk.sums[i].s;
    sums.s_d_y += chunk.sums[i].s_d_y;
  }
  sums = block_sum(sums, scratch);
  const Slice<T, kWeights> slice(chunk.row, chunk.place.alpha, chunk.begin, chunk.end,
                                 chunk.index == 0, 0);
  slice.template write<false>(sums.s_d_y / sums.s);
}

}  // namespace pullback::entmax

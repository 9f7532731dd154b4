// Rows longer than the second-level cache bears one a multiprocessor: a cluster of blocks a row, so
// that fewer rows are under way at a time. The blocks' sums meet in distributed shared memory.
#pragma once

#include "device/cluster.cuh"
#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

template <class T, Weights kWeights>
void cluster_row(const BackwardParams& p, const RowPlace& place) {
  using R = Arithmetic<T, kWeights>;
  __shared__ Sums<R> scratch[kWarpSize];
  __shared__ Sums<R> of_block[kMaxCluster];
  const uint32_t rank = cluster_rank(), blocks = cluster_size();
  const PieceRow<T, kWeights> row(p, place);
  const int64_t share = (row.pieces + blocks - 1) / blocks;
  const int64_t begin = share * rank;
  const int64_t end = begin + share < row.pieces ? begin + share : row.pieces;
  Slice<T, kWeights> slice(row, place.alpha, begin, end, rank == 0, p.cached_pieces);
  if (place.nan) {
    return fill_nan(row, rank * blockDim.x + threadIdx.x, blocks * blockDim.x);
  }
  cluster_arrive();
  const Sums<R> mine = block_sum(slice.template collect<true>(), scratch);
  cluster_wait();
  if (threadIdx.x < blocks) {
    store_remote(remote_address(&of_block[rank].s, threadIdx.x), mine.s);
    store_remote(remote_address(&of_block[rank].s_d_y, threadIdx.x), mine.s_d_y);
  }
  cluster_barrier();
  Sums<R> sums;
  for (uint32_t block = 0; block < blocks; ++block) {
    sums.s += of_block[block].s;
    sums.s_d_y += of_block[block].s_d_y;
  }
  slice.template write<true>(sums.s_d_y / sums.s);
}
template <class T, Weights kWeights>
void backward_cluster(const BackwardParams& p) {
  const RowPlace place =
      place_of<T, kWeights>(p, static_cast<int64_t>(blockIdx.x / cluster_size()));
  with_weights_of_row<T, kWeights>(place,
                                   [&]<Weights kOfRow>() { cluster_row<T, kOfRow>(p, place); });
}

}  // namespace pullback::entmax

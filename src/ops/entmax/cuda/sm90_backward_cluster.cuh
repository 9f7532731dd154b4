// Rows that a cluster of blocks shares: d_x = s (d_y - <s, d_y> / S), S = sum of s. The blocks'
// sums meet in distributed shared memory. cluster: rows longer than the second-level cache bears
// one a multiprocessor, read twice; fewer rows are under way at a time. cluster_registers: rows
// that the registers of a cluster hold, read once. Their powers are computed once, too.
#pragma once

#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "ops/entmax/cuda/smxx_backward_registers.cuh"

namespace pullback::entmax {

// A cluster's sums, the same bits on all threads. Made before the blocks read their rows, by all
// blocks of a cluster or by none.
template <class R>
class ClusterSum {
 public:
  struct Scratch {
    Sums<R> of_warp[kWarpSize], of_block[kMaxCluster];
    uint64_t all_here;  // counts the bytes of of_block
  };

  explicit ClusterSum(Scratch& scratch) : scratch_(scratch) {
    if (threadIdx.x == 0) {
      barrier_init(&scratch.all_here, 1);
      barrier_init_fence();
      barrier_expect_bytes(&scratch.all_here, cluster_size() * sizeof(Sums<R>));
    }
    cluster_arrive();
  }

  Sums<R> operator()(const Sums<R>& of_thread) const {
    const uint32_t blocks = cluster_size();
    const Sums<R> mine = block_sum(of_thread, scratch_.of_warp);
    cluster_wait();
    if (threadIdx.x < blocks) {
      const uint32_t barrier = remote_address(&scratch_.all_here, threadIdx.x);
      const Sums<R>& place = scratch_.of_block[cluster_rank()];
      send(remote_address(&place.s, threadIdx.x), mine.s, barrier);
      send(remote_address(&place.s_d_y, threadIdx.x), mine.s_d_y, barrier);
    }
    barrier_wait(&scratch_.all_here, 0);
    Sums<R> sums;
    for (uint32_t block = 0; block < blocks; ++block) {
      sums.s += scratch_.of_block[block].s;
      sums.s_d_y += scratch_.of_block[block].s_d_y;
    }
    return sums;
  }

 private:
  Scratch& scratch_;
};

// Calls use(place, row, begin, end) with this block's pieces of the cluster's row.
template <class T, Weights kWeights, class Use>
void with_share_of_cluster(const BackwardParams& p, const Use& use) {
  const auto rank = static_cast<int>(cluster_rank()), blocks = static_cast<int>(cluster_size());
  const RowPlace place =
      place_of<T, kWeights>(p, static_cast<int64_t>(blockIdx.x / cluster_size()));
  if (place.elsewhere) return;
  const PieceRow<T, kWeights> row(p, place);
  const int share = (row.pieces + blocks - 1) / blocks, begin = share * rank;
  use(place, row, begin, min(begin + share, row.pieces));
}

template <class T, Weights kWeights>
void backward_cluster(const BackwardParams& p) {
  using Sum = ClusterSum<Real<T>>;
  __shared__ typename Sum::Scratch scratch;
  with_share_of_cluster<T, kWeights>(p, [&](const RowPlace& place, const PieceRow<T, kWeights>& row,
                                            int begin, int end) {
    Slice<T, kWeights> slice(row, place.alpha, begin, end, cluster_rank() == 0, p.cached_pieces);
    const Sum sum_over_row(scratch);
    const Sums<Real<T>> sums = sum_over_row(slice.template collect<true>());
    slice.template write<true>(sums.s_d_y / sums.s);
  });
}

template <class T, Weights kWeights>
void backward_cluster_registers(const BackwardParams& p) {
  using Sum = ClusterSum<Real<T>>;
  constexpr int kMaxEdge = PieceRow<T, kWeights>::kMaxEdge;
  __shared__ typename Sum::Scratch scratch;
  __shared__ EdgeElement<T> edges[kMaxEdge];
  with_share_of_cluster<T, kWeights>(
      p, [&](const RowPlace& place, const PieceRow<T, kWeights>& row, int begin, int end) {
        const Sum sum_over_row(scratch);
        const PieceRange<T, kWeights> range(row, begin, end);
        registers_row<T, kWeights, kBlockVectors, false>(
            row, range, cluster_rank() == 0 ? row.edge : 0, place, static_cast<int>(threadIdx.x),
            static_cast<int>(blockDim.x), edges[threadIdx.x % kMaxEdge], sum_over_row);
      });
}

}  // namespace pullback::entmax

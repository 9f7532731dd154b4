// A block's slice of a long row: sums of s and s * d_y, then the gradient. The second pass takes
// the first pieces from shared memory and the others from the second-level cache, last pieces
// first.
#pragma once

#include "ops/entmax/cuda/backward_row.cuh"

namespace pullback::entmax {

// Partial sums of any length keep the digits of their type.
template <class R>
struct CompensatedSum {
  R sum = 0, rest = 0;
  void add(R value) {
    const R total = sum + value;
    const R part = total - sum;
    rest += (sum - (total - part)) + (value - part);
    sum = total;
  }
  R total() const { return sum + rest; }
};

// Sums over the threads of the block, the same bits on all. `scratch` has room for a value per
// warp.
template <class R>
Sums<R> block_sum(Sums<R> value, Sums<R>* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  value = {warp_sum(value.s), warp_sum(value.s_d_y)};
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / kWarpSize ? scratch[lane] : Sums<R>{};
  return {warp_sum(value.s), warp_sum(value.s_d_y)};
}

// `with_edge`: the slice takes the row's edge too. `cached`: pieces of y and
// of d_y that a thread may keep in the block's dynamic shared memory.
template <class T, Weights kWeights>
class Slice {
 public:
  using R = Real<T>;

  Slice(const PieceRow<T, kWeights>& row, double alpha, int begin, int end, bool with_edge,
        int cached)
      : range_(row, begin, end), alpha_(alpha), cached_(cached) {
    edge_ = kNoEdge;
    if (with_edge && thread() < row.edge) {
      edge_ = row.edge_at(thread()) - row.head - begin * kVectorLength<T>;
    }
    whole_ = range_.count / step() * step();
  }

  // With kZeros, pieces without support get their zeros at once.
  template <bool kZeros>
  Sums<R> collect() {
    // A warp whose last pieces mostly had support reads d_y without waiting for y.
    bool dense = kDense;
    int bit = 0;
    for (int begin = thread(); begin < whole_; begin += step(), bit += kBatch) {
      if (kDense || dense) {
        dense = collect_batch<kBatch, true, kZeros>(begin, bit);
      } else {
        dense = collect_batch<kBatch, false, kZeros>(begin, bit);
      }
    }
    for (int begin = whole_ + thread(); begin < range_.count; begin += threads(), ++bit) {
      collect_batch<1, kDense, kZeros>(begin, bit);
    }
    if (edge_ != kNoEdge) {
      const R d_y = static_cast<R>(to_real(range_.d_y[edge_]));
      Sums<R> sums;
      add(sums, range_.template slope_at<R>(edge_, alpha_), d_y);
      add_sums(sums);
    }
    return {s_.total(), s_d_y_.total()};
  }

  // After collect() by the same thread with the same kZeros.
  template <bool kZeros>
  void write(R mean) const {
    const int batches = whole_ / step();
    int bit = batches * kBatch;
    for (int begin = whole_ + thread(); begin < range_.count; begin += threads(), ++bit) {
      write_batch<1, kZeros>(begin, bit, mean);
    }
    for (int batch = batches - 1; batch >= 0; --batch) {
      write_batch<kBatch, kZeros>(batch * step() + thread(), batch * kBatch, mean);
    }
    if (edge_ != kNoEdge) {
      const R d_y = static_cast<R>(to_real(range_.d_y[edge_]));
      const R d_x = gradient(range_.template slope_at<R>(edge_, alpha_), d_y, mean);
      range_.d_x[edge_] = from_real<T>(static_cast<Real<T>>(d_x));
    }
  }

 private:
  using SlopeOf = SlopePiece<T, kWeights>;
  static constexpr int kBatch = 4;  // pieces of a thread in flight
  static constexpr int kNoEdge = -0x7fffffff;
  static constexpr int kKnownPieces = 32;
  static constexpr bool kDense = kWeights == Weights::softmax;

  static constexpr bool kCaches = kWeights != Weights::mask;

  // Piece `bit` of this thread: y or d_y.
  static Piece& cached_piece(int bit, int which) {
    extern __shared__ Piece pieces[];
    return pieces[(bit * 2 + which) * threads() + thread()];
  }

  static int thread() { return static_cast<int>(threadIdx.x); }
  static int threads() { return static_cast<int>(blockDim.x); }
  static int step() { return kBatch * threads(); }

  void add_sums(const Sums<R>& sums) {
    s_.add(sums.s);
    s_d_y_.add(sums.s_d_y);
  }

  template <int kCount>
  void put_into_cache(int bit, const SlopeOf (&data)[kCount], const Piece (&d_y)[kCount]) {
    if constexpr (kCaches) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (bit + j >= cached_) continue;
        cached_piece(bit + j, 0) = data[j].data;
        cached_piece(bit + j, 1) = d_y[j];
      }
      if (!kDense && bit < kKnownPieces) in_cache_ |= 1u << bit;
    }
  }

  // kAll: as if all pieces had support. Whether the pieces of the warp mostly have.
  template <int kCount, bool kAll, bool kZeros>
  bool collect_batch(int begin, int bit) {
    const Keep keep;
    SlopeOf data[kCount];
    Piece d_y[kCount];
    Sums<R> sums;
#pragma unroll
    for (int j = 0; j < kCount; ++j) data[j] = range_.load_slope(begin + j * threads(), keep);
    if constexpr (kAll) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) d_y[j] = range_.load_d_y(begin + j * threads(), keep);
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_piece<T>(sums, data[j], d_y[j], alpha_);
      put_into_cache(bit, data, d_y);
      if (!kDense && bit < kKnownPieces) known_ |= ((1u << kCount) - 1) << bit;
    } else {
      bool active[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        active[j] = data[j].any();
        if (active[j]) d_y[j] = range_.load_d_y(begin + j * threads(), keep);
      }
      if (kZeros && bit < kKnownPieces) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (active[j]) {
            known_ |= 1u << (bit + j);
          } else {
            range_.store(begin + j * threads(), {});
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (active[j]) add_piece<T>(sums, data[j], d_y[j], alpha_);
      }
      bool all = kZeros && kCount == kBatch;
#pragma unroll
      for (int j = 0; j < kCount; ++j) all = all && active[j];
      if (all) put_into_cache(bit, data, d_y);
    }
    add_sums(sums);
    if constexpr (kDense || kCount == 1) return kDense;
    return __popc(__ballot_sync(kAllLanes, data[0].any())) > kWarpSize / 2;
  }

  template <int kCount, bool kZeros>
  void write_batch(int begin, int bit, R mean) const {
    constexpr uint32_t kAll = (1u << kCount) - 1;
    uint32_t wanted = kAll;
    const bool known = kZeros && !kDense && bit < kKnownPieces;
    if (known) wanted = known_ >> bit & kAll;
    if (wanted == 0) return;

    SlopeOf data[kCount];
    Piece d_y[kCount];
    if (kDense || (known && wanted == kAll)) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kCaches) {
          if (bit + j < cached_ && (kDense || (known && (in_cache_ >> bit & 1)))) {
            data[j].data = cached_piece(bit + j, 0);
            d_y[j] = cached_piece(bit + j, 1);
            continue;
          }
        }
        data[j] = range_.load_slope(begin + j * threads(), Drop());
        d_y[j] = range_.load_d_y(begin + j * threads(), Drop());
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        range_.store(begin + j * threads(), gradient_piece<T>(data[j], d_y[j], mean, alpha_));
      }
      return;
    }
#pragma unroll 1
    for (int j = 0; j < kCount; ++j) {
      if ((wanted >> j & 1) == 0) continue;
      const SlopeOf slope = range_.load_slope(begin + j * threads(), Drop());
      Piece d_x{};
      if (slope.any()) {
        const Piece of_d_y = range_.load_d_y(begin + j * threads(), Drop());
        d_x = gradient_piece<T>(slope, of_d_y, mean, alpha_);
      }
      range_.store(begin + j * threads(), d_x);
    }
  }

  PieceRange<T, kWeights> range_;
  double alpha_;
  int edge_;   // this thread's element of the edge, from the first piece on
  int whole_;  // pieces of whole batches of the block
  CompensatedSum<R> s_, s_d_y_;
  int cached_;
  uint32_t known_ = 0;     // which pieces of this thread have support
  uint32_t in_cache_ = 0;  // first pieces of batches that are in shared memory
};

}  // namespace pullback::entmax

// Contiguous rows that are too long for registers: they stay in shared memory, so that every
// element is read once and written once. Of rows that are longer than that, what does not fit is
// read twice.
//   forward   y = exp(scale x − m) / Σ exp(scale x − m),  m = max scale x
//   backward  d_x = scale y (d_y − Σ y d_y)
// A block, or a cluster of blocks, walks over its groups of rows. Each thread has places of its own
// in shared memory that it fills by asynchronous copies and that only it reads: a ring of batches,
// always full. A group is gone over twice: first for its sums, as its copies arrive; then for the
// results, where every batch that has been read is refilled at once with what comes next. If a
// group has n more batches than the ring, the first n are given up in the first round and come
// again at the end.
#pragma once

#include "device/async_copy.cuh"
#include "device/cluster.cuh"
#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// Groups are numbered in 32 bits: 2^32 rows of this length fit in no memory.

// Some neighbouring rows of one block row.
struct Group {
  Place place;
  int64_t batch;
  int32_t mine;     // vectors of this thread
  int32_t batches;  // of kBatch vectors, for the threads that have the most; 0: no such group
  int64_t first;    // offset of this thread's first vector from the row's beginning
  int64_t step;     // from one of its vectors to the next
};

template <class T, int kBatch>
Group group_of(const Schedule& schedule, uint32_t item, int64_t batches, const Divisor& piece,
               int32_t block) {
  Group group;
  group.batches = 0;
  if (item >= schedule.ctas * batches) return group;
  const auto all = static_cast<uint32_t>(batches);
  const uint32_t cta = item / all;
  group.batch = item - cta * all;
  const RowClass& row_class = find_class(schedule, cta);
  group.place = place_of(schedule, row_class, cta - row_class.first_cta,
                         cluster_rank() * kRingWarps + threadIdx.x / kWarpSize);
  group.place.team *= cluster_size();
  const Share share = share_of<T>(group.place, piece, block);
  const uint32_t blocks = group.place.block_row.blocks;
  group.batches = static_cast<int32_t>((blocks - 1) / (share.step * kBatch) + 1);
  group.mine = share.first < share.blocks
                   ? static_cast<int32_t>((blocks - share.first - 1) / share.step + 1)
                   : 0;
  group.first = share.begin;
  group.step = share.advance / sizeof(T);
  return group;
}

// Batches of kBatch · kTensors vectors. begin(tensor, group) is where the thread's row begins.
template <class T, int kTensors, class Begin>
class Ring {
 public:
  static constexpr int kBatch = kRingBatch / kTensors;

  Ring(const Schedule& schedule, int64_t batches, int32_t block, const Divisor& piece, int32_t size,
       const Begin& begin)
      : schedule_(schedule),
        batches_(batches),
        block_(block),
        piece_(piece),
        size_(size),
        begin_(begin),
        item_(cluster_index()) {
    extern __shared__ __align__(128) unsigned char memory[];
    mine_ = reinterpret_cast<Words*>(memory) + threadIdx.x;
    open();
    for (int32_t slot = 0; slot < size; ++slot) fill(slot);
  }

  // Batches of the group that come twice.
  int32_t excess(const Group& group) const { return max(0, group.batches - size_); }

  // Until batch `batch` from the oldest has arrived.
  void wait(int32_t batch) const { async_wait(size_ - 1 - batch); }

  const Words* batch(int32_t batch) const {
    int32_t slot = oldest_ + batch;
    if (slot >= size_) slot -= size_;
    return mine_ + slot * (kRingBatch * kRingThreads);
  }
  // Of what batch() returned.
  static Words get(const Words* batch, int vector, int tensor) {
    return batch[(vector * kTensors + tensor) * kRingThreads];
  }

  // The oldest batch is done with.
  void refill() {
    fill(oldest_);
    if (++oldest_ == size_) oldest_ = 0;
  }

 private:
  void open() {
    const Group group = group_of<T, kBatch>(schedule_, item_, batches_, piece_, block_);
    left_ = group.batches;
    if (left_ == 0) return;
    again_ = excess(group);
    vectors_ = group.mine;
    step_ = group.step;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) from_[t] = begin_(t, group) + group.first;
  }

  void fill(int32_t slot) {
    if (left_ > 0) {
      Words* const to = mine_ + slot * (kRingBatch * kRingThreads);
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < vectors_) {
#pragma unroll
          for (int t = 0; t < kTensors; ++t) {
            async_copy(to + (v * kTensors + t) * kRingThreads, from_[t]);
          }
        }
#pragma unroll
        for (int t = 0; t < kTensors; ++t) from_[t] += step_;
      }
      vectors_ -= kBatch;
      if (--left_ == 0) {
        if (again_ > 0) {  // back to the beginning
          const int32_t vectors = (again_ + size_) * kBatch;
          vectors_ += vectors;
#pragma unroll
          for (int t = 0; t < kTensors; ++t) from_[t] -= vectors * step_;
          left_ = again_;
          again_ = 0;
        } else {
          item_ += cluster_count();
          open();
        }
      }
    }
    async_commit();
  }

  const Schedule& schedule_;
  const int64_t batches_;
  const int32_t block_;
  const Divisor& piece_;
  const int32_t size_;
  const Begin& begin_;
  Words* mine_;
  int32_t oldest_ = 0;
  // The group that is being copied: batches and vectors of this thread that are left.
  uint32_t item_;
  int32_t left_, again_, vectors_;
  int64_t step_;
  const T* from_[kTensors];
};

inline void store_to(float* local, uint32_t rank, float value) {
  store_remote(remote_address(local, rank), value);
}
inline void store_to(double* local, uint32_t rank, double value) {
  store_remote(remote_address(local, rank), value);
}

// What a part of a row knows of it: the maximum, and Σ exp(scale x − m) for that maximum.
template <class R>
struct Partial {
  R maximum, sum;
};
template <class R>
void store_to(Partial<R>* local, uint32_t rank, const Partial<R>& value) {
  store_to(&local->maximum, rank, value.maximum);
  store_to(&local->sum, rank, value.sum);
}

template <class Value>
struct Parts {
  Value of_warps[kRingWarps][kRingRows];
  Value of_blocks[2][kRingCluster][kRingRows];
};

// Brings what each warp knows of its rows together on all threads of their teams, in a fixed order.
// combine(first, count) is of every kRingRows-th value; `parity` alternates from call to call.
template <class Value, class Combine>
Value over_team(const Value& value, const Place& place, int parity, Parts<Value>& shared,
                const Combine& combine) {
  const uint32_t blocks = cluster_size();
  shared.of_warps[threadIdx.x / kWarpSize][place.slot] = value;
  __syncthreads();
  if (threadIdx.x < kRingRows * blocks) {
    const uint32_t slot = threadIdx.x % kRingRows, to = threadIdx.x / kRingRows;
    store_to(&shared.of_blocks[parity][cluster_rank()][slot], to,
             combine(&shared.of_warps[0][slot], kRingWarps));
  }
  cluster_barrier();
  return combine(&shared.of_blocks[parity][0][place.slot], blocks);
}

template <class T>
void forward_ring(const ForwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ Parts<Partial<R>> shared;
  begin_rows();
  const auto begin = [&](int, const Group& group) {
    return row_begin<const T>(p.x, group.place, group.batch, p.block);
  };
  using TheRing = Ring<T, 1, decltype(begin)>;
  constexpr int kBatch = TheRing::kBatch;
  TheRing ring(p.schedule, p.batches, p.block, p.piece, p.ring, begin);
  const bool negative = p.scale < 0;
  const R scale = static_cast<R>(p.scale);
  const R factor = factor_of_elements<T>(negative ? -scale : scale);
  cluster_barrier();  // all blocks have started before one of them is written to

  int parity = 0;
  for (uint32_t item = cluster_index();; item += cluster_count(), parity ^= 1) {
    const Group group = group_of<T, kBatch>(p.schedule, item, p.batches, p.piece, p.block);
    if (group.batches == 0) break;
    const Place& place = group.place;

    // In the units of x: the scale is in the factor.
    R maximum = -infinity<R>(), sum = 0;
    const int32_t excess = ring.excess(group);
    for (int32_t b = 0; b < group.batches; ++b) {
      const int32_t from_oldest = max(0, b - excess);
      ring.wait(from_oldest);
      const int32_t left = group.mine - b * kBatch;
      const Words* const batch = ring.batch(from_oldest);
      Words x[kBatch];
      Largest<T> of_batch;
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          x[v] = TheRing::get(batch, v, 0);
          if (negative) negate<T>(x[v]);
          of_batch.add(x[v]);
        }
      }
      const R largest = larger(maximum, of_batch.value());
      const R shift = shift_of(largest);
      sum = maximum == -infinity<R>() ? sum : sum * power((maximum - shift) * factor);
      maximum = largest;
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          const Reals<T> x_v = reals<T>(x[v]);
#pragma unroll
          for (int e = 0; e < kLength; ++e) {
            sum += power_of_element<T>(x_v.element[e], shift, factor);
          }
        }
      }
      if (b < excess) ring.refill();
    }
    Partial<R> part;
    part.maximum = reduce_lanes<Maximum>(maximum, place);
    // A part of the row whose maximum is −inf has the sum 0, or NaN if it holds one.
    const auto moved = [factor](const Partial<R>& from, R to) {
      return from.maximum == -infinity<R>()
                 ? from.sum
                 : from.sum * power((from.maximum - shift_of(to)) * factor);
    };
    part.sum = reduce_lanes<Sum>(moved({maximum, sum}, part.maximum), place);
    const Partial<R> row =
        over_team(part, place, parity, shared, [&](const Partial<R>* parts, uint32_t count) {
          Partial<R> all = {-infinity<R>(), R{0}};
#pragma unroll 1
          for (uint32_t n = 0; n < count; ++n) {
            all.maximum = larger(all.maximum, parts[n * kRingRows].maximum);
          }
#pragma unroll 1
          for (uint32_t n = 0; n < count; ++n) all.sum += moved(parts[n * kRingRows], all.maximum);
          return all;
        });
    const R shift = shift_of(row.maximum);
    const R weight = inverse(row.sum);

    T* const first = row_begin<T>(p.y, place, group.batch, p.block) + group.first;
    for (int32_t n = 0; n < group.batches; ++n) {
      const int32_t b = n + excess < group.batches ? n + excess : n + excess - group.batches;
      const int32_t left = group.mine - b * kBatch;
      if (excess > 0) ring.wait(0);
      const Words* const batch = ring.batch(0);
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          Words x = TheRing::get(batch, v, 0);
          if (negative) negate<T>(x);
          const Reals<T> x_v = reals<T>(x);
          R out[kLength];
#pragma unroll
          for (int e = 0; e < kLength; ++e) {
            out[e] = power_of_element<T>(x_v.element[e], shift, factor) * weight;
          }
          store_words(first + (b * kBatch + v) * group.step, rounded<T>(out));
        }
      }
      ring.refill();
    }
  }
  end_rows();
}

template <class T>
void backward_ring(const BackwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ Parts<R> shared;
  begin_rows();
  const auto begin = [&](int tensor, const Group& group) {
    return row_begin<const T>(tensor == 0 ? p.y : p.d_y, group.place, group.batch, p.block);
  };
  using TheRing = Ring<T, 2, decltype(begin)>;
  constexpr int kBatch = TheRing::kBatch;
  TheRing ring(p.schedule, p.batches, p.block, p.piece, p.ring, begin);
  const R scale = static_cast<R>(p.scale);
  cluster_barrier();  // all blocks have started before one of them is written to

  int parity = 0;
  for (uint32_t item = cluster_index();; item += cluster_count(), parity ^= 1) {
    const Group group = group_of<T, kBatch>(p.schedule, item, p.batches, p.piece, p.block);
    if (group.batches == 0) break;
    const Place& place = group.place;

    R sum = 0;
    const int32_t excess = ring.excess(group);
    for (int32_t b = 0; b < group.batches; ++b) {
      const int32_t from_oldest = max(0, b - excess);
      ring.wait(from_oldest);
      const int32_t left = group.mine - b * kBatch;
      const Words* const batch = ring.batch(from_oldest);
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          const Reals<T> weights = reals<T>(TheRing::get(batch, v, 0));
          const Reals<T> gradients = reals<T>(TheRing::get(batch, v, 1));
#pragma unroll
          for (int e = 0; e < kLength; ++e) {
            if (weights.element[e] != R{0}) sum += weights.element[e] * gradients.element[e];
          }
        }
      }
      if (b < excess) ring.refill();
    }
    const R delta = over_team(reduce_lanes<Sum>(sum, place), place, parity, shared,
                              [](const R* parts, uint32_t count) {
                                R all = 0;
#pragma unroll 1
                                for (uint32_t n = 0; n < count; ++n) all += parts[n * kRingRows];
                                return all;
                              });

    T* const first = row_begin<T>(p.d_x, place, group.batch, p.block) + group.first;
    for (int32_t n = 0; n < group.batches; ++n) {
      const int32_t b = n + excess < group.batches ? n + excess : n + excess - group.batches;
      const int32_t left = group.mine - b * kBatch;
      T* d_x = first + b * kBatch * group.step;
      if (excess > 0) ring.wait(0);
      const Words* const batch = ring.batch(0);
      Words y[kBatch], d_y[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          y[v] = TheRing::get(batch, v, 0);
          d_y[v] = TheRing::get(batch, v, 1);
        }
      }
      ring.refill();
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        if (v < left) {
          const Reals<T> weights = reals<T>(y[v]), gradients = reals<T>(d_y[v]);
          R out[kLength];
#pragma unroll
          for (int e = 0; e < kLength; ++e) {
            const R ds = weights.element[e] * (gradients.element[e] - delta);
            out[e] = weights.element[e] == R{0} ? R{0} : scale * ds;
          }
          store_words(d_x, rounded<T>(out));
        }
        d_x += group.step;
      }
    }
  }
  end_rows();
}

}  // namespace pullback::block_softmax

// Contiguous rows that are too long for registers: they stay in shared memory, so that every
// element is read once and written once.
//   forward   y = exp(scale x − m) / Σ exp(scale x − m),  m = max scale x
//   backward  d_x = scale y (d_y − Σ y d_y)
// A block walks over its groups of rows. Each thread has `slots` places of its own in shared memory
// that it fills by asynchronous copies and that only it reads: a ring, always full. A group is
// gone over twice: first for its sums, as its copies arrive; then for the results, where every
// place that has been read is refilled at once with what comes next, up to the group after.
#pragma once

#include "device/async_copy.cuh"
#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// A group of rows: the unit's place and how many vectors each of its threads has, at most.
struct Group {
  Place place;
  int64_t batch;
  uint32_t vectors;  // of a row
  int32_t rounds;    // of the team over the row; 0: no group
};

inline Group group_of(const Schedule& schedule, int64_t item, int64_t batches, uint32_t piece) {
  Group group;
  group.rounds = 0;
  if (item >= schedule.ctas * batches) return group;
  const auto cta = static_cast<uint32_t>(item / batches);
  group.batch = item - cta * batches;
  const RowClass& row_class = find_class(schedule, cta);
  group.place = place_of(schedule, row_class, cta - row_class.first_cta, threadIdx.x / kWarpSize);
  group.vectors = group.place.block_row.blocks * piece;
  group.rounds = static_cast<int32_t>((group.vectors - 1) / group.place.team + 1);
  return group;
}

// kTensors vectors at a time. `begin(tensor, group)` is where the thread's row begins.
template <class T, int kTensors, class Begin>
class Ring {
 public:
  Ring(const Schedule& schedule, int64_t batches, int32_t block, const Divisor& piece,
       int32_t slots, const Begin& begin)
      : schedule_(schedule),
        batches_(batches),
        block_(block),
        piece_(piece),
        slots_(slots),
        begin_(begin),
        item_(blockIdx.x) {
    extern __shared__ __align__(128) unsigned char memory[];
    mine_ = reinterpret_cast<Vector<T>*>(memory) + threadIdx.x;
    open(group_of(schedule_, item_, batches_, piece_.value));
    for (int32_t slot = 0; slot < slots; ++slot) fill(slot);
  }

  // Until the vectors of the first `rounds` rounds from the oldest have arrived.
  void wait(int32_t rounds) const { async_wait(slots_ - rounds); }

  // The vector of round `round` from the oldest.
  Vector<T> get(int32_t round, int tensor) const {
    int32_t slot = oldest_ + round;
    if (slot >= slots_) slot -= slots_;
    return mine_[(slot * kTensors + tensor) * kRingThreads];
  }

  // The oldest round is done with.
  void refill() {
    fill(oldest_);
    if (++oldest_ == slots_) oldest_ = 0;
  }

 private:
  void open(const Group& group) {
    round_ = 0;
    rounds_ = group.rounds;
    if (rounds_ == 0) return;
    vectors_ = group.vectors;
    thread_ = group.place.thread;
    team_ = group.place.team;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) from_[t] = begin_(t, group);
  }

  void fill(int32_t slot) {
    if (round_ == rounds_ && rounds_ > 0) {
      item_ += gridDim.x;
      open(group_of(schedule_, item_, batches_, piece_.value));
    }
    if (round_ < rounds_) {
      const uint32_t index = thread_ + round_ * team_;
      if (index < vectors_) {
        const int64_t offset = vector_offset<T>(index, piece_, block_);
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          async_copy(mine_ + (slot * kTensors + t) * kRingThreads, from_[t] + offset);
        }
      }
      ++round_;
    }
    async_commit();
  }

  const Schedule& schedule_;
  const int64_t batches_;
  const int32_t block_;
  const Divisor piece_;
  const int32_t slots_;
  const Begin& begin_;
  Vector<T>* mine_;
  int32_t oldest_ = 0;
  // The group that is being copied.
  int64_t item_;
  int32_t round_, rounds_;
  uint32_t vectors_, thread_, team_;
  const T* from_[kTensors];
};

// Vectors that are read from the ring together.
inline constexpr int kRingStep = 4;

template <class T>
void forward_ring(const ForwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ R maxima[2][kRingWarps * kRingRows], sums[2][kRingWarps * kRingRows];
  const auto begin = [&](int, const Group& group) {
    return row_begin<const T>(p.x, group.place, group.batch, p.block);
  };
  Ring<T, 1, decltype(begin)> ring(p.schedule, p.batches, p.block, p.piece, p.slots, begin);
  const R scale = static_cast<R>(p.scale);
  const uint32_t warp = threadIdx.x / kWarpSize;

  int parity = 0;
  for (int64_t item = blockIdx.x;; item += gridDim.x, parity ^= 1) {
    const Group group = group_of(p.schedule, item, p.batches, p.piece.value);
    if (group.rounds == 0) break;
    const Place& place = group.place;

    R maximum = -infinity<R>(), sum = 0;
    for (int32_t first = 0; first < group.rounds; first += kRingStep) {
      ring.wait(min(first + kRingStep, group.rounds));
#pragma unroll
      for (int32_t s = 0; s < kRingStep; ++s) {
        if (place.thread + (first + s) * place.team < group.vectors) {
          const Vector<T> x = ring.get(first + s, 0);
          R scores[kLength];
#pragma unroll
          for (int e = 0; e < kLength; ++e) scores[e] = scale * to_real(x.element[e]);
          R largest = scores[0];
#pragma unroll
          for (int e = 1; e < kLength; ++e) largest = Maximum()(largest, scores[e]);
          if (largest > maximum) {
            sum *= exponential(maximum - largest);
            maximum = largest;
          }
          const R shift = shift_of(maximum);
#pragma unroll
          for (int e = 0; e < kLength; ++e) sum += exponential(scores[e] - shift);
        }
      }
    }
    // First among the lanes, then among the warps; a sum of a part with the maximum −inf is 0 or
    // NaN and must stay so.
    const auto rescaled = [](R part, R from, R to) {
      return from == -infinity<R>() ? part : part * exponential(from - to);
    };
    const R warp_shift = shift_of(reduce_lanes<Maximum>(maximum, place));
    sum = reduce_lanes<Sum>(rescaled(sum, maximum, warp_shift), place);
    maxima[parity][warp * kRingRows + place.slot] = warp_shift;
    sums[parity][warp * kRingRows + place.slot] = sum;
    __syncthreads();
    R shift = -infinity<R>();
    for (int w = 0; w < kRingWarps; ++w) {
      if (sums[parity][w * kRingRows + place.slot] != R{0}) {
        shift = Maximum()(shift, maxima[parity][w * kRingRows + place.slot]);
      }
    }
    shift = shift_of(shift);
    sum = 0;
    for (int w = 0; w < kRingWarps; ++w) {
      const R part = sums[parity][w * kRingRows + place.slot];
      if (part != R{0}) {
        sum += part * exponential(maxima[parity][w * kRingRows + place.slot] - shift);
      }
    }
    const R factor = inverse(sum);

    T* const y = row_begin<T>(p.y, place, group.batch, p.block);
    for (int32_t round = 0; round < group.rounds; ++round) {
      const uint32_t index = place.thread + round * place.team;
      if (index < group.vectors) {
        const Vector<T> x = ring.get(0, 0);
        Vector<T> out;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          out.element[e] =
              from_real<T>(exponential(scale * to_real(x.element[e]) - shift) * factor);
        }
        store_vector(y + vector_offset<T>(index, p.piece, p.block), out);
      }
      ring.refill();
    }
  }
}

template <class T>
void backward_ring(const BackwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ R sums[2][kRingWarps * kRingRows];
  const auto begin = [&](int tensor, const Group& group) {
    return row_begin<const T>(tensor == 0 ? p.y : p.d_y, group.place, group.batch, p.block);
  };
  Ring<T, 2, decltype(begin)> ring(p.schedule, p.batches, p.block, p.piece, p.slots, begin);
  const R scale = static_cast<R>(p.scale);
  const uint32_t warp = threadIdx.x / kWarpSize;

  int parity = 0;
  for (int64_t item = blockIdx.x;; item += gridDim.x, parity ^= 1) {
    const Group group = group_of(p.schedule, item, p.batches, p.piece.value);
    if (group.rounds == 0) break;
    const Place& place = group.place;

    R sum = 0;
    for (int32_t first = 0; first < group.rounds; first += kRingStep) {
      ring.wait(min(first + kRingStep, group.rounds));
#pragma unroll
      for (int32_t s = 0; s < kRingStep; ++s) {
        if (place.thread + (first + s) * place.team < group.vectors) {
          const Vector<T> y = ring.get(first + s, 0), d_y = ring.get(first + s, 1);
#pragma unroll
          for (int e = 0; e < kLength; ++e) {
            const R weight = to_real(y.element[e]);
            if (weight != R{0}) sum += weight * to_real(d_y.element[e]);
          }
        }
      }
    }
    sums[parity][warp * kRingRows + place.slot] = reduce_lanes<Sum>(sum, place);
    __syncthreads();
    R delta = 0;
    for (int w = 0; w < kRingWarps; ++w) delta += sums[parity][w * kRingRows + place.slot];

    T* const d_x = row_begin<T>(p.d_x, place, group.batch, p.block);
    for (int32_t round = 0; round < group.rounds; ++round) {
      const uint32_t index = place.thread + round * place.team;
      if (index < group.vectors) {
        const Vector<T> y = ring.get(0, 0), d_y = ring.get(0, 1);
        Vector<T> out;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R weight = to_real(y.element[e]);
          const R ds = weight * (to_real(d_y.element[e]) - delta);
          out.element[e] = from_real<T>(weight == R{0} ? R{0} : scale * ds);
        }
        store_vector(d_x + vector_offset<T>(index, p.piece, p.block), out);
      }
      ring.refill();
    }
  }
}

}  // namespace pullback::block_softmax

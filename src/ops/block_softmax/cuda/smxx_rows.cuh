// Rows that their team holds in registers: contiguous tensors.
//   forward   s = scale x + terms, hidden where a keep mask is 0;  y = exp(s − m) / Σ exp(s − m)
//   backward  d_x = scale y (d_y − Σ y d_y)
// Every element is read once and written once, in 16-byte vectors. All loads of a thread are issued
// before the first is used; the memory is kept busy by the other warps while a row is reduced.
#pragma once

#include "ops/block_softmax/cuda/smxx_added.cuh"
#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// Vectors of a thread, and of that thread of its warp which has the most. Branches on the latter
// are the same for a whole warp and need no convergence; threads with fewer vectors compute
// something for those they lack, which is never used.
struct Counts {
  int mine, most;
};
template <int kVectors>
Counts count_vectors(const Share& share) {
  int mine = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) mine += share.has(v);
  // A team's threads are numbered upwards in the lanes.
  return {mine, __shfl_sync(kAllLanes, mine, 0)};
}

template <class T, int kVectors, bool kWithTerms>
void forward_rows(const ForwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ OfWarps<R> shared[2];
  begin_rows();
  const Place place = find_place(p.schedule);
  const Share share = share_of<T>(place, p.piece, p.block);
  const Counts counts = count_vectors<kVectors>(share);
  const R scale = static_cast<R>(p.scale);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* const x = row_begin<const T>(p.x, place, batch, p.block) + share.begin;
    T* const y = row_begin<T>(p.y, place, batch, p.block) + share.begin;
    Words raw[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.mine) raw[v] = load_words(after(x, v * share.advance));
    }
    if (!kWithTerms && scale < R{0}) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) negate<T>(raw[v]);
    }
    // With terms the scores are kept, and then their powers. Without, the powers take the place of
    // x where they fit; in 16 bits they are computed twice: registers are what is scarce.
    constexpr bool kInPlace = !kWithTerms && sizeof(T) == sizeof(R);
    R kept[kWithTerms ? kVectors : 1][kLength];
    R maximum = -infinity<R>();
    if constexpr (kWithTerms) {
      const Terms<T> terms(p, place, batch);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < counts.mine) {
          const Reals<T> values = reals<T>(raw[v]);
#pragma unroll
          for (int e = 0; e < kLength; ++e) kept[v][e] = scaled(scale, values.element[e]);
          terms.apply(kept[v], share.first + v * share.step, share.column);
#pragma unroll
          for (int e = 0; e < kLength; ++e) maximum = larger(maximum, kept[v][e]);
        }
      }
    } else {
      Largest<T> largest;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < counts.mine) largest.add(raw[v]);
      }
      maximum = largest.value();
    }
    const R factor =
        kWithTerms ? factor_of_scores(R{1}) : factor_of_elements<T>(scale < R{0} ? -scale : scale);
    const R shift = shift_of(reduce<Maximum>(maximum, place, shared[0]));
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.most) {
        const Reals<T> values = reals<T>(raw[v]);
        R powers[kLength], part;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          powers[e] = kWithTerms ? power((kept[v][e] - shift) * factor)
                                 : power_of_element<T>(values.element[e], shift, factor);
          part = e == 0 ? powers[0] : part + powers[e];
          if constexpr (kWithTerms) kept[v][e] = powers[e];
        }
        if (v < counts.mine) sum += part;
        if constexpr (kInPlace) raw[v] = rounded<T>(powers);
      }
    }
    const R weight = inverse(reduce<Sum>(sum, place, shared[1]));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.most) {
        const Reals<T> values = reals<T>(raw[v]);
        R out[kLength];
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          if constexpr (kWithTerms) {
            out[e] = kept[v][e] * weight;
          } else if constexpr (kInPlace) {
            out[e] = values.element[e] * weight;
          } else {
            out[e] = power_of_element<T>(values.element[e], shift, factor) * weight;
          }
        }
        if (v < counts.mine) store_words(after(y, v * share.advance), rounded<T>(out));
      }
    }
    if (place.warps > 1) __syncthreads();
  }
  end_rows();
}

template <class T, int kVectors>
void backward_rows(const BackwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ OfWarps<R> shared;
  begin_rows();
  const Place place = find_place(p.schedule);
  const Share share = share_of<T>(place, p.piece, p.block);
  const Counts counts = count_vectors<kVectors>(share);
  const R scale = static_cast<R>(p.scale);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* const y = row_begin<const T>(p.y, place, batch, p.block) + share.begin;
    const T* const d_y = row_begin<const T>(p.d_y, place, batch, p.block) + share.begin;
    T* const d_x = row_begin<T>(p.d_x, place, batch, p.block) + share.begin;
    Words probability[kVectors], gradient[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.mine) {
        probability[v] = load_words(after(y, v * share.advance));
        gradient[v] = load_words(after(d_y, v * share.advance));
      }
    }
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.most) {
        const Reals<T> weights = reals<T>(probability[v]), gradients = reals<T>(gradient[v]);
        R part = 0;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          if (weights.element[e] != R{0}) part += weights.element[e] * gradients.element[e];
        }
        if (v < counts.mine) sum += part;
      }
    }
    const R delta = reduce<Sum>(sum, place, shared);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < counts.most) {
        const Reals<T> weights = reals<T>(probability[v]), gradients = reals<T>(gradient[v]);
        R out[kLength];
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R ds = weights.element[e] * (gradients.element[e] - delta);
          out[e] = weights.element[e] == R{0} ? R{0} : scale * ds;
        }
        if (v < counts.mine) store_words(after(d_x, v * share.advance), rounded<T>(out));
      }
    }
    if (place.warps > 1) __syncthreads();
  }
  end_rows();
}

}  // namespace pullback::block_softmax

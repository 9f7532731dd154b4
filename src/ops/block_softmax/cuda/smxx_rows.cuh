// Rows that their team holds in registers: contiguous tensors.
//   forward   s = scale x + terms, hidden where a keep mask is 0;  y = exp(s − m) / Σ exp(s − m)
//   backward  d_x = scale y (d_y − Σ y d_y)
// Every element is read once and written once, in 16-byte vectors. All loads of a thread are issued
// before the first is used; the memory is kept busy by the other warps while a row is reduced.
#pragma once

#include "ops/block_softmax/cuda/smxx_added.cuh"
#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// How many of the vectors thread, thread + team, … are below count.
inline int vectors_of(const Place& place, uint32_t count) {
  return place.thread < count ? static_cast<int>((count - place.thread - 1) / place.team + 1) : 0;
}

template <class T, int kVectors, bool kWithTerms>
void forward_rows(const ForwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ R shared[2][kWarps * kMaxUnitRows];
  begin_rows();
  Place place;
  if (!find_place(p.schedule, place)) return;
  const int count = vectors_of(place, place.block_row.blocks * p.piece.value);
  const R scale = static_cast<R>(p.scale);
  const auto offset_of = [&](int v) {
    return vector_offset<T>(place.thread + v * place.team, p.piece, p.block);
  };

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* const x = row_begin<const T>(p.x, place, batch, p.block);
    T* const y = row_begin<T>(p.y, place, batch, p.block);
    Raw raw[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        raw[v] = load_raw(x + offset_of(v));
      }
    }
    // With terms the scores are kept, and then their powers. Without, the powers take the place of
    // x where they fit; in 16 bits they are computed twice: registers are what is scarce.
    constexpr bool kInPlace = !kWithTerms && sizeof(T) == sizeof(R);
    R kept[kWithTerms ? kVectors : 1][kLength];
    R maximum = -infinity<R>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        if constexpr (kWithTerms) {
          const Terms<T> terms(p, place, batch);
          const uint32_t index = place.thread + v * place.team;
          const uint32_t block = divide(index, p.piece);
          const Reals<T> values = reals<T>(raw[v]);
#pragma unroll
          for (int e = 0; e < kLength; ++e) kept[v][e] = scale * values.element[e];
          terms.apply(kept[v], block, (index - block * p.piece.value) * kLength);
#pragma unroll
          for (int e = 0; e < kLength; ++e) maximum = larger(maximum, kept[v][e]);
        } else {
          if (scale < R{0}) negate<T>(raw[v]);
          maximum = larger(maximum, maximum_of<T>(raw[v]));
        }
      }
    }
    const R factor =
        kWithTerms ? factor_of_scores(R{1}) : factor_of_elements<T>(scale < R{0} ? -scale : scale);
    const R shift = shift_of(reduce<Maximum>(maximum, place, shared[0]));
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const Reals<T> values = reals<T>(raw[v]);
        R powers[kLength];
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          powers[e] = kWithTerms ? power((kept[v][e] - shift) * factor)
                                 : power_of_element<T>(values.element[e], shift, factor);
          sum += powers[e];
          if constexpr (kWithTerms) kept[v][e] = powers[e];
        }
        if constexpr (kInPlace) raw[v] = rounded<T>(powers);
      }
    }
    const R weight = inverse(reduce<Sum>(sum, place, shared[1]));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
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
        store_raw(y + offset_of(v), rounded<T>(out));
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
  __shared__ R shared[kWarps * kMaxUnitRows];
  begin_rows();
  Place place;
  if (!find_place(p.schedule, place)) return;
  const int count = vectors_of(place, place.block_row.blocks * p.piece.value);
  const R scale = static_cast<R>(p.scale);
  const auto offset_of = [&](int v) {
    return vector_offset<T>(place.thread + v * place.team, p.piece, p.block);
  };

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* y = row_begin<const T>(p.y, place, batch, p.block);
    const T* d_y = row_begin<const T>(p.d_y, place, batch, p.block);
    T* d_x = row_begin<T>(p.d_x, place, batch, p.block);
    Raw probability[kVectors], gradient[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const int64_t offset = offset_of(v);
        probability[v] = load_raw(y + offset);
        gradient[v] = load_raw(d_y + offset);
      }
    }
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const Reals<T> weights = reals<T>(probability[v]), gradients = reals<T>(gradient[v]);
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          if (weights.element[e] != R{0}) sum += weights.element[e] * gradients.element[e];
        }
      }
    }
    const R delta = reduce<Sum>(sum, place, shared);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const Reals<T> weights = reals<T>(probability[v]), gradients = reals<T>(gradient[v]);
        R out[kLength];
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R ds = weights.element[e] * (gradients.element[e] - delta);
          out[e] = weights.element[e] == R{0} ? R{0} : scale * ds;
        }
        store_raw(d_x + offset_of(v), rounded<T>(out));
      }
    }
    if (place.warps > 1) __syncthreads();
  }
  end_rows();
}

}  // namespace pullback::block_softmax

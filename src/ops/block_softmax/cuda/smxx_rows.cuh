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
  Place place;
  if (!find_place(p.schedule, place)) return;
  const int count = vectors_of(place, place.block_row.blocks * p.piece.value);
  const R scale = static_cast<R>(p.scale);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* const x = row_begin<const T>(p.x, place, batch, p.block);
    T* const y = row_begin<T>(p.y, place, batch, p.block);
    Vector<T> raw[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const uint32_t index = place.thread + v * place.team;
        raw[v] = load_vector(x + vector_offset<T>(index, p.piece, p.block));
      }
    }
    // Registers are what is scarce: without terms, x stays as it is, and in 16 bits even the powers
    // are computed twice.
    constexpr bool kKeepPowers = kWithTerms || sizeof(T) == sizeof(R);
    R score[kWithTerms ? kVectors : 1][kLength];
    const auto score_of = [&](int v, int e) {
      return kWithTerms ? score[v][e] : scale * to_real(raw[v].element[e]);
    };
    R maximum = -infinity<R>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        if constexpr (kWithTerms) {
          const Terms<T> terms(p, place, batch);
          const uint32_t index = place.thread + v * place.team;
          const uint32_t block = divide(index, p.piece);
#pragma unroll
          for (int e = 0; e < kLength; ++e) score[v][e] = scale * to_real(raw[v].element[e]);
          terms.apply(score[v], block, (index - block * p.piece.value) * kLength);
        }
#pragma unroll
        for (int e = 0; e < kLength; ++e) maximum = Maximum()(maximum, score_of(v, e));
      }
    }
    const R shift = shift_of(reduce<Maximum>(maximum, place, shared[0]));
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R power = exponential(score_of(v, e) - shift);
          sum += power;
          if constexpr (kWithTerms) {
            score[v][e] = power;
          } else if constexpr (kKeepPowers) {
            raw[v].element[e] = power;
          }
        }
      }
    }
    const R factor = inverse(reduce<Sum>(sum, place, shared[1]));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const uint32_t index = place.thread + v * place.team;
        Vector<T> out;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          R power;
          if constexpr (kWithTerms) {
            power = score[v][e];
          } else if constexpr (kKeepPowers) {
            power = raw[v].element[e];
          } else {
            power = exponential(score_of(v, e) - shift);
          }
          out.element[e] = from_real<T>(power * factor);
        }
        store_vector(y + vector_offset<T>(index, p.piece, p.block), out);
      }
    }
    if (place.warps > 1) __syncthreads();
  }
}

template <class T, int kVectors>
void backward_rows(const BackwardParams& p) {
  using R = Real<T>;
  constexpr int kLength = kVectorLength<T>;
  __shared__ R shared[kWarps * kMaxUnitRows];
  Place place;
  if (!find_place(p.schedule, place)) return;
  const int count = vectors_of(place, place.block_row.blocks * p.piece.value);
  const R scale = static_cast<R>(p.scale);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* y = row_begin<const T>(p.y, place, batch, p.block);
    const T* d_y = row_begin<const T>(p.d_y, place, batch, p.block);
    T* d_x = row_begin<T>(p.d_x, place, batch, p.block);
    Vector<T> probability[kVectors], gradient[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const uint32_t index = place.thread + v * place.team;
        const int64_t offset = vector_offset<T>(index, p.piece, p.block);
        probability[v] = load_vector(y + offset);
        gradient[v] = load_vector(d_y + offset);
      }
    }
    R sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R weight = to_real(probability[v].element[e]);
          if (weight != R{0}) sum += weight * to_real(gradient[v].element[e]);
        }
      }
    }
    const R delta = reduce<Sum>(sum, place, shared);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) {
        const uint32_t index = place.thread + v * place.team;
        Vector<T> out;
#pragma unroll
        for (int e = 0; e < kLength; ++e) {
          const R weight = to_real(probability[v].element[e]);
          const R ds = weight * (to_real(gradient[v].element[e]) - delta);
          out.element[e] = from_real<T>(weight == R{0} ? R{0} : scale * ds);
        }
        store_vector(d_x + vector_offset<T>(index, p.piece, p.block), out);
      }
    }
    if (place.warps > 1) __syncthreads();
  }
}

}  // namespace pullback::block_softmax

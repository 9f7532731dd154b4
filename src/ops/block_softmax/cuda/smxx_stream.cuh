// Rows of any length and any strides, with added terms and masks. A row is read twice: once for its
// sums, once for the result; the second reading mostly comes from the second-level cache.
//   forward   s = scale x + terms, hidden where a keep mask is 0;  y = exp(s − m) / Σ exp(s − m)
//   backward  δ = Σ y d_y;  d_x = scale y (d_y − δ); δ alone when d_x is not wanted
// kWidth is 1, or the length of a 16-byte vector: then rows are contiguous and aligned.
#pragma once

#include "ops/block_softmax/cuda/smxx_added.cuh"
#include "ops/block_softmax/cuda/smxx_piece.cuh"
#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// Vectors whose loads are in flight together.
inline constexpr int kUnroll = 4;

// Where vector `index` of a row is: the block of the row, and the column in the block.
struct Position {
  uint32_t block, column;
};

template <int kWidth>
Position position_of(uint32_t index, const Divisor& piece) {
  const uint32_t block = divide(index, piece);
  return {block, (index - block * piece.value) * kWidth};
}

template <class T>
T* row_of(const BlockTensor& tensor, const Place& place, int64_t batch) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch +
         place.block_row.first_rank * tensor.rank + place.row * tensor.row;
}

inline int64_t offset_of(const BlockTensor& tensor, Position at) {
  return at.block * tensor.rank + at.column * tensor.column;
}

template <class T, int kWidth, bool kWithTerms>
void forward_stream(const ForwardParams& p) {
  using R = Real<T>;
  __shared__ OfWarps<R> shared[2];
  begin_rows();
  const Place place = find_place(p.schedule);
  const uint32_t count = place.block_row.blocks * p.piece.value;
  const R scale = static_cast<R>(p.scale);
  // Without terms scores are in units of x.
  const R unit = kWithTerms ? scale : scale < R{0} ? R{-1} : R{1};
  const R factor = factor_of_scores(kWithTerms ? R{1} : scale * unit);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* x = row_of<const T>(p.x, place, batch);
    T* y = row_of<T>(p.y, place, batch);
    const Terms<T> terms(p, place, batch);
    // visit(offset in y, scores of the vector)
    const auto for_each = [&](const auto& visit) {
      for (uint32_t first = place.thread; first < count; first += kUnroll * place.team) {
        Piece<T, kWidth> pieces[kUnroll];
        Position at[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const uint32_t index = first + u * place.team;
          if (index < count) {
            at[u] = position_of<kWidth>(index, p.piece);
            pieces[u] = load_piece<T, kWidth>(x + offset_of(p.x, at[u]));
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * place.team < count) {
            R scores[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e)
              scores[e] = scaled(unit, to_real(pieces[u].element[e]));
            if constexpr (kWithTerms) terms.apply(scores, at[u].block, at[u].column);
            visit(at[u], scores);
          }
        }
      }
    };

    R maximum = -infinity<R>(), sum = 0;
    for_each([&](Position, const R(&scores)[kWidth]) {
      R largest = scores[0];
#pragma unroll
      for (int e = 1; e < kWidth; ++e) largest = Maximum()(largest, scores[e]);
      if (largest > maximum) {
        // Nothing times −inf is NaN where the factor is 0.
        if (maximum != -infinity<R>()) sum *= power((maximum - largest) * factor);
        maximum = largest;
      }
      const R shift = shift_of(maximum);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += power((scores[e] - shift) * factor);
    });
    const R shift = shift_of(reduce<Maximum>(maximum, place, shared[0]));
    // A thread that saw only −inf has the sum 0; one that saw +inf or NaN has the sum NaN.
    sum *= maximum == -infinity<R>() ? R{1} : power((maximum - shift) * factor);
    const R weight = inverse(reduce<Sum>(sum, place, shared[1]));
    for_each([&](Position at, const R(&scores)[kWidth]) {
      Piece<T, kWidth> out;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        out.element[e] = from_real<T>(power((scores[e] - shift) * factor) * weight);
      }
      store_piece(y + offset_of(p.y, at), out);
    });
    if (place.warps > 1) __syncthreads();
  }
  end_rows();
}

template <class T, int kWidth>
void backward_stream(const BackwardParams& p) {
  using R = Real<T>;
  __shared__ OfWarps<R> shared;
  begin_rows();
  const Place place = find_place(p.schedule);
  const uint32_t count = place.block_row.blocks * p.piece.value;
  const R scale = static_cast<R>(p.scale);

  for (int64_t batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
    const T* y = row_of<const T>(p.y, place, batch);
    const T* d_y = row_of<const T>(p.d_y, place, batch);
    const auto for_each = [&](const auto& visit) {
      for (uint32_t first = place.thread; first < count; first += kUnroll * place.team) {
        Piece<T, kWidth> weights[kUnroll], gradients[kUnroll];
        Position at[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const uint32_t index = first + u * place.team;
          if (index < count) {
            at[u] = position_of<kWidth>(index, p.piece);
            weights[u] = load_piece<T, kWidth>(y + offset_of(p.y, at[u]));
            gradients[u] = load_piece<T, kWidth>(d_y + offset_of(p.d_y, at[u]));
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * place.team < count) visit(at[u], weights[u], gradients[u]);
        }
      }
    };

    R sum = 0;
    for_each([&](Position, const Piece<T, kWidth>& weights, const Piece<T, kWidth>& gradients) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const R weight = to_real(weights.element[e]);
        if (weight != R{0}) sum += weight * to_real(gradients.element[e]);
      }
    });
    const R delta = reduce<Sum>(sum, place, shared);
    if (p.delta != nullptr && place.thread == 0 && count > 0) {
      static_cast<R*>(p.delta)[batch * p.delta_batch +
                               static_cast<int64_t>(place.block_row.index) * p.block + place.row] =
          delta;
    }
    if (p.d_x.data != nullptr) {
      T* d_x = row_of<T>(p.d_x, place, batch);
      for_each(
          [&](Position at, const Piece<T, kWidth>& weights, const Piece<T, kWidth>& gradients) {
            Piece<T, kWidth> out;
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              const R weight = to_real(weights.element[e]);
              const R ds = weight * (to_real(gradients.element[e]) - delta);
              out.element[e] = from_real<T>(weight == R{0} ? R{0} : scale * ds);
            }
            store_piece(d_x + offset_of(p.d_x, at), out);
          });
    }
    if (place.warps > 1) __syncthreads();
  }
  end_rows();
}

}  // namespace pullback::block_softmax

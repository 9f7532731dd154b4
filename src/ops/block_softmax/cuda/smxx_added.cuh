// What forward adds to the scores of a row, or hides them by: rpe, key_padding_mask, attn_mask.
#pragma once

#include "ops/block_softmax/cuda/smxx_teams.cuh"

namespace pullback::block_softmax {

// kBytes at once: 2, 4, 8 or 16.
template <int kBytes>
struct alignas(kBytes) Bytes {
  uint8_t byte[kBytes];
};

template <class T>
class Terms {
  using R = Real<T>;

 public:
  Terms(const ForwardParams& p, const Place& place, int64_t batch) : p_(p) {
    const int32_t head = place.block_row.index / p.rows;
    const int64_t row =
        static_cast<int64_t>(place.block_row.index - head * p.rows) * p.block + place.row;
    columns_ = p.columns + place.block_row.first_rank;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      const Term& term = p.terms[t];
      offset_[t] = batch * term.batch + head * term.head + row * term.row;
    }
  }

  // To scale · x of kWidth neighbouring columns from `column` on, in the row's block number
  // `block`.
  template <int kWidth>
  void apply(R (&scores)[kWidth], uint32_t block, uint32_t column) const {
    const int64_t first = static_cast<int64_t>(columns_[block]) * p_.block + column;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      const Term& term = p_.terms[t];
      if (term.kind == TermKind::none) continue;
      const int64_t offset = offset_[t] + first * term.column;
      if (term.kind == TermKind::keep_bytes) {
        const auto* const from = static_cast<const uint8_t*>(term.data) + offset;
        Bytes<kWidth> keep;
        if (kWidth > 1 && term.vectors) {
          keep = *reinterpret_cast<const Bytes<kWidth>*>(from);
        } else {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) keep.byte[e] = from[e * term.column];
        }
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          if (keep.byte[e] == 0) scores[e] = -infinity<R>();
        }
      } else {
        const T* const from = static_cast<const T*>(term.data) + offset;
        T values[kWidth];
        if (kWidth == kVectorLength<T> && term.vectors) {
          const Vector<T> vector = *reinterpret_cast<const Vector<T>*>(from);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) values[e] = vector.element[e];
        } else {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) values[e] = from[e * term.column];
        }
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const R value = to_real(values[e]);
          if (term.kind == TermKind::add) {
            scores[e] += value;
          } else if (value == R{0}) {
            scores[e] = -infinity<R>();
          }
        }
      }
    }
  }

 private:
  const ForwardParams& p_;
  const int32_t* columns_;
  int64_t offset_[kTerms];
};

}  // namespace pullback::block_softmax

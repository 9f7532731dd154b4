// A warp's rows of the forward pass, from scores to outputs and lse: what all kernels on tensor
// cores do with the fragments of their products.
#pragma once

#include "device/memory.cuh"
#include "ops/attention/cuda/smxx_plain_row.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"
#include "ops/attention/cuda/smxx_tiles.cuh"

namespace pullback::attention {

// The running maximum follows the true one only when that is larger by this much: sums then grow to
// 2^8 at most, and the accumulators are rescaled a few times a row instead of at every tile.
inline constexpr float kSlack = 8;

// Lanes 4 g … 4 g + 3 share a row.
template <class Combine>
float across_row(float value, const Combine& combine) {
  value = combine(value, __shfl_xor_sync(kAllLanes, value, 1));
  return combine(value, __shfl_xor_sync(kAllLanes, value, 2));
}

template <class T>
float quotient(float a, float b) {
  return sizeof(T) == 4 ? a / b : __fdividef(a, b);
}

// Whether weights are exp2(score · unit − product) for this product of a maximum and the unit:
// what its rounding makes them wrong by must not be more than sums and lse make good. Else the
// maximum is taken from the scores first: a bias may be a mask of −3e38. Products that large are
// left to redo_row().
inline bool has_shift(float product) { return fabsf(product) < 0x1p24f; }

// State of the softmax of a warp's rows, and their outputs.
template <int kRowTiles, int kColumnTiles>
struct RunningRows {
  static constexpr int kRows = kRowTiles, kColumns = kColumnTiles;
  float maximum[kRowTiles][2], sum[kRowTiles][2];  // the sums of this lane's keys
  float out[kRowTiles][kColumnTiles][4];

  RunningRows() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -infinity<float>();
        sum[m][half] = 0;
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] = 0;
      }
    }
  }

  // Scores become weights; `unit` is what they are to be multiplied by. Unless kHuge, weights of
  // rows whose maximum has no shift come to nothing.
  template <bool kHuge, int kKeyTiles>
  void take(float (&s)[kRowTiles][kKeyTiles][4], float unit) {
    take<kHuge>(s, unit, [&](int m, const float(&correction)[2]) { rescale(m, correction); });
  }
  // The same, where the outputs cannot be touched yet: on_raise(m, correction) is to see to it that
  // they are rescaled.
  template <bool kHuge, int kKeyTiles, class OnRaise>
  void take(float (&s)[kRowTiles][kKeyTiles][4], float unit, const OnRaise& on_raise) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float largest[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          value = fmaxf(value, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        largest[half] = across_row(value, [](float a, float b) { return fmaxf(a, b); });
      }
      const bool rises = (largest[0] - maximum[m][0]) * unit > kSlack ||
                         (largest[1] - maximum[m][1]) * unit > kSlack;
      const bool huge =
          kHuge && (!has_shift(maximum[m][0] * unit) || !has_shift(maximum[m][1] * unit));
      if (__any_sync(kAllLanes, rises || huge)) {
        float correction[2];
        raise_sums(m, largest, unit, correction);
        on_raise(m, correction);
        if (kHuge) subtract_huge(s[m], m, unit);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Of a row that has seen nothing but −inf any finite number keeps the weights 0.
        const bool none =
            kHuge ? !has_shift(maximum[m][half] * unit) : maximum[m][half] == -infinity<float>();
        const float shift = none ? 0 : __fmul_rn(maximum[m][half], unit);
        float added = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = exp2_approx(__fmaf_rn(x, unit, -shift));
            added += x;
          }
        }
        sum[m][half] += added;
      }
    }
  }

  // Scores of rows whose maximum has no shift, less that maximum. A row that has seen nothing but
  // −inf keeps it.
  template <int kKeyTiles>
  void subtract_huge(float (&s)[kKeyTiles][4], int m, float unit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = maximum[m][half];
      const float less = has_shift(own * unit) || own == -infinity<float>() ? 0 : own;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[n][2 * half + e] -= less;
      }
    }
  }

  void raise(int m, const float (&largest)[2], float unit) {
    float correction[2];
    raise_sums(m, largest, unit, correction);
    rescale(m, correction);
  }
  void raise_sums(int m, const float (&largest)[2], float unit, float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(maximum[m][half], largest[half]);
      correction[half] =
          maximum[m][half] == raised ? 1 : exp2_approx((maximum[m][half] - raised) * unit);
      maximum[m][half] = raised;
      sum[m][half] *= correction[half];
    }
  }
  void rescale(int m, const float (&correction)[2]) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[m][n][e] *= correction[e / 2];
    }
  }
};

// A warp's rows, of which there are `rows`, from shared memory, where `before` columns are none of
// theirs: 0 or, with vectors, a few whole chunks.
template <class T, int kWidth, int kRows>
void store_rows(const HeadRows& to, T* first, uint32_t tile, int rows, int columns, bool vectors,
                int before) {
  using Layout = TileLayout<T, kWidth>;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  if (vectors) {
    constexpr int kAcross = Layout::kChunks % 8 == 0 ? 8 : 4, kDown = kWarpSize / kAcross;
    const int row = lane / kAcross, chunk = lane % kAcross;  // `before` is of fewer chunks
    T* own = first + row * to.row + chunk * Layout::kChunk - before;
#pragma unroll
    for (int down = 0; down < kRows; down += kDown) {
#pragma unroll
      for (int across = 0; across < Layout::kChunks; across += kAcross) {
        const int column = (chunk + across) * Layout::kChunk;
        if (row + down >= rows || column >= before + columns) continue;
        if (across == 0 && column < before) continue;
        union {
          uint32_t word[4];
          Vector<T> vector;
        } piece;
        load_shared(piece.word, tile + Layout::offset(row + down, chunk + across));
        store_vector(own + across * Layout::kChunk, piece.vector);
      }
      own += kDown * to.row;
    }
  } else {
    for (int at = lane; at < rows * kWidth; at += kWarpSize) {
      const int row = at / kWidth, column = at % kWidth;
      if (column >= columns) continue;
      const uint32_t word = load_shared_word(tile + Layout::offset(row, column / Layout::kChunk) +
                                             column % Layout::kChunk * int{sizeof(T)} / 4 * 4);
      T element;
      if constexpr (sizeof(T) == 4) {
        element = __uint_as_float(word);
      } else {
        element.bits = static_cast<uint16_t>(column % 2 ? word >> 16 : word);
      }
      first[row * to.row + column * to.element] = element;
    }
  }
}

// 0 · NaN: what a row does not see may have reached it. Finds the tile by its number anew, so that
// the fast path need not remember it.
template <class T, int kRows, bool kBlocks>
void redo_row(const ForwardParams& params, uint32_t number, int row) {
  QueryTile tile;
  if (!find_query_tile<kBlocks>(params.problem, params.q_tiles, params.pair_group, kRows, tile,
                                number)) {
    return;
  }
  plain_row<T, kBlocks>(params, tile.sequence, tile.batch, tile.head, tile.first + row);
}

// A warp's share of a tile's rows; `rows` are negative or 0 past the last query.
struct WarpRows {
  int lane, first_row, rows;
};

// A warp's outputs and lse, through shared memory at `staging`, where its queries were. `place`
// knows where the tile's rows begin, and how one of them is done again.
template <class T, bool kVectors, bool kHuge, class Rows, class Place>
void finish_rows(const ForwardParams& params, Rows& state, uint32_t staging, const WarpRows& warp,
                 float scale, float unit, const Place& place) {
  constexpr int kWidth = Rows::kColumns * 8, kWarpRows = Rows::kRows * 16;
  using Layout = TileLayout<T, kWidth>;
  const Problem& p = params.problem;
  const int lane = warp.lane;
  float sums[Rows::kRows][2];
  unsigned bad[Rows::kRows][2];  // lanes that hold NaN or infinity
  const uint32_t pair_bytes = lane % 4u * (2 * sizeof(T));
#pragma unroll
  for (int m = 0; m < Rows::kRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = across_row(state.sum[m][half], [](float a, float b) { return a + b; });
      const float factor = sum == 0 ? 0 : quotient<T>(p.keep_scale, sum);
      sums[m][half] = sum;
      float finite = 0;
#pragma unroll
      for (int n = 0; n < Rows::kColumns; ++n) {
        const float left = state.out[m][n][2 * half] * factor;
        const float right = state.out[m][n][2 * half + 1] * factor;
        finite = __fmaf_rn(right, 0.0f, __fmaf_rn(left, 0.0f, finite));
        const int chunk = n * 8 / Layout::kChunk + static_cast<int>(pair_bytes / 16);
        const uint32_t at =
            staging + Layout::offset(row_at(m, half) + first_row_of(lane), chunk) + pair_bytes % 16;
        if constexpr (sizeof(T) == 2) {
          store_shared(at, pack<T>(left, right));
        } else {
          store_shared(at, __float_as_uint(left));
          store_shared(at + 4, __float_as_uint(right));
        }
      }
      bad[m][half] = __ballot_sync(kAllLanes, finite != 0);
    }
  }
  // Of the lanes that share rows each finishes the lse of one.
  if (params.lse.data != nullptr) {
    float largest = 0, sum = 0;
    int row = kWarpRows;
#pragma unroll
    for (int m = 0; m < Rows::kRows; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool own = lane % 4 == 2 * m + half;
        float own_maximum = state.maximum[m][half], own_sum = sums[m][half];
        // Else the compiler chooses an address, in local memory.
        asm volatile("" : "+f"(own_maximum), "+f"(own_sum));
        largest = own ? own_maximum : largest;
        sum = own ? own_sum : sum;
        row = own ? row_at(m, half) + first_row_of(lane) : row;
      }
    }
    if (row < warp.rows) {
      // The weights' shift was rounded: by how much, the fused product tells. A row that sees one
      // key has its score exactly.
      const float shift = __fmul_rn(largest, unit);
      const float rounding = has_shift(shift) ? __fmaf_rn(largest, unit, -shift) : 0;
      const float more = sum == exp2_approx(rounding) ? 0 : kLn2 * (log2_fast(sum) - rounding);
      place.lse()[(warp.first_row + row) * params.lse.row] =
          sum == 0 ? -infinity<float>() : largest * scale + more;
    }
  }
  __syncwarp();
  store_rows<T, kWidth, kWarpRows>(params.out, place.out() + warp.first_row * params.out.row,
                                   staging, warp.rows, p.value_dim, kVectors,
                                   place.columns_before());
  unsigned any = 0;
#pragma unroll
  for (int m = 0; m < Rows::kRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!kHuge) {
        const float largest = state.maximum[m][half];
        const bool lost = !has_shift(largest * unit) && largest != -infinity<float>();
        bad[m][half] |= __ballot_sync(kAllLanes, lost);
      }
      any |= bad[m][half];
    }
  }
  if (any == 0) return;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < Rows::kRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int g = 0; g < 8; ++g) {
        const int row = row_at(m, half) + g;
        if ((bad[m][half] >> 4 * g & 15) != 0 && row < warp.rows) {
          place.redo(warp.first_row + row);
        }
      }
    }
  }
}

}  // namespace pullback::attention

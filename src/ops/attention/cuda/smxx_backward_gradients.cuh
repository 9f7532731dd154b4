// Writes gradients from sums that lie in the fragments of products.
#pragma once

#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "ops/attention/cuda/smxx_backward_scores.cuh"

namespace pullback::attention {

// Of four lanes with four words each, lane t gets word t of all of them.
inline void transpose_four(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool odd = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, step);
      (odd ? low : high) = got;
    }
  }
}

// By the two blocks of a cluster, which hold parts of the same sums, when they need their keys and
// values, from `local` on, no more: block 0 gets all of d_k and block 1 of d_v. Neither may end
// before the next cluster_barrier.
template <int kThreads, int kM, int kN>
void add_in_cluster(float (&d_k)[kM][kN][4], float (&d_v)[kM][kN][4], uint32_t local) {
  const uint32_t rank = device::cluster_rank(), own = local + threadIdx.x * 16;
  const auto store = [own](const float(&sum)[kM][kN][4]) {
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) {
      const float(&piece)[4] = sum[i / kN][i % kN];
      const uint32_t words[4] = {__float_as_uint(piece[0]), __float_as_uint(piece[1]),
                                 __float_as_uint(piece[2]), __float_as_uint(piece[3])};
      device::store_shared(own + i * (kThreads * 16), words);
    }
  };
  const auto add = [other = device::remote_address(own, rank ^ 1)](float(&sum)[kM][kN][4]) {
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) {
      float piece[4];
      device::load_remote(piece, other + i * (kThreads * 16));
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i / kN][i % kN][e] += piece[e];
    }
  };
  __syncthreads();
  rank == 0 ? store(d_v) : store(d_k);
  device::cluster_barrier();
  rank == 0 ? add(d_k) : add(d_v);
}

// factor · sum of the warp's 32 keys, which are interleaved, and 8 · kN columns goes to the rows
// from `base` on below `limit`, by way of its part of a tile. kVectors: `columns` are whole pieces
// of 16 bytes, aligned.
template <class T, int kWidth>
struct StagedStore {
  using Layout = TileLayout<T, kWidth>;
  uint32_t tile;
  T* base;  // the warp's first key
  const HeadRows& rows;
  int row, column;  // in the tile
  int limit, columns;

  template <bool kVectors, int kN>
  void store(const float (&sum)[2][kN][4], float factor, int lane, bool vectors) const {
    put(sum, factor, lane);
    __syncwarp();
    constexpr int kAcross = kN * 8 / Layout::kChunk;
#pragma unroll(kVectors ? 4 : 1)
    for (int i = 0; i < kAcross; ++i) {
      const int piece = i * 32 + lane, r = piece / kAcross;
      const int first = column + piece % kAcross * Layout::kChunk;
      uint32_t words[4];
      load_shared(words, tile + Layout::offset(row + r, first / Layout::kChunk));
      const int key = r / 8 * 2 + first_key_of_row(r % 8 * 4);
      if (key >= limit) continue;
      T* const to = base + key * rows.row;
      if constexpr (kVectors) {
        if (first < columns) store_words(to + first, words);
      } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (first + e < columns) to[(first + e) * rows.element] = __uint_as_float(words[e]);
        }
      } else {
        store_eight(to, rows.element, first, columns, vectors, words);
      }
    }
    __syncwarp();  // the next ones lie there, too
  }

 private:
  template <int kN>
  void put(const float (&sum)[2][kN][4], float factor, int lane) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float a = factor * sum[m][n][2 * half], b = factor * sum[m][n][2 * half + 1];
          const int first = column + 8 * n + lane % 4 * 2;
          const uint32_t at =
              tile + Layout::offset(row + 16 * m + 8 * half + lane / 4, first / Layout::kChunk) +
              static_cast<uint32_t>(first % Layout::kChunk * sizeof(T));
          if constexpr (sizeof(T) == 4) {
            store_shared(at, __float_as_uint(a));
            store_shared(at + 4, __float_as_uint(b));
          } else {
            store_shared(at, pack<T>(a, b));
          }
        }
      }
    }
  }
};

// factor · sum of 16 · kM rows and 8 · kN columns goes to the rows from `row` on below `limit` and
// the columns from `column` on below `columns`. kInterleaved: rows are keys, which are.
template <class T, bool kInterleaved>
struct GradientStore {
  const HeadRows& rows;
  T* base;  // row 0
  int row, limit, column, columns;
  float factor;

  int row_of(int m, int half, int lane) const {
    return row + (kInterleaved ? 4 * m + 2 * half + first_key_of_row(lane)
                               : 16 * m + 8 * half + lane / 4);
  }

  // 16 bits, in pieces of 8 columns. kVectors: `columns` are whole pieces, aligned.
  template <bool kVectors, int kM, int kN>
  void pieces(const float (&sum)[kM][kN][4], int lane, bool vectors) const {
    // Four lanes share a row: of four pieces, or of two rows' two, each takes one.
    constexpr int kAcross = kN % 4 == 0 ? 4 : 2;
    const int own_column = column + lane % kAcross * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; half += 4 / kAcross) {
        const int r = row_of(m, half + lane % 4 / kAcross, lane);
        T* const to = base + r * rows.row;
#pragma unroll
        for (int n = 0; n < kN; n += kAcross) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const pair = sum[m][n + i % kAcross] + 2 * (half + i / kAcross);
            words[i] = pack<T>(factor * pair[0], factor * pair[1]);
          }
          transpose_four(words, lane);
          if (r >= limit) continue;
          if constexpr (!kVectors) {
            store_eight(to, rows.element, own_column + 8 * n, columns, vectors, words);
          } else if (own_column + 8 * n < columns) {
            store_words(to + own_column + 8 * n, words);
          }
        }
      }
    }
  }

  // f32. kVectors: `columns` are whole pieces of 16 bytes, aligned.
  template <bool kVectors, int kM, int kN>
  void elements(const float (&sum)[kM][kN][4], int lane) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row_of(m, half, lane);
        if (r >= limit) continue;
        const int64_t step = kVectors ? 1 : rows.element;
        int first = column + lane % 4 * 2;
        T* to = base + r * rows.row + first * step;
#pragma unroll
        for (int n = 0; n < kN; ++n, first += 8, to += 8 * step) {
          const float a = factor * sum[m][n][2 * half], b = factor * sum[m][n][2 * half + 1];
          if constexpr (kVectors) {
            if (first < columns) *reinterpret_cast<float2*>(to) = {a, b};
          } else {
            if (first < columns) to[0] = a;
            if (first + 1 < columns) to[step] = b;
          }
        }
      }
    }
  }
};

}  // namespace pullback::attention

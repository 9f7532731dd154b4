// Scores of a warp: kRowTiles · 16 queries by kKeys keys, in the fragments of device/mma.cuh, and
// what is done to them on the way from the product to the softmax.
//
//   s = scale · q·k;  s = c tanh(s / c);  −inf where the query does not see the key
#pragma once

#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "device/warp.cuh"
#include "ops/attention/cuda/smxx_tiles.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

using namespace device;

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

inline float log2_fast(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The thread's number. Read anew at each call where kAnew: what follows from it is then computed
// where it is used, and holds no register in between.
template <bool kAnew>
int thread_number() {
  if constexpr (!kAnew) return static_cast<int>(threadIdx.x);
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// --- Operands ---

// One operand of 16 x 32 bytes (A) or two of 32 bytes x 8 (B).
template <class T>
struct Operand {
  uint32_t word[4];
};

// d += a · (the `half`-th of the two in b)
template <class T>
void multiply(float (&d)[4], const Operand<T>& a, const Operand<T>& b, int half) {
  mma_16816<T>(d, a.word, b.word[2 * half], b.word[2 * half + 1]);
}

// Elements of the inner dimension of one instruction.
inline constexpr int kInner = 16;

// The lane's place in a tile that ldmatrix reads 16 rows by 32 bytes at a time.
template <class T, int kWidth>
struct LanePlace {
  using Layout = TileLayout<T, kWidth>;
  uint32_t row_offset, chunk;

  LanePlace(int row, int lane_chunk)
      : row_offset(static_cast<uint32_t>(row * Layout::kRowBytes)),
        chunk(static_cast<uint32_t>(lane_chunk ^ Layout::swizzle(row))) {}
  // `pair` counts 32-byte columns; rows at multiples of 16 from ours are 16 · kRowBytes further on.
  uint32_t at(uint32_t tile, int pair) const {
    constexpr int kMask = Layout::kChunks % 8 == 0 ? 7 : 3;
    return tile + row_offset + ((chunk ^ (2 * pair & kMask)) * 16) + (2 * pair & ~kMask) * 16;
  }
};

// Rows are rows of A, or rows of V for the transposed B.
template <class T, int kWidth>
LanePlace<T, kWidth> place_of_rows(int lane) {
  return {lane % 16, lane / 16};
}
// Rows are columns of B: keys.
template <class T, int kWidth>
LanePlace<T, kWidth> place_of_keys(int lane) {
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// --- s = q · kᵀ ---

// Queries from `q_rows` on, and all keys of the tile.
template <class T, int kWidth, int kRowTiles, int kKeyTiles>
void score_product(float (&s)[kRowTiles][kKeyTiles][4], uint32_t q_rows, uint32_t k_tile,
                   int lane) {
  using Layout = TileLayout<T, kWidth>;
  const auto queries = place_of_rows<T, kWidth>(lane);
  const auto keys = place_of_keys<T, kWidth>(lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    }
  }
#pragma unroll
  for (int step = 0; step < kWidth / kInner; ++step) {
    Operand<T> q[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      load_matrices(q[m].word, queries.at(q_rows, step) + m * 16 * Layout::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles / 2; ++n) {
      Operand<T> k;
      load_matrices(k.word, keys.at(k_tile, step) + n * 16 * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply<T>(s[m][2 * n], q[m], k, 0);
        multiply<T>(s[m][2 * n + 1], q[m], k, 1);
      }
    }
  }
}

// --- out += p · v ---

template <class T, int kWidth, int kRowTiles, int kKeyTiles>
void value_product(float (&out)[kRowTiles][kWidth / 8][4],
                   const float (&p)[kRowTiles][kKeyTiles][4], uint32_t v_tile, int lane) {
  using Layout = TileLayout<T, kWidth>;
  const auto rows = place_of_rows<T, kWidth>(lane);
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    Operand<T> weights[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const auto& left = p[m][2 * step];
      const auto& right = p[m][2 * step + 1];
      weights[m] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]),
                    pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
    }
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      Operand<T> v;
      load_matrices_transposed(v.word, rows.at(v_tile, n) + step * 16 * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply<T>(out[m][2 * n], weights[m], v, 0);
        multiply<T>(out[m][2 * n + 1], weights[m], v, 1);
      }
    }
  }
}

// --- Rows and keys of a lane ---

// s[m][n][2 half + e] belongs to query row_at(m, half) of the warp's and, where tiles of keys are
// interleaved (device/shared_tile.cuh), to key key_at(n, e), from the lane's first ones on: a lane
// has 8 neighbouring keys of every 32. Where they are not it has 2 of every 8.
inline int first_row_of(int lane) { return lane / 4; }
constexpr int row_at(int m, int half) { return m * 16 + half * 8; }
template <bool kInterleaved = true>
int first_key_of(int lane) {
  return lane % 4 * (kInterleaved ? 8 : 2);
}
constexpr int key_at(int n, int e) { return n / 4 * 32 + n % 4 * 2 + e; }

// --- Softcap ---

// What makes logits of the products, or of their tanh.
inline float score_unit(const Problem& p) { return p.softcap > 0 ? p.softcap : p.scale; }

// 1 − 2 / (e^2x + 1) is within 2^-22 of tanh; f32 asks for more in its small values.
template <class T>
float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  return 1 - __fdividef(2.0f, exp2_approx(2 * kLog2E * x) + 1);
}

// tanh for |x| <= 1, within 2^-20 of it: fitted, in x². Special functions are scarcer than
// multiplications.
inline float tanh_of_small(float x) {
  const float y = x * x;
  float ratio = -0.00306705989f;
  ratio = ratio * y + 0.0167431154f;
  ratio = ratio * y - 0.0516056759f;
  ratio = ratio * y + 0.13281434f;
  ratio = ratio * y - 0.333290424f;
  ratio = ratio * y + 0.999999414f;
  return x * ratio;
}

// s = tanh(inner_scale · s)
template <class T, int kRowTiles, int kKeyTiles>
void take_tanh(float (&s)[kRowTiles][kKeyTiles][4], float inner_scale) {
  const auto for_each = [&](const auto& change) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (float& x : s[m][n]) x = change(x);
      }
    }
  };
  float largest = 0;
  for_each([&](float x) {
    largest = fmaxf(largest, fabsf(x));
    return x;
  });
  if (sizeof(T) == 2 && __all_sync(kAllLanes, largest * fabsf(inner_scale) <= 1)) {
    for_each([&](float x) { return tanh_of_small(x * inner_scale); });
  } else {
    for_each([&](float x) { return tanh_of<T>(x * inner_scale); });
  }
}

template <int kRowTiles, int kKeyTiles>
void scale_scores(float (&s)[kRowTiles][kKeyTiles][4], float factor) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (float& x : s[m][n]) x *= factor;
    }
  }
}

// --- Mask ---

// −inf where the query does not see the key. The warp's rows begin at `query`, a part of the tile,
// its n from `first_n` to `end_n`, at `part_key`.
template <int kRowTiles, int kKeyTiles>
void hide(float (&s)[kRowTiles][kKeyTiles][4], int first_n, int end_n, const SequenceBand& band,
          int query, int part_key, int lane) {
  const int key = part_key + first_key_of(lane);
  const int first_row = query + first_row_of(lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_row + row_at(m, half);
      const int begin = band.first_key(i) - key, end = band.end_key(i) - key;
#pragma unroll
      for (int n = first_n; n < end_n; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = key_at(n - first_n, e);
          float& x = s[m][n][2 * half + e];
          x = at >= begin && at < end ? x : -infinity<float>();
        }
      }
    }
  }
}

// −inf for keys in absent blocks. Bit 8 · (16 keys) + m of `squares`: our m-th 16 queries see them.
template <bool kInterleaved = true, int kRowTiles, int kKeyTiles>
void hide_squares(float (&s)[kRowTiles][kKeyTiles][4], int first_n, int end_n, uint32_t squares,
                  int lane) {
  constexpr int kTogether = kInterleaved ? 4 : 2;  // of the lane's keys these are in one square
#pragma unroll
  for (int group = first_n; group < end_n; group += kTogether) {
    const int square =
        kInterleaved ? (group - first_n) / 4 * 2 + lane % 4 / 2 : (group - first_n) / 2;
    const uint32_t of_keys = squares >> square * 8;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if ((of_keys >> m & 1) != 0) continue;
#pragma unroll
      for (int n = group; n < group + kTogether; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = -infinity<float>();
      }
    }
  }
}

// --- Dropout ---

// A lane's 8 neighbouring keys have the draws of one call. `plane` is batch · H + head.
template <int kRowTiles, int kKeyTiles>
void drop(float (&p)[kRowTiles][kKeyTiles][4], const Dropout& dropout, uint64_t plane, int query,
          int tile_key, int lane) {
  const int key = tile_key + first_key_of(lane), first_row = query + first_row_of(lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto i = static_cast<uint32_t>(first_row + row_at(m, half));
#pragma unroll
      for (int group = 0; group < kKeyTiles; group += 4) {
        const auto block = static_cast<uint32_t>(key + key_at(group, 0)) / Dropout::kKeysPerCall;
        const PhiloxWords words = dropout.draws(plane, i, block);
#pragma unroll
        for (int at = 0; at < 8; ++at) {
          if (!dropout.keeps(words, at)) p[m][group + at / 2][2 * half + at % 2] = 0;
        }
      }
    }
  }
}

}  // namespace pullback::attention

// The bias of the forward pass: s = unit · s + bias. In 16 bits its tiles pass through shared
// memory, copied while the product of the scores is made; in f32, where products take longer and
// there is no room, it is read where it is added.
#pragma once

#include "device/float.cuh"
#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"

namespace pullback::attention {

// Where keys are interleaved, a lane's 8 neighbouring ones of every 32 are one piece of a row, in
// 16 bits; else four matrices of 8 rows and 8 keys have its pairs. row_at() and first_row_of() say
// of which rows.
template <class T, int kRows, int kKeys, int kThreads, bool kInterleaved = true>
struct StagedBias {
  using Layout = TileLayout<T, kKeys>;

  // Copies a tile, from the queries' first row and the tile's first key on; `rows` of queries and
  // `keys` are left there. kElements: `vectors` says whether pieces of 8 keys are aligned.
  template <bool kElements>
  static void load(uint32_t tile, const T* from, const Plane& bias, int rows, int keys,
                   bool vectors) {
    if constexpr (kElements) {
      if (!vectors) {
        gather(tile, from, bias, rows, keys);
        return;
      }
    }
    TileLoader<T, kRows, kKeys, kThreads, true, false, kElements, true>(from, bias.query, 1, keys)
        .load(tile, 0, rows);
  }

  uint32_t lane_row, lane_chunk;  // that the lane asks for, in bytes: a row, and a place in it

  StagedBias(uint32_t tile, int warp_row, int lane) {
    const int row = kInterleaved ? first_row_of(lane) : lane % 8;
    const int chunk = kInterleaved ? lane % 4 : lane / 8;
    lane_row = tile + (warp_row + row) * Layout::kRowBytes;
    lane_chunk = (chunk ^ Layout::swizzle(row)) * 16;
  }

  void get(float (&value)[8], int m, int half, int group) const {
    uint32_t word[4];
    const uint32_t at = lane_row + row_at(m, half) * Layout::kRowBytes + (lane_chunk ^ group * 64);
    if constexpr (kInterleaved) {
      load_shared(word, at);
    } else {
      load_matrices(word, at);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      value[2 * w] = to_real(T{static_cast<uint16_t>(word[w])});
      value[2 * w + 1] = to_real(T{static_cast<uint16_t>(word[w] >> 16)});
    }
  }

 private:
  // Element by element, lanes side by side in a row, as many loads at a time as registers are free
  // while no scores are held.
  static void gather(uint32_t tile, const T* from, const Plane& bias, int rows, int keys) {
    constexpr int kDown = kThreads / kKeys, kEach = kRows / kDown;
    constexpr int kBatch = kEach < 16 ? kEach : 16, kBatchRows = kBatch * kDown;
    static_assert(kThreads % kKeys == 0 && kRows % kBatchRows == 0);
    const int key = static_cast<int>(threadIdx.x) % kKeys;
    const int first_row = static_cast<int>(threadIdx.x) / kKeys;
    from += first_row * bias.query + key * bias.key;
#pragma unroll 1
    for (int batch = first_row; batch < kRows; batch += kBatchRows) {
      uint16_t bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i, from += kDown * bias.query) {
        bits[i] = batch + i * kDown < rows && key < keys ? from->bits : uint16_t{0};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t at = Layout::offset(batch + i * kDown, key / 8) + key % 8 * 2;
        store_shared(tile + at, bits[i]);
      }
    }
  }
};

struct DirectBias {
  const float* first;  // of the warp's first query and the tile's first key
  int64_t query_step, key_step;
  int queries, keys;  // that are left from there on
  bool vectors;
  int lane;

  void get(float (&value)[8], int m, int half, int group) const {
    const int i = first_row_of(lane) + row_at(m, half), j = first_key_of(lane) + group * 32;
    const float* const from = first + (i < queries ? i : 0) * query_step + j * key_step;
    if (vectors && j + 8 <= keys) {
#pragma unroll
      for (int at = 0; at < 8; at += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + at);
        value[at] = four.x, value[at + 1] = four.y, value[at + 2] = four.z, value[at + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int at = 0; at < 8; ++at) value[at] = j + at < keys ? from[at * key_step] : 0;
    }
  }
};

// Weights of NaN, where −inf is to hide a key whose score is not finite, are left to redo_row().
template <int kRowTiles, int kKeyTiles, class Bias>
void add_bias(float (&s)[kRowTiles][kKeyTiles][4], float unit, const Bias& bias) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < kKeyTiles / 4; ++group) {
        float value[8];
        bias.get(value, m, half, group);
#pragma unroll
        for (int at = 0; at < 8; ++at) {
          float& x = s[m][group * 4 + at / 2][2 * half + at % 2];
          x = __fmaf_rn(x, unit, value[at]);
        }
      }
    }
  }
}

}  // namespace pullback::attention

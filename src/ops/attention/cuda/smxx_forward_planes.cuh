// The products of the forward pass in f32, from tiles split in planes of f16 (smxx_planes.cuh).
#pragma once

#include "ops/attention/cuda/smxx_planes.cuh"

namespace pullback::attention {

// Splits a tile that has arrived, with all threads of the block, and gives its unit. `largest` is
// shared; the other one of two tiles in turns needs another.
template <int kRows, int kColumns, int kThreads>
float split_arrived(uint32_t tile, uint32_t (&largest)[kThreads / 32]) {
  TileSplitter<kRows, kColumns, kThreads> splitter;
  splitter.load(tile);
  const uint32_t own = splitter.largest();
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = own;
  __syncthreads();
  uint32_t found = 0;
#pragma unroll
  for (const uint32_t of_warp : largest) found = of_warp > found ? of_warp : found;
  const float unit = unit_of(found);
  splitter.store(tile, inverse_of(unit));
  __syncthreads();
  return unit;
}

// s = unit · q · kᵀ, of the tiles' rows from `q_rows` on. A unit beyond what a float holds makes
// all of it NaN, as some of it may be finite: rows are done once more.
template <int kWidth, int kRowTiles, int kKeyTiles>
void plane_scores(float (&s)[kRowTiles][kKeyTiles][4], uint32_t q_rows, uint32_t k_tile, float unit,
                  int lane) {
  unit = unit < infinity<float>() ? unit : quiet_nan<float>();
  const PlaneRows<kWidth, false> queries(q_rows, lane);
  const PlaneRows<kWidth, true> keys(k_tile, lane);
  multiply_plane_columns<kWidth, false>(s, queries, 0, keys, 0);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (float& x : s[m][n]) x *= unit;
    }
  }
}

// out += unit · p · v. Weights are at most 2^8.
template <int kWidth, int kRowTiles, int kKeyTiles>
void plane_values(float (&out)[kRowTiles][kWidth / 8][4], const float (&p)[kRowTiles][kKeyTiles][4],
                  uint32_t v_tile, float unit, int lane) {
  constexpr float kInverseUnit = 64;
  const PlaneRows<kWidth, false> values(v_tile, lane);
  float factor[kRowTiles];
#pragma unroll
  for (float& x : factor) x = unit / kInverseUnit;
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    PlaneMatrices weights[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = p[m][2 * step + i / 2];
        const Planes planes = split_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1], kInverseUnit);
        weights[m].high[i] = planes.high;
        weights[m].low[i] = planes.low;
      }
    }
    multiply_plane_rows(out, weights, values, 16 * step, 0, factor);
  }
}

}  // namespace pullback::attention

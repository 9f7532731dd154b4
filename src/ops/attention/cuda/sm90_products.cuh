// Products of attention's tiles on Hopper's tensor cores, as both passes ask for them. Tiles in
// shared memory are panels of 64 columns (device/wgmma.cuh).
#pragma once

#include "device/wgmma.cuh"

namespace pullback::attention {

using namespace device;

// Columns of a panel, and bytes of its rows.
inline constexpr int kPanel = 64, kPanelRow = 128;
// s = rows · columnsᵀ: of the warpgroup's 64 in a tile of kRows, and of a tile of kColumns.
template <class T, int kWidth, int kRows, int kColumns>
void ask_for_scores(float (&s)[kColumns / 8][4], uint32_t rows, uint32_t columns) {
  const MatrixAddress a(rows), b(columns);
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    const uint32_t panel = step / (kPanel / 16), within = step % (kPanel / 16) * 32;
    product_of_shared<T>(s, a.at(panel * (kRows * kPanelRow) + within),
                         b.at(panel * (kColumns * kPanelRow) + within), step > 0);
  }
}

// out += weights · rows, by as many columns at a time as a product takes.
template <class T, int kFirst = 0, int kColumnTiles, int kRowTiles>
void ask_for_outputs(float (&out)[kColumnTiles][4], const uint32_t (&weights)[kRowTiles / 2][4],
                     const MatrixAddress& rows, int step) {
  constexpr int kLeft = kColumnTiles - kFirst, kTiles = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : 4;
  constexpr uint32_t kPanelBytes = kRowTiles * 8 * kPanelRow;
  product_of_registers<T>(reinterpret_cast<float(&)[kTiles][4]>(out[kFirst]), weights[step],
                          rows.at(kFirst / 8 * kPanelBytes + step * (16 * kPanelRow)));
  if constexpr (kLeft > kTiles) {
    ask_for_outputs<T, kFirst + kTiles, kColumnTiles, kRowTiles>(out, weights, rows, step);
  }
}
template <class T, int kColumnTiles, int kRows>
void ask_for_outputs(float (&out)[kColumnTiles][4], const uint32_t (&weights)[kRows / 16][4],
                     uint32_t rows) {
  const MatrixAddress first(rows, kRows * kPanelRow);
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    ask_for_outputs<T, 0, kColumnTiles, kRows / 8>(out, weights, first, step);
  }
}

template <class T, int kTiles>
void pack_weights(uint32_t (&weights)[kTiles / 2][4], const float (&s)[kTiles][4]) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; ++step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const pair = &s[2 * step + e / 2][e % 2 * 2];
      weights[step][e] = pack<T>(pair[0], pair[1]);
    }
  }
}

}  // namespace pullback::attention

// Constants of the kernels that make the mask of max and min (smxx_mask.cuh, smxx_mask_tile.cuh),
// with which the host plans.
#pragma once

#include "ops/segment/cuda/row_tile_tuning.cuh"

namespace pullback::segment_cuda {

// Bytes that a block makes in shared memory, of a row at most.
inline constexpr int kMaskImageBytes = 16 * 1024;
inline constexpr int kMaskBlockBytes = 128;
// Rows and ends of a tile whose rows are compared with what their segments have: it keeps the ends.
inline constexpr int kMaskCompareItems = 2048;

// The rows that a tile of smxx_mask_tile.cuh can hold, with a byte for each piece and the ends.
constexpr int mask_tile_rows(int row_bytes, int pieces) {
  return (row_tile_bytes(1, row_bytes) - (kSectorBytes + 127) - 4) / (row_bytes + pieces + 2);
}
// Whether segments are short enough for these tiles, which read rows twice of those that reach over
// borders: of segments half as long as a tile a third, of those as long all. One column has faster
// kernels.
constexpr bool mask_tiles_serve(int64_t rows, int64_t segments, int64_t columns, int tile_rows) {
  return columns > 1 && columns <= kMaskBlockBytes * 8 && tile_rows >= kRowTileLeastRows &&
         rows <= (segments + 1) * (tile_rows / 2);
}

}  // namespace pullback::segment_cuda

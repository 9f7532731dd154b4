// Constants of the kernels that hold a tile of rows in shared memory (smxx_row_tile.cuh), with
// which the host plans.
#pragma once

#include "device/types.cuh"

namespace pullback::segment_cuda {

inline constexpr int kRowTileLeastRows = 32;  // that a tile has room for, or it is not worth it
// Dynamic shared memory of a block, so that 4 fill a multiprocessor of sm_90, 3 of sm_80, 2 of
// sm_86; and where rows are wide, so that segments of some rows are in one tile mostly: 3, 2 and 1.
inline constexpr int kRowTileBytes = 47 * 1024;
inline constexpr int kRowTileWideBytes = 71 * 1024;
inline constexpr int kRowTileWideRowBytes = 512;  // of all inputs
inline constexpr int kRowTileAloneRows = 32;      // of a segment, at most, that one lane walks
inline constexpr int kRowTileLongs = 384;         // segments of a tile with more, and parts
inline constexpr int kRowTilePartRows = 256;      // of such, at most, that a warp has
inline constexpr int kRowTileSnapRows = 128;      // Params::snap_rows, at most
inline constexpr int kRowTileLeastItems = 128;    // of a tile, if they fit
inline constexpr int kRowTileBorderTiles = 8;     // that a block of softmax's last pass looks at
// Reductions and maps of rows in whole pieces of 16 bytes, or of more columns, have other kernels.
inline constexpr int kRowTileMostColumns = 64;

// Rows that a lane takes at once, as registers allow.
constexpr int row_tile_at_once(int elements) { return elements > 8 ? 2 : 4; }
constexpr int row_tile_bytes(int inputs, int row_bytes) {
  return inputs * row_bytes < kRowTileWideRowBytes ? kRowTileBytes : kRowTileWideBytes;
}
// Images begin at sectors of the tensor, which begins with one itself, mostly: a copy of 16 bytes
// that lie in the other half of a sector in shared memory takes as long as two.
inline constexpr int kSectorBytes = 32;
// Of so many bytes that lie anywhere, as they do from a sector on, in whole lines.
constexpr int row_image_bytes(int bytes) { return (bytes + kSectorBytes + 127) / 128 * 128; }
// A tile of so many items has as many segment ends, and one if it has room for none.
constexpr int row_tile_ends(int items, int end_items) { return items / end_items + 1; }
// The rows that a tile can hold, of them those that may come before its first item.
constexpr int row_tile_rows(int inputs, int row_bytes) {
  return (row_tile_bytes(inputs, row_bytes) - inputs * (kSectorBytes + 127) - 2) /
         (inputs * row_bytes + 2);
}
constexpr int row_tile_snap(int rows) {
  return rows / 4 < kRowTileSnapRows ? rows / 4 : kRowTileSnapRows;
}
// Of a reduction that keeps the states of parts of segments, too, of which there are less than two
// for so many rows: 8 bytes or less for each column.
constexpr int reduce_tile_rows(int row_bytes, int columns) {
  constexpr int kRows = kRowTilePartRows / 16;
  return (kRowTileBytes - (kSectorBytes + 127) - 2 - 8 - 8 * columns) * kRows /
         ((row_bytes + 2) * kRows + columns);
}
// Maps hold what they read of segments beside the rows: an end counts for as many rows as it takes
// the bytes of. Rows, ends, and two inputs, of one segment more than end.
constexpr int map_tile_items(int row_bytes, int end_items) {
  return (kRowTileBytes - 2 * end_items * row_bytes - 4 * 128 - 4) / (row_bytes + 2);
}

}  // namespace pullback::segment_cuda

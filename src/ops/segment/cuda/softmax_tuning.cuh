// Constants of the kernels of softmax (smxx_softmax.cuh) that the host plans with.
#pragma once

#include "device/types.cuh"

namespace pullback::segment_cuda {

inline constexpr int kSoftmaxLeastRows = 32;  // that a tile has room for, or it is not worth it
// Dynamic shared memory of a block, so that 4 fill a multiprocessor of sm_90, 3 of sm_80, 2 of
// sm_86; and where rows are wide, so that segments of some rows are in one tile mostly: 3, 2 and 1.
inline constexpr int kSoftmaxBytes = 47 * 1024;
inline constexpr int kSoftmaxWideBytes = 71 * 1024;
inline constexpr int kSoftmaxWideRowBytes = 512;  // of all inputs
inline constexpr int kSoftmaxAloneRows = 32;      // of a segment, at most, that one lane walks
inline constexpr int kSoftmaxLongs = 512;         // segments of a tile with more
inline constexpr int kSoftmaxSnapRows = 128;      // Params::snap_rows, at most
inline constexpr int kSoftmaxLeastItems = 128;    // of a tile, if they fit
inline constexpr int kSoftmaxBorderTiles = 8;     // that a block of the last pass looks at

// Rows that a lane takes at once, as registers allow.
constexpr int softmax_at_once(int elements) { return elements > 8 ? 2 : 4; }
constexpr int softmax_bytes(int inputs, int row_bytes) {
  return inputs * row_bytes < kSoftmaxWideRowBytes ? kSoftmaxBytes : kSoftmaxWideBytes;
}
// Of the rows of a tile, as they lie in memory from a multiple of 16 bytes on, in whole lines.
constexpr int softmax_image_bytes(int rows, int row_bytes) {
  return (rows * row_bytes + 16 + 127) / 128 * 128;
}
// A tile of so many items has as many segment ends, and one if it has room for none.
constexpr int softmax_ends(int items) { return items + 1; }
// The rows that a tile can hold, of them those that may come before its first item.
constexpr int softmax_rows(int inputs, int row_bytes) {
  return (softmax_bytes(inputs, row_bytes) - inputs * (16 + 127) - 2) / (inputs * row_bytes + 2);
}
constexpr int softmax_snap(int rows) {
  return rows / 4 < kSoftmaxSnapRows ? rows / 4 : kSoftmaxSnapRows;
}

}  // namespace pullback::segment_cuda

// Tile sizes of sm90_backward.cuh: the host plans with them and the kernels are compiled with them.
// Plain C++20.
#pragma once

#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {

// A warpgroup that copies and adds up d_q, and one for each 64 of the keys; tiles as
// backward_tiles() has them on sm_90.
struct HopperBackwardTile {
  int width, keys;
  int stages;                          // tiles of q and d_out in shared memory
  int copy_registers, work_registers;  // of a thread
  int resident;                        // thread blocks that a multiprocessor holds
  bool blocks;                         // with a block mask
  static constexpr int queries = 64;

  constexpr int groups() const { return keys / 64; }
  constexpr int threads() const { return (groups() + 1) * 128; }
  constexpr int panels() const { return (width + 63) / 64; }  // of 64 columns, 128 bytes
  constexpr int sum_width() const { return panels() * 64; }   // of d_q's sums
  // Keys, values and keys made finite; queries and d_out; dS; d_q; statistics. With what it takes
  // to begin at a multiple of 1024.
  constexpr int shared_bytes() const {
    return (3 * keys + 2 * stages * queries) * panels() * 128 + 2 * keys * 128 +
           queries * sum_width() * 4 + stages * stats_bytes(queries) + 1024;
  }
};
constexpr bool has_hopper_backward_tile(int width, int element_bytes) {
  return width >= 64 && width <= 128 && element_bytes == 2;
}
// Heads of 64 with few queries are little work for what a thread block begins and ends with: where
// there are many blocks, other kernels have two of a multiprocessor.
constexpr bool hopper_backward_pays(int width, int64_t queries, int64_t blocks,
                                    int multiprocessors) {
  return width > 64 || queries > 256 || blocks <= 2 * multiprocessors;
}
// Small blocks: tiles of 128 keys would meet many queries that half of them do not see.
constexpr bool has_small_hopper_tile(int width) { return width == 64; }
constexpr HopperBackwardTile hopper_backward_tile(int width, bool blocks, bool small_blocks) {
  if (small_blocks) return {width, 64, 3, 40, 216, 2, blocks};
  if (width == 64) return {width, 128, 3, 40, 232, 1, blocks};
  if (width == 96) return {width, 128, 2, 56, 224, 1, blocks};
  return {width, 128, 2, 24, 240, 1, blocks};
}

}  // namespace pullback::attention

// Tile sizes of sm90_backward.cuh: the host plans with them and the kernels are compiled with them.
// Plain C++20.
#pragma once

#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {

// A warpgroup that copies and adds up d_q, and two with 64 keys each, for the tiles that
// backward_tiles() has on sm_90.
struct HopperBackwardTile {
  int width;
  int stages;                          // tiles of q and d_out in shared memory
  int copy_registers, work_registers;  // of a thread
  static constexpr int keys = 128, queries = 64, groups = 2;

  static constexpr int threads() { return (groups + 1) * 128; }
  constexpr int panels() const { return (width + 63) / 64; }  // of 64 columns, 128 bytes
  // Keys, values and keys made finite; queries and d_out; dS; d_q; statistics. With what it takes
  // to begin at a multiple of 1024.
  constexpr int shared_bytes() const {
    return (3 * keys + 2 * stages * queries) * panels() * 128 + 2 * keys * 128 +
           queries * width * 4 + stages * stats_bytes(queries) + 1024;
  }
};
constexpr bool has_hopper_backward_tile(int width, int element_bytes) {
  return (width == 64 || width == 128) && element_bytes == 2;
}
constexpr HopperBackwardTile hopper_backward_tile(int width) {
  return width == 64 ? HopperBackwardTile{width, 3, 40, 232}
                     : HopperBackwardTile{width, 2, 24, 240};
}

}  // namespace pullback::attention

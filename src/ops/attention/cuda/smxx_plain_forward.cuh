// The forward pass in plain loops: kPlainWarps warps share kPlainRows queries.
#pragma once

#include "ops/attention/cuda/smxx_clear.cuh"
#include "ops/attention/cuda/smxx_plain_row.cuh"
#include "ops/attention/cuda/smxx_tiles.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

template <class T>
void forward_plain(const ForwardParams& params) {
  QueryTile tile;
  if (!find_query_tile<false>(params.problem, params.q_tiles, params.pair_group, kPlainRows,
                              tile)) {
    return;
  }
  const TileRows rows(tile, kPlainRows);
  clear_rows<T>(params, tile, rows.valid, rows.extent, kPlainWarps * kWarpSize);
  for (int row = static_cast<int>(threadIdx.x) / kWarpSize; row < rows.valid; row += kPlainWarps) {
    plain_row<T, true>(params, tile.sequence, tile.batch, tile.head, tile.first + row);
  }
}

}  // namespace pullback::attention

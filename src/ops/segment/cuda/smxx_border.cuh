// Rows of segments that reach over the borders of tiles, for a last pass in which a block looks at
// some tiles.
#pragma once

#include "ops/segment/cuda/row_tile_tuning.cuh"
#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/smxx_tile.cuh"

namespace pullback::segment_cuda {

inline constexpr int kBorderRuns = 2 * kRowTileBorderTiles;
struct BorderRun {
  int64_t segment, begin, end;
};

// By all threads. Run 2 i is what the block's i-th tile has of a segment that begins before it,
// 2 i + 1 of one that goes on behind it; `begin` is `end` where there is none.
inline void find_border_runs(const Params& p, const Segments& segments,
                             BorderRun (&runs)[kBorderRuns]) {
  const int thread = threadIdx.x;
  if (thread < kBorderRuns) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kRowTileBorderTiles + thread / 2;
    const bool goes_on = thread % 2 != 0;
    BorderRun run{};
    if (number < p.tiles) {
      const Tile tile = make_tile(p, number);
      const int64_t j = goes_on ? tile.stop : tile.first;
      if (j >= 1 && j <= p.segments && (goes_on || tile.first < tile.stop)) {
        const int64_t begin = segments.begin(j), end = segments.end(j);
        if (goes_on) {
          run = {j, begin > tile.row ? begin : tile.row, tile.row_stop};
        } else if (begin < tile.row) {
          run = {j, tile.row, end};
        }
      }
    }
    runs[thread] = run;
  }
  __syncthreads();
}

}  // namespace pullback::segment_cuda

// One pass over rows of several columns: each gets a value from its segment (smxx_maps.cuh). Tiles
// and lanes are those of smxx_reduce_rows.cuh. What a segment gives is read once for each run of
// its rows in a group of lanes, early enough that several reads are in flight.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"

namespace pullback::segment_cuda {

template <class Map, class T, int kVector, bool kPermuted>
void map_rows(const Params& p) {
  constexpr int kBatch = Map::kBatch;  // rows whose reads are in flight together
  __shared__ Ends<kMostTileRows> ends;

  const Segments segments = make_segments(p);
  const Tile tile = make_tile(p, blockIdx.x);
  const int lanes = 1 << p.lane_bits;
  const int walker = static_cast<int>(threadIdx.x) >> p.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t column = (column_block(p) * lanes + lane) * kVector;
  ends.mark(segments, tile, [](int64_t) {});
  if (column >= p.columns) return;

  const int row = walker * kWalkerRows;
  const uint32_t end_bits = ends.bits[walker];
  const uint32_t all = rows_inside<true>(tile, row), inside = rows_inside(tile, row);
  const uint32_t fresh_bits = end_bits << 1 | 1u;  // first rows of runs
  const int after = ends.next(row + kWalkerRows);
  typename Map::Segment segment{};
  // This column of row 0, or where rows follow each other, of the batch's first.
  T* d_x = static_cast<T*>(p.d_x.data) + column * p.d_x.column_stride;
  if (!kPermuted) d_x += (tile.origin + row) * p.d_x.row_stride;
#pragma unroll 1
  for (int base = 0; base < kWalkerRows; base += kBatch) {
    if (all >> base == 0) break;
    typename Map::Raw raw[kBatch];
    typename Map::Row data[kBatch];
    int64_t to[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = row + base + k;
      if (!(all >> (base + k) & 1)) continue;
      to[k] = written_row<kPermuted>(p, tile.origin + at);
      if (!(inside >> (base + k) & 1)) continue;
      if (fresh_bits >> (base + k) & 1) {
        const uint32_t rest = end_bits >> (base + k);
        const int end = rest != 0 ? at + __ffs(static_cast<int>(rest)) - 1 : after;
        raw[k].load(p, segments, ends.segment_to(tile, end), column);
      }
      data[k].load(p, kPermuted && to[k] < 0 ? 0 : to[k], column);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!(all >> (base + k) & 1)) continue;
      Values<T, kVector> values{};
      if (inside >> (base + k) & 1) {
        if (fresh_bits >> (base + k) & 1) segment = Map::of(raw[k], segments, tile);
        values = Map::values(segment, data[k], {static_cast<uint32_t>(row + base + k), to[k]});
      }
      if (kPermuted && to[k] < 0) continue;
      store_once(kPermuted ? d_x + to[k] * p.d_x.row_stride : d_x + k * p.d_x.row_stride, values);
    }
    if (!kPermuted) d_x += kBatch * p.d_x.row_stride;
  }
}

}  // namespace pullback::segment_cuda

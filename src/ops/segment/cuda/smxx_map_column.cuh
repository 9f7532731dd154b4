// smxx_map_rows.cuh for x of one column, with any stride and in any order. What the segments of a
// tile give is read side by side, a thread for each segment, and laid into shared memory where the
// segment's last row is; a lane then serves consecutive rows.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"

namespace pullback::segment_cuda {

template <class Map, class T, int kSegmentBytes>
void map_column(const Params& p) {
  using Segment = typename Map::Segment;
  static_assert(column_tile_items(sizeof(Segment)) == column_tile_items(kSegmentBytes));
  constexpr int kRounds = column_rounds(sizeof(Segment));
  constexpr int kColumnRows = column_rows(sizeof(Segment));
  constexpr int kRows = kThreads * kColumnRows * kRounds;
  constexpr uint32_t kFull = (1u << kColumnRows) - 1;
  __shared__ EndBits<kRows> ends;
  __shared__ Segment at_end[kRows + 1];  // the last is of the segment that goes on after the tile

  const auto [segments, tile] = begin_tile(p);
  const auto read = [&](int64_t j) {
    typename Map::Raw raw;
    if (j >= 1 && j <= p.segments) raw.load(RowInputs{p, segments, j, 0});
    return raw;
  };
  if (threadIdx.x == kThreads - 1) at_end[kRows] = Map::of(read(tile.stop), tile);
  ends.mark(
      segments, tile, read,
      [&](int64_t, int row, const typename Map::Raw& raw) { at_end[row] = Map::of(raw, tile); },
      [](int64_t) {});

#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int row = (round * kThreads + static_cast<int>(threadIdx.x)) * kColumnRows;
    const uint32_t all = rows_inside<true>(tile, row) & kFull;
    const uint32_t inside = rows_inside(tile, row) & kFull;
    if (all == 0) continue;
    const uint32_t end_bits = ends.bits[row / 32] >> (row % 32) & kFull;
    const int after = end_bits >> (kColumnRows - 1) != 0 ? 0 : ends.next(row + kColumnRows);
    typename Map::Row data[kColumnRows];
    int64_t to[kColumnRows];
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      if (!(all >> i & 1)) continue;
      to[i] = written_row<true>(p, tile.origin + row + i);
      if (inside >> i & 1) data[i].load(p, to[i] < 0 ? 0 : to[i], 0);
    }
    Values<T, 1> values[kColumnRows];
    Segment segment{};
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      values[i] = {};
      if (!(inside >> i & 1)) continue;
      const bool same =
          i > 0 && (inside >> (i > 0 ? i - 1 : 0) & ~(end_bits >> (i > 0 ? i - 1 : 0)) & 1);
      if (!same) {
        const uint32_t rest = end_bits >> i;
        segment = at_end[rest != 0 ? row + i + __ffs(static_cast<int>(rest)) - 1 : after];
      }
      values[i] = Map::values(segment, data[i], {static_cast<uint32_t>(row + i), to[i]});
    }
    T* d_x = static_cast<T*>(p.d_x.data);
#pragma unroll
    for (int i = 0; i < kColumnRows; ++i) {
      if ((all >> i & 1) && !(to[i] < 0)) {
        d_x[to[i] * p.d_x.row_stride] = values[i].element[0];
      }
    }
  }
}

}  // namespace pullback::segment_cuda

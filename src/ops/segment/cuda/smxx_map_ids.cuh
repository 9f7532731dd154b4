// A pass over permuted rows of few columns in their own order: each gets a value from the segment
// that its id names (smxx_maps.cuh). What a segment gives is read anew for each row, mostly from
// the second-level cache, but neighbouring threads read and write neighbouring memory.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"

namespace pullback::segment_cuda {

template <class Map, class T, int kVector>
void map_ids(const Params& p) {
  constexpr int kMany = kOwnOrderPieces;
  const Segments segments = make_segments(p);
  const int64_t pieces = p.columns / kVector, all = p.rows * pieces;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kMany * kThreads);
  const int64_t first_row = first / pieces;
  const auto skipped = static_cast<uint32_t>(first - first_row * pieces);

  int64_t row[kMany], column[kMany], segment[kMany];  // the last in the list: 0 is none
  typename Map::Raw raw[kMany];
  typename Map::Row data[kMany];
#pragma unroll
  for (int k = 0; k < kMany; ++k) {
    const uint32_t at = k * kThreads + threadIdx.x;
    const uint32_t place = skipped + at, down = place / static_cast<uint32_t>(pieces);
    row[k] = first + at < all ? first_row + down : -1;
    column[k] = static_cast<int64_t>(place - down * static_cast<uint32_t>(pieces)) * kVector;
    const int64_t id = row[k] < 0 ? -1 : index_at(p.row_ids, row[k]);
    segment[k] = id >= 0 && id < p.segments ? id + 1 : 0;
  }
#pragma unroll
  for (int k = 0; k < kMany; ++k) {
    if (segment[k] == 0) continue;
    raw[k].load(RowInputs{p, segments, segment[k], column[k]});
    data[k].load(p, row[k], column[k]);
  }
#pragma unroll
  for (int k = 0; k < kMany; ++k) {
    if (row[k] < 0) continue;
    Values<T, kVector> values{};
    if (segment[k] != 0) values = Map::values(Map::of(raw[k], Tile{}), data[k], {0, row[k]});
    const int64_t step = kVector > 1 ? 1 : p.d_x.column_stride;
    store_once(static_cast<T*>(p.d_x.data) + row[k] * p.d_x.row_stride + column[k] * step, values);
  }
}

}  // namespace pullback::segment_cuda

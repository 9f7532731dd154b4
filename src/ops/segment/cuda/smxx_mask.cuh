// The 1-bit mask of max and min: bit d%8 of byte d/8 of row n says that x[n,d] gets gradient. A
// thread makes a byte at a time, from the row that each segment has chosen, or where ties are even
// by comparing x with out.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// p.arg holds rows of x, or (u8) places in the segment; p.out the extremes, as x does.
template <class T, class Arg, bool kEven>
void write_mask(const Params& p) {
  __shared__ Ends<kMaskTileItems> ends;
  const Segments segments = make_segments(p);
  const Tile tile = make_tile(p, blockIdx.x);
  ends.mark(segments, tile, [](int64_t) {});

  const int64_t bytes = (p.columns + 7) / 8;
  const int64_t work = (tile.row_stop - tile.row) * bytes;
  for (int64_t item = threadIdx.x; item < work; item += kThreads) {
    const int row = static_cast<int>(item / bytes);
    const int64_t byte = item % bytes, place = tile.row + row;
    const int64_t n = written_row<true>(p, place);
    if (n < 0) continue;
    uint32_t bits = 0;
    if (place >= tile.lowest && place < tile.highest) {
      const int64_t j = ends.segment_to(tile, ends.next(row)), s = Tile::problem_segment(j);
      for (int bit = 0; bit < 8 && byte * 8 + bit < p.columns; ++bit) {
        const int64_t column = byte * 8 + bit;
        bool chosen = false;
        if constexpr (kEven) {
          const Real<T> top = device::to_real(load_row<T, 1>(p.out, s, column).element[0]);
          const Real<T> x = device::to_real(load_row<T, 1>(p.x, n, column).element[0]);
          chosen = x == top || (x != x && top != top);
        } else {
          const auto arg = static_cast<int64_t>(load_row<Arg, 1>(p.arg, s, column).element[0]);
          chosen = arg == (sizeof(Arg) == 1 ? place - segments.begin(j) : n);
          if (sizeof(Arg) == 1 && arg == kNoPlace) chosen = false;
        }
        bits |= static_cast<uint32_t>(chosen) << bit;
      }
    }
    static_cast<uint8_t*>(p.mask.data)[n * p.mask.row_stride + byte * p.mask.column_stride] =
        static_cast<uint8_t>(bits);
  }
}

}  // namespace pullback::segment_cuda

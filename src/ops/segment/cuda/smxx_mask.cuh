// The 1-bit mask of max and min: bit d%8 of byte d/8 of row n says that x[n,d] gets gradient.
//
// One row for each segment and column: mask_rows() makes the bytes of a tile of rows in shared
// memory, sets a bit for each segment and column of the tile in them, and stores them as they lie,
// so that it costs what is read of arg and written of the mask. Of permuted rows arg names the row,
// but not its place: mask_permuted() compares. So does mask_even(), x with out, for all ties.
#pragma once

#include "ops/segment/cuda/mask_tuning.cuh"
#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// --- From arg ---

// Bytes of some rows, those that a block makes, in shared memory.
struct MaskImage {
  const Params& p;
  int rows, row_bytes;
  uint8_t* to;  // the first byte
  bool dense;   // the bytes follow each other in the tensor
  int skew;     // of the first byte, in the image: as in memory where they are dense

  MaskImage(const Params& p_, int64_t first_row, int rows_) : p(p_), rows(rows_) {
    const int64_t all = (p.columns + 7) / 8, first = column_block(p) * kMaskBlockBytes;
    row_bytes = static_cast<int>(all - first < kMaskBlockBytes ? all - first : kMaskBlockBytes);
    to = static_cast<uint8_t*>(p.mask.data) + first_row * p.mask.row_stride +
         first * p.mask.column_stride;
    dense = p.mask.row_stride == row_bytes && (row_bytes == 1 || p.mask.column_stride == 1);
    skew = dense ? static_cast<int>(reinterpret_cast<uint64_t>(to) % 16) : 0;
  }
  int64_t first_column() const { return column_block(p) * kMaskBlockBytes * 8; }
  int stop() const { return skew + rows * row_bytes; }

  // By all threads.
  void clear(Values<uint32_t, 4>* image) const {
    for (int at = threadIdx.x; at * 16 < stop(); at += kThreads) image[at] = {};
  }
  void store(const Values<uint32_t, 4>* image) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(image);
    if (!dense) {
      for (int at = threadIdx.x; at < rows * row_bytes; at += kThreads) {
        const int row = at / row_bytes, byte = at - row * row_bytes;
        to[row * p.mask.row_stride + byte * p.mask.column_stride] = bytes[at];  // skew is 0
      }
      return;
    }
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x) * 16; at < stop(); at += kThreads * 16) {
      if (at >= skew && at + 16 <= stop()) {
        store_once(reinterpret_cast<uint32_t*>(to - skew + at), image[at / 16]);
        continue;
      }
#pragma unroll 1
      for (int i = at; i < at + 16; ++i) {
        if (i >= skew && i < stop()) to[i - skew] = bytes[i];
      }
    }
  }
};

// p.arg holds rows of x.
template <class Arg>
void mask_rows(const Params& p) {
  constexpr int kAtOnce = 4;
  __shared__ Values<uint32_t, 4> image[kMaskImageBytes / 16 + 1];
  const auto [segments, tile] = begin_tile(p);
  const MaskImage mask(p, tile.row,
                       static_cast<int>(clamped(tile.row_stop - tile.row, 0, p.tile_items)));
  mask.clear(image);
  __syncthreads();

  // Segments with rows in the tile, also those that only begin or end in it.
  const int64_t low = clamped(tile.first, 1, p.segments + 1);
  const int64_t high = clamped(tile.stop + 1, low, p.segments + 1);
  const int count = static_cast<int>(clamped(high - low, 0, p.tile_items + 1));
  const int64_t first_column = mask.first_column();
  const int columns =
      static_cast<int>(p.columns - first_column < mask.row_bytes * 8 ? p.columns - first_column
                                                                     : mask.row_bytes * 8);
  // Threads go on by whole segments where they can, so that their columns stay; else items are
  // counted on, as a division for each would take longer than all else.
  int k = static_cast<int>(threadIdx.x) / columns;
  int column = static_cast<int>(threadIdx.x) - k * columns;
  const int segments_on = kThreads / columns, columns_on = kThreads - segments_on * columns;
  const Arg* const args = static_cast<const Arg*>(p.arg.data) +
                          Tile::problem_segment(low) * p.arg.row_stride +
                          first_column * p.arg.column_stride;
  const auto lay = [&]<bool kStays>() {
    const Arg* own = args + k * p.arg.row_stride + column * p.arg.column_stride;
    const int64_t step = segments_on * p.arg.row_stride;
#pragma unroll 1
    while (k < count) {
      Arg arg[kAtOnce];
      int at[kAtOnce], of[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        at[i] = k;
        of[i] = column;
        if (!kStays) own = args + k * p.arg.row_stride + column * p.arg.column_stride;
        if (k < count) arg[i] = *own;
        k += segments_on;
        if (kStays) {
          own += step;
          continue;
        }
        column += columns_on;
        if (column >= columns) {
          column -= columns;
          ++k;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (at[i] >= count) continue;
        uint32_t row;  // of the tile; -1 in arg, and what lies elsewhere, is behind all rows
        if constexpr (sizeof(Arg) == 4) {
          row = static_cast<uint32_t>(arg[i]) - static_cast<uint32_t>(tile.row);
        } else {
          const auto after = static_cast<uint64_t>(static_cast<int64_t>(arg[i]) - tile.row);
          row = after < 0xffffffffu ? static_cast<uint32_t>(after) : 0xffffffffu;
        }
        if (row >= static_cast<uint32_t>(mask.rows)) continue;
        const uint32_t byte = mask.skew + row * mask.row_bytes + of[i] / 8;
        atomicOr(reinterpret_cast<uint32_t*>(image) + byte / 4, 1u << (byte % 4 * 8 + of[i] % 8));
      }
    }
  };
  if (columns_on == 0) {
    lay.template operator()<true>();
  } else {
    lay.template operator()<false>();
  }
  __syncthreads();
  mask.store(image);
}

// --- By comparing ---

// By all threads: makes the bytes of a tile's rows, bits(j, n, byte) of row n of the list's segment
// j.
template <class Bits>
void compare_rows(const Params& p, const Segments& segments, const Bits& bits) {
  __shared__ Ends<kMaskCompareItems> ends;
  const Tile tile = make_tile(p, blockIdx.x);
  ends.mark(segments, tile, [](int64_t) {});

  const int64_t bytes = (p.columns + 7) / 8;
  const int rows = static_cast<int>(clamped(tile.row_stop - tile.row, 0, kMaskCompareItems));
  // Threads beside each other have neighbouring bytes, counted on as a division takes longer.
  int row = static_cast<int>(threadIdx.x / bytes);
  int64_t byte = threadIdx.x - row * bytes;
  const int rows_on = static_cast<int>(kThreads / bytes);
  const int64_t bytes_on = kThreads - rows_on * bytes;
#pragma unroll 1
  while (row < rows) {
    const int64_t place = tile.row + row, n = written_row<true>(p, place);
    if (n >= 0) {
      uint32_t made = 0;
      if (place >= tile.lowest && place < tile.highest) {
        made = bits(ends.segment_to(tile, ends.next(row)), n, byte);
      }
      static_cast<uint8_t*>(p.mask.data)[n * p.mask.row_stride + byte * p.mask.column_stride] =
          static_cast<uint8_t>(made);
    }
    row += rows_on;
    byte += bytes_on;
    if (byte >= bytes) {
      byte -= bytes;
      ++row;
    }
  }
}

// p.arg holds rows of x.
template <class Arg>
void mask_permuted(const Params& p) {
  const Segments segments = make_segments(p);
  compare_rows(p, segments, [&](int64_t j, int64_t n, int64_t byte) {
    uint32_t bits = 0;
    for (int bit = 0; bit < 8 && byte * 8 + bit < p.columns; ++bit) {
      const auto arg = static_cast<int64_t>(
          load_row<Arg, 1>(p.arg, Tile::problem_segment(j), byte * 8 + bit).element[0]);
      bits |= static_cast<uint32_t>(arg == n) << bit;
    }
    return bits;
  });
}

// The columns of a byte, of one row.
template <class T>
struct EightColumns {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  using Piece = Values<T, kVector>;
  Piece piece[8 / kVector];

  // The first `count` of them.
  void load(const Matrix& from, int64_t row, int64_t column, int count) {
    const T* at =
        static_cast<const T*>(from.data) + row * from.row_stride + column * from.column_stride;
    if (from.vector >= kVector) {
#pragma unroll
      for (int i = 0; i < 8 / kVector; ++i) {
        if (i * kVector < count) piece[i] = *reinterpret_cast<const Piece*>(at + i * kVector);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8 / kVector; ++i) {
      Real<T> values[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        values[k] = 0;
        if (i * kVector + k < count) {
          values[k] = device::to_real(at[(i * kVector + k) * from.column_stride]);
        }
      }
      piece[i] = Piece::of(values);
    }
  }
  Real<T> real(int i) const { return piece[i / kVector].real(i % kVector); }
};

// Which of up to eight columns of a row of x are extremes: of p.out, as x has them.
template <class T>
uint32_t even_bits(const Params& p, int64_t s, int64_t n, int64_t byte) {
  const int64_t left = p.columns - byte * 8;
  const int count = left < 8 ? static_cast<int>(left) : 8;
  EightColumns<T> x, top;
  x.load(p.x, n, byte * 8, count);
  top.load(p.out, s, byte * 8, count);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bits |= static_cast<uint32_t>(tied(x.real(i), top.real(i)) & (i < count)) << i;
  }
  return bits;
}

template <class T>
void mask_even(const Params& p) {
  const Segments segments = make_segments(p);
  compare_rows(p, segments, [&](int64_t j, int64_t n, int64_t byte) {
    return even_bits<T>(p, Tile::problem_segment(j), n, byte);
  });
}

}  // namespace pullback::segment_cuda

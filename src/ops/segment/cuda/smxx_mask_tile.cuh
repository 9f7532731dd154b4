// Forward of max and min of contiguous rows with the mask of all ties, for which x is read once
// where segments lie within a tile.
//
// A block holds the rows of its tile (smxx_row_tile.cuh). A lane finds the extremes of a few
// columns of a segment and goes through its rows again for where they are: a byte of shared memory
// for each row and piece. Of these the mask's bytes are made at the end, in the place of the rows.
// Segments that reach over the tile's borders are only reduced, to the tile's two slots:
// smxx_combine.cuh puts these together, and mask_border() reads such rows again where the tile's
// part of a segment has its extreme.
#pragma once

#include "ops/segment/cuda/smxx_border.cuh"
#include "ops/segment/cuda/smxx_mask.cuh"
#include "ops/segment/cuda/smxx_row_tile.cuh"

namespace pullback::segment_cuda {

// A piece of a row, or the largest of each of its columns, in words: one float, or two of 16 bits.
// Those of min are negated.
template <class T, int kVector, bool kMin>
struct PieceWords {
  using Piece = Values<T, kVector>;
  static constexpr bool kSingle = sizeof(T) == 4;
  static constexpr int kCount = (sizeof(Piece) + 3) / 4;
  static constexpr uint32_t kSigns = !kMin ? 0 : kSingle ? 0x80000000u : 0x80008000u;
  uint32_t word[kCount];

  static PieceWords of(const Piece& piece) {
    union Both {
      Piece piece;
      uint32_t word[kCount];
    };
    Both both;
    if constexpr (sizeof(Piece) < 4) both.word[0] = 0;
    both.piece = piece;
    PieceWords words;
#pragma unroll
    for (int i = 0; i < kCount; ++i) words.word[i] = both.word[i] ^ kSigns;
    return words;
  }
  static PieceWords lowest() {
    PieceWords words;
    const float infinity[2] = {-device::infinity<float>(), -device::infinity<float>()};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kSingle) {
        words.word[i] = __float_as_uint(infinity[0]);
      } else {
        words.word[i] = device::pack<T>(infinity[0], infinity[1]);
      }
    }
    return words;
  }
  void take(const PieceWords& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) word[i] = Packed<T>::max_or_nan(other.word[i], word[i]);
  }
  // Column i, negated for min.
  float real(int i) const {
    if constexpr (kSingle) {
      return __uint_as_float(word[i]);
    } else {
      return device::to_real(T{static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16))});
    }
  }
  bool any_nan() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) any |= real(i) != real(i);
    return any;
  }
  // Bit i: that column i of this row is the extreme. Without NaN (kNan) no row is above it.
  template <bool kNan>
  uint32_t bits(const PieceWords& top) const {
    uint32_t bits = 0;
    if constexpr (!kNan && kPairs<T, kVector>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        bits |= Packed<T>::template above<true>(word[i], top.word[i]) & 0x20001u << 2 * i;
      }
      bits = (bits | bits >> 16) & ((1u << kVector) - 1);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float x = real(i), extreme = top.real(i);
        bits |= static_cast<uint32_t>(kNan ? tied(x, extreme) : x >= extreme) << i;
      }
    }
    return bits;
  }
};

template <class T, int kVector, bool kMin>
void mask_tile(const Params& p) {
  using Op = Extreme<Real<T>, kMin>;
  using Words = PieceWords<T, kVector, kMin>;
  using Piece = Values<T, kVector>;
  constexpr int kAtOnce = 4;
  constexpr int kBytePieces = 8 / kVector;  // of a byte of the mask
  extern __shared__ __align__(128) unsigned char memory[];

  const auto [segments, tile] = begin_tile(p);
  device::allow_next_kernel();
  RowTile rows(p, tile, sizeof(T));
  const RowImage image{memory};
  rows.copy_rows(image, p.x.data);
  async_commit();
  const int pieces = static_cast<int>(p.columns) / kVector;
  uint8_t* const found = memory + rows.image_bytes();  // [rows, pieces]
  rows.find_ends(segments, found + ((rows.row_count * pieces + 1) & -2));
  async_wait<0>();

  rows.share_out<kVector, Parts::none>(
      [&](int k, int column, int begin, int end, int rank, int step, int lanes, int) {
        const uint32_t first =
            rows.skew + begin * rows.row_bytes + column * static_cast<int>(sizeof(T));
        const int many = end - begin;
        uint8_t* const bits = found + begin * pieces + column / kVector;
        if (!rows.in_problem(k)) {
          for (int at = rank; at < many; at += step) bits[at * pieces] = 0;
          return;
        }
        const auto row_at = [&](int at) {
          return Words::of(image.load<Piece>(first + at * rows.row_bytes));
        };
        Words top = Words::lowest();
#pragma unroll 1
        for (int at = rank; at < many; at += kAtOnce * step) {
          Words row[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            row[i] = top;
            if (at + i * step < many) row[i] = row_at(at + i * step);
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) top.take(row[i]);
        }
        if (step > 1) {
#pragma unroll 1
          for (int other = lanes; other < device::kWarpSize; other *= 2) {
            top.take(shuffle_xor(top, other));
          }
        }
        if (rows.reaches_out(k)) {
          if (rank != 0 || many <= 0) return;
          typename Op::State* const slot = slot_of<Op>(p, blockIdx.x, k == rows.end_count) + column;
#pragma unroll
          for (int i = 0; i < kVector; ++i) slot[i] = {top.real(i)};
          return;
        }
        if (rank == 0 && many > 0 && p.result.data != nullptr) {
          Real<T> values[kVector];
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] = Op::value({top.real(i)});
          store_row(p.result, Tile::problem_segment(rows.tile.first + k), column,
                    Piece::of(values));
        }
        if (rows.begin_of(k) == rows.end_of(k)) {
#pragma unroll 1
          for (int i = 0; i < kVector; ++i) {
            finish_empty<Op, T>(p, rows.tile.first + k, column + i);
          }
        }
        const bool nan = top.any_nan();
#pragma unroll 2
        for (int at = rank; at < many; at += step) {
          const Words row = row_at(at);
          bits[at * pieces] = static_cast<uint8_t>(nan ? row.template bits<true>(top)
                                                       : row.template bits<false>(top));
        }
      },
      [](int, int, int, int) {});
  __syncthreads();

  const int begin = rows.begins_before ? rows.end_of(0) : 0;
  const int stop = rows.in_problem(rows.end_count) ? rows.begin_of(rows.end_count) : rows.row_count;
  const MaskImage mask(p, rows.tile.row + begin, stop > begin ? stop - begin : 0);
  const uint8_t* const first = found + begin * pieces;
  uint8_t* const bytes = memory + mask.skew;
  // Where no byte is a part of one, they follow each other as pieces do.
  const int row_bytes = p.columns % 8 == 0 ? mask.rows * mask.row_bytes : mask.row_bytes;
  const int row_pieces = p.columns % 8 == 0 ? mask.rows * pieces : pieces;
#pragma unroll 2
  for (int at = threadIdx.x; at < mask.rows * mask.row_bytes; at += kThreads) {
    const int row = at < row_bytes ? 0 : at / row_bytes,
              piece = (at - row * row_bytes) * kBytePieces;
    uint32_t made = 0;
#pragma unroll
    for (int i = 0; i < kBytePieces; ++i) {
      if (piece + i < row_pieces) {
        made |= static_cast<uint32_t>(first[row * row_pieces + piece + i]) << i * kVector;
      }
    }
    bytes[at] = static_cast<uint8_t>(made);
  }
  __syncthreads();
  mask.store(reinterpret_cast<const Values<uint32_t, 4>*>(memory));
}

// Rows of segments that reach over the borders of tiles. A block looks at some tiles.
template <class T>
void mask_border(const Params& p) {
  using Op = Extreme<Real<T>, false>;
  __shared__ BorderRun runs[kBorderRuns];

  const Segments segments = make_segments(p);
  find_border_runs(p, segments, runs);
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * kRowTileBorderTiles;

  const int bytes = static_cast<int>((p.columns + 7) / 8);
  const int at_once = kThreads / bytes, own = threadIdx.x / bytes, byte = threadIdx.x - own * bytes;
  if (own >= at_once) return;
#pragma unroll 1
  for (int i = 0; i < kBorderRuns; ++i) {
    const BorderRun run = runs[i];
    if (run.begin >= run.end) continue;
    const int64_t s = Tile::problem_segment(run.segment);
    const typename Op::State* const slot = slot_of<Op>(p, first_tile + i / 2, i % 2) + byte * 8;
    bool has_any = false;
#pragma unroll 1
    for (int column = 0; column < 8 && byte * 8 + column < p.columns; ++column) {
      const Real<T> part = slot[column].top;  // of min negated
      const Real<T> whole = device::to_real(load_row<T, 1>(p.out, s, byte * 8 + column).element[0]);
      has_any |= (part == whole) | (part == -whole) | (part != part);
    }
    uint8_t* to = static_cast<uint8_t*>(p.mask.data) + byte * p.mask.column_stride;
#pragma unroll 1
    for (int64_t row = run.begin + own; row < run.end; row += at_once) {
      to[row * p.mask.row_stride] =
          static_cast<uint8_t>(has_any ? even_bits<T>(p, s, row, byte) : 0);
    }
  }
}

}  // namespace pullback::segment_cuda

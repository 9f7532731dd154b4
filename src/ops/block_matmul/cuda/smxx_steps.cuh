// The tables of an item's steps in shared memory, and the fragments of the operands.
//
// Tiles of operands are rows of 128 bytes (device/shared_tile.cuh) that lie in the order of memory:
// along the sum's dimension, or across it. Longer extents are several tiles.
//
// f32 is multiplied as three products of tf32: x = high + low, x y ≈ high high + high low + low
// high (Markidis et al. 2018), each half rounded to nearest. Tensor cores truncate the sums they
// make, so that errors of a long sum would all point the same way (Ootomo, Yokota 2022): each piece
// of the sum is made by itself and added in plain f32.
#pragma once

#include "device/mma.cuh"
#include "device/shared_tile.cuh"
#include "ops/block_matmul/cuda/params.cuh"
#include "ops/block_matmul/cuda/tuning.hpp"

namespace pullback::block_matmul {

using namespace device;

template <class T>
inline constexpr int kTileRow = kTileRowBytes / static_cast<int>(sizeof(T));  // elements
template <class T>
inline constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements
template <class T>
using Layout = TileLayout<T, kTileRow<T>>;

// Views of kTableBytes of shared memory.
struct StepTables {
  int64_t* squares;  // [kMostSteps, kStepSquares]
  int64_t* lines;    // [kMostSteps, kStepColumns / 16]
  uint32_t* masks;   // [kMostSteps]

  explicit StepTables(unsigned char* shared)
      : squares(reinterpret_cast<int64_t*>(shared)),
        lines(squares + kMostSteps * kStepSquares),
        masks(reinterpret_cast<uint32_t*>(lines + kMostSteps * (kStepColumns / 16))) {}

  // By all threads, which then meet at a barrier.
  void load(const Steps& steps, const Item& item) {
    const auto copy = [&]<class E>(E* to, const E* from, int per_step) {
      for (int i = threadIdx.x; i < item.steps * per_step; i += kThreads) {
        to[i] = from[item.first_step * per_step + i];
      }
    };
    copy(squares, steps.squares, kStepSquares);
    copy(lines, steps.lines, kStepColumns / 16);
    copy(masks, steps.masks, 1);
    __syncthreads();
  }

  // Of what lies at (row of the group, column of the step).
  int64_t square(int step, int row, int column) const {
    return squares[step * kStepSquares + column / 16 * (kGroupRows / 16) + row / 16];
  }
  int64_t line(int step, int column) const {
    return lines[step * (kStepColumns / 16) + column / 16];
  }
};

// Of the left operand 16 rows, or of the right one 16 columns, by 32 bytes of the sum.
template <class T>
struct Fragment {
  uint32_t word[4];
  void split() {}
};
template <>
struct Fragment<float> {
  uint32_t word[4], low[4];

  // The high part is the nearest tf32; of the low one the hardware ignores the bits that it has no
  // room for. What is not finite, or would not be when rounded, is in the low part alone: as a high
  // part it would meet the other factor's low one, which may be 0.
  void split() {
    constexpr float kLeastUnrounded = 0x1.ffep127f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = __uint_as_float(word[i]);
      const uint32_t high = fabsf(x) < kLeastUnrounded ? (word[i] + 0x1000u) & 0xffffe000u : 0u;
      low[i] = __float_as_uint(x - __uint_as_float(high));
      word[i] = high;
    }
  }
};

// Elements of the sum in a fragment.
template <class T>
inline constexpr int kInner = 32 / static_cast<int>(sizeof(T));

// The products that make up one of T, the small ones first.
template <class T>
inline constexpr int kProducts = sizeof(T) == 4 ? 3 : 1;

// sums += one of the products of a · (columns 8 · half … of b)
template <class T>
void multiply(float (&sums)[4], const Fragment<T>& a, const Fragment<T>& b, int half, int product) {
  if constexpr (sizeof(T) == 4) {
    const auto& left = product == 0 ? a.low : a.word;
    const auto& right = product == 1 ? b.low : b.word;
    mma_1688_tf32(sums, left, right[2 * half], right[2 * half + 1]);
  } else {
    mma_16816<T>(sums, a.word, b.word[2 * half], b.word[2 * half + 1]);
  }
}

// Where this lane finds its row of the four matrices of a fragment, in a tile of which the fragment
// begins at (row, chunk), row a multiple of 8 and chunk even. Added to a lane's part that does not
// change, a chunk is a constant to xor with.
template <class T>
uint32_t fragment_address(uint32_t tile, int row, int chunk, int lane_row, int lane_chunk) {
  return tile + row * kTileRowBytes + (Layout<T>::offset(lane_row, lane_chunk) ^ (chunk * 16));
}

// 32-bit elements of a tile that lies across the sum: `words` are (k, line), (k, line + 8) or, for
// the right operand, (k + 4, line) and so on, of lane 4 · line + k.
inline uint32_t word_across(uint32_t tile, int k, int line) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = k + lane % 4, column = line + lane / 4;
  return load_shared_word(tile + Layout<float>::offset(row, column / 4) + column % 4 * 4);
}

// Rows from `row` on, elements of the sum from `k` on, of the left operand. kAlong: a tile row
// holds the sum's dimension, and tiles have `kRows` rows.
template <class T, bool kAlong, int kRows>
void load_left(Fragment<T>& a, uint32_t tiles, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int neighbour = kAlong ? k : row;
  const uint32_t tile = tiles + neighbour / kTileRow<T> * (kRows * kTileRowBytes);
  const int chunk = neighbour % kTileRow<T> / kChunk<T>;
  if constexpr (kAlong) {
    load_matrices(a.word, fragment_address<T>(tile, row, chunk, lane % 16, lane / 16));
  } else if constexpr (sizeof(T) == 2) {
    load_matrices_transposed(
        a.word, fragment_address<T>(tile, k, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.word[i] = word_across(tile, k + i / 2 * 4, row % kTileRow<T> + i % 2 * 8);
    }
  }
  a.split();
}

// Columns from `column` on of the right operand: words 0 and 1 are the first eight.
template <class T, bool kAlong, int kRows>
void load_right(Fragment<T>& b, uint32_t tiles, int k, int column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int neighbour = kAlong ? k : column;
  const uint32_t tile = tiles + neighbour / kTileRow<T> * (kRows * kTileRowBytes);
  const int chunk = neighbour % kTileRow<T> / kChunk<T>;
  if constexpr (kAlong) {
    load_matrices(b.word,
                  fragment_address<T>(tile, column, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2));
  } else if constexpr (sizeof(T) == 2) {
    load_matrices_transposed(b.word, fragment_address<T>(tile, k, chunk, lane % 16, lane / 16));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b.word[i] = word_across(tile, k + i % 2 * 4, column % kTileRow<T> + i / 2 * 8);
    }
  }
  b.split();
}

// sums += left · right for a warp's 32 rows by kColumns columns and kDepth of the sum, in 16 bits.
// The next fragments are loaded before the present ones are multiplied.
template <class T, int kColumns, int kDepth, bool kLeftAlong, int kLeftRows, bool kRightAlong,
          int kRightRows>
void multiply_tiles(float (&sums)[2][kColumns / 8][4], uint32_t left, uint32_t right, int row) {
  constexpr int kParts = kColumns / 64, kUnits = kDepth / kInner<T> * kParts;
  Fragment<T> a[2][2], b[2][4];
  const auto load = [&](int unit) {
    const int step = unit / kParts, part = unit % kParts, k = step * kInner<T>;
    if (part == 0) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_left<T, kLeftAlong, kLeftRows>(a[step % 2][m], left, row + m * 16, k);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_right<T, kRightAlong, kRightRows>(b[unit % 2][n], right, k, part * 64 + n * 16);
    }
  };
  load(0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit + 1 < kUnits) load(unit + 1);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        multiply<T>(sums[m][unit % kParts * 8 + n], a[unit / kParts % 2][m], b[unit % 2][n / 2],
                    n % 2, 0);
      }
    }
  }
}

// The same for all dtypes, leaving out what covered(m, n, k), in units of 16, denies. What it
// denies in all rows is not even loaded.
template <class T, int kColumns, int kDepth, bool kLeftAlong, int kLeftRows, bool kRightAlong,
          int kRightRows, class Covered>
void multiply_covered_tiles(float (&sums)[2][kColumns / 8][4], uint32_t left, uint32_t right,
                            int row, Covered covered) {
#pragma unroll
  for (int k = 0; k < kDepth; k += kInner<T>) {
    Fragment<T> a[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) load_left<T, kLeftAlong, kLeftRows>(a[m], left, row + m * 16, k);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      if (!covered(0, n, k / 16) && !covered(1, n, k / 16)) continue;
      Fragment<T> b;
      load_right<T, kRightAlong, kRightRows>(b, right, k, n * 16);
      float piece[2][2][4] = {};  // for f32
#pragma unroll
      for (int product = 0; product < kProducts<T>; ++product) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (!covered(m, n, k / 16)) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            multiply<T>(sizeof(T) == 4 ? piece[m][half] : sums[m][2 * n + half], a[m], b, half,
                        product);
          }
        }
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][2 * n + half][e] += piece[m][half][e];
          }
        }
      }
    }
  }
}

// Of a piece that begins at the first of `elements`.
template <class T>
int clamp_bytes(int64_t elements) {
  return elements >= kChunk<T> ? 16
         : elements <= 0       ? 0
                               : static_cast<int>(elements) * static_cast<int>(sizeof(T));
}

}  // namespace pullback::block_matmul

// Tiles of matrix rows in shared memory, and their loading from strided global memory.
//
// A row of kColumns elements is cut into chunks of 16 bytes, which are permuted within the row
// (an exclusive or with bits of the row's number), so that the same chunk of 8 neighbouring rows,
// as ldmatrix reads it, lies in 8 different groups of banks. kColumns · sizeof(T) is a multiple of
// 64 bytes; a tile begins at a multiple of 128.
#pragma once

#include "device/async_copy.cuh"
#include "device/shared.cuh"

namespace pullback::device {

template <class T, int kColumns>
struct TileLayout {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kChunks = kColumns / kChunk;                // of a row
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  static_assert(kRowBytes % 64 == 0);

  // What a chunk's number is exclusive-ored with; repeats every 8 rows.
  static constexpr int swizzle(int row) { return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3; }
  // In bytes from the beginning of the tile.
  static constexpr uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ swizzle(row)) * 16));
  }
};

// Loads tiles of kRows rows of one matrix, with all kThreads threads of the block. kVectors: rows
// are contiguous, begin at multiples of 16 bytes and have a multiple of 16 bytes; then copies are
// asynchronous, and the caller commits and waits. Otherwise elements are gathered one by one, and
// are there after the next barrier. What lies beyond the matrix reads as 0.
//
// kInterleaved: row 8 i + 2 a + e of every 32 in the tile is row 8 a + 2 i + e of the matrix, a and
// i in 0..3. In a product with the tile's rows as columns, lane 4 g + t then has the columns
// 8 t … 8 t + 7 of each 32, next to each other in whatever is added to the sums.
//
// kShort: code is to be short rather than fast. kPlane: the last piece of a row may be cut off, and
// all rows may be the same one, which the first-level cache then keeps.
template <class T, int kRows, int kColumns, int kThreads, bool kVectors, bool kInterleaved = false,
          bool kShort = !kVectors, bool kPlane = false>
class TileLoader {
  using Layout = TileLayout<T, kColumns>;
  // Threads side by side in a row; each takes every kAcross-th chunk of it.
  static constexpr int kAcross = Layout::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kDown = kThreads / kAcross;
  static_assert(kDown % 8 == 0 && Layout::kChunks % kAcross == 0);
  static_assert(!kInterleaved || kRows % 32 == 0);
  static_assert((kDown & (kDown - 1)) == 0);

  // Moves bits, so that rows made of different bits may be moved one by one.
  static constexpr int source_row(int row) {
    if constexpr (!kInterleaved) return row;
    return (row & ~30) | (row & 6) << 2 | (row & 24) >> 2;
  }

 public:
  // Steps in elements.
  TileLoader(const T* first, int64_t row_step, int64_t element_step, int columns)
      : first_(first), row_step_(row_step), element_step_(element_step), columns_(columns) {
    asm volatile("" : "+l"(first_));
  }

  // The tile begins at row `first_row` of the matrix, which has `rows` more rows from there on.
  void load(uint32_t tile, int64_t first_row, int rows) const {
    // Read anew, so that what follows from it is computed here and holds no register elsewhere.
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int row = static_cast<int>(thread / kAcross), chunk = static_cast<int>(thread % kAcross);
    const int column = chunk * Layout::kChunk;
    const int own_row = source_row(row);
    uint32_t to = tile + Layout::offset(row, chunk);
    const T* const own = first_ + (first_row + own_row) * row_step_ +
                         column * (kVectors ? int64_t{1} : element_step_);
    // Where elements come one by one, short code and few registers count anyway.
#pragma unroll(kShort ? 1 : kRows / kDown)
    for (int down = 0; down < kRows; down += kDown) {
      if (kRows % kDown == 0 || row + down < kRows) {
        const T* from = own + source_row(down) * row_step_;
        const bool valid = own_row + source_row(down) < rows;
#pragma unroll(kShort ? 1 : Layout::kChunks / kAcross)
        for (int across = 0; across < kColumns; across += kAcross * Layout::kChunk) {
          const uint32_t address = to + static_cast<uint32_t>(across / Layout::kChunk * 16);
          const int columns = valid ? columns_ - column - across : 0;
          if constexpr (kVectors && kPlane) {
            const int taken = columns < 0 ? 0 : columns < Layout::kChunk ? columns : Layout::kChunk;
            const int bytes = taken * static_cast<int>(sizeof(T));
            if (row_step_ == 0) {
              async_copy_padded_cached(address, from + across, bytes);
            } else {
              async_copy_padded(address, from + across, bytes);
            }
          } else if constexpr (kVectors) {
            async_copy_or_zero(address, from + across, columns > 0);
          } else {
            gather(address, from + across * element_step_, columns);
          }
        }
      }
      to += kDown * Layout::kRowBytes;
    }
  }

 private:
  void gather(uint32_t address, const T* from, int columns) const {
    union {
      T element[Layout::kChunk];
      uint32_t word[4];
    } piece = {};
#pragma unroll
    for (int e = 0; e < Layout::kChunk; ++e) {
      if (e < columns) piece.element[e] = from[e * element_step_];
    }
    store_shared(address, piece.word);
  }

  const T* first_;
  int64_t row_step_, element_step_;
  int columns_;
};

}  // namespace pullback::device

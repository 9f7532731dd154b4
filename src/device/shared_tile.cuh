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

// Rows in global memory; steps in elements.
template <class T>
struct TileSource {
  const T* first;
  int64_t row, element;
  int rows, columns;  // valid from `first` on, may be more than the tile has; the rest reads as 0
};

// All kThreads threads of the block load one tile. kVectors: rows are contiguous and begin at
// multiples of 16 bytes; then copies are asynchronous, and the caller commits and waits. Otherwise
// elements are gathered one by one, and are there after the next barrier.
template <class T, int kRows, int kColumns, int kThreads, bool kVectors>
void load_tile(uint32_t tile, const TileSource<T>& source) {
  using Layout = TileLayout<T, kColumns>;
  // Threads side by side in a row; each takes every kAcross-th chunk of it.
  constexpr int kAcross = Layout::kChunks % 8 == 0 ? 8 : 4;
  constexpr int kDown = kThreads / kAcross;
  static_assert(kDown % 8 == 0 && Layout::kChunks % kAcross == 0);
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % kAcross, first_row = thread / kAcross;
  uint32_t to = tile + Layout::offset(first_row, chunk);
  const T* from = source.first + first_row * source.row + chunk * Layout::kChunk * source.element;
#pragma unroll
  for (int down = 0; down < kRows; down += kDown) {
    const int row = first_row + down;
    if (kRows % kDown == 0 || row < kRows) {
#pragma unroll
      for (int across = 0; across < Layout::kChunks; across += kAcross) {
        const int column = (chunk + across) * Layout::kChunk;
        const int columns = row < source.rows ? source.columns - column : 0;
        const uint32_t address = to + static_cast<uint32_t>(across * 16);
        if constexpr (kVectors) {
          const int bytes = columns * static_cast<int>(sizeof(T));
          async_copy_or_zero(address, from + across * Layout::kChunk,
                             bytes < 0    ? 0
                             : bytes > 16 ? 16
                                          : bytes);
        } else {
          union {
            T element[Layout::kChunk];
            uint32_t word[4];
          } piece = {};
#pragma unroll
          for (int e = 0; e < Layout::kChunk; ++e) {
            if (e < columns) {
              piece.element[e] = from[(across * Layout::kChunk + e) * source.element];
            }
          }
          store_shared(address, piece.word);
        }
      }
    }
    to += kDown * Layout::kRowBytes;
    from += kDown * source.row;
  }
}

}  // namespace pullback::device

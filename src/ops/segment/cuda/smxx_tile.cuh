// The segments of a tile: one bit for each row that is the last of its segment, with the segment's
// number beside it.
#pragma once

#include "ops/segment/cuda/smxx_math.cuh"
#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/tuning.hpp"

namespace pullback::segment_cuda {

inline int64_t column_block(const Params& p) {
  return static_cast<int64_t>(p.column_block) + blockIdx.y;
}

// Row of x at place r of the sorted order, which kPermuted allows to be another than r. Reading, a
// bad entry of the permutation stands for row 0.
template <bool kPermuted>
int64_t row_of(const Params& p, int64_t place) {
  if (!kPermuted || p.permutation.data == nullptr) return place;
  const int64_t row = index_at(p.permutation, place);
  return row >= 0 && row < p.rows ? row : 0;
}
// Writing, it stands for no row: -1.
template <bool kPermuted>
int64_t written_row(const Params& p, int64_t place) {
  if (!kPermuted || p.permutation.data == nullptr) return place;
  const int64_t row = index_at(p.permutation, place);
  return row >= 0 && row < p.rows ? row : -1;
}

struct Tile {
  int64_t first, stop;  // segments that end in the tile
  int64_t row, row_stop;
  int64_t origin;           // rows of the tile are counted from here, at most a few before `row`
  int64_t lowest, highest;  // rows below and from there on are in no segment

  // Segments of the problem, 0 to S-1, are the inner ones of the list.
  static int64_t problem_segment(int64_t j) { return j - 1; }
};

inline int64_t tile_origin(const Params& p, const TileStart& start) {
  return start.row & -static_cast<int64_t>(p.row_alignment);
}

inline Tile make_tile(const Params& p, int64_t tile) {
  const TileStart start = p.starts[tile], stop = p.starts[tile + 1], bounds = p.starts[p.tiles + 1];
  return {start.segment,         stop.segment,   start.row, stop.row,
          tile_origin(p, start), bounds.segment, bounds.row};
}

// What a kernel begins with whose blocks have a tile each.
struct TileWork {
  Segments segments;
  Tile tile;
};
inline TileWork begin_tile(const Params& p) {
  if (p.proof != Proof::checked) {
    const Segments segments = make_segments(p);
    return {segments, make_tile(p, blockIdx.x)};
  }
  device::wait_for_previous_kernel();
  const bool bad = disorder_ahead(p);
  // On its way before the block meets.
  TileWork work{{}, make_tile(p, blockIdx.x)};
  const bool changed = repaired(p, bad);
  if (changed) work.tile = make_tile(p, blockIdx.x);
  work.segments = make_segments(p, changed || p.ids.data != nullptr);
  return work;
}

// Of the 32 rows from `row` of the tile on, one bit for each that the tile has and a segment of the
// problem too (kAll: or none).
template <bool kAll = false>
uint32_t rows_inside(const Tile& tile, int row) {
  const int64_t place = tile.origin + row;
  const auto below = [&](int64_t stop) {
    const int64_t count = stop - place;
    return count <= 0 ? 0u : count >= 32 ? 0xffffffffu : (1u << count) - 1;
  };
  if (kAll) return below(tile.row_stop) & ~below(tile.row);
  return below(tile.row_stop < tile.highest ? tile.row_stop : tile.highest) &
         ~below(tile.row > tile.lowest ? tile.row : tile.lowest);
}

// Which of a tile's rows, kRows at most, are the last ones of segments.
template <int kRows>
struct EndBits {
  static constexpr int kWords = (kRows + 31) / 32;
  static constexpr int kGroups = (kWords + 31) / 32;
  uint32_t bits[kWords];
  uint32_t words[kGroups];  // which words have a bit

  // By all threads of the block: calls on_end(j, row, early(j)) for segments with a last row in the
  // tile, and on_empty(j) for empty segments of the problem. What early(j) reads is on its way
  // while the offsets are.
  template <class Early, class OnEnd, class OnEmpty>
  void mark(const Segments& segments, const Tile& tile, const Early& early, const OnEnd& on_end,
            const OnEmpty& on_empty) {
    constexpr int kAtOnce = 2;
    for (int word = threadIdx.x; word < kWords; word += blockDim.x) bits[word] = 0;
    if (threadIdx.x < kGroups) words[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t base = tile.first + threadIdx.x; base < tile.stop; base += kAtOnce * blockDim.x) {
      int64_t begin[kAtOnce], end[kAtOnce];
      decltype(early(base)) read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = base + i * blockDim.x;
        if (j >= tile.stop) continue;
        begin[i] = segments.begin(j);
        end[i] = segments.end(j);
        read[i] = early(j);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = base + i * blockDim.x;
        if (j >= tile.stop) continue;
        const auto row = static_cast<uint64_t>(end[i] - 1 - tile.origin);
        if (begin[i] == end[i]) {
          if (j >= 1 && j <= segments.count) on_empty(j);
        } else if (row < static_cast<uint64_t>(kRows)) {
          atomicOr(&bits[row / 32], 1u << (row % 32));
          atomicOr(&words[row / 1024], 1u << (row / 32 % 32));
          on_end(j, static_cast<int>(row), read[i]);
        }
      }
    }
    __syncthreads();
  }

  // Of 32 rows from `row` on, whether they are marked.
  uint32_t from(int row) const {
    const int word = row / 32;
    const uint32_t low = word < kWords ? bits[word] : 0,
                   high = word + 1 < kWords ? bits[word + 1] : 0;
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (row % 32));
  }
  // First marked row from `row` on; kRows when there is none.
  int next(int row) const {
    int word = row / 32;
    if (word >= kWords) return kRows;
    uint32_t rest = bits[word] & (0xffffffffu << (row % 32));
    if (rest == 0) {
      int group = word / 32;
      uint32_t more = words[group] & (0xfffffffeu << (word % 32));
      while (more == 0 && ++group < kGroups) more = words[group];
      if (more == 0) return kRows;
      word = group * 32 + __ffs(static_cast<int>(more)) - 1;
      rest = bits[word];
    }
    return word * 32 + __ffs(static_cast<int>(rest)) - 1;
  }
};

// How many of a tile's ends lie before each word of bits.
template <int kRows>
struct EndCounts {
  static constexpr int kWords = EndBits<kRows>::kWords;
  uint16_t before[kWords];
  int all;

  // By the first warp of the block; the others may use it after a barrier.
  void count(const EndBits<kRows>& ends) {
    constexpr int kEach = kWords / device::kWarpSize;
    const int lane = threadIdx.x;
    if (lane >= device::kWarpSize) return;
    int count[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      count[i] = __popc(ends.bits[lane * kEach + i]);
      sum += count[i];
    }
    int ended = sum;
#pragma unroll
    for (int step = 1; step < device::kWarpSize; step *= 2) {
      const int earlier = __shfl_up_sync(device::kAllLanes, ended, step);
      if (lane >= step) ended += earlier;
    }
    if (lane == device::kWarpSize - 1) all = ended;
    ended -= sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      before[lane * kEach + i] = static_cast<uint16_t>(ended);
      ended += count[i];
    }
  }
};

// Which rows are the last ones of segments, and of which.
template <int kRows>
struct Ends : EndBits<kRows> {
  static_assert(kRows < 65535);
  uint16_t segment[kRows];  // after `first` of the tile; where the bit is set

  template <class OnEmpty>
  void mark(const Segments& segments, const Tile& tile, const OnEmpty& on_empty) {
    EndBits<kRows>::mark(
        segments, tile, [](int64_t) { return 0; },
        [&](int64_t j, int row, int) { segment[row] = static_cast<uint16_t>(j - tile.first); },
        on_empty);
  }
  // The segment of the rows up to this last one, or to the end of the tile, in the list.
  int64_t segment_to(const Tile& tile, int end_row) const {
    return end_row < kRows ? tile.first + segment[end_row] : tile.stop;
  }
};

// The tile that has this row, of a segment of the list.
inline int64_t tile_of_row(const Params& p, int64_t segment, int64_t row) {
  return (row + segment * p.end_items) / p.tile_items;
}

}  // namespace pullback::segment_cuda

// smxx_map_rows.cuh for x of one column, contiguous (smxx_chunks.cuh). What a segment gives is laid
// into shared memory at its first row, with a bit for it; each lane goes along its rows of a chunk
// and takes up what it meets. Where no segment begins, all rows of a chunk get the same.
#pragma once

#include "ops/segment/cuda/smxx_chunks.cuh"
#include "ops/segment/cuda/smxx_maps.cuh"

namespace pullback::segment_cuda {

// A lane's bytes of the mask for consecutive rows.
template <int kLaneRows>
struct MaskChunk {
  static constexpr int kPieces = kLaneRows / 16;
  Values<uint8_t, 16> piece[kPieces];

  void load(const uint8_t* from, int rows) {
    const int row = static_cast<int>(threadIdx.x % device::kWarpSize) * kLaneRows;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const uint8_t* const at = from + row + k * 16;
      if (row + (k + 1) * 16 <= rows) {
        piece[k] = load_once<uint8_t, 16>(at);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) piece[k].element[i] = row + k * 16 + i < rows ? at[i] : 0;
    }
  }
  uint8_t operator[](int i) const { return piece[i / 16].element[i % 16]; }
};

template <class Map, class T>
void map_chunks(const Params& p) {
  using Raw = typename Map::Raw;
  using Segment = typename Map::Segment;
  using Row = typename Map::Row;
  constexpr bool kReadsX = requires(Row row) { row.x; };
  constexpr bool kReadsY = requires(Row row) { row.y; };
  constexpr bool kReadsMask = requires(Row row) { row.bits; };
  constexpr int kLaneRows = Chunk<T>::kLaneRows, kRows = Chunk<T>::kRows;
  constexpr int kPieceRows = Chunk<T>::kPieceRows, kPieces = Chunk<T>::kPieces;
  using Piece = typename Chunk<T>::Piece;
  // The ends of a chunk, mostly, and as registers allow.
  constexpr int kAhead = kReadsX ? 3 : sizeof(T) == 2 && !kReadsMask && sizeof(Raw) <= 8 ? 5 : 4;
  using Steps = ChunkWalk<kRows, kAhead>;
  constexpr int kSegmentPitch = kLaneRows + 1;  // keeps lanes in different banks
  struct Shared {
    union {
      typename Chunk<T>::Shared rows;
      Segment segments[device::kWarpSize * kSegmentPitch];
    };
    uint32_t begins[device::kWarpSize];  // a bit for each of a lane's rows
  };
  __shared__ __align__(16) unsigned char memory[kStreamWarps * sizeof(Shared)];

  Segments segments = begin_map(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared = reinterpret_cast<Shared*>(memory)[warp];
  // The shares of a block, and whether there was disorder.
  const auto go_through = [&](int64_t block) {
    Steps steps(p, segments, block);
    const T* const x = static_cast<const T*>(p.x.data) + steps.base;
    const T* const y = static_cast<const T*>(p.y.data) + steps.base;
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data) + steps.base;
    T* const d_x = static_cast<T*>(p.d_x.data) + steps.base;
    // Rows below and from there on are in no segment.
    const int lowest = steps.counted(segments.begin(1));
    const int highest = steps.counted(segments.end(segments.count));
    Tile tile{};
    tile.origin = steps.base;

    Chunk<T> x_ahead, y_ahead;
    MaskChunk<kLaneRows> mask_ahead;
    const auto read_ahead = [&](int at) {
      const int rows = steps.rows - at, from = at + Chunk<T>::row_of(0);
      if constexpr (kReadsX) x_ahead.load(x + from, rows);
      if constexpr (kReadsY) y_ahead.load(y + from, rows);
      if constexpr (kReadsMask) mask_ahead.load(mask + at, rows);
    };
    const auto load = [&](Raw& raw, int number) {
      const int64_t j = steps.first + number;
      raw = {};
      if (number <= steps.stop && j >= 1 && j <= p.segments) raw.load(p, segments, j, 0);
    };
    Raw raw_ahead[kAhead];
    const auto read_segments_ahead = [&](int number) {
      steps.read_ahead(number);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        load(raw_ahead[i], number + i * device::kWarpSize + lane);
      }
    };

    read_ahead(0);
    read_segments_ahead(0);
    shared.begins[lane] = 0;
    Segment current{};  // of the rows at the end of the chunk before
    for (int at = 0;; at += kRows) {
      const int low = at > steps.row ? at : steps.row;
      const int high = at + kRows < steps.row_stop ? at + kRows : steps.row_stop;
      Chunk<T> rows = x_ahead, rows_y = y_ahead;
      const MaskChunk<kLaneRows> bits = mask_ahead;
      if (high < steps.row_stop) read_ahead(at + kRows);
      const bool full = low == at && high == at + kRows;
      const bool inside = low >= lowest && high <= highest;
      const auto value = [&](const Segment& segment, int i, int row) {
        Row of;
        if constexpr (kReadsX) of.x.element[0] = rows.stored(i);
        if constexpr (kReadsY) of.y.element[0] = rows_y.stored(i);
        if constexpr (kReadsMask) of.bits = bits[i];
        return Map::values(segment, of, {static_cast<uint32_t>(row), steps.base + row}).element[0];
      };
      union Result {
        T element[kPieceRows];
        Piece piece;
        Result() {}
      };
      const bool begins_here = steps.reached >= low || steps.first_end() <= high;
      if (!kReadsMask && full && inside && !begins_here) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          const int row = at + Chunk<T>::row_of(k);
          Result result;
#pragma unroll
          for (int i = 0; i < kPieceRows; ++i) {
            result.element[i] = value(current, k * kPieceRows + i, row + i);
          }
          store_once(d_x + row, result.piece);
        }
        if (high == steps.row_stop) break;
        continue;
      }

      __syncwarp();
      if constexpr (kReadsX) rows.turn(shared.rows);
      __syncwarp();
      if constexpr (kReadsY) rows_y.turn(shared.rows);
      __syncwarp();
      const auto ended = steps.ended(high, [&](int group, int number, int begin, int end) {
        if (begin < low || begin >= high || end <= begin) return;
        Raw raw;
        if (group < kAhead) {
          raw = raw_ahead[group];
        } else {
          load(raw, number);
        }
        const int row = begin - at;
        shared.segments[row + row / kLaneRows] = Map::of(raw, segments, tile);
        atomicOr(&shared.begins[row / kLaneRows], 1u << row % kLaneRows);
      });
      if (ended.count > 0) read_segments_ahead(steps.segment + ended.count);
      __syncwarp();

      const Segment* const here = shared.segments + lane * kSegmentPitch;
      const uint32_t begins = shared.begins[lane];
      shared.begins[lane] = 0;
      const Segment mine = begins != 0 ? here[31 - __clz(static_cast<int>(begins))] : current;
      const uint32_t starters = __ballot_sync(device::kAllLanes, begins != 0);
      const uint32_t before = starters & ((1u << lane) - 1);
      Segment segment = shuffle(mine, before != 0 ? 31 - __clz(static_cast<int>(before)) : lane);
      if (before == 0) segment = current;
      if (starters != 0) current = shuffle(mine, 31 - __clz(static_cast<int>(starters)));
      const int place = at + lane * kLaneRows;
      Result results[kPieces];
      const auto walk = [&](bool all_inside) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          if (begins >> i & 1) segment = here[i];
          T result = value(segment, i, place + i);
          if (!all_inside && (place + i < lowest || place + i >= highest)) result = T{};
          results[i / kPieceRows].element[i % kPieceRows] = result;
        }
      };
      if (inside) {
        walk(true);
      } else {
        walk(false);
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        shared.rows[lane * Chunk<T>::kLanePitch + k] = results[k].piece;
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int row = at + Chunk<T>::row_of(k);
        Result result;
        result.piece = shared.rows[Chunk<T>::turned(k)];
        if (row >= low && row + kPieceRows <= high) {
          store_once(d_x + row, result.piece);
          continue;
        }
#pragma unroll
        for (int i = 0; i < kPieceRows; ++i) {
          if (row + i >= low && row + i < high) d_x[row + i] = result.element[i];
        }
      }
      steps.next(ended);
      if (high == steps.row_stop) break;
    }
    return steps.disorder();
  };
  // First its own shares; if it has to repeat, all blocks' in turn.
  for (int repeated = -1;;) {
    const bool bad = go_through(repeated < 0 ? blockIdx.x : repeated);
    if (repeated < 0 && !has_to_repeat(p, bad, segments)) return;
    if (++repeated == static_cast<int>(gridDim.x)) return;
  }
}

}  // namespace pullback::segment_cuda

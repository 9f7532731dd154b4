// One pass over rows of several columns: each gets a value from its segment (smxx_maps.cuh). Lanes
// are those of smxx_reduce_rows.cuh; a group of them has up to kWalkerRows rows, a few times. What
// a segment gives is read once for each run of its rows in a group of lanes, early enough that
// several reads are in flight.
#pragma once

#include "device/bulk.cuh"
#include "ops/segment/cuda/smxx_maps.cuh"

namespace pullback::segment_cuda {

// Whether the bytes of the mask that a tile has are copied to shared memory first: rows would wait
// for them, byte by byte.
template <class Map, class T, int kVector>
inline constexpr bool kStagesMask =
    kVector * sizeof(T) == 16 && requires(typename Map::Row row) { row.bits; };
template <bool kStages, int kVector>
struct MaskMemory {
  // Tiles of rows in 16-byte pieces have no more; with what lies in the same 16 bytes.
  static constexpr int kBytes = kStages ? kWalkerRows * kThreads / 8 * kVector : 0;
  alignas(16) uint8_t bytes[kStages ? kBytes + 32 : 1];
};
struct StagedMask {
  const uint8_t* first;  // of the tile's origin
  int row_bytes;

  uint32_t bits(int row, int column) const {
    return first[row * row_bytes + column / 8] >> (column % 8);
  }
};
// By all threads, which may read it after async_wait and a barrier: of some columns from a multiple
// of eight on.
template <int kVector>
StagedMask stage_mask(const Params& p, const Tile& tile, int64_t first_column, int columns,
                      MaskMemory<true, kVector>& memory) {
  constexpr int kPiece = 16;
  const int64_t all = (p.columns + 7) / 8, first_byte = first_column / 8;
  const int most = (columns + 7) / 8;
  const int row_bytes = all - first_byte < most ? static_cast<int>(all - first_byte) : most;
  const int rows = static_cast<int>(
      clamped(tile.row_stop - tile.origin, 0, MaskMemory<true, kVector>::kBytes / row_bytes));
  const auto* mask = static_cast<const uint8_t*>(p.mask.data) + first_byte * p.mask.column_stride;
  if (p.mask.row_stride == row_bytes && (row_bytes == 1 || p.mask.column_stride == 1) &&
      reinterpret_cast<uint64_t>(mask) % kPiece == 0) {
    const int64_t begin = tile.origin * row_bytes, from = begin & -kPiece;
    const int64_t left = p.rows * row_bytes - from;
    const int skew = static_cast<int>(begin - from), count = skew + rows * row_bytes;
    const uint32_t to = shared_address(memory.bytes);
    for (int at = static_cast<int>(threadIdx.x) * kPiece; at < count; at += kThreads * kPiece) {
      if (left - at >= kPiece) {
        async_copy<kPiece>(to + at, mask + from + at);
      } else {
        device::async_copy_padded(to + at, mask + from + at, static_cast<int>(left - at));
      }
    }
    async_commit();
    return {memory.bytes + skew, row_bytes};
  }
  for (int at = threadIdx.x; at < rows * row_bytes; at += kThreads) {
    const int row = at / row_bytes, byte = at - row * row_bytes;
    memory.bytes[at] = mask[(tile.origin + row) * p.mask.row_stride + byte * p.mask.column_stride];
  }
  return {memory.bytes, row_bytes};
}

// Asks for what the segments of a tile have in tensors [S,D] whose rows follow each other, so that
// it is near when runs of rows wait for it. A map loads pieces of kVector columns.
template <int kVector>
struct SegmentPrefetch {
  const Params& p;
  const Tile& tile;
  template <class V>
  void d_out(V&) const {
    ask<V>(p.d_out);
  }
  template <class V>
  void arg(V&) const {
    ask<V>(p.arg);
  }
  template <class V>
  void out(V&) const {
    ask<V>(p.out);
  }
  template <class V>
  void statistic(V&) const {
    ask<V>(p.statistic);
  }
  template <class V>
  void statistic2(V&) const {
    ask<V>(p.statistic2);
  }
  void begin(int64_t&) const {}
  void length(int64_t&) const {}

 private:
  template <class V>
  void ask(const Matrix& of) const {
    if (of.vector == 0 || of.row_stride != p.columns) return;
    constexpr int kAlignment = 16;
    const int64_t row_bytes = p.columns / kVector * static_cast<int>(sizeof(V));
    const int64_t first = clamped(tile.first, 1, p.segments + 1);
    const int64_t stop = clamped(tile.stop + 1, first, p.segments + 1);
    const int64_t all = (stop - first) * row_bytes;
    const int64_t bytes =
        ((all < kPrefetchBytes ? all : kPrefetchBytes) - (kAlignment - 1)) & -kAlignment;
    if (bytes <= 0) return;
    const uint64_t begin =
        reinterpret_cast<uint64_t>(of.data) + Tile::problem_segment(first) * row_bytes;
    device::bulk_prefetch(
        reinterpret_cast<const void*>((begin + kAlignment - 1) & -uint64_t{kAlignment}),
        static_cast<uint32_t>(bytes));
  }
};
template <class Map, int kVector>
void prefetch_segments(const Params& p, const Tile& tile) {
  if (threadIdx.x != 0 || blockIdx.y != 0) return;
  typename Map::Raw raw;
  raw.load(SegmentPrefetch<kVector>{p, tile});
}

// Whether rows go by map_run() where few segments end. What reads more, or less at once, was not
// timed with it.
template <class Map, class T, int kVector>
inline constexpr bool kTakesRuns = kVector * sizeof(T) == 16 && requires(typename Map::Row row) {
  row.x;
} && !requires(typename Map::Row row) { row.y; };
// So many, at most, among the rows of a group of lanes.
inline constexpr int kFewEnds = 4;
// Some rows from `row` on, all of one segment. Lanes wait for what they read of rows, so they ask
// for more at once.
template <class Map, class T, int kVector>
void map_run(const Params& p, const RowInputs& from, const Tile& tile, int64_t row, int count) {
  constexpr int kAtOnce = 4;
  typename Map::Raw raw;
  raw.load(from);
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.row_stride + from.column;
  T* d_x = static_cast<T*>(p.d_x.data) + row * p.d_x.row_stride + from.column;
  typename Map::Segment segment;
  bool made = false;
#pragma unroll 1
  for (; count > 0; count -= kAtOnce) {
    typename Map::Row data[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k < count) data[k].x = load_once<T, kVector>(x + k * p.x.row_stride);
    }
    if (!made) segment = Map::of(raw, tile);
    made = true;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k < count) store_once(d_x + k * p.d_x.row_stride, Map::values(segment, data[k], {}));
    }
    x += kAtOnce * p.x.row_stride;
    d_x += kAtOnce * p.d_x.row_stride;
  }
}

template <class Map, class T, int kVector, bool kPermuted>
void map_rows(const Params& p) {
  constexpr int kBatch = Map::kBatch;  // rows whose reads are in flight together
  constexpr int kRounds = map_rounds(kVector * static_cast<int>(sizeof(T)));
  constexpr bool kShares = kRounds > 1;
  constexpr bool kStages = kStagesMask<Map, T, kVector> && !kPermuted;
  __shared__ Ends<kMostTileRows> ends;
  // Here, where registers would keep them from round to round.
  __shared__ Segments shared_segments;
  __shared__ Tile shared_tile;

  const auto [found_segments, found_tile] = begin_tile(p);
  // Not where but one row of a segment gets something: power laws are slower with it.
  if constexpr (!requires(typename Map::Segment segment) { segment.chosen; }) {
    prefetch_segments<Map, kVector>(p, found_tile);
  }
  if (kShares && threadIdx.x == 0) {  // seen once ends are marked
    shared_segments = found_segments;
    shared_tile = found_tile;
  }
  const Segments& segments = kShares ? shared_segments : found_segments;
  const Tile& tile = kShares ? shared_tile : found_tile;
  const int lanes = 1 << p.lane_bits;
  const int walker = static_cast<int>(threadIdx.x) >> p.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t column = (column_block(p) * lanes + lane) * kVector;
  __shared__ MaskMemory<kStages, kVector> mask_memory;
  StagedMask mask{};
  if constexpr (kStages) {
    mask = stage_mask(p, found_tile, column - lane * kVector, lanes * kVector, mask_memory);
  }
  ends.mark(found_segments, found_tile, [](int64_t) {});
  if constexpr (kStages) {
    async_wait<0>();
    __syncthreads();
  }
  if (column >= p.columns) return;

  // All walkers have as many of the tile's rows, one after the other.
  const auto tile_rows = static_cast<int>(clamped(tile.row_stop - tile.origin, 0, kMostTileRows));
  const int walkers = kThreads >> p.lane_bits, share = (tile_rows + walkers - 1) / walkers;
  const int walkers_of_warp = lanes < device::kWarpSize ? device::kWarpSize >> p.lane_bits : 1;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int left = share - round * kWalkerRows;
    if (left <= 0) return;
    const int row = walker * share + round * kWalkerRows;
    const uint32_t end_bits = ends.from(row);
    const uint32_t own = left >= kWalkerRows ? 0xffffffffu : (1u << left) - 1;
    const uint32_t all = rows_inside<true>(tile, row) & own, inside = rows_inside(tile, row) & own;
    if constexpr (kTakesRuns<Map, T, kVector> && !kPermuted) {
      static_assert(kRounds == 1);
      // The walkers of a warp go the same way.
      int ending = 0;
#pragma unroll 1
      for (int i = walker & -walkers_of_warp, stop = i + walkers_of_warp; i < stop; ++i) {
        ending = max(ending, __popc(ends.from(i * share) & own));
      }
      if (inside == all && ending <= kFewEnds) {
        int at = row;  // where the rows of `all` begin, as tiles of maps are aligned to 1
        const int stop = row + __popc(all);
#pragma unroll 1
        while (at < stop) {
          const int end = ends.next(at);
          const RowInputs inputs{p, segments, ends.segment_to(tile, end), column};
          const int rows = (end < stop ? end + 1 : stop) - at;
          map_run<Map, T, kVector>(p, inputs, tile, tile.origin + at, rows);
          at += rows;
        }
        continue;
      }
    }
    const uint32_t fresh_bits = end_bits << 1 | 1u;  // first rows of runs
    const int after = ends.next(row + kWalkerRows);
    typename Map::Segment segment{};
    // This column of row 0, or where rows follow each other, of the batch's first.
    T* d_x = static_cast<T*>(p.d_x.data) + column * p.d_x.column_stride;
    if (!kPermuted) d_x += (tile.origin + row) * p.d_x.row_stride;
#pragma unroll 1
    for (int base = 0; base < kWalkerRows; base += kBatch) {
      if (all >> base == 0) break;
      typename Map::Raw raw[kBatch];
      typename Map::Row data[kBatch];
      int64_t to[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = row + base + k;
        if (!(all >> (base + k) & 1)) continue;
        to[k] = written_row<kPermuted>(p, tile.origin + at);
        if (!(inside >> (base + k) & 1)) continue;
        if (fresh_bits >> (base + k) & 1) {
          const uint32_t rest = end_bits >> (base + k);
          const int end = rest != 0 ? at + __ffs(static_cast<int>(rest)) - 1 : after;
          raw[k].load(RowInputs{p, segments, ends.segment_to(tile, end), column});
        }
        if constexpr (kStages) {
          data[k].bits = mask.bits(at, lane * kVector);
        } else {
          data[k].load(p, kPermuted && to[k] < 0 ? 0 : to[k], column);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!(all >> (base + k) & 1)) continue;
        Values<T, kVector> values{};
        if (inside >> (base + k) & 1) {
          if (fresh_bits >> (base + k) & 1) segment = Map::of(raw[k], tile);
          values = Map::values(segment, data[k], {static_cast<uint32_t>(row + base + k), to[k]});
        }
        if (kPermuted && to[k] < 0) continue;
        store_once(kPermuted ? d_x + to[k] * p.d_x.row_stride : d_x + k * p.d_x.row_stride, values);
      }
      if (!kPermuted) d_x += kBatch * p.d_x.row_stride;
    }
  }
}

// Where the rows of a tile's first segment begin, in elements. Made once and kept in shared memory:
// in the loop they would cost more than what is read.
struct TileRows {
  int64_t d_out, arg, out, statistic, statistic2;

  void find(const Params& p, const Tile& tile) {
    const int64_t s = Tile::problem_segment(tile.first);
    d_out = s * p.d_out.row_stride;
    arg = s * p.arg.row_stride;
    out = s * p.out.row_stride;
    statistic = s * p.statistic.row_stride;
    statistic2 = s * p.statistic2.row_stride;
  }
};
// What is read of a segment of the tile, from `column` on, where that comes in aligned pieces.
struct TileInputs {
  const Params& p;
  const Segments& segments;
  const Tile& tile;
  const TileRows& first;
  int column;
  uint32_t number;  // of the segment, after the tile's first
  template <class V>
  void d_out(V& values) const {
    read(values, p.d_out, first.d_out);
  }
  template <class V>
  void arg(V& values) const {
    read(values, p.arg, first.arg);
  }
  template <class V>
  void out(V& values) const {
    read(values, p.out, first.out);
  }
  template <class V>
  void statistic(V& values) const {
    read(values, p.statistic, first.statistic);
  }
  template <class V>
  void statistic2(V& values) const {
    read(values, p.statistic2, first.statistic2);
  }
  void begin(int64_t& row) const { row = segments.begin(tile.first + number); }
  void length(int64_t& rows) const { rows = segments.length(tile.first + number); }

 private:
  template <class T, int kCount>
  void read(Values<T, kCount>& values, const Matrix& from, int64_t begin) const {
    const T* at = static_cast<const T*>(from.data) + begin + number * from.row_stride + column;
    values = *reinterpret_cast<const Values<T, kCount>*>(at);
  }
};

// map_rows() for narrow rows, which groups of lanes take side by side, so that a warp reads and
// writes neighbouring memory.
template <class Map, class T, int kVector>
void map_narrow(const Params& p) {
  using Segment = typename Map::Segment;
  constexpr int kBatch = Map::kBatch;
  // Rows at once, where all are of one segment; of 16 bits more, as registers allow.
  constexpr int kAlike = kBatch == 2 && sizeof(T) == 2 ? 3 : kBatch;
  constexpr bool kStages = kStagesMask<Map, T, kVector>;
  using TileEnds = Ends<kMostTileRows>;
  __shared__ TileEnds ends;
  __shared__ EndCounts<kMostTileRows> counts;
  __shared__ TileRows first;

  const auto [segments, tile] = begin_tile(p);
  prefetch_segments<Map, kVector>(p, tile);
  const int walkers = kThreads >> p.lane_bits;
  const int walker = static_cast<int>(threadIdx.x) >> p.lane_bits;
  const int column = kept((threadIdx.x & ((1u << p.lane_bits) - 1)) * kVector);
  __shared__ MaskMemory<kStages, kVector> mask_memory;
  StagedMask mask{};
  if constexpr (kStages) mask = stage_mask(p, tile, 0, static_cast<int>(p.columns), mask_memory);
  ends.mark(segments, tile, [](int64_t) {});
  counts.count(ends);
  if (threadIdx.x == 0) first.find(p, tile);
  if constexpr (kStages) async_wait<0>();
  __syncthreads();
  if (column >= p.columns) return;

  // Where no segment of the tile is empty, it is enough to count those that have ended.
  const bool dense = counts.all == tile.stop - tile.first;
  const auto segment_at = [&](int at) {
    const uint32_t word = static_cast<uint32_t>(at) / 32;
    if (dense) {
      return counts.before[word] +
             static_cast<uint32_t>(__popc(ends.bits[word] & ((1u << (at % 32)) - 1)));
    }
    return static_cast<uint32_t>(ends.segment_to(tile, ends.next(at)) - tile.first);
  };
  const auto counted = [&](int64_t row) {
    return static_cast<int>(clamped(row - tile.origin, 0, kMostTileRows));
  };
  const int stop = counted(tile.row_stop), low = counted(tile.lowest);
  const int high = counted(tile.highest) < stop ? counted(tile.highest) : stop;
  const auto inside = [&](int at) { return at >= low && at < high; };
  const int64_t begin = tile.origin + counted(tile.row) + walker;
  const int64_t step = walkers * p.d_x.row_stride;
  T* d_x = static_cast<T*>(p.d_x.data) + begin * p.d_x.row_stride + column;
  Segment segment{};
  int end = -1;  // last row of this segment
  int row = counted(tile.row) + walker;
  const auto load = [&](typename Map::Row& data, int at) {
    if constexpr (kStages) {
      data.bits = mask.bits(at, column);
    } else {
      data.load(p, tile.origin + at, column);
    }
  };
  const auto value = [&](const Segment& of, const typename Map::Row& data, int at) {
    return Map::values(of, data, {static_cast<uint32_t>(at), tile.origin + at});
  };
#pragma unroll 1
  while (row < stop) {
    const int last_alike = row + (kAlike - 1) * walkers;
    if (last_alike <= end && last_alike < stop) {
      typename Map::Row data[kAlike];
#pragma unroll
      for (int k = 0; k < kAlike; ++k) load(data[k], row + k * walkers);
#pragma unroll
      for (int k = 0; k < kAlike; ++k) {
        store_once(d_x + k * step, value(segment, data[k], row + k * walkers));
      }
      row += kAlike * walkers;
      d_x += kAlike * step;
    } else {
      const int last = row + (kBatch - 1) * walkers;
      typename Map::Row data[kBatch];
      typename Map::Raw raw[kBatch];
      if (low < high) {
        // Those outside read what others do: with a branch each, reads would wait for each other.
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int place = row + k * walkers;
          const int at = place < low ? low : place < high ? place : high - 1;
          raw[k].load(TileInputs{p, segments, tile, first, column, segment_at(at)});
          load(data[k], at);
        }
      }
      end = inside(last) ? ends.next(last) : -1;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = row + k * walkers;
        // Also of rows outside, so that the one before need not be kept while these are read.
        segment = Map::of(raw[k], tile);
        if (at >= stop) continue;
        Values<T, kVector> values{};
        if (inside(at)) values = value(segment, data[k], at);
        store_once(d_x + k * step, values);
      }
      row += kBatch * walkers;
      d_x += kBatch * step;
    }
  }
}

}  // namespace pullback::segment_cuda

// smxx_map_rows.cuh for x of one column, contiguous (smxx_stream.cuh), after a reduction. A lane
// writes what its segment gives its rows into shared memory, whence whole chunks are stored. For
// maps that smxx_map_chunks.cuh would need too many registers for.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"
#include "ops/segment/cuda/smxx_stream.cuh"

namespace pullback::segment_cuda {

template <class Map, class T>
void map_stream(const Params& p) {
  using Segment = typename Map::Segment;
  using Row = typename Map::Row;
  constexpr bool kReadsX = requires(Row row) { row.x; };
  constexpr bool kReadsY = requires(Row row) { row.y; };
  constexpr int kLaneRows = 16 / static_cast<int>(sizeof(T));
  using Ring = RowRing<T, kLaneRows>;  // of x; then of results
  constexpr int kChunkRows = Ring::kChunkRows;
  using Steps = Walk<kChunkRows>;
  __shared__ typename Ring::Shared rings[kStreamWarps];
  __shared__ typename Ring::Shared rings_y[kReadsY ? kStreamWarps : 1];
  __shared__ typename Steps::Shared ends[kStreamWarps];

  const Segments segments = make_segments(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Steps steps(p, segments, ends[warp]);
  Ring ring(rings[warp], static_cast<const T*>(p.x.data) + steps.base, steps.rows);
  Ring ring_y = [&] {
    if constexpr (kReadsY) {
      return Ring(rings_y[warp], static_cast<const T*>(p.y.data) + steps.base, steps.rows);
    } else {
      return ring;
    }
  }();
  T* const d_x = static_cast<T*>(p.d_x.data) + steps.base;
  const auto request = [&](int chunk) {
    if constexpr (kReadsX) ring.request(chunk);
    if constexpr (kReadsY) ring_y.request(chunk);
  };
  const auto value = [&](const Segment& segment, int at) {
    Row row;
    if constexpr (kReadsX) row.x.element[0] = ring.at(at);
    if constexpr (kReadsY) row.y.element[0] = ring_y.at(at);
    return Map::values(segment, row, {static_cast<uint32_t>(at), steps.base + at});
  };

  const int first_row = steps.row;
  int stored = 0;  // chunks
  const auto store = [&](int stop) {
#pragma unroll 1
    for (; stored < stop; ++stored) {
      const int at = stored * kChunkRows + lane * kLaneRows;
      if (at >= first_row && at + kLaneRows <= steps.row_stop) {
        store_once(d_x + at, ring.piece(stored));
        continue;
      }
#pragma unroll 1
      for (int i = at; i < at + kLaneRows; ++i) {
        if (i >= first_row && i < steps.row_stop) d_x[i] = ring.at(i);
      }
    }
  };

  // Rows of one segment, or, where it is none of the problem's, zeros.
  const auto fill = [&](const Segment& segment, bool zero, int begin, int end) {
    if (end - begin <= kStreamWarpRows) {
#pragma unroll 1
      for (int row = begin + lane; row < end; row += device::kWarpSize) {
        ring.at(row) = zero ? T{} : value(segment, row).element[0];
      }
      return;
    }
#pragma unroll 1
    for (int chunk = Ring::chunk_of(begin); chunk * kChunkRows < end; ++chunk) {
      const int at = chunk * kChunkRows + lane * kLaneRows;
      if (at >= begin && at + kLaneRows <= end) {
        Real<T> values[kLaneRows] = {};
        if (!zero) {
          typename Ring::Piece piece;
          typename Ring::Piece piece_y;
          if constexpr (kReadsX) piece = ring.piece(chunk);
          if constexpr (kReadsY) piece_y = ring_y.piece(chunk);
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            Row row;
            if constexpr (kReadsX) row.x.element[0] = piece.stored(i);
            if constexpr (kReadsY) row.y.element[0] = piece_y.stored(i);
            values[i] =
                Map::values(segment, row, {static_cast<uint32_t>(at + i), steps.base + at + i})
                    .real(0);
          }
        }
        ring.piece(chunk) = Ring::Piece::of(values);
        continue;
      }
#pragma unroll 1
      for (int i = at < begin ? begin : at; i < at + kLaneRows && i < end; ++i) {
        ring.at(i) = zero ? T{} : value(segment, i).element[0];
      }
    }
  };

  // What the lanes' segments give, read a group ahead.
  typename Map::Raw raw{}, next_raw{};
  int raw_group = -2;
  const auto inside = [&](int number) {
    const int64_t j = steps.first_group + number;
    return j >= 1 && j <= p.segments;
  };
  const auto read = [&](typename Map::Raw& to, int group) {
    const int number = group * device::kWarpSize + lane;
    if (number <= steps.stop && inside(number)) {
      to.load(RowInputs{p, segments, steps.first_group + number, 0});
    }
  };
  Tile tile{};
  tile.origin = steps.base;

  while (steps.goes_on()) {
    __syncwarp();
    store(Ring::chunk_of(steps.row));
    steps.advance(request);
    if (steps.group() != raw_group) {
      if (raw_group + 1 != steps.group()) read(next_raw, steps.group());
      raw_group = steps.group();
      raw = next_raw;
      read(next_raw, raw_group + 1);
    }
    const Segment segment = Map::of(raw, tile);
    const auto batch = steps.batch();
    if (batch.count == 0) {
      const int owner = steps.segment & (device::kWarpSize - 1);
      fill(exchanged(segment,
                     [&](uint32_t word) { return __shfl_sync(device::kAllLanes, word, owner); }),
           !inside(steps.segment), steps.row, batch.open_stop);
      steps.next(batch);
      continue;
    }
    const bool zero = !inside(batch.number);
    const bool is_long = batch.mine && (zero || batch.end - batch.begin > kStreamMapRows);
    if (batch.mine && !is_long) {
#pragma unroll 1
      for (int row = batch.begin; row < batch.end; ++row) {
        ring.at(row) = value(segment, row).element[0];
      }
    }
    for (uint32_t longs = __ballot_sync(device::kAllLanes, is_long); longs != 0;
         longs &= longs - 1) {
      const int owner = __ffs(static_cast<int>(longs)) - 1;
      const auto broadcast = [&](auto word) { return __shfl_sync(device::kAllLanes, word, owner); };
      fill(exchanged(segment, broadcast), broadcast(static_cast<int>(zero)) != 0,
           broadcast(batch.begin), broadcast(batch.end));
    }
    steps.next(batch);
  }
  __syncwarp();
  store((steps.row_stop + kChunkRows - 1) / kChunkRows);
}

}  // namespace pullback::segment_cuda

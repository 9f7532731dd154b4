// smxx_map_rows.cuh for x of one column, contiguous (smxx_stream.cuh). The first rows of segments
// are marked, and what the segment gives is laid beside them in shared memory, by a thread for each
// segment, so that it is read side by side. A lane then serves 16 bytes of rows at a time.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"
#include "ops/segment/cuda/smxx_stream.cuh"

namespace pullback::segment_cuda {

// What a map reads of kCount rows from `row` on, the first of them on 16 bytes.
template <class Row, class T, int kCount>
void load_rows(const Params& p, int64_t row, Row (&data)[kCount]) {
  if constexpr (requires { data[0].x; }) {
    const auto x = device::load_vector(static_cast<const T*>(p.x.data) + row);
#pragma unroll
    for (int i = 0; i < kCount; ++i) data[i].x.element[0] = x.element[i];
    if constexpr (requires { data[0].y; }) {
      const auto y = device::load_vector(static_cast<const T*>(p.y.data) + row);
#pragma unroll
      for (int i = 0; i < kCount; ++i) data[i].y.element[0] = y.element[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) data[i].load(p, row + i, 0);
  }
}

template <class Map, class T, int kSegmentBytes>
void map_stream(const Params& p) {
  using Segment = typename Map::Segment;
  static_assert(sizeof(Segment) == kSegmentBytes);
  constexpr int kLaneRows = 16 / sizeof(T);
  constexpr int kRows = kStreamRows;
  constexpr int kTurns = kRows / (kLaneRows * kStreamThreads);
  using Steps = Walk<kRows>;
  struct Shared {
    typename Steps::Shared steps;
    Segment at_begin[kRows];  // where the bit is set
  };
  static_assert(sizeof(Shared) <= stream_map_bytes(kSegmentBytes));
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x;

  Segments segments;
  if (!begin_stream(p, segments)) return;
  Steps steps(p, segments, shared.steps, kStreamChunkRows);
  typename Steps::EndRing ends = steps.end_ring(segments);
  start_rings(ends);
  Tile tile{};
  tile.origin = steps.base;

  while (steps.goes_on()) {
    steps.template begin_piece<kLaneRows>();
    const int low = steps.row - steps.origin, lowest = steps.counted(steps.lowest);
    // Of these rows, counted from origin, all have a segment.
    const int inner = low > lowest ? low : lowest, highest = steps.counted(steps.highest);
    const auto own_rows = [&](int turn) { return (turn * kStreamThreads + thread) * kLaneRows; };
    typename Map::Row data[kTurns][kLaneRows];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int own = own_rows(turn);
      if (own >= inner && own + kLaneRows <= highest &&
          own + kLaneRows <= steps.window - steps.origin) {
        load_rows<typename Map::Row, T>(p, steps.origin_row + own, data[turn]);
      }
    }
    wait_for_copies();
    steps.mark(
        ends,
        [&](int number, int begin, int end, bool) {
          const int from = begin > low ? begin : low;
          const bool here = (number <= steps.limit) & ((number == steps.limit) | (end > from));
          return here ? from : -1;
        },
        [&](int number, bool marked) {
          typename Map::Raw raw;
          const int64_t j = steps.first + number;
          if (marked && j >= 1 && j <= p.segments) raw.load(p, segments, j, 0);
          return raw;
        },
        [&](int row, const typename Map::Raw& raw) {
          shared.at_begin[row] = Map::of(raw, segments, tile);
        });
    __syncthreads();
    const auto words = steps.words_with_marks();
    const int stop = highest < steps.window - steps.origin ? highest : steps.window - steps.origin;
    T* d_x = static_cast<T*>(p.d_x.data) + steps.origin_row;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int own = own_rows(turn);
      if (own >= inner && own + kLaneRows <= stop) {
        const uint32_t begins = shared.steps.bits[own / 32] >> (own % 32);
        Segment segment = shared.at_begin[steps.previous(own, words)];
        Real<T> values[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          if (i > 0 && (begins >> i & 1)) segment = shared.at_begin[own + i];
          values[i] = Map::values(segment, data[turn][i],
                                  {static_cast<uint32_t>(steps.origin + own + i),
                                   steps.origin_row + own + i})
                          .real(0);
        }
        store_once(d_x + own, Values<T, kLaneRows>::of(values));
        continue;
      }
#pragma unroll 1
      for (int i = own; i < own + kLaneRows; ++i) {
        if (steps.origin + i < steps.row || steps.origin + i >= steps.window) continue;
        Values<T, 1> value{};
        if (i >= inner && i < stop) {
          typename Map::Row row;
          row.load(p, steps.origin_row + i, 0);
          value = Map::values(shared.at_begin[steps.previous(i, words)], row,
                              {static_cast<uint32_t>(steps.origin + i), steps.origin_row + i});
        }
        d_x[i] = value.element[0];
      }
    }
    __syncthreads();
    steps.clear();
    steps.next_piece();
    refill(ends, steps.oldest_end());
    __syncthreads();
  }
  steps.report();
}

}  // namespace pullback::segment_cuda

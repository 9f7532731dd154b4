// smxx_map_rows.cuh for x of one column, contiguous (smxx_chunks.cuh). What a segment gives is laid
// into shared memory at its first row, which is marked; each lane goes along its rows of a chunk
// and takes up what it meets. Where no segment begins, all rows of a chunk get the same. Where but
// one row of a segment gets something, it is laid there, among zeros, and that is all.
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

// What is read of a segment, where rows of each tensor follow each other. Where it begins, and how
// long it is, the kernel knows.
struct SideBySide {
  const Params& p;
  int64_t s;
  template <class V>
  void d_out(V& values) const {
    values = static_cast<const V*>(p.d_out.data)[s];
  }
  template <class V>
  void arg(V& values) const {
    values = static_cast<const V*>(p.arg.data)[s];
  }
  template <class V>
  void out(V& values) const {
    values = static_cast<const V*>(p.out.data)[s];
  }
  template <class V>
  void statistic(V& values) const {
    values = static_cast<const V*>(p.statistic.data)[s];
  }
  template <class V>
  void statistic2(V& values) const {
    values = static_cast<const V*>(p.statistic2.data)[s];
  }
  void begin(int64_t&) const {}
  void length(int64_t&) const {}
};

// What the map makes, elements of Out, goes to d_x.
template <class Map, class T, class Out = T>
void map_chunks(const Params& p) {
  using Raw = typename Map::Raw;
  using Segment = typename Map::Segment;
  using Row = typename Map::Row;
  constexpr bool kReadsX = requires(Row row) { row.x; };
  constexpr bool kReadsY = requires(Row row) { row.y; };
  constexpr bool kReadsMask = requires(Row row) { row.bits; };
  constexpr bool kOneRow = requires(Segment segment) { segment.chosen; };  // of each segment
  constexpr int kLaneRows = Chunk<T>::kLaneRows, kRows = Chunk<T>::kRows;
  constexpr int kPieceRows = Chunk<T>::kPieceRows, kPieces = Chunk<T>::kPieces;
  using Piece = typename Chunk<T>::Piece;
  using Made = Values<Out, kPieceRows>;
  constexpr int kAhead = map_ahead(sizeof(T), kReadsMask);
  constexpr int kGroups = kAhead + kMapMore;
  using Steps = ChunkWalk<kAhead, kMapMore>;
  // What is laid lies as rows do where it is as large; else so that lanes are in different banks.
  // Two lanes more have room for what lanes lay elsewhere.
  using Laid = Select<kOneRow, T, Segment>;
  constexpr bool kLikeRows = sizeof(Laid) == sizeof(T);
  constexpr int kPitch = kLaneRows + (kLikeRows ? kPieceRows : 1);
  // As many chunks of x on their way as fit.
  constexpr int kSlots = sizeof(T) == 2 ? 1 : 2;
  using Ring = ChunkRing<T, kSlots>;
  struct Shared {
    Select<kReadsX, typename Ring::Shared, Piece> x;
    Select<kReadsY, typename Ring::Shared, Piece> y;
    union {
      typename Chunk<T>::Shared rows;
      Made made[device::kWarpSize * Chunk<T>::kLanePitch];
      Laid laid[(device::kWarpSize + 2) * kPitch];
    };
    ChunkMarks<T> begins;  // the first rows of segments
    uint8_t elsewhere[device::kWarpSize];
  };
  __shared__ __align__(kRingAlignment) unsigned char memory[kStreamWarps * sizeof(Shared)];

  Segments segments = begin_map(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared = reinterpret_cast<Shared*>(memory)[warp];
  const auto follow = [](const Matrix& of) { return of.data == nullptr || of.row_stride == 1; };
  const bool side_by_side = follow(p.d_out) && follow(p.arg) && follow(p.out) &&
                            follow(p.statistic) && follow(p.statistic2);
  // The shares of a block, and whether there was disorder.
  const auto go_through = [&](int64_t block) {
    Steps steps(p, segments, block, kRows);
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data) + steps.base;
    Out* const d_x = static_cast<Out*>(p.d_x.data) + steps.base;
    Out* const to = d_x + Chunk<T>::row_of(0);
    // Rows below and from there on are in no segment.
    const int lowest = steps.counted(segments.begin(1));
    const int highest = steps.counted(segments.end(segments.count));
    Tile tile{};
    tile.origin = steps.base;

    Ring ring(reinterpret_cast<typename Ring::Shared&>(shared.x),
              static_cast<const T*>(p.x.data) + steps.base, steps.rows);
    Ring ring_y(reinterpret_cast<typename Ring::Shared&>(shared.y),
                static_cast<const T*>(p.y.data) + steps.base, steps.rows);
    const auto request = [&](bool any) {
      if constexpr (kReadsY) ring_y.ask(any);
      if constexpr (kReadsX) ring.request(any);
    };
    const auto take = [&]<bool kTurned>(Chunk<T>& rows, Chunk<T>& rows_y) {
      if constexpr (kReadsX) ring.template take<kTurned>(rows);
      if constexpr (kReadsY) ring_y.template take<kTurned>(rows_y);
    };
    MaskChunk<kLaneRows> mask_ahead;
    const auto read_mask = [&](int at) {
      if constexpr (kReadsMask) mask_ahead.load(mask + at, steps.rows - at);
    };
    const auto load = [&](Raw& raw, int number) {
      raw = {};
      // Kept, or what strides come to would take registers all the time.
      const int64_t j = kept(steps.first + number);
      if (steps.in_problem(number)) raw.load(RowInputs{p, segments, j, 0});
    };
    Raw raws[kGroups];
    const auto read_segments_ahead = [&](int number) {
      const bool all =
          number >= steps.lowest && number + kAhead * device::kWarpSize <= steps.highest;
      number += lane;
      if (all && side_by_side) {
        const int64_t s = Tile::problem_segment(steps.first + number);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) raws[i].load(SideBySide{p, s + i * device::kWarpSize});
      } else {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(raws[i], number + i * device::kWarpSize);
      }
    };
    const auto segment_of = [&](int group, int number, int begin, int end) {
      Raw raw = raws[group];
      // The first and the last of the share may have rows in others.
      const int64_t j = steps.first + number;
      if constexpr (requires { raw.begin; }) {
        const bool known = number > 0 || !steps.starts_inside || !steps.in_problem(number);
        raw.begin = known ? steps.base + begin : segments.begin(j);
      }
      if constexpr (requires { raw.length; }) {
        const bool known = (number > 0 && number < steps.stop) || !steps.in_problem(number);
        raw.length = known ? end - begin : segments.length(j);
      }
      return Map::of(raw, tile);
    };

#pragma unroll
    for (int i = 0; i < kSlots; ++i) request(i * kRows < steps.row_stop);
    read_mask(0);
    read_segments_ahead(0);
    shared.begins.take();
    const auto clear_rows = [&] {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) shared.made[Chunk<T>::turned(k)] = {};
    };
    if constexpr (kOneRow) clear_rows();
    Segment current{};  // of the rows at the end of the chunk before
    for (int at = 0;; at += kRows) {
      const int low = at > steps.row ? at : steps.row;
      const int high = at + kRows < steps.row_stop ? at + kRows : steps.row_stop;
      Chunk<T> rows, rows_y;
      const MaskChunk<kLaneRows> bits = mask_ahead;
      if (high < steps.row_stop) read_mask(at + kRows);
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
        Out element[kPieceRows];
        Made made;
        Result() {}
      };
      bool alike = full && steps.first_end() > high;  // are all rows of one segment
      if constexpr (kOneRow) {
        const Segment next = segment_of(0, steps.window + lane, steps.reached, high);
        const uint32_t place =
            __shfl_sync(device::kAllLanes, next.chosen[0], steps.segment - steps.window);
        alike &= place - static_cast<uint32_t>(at) >= kRows;
      } else {
        alike &= !kReadsMask && inside && steps.reached < low;
      }
      if (alike) {
        take.template operator()<false>(rows, rows_y);
        request(at + kSlots * kRows < steps.row_stop);
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          Result result;
#pragma unroll
          for (int i = 0; i < kPieceRows; ++i) {
            const int row = at + Chunk<T>::row_of(k) + i;
            result.element[i] = kOneRow ? Out{} : value(current, k * kPieceRows + i, row);
          }
          store_once(to + at + k * Ring::kStep, result.made);
        }
        if (high == steps.row_stop) break;
        continue;
      }

      __syncwarp();
      take.template operator()<true>(rows, rows_y);
      request(at + kSlots * kRows < steps.row_stop);
      const auto fetch = [&](int group, int number) { load(raws[group], number); };
      // Without branches: each lane has a row behind the chunk for what is not in it.
      const auto lay = [&](int group, int number, int begin, int end) {
        const Segment segment = segment_of(group, number, begin, end);
        const uint32_t elsewhere = kRows + lane;
        if constexpr (kOneRow) {
          const int place = static_cast<int>(segment.chosen[0]);
          uint32_t row = place - at;
          const bool here = (row < kRows) & (place >= begin) & (place < end);
          row = here ? row : elsewhere;
          shared.laid[row + row / kLaneRows * (kPitch - kLaneRows)] = segment.g.element[0];
        } else {
          uint32_t row = begin - at;
          const bool here = (row < static_cast<uint32_t>(high - at)) & (end > begin);
          row = here ? row : elsewhere;
          shared.laid[row + row / kLaneRows * (kPitch - kLaneRows)] = segment;
          shared.begins.set(row);
        }
      };
      const auto ended = steps.ended(high, fetch, lay);
      if (steps.used_up(ended)) {
        steps.read_ahead(steps.segment + ended.count, ended.reached);
        read_segments_ahead(steps.segment + ended.count);
      }
      __syncwarp();

      if constexpr (!kOneRow) {
        const Segment* const here = shared.laid + lane * kPitch;
        const LaneMarks begins = shared.begins.take();
        const Segment mine = begins.any() ? here[begins.last()] : current;
        const uint32_t starters = __ballot_sync(device::kAllLanes, begins.any());
        const uint32_t before = starters & ((1u << lane) - 1);
        Segment segment = shuffle(mine, before != 0 ? 31 - __clz(static_cast<int>(before)) : lane);
        if (before == 0) segment = current;
        if (starters != 0) current = shuffle(mine, 31 - __clz(static_cast<int>(starters)));
        union Own {
          Piece piece[kPieces];
          Segment segment[kLaneRows];
          Own() {}
        } own;
        if constexpr (kLikeRows) {
#pragma unroll
          for (int k = 0; k < kPieces; ++k) {
            own.piece[k] = shared.rows[lane * Chunk<T>::kLanePitch + k];
          }
        }
        const int place = at + lane * kLaneRows;
        Result results[kPieces];
        const auto walk = [&](bool all_inside) {
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            if (begins.at(i)) segment = kLikeRows ? own.segment[i] : here[i];
            Out result = value(segment, i, place + i);
            if (!all_inside && (place + i < lowest || place + i >= highest)) result = Out{};
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
          shared.made[lane * Chunk<T>::kLanePitch + k] = results[k].made;
        }
        __syncwarp();
      }
      if (full) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          store_once(to + at + k * Ring::kStep, shared.made[Chunk<T>::turned(k)]);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < kPieces; ++k) {
          const int row = at + Chunk<T>::row_of(k);
          const Made made = shared.made[Chunk<T>::turned(k)];
          if (row >= low && row + kPieceRows <= high) {
            store_once(d_x + row, made);
            continue;
          }
#pragma unroll 1
          for (int i = row > low ? row : low; i < row + kPieceRows && i < high; ++i) {
            const int of = i - at;
            d_x[i] = reinterpret_cast<const Out*>(shared.made)[of + of / kLaneRows * kPieceRows];
          }
        }
        __syncwarp();
      }
      if constexpr (kOneRow) clear_rows();
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

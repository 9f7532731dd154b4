// Forward for rows of several columns: tiles of rows, whose pieces of segments are reduced without
// a word between lanes.
//
// A group of lanes walks 32 consecutive rows of its tile; each lane owns kVector columns, and its
// pieces of the next rows are on their way to its own ring in shared memory. What ends inside is
// stored at once, except the first end, whose segment may have begun before: its head waits for the
// tails of the groups before it. Heads and tails that reach beyond the tile go to the tile's two
// slots, and smxx_combine.cuh puts them together. The order of all additions follows from the
// offsets alone.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// How a lane gets its kVector elements of a row.
template <class T, int kVector, Input kInput, bool kDeep>
struct RowReader {
  static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr int kInputs = kInput == Input::product ? 2 : 1;
  // Elements of 2 bytes and masks cannot be copied asynchronously.
  static constexpr bool kRing = kInput != Input::mask && kBytes >= 4;
  static constexpr int kDepth = kDeep ? 8 / kInputs : 4 / kInputs;  // rows on their way
  using Piece = Values<T, kVector>;
  struct Shared {
    Piece ring[kRing ? kDepth : 1][kInputs][kThreads];
  };

  Shared& shared;
  const Params& p;
  int64_t column;
  const T* x;  // this column of row 0
  const T* y;

  RowReader(Shared& shared_, const Params& p_, int64_t column_)
      : shared(shared_),
        p(p_),
        column(column_),
        x(static_cast<const T*>(p.x.data) + column * p.x.column_stride),
        y(static_cast<const T*>(p.y.data) + column * p.y.column_stride) {}

  void request(int step, int64_t row) {
    if constexpr (kRing) {
      Piece(&slot)[kInputs][kThreads] = shared.ring[step % kDepth];
      copy_async<kBytes>(&slot[0][threadIdx.x], x + row * p.x.row_stride);
      if constexpr (kInputs == 2)
        copy_async<kBytes>(&slot[1][threadIdx.x], y + row * p.y.row_stride);
    }
  }
  void get(int step, int64_t row, Real<T> (&value)[kVector]) const {
    if constexpr (kInput == Input::mask) {
      const auto* mask = static_cast<const uint8_t*>(p.mask.data);
      const int byte = mask[row * p.mask.row_stride + column / 8 * p.mask.column_stride];
      value[0] = static_cast<Real<T>>(byte >> (column % 8) & 1);
    } else {
      Piece a, b;
      if constexpr (kRing) {
        a = shared.ring[step % kDepth][0][threadIdx.x];
        if constexpr (kInputs == 2) b = shared.ring[step % kDepth][1][threadIdx.x];
      } else {
        a = load_once<T, kVector>(x + row * p.x.row_stride);
        if constexpr (kInputs == 2) b = load_once<T, kVector>(y + row * p.y.row_stride);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        value[i] = a.real(i);
        if constexpr (kInputs == 2) value[i] *= b.real(i);
      }
    }
  }
};

template <class Op, class T, class Out, int kVector, Input kInput, bool kPermuted, int kStateBytes>
void reduce_rows(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  // Shared memory also holds two states of each lane.
  using Reader = RowReader<T, kVector, kInput, sizeof(State) * kVector <= 16>;
  constexpr int kMostWalkers = kThreads / kFewestLanes;
  __shared__ Ends<kMostWalkers * kWalkerRows> ends;
  __shared__ bool has_tail[kMostWalkers];
  __shared__ union {
    typename Reader::Shared reader;
    State tails[kThreads][kVector];  // once all rows are read
  } shared;
  __shared__ State heads[kThreads][kVector];

  const Segments segments = make_segments(p);
  const Tile tile = make_tile(p, blockIdx.x);
  const int lanes = 1 << p.lane_bits, walkers = kThreads >> p.lane_bits;
  const int thread = threadIdx.x, walker = thread >> p.lane_bits, lane = thread & (lanes - 1);
  const int64_t first_column = column_block(p) * lanes * kVector;
  const int64_t column = first_column + lane * kVector;
  const bool active = column < p.columns;
  ends.mark(segments, tile, [&](int64_t j) {
    const int64_t stop = first_column + lanes * kVector;
    for (int64_t d = first_column; d < stop && d < p.columns; ++d) finish_empty<Op, Out>(p, j, d);
  });

  // Rows of this walker, as bits: those in a segment of the problem, and those that end one.
  const int row = walker * kWalkerRows;
  const uint32_t inside = rows_inside(tile, row);
  const uint32_t end_bits = ends.bits[walker];
  // An end before the first row is one of rows that are in no segment.
  const bool headless = inside == 0 || (end_bits & (inside - 1) & ~inside) != 0;

  Reader reader(shared.reader, p, column);
  const int first = inside != 0 ? __ffs(static_cast<int>(inside)) - 1 : 0;
  const int count = active ? __popc(inside) : 0;
  const auto place = [&](int step) { return tile.origin + row + first + step; };
  const auto request = [&](int step) {
    if (step < count) reader.request(step, row_of<kPermuted>(p, place(step)));
    if constexpr (Reader::kRing) commit_copies();
  };
#pragma unroll 1
  for (int step = 0; step < Reader::kDepth; ++step) request(step);
  State state[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) state[i] = Op::start();
  bool in_head = !headless, in_piece = false;
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    const int at = row + first + step;
    Real<T> value[kVector];
    if constexpr (Reader::kRing) {
      wait_copies<Reader::kDepth - 1>();
      reader.get(step, 0, value);
    } else {
      reader.get(step, row_of<kPermuted>(p, place(step)), value);
    }
    request(step + Reader::kDepth);
#pragma unroll
    for (int i = 0; i < kVector; ++i) Op::add(state[i], value[i], at);
    in_piece = true;
    if (end_bits >> (first + step) & 1) {
      if (in_head) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) heads[thread][i] = state[i];
      } else {
        finish<Op, Out>(p, segments, tile.first + ends.segment[at], column, state, tile.origin);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[i] = Op::start();
      in_head = in_piece = false;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared.tails[thread][i] = state[i];
  if (lane == 0) has_tail[walker] = in_piece;
  __syncthreads();
  if (!active) return;

  // Tails of the walkers from the last end before `stop` on, up to `stop`. False when none.
  const auto gather = [&](int stop, State(&sum)[kVector]) {
    int from = stop;
    while (from > 0 && ends.bits[from - 1] == 0) --from;
    if (from > 0) --from;
    bool any = false;
    for (; from < stop; ++from) {
      if (!has_tail[from]) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (any) {
          Op::append(sum[i], shared.tails[(from << p.lane_bits) + lane][i]);
        } else {
          sum[i] = shared.tails[(from << p.lane_bits) + lane][i];
        }
      }
      any = true;
    }
    return any;
  };
  const auto store_slot = [&](int which, const State(&sum)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) slot_of<Op>(p, blockIdx.x, which)[column + i] = sum[i];
  };
  State sum[kVector];
  if (end_bits != 0 && !headless) {
    if (gather(walker, sum)) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) Op::append(sum[i], heads[thread][i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = heads[thread][i];
    }
    const int64_t j = tile.first + ends.segment[ends.next(row)];
    if (segments.begin(j) < tile.row) {
      store_slot(0, sum);
    } else {
      finish<Op, Out>(p, segments, j, column, sum, tile.origin);
    }
  }
  if (walker == walkers - 1 && gather(walkers, sum)) store_slot(1, sum);
}

}  // namespace pullback::segment_cuda

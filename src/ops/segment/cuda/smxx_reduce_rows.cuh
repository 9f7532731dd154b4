// Forward for rows of several columns: tiles of rows, whose pieces of segments are reduced without
// a word between lanes.
//
// A group of lanes walks 32 consecutive rows of its tile; each lane owns kVector columns.
// What ends inside is stored at once, except the first end, whose segment may have begun before:
// its head waits for the tails of the groups before it. Heads and tails that reach beyond the tile
// go to the tile's two slots, and smxx_combine.cuh puts them together. The order of all additions
// follows from the offsets alone.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// kVector elements of one row, as they lie in memory.
template <class T, int kVector, Input kInput>
struct RowPiece {
  static constexpr bool kWide = kVector == device::kVectorLength<T>;
  Values<T, kVector> x, y;

  static Values<T, kVector> read(const Matrix& from, int64_t row, int64_t column) {
    const T* at =
        static_cast<const T*>(from.data) + row * from.row_stride + column * from.column_stride;
    Values<T, kVector> values;
    if constexpr (kWide) {
      const device::Vector<T> vector = device::load_vector(at);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values.element[i] = vector.element[i];
    } else {
      static_assert(kVector == 1);
      values.element[0] = *at;
    }
    return values;
  }
  void load(const Params& p, int64_t row, int64_t column) {
    if constexpr (kInput == Input::mask) {
      const auto* mask = static_cast<const uint8_t*>(p.mask.data);
      const int byte =
          mask[row * p.mask.row_stride + column / 8 * p.mask.column_stride] >> (column % 8);
      x.element[0] = device::from_real<T>(static_cast<Real<T>>(byte & 1));
    } else {
      x = read(p.x, row, column);
      if constexpr (kInput == Input::product) y = read(p.y, row, column);
    }
  }
  Real<T> value(int i) const {
    const Real<T> a = device::to_real(x.element[i]);
    if constexpr (kInput == Input::product) return a * device::to_real(y.element[i]);
    return a;
  }
};

template <class Op, class T, class Out, int kVector, Input kInput, bool kPermuted, int kStateBytes>
void reduce_rows(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kMostWalkers = kThreads / kFewestLanes;
  constexpr int kBatch = 8;  // rows whose loads are in flight together
  __shared__ Ends<kMostWalkers * kWalkerRows> ends;
  __shared__ State tails[kThreads][kVector];
  __shared__ bool has_tail[kMostWalkers];

  const Segments segments = make_segments(p);
  const Tile tile = make_tile(p, segments, blockIdx.x);
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

  State state[kVector], head[kVector];
  bool in_head = !headless, in_piece = false;
#pragma unroll
  for (int i = 0; i < kVector; ++i) head[i] = state[i] = Op::start(row);
  uint32_t rest = inside;
#pragma unroll 1
  for (int base = 0; base < kWalkerRows; base += kBatch, rest >>= kBatch) {
    if (rest == 0) break;
    const uint32_t rows = active ? rest : 0, stops = end_bits >> base;
    RowPiece<T, kVector, kInput> piece[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (rows >> k & 1) {
        piece[k].load(p, row_of<kPermuted>(p, tile.origin + row + base + k), column);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!(rest >> k & 1)) continue;
      const int at = row + base + k;
      if (!in_piece) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) state[i] = Op::start(at);
        in_piece = true;
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) Op::add(state[i], piece[k].value(i), at);
      if (stops >> k & 1) {
        if (in_head) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) head[i] = state[i];
        } else if (active) {
          finish<Op, Out>(p, segments, tile.first + ends.segment[at], column, state, tile.origin);
        }
        in_head = in_piece = false;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) tails[thread][i] = state[i];
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
          Op::append(sum[i], tails[(from << p.lane_bits) + lane][i]);
        } else {
          sum[i] = tails[(from << p.lane_bits) + lane][i];
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
      for (int i = 0; i < kVector; ++i) Op::append(sum[i], head[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = head[i];
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

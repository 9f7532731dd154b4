// Forward for rows of several columns: tiles of rows, whose pieces of segments are reduced without
// a word between lanes.
//
// A group of lanes walks consecutive rows of its tile, as many as make its share of rows and ends
// the same as the others'; each lane owns kVector columns, and its pieces of the next rows are on
// their way to its own ring in shared memory. What ends inside is
// stored at once, except the first end, whose segment may have begun before: its head waits for the
// tails of the groups before it. Heads and tails that reach beyond the tile go to the tile's two
// slots, and smxx_combine.cuh puts them together. The order of all additions follows from the
// offsets alone.
#pragma once

#include "device/warp_integer.cuh"
#include "ops/segment/cuda/smxx_run.cuh"

namespace pullback::segment_cuda {

// How a lane gets its kVector elements of rows, kBatch rows at a time. Rows are counted from the
// tile's first; batches begin at multiples of kBatch.
template <class T, int kVector, Input kInput, bool kPermuted>
struct RowReader {
  static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr int kInputs = kInput == Input::product ? 2 : 1;
  // Bytes of masks cannot be copied asynchronously, and elements of 2 bytes only with the other
  // half of their word, which is worth it where rows follow each other.
  static constexpr bool kMask = kInput == Input::mask;
  static constexpr bool kHalves = !kMask && kBytes == 2 && !kPermuted;
  static constexpr bool kRing = !kMask && (kBytes >= 4 || kHalves);
  static_assert(!kMask || kVector == 1 || kVector == 8);  // columns of one byte
  static constexpr int kBatch = kBatchRows / kInputs;
  static_assert(kBatch % 2 == 0);
  // Where 16 bytes have the first half of a sector of 32 in memory, but the second one in shared
  // memory, a copy takes as long as two. So the lanes' places take turns by one where that is so,
  // those of odd rows maybe otherwise than those of even ones.
  static constexpr bool kTurns = kRing && kBytes == 16 && kInputs == 1 && !kPermuted;
  using Piece = Values<T, kVector>;
  using Copied = Values<T, kHalves ? 2 : kVector>;
  struct Row {
    Piece piece[kInputs];
    uint32_t bits;
    Real<T> real(int i) const {
      if constexpr (kMask) return static_cast<Real<T>>(bits >> i & 1);
      if constexpr (kInputs == 2) return piece[0].real(i) * piece[1].real(i);
      return piece[0].real(i);
    }
  };

  template <int kCount>
  struct Rows {
    Row rows[kCount];
    Real<T> operator()(int i, int k) const { return rows[k].real(i); }
    // Columns 2 i and 2 i + 1.
    uint32_t pair(int i, int k) const
      requires(kPairs<T, kVector> && kInput == Input::x)
    {
      return rows[k].piece[0].word[i];
    }
  };

  const Params& p;
  int64_t origin, column;
  uint32_t own;          // place of this lane in the ring, of even rows
  int odd = 0;           // where odd ones lie, from there on
  int ring_rows;         // of each input: some batches, one of which is read
  uint32_t arrived = 0;  // place of the batch that is read
  int first, stop;       // rows to read
  int readable;          // rows before this one may be asked for
  // Masks: a byte for each row of the batch that is read, and the bytes of the next.
  uint32_t bits = 0;
  uint8_t next_bits[kMask ? kBatch : 1] = {};
  const T* x;  // this column of row 0, or, where rows follow each other, of the next batch's first
  const T* y;

  RowReader(const void* ring, const Params& p_, int64_t origin_, int64_t column_, int first_,
            int stop_)
      : p(p_),
        origin(origin_),
        column(column_),
        own(kept(shared_address(static_cast<const Copied*>(ring) + threadIdx.x))),
        ring_rows(p.ring_rows / kInputs),
        first(first_),
        stop(stop_),
        x(static_cast<const T*>(p.x.data) + column * p.x.column_stride),
        y(static_cast<const T*>(p.y.data) + column * p.y.column_stride) {
    readable = 0;
    if (first < stop) {
      const int64_t rows = p.rows - origin;
      readable = batch_of(stop + kBatch - 1);
      if (readable > rows) readable = static_cast<int>(rows);
    }
    if constexpr (kHalves) {
      keep_inside(p.x);
      if (kInputs == 2) keep_inside(p.y);
    }
    if constexpr (kRing && !kPermuted) {
      const int64_t row = origin + batch_of(first);
      x += row * p.x.row_stride;
      y += row * p.y.row_stride;
    }
    if constexpr (kTurns) {
      const int lanes = 1 << p.lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
      const auto turned = [&](const T* piece) {
        const auto pieces = static_cast<int>(reinterpret_cast<uint64_t>(piece) / 16);
        return ((lane + ((pieces + lane) & 1)) & (lanes - 1)) * 16;
      };
      const int even = turned(x);
      odd = turned(x + p.x.row_stride) - even;
      own = kept(own + even - lane * 16);
    }
  }

  static int batch_of(int at) { return at & -kBatch; }
  bool has_all(int at) const {
    return at >= first && at + kBatch <= stop && (!kHalves || at + kBatch <= readable);
  }

  // Which half of its word this column of a row is.
  int half_of(const Matrix& of, int64_t row) const {
    const auto data = static_cast<uint32_t>(reinterpret_cast<uint64_t>(of.data) / 2);
    return static_cast<int>((data + static_cast<uint32_t>(column) +
                             static_cast<uint32_t>(row) * static_cast<uint32_t>(of.row_stride)) %
                            2);
  }
  // Where rows follow each other upwards, only the first and the last element can have words that
  // lie in the tensor by half. These are not asked for.
  void keep_inside(const Matrix& of) {
    const bool begins = column == 0 && origin + batch_of(first) == 0 && half_of(of, 0) == 1;
    if (of.row_stride <= 0 || begins) readable = 0;
    const bool ends = column == p.columns - 1 && half_of(of, p.rows - 1) == 0;
    const int64_t last = p.rows - 1 - origin;
    if (ends && readable > last) readable = static_cast<int>(last);
  }

  // The ring's place of row `at`, an address in shared memory. Rows of a batch lie kSlotBytes
  // apart.
  static constexpr uint32_t kPieceBytes = kThreads * sizeof(Copied);
  static constexpr uint32_t kSlotBytes = kInputs * kPieceBytes;
  uint32_t slot(int at) const { return own + (at & (ring_rows - 1)) * kSlotBytes; }

  int turned(int k) const { return kTurns && k % 2 != 0 ? odd : 0; }

  // Asks for the batch from row `at` on: one after the other. It may ask for rows that nobody
  // reads.
  void request(int at) {
    if constexpr (kMask) {
      static_assert(kBatch <= 4);
      bits = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) bits |= static_cast<uint32_t>(next_bits[i]) << 8 * i;
      const auto* mask =
          static_cast<const uint8_t*>(p.mask.data) + column / 8 * p.mask.column_stride;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i >= readable) break;
        next_bits[i] = mask[row_of<kPermuted>(p, origin + at + i) * p.mask.row_stride];
      }
    } else if constexpr (kRing) {
      const uint32_t to = slot(at);
      const auto begin = [](const T* piece) {
        if (!kHalves) return piece;
        return reinterpret_cast<const T*>(reinterpret_cast<uint64_t>(piece) & ~uint64_t{3});
      };
      const auto copy = [&](int i) {
        const int64_t row = kPermuted ? row_of<true>(p, origin + at + i) : i;
        async_copy<sizeof(Copied)>(to + i * kSlotBytes + turned(i),
                                   begin(x + row * p.x.row_stride));
        if constexpr (kInputs == 2) {
          async_copy<sizeof(Copied)>(to + i * kSlotBytes + kPieceBytes,
                                     begin(y + row * p.y.row_stride));
        }
      };
      if (at + kBatch <= readable) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) copy(i);
      } else {
#pragma unroll 1
        for (int i = 0; at + i < readable; ++i) copy(i);
      }
      async_commit();
      if constexpr (!kPermuted) {
        x += kBatch * p.x.row_stride;
        if constexpr (kInputs == 2) y += kBatch * p.y.row_stride;
      }
    }
  }
  // So many batches are on their way while one is read.
  int ahead() const { return kRing ? ring_rows / kBatch - 1 : 1; }
  // Waits for the batch from row `at` on, as many before the last that was asked for.
  void wait(int at) {
    if constexpr (kRing) {
      if (ring_rows == 2 * kBatch) {
        async_wait<1>();
      } else {
        async_wait<kDeepRingRows / kBatchRows - 1>();
      }
    }
    arrived = kept(slot(at));
  }
  Row copied(int at, int k) const {
    Row row;
#pragma unroll
    for (int input = 0; input < kInputs; ++input) {
      const auto piece =
          load_shared<Copied>(arrived + k * kSlotBytes + turned(k) + input * kPieceBytes);
      if constexpr (kHalves) {
        const int half = half_of(input == 0 ? p.x : p.y, origin + at + k);
        row.piece[input].element[0] = piece.stored(half);
      } else {
        row.piece[input] = piece;
      }
    }
    return row;
  }
  // Row `at` + k of the batch from `at` on, which has arrived.
  Rows<1> get(int at, int k) const {
    Row row;
    if constexpr (kHalves) {
      if (at + k < readable) return {copied(at, k)};
      row.piece[0] = load_row<T, 1>(p.x, origin + at + k, column);
      if constexpr (kInputs == 2) row.piece[1] = load_row<T, 1>(p.y, origin + at + k, column);
    } else if constexpr (kRing) {
      row = copied(at, k);
    } else if constexpr (kMask) {
      row.bits = bits >> (8 * k + static_cast<int>(column % 8));
    } else {
      const int64_t n = row_of<kPermuted>(p, origin + at + k);
      row.piece[0] = load_once<T, kVector>(x + n * p.x.row_stride);
      if constexpr (kInputs == 2) row.piece[1] = load_once<T, kVector>(y + n * p.y.row_stride);
    }
    return {row};
  }
  Rows<kBatch> get_all(int at) const {
    Rows<kBatch> batch;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if constexpr (kRing) {
        batch.rows[k] = copied(at, k);
      } else {
        batch.rows[k] = get(at, k).rows[0];
      }
    }
    return batch;
  }
};

// The rows that walkers of a tile begin with: multiples of kWalkerStep, so that all have as much to
// do.
struct WalkerRows {
  using Bits = EndBits<kMostTileRows>;
  EndCounts<kMostTileRows> ends;
  uint16_t first[kMostWalkers + 1];

  // By all threads of the block. The end of a segment counts for end_items of the tile's rows.
  void share_out(const Bits& bits, int rows, int walkers, int end_items) {
    ends.count(bits);
    __syncthreads();
    const int thread = threadIdx.x;
    if (thread < walkers) {
      const int item = (rows + ends.all * end_items) * thread / walkers;
      int word = 0;
      for (int step = Bits::kWords / 2; step > 0; step /= 2) {
        const int next = word + step;
        if (next * 32 + ends.before[next] * end_items <= item) word = next;
      }
      int row = word * 32;
#pragma unroll
      for (int step = kWalkerStep; step < 32; step += kWalkerStep) {
        const int before = ends.before[word] + __popc(bits.bits[word] & ((1u << step) - 1));
        if (word * 32 + step + before * end_items <= item) row = word * 32 + step;
      }
      first[thread] = static_cast<uint16_t>(row > rows ? rows : row);
    }
    if (thread == 0) first[walkers] = static_cast<uint16_t>(rows);
    __syncthreads();
  }
};

template <class Op, class T, class Out, int kVector, Input kInput, bool kPermuted, int kStateBytes>
void reduce_rows(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  using Reader = RowReader<T, kVector, kInput, kPermuted>;
  using Lane = Run<Op, T, kVector>;
  constexpr int kBatch = Reader::kBatch;
  constexpr int kWarps = kThreads / device::kWarpSize;
  struct Shared {
    Lane heads[kThreads];
    Ends<kMostTileRows> ends;
    WalkerRows rows;
    Segments segments;  // here, as rows take all registers
    bool has_end[kWarps];
    // Once all rows are read; until then the ring.
    alignas(kRingAlignment) State tails[kThreads][kVector];
  };
  static_assert(sizeof(Shared) <= reduce_rows_bytes(0, sizeof(State) * kVector, sizeof(Lane), 0));
  extern __shared__ __align__(kRingAlignment) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto& ends = shared.ends;
  auto& heads = shared.heads;
  auto& has_end = shared.has_end;

  const auto [found, tile] = begin_tile(p);
  device::allow_next_kernel();
  if (threadIdx.x == 0) shared.segments = found;  // seen once ends are marked
  const int lanes = 1 << p.lane_bits, walkers = kThreads >> p.lane_bits;
  const int thread = threadIdx.x, walker = thread >> p.lane_bits, lane = thread & (lanes - 1);
  const int64_t first_column = column_block(p) * lanes * kVector;
  const int64_t column = first_column + lane * kVector;
  const bool active = column < p.columns;
  ends.mark(found, tile, [&](int64_t j) {
    const int64_t stop = first_column + lanes * kVector;
#pragma unroll 1
    for (int64_t d = first_column; d < stop && d < p.columns; ++d) finish_empty<Op, Out>(p, j, d);
  });
  const auto tile_rows = static_cast<int>(clamped(tile.row_stop - tile.origin, 0, kMostTileRows));
  shared.rows.share_out(ends, tile_rows, walkers, p.end_items);
  const Segments& segments = shared.segments;
  // Rows of this walker in a segment of the problem, counted from the tile's first.
  const int row = shared.rows.first[walker], row_stop = shared.rows.first[walker + 1];
  const auto within = [&](int64_t place) {
    return static_cast<int>(clamped(place - tile.origin, row, row_stop));
  };
  const int first = within(tile.lowest);
  const int last = within(tile.row_stop < tile.highest ? tile.row_stop : tile.highest);
  // Rows before the first are in no segment, and their end is no segment's.
  const bool headless = last <= first || first > row;
  const int stop = active && last > first ? last : first;

  Reader reader(shared.tails, p, tile.origin, column, first, stop);
  const auto close = [&](const Lane& lane_run, int from, int last, State(&state)[kVector]) {
    lane_run.close(state, from, last, [&](int place) {
      return load_row<T, kVector>(p.x, row_of<kPermuted>(p, tile.origin + place), column);
    });
  };
  TileOutputs<kPermuted, kVector> outputs(p, tile, column);
  const int begin = Reader::batch_of(first);
  const int ahead = reader.ahead() * kBatch;
#pragma unroll 1
  for (int at = 0; at < ahead; at += kBatch) reader.request(begin + at);
  Lane run;
  run.begin(first);
  int run_begin = first;
  bool in_head = !headless;
  // Walkers of a warp go together: a batch at once where none of them has an end in it.
  const int batches = stop > first ? (stop - begin + kBatch - 1) / kBatch : 0;
  const int most_batches = device::warp_max_integer(batches);
#pragma unroll 1
  for (int batch = 0; batch < most_batches; ++batch) {
    const int at = begin + batch * kBatch;
    reader.request(at + ahead);
    reader.wait(at);
    uint32_t end_bits = 0;
    bool whole = true;
    if (at < stop) {
      end_bits = ends.bits[static_cast<uint32_t>(at) / kWalkerRows] >> (at & (kWalkerRows - 1));
      constexpr uint32_t kAll = (1u << kBatch) - 1;
      whole = (end_bits & kAll) == 0 && reader.has_all(at);
    }
    if (__all_sync(device::kAllLanes, whole) != 0) {
      if (at >= stop || run.template add<kBatch>(reader.get_all(at), at)) continue;
    }
    const int count = stop - at < kBatch ? stop - at : kBatch;
    int k = first > at ? first - at : 0;
    uint32_t ends_from = end_bits >> k;
#pragma unroll 1
    for (; k < count; ++k, ends_from >>= 1) {
      run.add_row(reader.get(at, k), at + k);
      if ((ends_from & 1) == 0) continue;
      if (in_head) {
        heads[thread] = run;
      } else {
        State state[kVector];
        close(run, run_begin, at + k, state);
        outputs.template finish<Op, Out>(ends.segment[at + k], run_begin, at + k + 1, state);
      }
      run_begin = at + k + 1;
      run.begin(run_begin);
      in_head = false;
    }
  }
  State state[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) state[i] = Op::start();
  if (stop > first) close(run, run_begin, stop - 1, state);
  const int head_end = ends.next(shared.rows.first[walker]);
  const bool any_end = head_end < shared.rows.first[walker + 1];

  // What the walkers of this warp before this one have left open, and whether it reaches back to an
  // end; `state` becomes the same with this walker's rows.
  const int warp = thread / device::kWarpSize, warp_lane = thread % device::kWarpSize;
  const bool shared_warp = lanes < device::kWarpSize;
  State earlier[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) earlier[i] = Op::start();
  bool complete = false, any_end_in_unit = any_end;
  if (shared_warp) {
    const uint32_t enders = __ballot_sync(device::kAllLanes, any_end);
    const uint32_t enders_here = enders & (0xffffffffu >> (31 - warp_lane));
    const int since = enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0;
    const int since_walker = since >> p.lane_bits << p.lane_bits;
#pragma unroll 1
    for (int step = lanes; step < device::kWarpSize; step *= 2) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        State whole = shuffle_up(state[i], step);
        if (warp_lane - step >= since_walker) {
          Op::append(whole, state[i]);
          state[i] = whole;
        }
      }
    }
    const bool first_in_warp = warp_lane < lanes;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const State before = shuffle_up(state[i], lanes);
      if (!first_in_warp) earlier[i] = before;
    }
    complete = (enders & ((1u << (warp_lane - lane)) - 1)) != 0;
    any_end_in_unit = enders != 0;
  }
  // Warps, or walkers of whole warps, hand on what they leave open through shared memory.
  const int units = shared_warp ? kWarps : walkers, unit = shared_warp ? warp : walker;
  __syncthreads();
  if (!shared_warp || warp_lane + lanes >= device::kWarpSize) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) shared.tails[(unit << p.lane_bits) + lane][i] = state[i];
    if (lane == 0) has_end[unit] = any_end_in_unit;
  }
  __syncthreads();
  if (!active) return;

  // Adds the tails of the units from the last end before `stop` on in front of `sum`.
  const auto gather = [&](int stop, State(&sum)[kVector]) {
    int from = stop;
    while (from > 0 && !has_end[from - 1]) --from;
    if (from > 0) --from;
#pragma unroll 1
    while (--stop >= from) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        State whole = shared.tails[(stop << p.lane_bits) + lane][i];
        Op::append(whole, sum[i]);
        sum[i] = whole;
      }
    }
  };
  const auto store_slot = [&](int which, const State(&sum)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) slot_of<Op>(p, blockIdx.x, which)[column + i] = sum[i];
  };
  if (any_end && !headless) {
    if (!complete) gather(unit, earlier);
    State head[kVector];
    close(heads[thread], first, head_end, head);
#pragma unroll
    for (int i = 0; i < kVector; ++i) Op::append(earlier[i], head[i]);
    const int64_t j = tile.first + ends.segment[head_end];
    if (segments.begin(j) < tile.row) {
      store_slot(0, earlier);
    } else {
      finish<Op, Out, kPermuted>(p, segments, j, column, earlier, tile.origin);
    }
  }
  // The list ends with the rows past the last offset.
  const bool left_open =
      tile.stop <= segments.count + 1 && segments.begin(tile.stop) < tile.row_stop;
  if (walker == walkers - 1 && left_open) {
    State sum[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = Op::start();
    gather(units, sum);
    store_slot(1, sum);
  }
}

}  // namespace pullback::segment_cuda

// Forward for contiguous rows of 2^lane_bits pieces of 16 bytes, by chunks (smxx_piece_chunks.cuh).
// A group of lanes goes along its rows of a chunk with a running state of each column, which it
// leaves in shared memory and, behind the last row of a segment, begins anew; a segmented scan over
// the groups adds what came before. Then the lanes turn to the segments that end, whose
// outputs lie side by side. Where none ends each group keeps states of its own rows, however many
// chunks they fill; they meet in the chunk where the segment ends.
#pragma once

#include "ops/segment/cuda/smxx_packed_outputs.cuh"
#include "ops/segment/cuda/smxx_piece_states.cuh"

namespace pullback::segment_cuda {

template <class Op, class T, class Out, int kKeptBytes>
void reduce_narrow(const Params& p) {
  constexpr int kVector = kPieceColumns<T>, kChunks = narrow_chunks(kKeptBytes);
  using States = PieceStates<Op, T>;
  using State = PieceState<Op, T>;
  using Steps = ChunkWalk<kNarrowAhead, kReduceMore>;
  struct alignas(kNarrowAlignment) Shared {
    // Rows of chunks, then what does not fit into the places of the rows that it is kept for.
    device::Words planes[kChunks - 1 + kKeptBytes / 16][kNarrowPlaneBytes / 16];
    GroupMarks last;            // rows of segments
    int16_t ends[kNarrowEnds];  // last rows of the segments that end, -1 before the chunk
  };
  static_assert(sizeof(typename States::Kept) == kKeptBytes);
  static_assert(kStreamWarps * sizeof(Shared) == narrow_bytes(kKeptBytes));
  extern __shared__ __align__(kNarrowAlignment) unsigned char memory[];
  const Segments segments = begin_reduction(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + kept(static_cast<uint32_t>(warp * sizeof(Shared))));
  const LaneGroup group(p.lane_bits);
  const int chunk_rows = group.rows(), column = group.piece * kVector;
  Steps steps(p, segments, blockIdx.x, chunk_rows);
  const auto* const x =
      static_cast<const Values<T, kVector>*>(p.x.data) + (steps.base << p.lane_bits) + group.piece;
  PieceRing<T, kChunks> ring(shared.planes, group, x - group.piece, steps.rows);
  shared.last.take(group);
  typename States::Form form{group};

#pragma unroll
  for (int i = 0; i < kChunks; ++i) ring.request(i * chunk_rows < steps.row_stop);
  const auto store_slot = [&](int which, const State& state) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      slot_of<Op>(p, steps.share, which)[column + c] = state.column[c];
    }
  };

  // Of the rows of `steps.segment` before the chunk: the same in all groups, or of each group's
  // own.
  State open = State::start();
  bool is_spread = false, in_head = steps.starts_inside;
  for (int at = 0;; at += chunk_rows) {
    const int low = at > steps.row ? at : steps.row;
    const int high = at + chunk_rows < steps.row_stop ? at + chunk_rows : steps.row_stop;
    const bool full = low == at && high == at + chunk_rows, last = high == steps.row_stop;
    PieceRows<T> rows;
    ring.take(rows, group);
    const auto request = [&] { ring.request(at + kChunks * chunk_rows < steps.row_stop); };
    const bool spreads = full && steps.first_end() > high;
    if (spreads && !is_spread) form.renew();
    form.enter(rows, at, group.first_row());

    if (spreads) {
      if (!is_spread) open = form.spread(open, rows);
      is_spread = true;
      form.add_all(open, rows, [&](int i) { return ring.row(group, i); });
      __syncwarp();
      request();
    }
    if (is_spread && (last || !spreads)) {
      open = met<Op>(open, group);
      is_spread = false;
    }
    if (spreads) {
      if (last) break;
      continue;
    }

    const auto mark = [&](int, int number, int, int end) {
      const int row = end - (at + 1), rank = number - steps.segment;
      if (static_cast<uint32_t>(row) < static_cast<uint32_t>(high - at)) shared.last.set(row);
      if (static_cast<uint32_t>(rank) < kNarrowEnds) shared.ends[rank] = static_cast<int16_t>(row);
    };
    const auto ended = steps.ended(
        high, [](int, int) {}, mark);
    // Rows of other shares, or behind x, are kept apart as segments of their own.
    if (low > at) shared.last.set(low - 1 - at);
    if (last && high > at) shared.last.set(high - 1 - at);
    if (steps.used_up(ended)) steps.read_ahead(steps.segment + ended.count, ended.reached);
    __syncwarp();

    const LaneMarks ends = shared.last.take(group);
    const States states({ring.slot(), ring.slots + kChunks * ring.kSlotBytes}, form, rows, x, at,
                        high, ends, open);

    const bool goes_on = ended.reached < high;
    const auto last_row = static_cast<uint32_t>(high - 1 - at);
    bool exact = !goes_on || states.is_exact(last_row);
    const auto store = [&](auto outputs) {
#pragma unroll 1
      for (int i = lane; i < ended.count << p.lane_bits; i += device::kWarpSize) {
        const int rank = i >> p.lane_bits;
        const auto begin = [&] {
          return rank > 0 ? at + 1 + shared.ends[rank - 1] : steps.reached;
        };
        const int end = at + 1 + shared.ends[rank];
        outputs.i = i;
        if (ended.odd && end <= begin()) {
          finish_empty_to<Op, Out, kVector>(p, outputs);
          continue;
        }
        // In bounds whatever the offsets are.
        const uint32_t row = (end - 1 - at) & (chunk_rows - 1);
        const State state = states.state(row, rank == 0);
        exact &= states.is_exact(row);
        finish_to<Op, Out>(
            p, outputs, state.column, steps.base, [&] { return steps.base + begin(); },
            [&] { return end - begin(); });
      }
    };
    const bool plain = !in_head && ended.count <= kNarrowEnds && steps.segment >= steps.lowest &&
                       steps.segment + ended.count <= steps.highest;
    const int64_t first = Tile::problem_segment(steps.first + steps.segment) << p.lane_bits;
    const bool stored = plain && to_packed<Op, Out>(p, first, store);
    State rest = State::start();
    if (stored && __all_sync(device::kAllLanes, exact)) {
      if (goes_on) rest = states.state(last_row, ended.count == 0);
    } else {
      // The groups take the segments that end one by one, and in the last turn what is left.
#pragma unroll 1
      for (int rank = group.number;; rank += group.groups()) {
        const bool is_rest = rank - group.number >= ended.count;
        const int number = steps.segment + rank;
        const int begin = is_rest     ? ended.reached
                          : rank == 0 ? steps.reached
                                      : steps.end_of(number - 1);
        const int end = is_rest ? high : steps.end_of(number);
        const auto row = static_cast<uint32_t>(end - 1 - at);
        const bool here = is_rest || (rank < ended.count && steps.in_problem(number));
        const bool ends_here = here && begin < end && row < static_cast<uint32_t>(chunk_rows);
        const uint32_t inside = row & (chunk_rows - 1);
        exact &= !ends_here || states.is_exact(inside);
        const State state =
            states.exact_state(ends_here, inside, begin, is_rest ? ended.count == 0 : rank == 0);
        if (is_rest) {
          if (ends_here) rest = state;
          break;
        }
        if (here && begin == end) {
          finish_empty<Op, Out, kVector>(p, steps.first + number, column);
        } else if (ends_here && in_head && rank == 0) {
          store_slot(0, state);
        } else if (ends_here) {
          finish<Op, Out, false>(p, segments, steps.first + number, column, state.column,
                                 steps.base);
        }
      }
    }
    if (!__all_sync(device::kAllLanes, exact)) form.renew();
    if (ended.count > 0) in_head = false;
    steps.next(ended);
    open = rest;
    __syncwarp();
    request();
    if (last) break;
  }
  if (group.number == 0) store_slot(1, open);
  if (p.proof == Proof::wanted) {
    const int any = __syncthreads_or(steps.disorder());
    if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  }
}

}  // namespace pullback::segment_cuda

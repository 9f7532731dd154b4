// Forward for x of one column, contiguous, by chunks (smxx_chunks.cuh). A lane goes along its rows
// of a chunk with a running state, which it leaves in shared memory at each row that is the last of
// a segment, to begin anew; a segmented scan over the lanes adds what came before. Then the lanes
// turn to the segments that end, whose outputs lie side by side. Where none ends each lane keeps a
// state over its pieces of the rows, however many chunks they fill; the lanes' states meet in the
// chunk where the segment ends.
#pragma once

#include "ops/segment/cuda/smxx_chunks.cuh"
#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// Adds a piece of rows, all of one segment, from `place` on.
template <class Op, class T, int kRows>
void add_piece(typename Op::State& state, const Values<T, kRows>& piece, int place) {
  using R = Real<T>;
  if constexpr (Op::kPlaces) {
    if (state.place < 0) state = begin_run<Op>(place);
  }
  typename Op::State one[1] = {state};
  if (add_rows<Op, R, kRows>(
          one, [&](int, int k) { return piece.real(k); }, place)) {
    state = one[0];
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) Op::add(state, piece.real(i), place + i);
}

// What a walk along a lane's rows leaves: at here[i] the state of the rows up to the i-th where a
// segment ends there, and the state of those after the last such row.
template <class Op, class T>
struct LaneWalk {
  using State = typename Op::State;
  using R = Real<T>;
  static constexpr int kRows = Chunk<T>::kLaneRows;
  const Chunk<T>& rows;
  State* here;
  int place;       // of the lane's first row
  LaneMarks ends;  // the last rows of segments

  State along() const {
    State state = begin_run<Op>(place);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Op::add(state, rows.real(i), place + i);
      if (ends.at(i)) here[i] = state;
      state = ends.at(i) ? begin_run<Op>(place + i + 1) : state;
    }
    return state;
  }
  // Of an op that aims: every run at its first row. False where a row is far above that, or not
  // finite.
  bool aimed(State& state) const {
    R most = 0;
    state = Op::start();
    Op::aim(state, rows.real(0));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      state.sum += exponential(rows.real(i) - state.shift);
      if (ends.at(i)) {
        most = larger(most, state.sum);
        here[i] = state;
        state = Op::start();
        if (i + 1 < kRows) Op::aim(state, rows.real(i + 1));
      }
    }
    return larger(most, state.sum) <= Op::kMost;
  }
};

// Where the outputs of some segments go, rows of each tensor following each other. Which are wanted
// is known to the compiler: where segments are short, storing costs as much as adding.
enum class Wants { result, mean, result2, arg_i64, arg_i32, arg_u8 };
template <class Out, Wants kWants>
struct PackedOutputs {
  static constexpr bool kPermuted = false;
  const Params& p;
  int64_t first;
  int i = 0;

  static constexpr bool wants_result() { return true; }
  static constexpr bool wants_result2() { return kWants == Wants::result2; }
  static constexpr bool wants_arg() { return kWants >= Wants::arg_i64; }
  static constexpr bool wants_mean() { return kWants == Wants::mean; }
  static constexpr ArgType arg_type() {
    return kWants == Wants::arg_i64   ? ArgType::i64
           : kWants == Wants::arg_i32 ? ArgType::i32
                                      : ArgType::u8;
  }
  template <class V>
  void result(const V& values) const {
    (static_cast<V*>(p.result.data) + first)[i] = values;
  }
  template <class V>
  void result2(const V& values) const {
    (static_cast<V*>(p.result2.data) + first)[i] = values;
  }
  template <class V>
  void arg(const V& values) const {
    (static_cast<V*>(p.arg.data) + first)[i] = values;
  }
};

// Calls store(outputs) for segments of the problem from s on. False where outputs are not as these
// know them.
template <class Op, class Out, class Store>
bool to_packed(const Params& p, int64_t s, const Store& store) {
  const auto packed = [](const Matrix& to) { return to.data != nullptr && to.row_stride == 1; };
  const auto call = [&]<Wants kWants>() {
    store(PackedOutputs<Out, kWants>{p, s});
    return true;
  };
  if (!packed(p.result)) return false;
  if constexpr (kStoresPair<Op>) {
    return packed(p.result2) && call.template operator()<Wants::result>();
  } else if constexpr (Op::kPlaces) {
    if (p.arg.data == nullptr) return call.template operator()<Wants::result>();
    if (!packed(p.arg)) return false;
    if (p.arg_type == ArgType::i64) return call.template operator()<Wants::arg_i64>();
    if (p.arg_type == ArgType::i32) return call.template operator()<Wants::arg_i32>();
    return call.template operator()<Wants::arg_u8>();
  } else if constexpr (kStoresReal<Op, Out>) {
    if (p.result2.data == nullptr) return call.template operator()<Wants::result>();
    return packed(p.result2) && call.template operator()<Wants::result2>();
  } else {
    if (p.mean) return call.template operator()<Wants::mean>();
    return call.template operator()<Wants::result>();
  }
}

template <class Op, class T, class Out, int kStateBytes>
void reduce_chunks(const Params& p) {
  using State = typename Op::State;
  constexpr int kLaneRows = Chunk<T>::kLaneRows, kRows = Chunk<T>::kRows;
  constexpr int kPieceRows = Chunk<T>::kPieceRows, kPieces = Chunk<T>::kPieces;
  constexpr int kAhead = reduce_ahead(sizeof(T));
  using Steps = ChunkWalk<kRows, kAhead, kReduceMore>;
  constexpr int kPitch = kLaneRows + 1;  // keeps lanes in different banks
  struct Shared {
    typename ChunkRing<T, kReduceChunks>::Shared rows;
    State at_end[device::kWarpSize * kPitch];
    ChunkMarks<T> last;          // rows of segments
    uint16_t ends[kReduceEnds];  // last rows of the segments that end
  };
  static_assert(sizeof(State) == kStateBytes);
  static_assert(kStreamWarps * sizeof(Shared) == reduce_chunks_bytes(sizeof(T), kStateBytes));
  extern __shared__ __align__(kRingAlignment) unsigned char memory[];
  const Segments segments = begin_reduction(p);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + kept(static_cast<uint32_t>(warp * sizeof(Shared))));
  Steps steps(p, segments, blockIdx.x);
  ChunkRing<T, kReduceChunks> ring(shared.rows, static_cast<const T*>(p.x.data) + steps.base,
                                   steps.rows);
  shared.last.take();

#pragma unroll
  for (int i = 0; i < kReduceChunks; ++i) ring.request(i * kRows < steps.row_stop);
  // Of the rows of `steps.segment` before the chunk: the same in all lanes, or of each lane's own.
  State open = Op::start();
  bool is_spread = false, in_head = steps.starts_inside;
  for (int at = 0;; at += kRows) {
    const int low = at > steps.row ? at : steps.row;
    const int high = at + kRows < steps.row_stop ? at + kRows : steps.row_stop;
    const bool full = low == at && high == at + kRows, last = high == steps.row_stop;
    Chunk<T> rows;
    ring.take(rows);
    ring.request(at + kReduceChunks * kRows < steps.row_stop);

    if (full && steps.first_end() > high) {
      if (!is_spread) {
        if constexpr (kAims<Op>) {
          // All lanes at one row, so that their states are put together without an exponential.
          if (open.sum == 0) {
            Op::aim(open, __shfl_sync(device::kAllLanes, rows.real(0), 0));
          }
        }
        const State whole = open;
        if (lane != 0) open = Op::start();
        if constexpr (kAims<Op>) open.shift = whole.shift;
        is_spread = true;
      }
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        add_piece<Op, T>(open, rows.piece[k], at + lane * kLaneRows + k * kPieceRows);
      }
      if (last) break;
      continue;
    }

    const auto mark = [&](int, int number, int, int end) {
      const int row = end - (at + 1), rank = number - steps.segment;
      if (static_cast<uint32_t>(row) < static_cast<uint32_t>(high - at)) shared.last.set(row);
      if (static_cast<uint32_t>(rank) < kReduceEnds) shared.ends[rank] = static_cast<uint16_t>(row);
    };
    const auto ended = steps.ended(
        high, [](int, int) {}, mark);
    // Rows of other shares, or behind x, are kept apart as segments of their own.
    if (low > at) shared.last.set(low - 1 - at);
    if (last && high > at) shared.last.set(high - 1 - at);
    if (steps.used_up(ended)) steps.read_ahead(steps.segment + ended.count, ended.reached);
    __syncwarp();

    const LaneWalk<Op, T> walk{rows, shared.at_end + lane * kPitch, at + lane * kLaneRows,
                               shared.last.take()};
    const bool ends_here = walk.ends.any();
    State state;
    if constexpr (kAims<Op>) {
      const bool aimed = walk.aimed(state);
      if (!__all_sync(device::kAllLanes, aimed)) state = walk.along();
    } else {
      state = walk.along();
    }

    // Of the lanes up to this one, those since the last end.
    if (is_spread) open = gathered<Op>(open);
    is_spread = false;
    const uint32_t enders = __ballot_sync(device::kAllLanes, ends_here);
    const uint32_t enders_here = enders & (0xffffffffu >> (31 - lane));
    const int since = enders_here != 0 ? 31 - __clz(static_cast<int>(enders_here)) : 0;
    if (lane == 0 && !ends_here) {
      State whole = open;
      Op::append(whole, state);
      state = whole;
    }
    const int lanes = lane - since;
    const auto join = [&](int step) {
      State whole = shuffle_up(state, step);
      Op::append(whole, state);
      state = lanes >= step ? whole : state;
    };
    if constexpr (kAims<Op>) {
      // As long as there are so many lanes in a row, behind the first, of which none has an end.
      uint32_t run = ~(enders | 1);
#pragma unroll 1
      for (int step = 1; run != 0; run &= run >> step, step *= 2) join(step);
    } else {
#pragma unroll
      for (int step = 1; step < device::kWarpSize; step *= 2) join(step);
    }
    State earlier = shuffle_up(state, 1);
    if (lane == 0) earlier = open;
    if (ends_here) {
      State& first = walk.here[walk.ends.first()];
      Op::append(earlier, first);
      first = earlier;
    }
    open = shuffle(state, device::kWarpSize - 1);
    __syncwarp();
    const auto at_end = [&](uint32_t row) { return shared.at_end[row + row / kLaneRows]; };

    const auto store = [&](auto outputs) {
#pragma unroll 1
      for (int i = lane; i < ended.count; i += device::kWarpSize) {
        const uint32_t row = shared.ends[i] % kRows;  // in bounds whatever the offsets are
        const State state[1] = {at_end(row)};
        const auto begin = [&] { return i > 0 ? at + 1 + shared.ends[i - 1] : steps.reached; };
        outputs.i = i;
        finish_to<Op, Out>(
            p, outputs, state, steps.base, [&] { return steps.base + begin(); },
            [&] { return at + 1 + static_cast<int>(row) - begin(); });
      }
    };
    const bool plain = !ended.odd && !in_head && ended.count <= kReduceEnds &&
                       steps.segment >= steps.lowest &&
                       steps.segment + ended.count <= steps.highest;
    if (!plain ||
        !to_packed<Op, Out>(p, Tile::problem_segment(steps.first + steps.segment), store)) {
      int before = steps.reached;
#pragma unroll 1
      for (int from = 0; from < ended.count; from += device::kWarpSize) {
        const int number = steps.segment + from + lane;
        const int end = steps.read_end(steps.segment + from), begin = steps.begin_of(before, end);
        before = end;
        const auto row = static_cast<uint32_t>(end - 1 - at);
        if (from + lane >= ended.count || !steps.in_problem(number)) continue;
        if (begin == end) {
          finish_empty<Op, Out>(p, steps.first + number, 0);
        } else if (row < kRows) {
          const State state[1] = {at_end(row)};
          if (in_head && number == steps.segment) {
            slot_of<Op>(p, steps.share, 0)[0] = state[0];
          } else {
            finish<Op, Out, false>(p, segments, steps.first + number, 0, state, steps.base);
          }
        }
      }
    }
    if (ended.count > 0) in_head = false;
    steps.next(ended);
    if (last) {
      open = low < high ? at_end(high - 1 - at) : Op::start();
      break;
    }
  }
  if (is_spread) open = gathered<Op>(open);
  if (lane == 0) slot_of<Op>(p, steps.share, 1)[0] = open;
  if (p.proof == Proof::wanted) {
    const int any = __syncthreads_or(steps.disorder());
    if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  }
}

}  // namespace pullback::segment_cuda

// Forward for x of one column, contiguous, by chunks (smxx_chunks.cuh). A lane goes along its rows
// of a chunk with a running state, which it leaves in shared memory at each row that is the last of
// a segment, to begin anew; a segmented scan over the lanes adds what came before. Then the lanes
// turn to the segments that end, whose outputs lie side by side. Where none ends each lane keeps a
// state over its pieces of the rows, however many chunks they fill; the lanes' states meet in the
// chunk where the segment ends.
#pragma once

#include "ops/segment/cuda/smxx_chunks.cuh"
#include "ops/segment/cuda/smxx_combine.cuh"

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

// The chunks of a warp on their way to shared memory. A piece lies with the lane that will have its
// rows, its number there exchanged so that lanes are in different banks.
template <class T>
struct ChunkRing {
  using Rows = Chunk<T>;
  using Piece = typename Rows::Piece;
  static constexpr int kPieces = Rows::kPieces;
  using Shared = Piece[kReduceChunks][device::kWarpSize * kPieces];
  static constexpr uint32_t kSlotBytes = sizeof(Piece) * device::kWarpSize * kPieces;

  const T* next;       // this lane's first piece of the next chunk to ask for
  int rows;            // of the tensor, from there on
  uint32_t to, own;    // in the first slot: of this lane's first piece, on its way and turned
  uint32_t asked = 0;  // slots

  ChunkRing(Shared& shared, const T* from, int rows_) : next(from + Rows::row_of(0)), rows(rows_) {
    const int lane = threadIdx.x % device::kWarpSize;
    const uint32_t base = shared_address(&shared[0][0]);
    to = base + place(lane / kPieces, lane % kPieces) * sizeof(Piece);
    own = base + place(lane, 0) * sizeof(Piece);
  }
  static uint32_t place(int lane, int k) { return lane * kPieces + (k ^ (lane / 2 % kPieces)); }

  // Of one chunk after the other, those of the share.
  void request(bool any) {
    const uint32_t at = to + asked++ % kReduceChunks * kSlotBytes;
    constexpr int kStep = device::kWarpSize * Rows::kPieceRows;
    constexpr uint32_t kStepBytes = kStep * sizeof(T);
    if (any && rows >= Rows::kRows) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) async_copy<16>(at + k * kStepBytes, next + k * kStep);
    } else if (any) {
#pragma unroll 1
      for (int k = 0; k < kPieces; ++k) {
        const int left = (rows - Rows::row_of(k)) * static_cast<int>(sizeof(T));
        device::async_copy_padded(at + k * kStepBytes, next + k * kStep,
                                  left < 0    ? 0
                                  : left < 16 ? left
                                              : 16);
      }
    }
    async_commit();
    next += Rows::kRows;
    rows -= Rows::kRows;
  }
  // This lane's rows of the oldest chunk that has been asked for.
  void take(Rows& result) const {
    async_wait<kReduceChunks - 1>();
    __syncwarp();
    const uint32_t slot = asked % kReduceChunks * kSlotBytes;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      result.piece[k] = load_shared<Piece>((own + slot) ^ k * sizeof(Piece));
    }
    __syncwarp();
  }
};

// What a walk along a lane's rows leaves: at here[i] the state of the rows up to the i-th where a
// segment ends there, and the state of those after the last such row.
template <class Op, class T>
struct LaneWalk {
  using State = typename Op::State;
  using R = Real<T>;
  static constexpr int kRows = Chunk<T>::kLaneRows;
  const Chunk<T>& rows;
  State* here;
  int place;          // of the lane's first row
  uint32_t ends = 0;  // a bit for each row that is the last of a segment, see ends_at()

  // From a byte for each of some rows, to clear them.
  void take_ends(Values<uint32_t, 4>* bytes) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      const Values<uint32_t, 4> words = bytes[k];
      bytes[k] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) ends |= words.element[i] << (4 * k + i);
    }
  }
  // Row i has bit i / 4 of byte i % 4.
  bool ends_at(int i) const { return (ends >> (i % 4 * 8 + i / 4) & 1) != 0; }
  int first_end() const {
    const uint32_t words = ends | ends >> 16, bytes = words | words >> 8;
    const int word = __ffs(static_cast<int>(bytes)) - 1;
    return word * 4 + (__ffs(static_cast<int>(ends >> word & 0x01010101u)) - 1) / 8;
  }

  State along() const {
    State state = begin_run<Op>(place);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Op::add(state, rows.real(i), place + i);
      if (ends_at(i)) here[i] = state;
      state = ends_at(i) ? begin_run<Op>(place + i + 1) : state;
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
      if (ends_at(i)) {
        most = larger(most, state.sum);
        here[i] = state;
        state = Op::start();
        if (i + 1 < kRows) Op::aim(state, rows.real(i + 1));
      }
    }
    return larger(most, state.sum) <= Op::kMost;
  }
};

// Where the outputs of a share go, by the numbers of segments. The host sees to it that steps fit.
template <class Op, class Out>
struct ShareOutputs {
  static constexpr bool kPermuted = false;
  struct Column {
    void* const& data;  // the kernel's parameter: known to be global memory
    int64_t offset;     // of number 0
    int step;
    Column(const Matrix& to, int64_t first, int bytes)
        : data(to.data),
          offset(kept(first * to.row_stride * bytes)),
          step(static_cast<int>(to.row_stride) * bytes) {}
    template <class V>
    void store(int number, const V& value) const {
      const int64_t at = offset + static_cast<int64_t>(number) * step;
      *reinterpret_cast<V*>(static_cast<char*>(data) + at) = value;
    }
  };
  Column result_, result2_, arg_;
  int number = 0;

  ShareOutputs(const Params& p, int64_t first)
      : result_(p.result, first, sizeof(Out)),
        result2_(p.result2, first, sizeof(Real<Out>)),
        arg_(p.arg, first,
             p.arg_type == ArgType::i64   ? 8
             : p.arg_type == ArgType::i32 ? 4
                                          : 1) {}
  template <class V>
  void result(const V& values) const {
    result_.store(number, values);
  }
  template <class V>
  void result2(const V& values) const {
    result2_.store(number, values);
  }
  template <class V>
  void arg(const V& values) const {
    arg_.store(number, values);
  }
};

template <class Op, class T, class Out, int kStateBytes>
void reduce_chunks(const Params& p) {
  using State = typename Op::State;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kLaneRows = Chunk<T>::kLaneRows, kRows = Chunk<T>::kRows;
  constexpr int kPieceRows = Chunk<T>::kPieceRows, kPieces = Chunk<T>::kPieces;
  constexpr int kAhead = reduce_ahead(sizeof(T));
  using Steps = ChunkWalk<kRows, kAhead>;
  using Combining = Combiner<Op, Out, kStreamThreads, 1>;
  constexpr int kPitch = kLaneRows + 1;  // keeps lanes in different banks
  struct Shared {
    typename ChunkRing<T>::Shared rows;
    State at_end[device::kWarpSize * kPitch];
    Values<uint32_t, 4> last[kRows / 16];  // a byte for each row: 1 at the last of a segment
    uint16_t ends[kReduceEnds];            // last rows of the segments that end
  };
  static_assert(kStreamWarps * sizeof(Shared) == reduce_chunks_bytes(sizeof(T), kStateBytes));
  static_assert(sizeof(Combining) <= kStreamWarps * sizeof(Shared));
  extern __shared__ __align__(16) unsigned char memory[];
  Combining& combiner = *reinterpret_cast<Combining*>(memory);

  Segments segments;
  if (!begin_reduction(p, segments)) {
    combiner.combine(p, segments, static_cast<int>(blockIdx.x) * kStreamThreads, 0);
    return;
  }
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + kept(static_cast<uint32_t>(warp * sizeof(Shared))));
  Steps steps(p, segments, blockIdx.x);
  ChunkRing<T> ring(shared.rows, static_cast<const T*>(p.x.data) + steps.base, steps.rows);
  Values<uint32_t, 4>* const lane_ends = shared.last + lane * (kLaneRows / 16);
  ShareOutputs<Op, Out> outputs(p, Tile::problem_segment(steps.first));
  // The numbers of the problem's segments.
  const int lowest = steps.first < 1 ? 1 : 0;
  const int highest = static_cast<int>(clamped(p.segments + 1 - steps.first, 0, 1 << 30));
#pragma unroll
  for (int i = 0; i < kLaneRows / 16; ++i) lane_ends[i] = {};

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

    uint8_t* const is_last = reinterpret_cast<uint8_t*>(shared.last);
    const auto ended = steps.ended(high, [&](int, int number, int, int end) {
      const int row = end - (at + 1), rank = number - steps.segment;
      if (static_cast<uint32_t>(row) < static_cast<uint32_t>(high - at)) is_last[row] = 1;
      if (rank < kReduceEnds) shared.ends[rank] = static_cast<uint16_t>(row);
    });
    // Rows of other shares, or behind x, are kept apart as segments of their own.
    if (low > at) is_last[low - 1 - at] = 1;
    if (last && high > at) is_last[high - 1 - at] = 1;
    steps.read_ahead(steps.segment + ended.count);
    __syncwarp();

    LaneWalk<Op, T> walk{rows, shared.at_end + lane * kPitch, at + lane * kLaneRows};
    walk.take_ends(lane_ends);
    const bool ends_here = walk.ends != 0;
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
      State& first = walk.here[walk.first_end()];
      Op::append(earlier, first);
      first = earlier;
    }
    open = shuffle(state, device::kWarpSize - 1);
    __syncwarp();
    const auto at_end = [&](uint32_t row) { return shared.at_end[row + row / kLaneRows]; };

    if (!ended.odd && !in_head && ended.count <= kReduceEnds && steps.segment >= lowest &&
        steps.segment + ended.count <= highest) {
#pragma unroll 1
      for (int i = lane; i < ended.count; i += device::kWarpSize) {
        const uint32_t row = shared.ends[i] % kRows;  // in bounds whatever the offsets are
        const State state[1] = {at_end(row)};
        const auto begin = [&] { return i > 0 ? at + 1 + shared.ends[i - 1] : steps.reached; };
        outputs.number = steps.segment + i;
        finish_to<Op, Out>(
            p, outputs, state, steps.base, [&] { return steps.base + begin(); },
            [&] { return at + 1 + static_cast<int>(row) - begin(); });
      }
    } else {
      int before = steps.reached;
#pragma unroll 1
      for (int from = 0; from < ended.count; from += device::kWarpSize) {
        const int number = steps.segment + from + lane;
        const int end = steps.read_end(steps.segment + from), begin = steps.begin_of(before, end);
        before = end;
        const auto row = static_cast<uint32_t>(end - 1 - at);
        if (from + lane >= ended.count || number < lowest || number >= highest) continue;
        if (begin == end) {
          finish_empty<Op, Out>(p, steps.first + number, 0);
        } else if (row < kRows) {
          const State state[1] = {at_end(row)};
          if (in_head && number == steps.segment) {
            slot_of<Op>(p, steps.share, 0)[0] = state[0];
          } else {
            finish<Op, Out>(p, segments, steps.first + number, 0, state, steps.base);
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
  if (p.proof != Proof::again || !arrive<false>(p, false).last) return;
  for (int tile = 0; tile < p.tiles; tile += kStreamThreads) {
    combiner.combine(p, segments, tile, 0);
    __syncthreads();
  }
}

}  // namespace pullback::segment_cuda

// Kernels over x of one column, or of narrow rows (smxx_piece_chunks.cuh), contiguous, at the speed
// of memory. The list of rows and segment
// ends (params.cuh) is cut into as many equal shares as the device holds warps; a warp goes through
// its share from front to back, chunk by chunk, and no warp waits for another. While it works on a
// chunk, what it reads of the next one is on its way. A lane has 64 bytes of consecutive rows of a
// chunk, so that the work hardly depends on the lengths of segments.
//
// Offsets are proved on the way, rather than in a pass of their own. Unproven ones can make a warp
// compute nonsense, but neither read nor write out of bounds, and not without end. Where the proof
// fails, the last block of a map to be done repairs the offsets and does all again; of a reduction
// the kernel behind it, which puts together what reaches over several shares.
#pragma once

#include "ops/segment/cuda/smxx_tile.cuh"

namespace pullback::segment_cuda {

// The rows of a chunk: a lane's consecutive ones. They are read and stored piece by piece, 32 lanes
// beside each other, and turned in shared memory.
template <class T>
struct Chunk {
  static constexpr int kPieces = chunk_lane_bytes(sizeof(T)) / 16;
  static constexpr int kPieceRows = 16 / static_cast<int>(sizeof(T));
  static constexpr int kLaneRows = kPieces * kPieceRows;
  static constexpr int kRows = device::kWarpSize * kLaneRows;
  // A lane's pieces, and one more that keeps lanes in different banks.
  static constexpr int kLanePitch = kPieces + 1;
  using Piece = Values<T, kPieceRows>;
  using Shared = Piece[device::kWarpSize * kLanePitch];

  Piece piece[kPieces];

  // Row of a lane's piece, from the chunk's first.
  static int row_of(int k) {
    return (k * device::kWarpSize + threadIdx.x % device::kWarpSize) * kPieceRows;
  }
  static int turned(int k) {
    const int lane = threadIdx.x % device::kWarpSize;
    return k * (device::kWarpSize / kPieces) * kLanePitch + lane + lane / kPieces;
  }
  Real<T> real(int i) const { return piece[i / kPieceRows].real(i % kPieceRows); }
  T stored(int i) const { return piece[i / kPieceRows].stored(i % kPieceRows); }
  // Of 16 bits: rows 2 i and 2 i + 1.
  uint32_t pair(int i) const { return piece[i / (kPieceRows / 2)].word[i % (kPieceRows / 2)]; }
};

// The products of two tensors' rows.
template <class T>
struct Chunk<RowProduct<T>> {
  static constexpr int kPieces = Chunk<T>::kPieces, kPieceRows = Chunk<T>::kPieceRows;
  static constexpr int kLaneRows = Chunk<T>::kLaneRows, kRows = Chunk<T>::kRows;

  Real<T> product[kLaneRows];

  Real<T> real(int i) const { return product[i]; }
};

// The chunks of a warp on their way to shared memory. A piece lies with the lane that will have its
// rows, its number there exchanged so that lanes are in different banks.
template <class T, int kSlots>
struct ChunkRing {
  using Rows = Chunk<T>;
  using Piece = typename Rows::Piece;
  static constexpr int kPieces = Rows::kPieces;
  // A lane's pieces are told by two bits of their address.
  struct alignas(kRingAlignment) Shared {
    Piece piece[kSlots][device::kWarpSize * kPieces];
  };
  static constexpr int kStep = device::kWarpSize * Rows::kPieceRows;
  static constexpr uint32_t kStepBytes = kStep * sizeof(T);
  static constexpr uint32_t kSlotBytes = sizeof(Piece) * device::kWarpSize * kPieces;

  const T* next;       // this lane's first piece of the next chunk to ask for
  int rows;            // of the tensor, from there on
  uint32_t to, own;    // in the first slot: of this lane's first piece, on its way and turned
  uint32_t asked = 0;  // slots

  ChunkRing(Shared& shared, const T* from, int rows_) : next(from + Rows::row_of(0)), rows(rows_) {
    const int lane = threadIdx.x % device::kWarpSize;
    const uint32_t base = shared_address(&shared.piece[0][0]);
    to = base + place(lane / kPieces, lane % kPieces) * sizeof(Piece);
    own = base + place(lane, 0) * sizeof(Piece);
  }
  static uint32_t place(int lane, int k) { return lane * kPieces + (k ^ (lane / 2 % kPieces)); }

  // Of one chunk after the other, those of the share.
  void request(bool any) {
    ask(any);
    async_commit();
  }
  // The same, which a ring beside this one closes.
  void ask(bool any) {
    const uint32_t at = to + asked++ % kSlots * kSlotBytes;
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
    next += Rows::kRows;
    rows -= Rows::kRows;
  }
  // Of the oldest chunk that has been asked for this lane's rows, or all lanes' beside each other.
  template <bool kTurned = true>
  void take(Rows& result) const {
    async_wait<kSlots - 1>();
    __syncwarp();
    const uint32_t slot = asked % kSlots * kSlotBytes;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const uint32_t from = kTurned ? (own + slot) ^ k * sizeof(Piece) : to + slot + k * kStepBytes;
      result.piece[k] = load_shared<Piece>(from);
    }
    __syncwarp();
  }
};

// Of two tensors, side by side.
template <class T, int kSlots>
struct ChunkRing<RowProduct<T>, kSlots> {
  using Ring = ChunkRing<T, kSlots>;
  struct Shared {
    typename Ring::Shared x, y;
  };
  Ring x, y;

  ChunkRing(Shared& shared, const T* from_x, const T* from_y, int rows)
      : x(shared.x, from_x, rows), y(shared.y, from_y, rows) {}
  void request(bool any) {
    x.ask(any);
    y.request(any);
  }
  void take(Chunk<RowProduct<T>>& result) const {
    Chunk<T> of_x, of_y;
    x.take(of_x);
    y.take(of_y);
#pragma unroll
    for (int i = 0; i < Chunk<T>::kLaneRows; ++i) result.product[i] = of_x.real(i) * of_y.real(i);
  }
};

// Rows of a chunk that are marked: a byte of shared memory for each, and a bit of a lane's word.
struct LaneMarks {
  uint32_t bits = 0;

  bool any() const { return bits != 0; }
  bool at(int i) const { return (bits >> i & 1) != 0; }
  // The first and the last, of any.
  int first() const { return __ffs(static_cast<int>(bits)) - 1; }
  int last() const { return 31 - __clz(static_cast<int>(bits)); }
};
// The lowest bits of four bytes that are 0 or 1, beside each other.
inline uint32_t bits_of_bytes(uint32_t four) { return four * 0x10204080u >> 28; }
template <class T>
struct ChunkMarks {
  static constexpr int kVectors = Chunk<T>::kLaneRows / 16;
  Values<uint32_t, 4> vector[device::kWarpSize * kVectors];

  // Of rows behind the chunk the bytes behind these.
  void set(uint32_t row) { reinterpret_cast<uint8_t*>(vector)[row] = 1; }
  // The lane's, cleared for the next chunk.
  LaneMarks take() {
    Values<uint32_t, 4>* const own = vector + threadIdx.x % device::kWarpSize * kVectors;
    LaneMarks marks;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Values<uint32_t, 4> words = own[k];
      own[k] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        marks.bits += bits_of_bytes(words.element[i]) << (16 * k + 4 * i);
      }
    }
    return marks;
  }
};

// What a warp walks along: the rows of its share, and the segments of the list that end there.
// Rows are counted from `base`, a multiple of a chunk's, and segments from `first`.
// So many groups of 32 ends are read a chunk ahead, and so many at once where these do not suffice.
template <int kAhead, int kMore>
struct ChunkWalk {
  static constexpr int kAheadEnds = kAhead * device::kWarpSize;
  const Params& p;
  const Segments& segments;
  const int lane = threadIdx.x % device::kWarpSize;
  int64_t share;
  int64_t base, first;
  int row, row_stop;      // of the share
  int rows;               // of the tensors, as far as int goes
  int segment = 0;        // the next to end
  int reached;            // row at which it begins, or the share does
  int stop;               // segments from here on end beyond the share
  int lowest, highest;    // segments below and from there on are not the problem's
  bool starts_inside;     // whether rows of the first are in the share before
  const void* offsets;    // of `first`
  bool wide;              // are they i64
  int known;              // offsets from there on
  int64_t ahead[kAhead];  // where segments from `window` on end, as read
  int window;             // at most 31 before the next to end
  int window_reached;     // row at which it begins, or the share does
  bool bad = false;

  // Of one of the blocks that the shares are cut for.
  ChunkWalk(const Params& p_, const Segments& segments_, int64_t block, int chunk_rows)
      : p(p_), segments(segments_), share(block * kStreamWarps + threadIdx.x / device::kWarpSize) {
    const int64_t items[2] = {share * p.tile_items, (share + 1) * p.tile_items};
    TileStart bounds[2];
    bool inside[2];
    find_starts_at(segments, p.end_items, items, bounds, inside, chunk_rows);
    const TileStart from = bounds[0], to = bounds[1];
    if (lane < 2) p.starts[share + lane] = bounds[lane];
    constexpr int64_t kMost = 1 << 28;  // far more than fit into any share of a device
    base = from.row & -static_cast<int64_t>(chunk_rows);
    row = static_cast<int>(from.row - base);
    row_stop = static_cast<int>(clamped(to.row - base, row, kMost));
    rows = static_cast<int>(clamped(p.rows - base, 0, kMost));
    reached = row;
    first = from.segment;
    stop = static_cast<int>(clamped(to.segment - first, 0, kMost));
    lowest = first < 1 ? 1 : 0;
    highest = static_cast<int>(kept(clamped(p.segments + 1 - first, 0, 1 << 30)));
    starts_inside = inside[0];
    wide = segments.offsets.wide;
    known = static_cast<int>(clamped(segments.count + 1 - first, 0, stop));
    offsets = static_cast<const char*>(segments.offsets.data) + first * (wide ? 8 : 4);
    read_ahead(0, row);
  }

  // Where a lane's segments of the groups from number `from` on end.
  template <int kCount>
  void read_ends(int from, int64_t (&end)[kCount]) const {
    const int number = from + lane;
    const auto read = [&]<class Index>(const Index* at) {
      at += number;
      if (from + kCount * device::kWarpSize <= known) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) end[i] = at[i * device::kWarpSize];
        return;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int step = i * device::kWarpSize;
        end[i] = number + step < stop ? p.rows : base + row_stop + 1;
        if (number + step < known) end[i] = at[step];
      }
    };
    if (wide) {
      read(static_cast<const int64_t*>(offsets));
    } else {
      read(static_cast<const int32_t*>(offsets));
    }
  }
  bool in_problem(int number) const { return number >= lowest && number < highest; }
  // -1 or beyond all rows where it is not in the share.
  int counted(int64_t end) const {
    end -= base;
    return end < 0 ? -1 : end > row_stop ? row_stop + 1 : static_cast<int>(end);
  }
  int end_of(int number) const {
    int64_t end[1];
    read_ends(number - lane, end);
    return counted(end[0]);
  }
  int read_end(int from) const { return end_of(from + lane); }
  void read_ahead(int number, int begin) {
    window = number;
    window_reached = begin;
    read_ends(number, ahead);
  }

  // The same as counted() of what is less than 2^32 rows behind `base`, in fewer instructions; all
  // else sets a bit of `odd`.
  int near(int64_t end, uint32_t& odd) const {
    const auto rows = static_cast<uint64_t>(end - base);
    const auto low = static_cast<uint32_t>(rows), most = static_cast<uint32_t>(row_stop) + 1;
    odd |= static_cast<uint32_t>(rows >> 32);
    return static_cast<int>(low < most ? low : most);
  }
  int first_end() const {
    uint32_t odd = 0;
    return __shfl_sync(device::kAllLanes, near(ahead[0], odd), segment - window);
  }
  // Where the lane's segment of a group begins, from the group's ends, and those of the one before.
  int begin_of(int before, int end) const {
    const int sent = lane == device::kWarpSize - 1 ? before : end;
    return __shfl_sync(device::kAllLanes, sent, (lane - 1) & (device::kWarpSize - 1));
  }

  // The next segments that end up to row `high`. A lane calls visit(group, number, begin, end) for
  // its own of each group of 32 that has been read ahead, and of those behind them, as groups from
  // kAhead on, while all end; that is, also for some that do not end yet. Groups that have not been
  // read ahead are announced by fetch(group, number).
  struct Ended {
    int count;
    int reached;  // where the one that goes on begins
    bool odd;     // whether one may be empty
  };
  template <class Fetch, class Visit>
  Ended ended(int high, const Fetch& fetch, const Visit& visit) {
    uint32_t odd = 0;
    int last = reached, count = 0, before = window_reached;
    const auto take = [&](int group, int number, int end) {
      const int begin = begin_of(before, end);
      const bool next = group > 0 || number >= segment, here = (end <= high) & next;
      odd |= static_cast<uint32_t>((end <= begin) & next);
      last = here ? end : last;
      count += here;
      visit(group, number, begin, next ? end : begin);
      before = end;
      return begin;
    };
    take(0, window + lane, near(ahead[0], odd));
    // Mostly, where segments are long, the first group is enough.
    const bool all = __shfl_sync(device::kAllLanes, before, device::kWarpSize - 1) <= high;
    if (all) {
#pragma unroll
      for (int i = 1; i < kAhead; ++i) {
        take(i, window + i * device::kWarpSize + lane, near(ahead[i], odd));
      }
    }
    Ended result;
    result.count = __reduce_add_sync(device::kAllLanes, count);
#pragma unroll 1
    for (int taken = window + kAheadEnds - segment; result.count == taken;
         taken += kMore * device::kWarpSize) {
      count = 0;
      int64_t more[kMore];
      read_ends(segment + taken, more);
      const int number = segment + taken + lane;
#pragma unroll
      for (int i = 0; i < kMore; ++i) fetch(kAhead + i, number + i * device::kWarpSize);
#pragma unroll
      for (int i = 0; i < kMore; ++i) {
        const int end = counted(more[i]);
        bad |= end < take(kAhead + i, number + i * device::kWarpSize, end);
      }
      result.count += __reduce_add_sync(device::kAllLanes, count);
    }
    result.reached = __reduce_max_sync(device::kAllLanes, last);
    result.odd = __any_sync(device::kAllLanes, odd != 0);
    if (result.odd) {
      before = window_reached;
#pragma unroll 1
      for (int from = 0; from < (all ? kAheadEnds : device::kWarpSize); from += device::kWarpSize) {
        const int number = window + from, end = read_end(number), begin = begin_of(before, end);
        bad |= end < begin || (end > row_stop && number + lane < stop);
        before = end;
      }
    }
    return result;
  }
  // Whether the first group that was read ahead is used up, so that others have to be read.
  bool used_up(const Ended& ended) const {
    return segment + ended.count - window >= device::kWarpSize;
  }
  void next(const Ended& ended) {
    segment += ended.count;
    reached = ended.reached;
  }
  // At the end of the share.
  bool disorder() const { return bad || segment < stop; }
};

}  // namespace pullback::segment_cuda

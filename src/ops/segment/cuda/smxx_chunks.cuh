// Kernels over x of one column, contiguous, at the speed of memory. The list of rows and segment
// ends (params.cuh) is cut into as many equal shares as the device holds warps; a warp goes through
// its share from front to back, chunk by chunk, and no warp waits for another. While it works on a
// chunk, what it reads of the next one is on its way. A lane has 64 bytes of consecutive rows of a
// chunk, so that the work hardly depends on the lengths of segments.
//
// Offsets are proved on the way, rather than in a pass of their own. Unproven ones can make a warp
// compute nonsense, but neither read nor write out of bounds, and not without end. Where the proof
// fails, the last block of a map to be done repairs the offsets and does all again; a reduction is
// launched a second time in any case, to put together what reaches over several shares.
#pragma once

#include "ops/segment/cuda/smxx_math.cuh"
#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/tuning.hpp"

namespace pullback::segment_cuda {

// The rows of a chunk: loaded piece by piece, 32 lanes beside each other, then turned so that each
// lane has consecutive ones.
template <class T>
struct Chunk {
  static constexpr int kPieces = kChunkLaneBytes / 16;
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
  // From a chunk that begins `rows` before the end of the tensor; `from` is the lane's first piece.
  void load(const T* from, int rows) {
    if (rows >= kRows) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        piece[k] = load_once<T, kPieceRows>(from + k * device::kWarpSize * kPieceRows);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      union {
        Piece whole;
        T element[kPieceRows];
      } part = {};
#pragma unroll
      for (int i = 0; i < kPieceRows; ++i) {
        const int row = k * device::kWarpSize * kPieceRows + i;
        if (row_of(0) + row < rows) part.element[i] = from[row];
      }
      piece[k] = part.whole;
    }
  }
  static int turned(int k) {
    const int lane = threadIdx.x % device::kWarpSize;
    return k * (device::kWarpSize / kPieces) * kLanePitch + lane + lane / kPieces;
  }
  // To consecutive rows; all lanes must have read them before the memory is used otherwise.
  void turn(Shared& shared) {
    const int lane = threadIdx.x % device::kWarpSize;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) shared[turned(k)] = piece[k];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kPieces; ++k) piece[k] = shared[lane * kLanePitch + k];
  }
  Real<T> real(int i) const { return piece[i / kPieceRows].real(i % kPieceRows); }
  T stored(int i) const { return piece[i / kPieceRows].stored(i % kPieceRows); }
};

// What a warp walks along: the rows of its share, and the segments of the list that end there.
// Rows are counted from `base`, a multiple of a chunk's, and segments from `first`.
// So many groups of 32 ends are read a chunk ahead.
template <int kRows, int kAhead>
struct ChunkWalk {
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
  bool starts_inside;     // whether rows of the first are in the share before
  const void* offsets;    // of `first`
  bool wide;              // are they i64
  int known;              // offsets from there on
  int64_t ahead[kAhead];  // where the next segments end, as read
  bool bad = false;

  // Of one of the blocks that the shares are cut for.
  ChunkWalk(const Params& p_, const Segments& segments_, int64_t block)
      : p(p_), segments(segments_), share(block * kStreamWarps + threadIdx.x / device::kWarpSize) {
    const int64_t items[2] = {share * p.tile_items, (share + 1) * p.tile_items};
    TileStart bounds[2];
    bool inside[2];
    find_starts_at(segments, p.end_items, items, bounds, inside);
    const TileStart from = bounds[0], to = bounds[1];
    if (lane < 2) p.starts[share + lane] = bounds[lane];
    constexpr int64_t kMost = 1 << 28;  // far more than fit into any share of a device
    base = from.row & -static_cast<int64_t>(kRows);
    row = static_cast<int>(from.row - base);
    row_stop = static_cast<int>(clamped(to.row - base, row, kMost));
    rows = static_cast<int>(clamped(p.rows - base, 0, kMost));
    reached = row;
    first = from.segment;
    stop = static_cast<int>(clamped(to.segment - first, 0, kMost));
    starts_inside = inside[0];
    wide = segments.offsets.wide;
    known = static_cast<int>(clamped(segments.count + 1 - first, 0, stop));
    offsets = static_cast<const char*>(segments.offsets.data) + first * (wide ? 8 : 4);
    read_ahead(0);
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
  // -1 or beyond all rows where it is not in the share.
  int counted(int64_t end) const {
    end -= base;
    return end < 0 ? -1 : end > row_stop ? row_stop + 1 : static_cast<int>(end);
  }
  int read_end(int from) const {
    int64_t end[1];
    read_ends(from, end);
    return counted(end[0]);
  }
  void read_ahead(int number) { read_ends(number, ahead); }

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
    return __shfl_sync(device::kAllLanes, near(ahead[0], odd), 0);
  }
  // Where the lane's segment of a group begins, from the group's ends, and those of the one before.
  int begin_of(int before, int end) const {
    const int sent = lane == device::kWarpSize - 1 ? before : end;
    return __shfl_sync(device::kAllLanes, sent, (lane - 1) & (device::kWarpSize - 1));
  }

  // The next segments that end up to row `high`. A lane calls visit(group, number, begin, end) for
  // its own of each group of 32 that has been read ahead, and of those behind them, as number
  // kAhead, while all end; that is, also for some that do not end yet.
  struct Ended {
    int count;
    int reached;  // where the one that goes on begins
    bool odd;     // whether one may be empty
  };
  template <class Visit>
  Ended ended(int high, const Visit& visit) {
    uint32_t odd = 0;
    int last = reached, count = 0, before = reached;
    const auto take = [&](int group, int number, int end) {
      const int begin = begin_of(before, end);
      odd |= static_cast<uint32_t>(end <= begin);
      const bool here = end <= high;
      last = here ? end : last;
      count += here;
      visit(group, number, begin, end);
      before = end;
      return begin;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      take(i, segment + i * device::kWarpSize + lane, near(ahead[i], odd));
    }
    Ended result;
    result.count = __reduce_add_sync(device::kAllLanes, count);
    constexpr int kMore = 2;
#pragma unroll 1
    for (int all = kAhead * device::kWarpSize; result.count == all;
         all += kMore * device::kWarpSize) {
      count = 0;
      int64_t more[kMore];
      read_ends(segment + all, more);
#pragma unroll
      for (int i = 0; i < kMore; ++i) {
        const int end = counted(more[i]);
        bad |= end < take(kAhead, segment + all + i * device::kWarpSize + lane, end);
      }
      result.count += __reduce_add_sync(device::kAllLanes, count);
    }
    result.reached = __reduce_max_sync(device::kAllLanes, last);
    result.odd = __any_sync(device::kAllLanes, odd != 0);
    if (result.odd) {
      before = reached;
#pragma unroll 1
      for (int from = 0; from < kAhead * device::kWarpSize; from += device::kWarpSize) {
        const int end = read_end(segment + from);
        bad |= end < begin_of(before, end) || (end > row_stop && segment + from + lane < stop);
        before = end;
      }
    }
    return result;
  }
  void next(const Ended& ended) {
    segment += ended.count;
    reached = ended.reached;
  }
  // At the end of the share.
  bool disorder() const { return bad || segment < stop; }
};

}  // namespace pullback::segment_cuda

// Maps over x of one column, contiguous, at the speed of memory. The list of rows and segment ends
// (params.cuh) is cut into as many equal shares as the device holds warps; a warp goes through its
// share from front to back, chunk by chunk, and no warp waits for another. While it works on a
// chunk, what it reads of the next one is on its way to its registers. A lane has 64 bytes of
// consecutive rows of a chunk, so that the work hardly depends on the lengths of segments.
//
// Offsets are proved on the way, rather than in a pass of their own. Unproven ones can make a warp
// compute nonsense, but neither read nor write out of bounds, and not without end. Where the proof
// fails, the last block to be done repairs the offsets and does all again.
#pragma once

#include "ops/segment/cuda/smxx_math.cuh"
#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/tuning.hpp"

namespace pullback::segment_cuda {

// The rows of a chunk: loaded piece by piece, 32 lanes beside each other, then turned so that each
// lane has consecutive ones.
template <class T>
struct Chunk {
  static constexpr int kPieces = kMapLaneBytes / 16;
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
  // From a chunk that begins at `from`, `rows` before the end of the tensor.
  void load(const T* from, int rows) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int row = row_of(k);
      if (row + kPieceRows <= rows) {
        piece[k] = load_once<T, kPieceRows>(from + row);
        continue;
      }
      union {
        Piece whole;
        T element[kPieceRows];
      } part = {};
#pragma unroll
      for (int i = 0; i < kPieceRows; ++i) {
        if (row + i < rows) part.element[i] = from[row + i];
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
  int row, row_stop;    // of the share
  int rows;             // of the tensors, as far as int goes
  int segment = 0;      // the next to end
  int reached;          // row at which it begins, or the share does
  int stop;             // segments from here on end beyond the share
  bool starts_inside;   // whether rows of the first are in the share before
  const char* offsets;  // of `first`
  int width;            // of an offset
  int known;            // offsets from there on
  int64_t ahead[kAhead];
  int near[kAhead];  // where the next segments end
  bool has_read = false, bad = false;

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
    width = segments.offsets.wide ? 8 : 4;
    known = static_cast<int>(clamped(segments.count + 1 - first, 0, stop));
    offsets = static_cast<const char*>(segments.offsets.data) + first * width;
    read_ahead(0);
  }

  int64_t offset(int number) const {
    if (number >= known) return number < stop ? segments.rows : base + row_stop + 1;
    const char* const at = offsets + static_cast<int64_t>(number) * width;
    return width == 8 ? *reinterpret_cast<const int64_t*>(at)
                      : *reinterpret_cast<const int32_t*>(at);
  }
  // -1 or beyond all rows where it is not in the share.
  int counted(int64_t end) const {
    end -= base;
    return end < 0 ? -1 : end > row_stop ? row_stop + 1 : static_cast<int>(end);
  }
  void read_ahead(int number) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = offset(number + i * device::kWarpSize + lane);
    has_read = true;
  }
  void take_ahead() {
    if (!has_read) return;
    has_read = false;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) near[i] = counted(ahead[i]);
  }

  int first_end() const { return __shfl_sync(device::kAllLanes, near[0], 0); }

  // The next segments that end up to row `high`: each lane calls visit(group, number, begin,
  // end, whether it ends) for its own of a group, also of the one that goes on. Groups that have
  // not been read ahead are number kAhead.
  struct Ended {
    int count;
    int reached;  // where the one that goes on begins
  };
  template <class Visit>
  Ended ended(int high, const Visit& visit) const {
    Ended result = {0, reached};
    const auto take = [&](int group, int end) {
      int begin = __shfl_up_sync(device::kAllLanes, end, 1);
      if (lane == 0) begin = result.reached;
      const uint32_t open = __ballot_sync(device::kAllLanes, end > high);
      const int count = open != 0 ? __ffs(static_cast<int>(open)) - 1 : device::kWarpSize;
      if (lane <= count) visit(group, segment + result.count + lane, begin, end, lane < count);
      result.count += count;
      if (count > 0) result.reached = __shfl_sync(device::kAllLanes, end, count - 1);
      return count == device::kWarpSize;
    };
    bool more = true;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (more) more = take(i, near[i]);
    }
#pragma unroll 1
    while (more) {
      more = take(kAhead, counted(offset(segment + result.count + lane)));
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

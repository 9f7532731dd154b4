// Maps over x of one column, contiguous, at the speed of memory. The list of rows and segment ends
// (params.cuh) is cut into as many equal shares as the device holds warps; a warp goes through its
// share from front to back, and no warp waits for another. Rows and the ends of segments pass
// through rings in shared memory that are refilled as soon as a chunk is done with. Segments come
// 32 at a time: a lane walks the rows of its own, and all lanes together those of a long one.
//
// Offsets are proved on the way, rather than in a pass of their own. Unproven ones can make a warp
// compute nonsense, but neither read nor write out of bounds, and not without end.
#pragma once

#include "ops/segment/cuda/smxx_math.cuh"
#include "ops/segment/cuda/smxx_segments.cuh"
#include "ops/segment/cuda/tuning.hpp"

namespace pullback::segment_cuda {

// Of a contiguous tensor of one column, the rows that a warp is at. A chunk is a piece a lane.
template <class E, int kLaneRows>
struct RowRing {
  static constexpr int kChunkRows = kLaneRows * device::kWarpSize;
  static constexpr int kRows = kStreamChunks * kChunkRows;
  using Piece = Values<E, kLaneRows>;
  using Shared = Piece[kStreamChunks * device::kWarpSize];
  Piece* pieces;
  const E* next;  // this lane's piece of the next chunk to ask for
  uint32_t own;   // this lane's piece of the first chunk, in shared memory
  int rows;       // of the tensor

  // The tensor has so many rows from `from` on.
  RowRing(Shared& shared, const E* from, int rows_)
      : pieces(shared),
        next(from + threadIdx.x % device::kWarpSize * kLaneRows),
        own(kept(shared_address(&piece(0)))),
        rows(rows_) {}

  static int chunk_of(int row) { return static_cast<int>(static_cast<uint32_t>(row) / kChunkRows); }
  E& at(int row) const { return reinterpret_cast<E*>(pieces)[row & (kRows - 1)]; }
  Piece& piece(int chunk) const {
    const int lane = threadIdx.x % device::kWarpSize;
    return pieces[(chunk & (kStreamChunks - 1)) * device::kWarpSize + lane];
  }
  // Asks for one chunk after the other.
  void request(int chunk) {
    const int slot = chunk & (kStreamChunks - 1);
    constexpr uint32_t kChunkBytes = sizeof(Piece) * device::kWarpSize;
    if ((chunk + 1) * kChunkRows <= rows) {
      async_copy<sizeof(Piece)>(own + slot * kChunkBytes, next);
    } else {
      const int row = chunk * kChunkRows + threadIdx.x % device::kWarpSize * kLaneRows;
#pragma unroll 1
      for (int i = 0; i < kLaneRows && row + i < rows; ++i) {
        at(row + i) = next[i];
      }
    }
    next += kChunkRows;
  }
};

// What a warp walks along: the rows of its share and the segments of the list that end there.
// Inside a share rows are counted from `base`, segments from `first_group`, a multiple of 32.
template <int kChunkRows>
struct Walk {
  static constexpr int kMostEnds = kStreamEndGroups * device::kWarpSize;
  using Shared = int64_t[kMostEnds];

  const Params& p;
  const Segments& segments;
  int64_t* ends;
  const char* next_end;  // this lane's of the next group to ask for
  uint32_t own_end;      // this lane's of the first group, in shared memory
  int width;             // of an offset
  int offsets;           // from first_group on
  const int lane = threadIdx.x % device::kWarpSize;
  int64_t share;
  int64_t base, first_group;
  int row, row_stop;           // rows yet to come
  int rows;                    // of the tensors, as far as int goes
  int segment, stop;           // segments yet to end, up to those that end beyond the share
  bool starts_inside;          // whether rows of the first are in the share before
  int window;                  // rows before it have arrived
  int chunks = 0, groups = 0;  // asked for
  bool bad = false;

  Walk(const Params& p_, const Segments& segments_, Shared& ends_)
      : p(p_),
        segments(segments_),
        ends(ends_),
        share(static_cast<int64_t>(blockIdx.x) * kStreamWarps + threadIdx.x / device::kWarpSize) {
    const int64_t items[2] = {share * p.tile_items, (share + 1) * p.tile_items};
    TileStart bounds[2];
    bool inside[2];
    find_starts_at(segments, p.end_items, items, bounds, inside);
    const TileStart from = bounds[0], to = bounds[1];
    if (lane < 2) p.starts[share + lane] = bounds[lane];
    constexpr int64_t kMost = 1 << 28;  // far more than fit into any share of a device
    base = from.row & -static_cast<int64_t>(kChunkRows);
    row = static_cast<int>(from.row - base);
    row_stop = static_cast<int>(clamped(to.row - base, row, kMost));
    rows = static_cast<int>(clamped(p.rows - base, 0, kMost));
    first_group = from.segment & -static_cast<int64_t>(device::kWarpSize);
    segment = static_cast<int>(from.segment - first_group);
    stop = static_cast<int>(clamped(to.segment - first_group, segment, kMost));
    starts_inside = inside[0];
    width = segments.offsets.wide ? 8 : 4;
    offsets = static_cast<int>(clamped(segments.count + 1 - first_group, 0, stop));
    next_end = static_cast<const char*>(segments.offsets.data) + (first_group + lane) * width;
    own_end = kept(shared_address(&ends[lane]));
  }

  bool goes_on() const { return row < row_stop || segment < stop; }
  int group() const { return static_cast<int>(static_cast<uint32_t>(segment) / device::kWarpSize); }

  // Makes room for and asks for what comes next, by request(chunk), and waits until there are some
  // chunks from `row` on. Requests are closed one by one, so that those before the last few have
  // arrived.
  template <class Request>
  void advance(const Request& request) {
    __syncwarp();
    const int chunk = static_cast<int>(static_cast<uint32_t>(row) / kChunkRows);
#pragma unroll 1
    for (; chunks < chunk + kStreamChunks; ++chunks) {
      if (chunks * kChunkRows < row_stop) request(chunks);
      async_commit();
    }
#pragma unroll 1
    for (; groups < group() + kStreamEndGroups; ++groups) {
      request_ends();
      async_commit();
    }
    async_wait<kStreamPending>();
    __syncwarp();
    const int arrived = (chunk + kStreamChunks - kStreamPending) * kChunkRows;
    window = arrived < row_stop ? arrived : row_stop;
  }
  void request_ends() {
    const int number = groups * device::kWarpSize + lane;
    const uint32_t to = own_end + (groups & (kStreamEndGroups - 1)) * device::kWarpSize * 8;
    if (number < offsets) {
      if (width == 8) {
        async_copy<8>(to, next_end);
      } else {
        async_copy<4>(to, next_end);
      }
    } else if (number < stop) {
      ends[number & (kMostEnds - 1)] = segments.rows;
    }
    next_end += width * device::kWarpSize;
  }
  // Row at which a segment ends; -1 or beyond all rows where it is not in the share.
  int end_of(int number) const {
    const int64_t& at = ends[number & (kMostEnds - 1)];
    const int64_t end =
        (width == 8 || number >= offsets ? at : reinterpret_cast<const int32_t&>(at)) - base;
    return end < 0 ? -1 : end > row_stop ? row_stop + 1 : static_cast<int>(end);
  }

  // Of the lanes' segments those that end in the window: a run of lanes from the one of `segment`
  // on, which have `mine`. Their rows are those from `begin` to `end`.
  struct Batch {
    int count;
    int number, begin, end;
    bool mine;
    int open_stop;  // where none ends: rows up to here belong to the segment that goes on
  };
  Batch batch() {
    Batch batch;
    batch.number = group() * device::kWarpSize + lane;
    batch.end = batch.number < stop ? end_of(batch.number) : 0;
    const bool ended = batch.number >= segment && batch.number < stop &&
                       (window == row_stop || batch.end <= window);
    const uint32_t run =
        __ballot_sync(device::kAllLanes, ended) >> (segment & (device::kWarpSize - 1));
    batch.count = __clz(static_cast<int>(__brev(~run)));
    batch.mine = batch.number >= segment && batch.number < segment + batch.count;
    batch.begin = __shfl_up_sync(device::kAllLanes, batch.end, 1);
    if (batch.number == segment) batch.begin = row;
    batch.open_stop = window;
    if (batch.count == 0 && segment < stop) {
      const int end = __shfl_sync(device::kAllLanes, batch.end, segment & (device::kWarpSize - 1));
      batch.open_stop = end < window ? end : window;
    }
    if (batch.mine) {
      bad |= batch.begin > batch.end || batch.end > window || batch.begin < row;
      batch.begin = batch.begin < row ? row : batch.begin;
      batch.end = batch.end > window ? window : batch.end;
    }
    return batch;
  }
  void next(const Batch& batch) {
    if (batch.count == 0) {
      row = batch.open_stop;
      return;
    }
    segment += batch.count;
    const int reached =
        __shfl_sync(device::kAllLanes, batch.end, (segment - 1) & (device::kWarpSize - 1));
    row = reached > row ? reached : row;
  }
  void report() {
    if (p.proof != Proof::wanted) return;
    const int any = __syncthreads_or(bad);
    if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  }
};

}  // namespace pullback::segment_cuda

// x of one column, contiguous, at the speed of memory. The list of rows and segment ends
// (params.cuh) is cut into as many equal shares as the device holds blocks; a block goes through
// its share from front to back. What it reads passes through rings in shared memory that are
// refilled as soon as a chunk is done with, so that memory is busy whatever the block computes. A
// block takes its share in pieces of some rows; the segments that end in a piece are marked in
// shared memory by the threads that read the offsets, one each.
//
// Offsets are proved on the way, rather than in a pass of their own. Unproven ones can make a block
// compute nonsense, but neither read nor write out of bounds, and not without end. Where the proof
// fails the same kernel, launched a second time, repairs the offsets and does all again.
#pragma once

#include "device/async_copy.cuh"
#include "device/bulk.cuh"
#include "ops/segment/cuda/smxx_index.cuh"

namespace pullback::segment_cuda {

// A contiguous tensor from `from` on, passing through shared memory in chunks.
template <int kChunks, int kMostChunkBytes>
struct Ring {
  struct Shared {
    alignas(16) unsigned char data[kChunks * kMostChunkBytes];
    uint64_t arrivals[kChunks];
  };
  Shared& shared;
  const unsigned char* from;
  int64_t bytes;
  int chunk_bytes, chunks;
  int requested = 0, request_slot = 0;  // of the thread that asks
  int arrived = 0, arrived_slot = 0;
  uint32_t parity = 0;

  Ring(Shared& shared_, const void* from_, int64_t bytes_, int chunk_bytes_)
      : shared(shared_),
        from(static_cast<const unsigned char*>(from_)),
        bytes(bytes_),
        chunk_bytes(chunk_bytes_),
        chunks(static_cast<int>((bytes_ + chunk_bytes_ - 1) / chunk_bytes_)) {}

  // By one thread, before a barrier of the block.
  void init() {
    for (int i = 0; i < kChunks; ++i) device::barrier_init(&shared.arrivals[i], 1);
  }
  static constexpr int kPieceBytes = 16;

  // Asks for all chunks that there is room for when those before `oldest` are done with.
  void refill(int oldest) {
#pragma unroll 1
    while (requested < chunks && requested < oldest + kChunks) {
      const int64_t at = static_cast<int64_t>(requested) * chunk_bytes;
      const int size = bytes - at < chunk_bytes ? static_cast<int>(bytes - at) : chunk_bytes;
      const int whole = size & -kPieceBytes;
      unsigned char* to = shared.data + request_slot * chunk_bytes;
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
      for (int i = whole; i < size; ++i) to[i] = from[at + i];
      device::barrier_expect_bytes(&shared.arrivals[request_slot], whole);
      if (whole != 0) {
        device::bulk_load(to, from + at, whole, &shared.arrivals[request_slot]);
      }
#else
      for (int i = threadIdx.x * kPieceBytes; i < whole; i += blockDim.x * kPieceBytes) {
        device::async_copy(to + i, from + at + i);
      }
      if (threadIdx.x == 0) {
        for (int i = whole; i < size; ++i) to[i] = from[at + i];
      }
#endif
      ++requested;
      if (++request_slot == kChunks) request_slot = 0;
    }
  }

  // Waits for the chunks before `stop`.
  void wait(int stop) {
#if __CUDA_ARCH__ >= 900
    if (stop > chunks) stop = chunks;
#pragma unroll 1
    while (arrived < stop) {
      device::barrier_wait(&shared.arrivals[arrived_slot], parity);
      ++arrived;
      if (++arrived_slot == kChunks) {
        arrived_slot = 0;
        parity ^= 1;
      }
    }
#endif
  }

  // Where the byte lies that comes `place` bytes after the ring's first, less than two rings.
  const unsigned char* at(int place) const {
    const int size = kChunks * chunk_bytes;
    return shared.data + (place >= size ? place - size : place);
  }
};

// Before a loop over pieces; all threads, and ends behind a barrier.
template <class... Rings>
void start_rings(Rings&... rings) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    (rings.init(), ...);
    device::barrier_init_fence();
    (rings.refill(0), ...);
  }
#else
  (rings.refill(0), ...);
#endif
  __syncthreads();
}
// All threads, behind a barrier after the last look at chunks before `oldest`.
template <class Ring>
void refill(Ring& ring, int oldest) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) ring.refill(oldest);
#else
  ring.refill(oldest);
#endif
}
// Before sm_90 a block's copies overlap with the work of other blocks only.
inline void wait_for_copies() {
#if __CUDA_ARCH__ < 900
  device::async_commit();
  device::async_wait<0>();
  __syncthreads();
#endif
}

// Whether the block has to run, and with which offsets.
inline bool begin_stream(const Params& p, Segments& segments) {
  let_next_kernel_begin();
  if (p.proof != Proof::failed) {
    if (p.proof == Proof::wanted) {
      segments = make_segments(p, false);
      if (blockIdx.x == 0 && threadIdx.x == 0) *p.repaired = 0;
    } else {
      segments = make_segments(p);
    }
    return true;
  }
  wait_for_kernel_ahead();
  bool bad = false;
  for (int64_t tile = threadIdx.x; tile < p.tiles; tile += blockDim.x) {
    bad |= p.disorder[tile] != 0;
  }
  bad = __syncthreads_or(bad) != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.use_own_offsets = bad;
  if (!bad) return false;
  if (blockIdx.x == 0) {
    repair_offsets<kStreamThreads>(p);
    __syncthreads();
    __threadfence();
    if (threadIdx.x == 0) atomicExch(p.repaired, 1);
  } else {
    if (threadIdx.x == 0) {
      while (atomicAdd(p.repaired, 0) == 0) {
      }
    }
    __syncthreads();
    __threadfence();
  }
  segments = make_segments(p, true);
  return true;
}

// What a block walks along: the rows of its share and the segments that end there. Of the list's
// segments only those of the problem, 1 to S, are met.
template <int kRows>
struct Walk {
  static constexpr int kWords = kRows / 32;
  static constexpr int kMostEnds = kEndChunks * kEndChunk;
  static_assert(kStreamEnds % kStreamThreads == 0 && kStreamThreads == kEndChunk);
  static_assert(kStreamEnds + 2 * kEndChunk <= kMostEnds && kRows < 0x7fff);
  using EndRing = Ring<kEndChunks, kEndChunk * 8>;
  struct Shared {
    typename EndRing::Shared ends;
    TileStart bounds[2];
    uint32_t bits[kWords];
  };

  const Params& p;
  Shared& shared;
  bool wide;                // offsets are of 8 bytes
  int64_t share_row;        // the share's first
  int64_t first, stop;      // segments yet to end, up to those that end beyond the share
  int64_t base;             // rows are counted from here, a multiple of some rows
  int row, row_stop;        // rows yet to come
  int64_t end_base;         // the first offset in the ring
  int64_t lowest, highest;  // rows below and from there on are in no segment
  bool bad = false;

  // Of a piece: its rows, from `row` on and up to `window`, are counted from `origin`.
  int origin, window;
  int64_t origin_row;
  int limit;  // segments that may end in it
  int taken;  // segments that do
  int place;  // of the first one's offset in the ring

  // All threads; leaves the block behind a barrier.
  Walk(const Params& p_, const Segments& segments, Shared& shared_, int row_alignment)
      : p(p_), shared(shared_), wide(segments.offsets.wide) {
    const int warp = threadIdx.x / device::kWarpSize;
    if (warp < 2) {
      const TileStart bound =
          find_start(segments, (static_cast<int64_t>(blockIdx.x) + warp) * p.tile_items);
      if (threadIdx.x % device::kWarpSize == 0) {
        shared.bounds[warp] = bound;
        p.starts[blockIdx.x + warp] = bound;
      }
    }
    clear();
    lowest = segments.begin(1);
    highest = segments.end(p.segments);
    __syncthreads();
    const TileStart from = shared.bounds[0], to = shared.bounds[1];
    share_row = from.row;
    first = from.segment;
    stop = to.segment <= p.segments ? to.segment : p.segments + 1;
    if (first == 0 && stop > 0) {
      bad = lowest < 0 || lowest > p.rows;
      first = 1;
    }
    constexpr int64_t kMost = 1 << 28;  // far more than fit into any share of a device
    base = from.row & -static_cast<int64_t>(row_alignment);
    row = static_cast<int>(from.row - base);
    row_stop = static_cast<int>(clamped(to.row - base, row, kMost));
    end_base = (first > 0 ? first - 1 : 0) & -static_cast<int64_t>(kEndChunk);
  }
  // Passes over rows that are in no segment.
  void skip_outside() {
    if (share_row >= lowest) return;
    row = static_cast<int>(clamped(lowest - base, row, row_stop));
    share_row = base + row;
  }

  EndRing end_ring(const Segments& segments) const {
    const int width = wide ? 8 : 4;
    const int64_t count = stop - end_base;
    return {shared.ends,
            static_cast<const unsigned char*>(segments.offsets.data) + end_base * width,
            count > 0 ? count * width : 0, kEndChunk * width};
  }
  // Of a tensor with rows of so many bytes: those of the share, in 16-byte pieces where it has
  // them.
  int64_t bytes_of_rows(int bytes) const {
    const int64_t share = (static_cast<int64_t>(row_stop) * bytes + 15) & -16;
    const int64_t all = (p.rows - base) * bytes;
    return share < all ? share : all;
  }
  bool goes_on() const { return row < row_stop || first < stop; }

  // A row, counted from origin; -1 or kRows + 1 where it is beyond the piece.
  int counted(int64_t row) const {
    const int64_t at = row - origin_row;
    return at < 0 ? -1 : at > kRows ? kRows + 1 : static_cast<int>(at);
  }
  int64_t end_of(int number) const {  // of segment first + number
    const int at = (place + number) & (kMostEnds - 1);
    return wide ? reinterpret_cast<const int64_t*>(shared.ends.data)[at]
                : reinterpret_cast<const int32_t*>(shared.ends.data)[at];
  }

  template <int kLaneRows>
  void begin_piece() {
    origin = row & -kLaneRows;
    window = row_stop - origin < kRows ? row_stop : origin + kRows;
    origin_row = base + origin;
    limit = stop - first < kStreamEnds ? static_cast<int>(stop - first) : kStreamEnds;
    place = static_cast<int>(first - end_base) & (kMostEnds - 1);
  }
  int oldest_end() const {
    return first == 0 ? 0 : static_cast<int>((first - 1 - end_base) / kEndChunk);
  }

  // Finds the segments that end in the piece. For each segment met, up to the one that goes on, it
  // marks the row that row_of(number, begin, end, ended) names, if it is one; for those it calls
  // on_marked(row, early(number)); what early() reads is on its way meanwhile. All rows are counted
  // from origin. Ends behind a barrier, after which it still may call on_marked().
  template <class RowOf, class Early, class OnMarked>
  void mark(EndRing& ring, const RowOf& row_of, const Early& early, const OnMarked& on_marked) {
    const bool last = window == row_stop;
    const int low = row - origin, high = window - origin;
    int chunk = static_cast<int>((first - end_base) / kEndChunk);
    int number = threadIdx.x;
    taken = 0;
#pragma unroll 1
    do {
      ring.wait(chunk + 2);
      const int begin = counted(end_of(number - 1)), end = counted(end_of(number));
      const bool ended = (number < limit) & (last | (end <= high));
      bad |= ended & ((begin > end) | (end < low) | (end > high));
      const int at = row_of(number, begin, end, ended);
      const bool marked = static_cast<uint32_t>(at) < static_cast<uint32_t>(kRows);
      auto read = early(number, marked);
      if (marked) atomicOr(&shared.bits[at / 32], 1u << (at % 32));
      const int count = __syncthreads_count(ended);
      if (marked) on_marked(at, read);
      taken += count;
      number += kStreamThreads;
      ++chunk;
      if (count < kStreamThreads) break;
    } while (number < kStreamEnds);
    if (taken == kStreamEnds) {
      const int reached = counted(end_of(kStreamEnds - 1)) + origin;
      window = reached < row ? row : reached < window ? reached : window;
    }
  }
  // By all threads, between barriers behind the last look at the bits and before the next marks.
  void clear() {
    for (int i = threadIdx.x; i < kWords; i += kStreamThreads) shared.bits[i] = 0;
  }
  void next_piece() {
    row = window;
    first += taken;
  }
  // Which words have marks, a bit for each. By whole warps.
  static constexpr int kGroups = kWords / device::kWarpSize;
  struct Words {
    uint32_t group[kGroups];
  };
  Words words_with_marks() const {
    Words words;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int word = i * device::kWarpSize + threadIdx.x % device::kWarpSize;
      words.group[i] = __ballot_sync(device::kAllLanes, shared.bits[word] != 0);
    }
    return words;
  }
  // Last marked row of the piece up to this one; 0 when there is none.
  int previous(int at, const Words& words) const {
    int word = at / 32;
    uint32_t rest = shared.bits[word] & (0xffffffffu >> (31 - at % 32));
    if (rest == 0) {
      int found = -1;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const uint32_t before = i < word / 32    ? 0xffffffffu
                                : i == word / 32 ? (1u << (word % 32)) - 1
                                                 : 0;
        const uint32_t near = words.group[i] & before;
        found = near != 0 ? i * 32 + 31 - __clz(static_cast<int>(near)) : found;
      }
      if (found < 0) return 0;
      word = found;
      rest = shared.bits[word];
    }
    return word * 32 + 31 - __clz(static_cast<int>(rest));
  }
  void report() {
    if (p.proof != Proof::wanted) return;
    const int any = __syncthreads_or(bad);
    if (threadIdx.x == 0) p.disorder[blockIdx.x] = any;
  }
};

}  // namespace pullback::segment_cuda

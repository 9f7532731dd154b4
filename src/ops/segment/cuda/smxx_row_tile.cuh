// A tile of contiguous rows in shared memory, as they lie, whatever number of columns they have.
//
// The block copies them in pieces of 16 bytes, of which the first and the last may belong to other
// tiles in part. A lane takes a few columns of a short segment and walks its rows; the lanes of a
// warp share the rows of a longer one. What is made in the place of the rows is stored in pieces of
// 16 bytes again.
#pragma once

#include "ops/segment/cuda/row_tile_tuning.cuh"
#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

inline constexpr int kPieceBytes = 16;

// The bytes of a tile's rows. Pieces of 16 are exchanged so that those 128 bytes apart, as lanes
// read them where segments are of equal lengths, are in different banks.
struct RowImage {
  unsigned char* bytes;

  static uint32_t turned(uint32_t at) { return at ^ (at >> 3 & 0x70); }
  template <class V>
  V load(uint32_t at) const {
    const unsigned char* from = bytes + turned(at);
    if constexpr (sizeof(V) >= 4) {
      return load_shared<V>(shared_address(from));
    } else {
      return *reinterpret_cast<const V*>(from);
    }
  }
  template <class V>
  void store(uint32_t at, const V& values) const {
    unsigned char* to = bytes + turned(at);
    if constexpr (sizeof(V) == 16) {
      struct alignas(16) Words {
        uint32_t word[4];
      };
      union {
        V values;
        Words words;
      } piece = {values};
      *reinterpret_cast<Words*>(to) = piece.words;
    } else if constexpr (kIsWord<V>) {
      const PieceWord<V> piece = {values};
      *reinterpret_cast<decltype(PieceWord<V>::word)*>(to) = piece.word;
    } else {
      *reinterpret_cast<V*>(to) = values;
    }
  }
};

// Asks for the bytes from `first`, a multiple of 16, to `stop` of a tensor that has `all`; aligned
// as it is. kTurned: as a RowImage has them.
template <bool kTurned>
void copy_bytes(unsigned char* memory, const void* tensor, int64_t first, int64_t stop,
                int64_t all) {
  const auto* from = static_cast<const char*>(tensor) + first;
  const uint32_t to = shared_address(memory);
  const int count = static_cast<int>(stop - first);
  const int64_t bytes_left = all - first;
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x) * kPieceBytes; at < count;
       at += kThreads * kPieceBytes) {
    const uint32_t place = to + (kTurned ? RowImage::turned(at) : at);
    if (bytes_left - at >= kPieceBytes) {
      async_copy<kPieceBytes>(place, from + at);
    } else {
      device::async_copy_padded(place, from + at, static_cast<int>(bytes_left - at));
    }
  }
}

// What becomes of the rows of a segment that several warps share: nothing, or the parts are put
// together.
enum class Parts { none, apart, meet };

struct RowTile {
  const Params& p;
  Tile tile;
  int row_count, end_count;  // of rows, and of segments that end in the tile
  int row_bytes;
  int64_t first_byte;          // of the image, in the tensor
  int skew;                    // of the first row, in the image
  uint16_t* ends = nullptr;    // where the tile's segments end, after its first row
  bool begins_before = false;  // the first of them

  RowTile(const Params& p_, const Tile& tile_, int element_bytes)
      : p(p_), tile(tile_), row_bytes(static_cast<int>(p_.columns) * element_bytes) {
    const int items = static_cast<int>(p.tile_items);
    row_count = static_cast<int>(clamped(tile.row_stop - tile.row, 0, items + p.snap_rows));
    end_count =
        static_cast<int>(clamped(tile.stop - tile.first, 0, row_tile_ends(items, p.end_items)));
    first_byte = tile.row * row_bytes & -kSectorBytes;
    skew = static_cast<int>(tile.row * row_bytes - first_byte);
  }

  // Of the rows of one input.
  int image_bytes() const { return row_image_bytes(row_count * row_bytes); }
  void copy_rows(const RowImage& image, const void* tensor) const {
    copy_bytes<true>(image.bytes, tensor, first_byte, first_byte + skew + row_count * row_bytes,
                     p.rows * row_bytes);
  }
  // By all threads, which may read ends after a barrier.
  void find_ends(const Segments& segments, unsigned char* memory) {
    ends = reinterpret_cast<uint16_t*>(memory);
    for (int k = threadIdx.x; k < end_count; k += kThreads) {
      ends[k] =
          static_cast<uint16_t>(clamped(segments.end(tile.first + k) - tile.row, 0, row_count));
    }
    begins_before = end_count > 0 && in_problem(0) && segments.begin(tile.first) < tile.row;
  }

  // Of the tile's segments. Number `end_count` is the one that goes on behind the tile.
  bool in_problem(int k) const {
    const int64_t j = tile.first + k;
    return j >= 1 && j <= p.segments;
  }
  int begin_of(int k) const { return k > 0 ? ends[k - 1] : 0; }
  int end_of(int k) const { return k < end_count ? ends[k] : row_count; }
  int parts_of(int k) const { return (end_of(k) - begin_of(k) - 1) / kRowTilePartRows + 1; }
  struct Divided {
    int whole, rest;
  };
  Divided divided_by(int pieces, int number) const {
    const bool shifts = pieces == 1 << p.lane_bits;
    const int whole = shifts ? number >> p.lane_bits : number / pieces;
    return {whole, number - whole * pieces};
  }
  bool reaches_out(int k) const { return k == end_count || (k == 0 && begins_before); }

  // By all threads: serve(k, column, begin, end, rank, step, lanes, slot) for kVector columns of
  // segment k, and of its rows from `begin` to `end` from the `rank`-th on every `step`-th one;
  // where step > 1 the lanes `lanes` apart, up to a warp's, have the others. With kParts several
  // warps may have parts of its rows, each with a slot of its own; or slot is -1. Where these have
  // to meet, meet(k, column, slot, parts) is called for the first of their slots and one column,
  // after all.
  template <int kVector, Parts kParts, class Serve, class Meet>
  void share_out(const Serve& serve, const Meet& meet) const {
    struct Long {
      uint16_t segment;
      uint8_t part, slot;
    };
    __shared__ Long longs[kRowTileLongs];  // for whole warps, in no order
    __shared__ int long_count, slot_count;
    constexpr bool kSplits = kParts != Parts::none;
    const int thread = threadIdx.x, columns = static_cast<int>(p.columns);
    if (thread == 0) long_count = slot_count = 0;
    __syncthreads();
    const int pieces = columns / kVector;
    // Pieces are counted on, as a division for each would take longer.
    const auto [first_segment, first_piece] = divided_by(pieces, thread);
    const auto [segments_on, pieces_on] = divided_by(pieces, kThreads);
    int k = first_segment, piece = first_piece;
#pragma unroll 1
    while (k <= end_count) {
      const int begin = begin_of(k), end = end_of(k);
      if (end - begin <= kRowTileAloneRows) {
        serve(k, piece * kVector, begin, end, 0, 1, 0, -1);
      } else if (piece == 0) {
        const int parts = kSplits ? parts_of(k) : 1;
        const int at = atomicAdd(&long_count, parts);
        const int slot = parts > 1 && kParts == Parts::meet ? atomicAdd(&slot_count, parts) : 0;
        for (int i = 0; i < parts && at + i < kRowTileLongs; ++i) {
          longs[at + i] = {static_cast<uint16_t>(k), static_cast<uint8_t>(i),
                           static_cast<uint8_t>(slot + i)};
        }
      }
      k += segments_on;
      piece += pieces_on;
      if (piece >= pieces) {
        piece -= pieces;
        ++k;
      }
    }
    __syncthreads();
    constexpr int kWarps = kThreads / device::kWarpSize;
    const int warp = thread / device::kWarpSize, lane = thread % device::kWarpSize;
    const int bits = p.lane_bits < 5 ? p.lane_bits : 5, lanes = 1 << bits;
    const int widths = (pieces + lanes - 1) / lanes;  // of a row, a warp's
#pragma unroll 1
    for (int item = warp; item < long_count * widths; item += kWarps) {
      const Long mine = longs[item / widths];
      const int own = item % widths * lanes + (lane & (lanes - 1));
      int begin = begin_of(mine.segment), end = end_of(mine.segment);
      int slot = -1;
      if (kSplits && end - begin > kRowTilePartRows) {
        begin += mine.part * kRowTilePartRows;
        end = end - begin > kRowTilePartRows ? begin + kRowTilePartRows : end;
        slot = mine.slot;
      }
      if (own >= pieces) end = begin;
      serve(mine.segment, own * kVector, begin, end, lane >> bits, device::kWarpSize >> bits, lanes,
            slot);
    }
    if constexpr (kParts != Parts::meet) return;
    __syncthreads();
#pragma unroll 1
    for (int item = thread; item < long_count * columns; item += kThreads) {
      const Long first = longs[item / columns];
      const int parts = parts_of(first.segment);
      if (parts > 1 && first.part == 0) meet(first.segment, item % columns, first.slot, parts);
    }
  }

  // Stores the bytes from `from` to `stop` of the image where they belong in a tensor of T.
  template <class T>
  void store(const RowImage& image, void* tensor, int from, int stop) const {
    constexpr int kBytes = static_cast<int>(sizeof(T)), kElements = kPieceBytes / kBytes;
    T* const first = static_cast<T*>(tensor) + first_byte / kBytes;
#pragma unroll 4
    for (int at = (from & -kPieceBytes) + static_cast<int>(threadIdx.x) * kPieceBytes; at < stop;
         at += kThreads * kPieceBytes) {
      const auto values = image.load<Values<T, kElements>>(at);
      T* const to = first + at / kBytes;
      if (at >= from && at + kPieceBytes <= stop) {
        store_once(to, values);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int place = at + i * kBytes;
        if (place >= from && place < stop) to[i] = values.stored(i);
      }
    }
  }
};

// Adds `many` rows of a segment to the state of a run that has none, or those of them that are this
// lane's where step > 1, and then puts together what the lanes have. row_at(at) is what is read of
// the at-th, entry(row, i) what enters the state of column i; `nothing` is a row that changes no
// state. Places count from that of the first, `begin`.
template <class Op, int kAtOnce, class R, int kVector, class RowAt, class Row, class Entry>
void add_tile_rows(typename Op::State (&state)[kVector], const RowAt& row_at, const Row& nothing,
                   const Entry& entry, int begin, int many, int rank, int step, int lanes) {
  // Where places count, a lane's rows at once follow each other.
  const int first = Op::kPlaces ? rank * kAtOnce : rank, apart = Op::kPlaces ? 1 : step;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    state[i] = first < many ? begin_run<Op>(begin + first) : Op::start();
  }
  if constexpr (kAims<Op>) {
    // All lanes at one row, so that their states are put together without an exponential.
    if (many > 0) {
      const Row row = row_at(0);
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[i].shift = Op::aim_at(entry(row, i));
    }
  }
#pragma unroll 1
  for (int at = first; at < many; at += kAtOnce * step) {
    Row row[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      row[j] = nothing;
      if (at + j * apart < many) row[j] = row_at(at + j * apart);
    }
    if (add_rows<Op, R, kAtOnce>(
            state, [&](int i, int j) { return entry(row[j], i); }, begin + at)) {
      continue;
    }
#pragma unroll 1
    for (int j = 0; j < kAtOnce && at + j * apart < many; ++j) {
      const Row again = row_at(at + j * apart);
#pragma unroll
      for (int i = 0; i < kVector; ++i) Op::add(state[i], entry(again, i), begin + at + j);
    }
  }
  if (step > 1) {
#pragma unroll 1
    for (int other = lanes; other < device::kWarpSize; other *= 2) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) unite<Op>(state[i], shuffle_xor(state[i], other));
    }
  }
}

}  // namespace pullback::segment_cuda

// Constants of the segment kernels that the host plans with.
#pragma once

namespace pullback::segment_cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWalkerRows = 32;     // rows of one word of bits: a group of lanes walks some
inline constexpr int kProductRows = 8;     // the same in backward of prod, which keeps them
inline constexpr int kCheckBlocks = 1024;  // blocks that check the indices, at most
inline constexpr int kCheckAtOnce = 4;     // offsets of a thread that are on their way
inline constexpr int kSearchAtOnce = 8;    // the same where starts of tiles are searched for
// Whether the starts of tiles are found as segments are looked at (smxx_index.cuh): where a search
// takes three reads or more, and longer than to look.
constexpr bool starts_by_segments(long long segments, long long tiles) {
  return segments > 1000 && segments > tiles && segments < 64 * tiles;
}
inline constexpr int kProductColumns = 32;  // of a block that carries products from tile to tile

inline constexpr int kMostLaneBits = 8;  // a row takes the whole block

// Rows and segment ends of a tile whose rows take 2^lane_bits lanes.
constexpr int tile_items(int lane_bits, int walker_rows) {
  return (kThreads >> lane_bits) * walker_rows;
}
// Of maps, times as many at most, so that tiles of small pieces have as many bytes as those of 16.
constexpr int map_rounds(int piece_bytes) { return piece_bytes < 16 ? 16 / piece_bytes : 1; }
inline constexpr int kPrefetchBytes = 32 * 1024;  // of a tile's segments, in each tensor
inline constexpr int kLeastWalkerRows = 4;        // of maps, in tiles of small problems
inline constexpr int kRowTiles = 4;               // of smxx_row_tile.cuh, for a multiprocessor
inline constexpr int kMostWalkers = kThreads;
inline constexpr int kMostTileRows = 4096;  // what a tile can keep the ends of
// Rows of a lane that are read or on their way, batch by batch. Deep rings leave room for few
// blocks on a multiprocessor, and so for fewer states to put together, which pays where a row takes
// a warp.
inline constexpr int kBatchRows = 4;
inline constexpr int kRingRows = 2 * kBatchRows;
inline constexpr int kDeepRingRows = 4 * kBatchRows;
// Asynchronous copies to shared memory take longer where a warp's do not fill whole lines.
inline constexpr int kRingAlignment = 128;
// Shared memory of smxx_reduce_rows.cuh: pieces of rows or states, runs, ends of segments, rows of
// walkers.
constexpr int reduce_rows_bytes(int piece_bytes, int states_bytes, int run_bytes, int ring_rows) {
  const int ring = ring_rows * (piece_bytes < 4 ? 4 : piece_bytes);  // copies have 4 or more
  return kThreads * ((ring > states_bytes ? ring : states_bytes) + run_bytes) + kMostTileRows * 2 +
         kMostTileRows / 8 + kMostTileRows / 16 + kMostWalkers * 2 + 96 + kRingAlignment;
}
// Permuted rows in their own order: bytes of a row at most, as longer ones fill sectors in any
// order; pieces of a thread, whose reads are in flight together.
inline constexpr int kOwnOrderMostBytes = 64;
inline constexpr int kOwnOrderPieces = 4;
inline constexpr int kSnapRows = 16;     // Params::snap_rows of reductions
inline constexpr int kRowsEndItems = 4;  // rows that the end of a segment costs as much as
inline constexpr int kWalkerStep = 4;
constexpr int product_tile_items(int lane_bits) { return (kThreads >> lane_bits) * kProductRows; }
// D = 1: a lane takes this many consecutive rows, a warp 32 times as many, this many times; what is
// kept for each row of a tile fits into 48 KiB. Tiles begin on any row, lanes on multiples.
constexpr int column_rows(int kept_bytes) { return kept_bytes <= 8 ? 16 : 8; }
constexpr int column_rounds(int kept_bytes) { return kept_bytes <= 4 ? 2 : 1; }
constexpr int column_tile_items(int kept_bytes) {
  return column_rows(kept_bytes) * (kThreads * column_rounds(kept_bytes) - 1);
}

// Kernels that stream, by chunks (smxx_chunks.cuh).
inline constexpr int kStreamThreads = 128;
inline constexpr int kStreamWarps = kStreamThreads / 32;
inline constexpr int kLeastShare = 1024;  // rows and segment ends of a warp
// Of rows of a chunk, a lane's: 32 rows at most, each a bit of a word.
constexpr int chunk_lane_bytes(int element_bytes) { return element_bytes == 1 ? 32 : 64; }
constexpr int chunk_rows(int element_bytes) {
  return 32 * chunk_lane_bytes(element_bytes) / element_bytes;
}
// Rows that the end of a segment costs as much as, of maps and of reductions.
inline constexpr int kMapEndItems = 8;
inline constexpr int kReduceEndItems = 16;
// Groups of 32 segment ends that are read ahead: those of a chunk, mostly, and as registers allow;
// and those that are read at once where that was not enough.
constexpr int reduce_ahead(int element_bytes) { return element_bytes <= 2 ? 5 : 3; }
constexpr int map_ahead(int element_bytes, bool reads_mask) {
  return reads_mask ? 3 : element_bytes == 2 ? 6 : 4;
}
inline constexpr int kReduceMore = 2;
inline constexpr int kMapMore = 4;
// Reductions: chunks of a warp on their way, ends that are kept, and the shared memory of a block:
// chunks, a state for each row and one more a lane, a byte for each row, ends. Four blocks of the
// largest fill a multiprocessor of sm_90.
inline constexpr int kReduceChunks = 2;
inline constexpr int kReduceEnds = 320;
constexpr int reduce_chunks_bytes(int element_bytes, int state_bytes, int inputs) {
  const int rows = chunk_rows(element_bytes);
  return kStreamWarps * (inputs * kReduceChunks * 32 * chunk_lane_bytes(element_bytes) +
                         (rows + 32) * state_bytes + rows + kReduceEnds * 2);
}

// Reductions of narrow rows (smxx_reduce_narrow.cuh), by pieces of 16 bytes. Shared memory of a
// block: a plane has 16 bytes for each piece of a chunk; what is kept of it takes the place of its
// rows, and further planes; a byte for each row, ends. Three blocks fill a multiprocessor of sm_90,
// or two where 64 bytes are kept.
inline constexpr int kNarrowMostBytes = 128;  // of a row
inline constexpr int kNarrowEndItems = 8;     // rows that the end of a segment costs as much as
inline constexpr int kNarrowAhead = 2;        // groups of 32 segment ends that are read ahead
inline constexpr int kNarrowLaneRows = 8;     // of a chunk
inline constexpr int kNarrowEnds = 256;       // that are kept
inline constexpr int kNarrowPlaneBytes = 32 * 16 * kNarrowLaneRows;
// Bytes of the widest rows of a lane, so that their places differ by bits.
inline constexpr int kNarrowAlignment = kNarrowLaneRows * kNarrowMostBytes;
// Chunks of a warp, in use or on their way; no more than fit on devices with less shared memory.
constexpr int narrow_chunks(int kept_bytes) { return kept_bytes <= 32 ? 3 : 2; }
constexpr int narrow_bytes(int kept_bytes) {
  const int bytes = (narrow_chunks(kept_bytes) - 1 + kept_bytes / 16) * kNarrowPlaneBytes +
                    32 * kNarrowLaneRows + kNarrowEnds * 2;
  return kStreamWarps * ((bytes + kNarrowAlignment - 1) / kNarrowAlignment * kNarrowAlignment);
}

// Tiles that a block looks at for segments to combine.
constexpr int combine_tiles(int columns) { return columns == 1 ? kThreads : 32; }

// Sort of plan_permutation.
inline constexpr int kDigitBits = 8;
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kSortThreads = 256;
inline constexpr int kSortSumThreads = 1024;  // of the one block that sums the counts
inline constexpr int kSortRows = 16;          // rows of a thread
inline constexpr int kSortTile = kSortThreads * kSortRows;

}  // namespace pullback::segment_cuda

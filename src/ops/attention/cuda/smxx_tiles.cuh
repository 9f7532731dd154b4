// Who does what: from the number of a thread block, or of a tile, to the tile of queries, and from
// there to the tiles of keys.
#pragma once

#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/smxx_sequences.cuh"

namespace pullback::attention {

struct QueryTile {
  int32_t batch, head;
  int32_t owner;   // with a block mask: the number of its owner
  int64_t first;   // query, position within the sequence
  int64_t extent;  // of the sequence; rows from q_length on belong to none and are cleared
  Sequence sequence;
};

// Of a tile's `tile_rows` rows the first `valid` are queries, those up to `extent` are cleared.
struct TileRows {
  int valid, extent;

  TileRows(const QueryTile& tile, int tile_rows)
      : valid(clamped(tile.sequence.q_length - tile.first, tile_rows)),
        extent(clamped(tile.extent - tile.first, tile_rows)) {}

 private:
  static int clamped(int64_t rows, int most) {
    return rows < 0 ? 0 : rows < most ? static_cast<int>(rows) : most;
  }
};

// In a group of (batch, head) pairs the last tiles come first: a causal mask makes them the
// longest. Groups are as large as lets their keys and values stay in the second-level cache.
// kBlocks: there may be a block mask, whose owners tell the tile.
template <bool kBlocks>
bool find_query_tile(const Problem& p, int32_t tiles, int32_t pair_group, int rows,
                     QueryTile& result, uint32_t number = blockIdx.x) {
  const uint32_t pairs = static_cast<uint32_t>((p.sequences ? 1 : p.batch) * p.heads);
  const uint32_t group_blocks = static_cast<uint32_t>(tiles) * pair_group;
  const uint32_t group = number / group_blocks, within = number % group_blocks;
  const uint32_t first_pair = group * pair_group;
  const uint32_t left = pairs - first_pair;
  const uint32_t members = left < pair_group ? left : pair_group;
  const uint32_t pair = first_pair + within % members;
  int64_t tile = tiles - 1 - static_cast<int64_t>(within / members);
  result.head = static_cast<int32_t>(pair % p.heads);
  if (p.sequences == nullptr) {
    result.batch = static_cast<int32_t>(pair / p.heads);
    result.owner = static_cast<int32_t>(tile);
    if (kBlocks && p.blocks.given()) tile = p.blocks.owners[tile].tile;
    result.sequence = {0, p.query, 0, p.key};
    result.extent = p.query;
  } else {
    const int64_t item =
        sequence_of_tile(p.sequences, p.batch, &PackedSequence::first_q_tile, tile);
    if (item > p.batch) return false;
    const PackedSequence& packed = p.sequences[item];
    result.batch = static_cast<int32_t>(item);
    result.sequence = packed.rows;
    result.extent = packed.q_extent;
    tile = p.sequences[item + 1].first_q_tile - 1 - tile;
  }
  result.first = tile * rows;
  return true;
}

// The band mask of one sequence in 32 bits: query i sees the keys in [i + first, i + end), as far
// as there are keys.
struct SequenceBand {
  int32_t first, end, keys;

  SequenceBand() = default;
  SequenceBand(const Band& band, const Sequence& sequence)
      : first(saturated(diagonal(band, sequence) - band.left)),
        end(saturated(diagonal(band, sequence) + band.right + 1)),
        keys(static_cast<int32_t>(sequence.k_length)) {}

  int32_t first_key(int32_t query) const { return within(static_cast<int64_t>(query) + first); }
  int32_t end_key(int32_t query) const { return within(static_cast<int64_t>(query) + end); }

 private:
  static int32_t saturated(int64_t value) {
    constexpr int64_t kMost = 0x7fffffff;
    return static_cast<int32_t>(value < -kMost ? -kMost : value > kMost ? kMost : value);
  }
  int32_t within(int64_t key) const {
    return static_cast<int32_t>(key < 0 ? 0 : key > keys ? keys : key);
  }
};

// Neighbouring keys; empty: begin >= end.
struct KeySpan {
  int32_t begin = 0, end = 0;

  bool meets(int32_t key, int count) const { return key < end && key + count > begin; }
  bool covers(int32_t key, int count) const { return key >= begin && key + count <= end; }
};

// Keys that some, or all, of the queries [first, last] see.
inline KeySpan seen_by_some(const SequenceBand& band, int32_t first, int32_t last) {
  return {band.first_key(first), band.end_key(last)};
}
inline KeySpan seen_by_all(const SequenceBand& band, int32_t first, int32_t last) {
  return {band.first_key(last), band.end_key(first)};
}

// The tiles of keys that the queries [first, last] need, in the order of the work: first those that
// all of them see whole, then those at the edges of the band and of the sequence. What decides this
// is the mask, and only here. A tile is kParts parts of kPartKeys neighbouring keys; with a block
// mask these are those that the queries see, from anywhere, and none counts as whole.
template <int kPartKeys, int kParts>
struct KeyTiles {
  static constexpr int kNoKey = 0x3fffffff;  // of a part past the last one
  int32_t first = 0, count = 0, parts = 0;
  int32_t first_whole = 0, whole = 0;
  const SeenTile* listed = nullptr;  // the parts, with a block mask

  KeyTiles() = default;
  KeyTiles(const SequenceBand& band, int32_t first_query, int32_t last_query) {
    const KeySpan seen = seen_by_some(band, first_query, last_query);
    if (seen.begin >= seen.end) return;
    constexpr int kKeys = kPartKeys * kParts;
    first = seen.begin / kKeys;
    count = (seen.end + kKeys - 1) / kKeys - first;
    const KeySpan all = seen_by_all(band, first_query, last_query);
    first_whole = (all.begin + kKeys - 1) / kKeys;
    const int32_t end_whole = all.end / kKeys;
    whole = end_whole > first_whole ? end_whole - first_whole : 0;
  }
  // Of an owner's list of a batch item and head.
  KeyTiles(const SeenBlocksTable& blocks, int64_t batch, int64_t head, int64_t owner) {
    const int64_t* const at = blocks.first + blocks.plane(batch, head) * (blocks.lists + 1) + owner;
    listed = blocks.tiles + at[0];
    parts = static_cast<int32_t>(at[1] - at[0]);
    count = (parts + kParts - 1) / kParts;
  }
  // The first key of a part of the n-th tile.
  int32_t key(int32_t n, int part) const {
    const int32_t at = n * kParts + part;
    if (listed == nullptr) {
      int32_t tile = n < whole ? first_whole + n : first + n - whole;
      if (n >= whole && tile >= first_whole) tile += whole;
      return (tile * kParts + part) * kPartKeys;
    }
    return kParts == 1 || at < parts ? listed[at].tile * kPartKeys : kNoKey;
  }
  // Bit 8 · (16 keys) + (16 queries) of a part.
  uint32_t squares(int32_t n, int part) const {
    const int32_t at = n * kParts + part;
    if (listed == nullptr) return ~0u;
    return kParts == 1 || at < parts ? listed[at].squares : 0;
  }
};

}  // namespace pullback::attention

// Who does what: from the number of a thread block to its tile of queries, and from there to the
// tiles of keys.
#pragma once

#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/smxx_sequences.cuh"

namespace pullback::attention {

struct QueryTile {
  int64_t batch;
  int32_t head;
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
inline bool find_query_tile(const Problem& p, int32_t tiles, int32_t pair_group, int rows,
                            QueryTile& result) {
  const uint32_t pairs = static_cast<uint32_t>((p.sequences ? 1 : p.batch) * p.heads);
  const uint32_t group_blocks = static_cast<uint32_t>(tiles) * pair_group;
  const uint32_t group = blockIdx.x / group_blocks, within = blockIdx.x % group_blocks;
  const uint32_t first_pair = group * pair_group;
  const uint32_t left = pairs - first_pair;
  const uint32_t members = left < pair_group ? left : pair_group;
  const uint32_t pair = first_pair + within % members;
  int64_t tile = tiles - 1 - static_cast<int64_t>(within / members);
  result.head = static_cast<int32_t>(pair % p.heads);
  if (p.sequences == nullptr) {
    result.batch = pair / p.heads;
    result.sequence = {0, p.query, 0, p.key};
    result.extent = p.query;
  } else {
    const int64_t item =
        sequence_of_tile(p.sequences, p.batch, &PackedSequence::first_q_tile, tile);
    if (item > p.batch) return false;
    const PackedSequence& packed = p.sequences[item];
    result.batch = item;
    result.sequence = packed.rows;
    result.extent = packed.q_extent;
    tile = p.sequences[item + 1].first_q_tile - 1 - tile;
  }
  result.first = tile * rows;
  return true;
}

// The tiles of keys that a tile of queries needs, in the order of the work. What decides this is
// the mask, and only here.
template <int kKeys>
struct KeyTiles {
  int32_t first = 0, count = 0;
  const SeenTile* listed = nullptr;  // with a block mask

  KeyTiles() = default;
  // Queries [begin, end) of the sequence, at least one.
  KeyTiles(const Band& band, const Sequence& sequence, int64_t begin, int64_t end) {
    const int64_t first_key = visible_keys(band, sequence, begin).begin;
    const int64_t end_key = visible_keys(band, sequence, end - 1).end;
    if (first_key >= end_key) return;
    first = static_cast<int32_t>(first_key / kKeys);
    count = static_cast<int32_t>((end_key + kKeys - 1) / kKeys) - first;
  }
  // Tile `owner` of the queries of a batch item and head.
  KeyTiles(const SeenBlocksTable& blocks, int64_t batch, int64_t head, int64_t owner) {
    const int64_t* const at =
        blocks.first + blocks.plane(batch, head) * (blocks.owners + 1) + owner;
    listed = blocks.tiles + at[0];
    count = static_cast<int32_t>(at[1] - at[0]);
  }
  // The first key of the n-th tile.
  int32_t key(int32_t n) const { return (listed ? listed[n].tile : first + n) * kKeys; }
  // Bit 8 · (16 keys) + (16 queries) of the tiles.
  uint32_t squares(int32_t n) const { return listed ? listed[n].squares : ~0u; }
};

// What a few neighbouring queries see: all of them [all_begin, all_end), some of them [begin, end).
struct SeenKeys {
  int32_t begin = 0, end = 0, all_begin = 0, all_end = 0;

  SeenKeys() = default;
  SeenKeys(const Band& band, const Sequence& sequence, int64_t first, int64_t last) {
    const Range top = visible_keys(band, sequence, first);
    const Range bottom = visible_keys(band, sequence, last);
    begin = static_cast<int32_t>(top.begin);
    end = static_cast<int32_t>(bottom.end);
    all_begin = static_cast<int32_t>(bottom.begin);
    all_end = static_cast<int32_t>(top.end);
  }
  bool none(int32_t key, int keys) const { return key >= end || key + keys <= begin; }
  bool all(int32_t key, int keys) const { return key >= all_begin && key + keys <= all_end; }
};

}  // namespace pullback::attention

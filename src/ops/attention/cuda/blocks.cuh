// Which blocks of keys the queries see, as the kernels know it. Plain C++20; host and device
// compile it. A square is 16 queries by 16 keys; a block is a few of them.
#pragma once

#include "device/types.cuh"

namespace pullback::attention {

// One tile of keys for a tile of queries, or the other way round: that of the list, and the owner
// of the list. Bit 8 · s + o: square s of the tile sees square o of the owner.
struct alignas(16) SeenTile {
  int32_t tile;
  uint32_t squares;
  // Backward, owners are tiles of keys: the line of the tile of queries that this owner stands in,
  // and which of the line's `turns` it has.
  int32_t line;
  uint16_t turn, turns;
};

// An owner of lists, one for each plane: a tile, or a part of one. Where lists are long, several
// thread blocks (or clusters) share a tile: each owns a part of the lists, and they add up what
// they have in order.
struct alignas(16) SeenOwner {
  int32_t tile, part, parts;
  int32_t shared;  // its number among the tiles that several share
};

// Owners that add to a sum of d_q one after the other. Where many meet a tile of queries they stand
// in several lines, each with a sum of its own; at its end a line takes over the one before.
struct SeenLine {
  int32_t before, before_turns;  // that line, or -1, and how many turns it has
  int32_t last;                  // whether it is the tile's last line
};

// Half a square counts as one.
inline constexpr uint32_t all_squares(int tile, int owner) {
  uint32_t mask = 0;
  for (int s = 0; s < (tile + 15) / 16; ++s) mask |= ((1u << owner / 16) - 1) << 8 * s;
  return mask;
}

struct SeenBlocksTable {
  // [planes, R, row_words]: bit c % 32 of word c / 32 is block column c. Null: no block mask.
  const uint32_t* bits;
  const SeenTile* tiles;
  const int64_t* first;  // [planes, lists + 1]: where a list begins in `tiles`
  // [owner_count] in the order in which they begin; forward, from the end.
  const SeenOwner* owners;
  // Backward: [planes, lines] by number. The first line of a tile has the tile's number. Null: no
  // tile has more.
  const SeenLine* line_table;
  const int32_t* counts;  // backward: [planes, tiles of queries], how many tiles of keys they meet
  int64_t rows, row_words;
  int64_t lists;  // of a plane: one of each owner, or backward one for each block of its cluster
  int64_t query_tiles;
  int32_t owner_count, shared_count;  // shared: tiles that several owners share
  int32_t lines;                      // of a plane
  int32_t batch, head;                // planes between batch items and between heads, or 0
  uint32_t squares_magic;             // ⌈2^32 / (squares of a block's side)⌉, or 0 for one

  bool given() const { return bits != nullptr; }
  int64_t plane(int64_t b, int64_t h) const { return b * batch + h * head; }
  int64_t block_of(int64_t position) const {
    const uint32_t square = static_cast<uint32_t>(position / 16);
    return squares_magic == 0 ? square : (static_cast<uint64_t>(square) * squares_magic) >> 32;
  }
  bool sees(int64_t b, int64_t h, int64_t query, int64_t key) const {
    if (bits == nullptr) return true;
    const int64_t column = block_of(key);
    const int64_t row = plane(b, h) * rows + block_of(query);
    return (bits[row * row_words + column / 32] >> column % 32 & 1) != 0;
  }
};

}  // namespace pullback::attention

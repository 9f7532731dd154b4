#include "ops/attention/block_tables.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <span>
#include <utility>
#include <vector>

namespace pullback::attention {
namespace {

constexpr std::int64_t kSquare = 16;

// The order in which the owners, tiles of keys, go over their tiles of queries. They add to d_q of
// a tile in turns, by ascending keys (cuda/smxx_backward.cuh), and rarely wait if they come when
// the turn before is over. When that is, a simple play of the run tells: owners start in order, so
// many at a time, their blocks share the tiles, take a step for each, begin a turn in the middle of
// it and end it later. Of the tiles whose turn before has been over for a margin, as no run is like
// the play, they take the one that the nearest owner wants next; else the one that is over first.
// Waits can only be for owners that started before, so that no order can lock them.
void order_for_turns(std::span<SeenTile> tiles, std::span<const std::int64_t> first,
                     std::int64_t query_tiles, OwnersAtWork at_work) {
  const auto at = [](std::int64_t index) { return static_cast<std::size_t>(index); };
  constexpr std::int64_t kStep = 2, kTurn = 3, kMargin = 5;
  const std::int64_t blocks = at_work.blocks;
  const std::int64_t lists = static_cast<std::int64_t>(first.size()) - 1;
  // Of an owner's tile: the next owner that meets it.
  std::vector<std::int64_t> next(tiles.size()), last_owner(at(query_tiles), lists);
  for (std::int64_t list = lists - blocks; list >= 0; list -= blocks) {
    for (std::int64_t i = first[at(list)] - first[0]; i < first[at(list + blocks)] - first[0];
         ++i) {
      next[at(i)] = std::exchange(last_owner[at(tiles[at(i)].tile)], list);
    }
  }
  struct Choice {
    std::int64_t over, next;
    SeenTile tile;
  };
  const auto later = [](const Choice& a, const Choice& b) {
    return std::pair(a.next, a.tile.tile) > std::pair(b.next, b.tile.tile);
  };
  std::vector<std::int64_t> over(at(query_tiles), -kMargin), now(at(blocks)), to(at(blocks));
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free_at;
  for (int i = 0; i < at_work.owners; ++i) free_at.push(0);
  std::vector<Choice> own;
  for (std::int64_t list = 0; list < lists; list += blocks) {
    const std::int64_t begin = first[at(list)] - first[0],
                       end = first[at(list + blocks)] - first[0];
    own.clear();
    for (std::int64_t i = begin; i < end; ++i) {
      own.push_back({over[at(tiles[at(i)].tile)], next[at(i)], tiles[at(i)]});
    }
    std::ranges::stable_sort(own, {}, &Choice::over);
    std::priority_queue ready(later, std::vector<Choice>());
    std::fill(now.begin(), now.end(), free_at.top());
    free_at.pop();
    // The kernel begins at the end of a list.
    for (std::int64_t b = 0; b < blocks; ++b) to[at(b)] = first[at(list + b + 1)] - first[0];
    auto waiting = own.begin();
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t block = -1;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const bool room = to[at(b)] > first[at(list + b)] - first[0];
        if (room && (block < 0 || now[at(b)] < now[at(block)])) block = b;
      }
      std::int64_t& time = now[at(block)];
      while (waiting != own.end() && waiting->over + kMargin <= time + kStep / 2) {
        ready.push(*waiting++);
      }
      if (ready.empty()) ready.push(*waiting++);
      const SeenTile tile = ready.top().tile;
      ready.pop();
      const std::int64_t turn = std::max(time + kStep / 2, over[at(tile.tile)]);
      over[at(tile.tile)] = turn + kTurn;
      time = turn + kStep / 2;
      tiles[at(--to[at(block)])] = tile;
    }
    free_at.push(*std::ranges::max_element(now));
  }
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

BlockTables::BlockTables(const AttentionProblem& problem, const cuda::DeviceInfo& device, Pass pass,
                         int query_tile, int key_tile, OwnersAtWork at_work) {
  if (!problem.blocks.given()) return;
  const AttentionSizes sizes = sizes_of(problem);
  const BlockLayout& layout = *problem.blocks.layout;
  const std::int64_t planes = layout.heads(), batches = problem.blocks.batches;
  const std::int64_t block = problem.blocks.block, side = block / kSquare;
  const bool forward = pass == Pass::forward;
  const std::int64_t query_tiles = ceil_div(sizes.total_query, query_tile);
  const std::int64_t key_tiles = ceil_div(sizes.total_key, key_tile);
  const std::int64_t owner_tile = forward ? query_tile : key_tile;
  const std::int64_t listed_tile = forward ? key_tile : query_tile;
  const std::int64_t owners = forward ? query_tiles : key_tiles;
  const std::int64_t listed = forward ? key_tiles : query_tiles;
  const std::int64_t owner_length = forward ? sizes.total_query : sizes.total_key;
  const auto at = [](std::int64_t index) { return static_cast<std::size_t>(index); };

  const std::int64_t row_words = ceil_div(layout.columns(), 32);
  std::vector<std::uint32_t> bits(at(planes * layout.rows() * row_words), 0);
  for (const auto& entry : layout.blocks()) {
    bits[at((entry.head * layout.rows() + entry.row) * row_words + entry.column / 32)] |=
        1u << entry.column % 32;
  }

  std::vector<SeenTile> tiles;
  std::vector<std::int64_t> first;
  std::vector<std::int32_t> counts(at(forward ? 0 : planes * query_tiles), 0);
  std::vector<std::uint32_t> squares(at(listed), 0);
  const Sequence whole{0, sizes.total_query, 0, sizes.total_key};
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    const std::size_t plane_begin = tiles.size();
    for (std::int64_t owner = 0; owner < owners; ++owner) {
      std::int64_t list = static_cast<std::int64_t>(tiles.size());
      const std::int64_t begin = owner * owner_tile;
      const std::int64_t end = std::min(begin + owner_tile, owner_length);
      for (std::int64_t position = begin; position < end; position += kSquare) {
        const std::int64_t own = (position - begin) / kSquare;
        const auto blocks =
            forward ? layout.row(plane, position / block) : layout.column(plane, position / block);
        for (const auto& entry : blocks) {
          const std::int64_t square = (forward ? entry.column : entry.row) * side;
          for (std::int64_t s = square; s < square + side; ++s) {
            const std::int64_t tile = s * kSquare / listed_tile;
            if (tile < listed) {
              squares[at(tile)] |= 1u << (8 * (s * kSquare % listed_tile / kSquare) + own);
            }
          }
        }
      }
      // What the band hides from all of the owner is left out.
      const BandMask& mask = problem.mask;
      const Range seen = forward ? Range{visible_keys(mask, whole, begin).begin,
                                         visible_keys(mask, whole, end - 1).end}
                                 : Range{seeing_queries(mask, whole, begin).begin,
                                         seeing_queries(mask, whole, end - 1).end};
      for (std::int64_t tile = 0; tile < listed; ++tile) {
        const std::uint32_t found = std::exchange(squares[at(tile)], 0);
        if (found == 0 || tile * listed_tile >= seen.end ||
            (tile + 1) * listed_tile <= seen.begin) {
          continue;
        }
        const std::int32_t turn = forward ? 0 : counts[at(plane * query_tiles + tile)]++;
        tiles.push_back({static_cast<std::int32_t>(tile), found, turn, 0});
      }
      const std::int64_t count = static_cast<std::int64_t>(tiles.size()) - list;
      for (int part = 0; part < at_work.blocks; ++part) {
        first.push_back(list);
        list += ceil_div(count - part, at_work.blocks);
      }
    }
    first.push_back(static_cast<std::int64_t>(tiles.size()));
    if (forward) continue;
    for (std::size_t i = plane_begin; i < tiles.size(); ++i) {
      tiles[i].turns = counts[at(plane * query_tiles + tiles[i].tile)];
    }
    order_for_turns(std::span(tiles).subspan(plane_begin),
                    std::span(first).last(at(owners * at_work.blocks + 1)), query_tiles, at_work);
  }

  const std::int64_t heads = batches > 0 ? planes / batches : 0;
  table_ = {
      .bits = memory_.add(std::span<const std::uint32_t>(bits)),
      .tiles = memory_.add(std::span<const SeenTile>(tiles)),
      .first = memory_.add(std::span<const std::int64_t>(first)),
      .counts = memory_.add(std::span<const std::int32_t>(counts)),
      .rows = layout.rows(),
      .row_words = row_words,
      .lists = owners * at_work.blocks,
      .query_tiles = query_tiles,
      .batch = static_cast<std::int32_t>(batches > 1 ? heads : 0),
      .head = heads > 1 ? 1 : 0,
      .squares_magic =
          side == 1 ? 0 : static_cast<std::uint32_t>(((std::int64_t{1} << 32) + side - 1) / side)};
  // Not null even if nothing is seen.
  memory_.add(std::span<const std::uint32_t>(std::vector<std::uint32_t>(4)));
  memory_.upload(device);
  memory_.resolve(table_.bits);
  memory_.resolve(table_.tiles);
  memory_.resolve(table_.first);
  memory_.resolve(table_.counts);
}

}  // namespace pullback::attention

#include "ops/attention/block_tables.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <span>
#include <utility>
#include <vector>

namespace pullback::attention {
namespace {

constexpr std::int64_t kSquare = 16;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// Lists of tiles, one after the other: number i from first[i] on.
struct Lists {
  std::vector<SeenTile> tiles;
  std::vector<std::int64_t> first = {0};

  std::int64_t count() const { return static_cast<std::int64_t>(first.size()) - 1; }
  std::int64_t length(std::int64_t list) const { return first[at(list + 1)] - first[at(list)]; }
  void end() { first.push_back(static_cast<std::int64_t>(tiles.size())); }
};

// What is seen where: of a tile, the listed ones are those of the other side.
struct Sides {
  std::int64_t owners, owner_tile, owner_length;
  std::int64_t listed, listed_tile;
};

// For each plane and tile of the owners' side, the tiles that it meets, in ascending order.
Lists seen_tiles(const AttentionProblem& problem, Pass pass, const Sides& sides) {
  const AttentionSizes sizes = sizes_of(problem);
  const BlockLayout& layout = *problem.blocks.layout;
  const std::int64_t block = problem.blocks.block, side = block / kSquare;
  const bool forward = pass == Pass::forward;
  const BandMask& mask = problem.mask;
  const Sequence whole{0, sizes.total_query, 0, sizes.total_key};
  // Of a listed square: its tile, and where its bits are.
  const std::int64_t all = ceil_div(sides.listed * sides.listed_tile, kSquare);
  std::vector<std::int32_t> tile_of(at(all));
  std::vector<std::uint8_t> shift(at(all));
  for (std::int64_t s = 0; s < all; ++s) {
    tile_of[at(s)] = static_cast<std::int32_t>(s * kSquare / sides.listed_tile);
    shift[at(s)] = static_cast<std::uint8_t>(8 * (s * kSquare % sides.listed_tile / kSquare));
  }
  Lists lists;
  std::vector<std::uint32_t> squares(at(sides.listed), 0);
  for (std::int64_t plane = 0; plane < layout.heads(); ++plane) {
    for (std::int64_t owner = 0; owner < sides.owners; ++owner) {
      const std::int64_t begin = owner * sides.owner_tile;
      const std::int64_t end = std::min(begin + sides.owner_tile, sides.owner_length);
      std::int64_t low = sides.listed, high = 0;  // the tiles that it touches
      for (std::int64_t position = begin; position < end;) {
        const std::int64_t next = std::min(end, (position / block + 1) * block);
        std::uint32_t own = 0;
        for (; position < next; position += kSquare) own |= 1u << (position - begin) / kSquare;
        position = next;
        const std::int64_t row = (next - 1) / block;
        const auto blocks = forward ? layout.row(plane, row) : layout.column(plane, row);
        for (const auto& entry : blocks) {
          const std::int64_t first = (forward ? entry.column : entry.row) * side;
          const std::int64_t past = std::min(first + side, all);
          for (std::int64_t s = first; s < past; ++s) {
            squares[at(tile_of[at(s)])] |= own << shift[at(s)];
          }
          if (first >= past) continue;
          low = std::min<std::int64_t>(low, tile_of[at(first)]);
          high = std::max<std::int64_t>(high, tile_of[at(past - 1)] + 1);
        }
      }
      // What the band hides from all of the owner is left out.
      const Range seen = forward ? Range{visible_keys(mask, whole, begin).begin,
                                         visible_keys(mask, whole, end - 1).end}
                                 : Range{seeing_queries(mask, whole, begin).begin,
                                         seeing_queries(mask, whole, end - 1).end};
      for (std::int64_t tile = low; tile < high; ++tile) {
        const std::uint32_t found = std::exchange(squares[at(tile)], 0);
        if (found != 0 && tile * sides.listed_tile < seen.end &&
            (tile + 1) * sides.listed_tile > seen.begin) {
          lists.tiles.push_back({static_cast<std::int32_t>(tile), found, 0, 0, 0});
        }
      }
      lists.end();
    }
  }
  return lists;
}

// What is longer than `longest` is cut into pieces of about `piece`.
struct Cut {
  std::int64_t longest, piece;

  std::int64_t pieces(std::int64_t length) const {
    return length > longest ? ceil_div(length, piece) : 1;
  }
};

// The owners, in the order in which they begin: those with long lists first, so that none is alone
// at the end; several share lists that are too long in some plane.
std::vector<SeenOwner> plan_owners(const Lists& seen, std::int64_t tiles, const Cut& cut,
                                   bool forward) {
  std::vector<std::int64_t> most(at(tiles), 0);
  for (std::int64_t list = 0; list < seen.count(); ++list) {
    std::int64_t& length = most[at(list % tiles)];
    length = std::max(length, seen.length(list));
  }
  std::vector<SeenOwner> owners;
  std::int32_t shared = 0;
  for (std::int64_t i = 0; i < tiles; ++i) {
    const std::int64_t tile = forward ? tiles - 1 - i : i;
    const auto parts = static_cast<std::int32_t>(cut.pieces(most[at(tile)]));
    for (std::int32_t part = 0; part < parts; ++part) {
      owners.push_back({static_cast<std::int32_t>(tile), part, parts, shared});
    }
    shared += parts > 1;
  }
  std::ranges::stable_sort(owners, std::greater<>(), [&](const SeenOwner& owner) {
    return most[at(owner.tile)] / owner.parts;
  });
  return owners;
}

// The lists of a plane's owners, each cut into those of its blocks.
void add_lists(Lists& to, const Lists& seen, std::int64_t first_list,
               std::span<const SeenOwner> owners, int blocks) {
  for (const SeenOwner& owner : owners) {
    const std::int64_t list = first_list + owner.tile, length = seen.length(list);
    const auto begin = seen.tiles.begin() + seen.first[at(list)];
    const auto place = [&](std::int64_t part) { return begin + length * part / owner.parts; };
    const std::int64_t from = static_cast<std::int64_t>(to.tiles.size());
    to.tiles.insert(to.tiles.end(), place(owner.part), place(owner.part + 1));
    const std::int64_t count = static_cast<std::int64_t>(to.tiles.size()) - from;
    std::int64_t end = from;
    for (int block = 0; block < blocks; ++block) {
      end += ceil_div(count - block, blocks);
      to.first.push_back(end);
    }
  }
}

// Gives the tiles of a plane their lines and turns, in the order of the owners. The lines behind
// the tiles' first ones go to `more`.
void take_turns(std::span<SeenTile> tiles, std::span<std::int32_t> counts, const Cut& cut,
                std::vector<SeenLine>& more) {
  const auto query_tiles = static_cast<std::int64_t>(counts.size());
  // For now, its place among all that meet the tile.
  for (SeenTile& tile : tiles) tile.line = counts[at(tile.tile)]++;
  // Of a tile: the turns of a line, and the number of the second one.
  std::vector<std::int64_t> turns(counts.begin(), counts.end()), second(at(query_tiles));
  for (std::int64_t tile = 0; tile < query_tiles; ++tile) {
    const std::int64_t count = counts[at(tile)], lines = cut.pieces(count);
    if (lines == 1) continue;
    turns[at(tile)] = ceil_div(count, lines);
    second[at(tile)] = query_tiles + static_cast<std::int64_t>(more.size());
    for (std::int64_t line = 1; line * turns[at(tile)] < count; ++line) {
      const std::int64_t before = line == 1 ? tile : second[at(tile)] + line - 2;
      more.push_back({static_cast<std::int32_t>(before), static_cast<std::int32_t>(turns[at(tile)]),
                      (line + 1) * turns[at(tile)] >= count});
    }
  }
  for (SeenTile& tile : tiles) {
    const std::int64_t each = turns[at(tile.tile)], line = tile.line / each;
    const std::int64_t turn = tile.line % each, left = counts[at(tile.tile)] - line * each;
    tile.line = static_cast<std::int32_t>(line == 0 ? tile.tile : second[at(tile.tile)] + line - 1);
    tile.turn = static_cast<std::uint16_t>(turn);
    tile.turns = static_cast<std::uint16_t>(std::min(each, left));
  }
}

// The order in which the owners, tiles of keys, go over their tiles of queries. They add to d_q of
// a tile in turns, in their own order (cuda/smxx_backward.cuh), and rarely wait if they come when
// the turn before is over. When that is, a simple play of the run tells: owners start in order, so
// many at a time, their blocks share the tiles, take a step for each, begin a turn in the middle of
// it and end it later. Of the tiles whose turn before has been over for a margin, as no run is like
// the play, they take the one that the nearest owner wants next; else the one that is over first.
// Waits can only be for owners that started before, so that no order can lock them.
void order_for_turns(std::span<SeenTile> tiles, std::span<const std::int64_t> first,
                     std::int64_t lines, OwnersAtWork at_work) {
  constexpr std::int64_t kStep = 2, kTurn = 3, kMargin = 5;
  const std::int64_t blocks = at_work.blocks;
  const std::int64_t lists = static_cast<std::int64_t>(first.size()) - 1;
  // Of an owner's tile: the next owner that meets it.
  std::vector<std::int64_t> next(tiles.size()), last_owner(at(lines), lists);
  for (std::int64_t list = lists - blocks; list >= 0; list -= blocks) {
    for (std::int64_t i = first[at(list)] - first[0]; i < first[at(list + blocks)] - first[0];
         ++i) {
      next[at(i)] = std::exchange(last_owner[at(tiles[at(i)].line)], list);
    }
  }
  struct Choice {
    std::int64_t over, next;
    SeenTile tile;
  };
  const auto later = [](const Choice& a, const Choice& b) {
    return std::pair(a.next, a.tile.tile) > std::pair(b.next, b.tile.tile);
  };
  std::vector<std::int64_t> over(at(lines), -kMargin), now(at(blocks)), to(at(blocks));
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free_at;
  for (int i = 0; i < at_work.owners; ++i) free_at.push(0);
  std::vector<Choice> own;
  for (std::int64_t list = 0; list < lists; list += blocks) {
    const std::int64_t begin = first[at(list)] - first[0],
                       end = first[at(list + blocks)] - first[0];
    own.clear();
    for (std::int64_t i = begin; i < end; ++i) {
      own.push_back({over[at(tiles[at(i)].line)], next[at(i)], tiles[at(i)]});
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
      const std::int64_t turn = std::max(time + kStep / 2, over[at(tile.line)]);
      over[at(tile.line)] = turn + kTurn;
      time = turn + kStep / 2;
      tiles[at(--to[at(block)])] = tile;
    }
    free_at.push(*std::ranges::max_element(now));
  }
}

}  // namespace

bool prefers_pairs(const AttentionProblem& problem) {
  constexpr std::int64_t kTile = 64;
  constexpr std::int64_t kLeastKeys = 16;  // tiles of a tile of queries; shorter lists fill nothing
  if (problem.blocks.block >= 2 * kTile) return true;
  const AttentionSizes sizes = sizes_of(problem);
  const std::int64_t tiles = ceil_div(sizes.total_query, kTile);
  const Lists seen =
      seen_tiles(problem, Pass::forward,
                 {tiles, kTile, sizes.total_query, ceil_div(sizes.total_key, kTile), kTile});
  const auto total = static_cast<std::int64_t>(seen.tiles.size());
  if (total < kLeastKeys * seen.count()) return false;
  std::int64_t common = 0;
  const auto list = [&](std::int64_t i) {
    return std::span(seen.tiles).subspan(at(seen.first[at(i)]), at(seen.length(i)));
  };
  for (std::int64_t i = 0; i + 1 < seen.count(); ++i) {
    if (i % tiles % 2 != 0 || i % tiles + 1 == tiles) continue;
    const auto one = list(i), other = list(i + 1);
    for (std::size_t a = 0, b = 0; a < one.size() && b < other.size();) {
      const std::int32_t difference = one[a].tile - other[b].tile;
      common += difference == 0;
      a += difference <= 0;
      b += difference >= 0;
    }
  }
  // As measured on Hopper: half of them if neighbours see the same.
  return common * 5 > total * 2;
}

BlockLists block_lists(const AttentionProblem& problem, Pass pass, int query_tile, int key_tile,
                       const OwnersAtWork& at_work) {
  const AttentionSizes sizes = sizes_of(problem);
  const std::int64_t planes = problem.blocks.layout->heads();
  const bool forward = pass == Pass::forward, turns = !forward && at_work.owners > 0;
  const std::int64_t query_tiles = ceil_div(sizes.total_query, query_tile);
  const std::int64_t key_tiles = ceil_div(sizes.total_key, key_tile);
  const Sides sides = forward
                          ? Sides{query_tiles, query_tile, sizes.total_query, key_tiles, key_tile}
                          : Sides{key_tiles, key_tile, sizes.total_key, query_tiles, query_tile};

  const Lists seen = seen_tiles(problem, pass, sides);
  // Lists and lines are cut that take about as long as all the work would if it were shared evenly;
  // a turn takes a step and a half. How much longer, and into what pieces, is as measured.
  constexpr std::int64_t kMostTurns = 32768;  // of 16 bits, with room
  Cut list_cut{std::numeric_limits<std::int64_t>::max(), 1}, line_cut{kMostTurns, kMostTurns};
  if (at_work.everywhere > 0) {
    const std::int64_t heads =
        ceil_div(sizes.batch * sizes.heads, std::max<std::int64_t>(planes, 1));
    const std::int64_t work = static_cast<std::int64_t>(seen.tiles.size()) * heads;
    const std::int64_t each = ceil_div(work, at_work.everywhere), steps = each / at_work.blocks;
    const std::int64_t of_head = each / (forward ? 1 : sizes.group);
    list_cut = {std::max<std::int64_t>(of_head * (turns ? 3 : 7) / 4, 20),
                std::max<std::int64_t>(of_head / 2, 16)};
    line_cut = {std::clamp<std::int64_t>(steps * 4 / 3, 16, kMostTurns),
                std::clamp<std::int64_t>(steps / 4, 12, kMostTurns)};
  }
  BlockLists result;
  result.query_tiles = query_tiles;
  result.owners = plan_owners(seen, sides.owners, list_cut, forward);

  Lists lists;
  lists.first.clear();
  result.counts.resize(at(turns ? planes * query_tiles : 0), 0);
  std::vector<std::vector<SeenLine>> more(at(planes));
  // Forward, the grid begins with the last number.
  if (forward) std::ranges::reverse(result.owners);
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    const std::size_t begin = lists.tiles.size(), first = lists.first.size();
    lists.first.push_back(static_cast<std::int64_t>(begin));
    add_lists(lists, seen, plane * sides.owners, result.owners, at_work.blocks);
    if (!turns) continue;
    const auto own = std::span(lists.tiles).subspan(begin);
    take_turns(own, std::span(result.counts).subspan(at(plane * query_tiles), at(query_tiles)),
               line_cut, more[at(plane)]);
    order_for_turns(own, std::span(lists.first).subspan(first),
                    query_tiles + static_cast<std::int64_t>(more[at(plane)].size()), at_work);
  }
  std::size_t most_lines = 0;
  for (const auto& lines : more) most_lines = std::max(most_lines, lines.size());
  const std::int64_t plane_lines = query_tiles + static_cast<std::int64_t>(most_lines);
  std::vector<SeenLine>& lines = result.line_table;
  for (std::int64_t plane = 0; most_lines > 0 && plane < planes; ++plane) {
    lines.resize(at(plane * plane_lines + query_tiles), {-1, 0, 1});
    lines.insert(lines.end(), more[at(plane)].begin(), more[at(plane)].end());
    lines.resize(at((plane + 1) * plane_lines));
    // Those that have a line behind them are not the last ones.
    const auto own = std::span(lines).subspan(at(plane * plane_lines));
    for (const SeenLine& line : more[at(plane)]) own[at(line.before)].last = 0;
  }
  result.lines = static_cast<std::int32_t>(plane_lines);
  for (const SeenOwner& owner : result.owners) {
    if (owner.parts > 1) result.shared_count = std::max(result.shared_count, owner.shared + 1);
  }
  result.tiles = std::move(lists.tiles);
  result.first = std::move(lists.first);
  return result;
}

BlockTables::BlockTables(const AttentionProblem& problem, const cuda::DeviceInfo& device, Pass pass,
                         int query_tile, int key_tile, OwnersAtWork at_work) {
  if (!problem.blocks.given()) return;
  const BlockLayout& layout = *problem.blocks.layout;
  const std::int64_t planes = layout.heads(), batches = problem.blocks.batches;
  const std::int64_t side = problem.blocks.block / kSquare;
  const std::int64_t row_words = ceil_div(layout.columns(), 32);
  std::vector<std::uint32_t> bits(at(planes * layout.rows() * row_words), 0);
  for (const auto& entry : layout.blocks()) {
    bits[at((entry.head * layout.rows() + entry.row) * row_words + entry.column / 32)] |=
        1u << entry.column % 32;
  }
  const BlockLists lists = block_lists(problem, pass, query_tile, key_tile, at_work);

  const std::int64_t heads = batches > 0 ? planes / batches : 0;
  table_ = {
      .bits = memory_.add(std::span<const std::uint32_t>(bits)),
      .tiles = memory_.add(std::span<const SeenTile>(lists.tiles)),
      .first = memory_.add(std::span<const std::int64_t>(lists.first)),
      .owners = memory_.add(std::span<const SeenOwner>(lists.owners)),
      .line_table = memory_.add(std::span<const SeenLine>(lists.line_table)),
      .counts = memory_.add(std::span<const std::int32_t>(lists.counts)),
      .rows = layout.rows(),
      .row_words = row_words,
      .lists = static_cast<std::int64_t>(lists.owners.size()) * at_work.blocks,
      .query_tiles = lists.query_tiles,
      .owner_count = static_cast<std::int32_t>(lists.owners.size()),
      .shared_count = lists.shared_count,
      .lines = lists.lines,
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
  memory_.resolve(table_.owners);
  memory_.resolve(table_.line_table);
  memory_.resolve(table_.counts);
  if (lists.line_table.empty()) table_.line_table = nullptr;
}

}  // namespace pullback::attention

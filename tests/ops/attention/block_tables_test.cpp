// What plans tell GPUs of block masks: that all pairs which see each other have one owner, and that
// owners wait for such alone as began before them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "driver/random.hpp"
#include "ops/attention/block_tables.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::attention {
namespace {

struct Tables {
  std::string name;
  std::shared_ptr<const BlockLayout> layout;
  std::int64_t block, query, key, heads, kv_heads;
  BandMask mask;
};

AttentionProblem problem_of(const Tables& tables) {
  AttentionProblem problem;
  const auto rows = [](std::int64_t length, std::int64_t heads) {
    return TensorSpec::contiguous(DType::bf16, {1, length, heads, 16});
  };
  problem.q = problem.out = rows(tables.query, tables.heads);
  problem.k = problem.v = rows(tables.key, tables.kv_heads);
  problem.mask = tables.mask;
  problem.blocks.layout = tables.layout;
  problem.blocks.block = tables.block;
  return problem;
}

std::shared_ptr<const BlockLayout> random_layout(std::int64_t heads, std::int64_t rows,
                                                 std::int64_t columns, double density,
                                                 std::int64_t global) {
  driver::Random random(7);
  std::vector<std::uint8_t> present;
  for (std::int64_t i = 0; i < heads * rows * columns; ++i) {
    const bool all = global > 0 && (i % columns % global == 1 || i / columns % rows % global == 1);
    present.push_back(all || random.chance(density));
  }
  return std::make_shared<const BlockLayout>(heads, rows, columns, present);
}

std::vector<Tables> all_tables() {
  const auto shared = [](BlockLayout layout) {
    return std::make_shared<const BlockLayout>(std::move(layout));
  };
  const BandMask none, causal = BandMask::causal(Corner::bottom_right);
  return {
      {"random", random_layout(4, 40, 40, 0.25, 0), 64, 2560, 2560, 4, 4, none},
      {"global", random_layout(4, 40, 70, 0.03, 19), 32, 1270, 2233, 4, 2, none},
      {"global, causal", random_layout(1, 60, 60, 0.05, 25), 64, 3800, 3840, 4, 1, causal},
      {"all", random_layout(1, 70, 70, 1, 0), 64, 4480, 4480, 1, 1, none},
      {"none", random_layout(2, 5, 5, 0, 0), 64, 300, 320, 2, 2, none},
      {"small blocks", random_layout(2, 99, 80, 0.1, 30), 16, 1584, 1275, 2, 2, none},
      {"blocks of 48", random_layout(2, 30, 33, 0.1, 9), 48, 1440, 1570, 2, 2, none},
      {"BigBird",
       shared(make_layout(BigBirdSparsity{.num_heads = 2,
                                          .block = 64,
                                          .different_layout_per_head = true,
                                          .num_random_blocks = 3},
                          8192)),
       64, 8192, 8192, 2, 2, none},
      {"Fixed", shared(make_layout(FixedSparsity{.block = 128}, 8192)), 128, 8192, 8192, 2, 1,
       none},
  };
}

// Tiles of the listed side have 64 positions at most: the bits of SeenTile.
void for_all(Pass pass, const std::function<void(const Tables&, const AttentionProblem&, int, int,
                                                 const OwnersAtWork&)>& check) {
  for (const Tables& tables : all_tables()) {
    const AttentionProblem problem = problem_of(tables);
    for (const auto& [owner_tile, listed_tile] : {std::pair(64, 64), {128, 64}, {128, 32}}) {
      for (const OwnersAtWork& at_work :
           {OwnersAtWork{}, OwnersAtWork{66, 2, 132}, OwnersAtWork{264, 1, 528},
            OwnersAtWork{2, 2, 4}, OwnersAtWork{0, 1, 264}}) {
        const bool forward = pass == Pass::forward;
        if (forward && at_work.blocks > 1) continue;
        SCOPED_TRACE(fmt::format("{}, tiles of {} and {}, {} owners of {} blocks", tables.name,
                                 owner_tile, listed_tile, at_work.everywhere, at_work.blocks));
        check(tables, problem, forward ? owner_tile : listed_tile,
              forward ? listed_tile : owner_tile, at_work);
      }
    }
  }
}

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// The squares of 16 that see each other, from the layout; by plane, tile of queries and of keys.
std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::set<std::pair<int, int>>>
seen_squares(const Tables& tables, const AttentionProblem& problem, int query_tile, int key_tile) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::set<std::pair<int, int>>>
      seen;
  const Sequence whole{0, tables.query, 0, tables.key};
  for (const auto& entry : tables.layout->blocks()) {
    for (std::int64_t row = entry.row * tables.block; row < (entry.row + 1) * tables.block;
         row += 16) {
      for (std::int64_t key = entry.column * tables.block; key < (entry.column + 1) * tables.block;
           key += 16) {
        bool visible = false;
        for (std::int64_t i = row; i < std::min(row + 16, tables.query); ++i) {
          const Range range = visible_keys(problem.mask, whole, i);
          visible |= range.begin < std::min(key + 16, tables.key) && range.end > key;
        }
        if (visible) {
          seen[{entry.head, row / query_tile, key / key_tile}].insert(
              {static_cast<int>(row % query_tile / 16), static_cast<int>(key % key_tile / 16)});
        }
      }
    }
  }
  return seen;
}

TEST(attention_block_tables, what_sees_each_other_has_one_owner) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for_all(pass, [&](const Tables& tables, const AttentionProblem& problem, int query_tile,
                      int key_tile, const OwnersAtWork& at_work) {
      const bool forward = pass == Pass::forward;
      const BlockLists lists = block_lists(problem, pass, query_tile, key_tile, at_work);
      auto expected = seen_squares(tables, problem, query_tile, key_tile);
      std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> found;
      const auto count = static_cast<std::int64_t>(lists.owners.size()) * at_work.blocks;
      ASSERT_EQ(static_cast<std::int64_t>(lists.first.size()),
                tables.layout->heads() * (count + 1));
      for (std::int64_t plane = 0; plane < tables.layout->heads(); ++plane) {
        for (std::int64_t list = 0; list < count; ++list) {
          const std::int64_t own = lists.owners[at(list / at_work.blocks)].tile;
          const std::int64_t* const first = &lists.first[at(plane * (count + 1) + list)];
          for (std::int64_t i = first[0]; i < first[1]; ++i) {
            const SeenTile& tile = lists.tiles[at(i)];
            const std::int64_t query = forward ? own : tile.tile, key = forward ? tile.tile : own;
            ASSERT_TRUE(found.insert({plane, query, key}).second);
            for (int bit = 0; bit < 32; ++bit) {
              if ((tile.squares >> bit & 1) == 0) continue;
              const int listed = bit / 8 * 16, owned = bit % 8 * 16;
              ASSERT_TRUE(tables.layout->present(
                  plane, (query * query_tile + (forward ? owned : listed)) / tables.block,
                  (key * key_tile + (forward ? listed : owned)) / tables.block));
            }
            const auto node = expected.extract({plane, query, key});
            if (node.empty()) {  // or of pairs that the band hides
              ASSERT_NE(tables.mask.right, BandMask::kUnbounded);
              continue;
            }
            for (const auto& [row, column] : node.mapped()) {
              const int bit = 8 * (forward ? column : row) + (forward ? row : column);
              ASSERT_TRUE(tile.squares >> bit & 1);
            }
          }
        }
      }
      EXPECT_TRUE(expected.empty());
    });
  }
}

TEST(attention_block_tables, parts_of_a_tile_begin_in_order) {
  int shared = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for_all(pass, [&](const Tables&, const AttentionProblem& problem, int query_tile, int key_tile,
                      const OwnersAtWork& at_work) {
      BlockLists lists = block_lists(problem, pass, query_tile, key_tile, at_work);
      if (pass == Pass::forward) std::ranges::reverse(lists.owners);
      std::map<std::int32_t, std::int32_t> next;       // part, by tile
      std::map<std::int32_t, std::int32_t> tile_with;  // by number among those shared
      for (const SeenOwner& owner : lists.owners) {
        ASSERT_EQ(owner.part, next[owner.tile]++);
        ASSERT_LT(owner.part, owner.parts);
        if (owner.parts == 1) continue;
        ASSERT_LT(owner.shared, lists.shared_count);
        ASSERT_EQ(tile_with.try_emplace(owner.shared, owner.tile).first->second, owner.tile);
        ++shared;
      }
      for (const SeenOwner& owner : lists.owners) ASSERT_EQ(next[owner.tile], owner.parts);
      ASSERT_EQ(static_cast<std::int32_t>(tile_with.size()), lists.shared_count);
    });
  }
  EXPECT_GT(shared, 100);
}

TEST(attention_block_tables, owners_wait_for_those_before_alone) {
  int several = 0;
  for_all(Pass::backward, [&](const Tables& tables, const AttentionProblem& problem, int query_tile,
                              int key_tile, const OwnersAtWork& at_work) {
    if (at_work.owners == 0) return;  // nor do these wait
    const BlockLists lists = block_lists(problem, Pass::backward, query_tile, key_tile, at_work);
    const auto count = static_cast<std::int64_t>(lists.owners.size()) * at_work.blocks;
    for (std::int64_t plane = 0; plane < tables.layout->heads(); ++plane) {
      const auto line_of = [&](std::int64_t line) {
        return lists.line_table.empty() ? SeenLine{-1, 0, 1}
                                        : lists.line_table[at(plane * lists.lines + line)];
      };
      // One owner after the other: every turn is there when it is wanted.
      std::vector<int> turns(at(lists.lines), 0), written(at(lists.query_tiles), 0);
      for (std::int64_t list = 0; list < count; ++list) {
        const std::int64_t* const first = &lists.first[at(plane * (count + 1) + list)];
        for (std::int64_t i = first[1] - 1; i >= first[0]; --i) {
          const SeenTile& tile = lists.tiles[at(i)];
          ASSERT_LT(tile.line, lists.lines);
          ASSERT_EQ(tile.turn, turns[at(tile.line)]++);
          ASSERT_LT(tile.turn, tile.turns);
          if (tile.turn + 1 < tile.turns) continue;
          const SeenLine line = line_of(tile.line);
          if (line.before >= 0) {
            ++several;
            ASSERT_EQ(turns[at(line.before)], line.before_turns);
            ASSERT_FALSE(line_of(line.before).last);
          } else {
            ASSERT_EQ(tile.line, tile.tile);
          }
          written[at(tile.tile)] += line.last;
        }
      }
      for (std::int64_t tile = 0; tile < lists.query_tiles; ++tile) {
        const bool met = lists.counts[at(plane * lists.query_tiles + tile)] > 0;
        ASSERT_EQ(written[at(tile)], met ? 1 : 0);
      }
    }
  });
  EXPECT_GT(several, 100);
}

}  // namespace
}  // namespace pullback::attention

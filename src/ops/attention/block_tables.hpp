// A block mask as tables on a device, made when a plan is.
#pragma once

#include <vector>

#include "cuda/device_tables.hpp"
#include "ops/attention/cuda/blocks.cuh"
#include "ops/attention/problem.hpp"

namespace pullback::attention {

struct OwnersAtWork {
  // Backward, where owners add to sums of d_q in turns: how many of a plane work side by side, and
  // with how many blocks each, which share the tiles of its list. 0 owners: there are no turns.
  int owners = 1, blocks = 1;
  // How many of all planes do: several share what takes as long as all the work would if it were
  // shared evenly. 0: nothing is shared.
  std::int64_t everywhere = 0;
};

// What SeenBlocksTable says, but for its bits.
struct BlockLists {
  std::vector<SeenTile> tiles;
  std::vector<std::int64_t> first;
  std::vector<SeenOwner> owners;
  std::vector<SeenLine> line_table;  // empty: no tile has more than one line
  std::vector<std::int32_t> counts;
  std::int64_t query_tiles = 0;
  std::int32_t shared_count = 0, lines = 0;
};

// Forward, for a kernel that takes tiles of 64 queries or of 128: whether neighbours see so much,
// and so much the same, that two of 64 had better be one.
bool prefers_pairs(const AttentionProblem& problem);

BlockLists block_lists(const AttentionProblem& problem, Pass pass, int query_tile, int key_tile,
                       const OwnersAtWork& at_work);

class BlockTables {
 public:
  // The owners of lists are tiles of queries in the forward pass, and tiles of keys backward.
  BlockTables(const AttentionProblem& problem, const cuda::DeviceInfo& device, Pass pass,
              int query_tile, int key_tile, OwnersAtWork at_work = {});

  // All null without a block mask.
  const SeenBlocksTable& get() const { return table_; }

 private:
  SeenBlocksTable table_{};
  cuda::DeviceTables memory_;
};

}  // namespace pullback::attention

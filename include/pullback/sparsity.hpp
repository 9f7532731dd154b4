// The sparsity layouts of block-sparse attention, as pure functions from parameters to BlockLayout.
//
// The patterns and the parameters' names are those of the DeepSpeed configurations that models were
// trained with; BigBird (Zaheer et al. 2020), Longformer (Beltagy et al. 2020) and Sparse
// Transformers (Child et al. 2019) are the papers behind them. (r, c) below is block row r
// (queries) and block column c (keys); nb = seq_len / block, and every layout is [num_heads, nb,
// nb].
//
// "Unidirectional" acts on whole blocks: no block lies above the diagonal, and the blocks on it are
// full, so exact causality also needs an element mask in block_softmax.
//
// A layout for a shorter sequence is built for that length, not cut out of a longer one.
// Bad parameters throw Error.
#pragma once

#include <cstdint>
#include <vector>

#include "pullback/block_sparse.hpp"
#include "pullback/export.hpp"

namespace pullback {

enum class SparsityDirection { bidirectional, unidirectional };

// With different_layout_per_head false every head has the layout of head 0. Layouts in which heads
// could not differ have no such parameter.

// Every block.
struct DenseSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
};

// Windows of num_local_blocks see themselves; of each window, num_global_blocks are seen by all
// rows (unidirectional: by the rows from there on), and with horizontal_global_attention see all
// columns. The global blocks are the window's last ones; with num_different_global_patterns P > 1,
// head h takes the group (h mod P) further to the front. A last window that is short has its global
// blocks at the same place, or at its end when it is too short for that.
struct FixedSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
  bool different_layout_per_head = false;
  std::int64_t num_local_blocks = 4;
  std::int64_t num_global_blocks = 1;  // divides num_local_blocks
  SparsityDirection attention = SparsityDirection::bidirectional;
  bool horizontal_global_attention = false;        // bidirectional only
  std::int64_t num_different_global_patterns = 1;  // above 1: different_layout_per_head only
  // False: as DeepSpeed leaves them, unidirectional layouts with num_global_blocks > 1 have blocks
  // above the diagonal (the columns of a global group are set from the group's first row on).
  bool trim_above_diagonal = true;
};

// Consecutive local windows of the listed sizes (the last size repeats), global blocks by index or
// by range, and num_random_blocks distinct blocks in each row.
// Global indices past nb are skipped, ranges are cut at nb.
struct VariableSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
  bool different_layout_per_head = false;
  std::int64_t num_random_blocks = 0;  // <= nb; a unidirectional row has at most r + 1
  std::vector<std::int64_t> local_window_blocks = {4};
  std::vector<std::int64_t> global_block_indices = {0};
  std::vector<std::int64_t> global_block_end_indices = {};  // empty: each index is one block
  SparsityDirection attention = SparsityDirection::bidirectional;
  bool horizontal_global_attention = false;  // bidirectional only
  std::uint64_t seed = 0;                    // of the random blocks
  // False: as DeepSpeed leaves them, unidirectional layouts have blocks above the diagonal: global
  // ranges are set as rectangles, random blocks are drawn from all nb columns.
  bool trim_above_diagonal = true;
};

// num_random_blocks distinct blocks in each row, a window of num_sliding_window_blocks around the
// diagonal, the first num_global_blocks rows and columns full. The window reaches
// num_sliding_window_blocks / 2 blocks to either side, so an even number gives one block more.
// Each count must be at most nb. Unidirectional rows draw from columns 0 to r, all r + 1 of them
// when more are asked for (DeepSpeed fails there).
struct BigBirdSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
  bool different_layout_per_head = false;
  std::int64_t num_random_blocks = 1;
  std::int64_t num_sliding_window_blocks = 3;
  std::int64_t num_global_blocks = 1;
  SparsityDirection attention = SparsityDirection::bidirectional;
  std::uint64_t seed = 0;
};

// The window of BigBird, and global blocks (indices or ranges as in Variable) whose rows and
// columns are full.
struct BSLongformerSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
  std::int64_t num_sliding_window_blocks = 3;  // <= nb
  std::vector<std::int64_t> global_block_indices = {0};
  std::vector<std::int64_t> global_block_end_indices = {};
  SparsityDirection attention = SparsityDirection::bidirectional;
};

// The window alone. Unidirectional, its half before the diagonal and the diagonal.
struct LocalSlidingWindowSparsity {
  std::int64_t num_heads = 1;
  std::int64_t block = 16;
  std::int64_t num_sliding_window_blocks = 3;  // <= nb
  SparsityDirection attention = SparsityDirection::unidirectional;
};

// seq_len counts tokens and is a multiple of the block, which is 16 to 128 and a multiple of 16.
// Random blocks depend on the seed, head, row and number of columns to draw from, and on nothing
// else: not on the machine, the other parameters, or earlier calls. Heads that share one layout get
// that of head 0.
PULLBACK_API BlockLayout make_layout(const DenseSparsity& sparsity, std::int64_t seq_len);
PULLBACK_API BlockLayout make_layout(const FixedSparsity& sparsity, std::int64_t seq_len);
PULLBACK_API BlockLayout make_layout(const VariableSparsity& sparsity, std::int64_t seq_len);
PULLBACK_API BlockLayout make_layout(const BigBirdSparsity& sparsity, std::int64_t seq_len);
PULLBACK_API BlockLayout make_layout(const BSLongformerSparsity& sparsity, std::int64_t seq_len);
PULLBACK_API BlockLayout make_layout(const LocalSlidingWindowSparsity& sparsity,
                                     std::int64_t seq_len);

}  // namespace pullback

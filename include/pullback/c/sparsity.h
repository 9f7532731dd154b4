/* The six patterns that block-sparse models are trained with, for sequences of seq_len tokens, a
 * multiple of the block: layouts of [num_heads, nb, nb] blocks, nb = seq_len / block. Row r stands
 * for queries, column c for keys. The exact rules are in pullback/sparsity.hpp. Random blocks
 * depend on the seed, head, row and number of columns alone. */
#ifndef PULLBACK_C_SPARSITY_H
#define PULLBACK_C_SPARSITY_H

#include "pullback/c/block_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PULLBACK_UNIDIRECTIONAL = 1,            /* no block above the diagonal */
  PULLBACK_DIFFERENT_LAYOUT_PER_HEAD = 2, /* else all heads have that of head 0 */
  PULLBACK_HORIZONTAL_GLOBAL = 4,  /* global blocks see all columns too; bidirectional only */
  PULLBACK_KEEP_ABOVE_DIAGONAL = 8 /* unidirectional: keep the blocks above the diagonal that
                                      DeepSpeed sets for global ranges and random blocks */
};

/* Every block. */
typedef struct pullback_dense_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
} pullback_dense_sparsity;
#define PULLBACK_DENSE_SPARSITY_INIT \
  { sizeof(pullback_dense_sparsity), 1, 16 }

/* Local windows, of each of which a few blocks are global. */
typedef struct pullback_fixed_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
  uint64_t flags; /* any of the four */
  int64_t num_local_blocks;
  int64_t num_global_blocks;             /* divides num_local_blocks */
  int64_t num_different_global_patterns; /* above 1: different layouts per head only */
} pullback_fixed_sparsity;
#define PULLBACK_FIXED_SPARSITY_INIT \
  { sizeof(pullback_fixed_sparsity), 1, 16, 0, 4, 1, 1 }

/* Local windows of the listed sizes, the last of which repeats; global blocks by index, or by range
 * [index, end index); random blocks. The lists are read during the call only. */
typedef struct pullback_variable_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
  uint64_t flags; /* any of the four */
  int64_t num_random_blocks;
  const int64_t* local_window_blocks; /* NULL = {4} */
  size_t num_local_window_blocks;
  const int64_t* global_block_indices; /* NULL = {0} */
  size_t num_global_block_indices;
  const int64_t* global_block_end_indices; /* NULL: every index is one block; else as many */
  uint64_t seed;
} pullback_variable_sparsity;
#define PULLBACK_VARIABLE_SPARSITY_INIT \
  { sizeof(pullback_variable_sparsity), 1, 16, 0, 0, NULL, 0, NULL, 0, NULL, 0 }

/* Random blocks, a window around the diagonal, the first rows and columns. */
typedef struct pullback_bigbird_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
  uint64_t flags; /* PULLBACK_UNIDIRECTIONAL, PULLBACK_DIFFERENT_LAYOUT_PER_HEAD */
  int64_t num_random_blocks;
  int64_t num_sliding_window_blocks;
  int64_t num_global_blocks;
  uint64_t seed;
} pullback_bigbird_sparsity;
#define PULLBACK_BIGBIRD_SPARSITY_INIT \
  { sizeof(pullback_bigbird_sparsity), 1, 16, 0, 1, 3, 1, 0 }

/* A window around the diagonal, and global rows and columns. */
typedef struct pullback_bslongformer_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
  uint64_t flags; /* PULLBACK_UNIDIRECTIONAL */
  int64_t num_sliding_window_blocks;
  const int64_t* global_block_indices; /* NULL = {0} */
  size_t num_global_block_indices;
  const int64_t* global_block_end_indices; /* NULL: every index is one block; else as many */
} pullback_bslongformer_sparsity;
#define PULLBACK_BSLONGFORMER_SPARSITY_INIT \
  { sizeof(pullback_bslongformer_sparsity), 1, 16, 0, 3, NULL, 0, NULL }

/* A window around the diagonal alone. */
typedef struct pullback_local_sliding_window_sparsity {
  size_t struct_size;
  int64_t num_heads;
  int64_t block;
  uint64_t flags; /* PULLBACK_UNIDIRECTIONAL, the default here */
  int64_t num_sliding_window_blocks;
} pullback_local_sliding_window_sparsity;
#define PULLBACK_LOCAL_SLIDING_WINDOW_SPARSITY_INIT \
  { sizeof(pullback_local_sliding_window_sparsity), 1, 16, PULLBACK_UNIDIRECTIONAL, 3 }

/* Each makes a layout that is the caller's to destroy. */
PULLBACK_API pullback_status pullback_dense_layout(const pullback_dense_sparsity* sparsity,
                                                   int64_t seq_len, pullback_block_layout** layout);
PULLBACK_API pullback_status pullback_fixed_layout(const pullback_fixed_sparsity* sparsity,
                                                   int64_t seq_len, pullback_block_layout** layout);
PULLBACK_API pullback_status pullback_variable_layout(const pullback_variable_sparsity* sparsity,
                                                      int64_t seq_len,
                                                      pullback_block_layout** layout);
PULLBACK_API pullback_status pullback_bigbird_layout(const pullback_bigbird_sparsity* sparsity,
                                                     int64_t seq_len,
                                                     pullback_block_layout** layout);
PULLBACK_API pullback_status
pullback_bslongformer_layout(const pullback_bslongformer_sparsity* sparsity, int64_t seq_len,
                             pullback_block_layout** layout);
PULLBACK_API pullback_status
pullback_local_sliding_window_layout(const pullback_local_sliding_window_sparsity* sparsity,
                                     int64_t seq_len, pullback_block_layout** layout);

#ifdef __cplusplus
}
#endif

#endif

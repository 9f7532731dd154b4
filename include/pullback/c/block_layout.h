/* Block layouts: which blocks of a block-sparse matrix exist, H heads of R block rows by C block
 * columns. A block-sparse tensor is [Z, nnz, b, b], its blocks ordered by (head, row, column),
 * where b is the block size, 16 to 128 and a multiple of 16. */
#ifndef PULLBACK_C_BLOCK_LAYOUT_H
#define PULLBACK_C_BLOCK_LAYOUT_H

#include "pullback/c/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pullback_block_layout pullback_block_layout;

/* `present` is [heads, rows, columns] row-major, of 0 and 1, in CPU memory; it is copied. */
PULLBACK_API pullback_status pullback_block_layout_create(int64_t heads, int64_t rows,
                                                          int64_t columns, const uint8_t* present,
                                                          pullback_block_layout** layout);

/* Plans keep what they need: a layout may be destroyed right after planning. NULL is allowed. */
PULLBACK_API void pullback_block_layout_destroy(pullback_block_layout* layout);

/* Any of the output arguments may be NULL. */
PULLBACK_API pullback_status pullback_block_layout_size(const pullback_block_layout* layout,
                                                        int64_t* heads, int64_t* rows,
                                                        int64_t* columns, int64_t* nnz);

/* Writes heads * rows * columns bytes of 0 and 1. */
PULLBACK_API pullback_status pullback_block_layout_present(const pullback_block_layout* layout,
                                                           uint8_t* present, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif

/* block_softmax
 *
 * y = softmax over the blocks of a row of (scale x + rpe + key_padding_mask + attn_mask). All
 * tensors have one dtype, f64, f32, bf16 or f16; masks in keep mode may also be u8 or bool. A row
 * that sees nothing gives zeros. */
#ifndef PULLBACK_C_BLOCK_SOFTMAX_H
#define PULLBACK_C_BLOCK_SOFTMAX_H

#include "pullback/c/block_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PULLBACK_MASK_ADD = 0, /* the value is added to the score */
  PULLBACK_MASK_KEEP = 1 /* zero hides the score, any other value keeps it */
};

typedef struct pullback_block_softmax_problem {
  size_t struct_size;
  const pullback_block_layout* layout;
  int64_t block;                      /* b */
  const DLTensor* x;                  /* [Z,nnz,b,b] */
  const DLTensor* rpe;                /* optional [Z|1,H|1,R*b,C*b] */
  const DLTensor* key_padding_mask;   /* optional [Z,C*b] */
  const DLTensor* attn_mask;          /* optional [R*b,C*b] */
  const DLTensor* y;                  /* like x; may be x's memory */
  const DLTensor* d_y;                /* like x */
  const DLTensor* d_x;                /* like x; may be d_y's memory */
  const DLTensor* d_rpe;              /* the shape of rpe; zero where no block is */
  const DLTensor* d_key_padding_mask; /* the mask's shape; add mode only */
  const DLTensor* d_attn_mask;
  int32_t key_padding_mode; /* PULLBACK_MASK_ADD or PULLBACK_MASK_KEEP */
  int32_t attn_mask_mode;
  double scale; /* of x alone */
} pullback_block_softmax_problem;
#define PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT                                                    \
  {                                                                                            \
    sizeof(pullback_block_softmax_problem), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, PULLBACK_MASK_ADD, PULLBACK_MASK_KEEP, 1                             \
  }

/* Forward reads x and the added terms, writes y. Backward reads y and d_y, writes the non-NULL of
 * d_x, d_rpe, d_key_padding_mask, d_attn_mask. */
typedef struct pullback_block_softmax_tensors {
  size_t struct_size;
  const void* x;
  const void* rpe;
  const void* key_padding_mask;
  const void* attn_mask;
  void* y;
  const void* d_y;
  void* d_x;
  void* d_rpe;
  void* d_key_padding_mask;
  void* d_attn_mask;
} pullback_block_softmax_tensors;
#define PULLBACK_BLOCK_SOFTMAX_TENSORS_INIT                                                       \
  {                                                                                               \
    sizeof(pullback_block_softmax_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL                                                                                      \
  }

PULLBACK_API pullback_status
pullback_block_softmax_plan(const pullback_block_softmax_problem* problem, pullback_pass pass,
                            const pullback_plan_options* options, pullback_plan** plan);
PULLBACK_API pullback_status pullback_block_softmax_run(
    const pullback_plan* plan, void* stream, const pullback_block_softmax_tensors* tensors,
    void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif

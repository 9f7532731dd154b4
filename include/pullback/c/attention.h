/* attention
 *
 * softmax(scale * q k^T + bias) v and its gradients, in memory linear in the sequence lengths.
 * Letters: B batch, Sq and Sk query and key length, H query heads, Hkv key/value heads (H is a
 * multiple of Hkv), D head dim of q and k, Dv of v. q, k, v, bias, out and their gradients have one
 * dtype: f64, f32, bf16 or f16. lse and d_lse are f32 (f64 for f64). */
#ifndef PULLBACK_C_ATTENTION_H
#define PULLBACK_C_ATTENTION_H

#include "pullback/c/block_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PULLBACK_TOP_LEFT = 0, PULLBACK_BOTTOM_RIGHT = 1 };
#define PULLBACK_UNBOUNDED (-1)

typedef struct pullback_attention_problem {
  size_t struct_size;
  const DLTensor* q;            /* [B,Sq,H,D], or [total_q,H,D] with cu_seqlens */
  const DLTensor* k;            /* [B,Sk,Hkv,D], or [total_k,Hkv,D] */
  const DLTensor* v;            /* [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv] */
  const DLTensor* bias;         /* optional [B|1,H|1,Sq|1,Sk|1]; not with cu_seqlens */
  const DLTensor* cu_seqlens_q; /* optional, both or none: i32 or i64 [B+1], where the sequences
                                   begin and end. Bad entries are clamped; rows outside every
                                   sequence get zeros (lse -inf) */
  const DLTensor* cu_seqlens_k;
  const DLTensor* out;   /* [B,Sq,H,Dv] or [total_q,H,Dv] */
  const DLTensor* lse;   /* [B,H,Sq] or [H,total_q]: natural logarithm; -inf where a row
                            sees nothing */
  const DLTensor* d_out; /* like out */
  const DLTensor* d_lse; /* optional, like lse */
  const DLTensor* d_q;   /* like q, k, v. A plan makes the gradients that are given here, or all
                            where none is; a run leaves out those that are NULL there */
  const DLTensor* d_k;
  const DLTensor* d_v;
  const DLTensor* d_bias; /* the shape of bias, summed over what was broadcast */
  int64_t max_seqlen_q;   /* upper bounds of the lengths in cu_seqlens; 0 = total */
  int64_t max_seqlen_k;
  const double* scale; /* NULL = 1/sqrt(D); read during the plan call only */
  double softcap;      /* c > 0: s <- c tanh(s/c), after the scale, before the bias */
  int64_t mask_left;   /* query i sees key j when i + o - left <= j <= i + o + right; */
  int64_t mask_right;  /*   PULLBACK_UNBOUNDED lifts one side. Causal: right = 0 */
  int32_t mask_corner; /* o: 0 for PULLBACK_TOP_LEFT, Sk - Sq for PULLBACK_BOTTOM_RIGHT
                          (of each sequence with cu_seqlens) */
  uint32_t flags;      /* PULLBACK_NONDETERMINISTIC, PULLBACK_CHECK_INDICES */
  double dropout;      /* in [0, 1) */
  uint64_t dropout_seed;
  /* Optional, not with cu_seqlens: query i sees key j only where the layout has block
   * (i / block, j / block). Its heads are layout_batches times H or 1; its blocks may reach past Sq
   * and Sk. Read during the plan call only. */
  const pullback_block_layout* layout;
  int64_t layout_batches; /* B; 0 or 1: the layout serves all batch items */
  int64_t block;          /* 16 to 128, a multiple of 16 */
  const DLTensor* seed;   /* optional i64, one element: where each run reads the seed of dropout,
                             in place of dropout_seed. One plan then serves a training loop, and a
                             captured run draws anew at each replay */
} pullback_attention_problem;
#define PULLBACK_ATTENTION_PROBLEM_INIT                                                       \
  {                                                                                           \
    sizeof(pullback_attention_problem), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, PULLBACK_UNBOUNDED, PULLBACK_UNBOUNDED,  \
        PULLBACK_TOP_LEFT, 0, 0, 0, NULL, 0, 0, NULL                                          \
  }

/* Forward reads q, k, v, bias, cu_seqlens, seed and writes out and, unless NULL, lse. Backward
 * reads those, out, lse, d_out, d_lse and writes the non-NULL of d_q, d_k, d_v, d_bias. */
typedef struct pullback_attention_tensors {
  size_t struct_size;
  const void* q;
  const void* k;
  const void* v;
  const void* bias;
  const void* cu_seqlens_q;
  const void* cu_seqlens_k;
  void* out;
  void* lse;
  const void* d_out;
  const void* d_lse;
  void* d_q;
  void* d_k;
  void* d_v;
  void* d_bias;
  const void* seed;
} pullback_attention_tensors;
#define PULLBACK_ATTENTION_TENSORS_INIT                                                       \
  {                                                                                           \
    sizeof(pullback_attention_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, NULL                                                    \
  }

PULLBACK_API pullback_status pullback_attention_plan(const pullback_attention_problem* problem,
                                                     pullback_pass pass,
                                                     const pullback_plan_options* options,
                                                     pullback_plan** plan);
PULLBACK_API pullback_status pullback_attention_run(const pullback_plan* plan, void* stream,
                                                    const pullback_attention_tensors* tensors,
                                                    void* workspace, size_t workspace_bytes);

/* Writes which probabilities dropout keeps: 1 = kept. `mask` is a u8 or bool [B,H,Sq,Sk] in CPU
 * memory, with its data. For tests. */
PULLBACK_API pullback_status pullback_write_dropout_mask(const DLTensor* mask, double dropout,
                                                         uint64_t dropout_seed);

#ifdef __cplusplus
}
#endif

#endif

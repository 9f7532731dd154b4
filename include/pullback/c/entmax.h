/* entmax
 *
 * p_i = [(alpha-1) x_i - tau]_+ ^ (1/(alpha-1)) along an axis, with sum p = 1, and its gradients.
 * alpha 1 is softmax (tau is then logsumexp), 2 is sparsemax. "Per row" is the shape of x without
 * the axis, or with that dimension G when ragged. x, y, d_y, d_x have one dtype: f64, f32, bf16 or
 * f16. NaN or +inf in a row gives a row of NaN; -inf has probability 0; a row that is all -inf or
 * hidden gives zeros, tau +inf. */
#ifndef PULLBACK_C_ENTMAX_H
#define PULLBACK_C_ENTMAX_H

#include "pullback/c/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pullback_entmax_problem {
  size_t struct_size;
  const DLTensor* x;             /* rank 1 to 8; V is its length along the axis */
  const DLTensor* alpha_per_row; /* optional, per row, f32 (f64 for f64) */
  const DLTensor* mask;          /* optional u8 or bool, the shape of x: 0 hides an element */
  const DLTensor* offsets;       /* optional i32 or i64 [G+1]: row g is [offsets[g], offsets[g+1])
                                    along the axis; clamped into range */
  const DLTensor* y;             /* like x */
  const DLTensor* tau;           /* per row, f32 (f64 for f64) */
  const DLTensor* support;       /* alpha 2, not ragged: u8, per row with ceil(V/8) appended; bit
                                    i%8 of byte i/8 says p_i > 0 */
  const DLTensor* support_size;  /* i32, per row */
  const DLTensor* d_y;           /* like x */
  const DLTensor* d_x;           /* like x; may be d_y's memory */
  const DLTensor* d_alpha;       /* like alpha_per_row, per row also when alpha is one number */
  double alpha;                  /* >= 1; not used when alpha_per_row is given */
  int32_t axis;                  /* negative counts from the back */
  uint32_t flags;                /* PULLBACK_CHECK_INDICES */
} pullback_entmax_problem;
#define PULLBACK_ENTMAX_PROBLEM_INIT                                                             \
  {                                                                                              \
    sizeof(pullback_entmax_problem), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, 2, -1, 0                                                                           \
  }

/* Forward reads x, alpha_per_row, mask, offsets and writes the non-NULL of y, tau, support,
 * support_size. Backward reads d_y with either y, or support and support_size (alpha 2, y NULL),
 * and writes the non-NULL of d_x, d_alpha. */
typedef struct pullback_entmax_tensors {
  size_t struct_size;
  const void* x;
  const void* alpha_per_row;
  const void* mask;
  const void* offsets;
  void* y;
  void* tau;
  void* support;
  void* support_size;
  const void* d_y;
  void* d_x;
  void* d_alpha;
} pullback_entmax_tensors;
#define PULLBACK_ENTMAX_TENSORS_INIT                                                             \
  {                                                                                              \
    sizeof(pullback_entmax_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL                                                                                     \
  }

PULLBACK_API pullback_status pullback_entmax_plan(const pullback_entmax_problem* problem,
                                                  pullback_pass pass,
                                                  const pullback_plan_options* options,
                                                  pullback_plan** plan);
PULLBACK_API pullback_status pullback_entmax_run(const pullback_plan* plan, void* stream,
                                                 const pullback_entmax_tensors* tensors,
                                                 void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif

/* segment
 *
 * Reductions, or the softmax, over groups of rows of x [N,D]: S segments. Give one of
 *   offsets               segment s is the rows [offsets[s], offsets[s+1])
 *   ids                   ascending, with num_segments: segment s is the rows n with ids[n] == s
 *   offsets, permutation  for ids in any order, both from segment_permutation; with the ids, too,
 *                         passes that write rows of few columns may do so in the rows' own order,
 *                         which on GPUs is several times faster
 * Bad ids and rows outside all offsets take no part: no output, zero gradient. */
#ifndef PULLBACK_C_SEGMENT_H
#define PULLBACK_C_SEGMENT_H

#include "pullback/c/core.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PULLBACK_SEGMENT_SUM = 0,
  PULLBACK_SEGMENT_MEAN = 1,
  PULLBACK_SEGMENT_MAX = 2,
  PULLBACK_SEGMENT_MIN = 3,
  PULLBACK_SEGMENT_PROD = 4,
  PULLBACK_SEGMENT_LOGSUMEXP = 5,
  PULLBACK_SEGMENT_SOFTMAX = 6
};
/* Who gets the gradient of max and min. */
enum { PULLBACK_TIES_FIRST = 0, PULLBACK_TIES_LAST = 1, PULLBACK_TIES_EVEN = 2 };
/* The value of a segment without rows. */
enum { PULLBACK_EMPTY_IDENTITY = 0, PULLBACK_EMPTY_ZERO = 1, PULLBACK_EMPTY_NAN = 2 };

typedef struct pullback_segment_problem {
  size_t struct_size;
  const DLTensor* x;           /* [N,D]; f64, f32, bf16 or f16 */
  const DLTensor* offsets;     /* i32 or i64 [S+1] */
  const DLTensor* ids;         /* i32 or i64 [N] */
  const DLTensor* permutation; /* i32 or i64 [N] */
  const DLTensor* out;         /* [S,D]; for softmax [N,D] */
  const DLTensor* arg;         /* max and min, optional: [S,D], the row that won as i64 or i32 (-1
                                  for none), or as u8 its place in the segment, which then has at
                                  most 255 rows: longer ones are an error of run, but on a GPU,
                                  which stores no place past 254 and gives that column no gradient */
  const DLTensor* arg_mask;    /* max and min, optional: u8 [N,ceil(D/8)]; bit d%8 of byte d/8 says
                                  that x[n,d] gets gradient */
  const DLTensor* d_out;       /* like out */
  const DLTensor* d_x;         /* like x */
  int64_t num_segments;        /* needed with ids; else 0 or S */
  int32_t reduce;              /* PULLBACK_SEGMENT_SUM ... */
  int32_t ties;                /* PULLBACK_TIES_FIRST ... */
  int32_t empty;               /* PULLBACK_EMPTY_IDENTITY ... */
  uint32_t flags;              /* PULLBACK_CHECK_INDICES */
  const DLTensor* lse;         /* logsumexp of 16-bit x, optional: f32 [S,D], out before it was
                                  rounded; without it backward reduces x anew */
} pullback_segment_problem;
#define PULLBACK_SEGMENT_PROBLEM_INIT                                                          \
  {                                                                                            \
    sizeof(pullback_segment_problem), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, \
        PULLBACK_SEGMENT_SUM, PULLBACK_TIES_FIRST, PULLBACK_EMPTY_IDENTITY, 0, NULL            \
  }

/* Forward reads x and the segments, writes out and the non-NULL of arg, arg_mask, lse. Backward
 * reads d_out, the segments and, for max and min, arg or arg_mask or else x and out; for prod x;
 * for logsumexp x and out, in 16 bits x and lse unless NULL; for softmax out. It writes d_x. */
typedef struct pullback_segment_tensors {
  size_t struct_size;
  const void* x;
  const void* offsets;
  const void* ids;
  const void* permutation;
  void* out;
  void* arg;
  void* arg_mask;
  const void* d_out;
  void* d_x;
  void* lse;
} pullback_segment_tensors;
#define PULLBACK_SEGMENT_TENSORS_INIT \
  { sizeof(pullback_segment_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

PULLBACK_API pullback_status pullback_segment_plan(const pullback_segment_problem* problem,
                                                   pullback_pass pass,
                                                   const pullback_plan_options* options,
                                                   pullback_plan** plan);
PULLBACK_API pullback_status pullback_segment_run(const pullback_plan* plan, void* stream,
                                                  const pullback_segment_tensors* tensors,
                                                  void* workspace, size_t workspace_bytes);

/* segment_permutation: a stable sort of ids in any order, done once for many runs. Ids outside
 * [0, num_segments) come last and belong to no segment. */
typedef struct pullback_segment_permutation_problem {
  size_t struct_size;
  const DLTensor* ids;         /* i32 or i64 [N] */
  const DLTensor* permutation; /* i64 [N] by default, or i32 */
  const DLTensor* offsets;     /* [S+1], the permutation's dtype */
  int64_t num_segments;        /* S */
} pullback_segment_permutation_problem;
#define PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT \
  { sizeof(pullback_segment_permutation_problem), NULL, NULL, NULL, 0 }

typedef struct pullback_segment_permutation_tensors {
  size_t struct_size;
  const void* ids;
  void* permutation;
  void* offsets;
} pullback_segment_permutation_tensors;
#define PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT \
  { sizeof(pullback_segment_permutation_tensors), NULL, NULL, NULL }

PULLBACK_API pullback_status
pullback_segment_permutation_plan(const pullback_segment_permutation_problem* problem,
                                  const pullback_plan_options* options, pullback_plan** plan);
PULLBACK_API pullback_status pullback_segment_permutation_run(
    const pullback_plan* plan, void* stream, const pullback_segment_permutation_tensors* tensors,
    void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif

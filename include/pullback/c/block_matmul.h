/* block_matmul
 *
 * c = op(a) op(b), where op transposes if asked; the mode names what is sparse: c, a, b.
 *   sdd   a [Z,H,R*b,K], b [Z,H,K,C*b], c sparse
 *   dsd   a sparse, b [Z,H,C*b,N] (R*b with TRANSPOSE_A), c [Z,H,R*b,N] (C*b with TRANSPOSE_A)
 *   dds   a [Z,H,M,R*b] (C*b with TRANSPOSE_B), b sparse, c [Z,H,M,C*b] (R*b with TRANSPOSE_B)
 * A dense operand that is transposed has its last two dimensions swapped. With TRANSPOSE_C, c is
 * stored transposed: each dense matrix, or for sdd each block and the layout. */
#ifndef PULLBACK_C_BLOCK_MATMUL_H
#define PULLBACK_C_BLOCK_MATMUL_H

#include "pullback/c/block_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PULLBACK_SDD = 0, PULLBACK_DSD = 1, PULLBACK_DDS = 2 };
enum { PULLBACK_TRANSPOSE_A = 1, PULLBACK_TRANSPOSE_B = 2, PULLBACK_TRANSPOSE_C = 4 };

typedef struct pullback_block_matmul_problem {
  size_t struct_size;
  const pullback_block_layout* layout;
  int64_t block; /* b */
  const DLTensor* a;
  const DLTensor* b;
  const DLTensor* c;
  const DLTensor* d_c;
  const DLTensor* d_a;
  const DLTensor* d_b;
  int32_t mode;   /* PULLBACK_SDD, PULLBACK_DSD or PULLBACK_DDS */
  uint32_t flags; /* PULLBACK_TRANSPOSE_A, _B, _C */
} pullback_block_matmul_problem;
#define PULLBACK_BLOCK_MATMUL_PROBLEM_INIT                                              \
  {                                                                                     \
    sizeof(pullback_block_matmul_problem), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, \
        PULLBACK_SDD, 0                                                                 \
  }

/* Forward reads a and b, writes c. Backward reads a, b, d_c, writes the non-NULL of d_a, d_b. */
typedef struct pullback_block_matmul_tensors {
  size_t struct_size;
  const void* a;
  const void* b;
  void* c;
  const void* d_c;
  void* d_a;
  void* d_b;
} pullback_block_matmul_tensors;
#define PULLBACK_BLOCK_MATMUL_TENSORS_INIT \
  { sizeof(pullback_block_matmul_tensors), NULL, NULL, NULL, NULL, NULL, NULL }

PULLBACK_API pullback_status
pullback_block_matmul_plan(const pullback_block_matmul_problem* problem, pullback_pass pass,
                           const pullback_plan_options* options, pullback_plan** plan);
PULLBACK_API pullback_status pullback_block_matmul_run(const pullback_plan* plan, void* stream,
                                                       const pullback_block_matmul_tensors* tensors,
                                                       void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif

/* pullback.h: the C ABI of Pullback, gradient kernels for attention, block-sparse attention, entmax
 * and segment reductions. Plain C99; every language that calls C can use the library through it.
 *
 * LIFE CYCLE
 * - problem: a struct that describes tensors (as DLTensor) and options, for forward and backward
 * - plan: pullback_<op>_plan checks the problem and binds it to an implementation
 * - outputs: pullback_plan_tensor tells the layout of every tensor, those left out among them, and
 *   pullback_plan_workspace_bytes the scratch memory that one run needs
 * - run: pullback_<op>_run computes, given one raw pointer for each tensor; as often as you like
 *
 * STATUS
 *   Every function that can fail returns a pullback_status, 0 for success. On failure
 *   pullback_last_error() explains, nothing has been written, and no output argument has changed.
 *   Null arguments are refused like any others. No C++ exception leaves the library, and it never
 *   prints, exits or aborts.
 *
 * TENSORS
 *   At plan time a tensor is a const DLTensor*; NULL means that it is not given: an optional input
 *   is absent, an output gets the default layout (row-major). Read are device, ndim (at most 8),
 *   shape, strides (in elements, zero and negative too; NULL = row-major) and dtype:
 *     f64 f32 f16   kDLFloat 64, 32, 16        i64 i32   kDLInt 64, 32
 *     bf16          kDLBfloat 16               u8, bool  kDLUInt 8, and code 6 (kDLBool) 8
 *   with 1 lane. data and byte_offset are not read: one plan serves any memory of that layout. The
 *   DLTensor and its arrays may be freed once the plan function has returned. Sizes are bounded
 *   where no memory reaches: a tensor's sizes other than 0 multiply to at most 2^50 bytes, and
 *   its strides reach no further, even where a size of 0 leaves it without elements.
 *   At run time a tensor is the address of its element [0, 0, ...], aligned to its elements:
 *   pullback_tensor_data(t). Gradients whose pointer is NULL are not computed. Outputs must not
 *   overlap themselves or other tensors, save where an op allows in-place use.
 *   Tensors live on the plan's device. The caller owns all memory, outputs and workspace included.
 *
 * STRUCTS
 *   A struct begins with its size as the caller knows it. Initialise with its _INIT macro, which
 *   also sets the defaults; from other languages, see the defaults there. A shorter struct than the
 *   library's (an older caller) gets the defaults for what it lacks; a longer one (a newer caller)
 *   is served as long as the fields that this library does not know are zero.
 *
 * THREADS
 *   Every function may be called from any thread at any time. A plan and a layout are immutable:
 *   any number of threads may run one plan at once, each with its own workspace and outputs; only
 *   their destruction must come after all other use.
 *
 * Letters in shapes are explained at each op. The formulas, edge rules and the choice of
 * implementations are in src/ops/<op>/README.md.
 */
#ifndef PULLBACK_PULLBACK_H
#define PULLBACK_PULLBACK_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#define PULLBACK_VERSION_MAJOR 0
#define PULLBACK_VERSION_MINOR 1
#define PULLBACK_VERSION_PATCH 0

#define PULLBACK_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- status and library */

typedef int32_t pullback_status;
enum {
  PULLBACK_OK = 0,
  PULLBACK_INVALID_ARGUMENT = 1,    /* a tensor or an option breaks the op's contract */
  PULLBACK_UNSUPPORTED = 2,         /* a valid problem that nothing on this device serves */
  PULLBACK_WORKSPACE_TOO_SMALL = 3, /* fewer bytes than pullback_plan_workspace_bytes */
  PULLBACK_DEVICE_ERROR = 4,        /* driver, compiler or system failure; out of memory */
  PULLBACK_INTERNAL_ERROR = 5       /* a defect of the library */
};

/* The message of this thread's last failure, or "" when there was none: the op, the tensor or
 * option, what was expected, what was given, and often a remedy. Success does not clear it. Valid
 * until the next failure on the same thread. */
PULLBACK_API const char* pullback_last_error(void);

/* The version of the library in use: 10000 major + 100 minor + patch. */
PULLBACK_API int32_t pullback_version(void);

/* What this machine has, for people: lines of version, CPU, CUDA driver and devices, NVRTC, kernel
 * cache, and why there is none of one of them. Initialises the CUDA driver. Sets *text, valid until
 * the next call on the same thread. */
PULLBACK_API pullback_status pullback_describe_system(const char** text);

enum { PULLBACK_LOG_DEBUG = 0, PULLBACK_LOG_INFO = 1, PULLBACK_LOG_WARNING = 2 };

/* `message` is valid during the call only. Called from any thread, several at a time. It must not
 * throw or jump out. */
typedef void (*pullback_log_callback)(int32_t level, const char* message, void* user_data);

/* Replaces the callback of the process, C++ users' too; NULL turns logging off. A call that is
 * under way in another thread may still end after this returns. */
PULLBACK_API pullback_status pullback_set_log_callback(pullback_log_callback callback,
                                                       void* user_data);

/* ---------------------------------------------------------------- plans */

typedef int32_t pullback_pass;
enum { PULLBACK_FORWARD = 0, PULLBACK_BACKWARD = 1 };

typedef struct pullback_plan_options {
  size_t struct_size;
  DLDevice device;     /* kDLCPU, or kDLCUDA and its ordinal */
  int32_t threads;     /* CPU threads of one run; 0 = as many as the process may use. The results
                          do not depend on it, to the last bit */
  uint32_t flags;      /* none yet: 0 */
  const char* variant; /* name of the implementation; NULL or "" chooses the best. "reference"
                          (double precision, plain loops) exists for every op */
} pullback_plan_options;
#define PULLBACK_PLAN_OPTIONS_INIT \
  { sizeof(pullback_plan_options), {kDLCPU, 0}, 0, 0, NULL }

/* A checked problem of any op, bound to the implementation that will compute it. */
typedef struct pullback_plan pullback_plan;

/* NULL is allowed and does nothing. */
PULLBACK_API void pullback_plan_destroy(pullback_plan* plan);

/* Scratch memory that one run needs, on the plan's device, aligned to
 * PULLBACK_WORKSPACE_ALIGNMENT. Its content before and after a run means nothing. */
#define PULLBACK_WORKSPACE_ALIGNMENT 256
PULLBACK_API pullback_status pullback_plan_workspace_bytes(const pullback_plan* plan,
                                                           size_t* bytes);

/* Lines of text: op, pass, variant, tiles, accumulation type, guarantee, and why it was chosen.
 * *text lives as long as the plan. */
PULLBACK_API pullback_status pullback_plan_describe(const pullback_plan* plan, const char** text);

/* The layout of one tensor, by the name of its field in the problem, with all defaults filled in:
 * what to allocate for the outputs. Sets *tensor, its data to NULL and its byte_offset to 0; shape
 * and strides (never NULL) live as long as the plan and must not be written to. A tensor that the
 * problem does not have ("bias" when none was given) gets ndim -1; a name that the op does not know
 * is an error. */
PULLBACK_API pullback_status pullback_plan_tensor(const pullback_plan* plan, const char* name,
                                                  DLTensor* tensor);

/* The address of element [0, 0, ...]: what the run functions expect. */
static inline void* pullback_tensor_data(const DLTensor* tensor) {
  return (char*)tensor->data + tensor->byte_offset;
}

/* In all run functions:
 *   stream     a CUstream (cudaStream_t) for CUDA devices; ignored on the CPU, where the function
 *              returns when the work is done
 *   workspace  at least pullback_plan_workspace_bytes, may be NULL when that is 0
 * A run allocates nothing and fails only on bad pointers, a small workspace, a plan of another op,
 * or, when asked to check them, bad indices: before it has written anything. */

/* ---------------------------------------------------------------- attention
 *
 * softmax(scale * q k^T + bias) v and its gradients, in memory linear in the sequence lengths.
 * Letters: B batch, Sq and Sk query and key length, H query heads, Hkv key/value heads (H is a
 * multiple of Hkv), D head dim of q and k, Dv of v. q, k, v, bias, out and their gradients have one
 * dtype: f64, f32, bf16 or f16. lse and d_lse are f32 (f64 for f64). */

enum { PULLBACK_TOP_LEFT = 0, PULLBACK_BOTTOM_RIGHT = 1 };
#define PULLBACK_UNBOUNDED (-1)

enum {
  PULLBACK_NONDETERMINISTIC = 1, /* allow implementations whose sums have no fixed order */
  PULLBACK_CHECK_INDICES = 2     /* run reports the first bad index (offset, id, cu_seqlens entry)
                                    instead of dropping it */
};

/* Which blocks of a block-sparse matrix exist: see "block layouts" below. */
typedef struct pullback_block_layout pullback_block_layout;

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
  const DLTensor* d_q;   /* like q, k, v */
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

/* In all plan functions `options` may be NULL: the CPU, all its cores, the best variant. On success
 * *plan is the caller's, to be given to pullback_plan_destroy. */
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

/* ---------------------------------------------------------------- block layouts
 *
 * Which blocks of a block-sparse matrix exist: H heads of R block rows by C block columns. A
 * block-sparse tensor is [Z, nnz, b, b], its blocks ordered by (head, row, column), where b is the
 * block size, 16 to 128 and a multiple of 16. */

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

/* The six patterns that block-sparse models are trained with, for sequences of seq_len tokens, a
 * multiple of the block: layouts of [num_heads, nb, nb] blocks, nb = seq_len / block. Row r stands
 * for queries, column c for keys. The exact rules are in pullback/sparsity.hpp. Random blocks
 * depend on the seed, head, row and number of columns alone. */

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

/* ---------------------------------------------------------------- block_softmax
 *
 * y = softmax over the blocks of a row of (scale x + rpe + key_padding_mask + attn_mask). All
 * tensors have one dtype, f64, f32, bf16 or f16; masks in keep mode may also be u8 or bool. A row
 * that sees nothing gives zeros. */

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

/* ---------------------------------------------------------------- block_matmul
 *
 * c = op(a) op(b), where op transposes if asked; the mode names what is sparse: c, a, b.
 *   sdd   a [Z,H,R*b,K], b [Z,H,K,C*b], c sparse
 *   dsd   a sparse, b [Z,H,C*b,N] (R*b with TRANSPOSE_A), c [Z,H,R*b,N] (C*b with TRANSPOSE_A)
 *   dds   a [Z,H,M,R*b] (C*b with TRANSPOSE_B), b sparse, c [Z,H,M,C*b] (R*b with TRANSPOSE_B)
 * A dense operand that is transposed has its last two dimensions swapped. With TRANSPOSE_C, c is
 * stored transposed: each dense matrix, or for sdd each block and the layout. */

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

/* ---------------------------------------------------------------- entmax
 *
 * p_i = [(alpha-1) x_i - tau]_+ ^ (1/(alpha-1)) along an axis, with sum p = 1, and its gradients.
 * alpha 1 is softmax (tau is then logsumexp), 2 is sparsemax. "Per row" is the shape of x without
 * the axis, or with that dimension G when ragged. x, y, d_y, d_x have one dtype: f64, f32, bf16 or
 * f16. NaN or +inf in a row gives a row of NaN; -inf has probability 0; a row that is all -inf or
 * hidden gives zeros, tau +inf. */

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

/* ---------------------------------------------------------------- segment
 *
 * Reductions, or the softmax, over groups of rows of x [N,D]: S segments. Give one of
 *   offsets               segment s is the rows [offsets[s], offsets[s+1])
 *   ids                   ascending, with num_segments: segment s is the rows n with ids[n] == s
 *   offsets, permutation  for ids in any order, both from segment_permutation
 * Bad ids and rows outside all offsets take no part: no output, zero gradient. */

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
                                  for none), or as u8 its place in the segment */
  const DLTensor* arg_mask;    /* max and min, optional: u8 [N,ceil(D/8)]; bit d%8 of byte d/8 says
                                  that x[n,d] gets gradient */
  const DLTensor* d_out;       /* like out */
  const DLTensor* d_x;         /* like x */
  int64_t num_segments;        /* needed with ids; else 0 or S */
  int32_t reduce;              /* PULLBACK_SEGMENT_SUM ... */
  int32_t ties;                /* PULLBACK_TIES_FIRST ... */
  int32_t empty;               /* PULLBACK_EMPTY_IDENTITY ... */
  uint32_t flags;              /* PULLBACK_CHECK_INDICES */
} pullback_segment_problem;
#define PULLBACK_SEGMENT_PROBLEM_INIT                                                          \
  {                                                                                            \
    sizeof(pullback_segment_problem), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, \
        PULLBACK_SEGMENT_SUM, PULLBACK_TIES_FIRST, PULLBACK_EMPTY_IDENTITY, 0                  \
  }

/* Forward reads x and the segments, writes out and the non-NULL of arg, arg_mask. Backward reads
 * d_out, the segments and, for max and min, arg or arg_mask or else x and out; for prod and
 * logsumexp x and out; for softmax out. It writes d_x. */
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
} pullback_segment_tensors;
#define PULLBACK_SEGMENT_TENSORS_INIT \
  { sizeof(pullback_segment_tensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

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

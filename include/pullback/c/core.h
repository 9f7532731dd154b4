/* What every op's functions share: status, log, plans. */
#ifndef PULLBACK_C_CORE_H
#define PULLBACK_C_CORE_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

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
 * throw, jump out or end its thread. */
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
                          (double precision, plain loops) exists for every op but
                          segment_permutation */
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

/* In all plan functions `options` may be NULL: the CPU, all its cores, the best variant. On success
 * *plan is the caller's, to be given to pullback_plan_destroy.
 *
 * In all run functions:
 *   stream     a CUstream (cudaStream_t) for CUDA devices; ignored on the CPU, where the function
 *              returns when the work is done
 *   workspace  at least pullback_plan_workspace_bytes, may be NULL when that is 0
 * A run allocates nothing. It refuses bad pointers, a small workspace, a plan of another op, bad
 * indices when asked to check them, and on the CPU segments too long for a u8 arg, before it has
 * written anything. On a CUDA device it may also fail as any CUDA work may, now or at a later call;
 * outputs then mean nothing. */

/* Flags of problems. */
enum {
  PULLBACK_NONDETERMINISTIC = 1, /* allow implementations whose sums have no fixed order */
  PULLBACK_CHECK_INDICES = 2     /* run reports the first bad index (offset, id, cu_seqlens entry)
                                    instead of dropping it */
};

#ifdef __cplusplus
}
#endif

#endif

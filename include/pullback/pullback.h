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

#include "pullback/c/attention.h"
#include "pullback/c/block_layout.h"
#include "pullback/c/block_matmul.h"
#include "pullback/c/block_softmax.h"
#include "pullback/c/core.h"
#include "pullback/c/entmax.h"
#include "pullback/c/segment.h"
#include "pullback/c/sparsity.h"

#define PULLBACK_VERSION_MAJOR 0
#define PULLBACK_VERSION_MINOR 1
#define PULLBACK_VERSION_PATCH 0

#endif

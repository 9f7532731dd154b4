"""Every op on NumPy arrays, forward and backward, on the CPU.

Arrays may have any strides. bfloat16 arrays are those of ml_dtypes. Each op is a function ``op`` of
inputs and options, and a function ``op_backward`` of the gradients of its outputs, what ``op`` had
and the same options, which computes all gradients that exist, or those named in ``needs``. All take

- ``threads``: as many as the process may use if 0; results do not depend on it
- ``variant``: the name of an implementation; "reference" is double precision in plain loops
- ``workspace``: an array to use as scratch memory, of `Plan.workspace_bytes` if it begins at a
  multiple of 256 bytes, and of 255 more wherever it begins

`plan` tells what would run, and runs it repeatedly.

The arrays of one call have one floating-point dtype, float64, float32, bfloat16 or float16; results
are new row-major arrays of it. Index arrays are int32 or int64. What breaks an op's rules is a
ValueError that says what was expected and what was given; a valid problem that no variant serves is
a NotImplementedError.
"""

from __future__ import annotations

from ._arrays import Plan, plan
from ._attention import AttentionGradients, AttentionOutputs, attention, attention_backward
from ._blocks import (
    BlockMatmulGradients,
    BlockSoftmaxGradients,
    block_matmul,
    block_matmul_backward,
    block_softmax,
    block_softmax_backward,
)
from ._entmax import EntmaxGradients, entmax, entmax_backward
from ._segment import (
    SegmentPermutation,
    segment_permutation,
    segment_reduce,
    segment_reduce_backward,
)

__all__ = [
    "AttentionGradients",
    "AttentionOutputs",
    "BlockMatmulGradients",
    "BlockSoftmaxGradients",
    "EntmaxGradients",
    "Plan",
    "SegmentPermutation",
    "attention",
    "attention_backward",
    "block_matmul",
    "block_matmul_backward",
    "block_softmax",
    "block_softmax_backward",
    "entmax",
    "entmax_backward",
    "plan",
    "segment_permutation",
    "segment_reduce",
    "segment_reduce_backward",
]

# By which pickles and messages know them.
for _public in __all__:
    globals()[_public].__module__ = __name__

"""The ops for PyTorch: differentiable functions and modules, on CPU and CUDA tensors.

They are registered operators: torch.compile (with dynamic shapes), autocast, torch.func, activation
checkpointing, CUDA graphs and torch.utils.flop_counter work. Tensors may have any strides; outputs
and gradients are row-major. CUDA work goes to the current stream, and nothing waits but ``entmax``
with ``check_indices``. Results are the same bits every time; ``deterministic=False`` allows others,
and changes nothing yet.

Tensors of one call are on one device, and floating-point ones have one dtype: float64, float32,
bfloat16 or float16. Sums run in float32 (float64 for float64), each result is rounded once. Index
tensors are int32 or int64 and are not trusted: entries out of range or order are clamped or
dropped, as the op's page says, or reported with ``check_indices``: on the CPU, and by ``entmax``.

A tensor or an option that breaks these rules is a ValueError, which says what was expected and what
was given; a valid problem that no kernel on the device serves is a NotImplementedError; failures of
the driver and lack of memory are a `DeviceError`.
"""

from __future__ import annotations

from . import _flops  # noqa: F401  # registers
from ._attention import attention
from ._blocks import block_matmul, block_softmax, block_sparse_attention
from ._entmax import entmax, entmax15, sparsemax
from ._modules import Entmax, Entmax15, Sparsemax, SparseSelfAttention
from ._segment import segment_permutation, segment_reduce, segment_reduce_arg, segment_softmax

__all__ = [
    "Entmax",
    "Entmax15",
    "SparseSelfAttention",
    "Sparsemax",
    "attention",
    "block_matmul",
    "block_softmax",
    "block_sparse_attention",
    "entmax",
    "entmax15",
    "segment_permutation",
    "segment_reduce",
    "segment_reduce_arg",
    "segment_softmax",
    "sparsemax",
]

# By which pickles and messages know them.
for _public in __all__:
    globals()[_public].__module__ = __name__

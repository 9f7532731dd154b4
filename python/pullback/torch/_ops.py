"""The tables of the PyTorch operators, and the shapes of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _native
from .._native import TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_C
from .._options import REDUCTIONS
from ..sparsity import BlockLayout
from ._operator import Shape, TorchOp

# ---------------------------------------------------------------- shapes of outputs


def _statistic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _attention_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    q, v = given["q"], given["v"]
    # Slices leave it to the plan to refuse other ranks.
    out = (*q.shape[:-1], *v.shape[-1:])
    heads_first = (*q.shape[-2:-1], *q.shape[-3:-2])
    lse = heads_first if q.dim() == 3 else (*q.shape[:1], *heads_first)
    return [(out, q.dtype), (lse, _statistic(q.dtype))]


def _block_matmul_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    a, b = given["a"], given["b"]
    layout, block, flags = BlockLayout.find(options["layout"]), options["block"], options["flags"]
    if options["mode"] == 0:
        return [((a.shape[0], layout.nnz, block, block), a.dtype)]
    if options["mode"] == 1:
        rows = (layout.columns if flags & TRANSPOSE_A else layout.rows) * block
        columns = b.shape[-2 if flags & TRANSPOSE_B else -1]
        lead = b.shape[:2]
    else:
        rows = a.shape[-1 if flags & TRANSPOSE_A else -2]
        columns = (layout.rows if flags & TRANSPOSE_B else layout.columns) * block
        lead = a.shape[:2]
    matrix = (columns, rows) if flags & TRANSPOSE_C else (rows, columns)
    return [((*lead, *matrix), a.dtype)]


def _sparsemax_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    x = given["x"]
    axis = options["axis"] % x.dim()
    rows = (*x.shape[:axis], *x.shape[axis + 1 :])
    support = (*rows, (x.shape[axis] + 7) // 8)
    return [(x.shape, x.dtype), (support, torch.uint8), (rows, torch.int32)]


def _segment_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    x, offsets = given["x"], given["offsets"]
    segments = options["num_segments"] if offsets is None else offsets.numel() - 1
    rows = x.shape[0] if REDUCTIONS[options["reduce"]] == "softmax" else segments
    return [((rows, x.shape[1]), x.dtype)]


def _segment_arg_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    out = _segment_shapes(given, options)[0]
    return [out, (out[0], torch.int32 if given["x"].shape[0] < 2**31 else torch.int64)]


def _segment_lse_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    out = _segment_shapes(given, options)[0]
    return [out, (out[0], torch.float32)]


def _permutation_shapes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    offsets = (options["num_segments"] + 1,)
    return [((given["ids"].numel(),), torch.int64), (offsets, torch.int64)]


def _like_x(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[Shape]:
    return [(given["x"].shape, given["x"].dtype)]


# ---------------------------------------------------------------- folds


def _attention_fold(given: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Batch items, but where they share something that has a gradient, or draw by their number."""
    q, bias = given["q"], given["bias"]
    shared = bias is not None and bias.shape[0] != q.shape[0]
    packed = given["cu_seqlens_q"] is not None
    return None if shared or packed or options["dropout"] or options["layout_batches"] > 1 else 0


def _block_softmax_fold(given: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    y = given.get("x", given.get("y"))
    shared = given["rpe"] is not None and given["rpe"].shape[0] != y.shape[0]
    return None if shared or given["attn_mask"] is not None else 0


def _entmax_fold(given: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Rows, where the first dimension counts them."""
    x = given["x"] if "x" in given else given["d_y"]
    first = x.dim() < 2 or options["axis"] % x.dim() == 0
    return None if first or given.get("offsets") is not None else 0


def _columns(given: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    return 1


# ---------------------------------------------------------------- the operators

_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")

ATTENTION = TorchOp(
    "attention",
    _native.ATTENTION,
    inputs=("q", "k", "v", "bias?", "cu_seqlens_q?", "cu_seqlens_k?", "seed?"),
    options=(
        "SymInt max_seqlen_q",
        "SymInt max_seqlen_k",
        "float? scale",
        "float softcap",
        "SymInt mask_left",
        "SymInt mask_right",
        "int mask_corner",
        "int flags",
        "float dropout",
        "int layout",
        "SymInt layout_batches",
        "int block",
    ),
    outputs=("out", "lse"),
    upstream=("d_out", "d_lse"),
    shapes=_attention_shapes,
    reads=("q", "k", "v", "bias", *_SEQLENS, "seed", "out", "lse"),
    gradients={"q": "d_q", "k": "d_k", "v": "d_v", "bias": "d_bias"},
    fold=_attention_fold,
    cast=True,
)
BLOCK_SOFTMAX = TorchOp(
    "block_softmax",
    _native.BLOCK_SOFTMAX,
    inputs=("x", "rpe?", "key_padding_mask?", "attn_mask?"),
    options=(
        "int layout",
        "int block",
        "int key_padding_mode",
        "int attn_mask_mode",
        "float scale",
    ),
    outputs=("y",),
    upstream=("d_y",),
    shapes=_like_x,
    reads=("y", "rpe", "key_padding_mask", "attn_mask"),
    gradients={
        "x": "d_x",
        "rpe": "d_rpe",
        "key_padding_mask": "d_key_padding_mask",
        "attn_mask": "d_attn_mask",
    },
    like={"x": "y"},
    fold=_block_softmax_fold,
)
BLOCK_MATMUL = TorchOp(
    "block_matmul",
    _native.BLOCK_MATMUL,
    inputs=("a", "b"),
    options=("int layout", "int block", "int mode", "int flags"),
    outputs=("c",),
    upstream=("d_c",),
    shapes=_block_matmul_shapes,
    reads=("a", "b"),
    gradients={"a": "d_a", "b": "d_b"},
    fold=lambda given, options: 0,
    cast=True,
)
ENTMAX = TorchOp(
    "entmax",
    _native.ENTMAX,
    inputs=("x", "alpha_per_row?", "mask?", "offsets?"),
    options=("float alpha", "int axis", "int flags"),
    outputs=("y",),
    upstream=("d_y",),
    shapes=_like_x,
    reads=("y", "alpha_per_row", "mask", "offsets"),
    gradients={"x": "d_x", "alpha_per_row": "d_alpha"},
    like={"x": "y"},
    fold=_entmax_fold,
)
# Saves one bit for each element instead of y, which its users may let go.
SPARSEMAX = TorchOp(
    "sparsemax",
    _native.ENTMAX,
    inputs=("x", "mask?"),
    options=("int axis",),
    outputs=("y", "support", "support_size"),
    upstream=("d_y",),
    shapes=_sparsemax_shapes,
    reads=("support", "support_size", "mask"),
    gradients={"x": "d_x"},
    like={"x": "d_y"},
    fold=_entmax_fold,
    constants={"alpha": 2.0},
)
_SEGMENT_INDICES = ("offsets", "ids", "permutation")
_SEGMENT_INPUTS = ("x", *[f"{name}?" for name in _SEGMENT_INDICES])
_SEGMENT_READS = ("x", *_SEGMENT_INDICES)
_SEGMENT_OPTIONS = ("SymInt num_segments", "int reduce", "int ties", "int empty", "int flags")


def _segment_unread(options: Mapping[str, Any]) -> Sequence[str]:
    reduce = REDUCTIONS[options["reduce"]]
    if reduce in ("sum", "mean"):
        return ("x", "out")
    return ("x",) if reduce == "softmax" else ()


# What the forms of segment share; they differ in what they save.
_SEGMENT: dict[str, Any] = {
    "inputs": _SEGMENT_INPUTS,
    "options": _SEGMENT_OPTIONS,
    "upstream": ("d_out",),
    "gradients": {"x": "d_x"},
    "fold": _columns,
    "indices": _SEGMENT_INDICES,
}
SEGMENT = TorchOp(
    "segment",
    _native.SEGMENT,
    outputs=("out",),
    shapes=_segment_shapes,
    reads=(*_SEGMENT_READS, "out"),
    unread=_segment_unread,
    **_SEGMENT,
)
# max and min with the row that won, which is all that their backward pass needs.
SEGMENT_ARG = TorchOp(
    "segment_arg",
    _native.SEGMENT,
    outputs=("out", "arg"),
    shapes=_segment_arg_shapes,
    reads=(*_SEGMENT_READS, "arg"),
    unread=lambda options: ("x",),
    **_SEGMENT,
)
# logsumexp of 16 bits with what its backward pass would sum anew.
SEGMENT_LSE = TorchOp(
    "segment_lse",
    _native.SEGMENT,
    outputs=("out", "lse"),
    shapes=_segment_lse_shapes,
    reads=(*_SEGMENT_READS, "lse"),
    **_SEGMENT,
)
SEGMENT_PERMUTATION = TorchOp(
    "segment_permutation",
    _native.SEGMENT_PERMUTATION,
    inputs=("ids",),
    options=("SymInt num_segments",),
    outputs=("permutation", "offsets"),
    shapes=_permutation_shapes,
)

"""Every op on NumPy arrays, forward and backward, on the CPU.

Arrays may have any strides. bfloat16 arrays are those of ml_dtypes. Each op is a function ``op`` of
inputs and options, and a function ``op_backward`` of the gradients of its outputs, what ``op`` had
and the same options, which computes all gradients that exist, or those named in ``needs``. All take

- ``threads``: as many as the process may use if 0; results do not depend on it
- ``variant``: the name of an implementation; "reference" is double precision in plain loops
- ``workspace``: an array to use as scratch memory, of at least `Plan.workspace_bytes`

`plan` tells what would run, and runs it repeatedly.

The arrays of one call have one floating-point dtype, float64, float32, bfloat16 or float16; results
are new row-major arrays of it. Index arrays are int32 or int64. What breaks an op's rules is a
ValueError that says what was expected and what was given; a valid problem that no variant serves is
a NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from . import _native
from ._arrays import Plan, compute, plan, split, wanted
from ._native import BACKWARD, FORWARD
from ._options import (
    AttentionOptions,
    BlockMatmulOptions,
    BlockSoftmaxOptions,
    MatmulMode,
    Reduce,
    SegmentOptions,
    attention_options,
    block_matmul_options,
    block_softmax_options,
    entmax_options,
    matmul_block,
    segment_options,
)
from .sparsity import BlockLayout

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    Array = np.ndarray[Any, Any]

    class Run(TypedDict, total=False):
        threads: int
        variant: str
        workspace: Array | None

    class _Attention(AttentionOptions, Run):
        seed: int  # of dropout

    class _BlockSoftmax(BlockSoftmaxOptions, Run): ...

    class _BlockMatmul(BlockMatmulOptions, Run): ...

    class _Segment(SegmentOptions, Run): ...


_Gradients = TypeVar("_Gradients")

__all__ = [
    "Plan",
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


def _gradients(
    kind: Callable[..., _Gradients],
    op: _native.Op,
    inputs: Mapping[str, Any],
    possible: Mapping[str, Any],
    needs: Iterable[str] | None,
    options: Mapping[str, Any],
    run: Mapping[str, Any],
) -> _Gradients:
    """The backward pass, for those of `possible` (name -> what it is the gradient of) needed."""
    names = wanted(needs, possible, op.name)
    results = compute(op, BACKWARD, inputs, names, options, **run)
    return kind(**{**dict.fromkeys(possible), **dict(zip(names, results))})


# ---------------------------------------------------------------- attention


class AttentionOutputs(NamedTuple):
    """What `attention` returns: out like q, with the head dim of v, and lse.

    lse is the natural logarithm of the sum of exponentials, float32 (float64 for float64); -inf
    where a row sees nothing.
    """

    out: Array
    lse: Array


class AttentionGradients(NamedTuple):
    """What `attention_backward` returns: each of the shape of what it is the gradient of."""

    d_q: Array | None
    d_k: Array | None
    d_v: Array | None
    d_bias: Array | None


def _attention_options(options: Mapping[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    own = split(options, run)
    seed, layout = own.pop("seed", 0), own.pop("layout", None)
    layout = None if layout is None else BlockLayout.of(layout)
    return {**attention_options(**own), "layout": layout, "dropout_seed": seed}


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    **options: Unpack[_Attention],
) -> AttentionOutputs:
    """softmax(scale q kᵀ + bias) v in memory linear in the sequence lengths.

    Args:
        q: [B,Sq,H,D], or [total_q,H,D] with cu_seqlens; D from 1 to 256.
        k: [B,Sk,Hkv,D], or [total_k,Hkv,D]; H is a multiple of Hkv.
        v: [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv].
        bias: [B|1,H|1,Sq|1,Sk|1], added to the scores; -inf hides a key. Not with cu_seqlens.
        cu_seqlens_q: [B+1], the first rows of the sequences in q, and their total.
        cu_seqlens_k: the same for k and v.
        **options: see `AttentionOptions`, and `seed` of dropout.

    Returns:
        out [B,Sq,H,Dv], or [total_q,H,Dv], and lse [B,H,Sq], or [H,total_q].
    """
    run: dict[str, Any] = {}
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    own = _attention_options(options, run)
    return AttentionOutputs(
        *compute(_native.ATTENTION, FORWARD, inputs, ("out", "lse"), own, **run)
    )


def attention_backward(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    d_lse: Array | None = None,
    bias: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    needs: Iterable[str] | None = None,
    **options: Unpack[_Attention],
) -> AttentionGradients:
    """The gradients of `attention`, from what it was given and gave, with the same options.

    Args:
        d_out: the gradient of out, of its shape; any strides.
        d_lse: the gradient of lse.
        needs: some of "d_q", "d_k", "d_v", "d_bias"; all that exist when not given.
    """
    run: dict[str, Any] = {}
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "out": out,
        "lse": lse,
        "d_out": d_out,
        "d_lse": d_lse,
    }
    possible = {"d_q": q, "d_k": k, "d_v": v, "d_bias": bias}
    own = _attention_options(options, run)
    return _gradients(AttentionGradients, _native.ATTENTION, inputs, possible, needs, own, run)


# ---------------------------------------------------------------- block-sparse


def block_softmax(
    x: Array,
    layout: BlockLayout | Array,
    *,
    rpe: Array | None = None,
    key_padding_mask: Array | None = None,
    attn_mask: Array | None = None,
    **options: Unpack[_BlockSoftmax],
) -> Array:
    """softmax over the blocks of a row of (scale x + rpe + key_padding_mask + attn_mask).

    Args:
        x: [Z,nnz,b,b], the blocks of the scores ordered by (head, row, column).
        layout: a `BlockLayout`, or an array [H,R,C] that is not 0 where a block is.
        rpe: [Z|1,H|1,R·b,C·b], a relative position term.
        key_padding_mask: [Z,C·b]; added in mode "add", in mode "keep" it hides where it is 0.
        attn_mask: [R·b,C·b], shared by batch and heads; modes as above.
        **options: see `BlockSoftmaxOptions`.

    Returns:
        y, like x.
    """
    run: dict[str, Any] = {}
    own = block_softmax_options(**split(options, run))
    inputs = {"x": x, "rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    own.update(layout=BlockLayout.of(layout), block=np.shape(x)[-1])
    return compute(_native.BLOCK_SOFTMAX, FORWARD, inputs, ("y",), own, **run)[0]


class BlockSoftmaxGradients(NamedTuple):
    """What `block_softmax_backward` returns: each like what it is the gradient of."""

    d_x: Array | None
    d_rpe: Array | None
    d_key_padding_mask: Array | None
    d_attn_mask: Array | None


def block_softmax_backward(
    d_y: Array,
    y: Array,
    layout: BlockLayout | Array,
    *,
    rpe: Array | None = None,
    key_padding_mask: Array | None = None,
    attn_mask: Array | None = None,
    needs: Iterable[str] | None = None,
    **options: Unpack[_BlockSoftmax],
) -> BlockSoftmaxGradients:
    """The gradients of `block_softmax`; those of masks exist in mode "add" only."""
    run: dict[str, Any] = {}
    own = block_softmax_options(**split(options, run))
    adds = (own["key_padding_mode"] == 0, own["attn_mask_mode"] == 0)
    possible = {
        "d_x": y,
        "d_rpe": rpe,
        "d_key_padding_mask": key_padding_mask if adds[0] else None,
        "d_attn_mask": attn_mask if adds[1] else None,
    }
    inputs = {
        "x": y,  # its layout is the output's; the backward pass reads no x
        "rpe": rpe,
        "key_padding_mask": key_padding_mask,
        "attn_mask": attn_mask,
        "y": y,
        "d_y": d_y,
    }
    own.update(layout=BlockLayout.of(layout), block=np.shape(y)[-1])
    op = _native.BLOCK_SOFTMAX
    return _gradients(BlockSoftmaxGradients, op, inputs, possible, needs, own, run)


def block_matmul(
    a: Array,
    b: Array,
    layout: BlockLayout | Array,
    mode: MatmulMode,
    *,
    block: int | None = None,
    **options: Unpack[_BlockMatmul],
) -> Array:
    """c = op(a) op(b), where the mode names what is block-sparse: c ("sdd"), a ("dsd"), b ("dds").

    - sdd: a [Z,H,R·b,K], b [Z,H,K,C·b], c [Z,nnz,b,b]
    - dsd: a [Z,nnz,b,b], b [Z,H,C·b,N], c [Z,H,R·b,N]
    - dds: a [Z,H,M,R·b], b [Z,nnz,b,b], c [Z,H,M,C·b]

    `block` is needed for "sdd" alone; elsewhere the sparse operand tells it. Options: see
    `BlockMatmulOptions`.
    """
    run: dict[str, Any] = {}
    own = _block_matmul_options(a, b, layout, mode, block, split(options, run))
    return compute(_native.BLOCK_MATMUL, FORWARD, {"a": a, "b": b}, ("c",), own, **run)[0]


class BlockMatmulGradients(NamedTuple):
    """What `block_matmul_backward` returns: each like what it is the gradient of."""

    d_a: Array | None
    d_b: Array | None


def block_matmul_backward(
    d_c: Array,
    a: Array,
    b: Array,
    layout: BlockLayout | Array,
    mode: MatmulMode,
    *,
    block: int | None = None,
    needs: Iterable[str] | None = None,
    **options: Unpack[_BlockMatmul],
) -> BlockMatmulGradients:
    """The gradients of `block_matmul`."""
    run: dict[str, Any] = {}
    own = _block_matmul_options(a, b, layout, mode, block, split(options, run))
    inputs, possible = {"a": a, "b": b, "d_c": d_c}, {"d_a": a, "d_b": b}
    op = _native.BLOCK_MATMUL
    return _gradients(BlockMatmulGradients, op, inputs, possible, needs, own, run)


def _block_matmul_options(
    a: Array, b: Array, layout: Any, mode: str, block: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    block = matmul_block(mode, block, np.shape(a), np.shape(b))
    own = block_matmul_options(mode, **options)
    return {**own, "layout": BlockLayout.of(layout), "block": block}


# ---------------------------------------------------------------- entmax


def entmax(
    x: Array,
    alpha: float | Array = 2.0,
    axis: int = -1,
    *,
    mask: Array | None = None,
    offsets: Array | None = None,
    check_indices: bool = False,
    **run: Unpack[Run],
) -> Array:
    """p_i = [(alpha-1) x_i - tau]₊^(1/(alpha-1)) with sum p = 1 along an axis.

    Args:
        x: of any shape.
        alpha: 1 is softmax, 1.5 entmax15, 2 sparsemax; at least 1. An array has the shape of x
            without the axis: one alpha for each row.
        axis: the axis that rows lie along.
        mask: bool or uint8, the shape of x; hides where it is 0.
        offsets: [G+1], ascending; the axis then holds G rows of different lengths.
        check_indices: reports bad offsets instead of clamping them.

    Returns:
        p, like x. Rows that see nothing are 0.
    """
    inputs, own = _entmax(x, alpha, axis, mask, offsets, check_indices)
    return compute(_native.ENTMAX, FORWARD, {"x": x, **inputs}, ("y",), own, **run)[0]


class EntmaxGradients(NamedTuple):
    """What `entmax_backward` returns: d_x like x, d_alpha one for each row."""

    d_x: Array | None
    d_alpha: Array | None


def entmax_backward(
    d_y: Array,
    y: Array,
    alpha: float | Array = 2.0,
    axis: int = -1,
    *,
    mask: Array | None = None,
    offsets: Array | None = None,
    check_indices: bool = False,
    needs: Iterable[str] = ("d_x",),
    **run: Unpack[Run],
) -> EntmaxGradients:
    """The gradients of `entmax`: d_x, and d_alpha if `needs` names it."""
    inputs, own = _entmax(y, alpha, axis, mask, offsets, check_indices)
    # The layout of x is the output's; the backward pass reads no x.
    given, possible = {"x": y, **inputs, "y": y, "d_y": d_y}, {"d_x": y, "d_alpha": y}
    return _gradients(EntmaxGradients, _native.ENTMAX, given, possible, needs, own, run)


def _entmax(
    like: Any, alpha: Any, axis: int, mask: Any, offsets: Any, check_indices: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = None
    if np.ndim(alpha) > 0:
        exact = np.asarray(like).dtype == np.float64
        rows = np.asarray(alpha, np.float64 if exact else np.float32)
    own = entmax_options(2.0 if rows is not None else float(alpha), axis, check_indices)
    return {"alpha_per_row": rows, "mask": mask, "offsets": offsets}, own


# ---------------------------------------------------------------- segment


class SegmentPermutation(NamedTuple):
    """What `segment_permutation` returns: int64 [N] and [S+1]."""

    permutation: Array
    offsets: Array


def segment_permutation(ids: Array, num_segments: int) -> SegmentPermutation:
    """A stable sort of ids in any order, made once and given to `segment_reduce` often.

    Args:
        ids: [N], int32 or int64; rows whose id is out of [0, num_segments) are in no segment.
        num_segments: S.
    """
    own = {"num_segments": num_segments}
    outputs = ("permutation", "offsets")
    return SegmentPermutation(
        *compute(_native.SEGMENT_PERMUTATION, FORWARD, {"ids": ids}, outputs, own)
    )


def segment_reduce(
    x: Array,
    reduce: Reduce = "sum",
    *,
    offsets: Array | None = None,
    ids: Array | None = None,
    permutation: Array | None = None,
    **options: Unpack[_Segment],
) -> Array:
    """Reduces the rows of each segment to one, column by column.

    Args:
        x: [N,D].
        reduce: "sum", "mean", "max", "min", "prod", "logsumexp" or "softmax".
        offsets: [S+1]: segment s has the rows from offsets[s] to offsets[s+1].
        ids: [N], ascending, instead of offsets; `num_segments` tells S.
        permutation: [N], with offsets: both from `segment_permutation`, for ids in any order.
        **options: see `SegmentOptions`.

    Returns:
        [S,D], like x; [N,D] for "softmax".
    """
    run: dict[str, Any] = {}
    own = segment_options(reduce, ids is not None, **split(options, run))
    inputs = {"x": x, "offsets": offsets, "ids": ids, "permutation": permutation}
    return compute(_native.SEGMENT, FORWARD, inputs, ("out",), own, **run)[0]


def segment_reduce_backward(
    d_out: Array,
    x: Array,
    out: Array,
    reduce: Reduce = "sum",
    *,
    offsets: Array | None = None,
    ids: Array | None = None,
    permutation: Array | None = None,
    **options: Unpack[_Segment],
) -> Array:
    """The gradient of x in `segment_reduce`, from its input, its output and the same options."""
    run: dict[str, Any] = {}
    own = segment_options(reduce, ids is not None, **split(options, run))
    inputs = {
        "x": x,
        "offsets": offsets,
        "ids": ids,
        "permutation": permutation,
        "out": out,
        "d_out": d_out,
    }
    return compute(_native.SEGMENT, BACKWARD, inputs, ("d_x",), own, **run)[0]

"""Block-sparse products and softmax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _native
from .._native import FORWARD
from .._options import (
    BlockMatmulOptions,
    BlockSoftmaxOptions,
    MatmulMode,
    block_matmul_options,
    block_softmax_options,
    matmul_block,
    softmax_block,
)
from ..sparsity import BlockLayout
from ._arrays import compute, gradients, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Array, Run

    class _BlockSoftmax(BlockSoftmaxOptions, Run): ...

    class _BlockMatmul(BlockMatmulOptions, Run): ...


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
    own.update(layout=BlockLayout.of(layout), block=softmax_block("x", np.shape(x)))
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
    own.update(layout=BlockLayout.of(layout), block=softmax_block("y", np.shape(y)))
    op = _native.BLOCK_SOFTMAX
    return gradients(BlockSoftmaxGradients, op, inputs, possible, needs, own, run)


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
    return gradients(BlockMatmulGradients, op, inputs, possible, needs, own, run)


def _block_matmul_options(
    a: Array, b: Array, layout: Any, mode: str, block: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    block = matmul_block(mode, block, np.shape(a), np.shape(b))
    own = block_matmul_options(mode, **options)
    return {**own, "layout": BlockLayout.of(layout), "block": block}

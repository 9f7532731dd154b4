"""Block-sparse products, softmax, and attention made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._checks import check_rank
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
from ._fields import identifier, remembered
from ._ops import BLOCK_MATMUL, BLOCK_SOFTMAX

if TYPE_CHECKING:
    from typing_extensions import Unpack

_softmax_fields = remembered(BLOCK_SOFTMAX, block_softmax_options)
_matmul_fields = remembered(BLOCK_MATMUL, block_matmul_options)


def block_softmax(
    x: Tensor,
    layout: BlockLayout,
    *,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **options: Unpack[BlockSoftmaxOptions],
) -> Tensor:
    """softmax over the blocks of a row of (scale x + rpe + key_padding_mask + attn_mask).

    Args:
        x: [Z,nnz,b,b], the blocks of the scores ordered by (head, row, column).
        layout: the blocks that exist, of H heads, R rows, C columns.
        rpe: [Z|1,H|1,R·b,C·b], a relative position term.
        key_padding_mask: [Z,C·b]. In mode "add" it is added and gets a gradient; in mode "keep" it
            hides where it is 0, and may be uint8 or bool.
        attn_mask: [R·b,C·b], shared by batch and heads; modes as above.
        **options: see `BlockSoftmaxOptions`.

    Masks in mode "keep" get no gradient. Under autocast, which makes scores of another dtype than
    what is added to them, the latter take that of x.

    Returns:
        The probabilities, like x; 0 in rows that see nothing.
    """
    casts = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    rpe, key_padding_mask, attn_mask = [
        term.to(x.dtype) if casts and term is not None and term.is_floating_point() else term
        for term in (rpe, key_padding_mask, attn_mask)
    ]
    fields = (identifier(layout), softmax_block("x", x.shape), *_softmax_fields(**options))
    masks = [
        mask.detach() if mode == "keep" and mask is not None and mask.requires_grad else mask
        for mask, mode in (
            (key_padding_mask, options.get("key_padding_mode")),
            (attn_mask, options.get("attn_mask_mode", "keep")),
        )
    ]
    return BLOCK_SOFTMAX.call((x, rpe, *masks), fields)


def block_matmul(
    a: Tensor,
    b: Tensor,
    layout: BlockLayout,
    mode: MatmulMode,
    *,
    block: int | None = None,
    **options: Unpack[BlockMatmulOptions],
) -> Tensor:
    """c = op(a) op(b), where the mode names what is block-sparse: c ("sdd"), a ("dsd"), b ("dds").

    - sdd: a [Z,H,R·b,K], b [Z,H,K,C·b], c [Z,nnz,b,b]
    - dsd: a [Z,nnz,b,b], b [Z,H,C·b,N], c [Z,H,R·b,N]
    - dds: a [Z,H,M,R·b], b [Z,nnz,b,b], c [Z,H,M,C·b]

    Args:
        a: the left matrix; one dtype with b.
        b: the right matrix.
        layout: the blocks of the sparse one, of H heads, R rows, C columns.
        mode: "sdd", "dsd" or "dds".
        block: the block size, 16 to 128 and a multiple of 16; needed for "sdd" alone.
        **options: see `BlockMatmulOptions`.

    Returns:
        c, of that dtype; 0 in rows and columns that no block reaches.
    """
    block = matmul_block(mode, block, a.shape, b.shape)
    fields = (identifier(layout), block, *_matmul_fields(mode, **options))
    return BLOCK_MATMUL.call((a, b), fields)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mode: Literal["add", "keep"] = "add",
    attn_mask_mode: Literal["add", "keep"] = "keep",
) -> Tensor:
    """Attention in which blocks that the layout lacks take no part.

    Args:
        q: [B,S,H,D].
        k: [B,S,H,D].
        v: [B,S,H,Dv].
        layout: of H heads; its block size is S divided by its rows.
        scale: of the scores; 1/sqrt(D) when not given.
        rpe: as in `block_softmax`, as are the masks and their modes.

    Returns:
        [B,S,H,Dv], by a product, a softmax and a product over the blocks.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank("block_sparse_attention", name, tensor.shape, "[B,S,H,D]")
    identifier(layout)  # or no layout is refused below for what it lacks
    # Of no rows any block size does.
    block = q.shape[1] // layout.rows if layout.rows else q.shape[1] or 16
    heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    scores = block_matmul(
        heads_first[0], heads_first[1], layout, "sdd", block=block, transpose_b=True
    )
    weights = block_softmax(
        scores,
        layout,
        rpe=rpe,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        key_padding_mode=key_padding_mode,
        attn_mask_mode=attn_mask_mode,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return block_matmul(weights, heads_first[2], layout, "dsd").transpose(1, 2)

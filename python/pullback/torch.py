"""The ops for PyTorch: differentiable functions and modules, on CPU and CUDA tensors.

They are registered operators: torch.compile (with dynamic shapes), autocast, torch.func, activation
checkpointing and CUDA graphs work. Tensors may have any strides; outputs and gradients are
row-major. CUDA work goes to the current stream, and nothing waits. Results are the same bits every
time, unless ``deterministic=False`` allows others.

Tensors of one call are on one device, and floating-point ones have one dtype: float64, float32,
bfloat16 or float16. Sums run in float32 (float64 for float64), each result is rounded once. Index
tensors are int32 or int64 and are not trusted: entries out of range or order are clamped or
dropped, as the op's page says, or on the CPU reported with ``check_indices``.

A tensor or an option that breaks these rules is a ValueError, which says what was expected and what
was given; a valid problem that no kernel on the device serves is a NotImplementedError; failures of
the driver and lack of memory are a `DeviceError`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, Literal, overload

import torch
from torch import Tensor, nn

from . import _torch_ops as ops
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
    choice,
    entmax_options,
    matmul_block,
    segment_options,
)
from ._torch_operator import TorchOp
from .sparsity import BlockLayout, FixedSparsityConfig, SparsityConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    "segment_softmax",
    "sparsemax",
]


_CONSTANTS = {bool, int, float, str, tuple, type(None)}


def _fields(op: TorchOp, make: Callable[..., dict[str, Any]]) -> Callable[..., tuple[Any, ...]]:
    """What `make` makes of options, in the order of the operator's schema.

    It is remembered, as most calls of a model have the options of one before.
    """

    def fields(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        own = make(*arguments, **options)
        return tuple([own[name] for name in op.options if name in own])

    remembered = lru_cache(1024)(fields)

    def call(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        constant = _CONSTANTS.issuperset(map(type, options.values()))
        if constant and not torch.compiler.is_compiling():
            return remembered(*arguments, **options)
        return fields(*arguments, **options)

    return call


def _identifier(layout: BlockLayout) -> int:
    if not isinstance(layout, BlockLayout):
        raise TypeError(
            f"layout: expected a BlockLayout, got {type(layout).__name__}; "
            "make one of an array, and keep it"
        )
    return layout.identifier


_attention_fields = _fields(ops.ATTENTION, attention_options)
_block_softmax_fields = _fields(ops.BLOCK_SOFTMAX, block_softmax_options)
_block_matmul_fields = _fields(ops.BLOCK_MATMUL, block_matmul_options)
_entmax_fields = _fields(ops.ENTMAX, entmax_options)
_segment_fields = _fields(ops.SEGMENT, segment_options)


# ---------------------------------------------------------------- attention


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    seed: Tensor | int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    seed: Tensor | int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seed: Tensor | int | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + bias) v in memory linear in the sequence lengths.

    Args:
        q: [B,Sq,H,D], or [total_q,H,D] with cu_seqlens; D from 1 to 256.
        k: [B,Sk,Hkv,D], or [total_k,Hkv,D]; H is a multiple of Hkv.
        v: [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv].
        bias: [B|1,H|1,Sq|1,Sk|1], added to the scores; its gradient has its own shape. -inf hides
            a key. Not with cu_seqlens.
        cu_seqlens_q: [B+1], the first rows of the sequences in q, and their total.
        cu_seqlens_k: the same for k and v.
        seed: of dropout, a number or an int64 tensor of one element, read when the kernels run;
            when not given, it is drawn from the generator of q's device. A CUDA graph draws at each
            replay.
        return_lse: also returns the logsumexp of the scores, which is differentiable, too.
        **options: see `AttentionOptions`.

    Returns:
        out [B,Sq,H,Dv], or [total_q,H,Dv]. With `return_lse` also the natural logarithm
        [B,H,Sq], or [H,total_q], in float32 (float64 for float64); -inf where a query sees nothing.
    """
    changed: dict[str, Any] = options  # type: ignore[assignment]
    layout = options.get("layout")
    changed["layout"] = 0 if layout is None else _identifier(layout)
    if torch.are_deterministic_algorithms_enabled():
        changed["deterministic"] = True
    if options.get("dropout", 0) == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)
    elif isinstance(seed, Tensor):
        seed = seed.to(q.device)
    else:
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)
    tensors = (q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seed)
    result: Any = ops.ATTENTION.call(tensors, _attention_fields(**changed), not return_lse)
    return result


# ---------------------------------------------------------------- block-sparse


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

    Returns:
        The probabilities, like x; 0 in rows that see nothing.
    """
    fields = (_identifier(layout), x.shape[-1], *_block_softmax_fields(**options))
    return ops.BLOCK_SOFTMAX.call((x, rpe, key_padding_mask, attn_mask), fields)


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
    fields = (_identifier(layout), block, *_block_matmul_fields(mode, **options))
    return ops.BLOCK_MATMUL.call((a, b), fields)


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
    block = q.shape[1] // max(layout.rows, 1)
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


# ---------------------------------------------------------------- entmax


def entmax(
    x: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """p_i = [(alpha-1) x_i - tau]₊^(1/(alpha-1)) with sum p = 1 along a dimension.

    Args:
        x: of any shape.
        alpha: 1 is softmax, 1.5 entmax15, 2 sparsemax; at least 1. A tensor has the shape of x with
            size 1 at `dim`, or without it, or broadcasts to that, and gets its gradient.
        dim: the dimension of size n that rows lie along.
        mask: bool or uint8, the shape of x; hides where it is 0.
        offsets: [G+1], ascending; `dim` then holds G rows of different lengths.
        check_indices: reports bad offsets instead of clamping them; on the CPU.

    Returns:
        p, like x. Rows that see nothing are 0.
    """
    rows: Tensor | None = None
    if isinstance(alpha, Tensor):
        shape = list(x.shape)
        axis = dim % x.dim()
        if alpha.dim() == x.dim() and alpha.shape[axis] == 1:
            alpha = alpha.squeeze(axis)
        if offsets is None:
            del shape[axis]
        else:
            shape[axis] = offsets.shape[0] - 1
        if any(a not in (1, b) for a, b in zip(alpha.shape[::-1], shape[::-1])):
            raise ValueError(
                f"entmax: alpha: expected what broadcasts to {shape}, got {list(alpha.shape)}"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = alpha.to(dtype).expand(shape)
    elif alpha == 2 and offsets is None and x.requires_grad and torch.is_grad_enabled():
        found: Tensor = ops.SPARSEMAX.call((x, mask), (dim,), True)
        return found
    fields = _entmax_fields(2.0 if rows is not None else float(alpha), dim, check_indices)
    return ops.ENTMAX.call((x, rows, mask, offsets), fields)


def sparsemax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """The projection onto the simplex: `entmax` with alpha 2."""
    return entmax(x, 2.0, dim, mask=mask)


def entmax15(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """`entmax` with alpha 1.5."""
    return entmax(x, 1.5, dim, mask=mask)


# ---------------------------------------------------------------- segment


def segment_permutation(ids: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """A stable sort of ids in any order, made once and given to `segment_reduce` often.

    Args:
        ids: [N]; rows whose id is out of [0, num_segments) are in no segment.
        num_segments: S.

    Returns:
        permutation [N] and offsets [S+1], int64.
    """
    permutation, offsets = ops.SEGMENT_PERMUTATION.call((ids,), (num_segments,))
    return permutation, offsets


def segment_reduce(
    x: Tensor,
    reduce: Reduce = "sum",
    *,
    offsets: Tensor | None = None,
    ids: Tensor | None = None,
    permutation: Tensor | None = None,
    **options: Unpack[SegmentOptions],
) -> Tensor:
    """Reduces the rows of each segment to one, column by column.

    Args:
        x: [N,...].
        reduce: "sum", "mean", "max", "min", "prod", "logsumexp" or "softmax".
        offsets: [S+1]: segment s has the rows from offsets[s] to offsets[s+1].
        ids: [N], ascending, instead of offsets; `num_segments` tells S.
        permutation: [N], with offsets: both from `segment_permutation`, for ids in any order.
        **options: see `SegmentOptions`.

    Returns:
        [S,...], like x; [N,...] for "softmax".
    """
    fields = _segment_fields(reduce, ids is not None, **options)
    with_arg = reduce in ("max", "min") and options.get("ties", "first") != "even"
    if with_arg and x.requires_grad and torch.is_grad_enabled():
        return _segment(ops.SEGMENT_ARG, x, (offsets, ids, permutation), fields, True)
    return _segment(ops.SEGMENT, x, (offsets, ids, permutation), fields)


def segment_reduce_arg(
    x: Tensor,
    reduce: Literal["max", "min"],
    *,
    offsets: Tensor | None = None,
    ids: Tensor | None = None,
    permutation: Tensor | None = None,
    **options: Unpack[SegmentOptions],
) -> tuple[Tensor, Tensor]:
    """`segment_reduce` with the int64 row of x that each value came from, -1 for empty segments."""
    fields = _segment_fields(reduce, ids is not None, **options)
    out, arg = _segment(ops.SEGMENT_ARG, x, (offsets, ids, permutation), fields)
    return out, arg.long()


def segment_softmax(
    x: Tensor,
    *,
    offsets: Tensor | None = None,
    ids: Tensor | None = None,
    permutation: Tensor | None = None,
    **options: Unpack[SegmentOptions],
) -> Tensor:
    """The softmax over the rows of each segment, by column: `segment_reduce` with "softmax"."""
    return segment_reduce(
        x, "softmax", offsets=offsets, ids=ids, permutation=permutation, **options
    )


def _segment(
    op: TorchOp,
    x: Tensor,
    segments: tuple[Tensor | None, ...],
    fields: tuple[Any, ...],
    first: bool = False,
) -> Any:
    """The op works on [N,D]; the dimensions after the first are folded into D."""
    rank = x.dim()
    if rank == 2:
        return op.call((x, *segments), fields, first)
    if rank == 0:
        raise ValueError("segment: x: expected [N,...], got rank 0; give it a dimension of size 1")
    if rank == 1:
        flat = x.unsqueeze(1)
    else:
        flat = x.reshape(x.shape[0], -1) if x.numel() else x.flatten(1)
    results = op.call((flat, *segments), fields, first)
    if isinstance(results, Tensor):
        return results.reshape(results.shape[0], *x.shape[1:])
    return tuple(result.reshape(result.shape[0], *x.shape[1:]) for result in results)


# ---------------------------------------------------------------- modules


class Entmax(nn.Module):
    """`entmax` with a fixed alpha."""

    def __init__(self, alpha: float = 1.5, dim: int = -1) -> None:
        super().__init__()
        self.alpha, self.dim = alpha, dim

    def forward(self, x: Tensor) -> Tensor:
        return entmax(x, self.alpha, self.dim)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, dim={self.dim}"


class Sparsemax(Entmax):
    """`entmax` with alpha 2."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(2.0, dim)


class Entmax15(Entmax):
    """`entmax` with alpha 1.5."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(1.5, dim)


def _mask_mode(option: str, mode: str) -> Any:
    return ("add", "keep", "keep")[choice(option, mode, ("add", "mul", "keep"))]


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention with the interface of DeepSpeed's module of this name.

    Called with query, key and value [B,H,S,D], and optionally rpe, key_padding_mask [B,S] and
    attn_mask [S,S]; gives [B,H,S,D]. The layout of a sequence length is made when first met.

    Args:
        sparsity_config: the pattern; `FixedSparsityConfig` of 4 heads when not given.
        key_padding_mask_mode: "add" adds the mask to the scores, "mul" (or "keep") hides where it
            is 0.
        attn_mask_mode: the same for the other mask.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mode = _mask_mode("key_padding_mask_mode", key_padding_mask_mode)
        self.attn_mask_mode = _mask_mode("attn_mask_mode", attn_mask_mode)
        self._layouts: dict[int, BlockLayout] = {}

    def get_layout(self, seq_len: int) -> BlockLayout:
        layout = self._layouts.get(seq_len)
        if layout is None:
            layout = self._layouts[seq_len] = self.sparsity_config.make_layout(seq_len)
        return layout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        out = block_sparse_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.get_layout(query.shape[2]),
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mode=self.key_padding_mode,
            attn_mask_mode=self.attn_mask_mode,
        )
        return out.transpose(1, 2)

"""Reductions of segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .._options import Reduce, SegmentOptions, integer, segment_options
from ._fields import remembered
from ._operator import TorchOp
from ._ops import SEGMENT, SEGMENT_ARG, SEGMENT_LSE, SEGMENT_PERMUTATION

if TYPE_CHECKING:
    from typing_extensions import Unpack

_fields = remembered(SEGMENT, segment_options)


def segment_permutation(ids: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """A stable sort of ids in any order, made once and given to `segment_reduce` often.

    Args:
        ids: [N]; rows whose id is out of [0, num_segments) are in no segment.
        num_segments: S.

    Returns:
        permutation [N] and offsets [S+1], int64.
    """
    segments = integer("segment_permutation: num_segments", num_segments)
    permutation, offsets = SEGMENT_PERMUTATION.call((ids,), (segments,))
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
        permutation: [N], with offsets: both from `segment_permutation`, for ids in any order. With
            those ids, too, GPUs write rows of few columns several times faster.
        **options: see `SegmentOptions`.

    Returns:
        [S,...], like x; [N,...] for "softmax".
    """
    fields = _fields(reduce, ids is not None and offsets is None, **options)
    if x.requires_grad and torch.is_grad_enabled():
        saving = None
        if reduce in ("max", "min") and options.get("ties", "first") != "even":
            saving = SEGMENT_ARG
        elif reduce == "logsumexp" and x.dtype in (torch.bfloat16, torch.float16):
            saving = SEGMENT_LSE
        if saving is not None:
            return _segment(saving, x, (offsets, ids, permutation), fields, True)
    return _segment(SEGMENT, x, (offsets, ids, permutation), fields)


def segment_reduce_arg(
    x: Tensor,
    reduce: Literal["max", "min"],
    *,
    offsets: Tensor | None = None,
    ids: Tensor | None = None,
    permutation: Tensor | None = None,
    **options: Unpack[SegmentOptions],
) -> tuple[Tensor, Tensor]:
    """`segment_reduce` with the int64 row of x that each value came from, -1 for empty segments.

    The gradient goes to that row: ties are "first" or "last".
    """
    if options.get("ties") == "even":
        raise ValueError(
            "segment: ties: expected 'first' or 'last', as one row is saved; got 'even'"
        )
    fields = _fields(reduce, ids is not None and offsets is None, **options)
    out, arg = _segment(SEGMENT_ARG, x, (offsets, ids, permutation), fields)
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
        flat = x.flatten(1)
    results = op.call((flat, *segments), fields, first)
    if isinstance(results, Tensor):
        return results.reshape(results.shape[0], *x.shape[1:])
    return tuple(result.reshape(result.shape[0], *x.shape[1:]) for result in results)

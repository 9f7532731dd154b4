"""Entmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_rank
from .._options import entmax_options, integer
from ._dispatch import transforms_active
from ._fields import remembered
from ._ops import ENTMAX, SPARSEMAX

_fields = remembered(ENTMAX, entmax_options)


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
        x: of rank 1 to 8.
        alpha: 1 is softmax, 1.5 entmax15, 2 sparsemax; at least 1. A tensor has the shape of x with
            size 1 at `dim`, or broadcasts to that of x without it (with `offsets`, with G there),
            and gets its gradient. torch.compile compiles each value of a float anew: where alpha
            follows a schedule, give it a tensor.
        dim: the dimension of size n that rows lie along.
        mask: bool or uint8, the shape of x; hides where it is 0.
        offsets: [G+1], ascending; `dim` then holds G rows of different lengths.
        check_indices: reports bad offsets instead of clamping them. On a GPU this waits for the
            stream, and cannot be captured.

    Returns:
        p, like x. Rows that see nothing are 0.
    """
    if x.dim() == 0:
        raise ValueError(
            "entmax: x: expected rank 1 to 8, got rank 0; give it a dimension of size 1"
        )
    rows: Tensor | None = None
    dim = integer("entmax: dim", dim)
    if dim is None:
        raise ValueError("entmax: axis: expected a number, got None; -1 is the last dimension")
    if x.dim() == 1 and dim in (-1, 0) and offsets is None and transforms_active():
        # vmap makes one problem of many that have rows.
        if isinstance(alpha, Tensor) and alpha.dim() == 1:
            alpha = alpha.unsqueeze(0)
        several = None if mask is None else mask.unsqueeze(0)
        return entmax(x.unsqueeze(0), alpha, -1, mask=several).squeeze(0)
    if isinstance(alpha, Tensor):
        shape = list(x.shape)
        axis = dim % x.dim()
        if offsets is None and alpha.dim() == x.dim() and alpha.shape[axis] == 1:
            alpha = alpha.squeeze(axis)
        if offsets is None:
            del shape[axis]
        else:
            check_rank("entmax", "offsets", offsets.shape, "[G+1]")
            shape[axis] = torch.sym_max(offsets.shape[0] - 1, 0)  # none are refused by the plan
        pairs = zip(alpha.shape[::-1], shape[::-1])
        if alpha.dim() > len(shape) or any(a not in (1, b) for a, b in pairs):
            raise ValueError(
                f"entmax: alpha: expected what broadcasts to {shape}, got {list(alpha.shape)}"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = alpha.to(dtype).expand(shape)
    elif (
        alpha == 2
        and offsets is None
        and x.requires_grad
        and torch.is_grad_enabled()
        and _saves_mask(x, dim)
    ):
        found: Tensor = SPARSEMAX.call((x, mask), (dim,), True)
        return found
    fields = _fields(2.0 if rows is not None else float(alpha), dim, check_indices)
    return ENTMAX.call((x, rows, mask, offsets), fields)


def _saves_mask(x: Tensor, dim: int) -> bool:
    """Whether backward reads a bit an element in place of y, where that is fast."""
    if not -x.dim() <= dim < x.dim():
        return False
    length = x.shape[dim]
    if x.stride(dim) != 1:
        return False
    if x.is_cuda:
        row_bytes = length * x.element_size()
        return _known(row_bytes > 128) and _known(row_bytes % 16 == 0)
    return _known(length >= 256) or (_known(length >= 32) and _known(length % 16 == 0))


def _known(condition: Any) -> bool:
    """That a length is so, without asking for it where it is a compiler's symbol: compiled code
    would be for the lengths that answer alike, and some lengths only the data tell."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def sparsemax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """The projection onto the simplex: `entmax` with alpha 2."""
    return entmax(x, 2.0, dim, mask=mask)


def entmax15(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """`entmax` with alpha 1.5."""
    return entmax(x, 1.5, dim, mask=mask)

"""Entmax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _native
from .._native import FORWARD
from .._options import entmax_options
from ._arrays import compute, gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Array, Run


def entmax(
    x: Array,
    alpha: float | Array = 1.5,
    axis: int = -1,
    *,
    mask: Array | None = None,
    offsets: Array | None = None,
    check_indices: bool = False,
    **run: Unpack[Run],
) -> Array:
    """p_i = [(alpha-1) x_i - tau]₊^(1/(alpha-1)) with sum p = 1 along an axis.

    Args:
        x: of rank 1 to 8.
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
    alpha: float | Array = 1.5,
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
    return gradients(EntmaxGradients, _native.ENTMAX, given, possible, needs, own, run)


def _entmax(
    like: Any, alpha: Any, axis: int, mask: Any, offsets: Any, check_indices: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = None
    if np.ndim(alpha) > 0:
        exact = np.asarray(like).dtype == np.float64
        rows = np.asanyarray(alpha, np.float64 if exact else np.float32)
    own = entmax_options(2.0 if rows is not None else float(alpha), axis, check_indices)
    return {"alpha_per_row": rows, "mask": mask, "offsets": offsets}, own

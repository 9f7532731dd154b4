"""Reductions of segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _native
from .._native import BACKWARD, FORWARD
from .._options import Reduce, SegmentOptions, integer, segment_options
from ._arrays import compute, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Array, Run

    class _Segment(SegmentOptions, Run): ...


class SegmentPermutation(NamedTuple):
    """What `segment_permutation` returns: int64 [N] and [S+1]."""

    permutation: Array
    offsets: Array


def segment_permutation(ids: Array, num_segments: int, **run: Unpack[Run]) -> SegmentPermutation:
    """A stable sort of ids in any order, made once and given to `segment_reduce` often.

    Args:
        ids: [N], int32 or int64; rows whose id is out of [0, num_segments) are in no segment.
        num_segments: S.
    """
    own = {"num_segments": integer("segment_permutation: num_segments", num_segments)}
    outputs = ("permutation", "offsets")
    return SegmentPermutation(
        *compute(_native.SEGMENT_PERMUTATION, FORWARD, {"ids": ids}, outputs, own, **run)
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
        permutation: [N], with offsets: both from `segment_permutation`, for ids in any order. With
            those ids, too, GPUs write rows of few columns several times faster.
        **options: see `SegmentOptions`.

    Returns:
        [S,D], like x; [N,D] for "softmax".
    """
    run: dict[str, Any] = {}
    own = segment_options(reduce, ids is not None and offsets is None, **split(options, run))
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
    own = segment_options(reduce, ids is not None and offsets is None, **split(options, run))
    inputs = {
        "x": x,
        "offsets": offsets,
        "ids": ids,
        "permutation": permutation,
        "out": out,
        "d_out": d_out,
    }
    return compute(_native.SEGMENT, BACKWARD, inputs, ("d_x",), own, **run)[0]

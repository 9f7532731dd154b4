"""Functions of torch_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch as ops
from .._options import Reduce

_REDUCTIONS: dict[str, Reduce] = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "min": "min",
    "max": "max",
}


def segment_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduces rows [indptr[i], indptr[i+1]) of src along dimension indptr.dim() - 1.

    reduce is "sum", "add", "mean", "min" or "max". An indptr of several dimensions has segments of
    its own for each index of the leading ones. The result is written to `out`, if given.
    """
    return _segment_csr(src, indptr, out, reduce)[0]


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """`segment_csr` with "sum"."""
    return segment_csr(src, indptr, out, "sum")


segment_add_csr = segment_sum_csr


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """`segment_csr` with "mean"."""
    return segment_csr(src, indptr, out, "mean")


def segment_min_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`segment_csr` with the arguments of the minima."""
    return _with_argument(_segment_csr(src, indptr, out, "min"))


def segment_max_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`segment_csr` with the arguments of the maxima."""
    return _with_argument(_segment_csr(src, indptr, out, "max"))


def segment_coo(
    src: Tensor,
    index: Tensor,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Reduces rows of src with equal, ascending index along dimension index.dim() - 1.

    dim_size is the number of segments where there is no `out` to tell it, and 1 + the last index
    when neither is given, which waits for the device. What `out` has counts as one more row of each
    segment with rows, but not for the number that a mean is divided by.
    """
    return _segment_coo(src, index, out, dim_size, reduce)[0]


def segment_sum_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """`segment_coo` with "sum"."""
    return segment_coo(src, index, out, dim_size, "sum")


segment_add_coo = segment_sum_coo


def segment_mean_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """`segment_coo` with "mean"."""
    return segment_coo(src, index, out, dim_size, "mean")


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`segment_coo` with the arguments of the minima."""
    return _with_argument(_segment_coo(src, index, out, dim_size, "min"))


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`segment_coo` with the arguments of the maxima."""
    return _with_argument(_segment_coo(src, index, out, dim_size, "max"))


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Row i of src as each of the rows [indptr[i], indptr[i+1]), along dimension indptr.dim() - 1.

    indptr begins with 0. It waits for the device, as its last element is the number of rows.
    """
    if out is not None:
        return _write("gather_csr", out, gather_csr(src, indptr))
    offsets = _broadcast("gather_csr: indptr", indptr, src)
    if _go_together(indptr, src):
        return _together(src, indptr, lambda x, i: (gather_csr(x, i), None))[0]
    if offsets.dim() > 1:
        return _each(src, offsets, 0, lambda x, i: (gather_csr(x, i), None))[0]
    if offsets.shape[0] != src.shape[0] + 1:
        raise ValueError(
            f"gather_csr: indptr: expected {src.shape[0] + 1} offsets, one more than src has rows, "
            f"got {offsets.shape[0]}"
        )
    ids = torch.arange(src.shape[0], device=src.device)
    return _gather(src, ids.repeat_interleave(offsets.diff()))


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Row index[i] of src as row i, index ascending, along dimension index.dim() - 1."""
    if out is not None:
        return _write("gather_coo", out, gather_coo(src, index))
    ids = _broadcast("gather_coo: index", index, src)
    if _go_together(index, src):
        return _together(src, index, lambda x, i: (gather_coo(x, i), None))[0]
    if ids.dim() > 1:
        return _each(src, ids, ids.shape[-1], lambda x, i: (gather_coo(x, i), None))[0]
    return _gather(src, ids)


def _gather(src: Tensor, ids: Tensor) -> Tensor:
    result: Tensor = _Gather.apply(src, ids)
    return result


class _Gather(torch.autograd.Function):
    """index_select, with a gradient that is summed in a fixed order, as ids are sorted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(src: Tensor, ids: Tensor) -> Tensor:
        return src.index_select(0, ids)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        src, ids = inputs
        ctx.save_for_backward(ids)
        ctx.rows = src.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        on_cpu = gradient.device.type == "cpu"
        return ops.segment_reduce(
            gradient, ids=ids, num_segments=ctx.rows, check_indices=on_cpu
        ), None


_Result = tuple[Tensor, "Tensor | None"]


def _broadcast(name: str, index: Tensor, src: Tensor) -> Tensor:
    """With the leading dimensions of src."""
    lead = src.shape[: max(index.dim() - 1, 0)]
    fits = all(size in (1, wanted) for size, wanted in zip(index.shape, lead))
    if not fits or not 0 < index.dim() <= src.dim():
        raise ValueError(
            f"{name}: expected leading dimensions that broadcast to those of src "
            f"{list(src.shape)}, and one more; got {list(index.shape)}"
        )
    return index.expand(*lead, -1)


def _check_reduce(name: str, reduce: str) -> None:
    if reduce not in _REDUCTIONS:
        raise ValueError(f"{name}: reduce: expected {', '.join(_REDUCTIONS)}, got {reduce!r}")


def _segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None, reduce: str) -> _Result:
    _check_reduce("segment_csr", reduce)
    if out is not None:
        result, arg = _segment_csr(src, indptr, None, reduce)
        return _write("segment_csr", out, result), arg
    offsets = _broadcast("segment_csr: indptr", indptr, src)
    if offsets.shape[-1] == 0:
        raise ValueError("segment_csr: indptr: expected S+1 offsets, so at least 1, got 0")
    if _go_together(indptr, src):
        return _together(src, indptr, lambda x, i: _segment_csr(x, i, None, reduce))
    if offsets.dim() > 1:
        segments = offsets.shape[-1] - 1
        return _each(src, offsets, segments, lambda x, i: _segment_csr(x, i, None, reduce))
    return _reduce(src, reduce, offsets, None, 0)


def _segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None, reduce: str
) -> _Result:
    _check_reduce("segment_coo", reduce)
    ids = _broadcast("segment_coo: index", index, src)
    if out is not None:
        dim = ids.dim() - 1
        segments = out.shape[dim] if dim < out.dim() else 0
        _expect_like("segment_coo", out, (*src.shape[:dim], segments, *src.shape[dim + 1 :]), src)
        return _join(out, src, dim, reduce, lambda x, r: _segment_coo(x, index, None, segments, r))
    if ids.shape[-1] == 1:
        ids = ids.expand(src.shape[: ids.dim()])
    if dim_size is None:
        dim_size = int(index[..., -1].long().max()) + 1 if index.numel() else 0
    if _go_together(index, src):
        return _together(src, index, lambda x, i: _segment_coo(x, i, None, dim_size, reduce))
    if ids.dim() > 1:
        return _each(src, ids, dim_size, lambda x, i: _segment_coo(x, i, None, dim_size, reduce))
    return _reduce(src, reduce, None, ids, dim_size)


def _reduce(
    src: Tensor, reduce: str, offsets: Tensor | None, ids: Tensor | None, segments: int
) -> _Result:
    looks = ids is not None and ids.is_cpu  # at whether they ascend
    if reduce in ("min", "max"):
        out, arg = ops.segment_reduce_arg(
            src,
            "min" if reduce == "min" else "max",
            offsets=offsets,
            ids=ids,
            num_segments=segments,
            empty="zero",
            check_indices=looks,
        )
        return out, torch.where(arg < 0, src.shape[0], arg)
    out = ops.segment_reduce(
        src,
        _REDUCTIONS[reduce],
        offsets=offsets,
        ids=ids,
        num_segments=segments,
        empty="zero",
        check_indices=looks,
    )
    return out, None


def _expect_like(name: str, out: Tensor, shape: Sequence[int], like: Tensor) -> None:
    if out.shape != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"{name}: out: expected {list(shape)} {like.dtype} on {like.device}, "
            f"got {list(out.shape)} {out.dtype} on {out.device}"
        )


def _write(name: str, out: Tensor, result: Tensor) -> Tensor:
    _expect_like(name, out, result.shape, result)
    return out.copy_(result)


def _join(
    out: Tensor, src: Tensor, dim: int, reduce: str, call: Callable[[Tensor, str], _Result]
) -> _Result:
    """`call` reduces along dim; its result joins `out`, which becomes both together."""
    if reduce in ("min", "max"):
        result, arg = _with_argument(call(src, reduce))
        passed = out >= result if reduce == "max" else out <= result
        taken = (arg < src.shape[dim]) & ~passed & ~out.isnan()
        return out.copy_(torch.where(taken, result, out)), arg.where(taken, src.shape[dim])
    if reduce == "mean":
        # Of 16 bits neither sums nor counts would do.
        ones = src.new_ones((), dtype=torch.float64).expand(src.shape[: dim + 1])
        counts = call(ones, "sum")[0].clamp(min=1)
        out.div_(counts.reshape(counts.shape + (1,) * (out.dim() - counts.dim())))
    return out.add_(call(src, reduce)[0]), None


def _with_argument(result: _Result) -> tuple[Tensor, Tensor]:
    assert result[1] is not None
    return result[0], result[1]


def _stack(results: list[_Result]) -> _Result:
    args = [arg for _, arg in results if arg is not None]
    return torch.stack([out for out, _ in results]), torch.stack(args) if args else None


# Elements: of 32 items of so many one call takes 0.74 of the time, of four times as many 1.7.
_LITTLE = 1 << 16


def _go_together(index: Tensor, src: Tensor) -> bool:
    """Whether the leading dimensions have one index, and each of their items so little that it is
    quicker to copy them all for one call."""
    lead = src.shape[: index.dim() - 1]
    if len(lead) == 0 or any(size != 1 for size in index.shape[:-1]):
        return False
    return 0 < src.numel() <= lead.numel() * _LITTLE


def _together(src: Tensor, index: Tensor, call: Callable[[Tensor, Tensor], _Result]) -> _Result:
    """`call` for all items of the leading dimensions at once."""
    dim = index.dim() - 1

    def back(result: Tensor) -> Tensor:
        return result.transpose(0, 1).unflatten(0, src.shape[:dim])

    out, arg = call(src.flatten(0, dim - 1).transpose(0, 1), index.flatten())
    return back(out), None if arg is None else back(arg)


def _each(
    src: Tensor, rows: Tensor, segments: int, call: Callable[[Tensor, Tensor], _Result]
) -> _Result:
    """`call` for each item of the first dimension, of which there may be none."""
    if src.shape[0] > 0:
        return _stack([call(x, row) for x, row in zip(src, rows)])
    shape = (*rows.shape[:-1], segments, *src.shape[rows.dim() :])
    return src.new_zeros(shape), src.new_zeros(shape, dtype=torch.int64)

"""Functions with the names and signatures of flash-attn, torch_scatter and entmax.

Change the import, keep the code. What differs from the originals:

flash_attn_func, flash_attn_varlen_func
    Any dtype, on the CPU too, head dims of q and v may differ; lse is -inf (not +inf) for rows
    that see nothing. The third value with return_attn_probs is None. Refused are block_table (paged
    KV) and alibi_slopes: `pullback.torch.attention` takes them as a bias, and gives its gradient.
segment_csr, segment_coo
    Floating-point src only. NaN wins in min and max, and the first of equal values gets the
    gradient on every device. `out` is refused. An empty segment has value 0 and argument N, as
    there.
sparsemax, entmax15, entmax_bisect, sparsemax_bisect
    Exact thresholds: `k`, `n_iter` and `ensure_sum_one` are accepted and not needed. A row of -inf
    gives zeros instead of NaN. alpha 1 is softmax. entmax_bisect's gradient of alpha has its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import torch as ops
from ._options import Reduce

__all__ = [
    "Entmax15",
    "EntmaxBisect",
    "Sparsemax",
    "SparsemaxBisect",
    "entmax15",
    "entmax_bisect",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_min_coo",
    "segment_min_csr",
    "sparsemax",
    "sparsemax_bisect",
]

# ---------------------------------------------------------------- flash-attn


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [B,Sq,H,D], k and v [B,Sk,Hkv,D]; causal and windows from the bottom right.

    Returns out like q; with return_attn_probs (out, lse [B,H,Sq], None).
    """
    _refuse("flash_attn_func", alibi_slopes=alibi_slopes)
    out, lse = ops.attention(
        q,
        k,
        v,
        return_lse=True,
        dropout=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_func` on qkv [B,S,3,H,D]; returns out [B,S,H,D]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [total_q,H,D], k and v [total_k,Hkv,D]; cu_seqlens [B+1] int32 or int64.

    Returns out like q; with return_attn_probs (out, lse [H,total_q], None).
    """
    _refuse("flash_attn_varlen_func", alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = ops.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=True,
        dropout=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, lse, None) if return_attn_probs else out


def _refuse(function: str, **arguments: Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{function}: {name}: expected None, got a tensor")


# ---------------------------------------------------------------- torch_scatter

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
    its own for each index of the leading ones.
    """
    return _segment_csr(src, indptr, out, reduce)[0]


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

    dim_size is the number of segments: 1 + the last index when not given, which waits for the
    device.
    """
    return _segment_coo(src, index, out, dim_size, reduce)[0]


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


_Result = tuple[Tensor, "Tensor | None"]


def _segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None, reduce: str) -> _Result:
    _refuse("segment_csr", out=out)
    if indptr.dim() > 1:
        rows = indptr.expand(*src.shape[: indptr.dim() - 1], -1)
        segments = indptr.shape[-1] - 1
        return _each(src, rows, segments, lambda x, i: _segment_csr(x, i, None, reduce))
    return _reduce(src, reduce, indptr, None, 0)


def _segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None, reduce: str
) -> _Result:
    _refuse("segment_coo", out=out)
    if dim_size is None:
        dim_size = int(index[..., -1].max()) + 1 if index.numel() else 0
    if index.dim() > 1:
        rows = index.expand(*src.shape[: index.dim() - 1], -1)
        return _each(src, rows, dim_size, lambda x, i: _segment_coo(x, i, None, dim_size, reduce))
    return _reduce(src, reduce, None, index, dim_size)


def _reduce(
    src: Tensor, reduce: str, offsets: Tensor | None, ids: Tensor | None, segments: int
) -> _Result:
    if reduce not in _REDUCTIONS:
        raise ValueError(f"reduce: expected {', '.join(_REDUCTIONS)}, got {reduce!r}")
    if reduce in ("min", "max"):
        out, arg = ops.segment_reduce_arg(
            src,
            "min" if reduce == "min" else "max",
            offsets=offsets,
            ids=ids,
            num_segments=segments,
            empty="zero",
        )
        return out, torch.where(arg < 0, src.shape[0], arg)
    out = ops.segment_reduce(
        src, _REDUCTIONS[reduce], offsets=offsets, ids=ids, num_segments=segments, empty="zero"
    )
    return out, None


def _with_argument(result: _Result) -> tuple[Tensor, Tensor]:
    assert result[1] is not None
    return result[0], result[1]


def _stack(results: list[_Result]) -> _Result:
    args = [arg for _, arg in results if arg is not None]
    return torch.stack([out for out, _ in results]), torch.stack(args) if args else None


def _each(
    src: Tensor, rows: Tensor, segments: int, call: Callable[[Tensor, Tensor], _Result]
) -> _Result:
    """`call` for each item of the first dimension, of which there may be none."""
    if src.shape[0] > 0:
        return _stack([call(x, row) for x, row in zip(src, rows)])
    shape = (*rows.shape[:-1], segments, *src.shape[rows.dim() :])
    return src.new_zeros(shape), src.new_zeros(shape, dtype=torch.int64)


# ---------------------------------------------------------------- entmax


def sparsemax(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Any:
    """The projection of rows along dim onto the simplex; `k` is not needed.

    With `return_support_size` also how many of each row are not 0, with size 1 at dim.
    """
    return _with_support(ops.sparsemax(X, dim), dim, return_support_size)


def entmax15(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Any:
    """1.5-entmax of rows along dim, with the arguments of `sparsemax`."""
    return _with_support(ops.entmax15(X, dim), dim, return_support_size)


def _with_support(p: Tensor, dim: int, return_support_size: bool) -> Any:
    return (p, (p > 0).sum(dim, keepdim=True)) if return_support_size else p


def entmax_bisect(
    X: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    n_iter: int = 50,
    ensure_sum_one: bool = True,
) -> Tensor:
    """Entmax of rows along dim; a tensor alpha broadcasts to X with size 1 at dim."""
    if isinstance(alpha, Tensor):
        alpha = alpha[(None,) * (X.dim() - alpha.dim())]
    return ops.entmax(X, alpha, dim)


def sparsemax_bisect(
    X: Tensor, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True
) -> Tensor:
    """As `sparsemax`."""
    return ops.sparsemax(X, dim)


class Sparsemax(nn.Module):
    """`sparsemax` as a module."""

    def __init__(
        self, dim: int = -1, k: int | None = None, return_support_size: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.k, self.return_support_size = dim, k, return_support_size

    def forward(self, X: Tensor) -> Any:
        return sparsemax(X, self.dim, self.k, self.return_support_size)


class Entmax15(nn.Module):
    """`entmax15` as a module."""

    def __init__(
        self, dim: int = -1, k: int | None = None, return_support_size: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.k, self.return_support_size = dim, k, return_support_size

    def forward(self, X: Tensor) -> Any:
        return entmax15(X, self.dim, self.k, self.return_support_size)


class SparsemaxBisect(nn.Module):
    """`sparsemax_bisect` as a module."""

    def __init__(self, dim: int = -1, n_iter: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, X: Tensor) -> Tensor:
        return sparsemax_bisect(X, self.dim)


class EntmaxBisect(nn.Module):
    """`entmax_bisect` as a module."""

    def __init__(self, alpha: float | Tensor = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim = alpha, dim

    def forward(self, X: Tensor) -> Tensor:
        return entmax_bisect(X, self.alpha, self.dim)

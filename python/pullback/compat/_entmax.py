"""Functions and modules of entmax."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import torch as ops


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


class _Entmax(nn.Module):
    def __init__(
        self, dim: int = -1, k: int | None = None, return_support_size: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.k, self.return_support_size = dim, k, return_support_size


class Sparsemax(_Entmax):
    """`sparsemax` as a module."""

    def forward(self, X: Tensor) -> Any:
        return sparsemax(X, self.dim, self.k, self.return_support_size)


class Entmax15(_Entmax):
    """`entmax15` as a module."""

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

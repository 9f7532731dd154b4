"""Calls that most models make, forward and backward, for which a release's wheel has kernels."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

import pullback.torch as pt
from pullback import sparsity


def run(f: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.grad(f(*leaves).float().square().sum(), leaves)


def attention(device: str, dtype: Any, dim: int) -> None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    q, k, v = randn(2, 130, 4, dim), randn(2, 130, 2, dim), randn(2, 130, 2, dim)
    variants: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"softcap": 20.0, "window": (50, 0)},
        {"dropout": 0.1},
    ]
    for options in variants:
        run(lambda *x, o=options: pt.attention(*x, **o), q, k, v)
    for shape in ((2, 4, 130, 130), (1, 4, 130, 130), (2, 1, 1, 130)):
        run(lambda q, k, v, b: pt.attention(q, k, v, bias=b), q, k, v, randn(*shape))
    cu = torch.tensor([0, 30, 130], dtype=torch.int32, device=device)
    packed = [x.detach()[0] for x in (q, k, v)]
    run(lambda *x: pt.attention(*x, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True), *packed)
    layout = sparsity.BigBirdSparsityConfig(2).make_layout(128)
    heads = [randn(2, 128, 2, dim) for _ in range(3)]
    run(lambda *x: pt.block_sparse_attention(*x, layout), *heads)


def rows(device: str, dtype: Any) -> None:
    for shape in ((4, 100), (300, 1001), (8, 40000), (2, 200000)):
        for alpha in (1.0, 1.5, 2.0):
            for dim in (0, 1):
                x = torch.randn(*shape, device=device, dtype=dtype)
                run(lambda x, a=alpha, d=dim: pt.entmax(x, a, d), x)


def segments(device: str, dtype: Any) -> None:
    offsets = torch.tensor([0, 3, 3, 1000, 4096], device=device)
    ids = torch.arange(4096, device=device) % 7
    permutation, starts = pt.segment_permutation(ids, 7)
    kinds: list[dict[str, Any]] = [
        {"offsets": offsets},
        {"ids": ids.sort()[0], "num_segments": 7},
        {"offsets": starts, "permutation": permutation},
    ]
    for columns in (1, 16, 128, 1000):
        for reduce in ("sum", "mean", "max", "softmax"):
            for kind in kinds:
                x = torch.randn(4096, columns, device=device, dtype=dtype)
                run(lambda x, r=reduce, k=kind: pt.segment_reduce(x, r, **k), x)


def make_all(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim in (32, 64, 128):
            attention(device, dtype, dim)
        if dtype != torch.float16:
            rows(device, dtype)
            segments(device, dtype)

"""Calls that most models make, forward and backward, for which a release's wheel has kernels.

Run as a program on a machine with a GPU, it compares their results with the CPU's, and tells what
the first call of each takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

import pullback
import pullback.torch as pt
from pullback import sparsity

Randn = Callable[..., Tensor]


class Call(NamedTuple):
    name: str
    function: Callable[..., Tensor]
    inputs: list[Tensor]

    def run(self) -> list[Tensor]:
        """The result, and the gradients of the inputs."""
        leaves = [x.requires_grad_() for x in self.inputs]
        out = self.function(*leaves)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def attention(randn: Randn, device: str, dim: int, few: bool) -> Iterator[Call]:
    """Few: neither dropout nor biases. So with half precision, which few train in, and head dims
    that few models have. f32's dropout goes by kernels that can do everything."""

    def inputs() -> list[Tensor]:
        return [randn(2, 130, 4, dim), randn(2, 130, 2, dim), randn(2, 130, 2, dim)]

    seed = torch.tensor(7, device=device)
    variants: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"window": (50, 0)},
    ]
    if not few and inputs()[0].dtype != torch.float32:
        variants.append({"dropout": 0.1, "seed": seed})
    for options in variants:
        name = f"attention D{dim} {', '.join(options)}"
        yield Call(name, lambda *x, o=options: pt.attention(*x, **o), inputs())
    for shape in () if few else ((2, 4, 130, 130), (1, 4, 130, 130), (2, 1, 1, 130)):
        name = f"attention D{dim} bias {shape}"
        biased = [*inputs(), randn(*shape)]
        yield Call(name, lambda q, k, v, b: pt.attention(q, k, v, bias=b), biased)
    cu = torch.tensor([0, 30, 130], dtype=torch.int32, device=device)
    packed = [x[0] for x in inputs()]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    yield Call(f"attention D{dim} cu_seqlens", lambda *x, o=options: pt.attention(*x, **o), packed)
    layout = sparsity.BigBirdSparsityConfig(2).make_layout(128)
    heads = [randn(2, 128, 2, dim) for _ in range(3)]
    yield Call(
        f"block_sparse_attention D{dim}",
        lambda q, k, v, y=layout: pt.block_sparse_attention(q, k, v, y),
        heads,
    )


def rows(randn: Randn) -> Iterator[Call]:
    for shape in ((4, 96), (300, 1000), (8, 40000), (2, 200000)):
        for alpha in (1.5, 2.0):
            for dim in (0, 1):
                yield Call(
                    f"entmax {shape} alpha {alpha} dim {dim}",
                    lambda x, a=alpha, d=dim: pt.entmax(x, a, d),
                    [randn(*shape)],
                )


def segments(randn: Randn, device: str) -> Iterator[Call]:
    offsets = torch.tensor([0, 3, 3, 1000, 4096], device=device)
    ids = torch.arange(4096, device=device) % 7
    permutation, starts = pt.segment_permutation(ids, 7)
    kinds: dict[str, dict[str, Any]] = {
        "offsets": {"offsets": offsets, "empty": "zero"},
        "ids": {"ids": ids.sort()[0], "num_segments": 7},
        "permutation": {"offsets": starts, "permutation": permutation},
    }
    for columns in (1, 16, 128, 1000):
        for reduce in ("sum", "mean", "max", "softmax"):
            for name, kind in kinds.items():
                if reduce == "softmax" and name == "permutation":
                    continue
                yield Call(
                    f"segment {reduce} D{columns} {name}",
                    lambda x, r=reduce, k=kind: pt.segment_reduce(x, r, **k),
                    [randn(4096, columns)],
                )


def calls(device: str) -> Iterator[Call]:
    """All of them; the inputs are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):

        def randn(*shape: int, dtype: Any = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

        for dim in (32, 64, 128):
            yield from attention(randn, device, dim, dtype == torch.float16)
        for dim in (96, 256) if dtype == torch.bfloat16 else ():
            yield from attention(randn, device, dim, True)
        if dtype != torch.float16:
            yield from rows(randn)
            yield from segments(randn, device)


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def main() -> int:
    print(pullback.doctor(), flush=True)
    wrong, times = [], []
    for here, there in zip(calls("cpu"), calls("cuda")):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found = there.run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        for x, y in zip(here.run(), found):
            expected = x.detach().double()
            error = float((expected - y.detach().cpu()).abs().max() / (expected.abs().max() + 1e-6))
            if not error <= TOLERANCES[x.dtype]:
                wrong.append(f"{there.name} {x.dtype}: {tuple(x.shape)} differs by {error:.1e}")
    print(f"{len(times)} calls, {len(wrong)} wrong results", *wrong[:20], sep="\n  ")
    print(
        "first call of each, forward and backward: "
        f"median {statistics.median(times):.1f} ms, most {max(times[1:]):.1f} ms"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

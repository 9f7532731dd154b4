#!/usr/bin/env python3
"""What calls through pullback.torch take on a GPU, beside the runs of the C ABI that they make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pullback.torch as pt
from pullback import sparsity
from pullback._native import NativePlan

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(run: Callable[[], Any]) -> float:
    """The median of a batch, enqueued without waiting in between as a training step does."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(21)]
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e-3


def recorded(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """What a call returns, and its last run of the C ABI, into the same memory: it has to be done
    before that is given to others."""
    runs: list[tuple[Any, ...]] = []
    run_pointers = NativePlan.run_pointers

    def record(*arguments: Any) -> None:
        runs.append(arguments)
        run_pointers(*arguments)

    NativePlan.run_pointers = record  # type: ignore[method-assign]
    try:
        result = call()
    finally:
        NativePlan.run_pointers = run_pointers  # type: ignore[method-assign]
    if not runs:
        return result, lambda: None
    plan, pointers, stream, workspace, size = runs[-1]
    packed = plan.op.pack(plan.op.tensors_size, *pointers)
    return result, lambda: plan.op.run(plan._handle, stream, packed, workspace, size)


def randn(dtype: str, *shape: int, sigma: float = 1) -> Tensor:
    return (sigma * torch.randn(shape, device="cuda")).to(DTYPES[dtype])


# Op, name in the benchmark, dtype, and a function that makes inputs and the call.
Problem = tuple[str, str, str, Callable[[str], tuple[list[Tensor], Callable[..., Tensor]]]]


def attention(batch: int, heads: int, length: int, dim: int, **options: Any) -> Callable[..., Any]:
    def make(dtype: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
        inputs = [randn(dtype, batch, length, heads, dim) for _ in "qkv"]
        return inputs, lambda q, k, v: pt.attention(q, k, v, **options)

    return make


def entmax(rows: int, length: int, alpha: float) -> Callable[..., Any]:
    def make(dtype: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
        return [randn(dtype, rows, length)], lambda x: pt.entmax(x, alpha)

    return make


def segment(columns: int, mean: int, reduce: Any, elements: int = 1 << 27) -> Callable[..., Any]:
    def make(dtype: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
        rows = elements // columns
        lengths = torch.randint(1, 2 * mean, (2 * rows // mean,), device="cuda")
        ends = lengths.cumsum(0)
        offsets = torch.cat([lengths[:1] * 0, ends[ends < rows], lengths[:1] * 0 + rows])
        x = randn(dtype, rows, columns)
        return [x], lambda x: pt.segment_reduce(x, reduce, offsets=offsets)

    return make


def big_bird(block: int, length: int) -> sparsity.BlockLayout:
    each = max(64 // block, 1)
    return sparsity.BigBirdSparsityConfig(
        4,
        block=block,
        different_layout_per_head=True,
        num_random_blocks=each,
        num_sliding_window_blocks=3 * each,
        num_global_blocks=each,
    ).make_layout(length)


def block_softmax(block: int, length: int) -> Callable[..., Any]:
    def make(dtype: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
        layout = big_bird(block, length)
        batch = max(1, (1 << 27) // (layout.nnz * block * block))
        x = randn(dtype, batch, layout.nnz, block, block, sigma=2)
        return [x], lambda x: pt.block_softmax(x, layout, scale=0.125)

    return make


def block_matmul(block: int, length: int, dim: int) -> Callable[..., Any]:
    def make(dtype: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
        layout = big_bird(block, length)
        batch = max(1, (1 << 26) // (layout.nnz * block * block))
        a, b = (randn(dtype, batch, 4, length, dim) for _ in "ab")
        return [a, b], lambda a, b: pt.block_matmul(
            a, b, layout, "sdd", block=block, transpose_b=True
        )

    return make


PROBLEMS: list[Problem] = [
    ("attention", "B2 H16 S8192 D128", "bf16", attention(2, 16, 8192, 128)),
    ("attention", "B2 H16 S8192 D128 causal", "bf16", attention(2, 16, 8192, 128, causal=True)),
    (
        "attention",
        "B2 H16 S8192 D128 dropout 0.1",
        "bf16",
        attention(2, 16, 8192, 128, dropout=0.1),
    ),
    ("entmax", "65536x4096 sigma 1 alpha 1.5", "f32", entmax(65536, 4096, 1.5)),
    ("entmax", "65536x4096 sigma 1 alpha 1", "bf16", entmax(65536, 4096, 1.0)),
    ("entmax", "65536x4096 sigma 1 alpha 2 from the mask", "f32", entmax(65536, 4096, 2.0)),
    ("segment", "D=128 mean 8 sum", "f32", segment(128, 8, "sum")),
    ("segment", "D=128 mean 4096 max from arg", "f32", segment(128, 4096, "max")),
    ("block_softmax", "BigBird block 64 S 4096", "bf16", block_softmax(64, 4096)),
    ("block_matmul", "BigBird block 64 S 4096 D 64 sdd", "bf16", block_matmul(64, 4096, 64)),
]


class Nothing(torch.autograd.Function):
    """What PyTorch itself takes to call a function of Python and its derivative."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])


def nothing(tensors: int) -> Callable[..., Any]:
    return lambda dtype: ([randn(dtype, 8, 64) for _ in range(tensors)], Nothing.apply)


Make = Callable[[str], tuple[list[Tensor], Callable[..., Tensor]]]


def times(make: Make, dtype: str) -> list[tuple[float, float]]:
    """Of the C ABI and through PyTorch: forward, recorded for the backward pass, and that."""
    inputs, call = make(dtype)
    leaves = [x.requires_grad_() for x in inputs]
    out, run = recorded(lambda: call(*leaves))
    forward = seconds(run), seconds(lambda: call(*leaves))
    d_out = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    gradients, run = recorded(backward)
    native = seconds(run)
    del gradients
    return [forward, (native, seconds(backward))]


def host_times(make: Make, dtype: str) -> list[tuple[float, float]]:
    """The same on the host, for one of 16 calls with inputs of their own, as a training step has
    them: to start a backward pass, which another thread runs, takes longer than a call."""
    inputs, call = make(dtype)
    calls = [[x.clone().requires_grad_() for x in inputs] for _ in range(16)]
    leaves = [x for call_leaves in calls for x in call_leaves]
    outs = [call(*call_leaves) for call_leaves in calls]
    d_outs = [torch.randn_like(out) for out in outs]

    def backward() -> Any:
        return torch.autograd.grad(outs, leaves, d_outs, retain_graph=True)

    kept_out, forward_run = recorded(lambda: call(*calls[0]))
    kept_gradients, backward_run = recorded(backward)
    passes: list[Callable[[], Any]] = [
        lambda: [forward_run() for _ in calls],
        lambda: [call(*call_leaves) for call_leaves in calls],
        lambda: [backward_run() for _ in calls],
        backward,
    ]
    best = [float("inf")] * 4
    for i in range(200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        passes[i % 4]()
        best[i % 4] = min(best[i % 4], (time.perf_counter() - begin) / len(calls))
    return [(best[0], best[1]), (best[2], best[3])]


SMALL = {
    "nothing, of one tensor": (lambda dtype: ([randn(dtype, 8, 64)], Nothing.apply), "f32"),
    "nothing, of three": (
        lambda dtype: ([randn(dtype, 8, 64) for _ in "qkv"], Nothing.apply),
        "f32",
    ),
    "attention": (attention(1, 2, 64, 64), "bf16"),
    "attention, dropout": (attention(1, 2, 64, 64, dropout=0.1), "bf16"),
    "entmax15": (entmax(8, 64, 1.5), "f32"),
    "sparsemax": (entmax(8, 64, 2.0), "f32"),
    "block_matmul": (block_matmul(16, 512, 64), "bf16"),
    "segment max": (segment(128, 4096, "max", 1 << 20), "f32"),
}


def main() -> None:
    print("| problem | pass | C ABI, µs | pullback.torch, µs | ratio |\n|---|---|---|---|---|")
    for op, case, dtype, make in PROBLEMS:
        for name, (native, found) in zip(("forward", "backward"), times(make, dtype)):
            both = f"{native * 1e6:.0f} | {found * 1e6:.0f} | {found / native:.3f}"
            print(f"| {op} {case} {dtype} | {name} | {both} |", flush=True)

    columns = "forward, µs | C ABI | backward, µs | C ABI"
    print(f"\n| small call, on the host | {columns} |\n|---|---|---|---|---|")
    for name, problem in SMALL.items():
        cells = [f"{x * 1e6:.1f}" for pair in host_times(*problem) for x in reversed(pair)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""The ops as functions of tensors with gradients, and the same in plain PyTorch."""

from __future__ import annotations

import os
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback import sparsity  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CUDA_OPS = os.environ.get("PULLBACK_TEST_OPS")
LAYOUT = sparsity.BigBirdSparsityConfig(2).make_layout(64)
DENSE = sparsity.DenseSparsityConfig(2).make_layout(32)


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    options.setdefault("dtype", torch.float64)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.to(**options)


# Each case: the op as a function of the tensors that have gradients, those tensors' shapes, and the
# same in plain PyTorch.
class Case:
    def __init__(self, name: str, f: Callable[..., Any], plain: Any, *shapes: tuple[int, ...]):
        self.name, self.f, self.plain, self.shapes = name, f, plain, shapes
        self.op = name.split("-")[0]

    def inputs(self, device: str, dtype: Any = torch.float64) -> list[Tensor]:
        return [
            random(*shape, seed=i, dtype=dtype, device=device).requires_grad_()
            for i, shape in enumerate(self.shapes)
        ]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        s = s.masked_fill(~visible.tril(s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", s.softmax(-1), v)


def plain_segment(x: Tensor, reduce: str, offsets: list[int]) -> Tensor:
    parts = [x[begin:end] for begin, end in zip(offsets, offsets[1:])]
    if reduce == "softmax":
        return torch.cat([part.softmax(0) for part in parts])
    function = {
        "sum": lambda p: p.sum(0),
        "mean": lambda p: p.mean(0),
        "max": lambda p: p.max(0).values,
        "min": lambda p: p.min(0).values,
        "prod": lambda p: p.prod(0),
        "logsumexp": lambda p: p.logsumexp(0),
    }[reduce]
    return torch.stack([function(part) for part in parts])


OFFSETS = [0, 3, 4, 9]


def segment_case(reduce: Any) -> Case:
    def f(x: Tensor) -> Tensor:
        return pt.segment_reduce(x, reduce, offsets=torch.tensor(OFFSETS, device=x.device))

    return Case(f"segment-{reduce}", f, lambda x: plain_segment(x, reduce, OFFSETS), (9, 4))


def plain_block_softmax(x: Tensor, rpe: Tensor, padding: Tensor) -> Tensor:
    dense = x.reshape(-1, 2, 2, 2, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(-1, 2, 32, 32)
    y = (0.5 * dense + rpe + padding[:, None, None]).softmax(-1)
    return y.reshape(-1, 2, 2, 16, 2, 16).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)


CASES = [
    Case(
        "attention-bias",
        lambda q, k, v, bias: pt.attention(q, k, v, bias=bias, causal=True),
        lambda q, k, v, bias: plain_attention(q, k, v, bias, True),
        (2, 5, 4, 3),
        (2, 7, 2, 3),
        (2, 7, 2, 5),
        (1, 4, 1, 7),
    ),
    Case(
        "entmax-1.5",
        lambda x: pt.entmax15(x, 0),
        None,
        (6, 5),
    ),
    Case(
        "entmax-softmax",
        lambda x: pt.entmax(x, 1.0),
        lambda x: x.softmax(-1),
        (6, 5),
    ),
    Case("entmax-sparsemax", lambda x: pt.sparsemax(x), None, (3, 32)),
    Case("entmax-sparsemax-axis", lambda x: pt.sparsemax(x, -2), None, (3, 6, 5)),
    Case(
        "entmax-alpha",
        lambda x, alpha: pt.entmax(x, 1 + alpha.exp()),
        None,
        (6, 5),
        (6, 1),
    ),
    *[segment_case(r) for r in ("sum", "mean", "max", "min", "prod", "logsumexp", "softmax")],
    Case(
        "block_softmax",
        lambda x, rpe, padding: pt.block_softmax(
            x, DENSE, rpe=rpe, key_padding_mask=padding, scale=0.5
        ),
        plain_block_softmax,
        (2, 8, 16, 16),
        (1, 2, 32, 32),
        (2, 32),
    ),
    Case(
        "block_matmul-sdd",
        lambda a, b: pt.block_matmul(a, b, LAYOUT, "sdd", block=16, transpose_b=True),
        None,
        (1, 2, 64, 4),
        (1, 2, 64, 4),
    ),
    Case(
        "block_matmul-dsd",
        lambda a, b: pt.block_matmul(a, b, LAYOUT, "dsd"),
        None,
        (1, LAYOUT.nnz, 16, 16),
        (1, 2, 64, 3),
    ),
    Case(
        "block_matmul-attention",
        lambda q, k, v: pt.block_sparse_attention(q, k, v, DENSE),
        plain_attention,
        (1, 32, 2, 4),
        (1, 32, 2, 4),
        (1, 32, 2, 3),
    ),
]


def on_devices(cases: list[Case]) -> Any:
    """The cases on the devices that have them."""
    found = []
    for device in DEVICES:
        for case in cases:
            if device == "cpu" or CUDA_OPS is None or case.op in CUDA_OPS.split(","):
                found.append(pytest.param(case, device, id=f"{case.name}-{device}"))
    return pytest.mark.parametrize("case,device", found)

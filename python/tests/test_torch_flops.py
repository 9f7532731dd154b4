"""What torch.utils.flop_counter counts of pullback.torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import (  # noqa: E402
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import pullback.torch as pt  # noqa: E402
from torch_cases import DENSE, LAYOUT, random  # noqa: E402


def flops(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> int:
    """Of the forward and the backward pass."""
    tensors = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    with FlopCounterMode(display=False) as counter:
        function(*tensors).sum().backward()
    return counter.get_total_flops()


def test_attention_counts_as_pytorchs_own() -> None:
    q, k = (2, 6, 4, 8), (2, 7, 4, 8)
    queries, keys = (2, 4, 6, 8), (2, 4, 7, 8)
    expected = sdpa_flop_count(queries, keys, keys)
    expected += sdpa_backward_flop_count(queries, queries, keys, keys)
    assert flops(pt.attention, q, k, k) == expected
    assert flops(pt.attention, q, (2, 7, 2, 8), (2, 7, 2, 8)) == expected

    def packed(
        q: Tensor, k: Tensor, v: Tensor, offsets: Sequence[int] = (0, 2, 6), longest: int = 0
    ) -> Tensor:
        cu = torch.tensor(offsets, device=q.device)
        return pt.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest)

    one = flops(pt.attention, (1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    rows = (6, 4, 8)
    assert flops(packed, rows, rows, rows) == (2 * 2 + 4 * 4) * one
    # Offsets are clamped, and sequences cut, as the op does.
    for offsets, longest, pairs in (((0, 800, 3), 0, 36), ((-7, 2, 6), 0, 20), ((0, 2, 6), 3, 16)):
        counted = flops(partial(packed, offsets=offsets, longest=longest), rows, rows, rows)
        assert counted == pairs * one
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        packed(*torch.empty(3, 6, 4, 8))
    assert counter.get_total_flops() == 2 * (6 * 6) * (2 * 4 * 2 * 8)


def test_blocks_that_a_layout_lacks_count_nothing() -> None:
    a, dense = (1, 2, 64, 4), flops(torch.matmul, (1, 2, 64, 4), (1, 2, 4, 64))
    cases: list[tuple[Any, tuple[tuple[int, ...], ...]]] = [
        (lambda a, b: pt.block_matmul(a, b, LAYOUT, "sdd", block=16, transpose_b=True), (a, a)),
        (lambda a, b: pt.block_matmul(a, b, LAYOUT, "dsd"), ((1, LAYOUT.nnz, 16, 16), a)),
        (
            lambda a, b: pt.block_matmul(a, b, LAYOUT, "dds", transpose_a=True),
            (a, (1, LAYOUT.nnz, 16, 16)),
        ),
    ]
    for function, shapes in cases:
        assert flops(function, *shapes) == dense * LAYOUT.density
    q = (1, 32, 2, 8)
    half = flops(lambda q: pt.attention(q, q, q, layout=DENSE, block=16), q)
    assert half == flops(lambda q: pt.attention(q, q, q), q)

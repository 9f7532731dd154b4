"""attention beside PyTorch autograd in float64, over random problems.

PULLBACK_FUZZ_COUNT of them (300 on a GPU, 60 on the CPU), from PULLBACK_TEST_SEED on.
"""

from __future__ import annotations

import math
import os
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from torch_cases import DEVICES, random  # noqa: E402

SEED = int(os.environ.get("PULLBACK_TEST_SEED", "1"))
GROUPS = 10


class Problem:
    """Inputs that have gradients, and the options that the op and plain PyTorch are given."""

    def __init__(self, seed: int, device: str):
        self.seed, self.device = seed, device
        draw = Random(seed)
        self.group, self.kv_heads = draw.choice([1, 1, 2, 3]), draw.choice([1, 2])
        self.heads = self.group * self.kv_heads
        self.head_dim, self.value_dim = draw.choice(
            [(1, 1), (7, 5), (16, 16), (20, 33), (32, 64), (64, 64), (80, 80), (128, 128)]
        )
        batch = draw.randint(1, 3)
        lengths = [(draw.randint(1, 90), draw.randint(1, 150)) for _ in range(batch)]
        self.varlen = draw.random() < 0.3
        if self.varlen:
            lengths = [(q * draw.randint(0, 1), k * draw.randint(0, 1)) for q, k in lengths]
        else:
            lengths = [lengths[0]] * batch
        self.lengths = lengths
        self.options: dict[str, Any] = {"corner": draw.choice(["bottom_right", "top_left"])}
        mask = draw.choice(["none", "none", "causal", "window", "causal window"])
        if "causal" in mask:
            self.options["causal"] = True
        if "window" in mask:
            self.options["window"] = (draw.choice([-1, 0, 5, 40]), draw.choice([-1, 0, 5, 40]))
        if draw.random() < 0.3:
            self.options["softcap"] = draw.choice([0.5, 5.0, 30.0])
        if draw.random() < 0.3:
            self.options["scale"] = draw.uniform(-1, 1)
        if draw.random() < 0.3:
            self.options["dropout"] = draw.choice([0.1, 0.5])
        self.uses_lse = draw.random() < 0.4

        def rows(which: int, heads: int, dim: int) -> Tensor:
            if self.varlen:
                shape: tuple[int, ...] = (sum(n[which] for n in lengths), heads, dim)
            else:
                shape = (batch, lengths[0][which], heads, dim)
            x = random(*shape, seed=draw.getrandbits(30), device=device)
            if draw.random() < 0.3:  # rows that lie elsewhere
                x = torch.cat([x, x], -1)[..., :dim]
            return x

        self.q = rows(0, self.heads, self.head_dim)
        self.k = rows(1, self.kv_heads, self.head_dim)
        self.v = rows(1, self.kv_heads, self.value_dim)
        self.bias: Tensor | None = None
        if not self.varlen and draw.random() < 0.5:
            full = (batch, self.heads, *lengths[0])
            shape = tuple(1 if draw.random() < 0.4 else size for size in full)
            self.bias = random(*shape, seed=draw.getrandbits(30), device=device)
        self.leaves = [x for x in (self.q, self.k, self.v, self.bias) if x is not None]
        for x in self.leaves:
            x.requires_grad_()

    def call(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if self.varlen:
            for which, name in enumerate(["cu_seqlens_q", "cu_seqlens_k"]):
                ends = torch.tensor([0, *(n[which] for n in self.lengths)]).cumsum(0)
                options[name] = ends.to(self.device, torch.int32)
        if "dropout" in self.options:
            options["seed"] = torch.tensor(self.seed)
        return pt.attention(q, k, v, **options, **self.options)

    def kept(self) -> list[Tensor]:
        """What dropout keeps, [H,Sq,Sk] of each sequence: where unit vectors as values arrive."""
        options = self.options
        self.options = {"dropout": options["dropout"]}
        longest = max(1, *(n[1] for n in self.lengths))
        keys = [
            torch.eye(longest, dtype=torch.float64, device=self.device)[: n[1]]
            for n in self.lengths
        ]
        v = torch.cat(keys) if self.varlen else torch.stack(keys)
        v = v.unsqueeze(-2).expand(*v.shape[:-1], self.kv_heads, longest)
        out = self.call(self.q.detach() * 0, self.k.detach() * 0, v)
        self.options = options
        parts = out.split([n[0] for n in self.lengths]) if self.varlen else list(out)
        return [part.transpose(0, 1)[..., : n[1]] != 0 for part, n in zip(parts, self.lengths)]

    def plain(self) -> tuple[Tensor, Tensor]:
        """out and lse, sequence by sequence."""
        sizes = [[n[which] for n in self.lengths] for which in (0, 1)]
        queries = self.q.split(sizes[0]) if self.varlen else list(self.q)
        keys = self.k.split(sizes[1]) if self.varlen else list(self.k)
        values = self.v.split(sizes[1]) if self.varlen else list(self.v)
        rate = self.options.get("dropout", 0.0)
        kept = self.kept() if rate > 0 else []
        outs, lses = [], []
        for b, (q, k, v) in enumerate(zip(queries, keys, values)):
            k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))
            s = torch.einsum("ihd,jhd->hij", q, k)
            s = s * self.options.get("scale", self.head_dim**-0.5)
            cap = self.options.get("softcap", 0.0)
            if cap > 0:
                s = cap * (s / cap).tanh()
            if self.bias is not None:
                s = s + self.bias[b % self.bias.shape[0]]
            s = s.masked_fill(~self.visible(*s.shape[1:]), -math.inf)
            blind = s.isneginf().all(-1, keepdim=True)
            lses.append(s.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf))
            p = s.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
            if rate > 0:
                p = p * kept[b] * (65536 / (65536 - round(65536 * rate)))
            outs.append(torch.einsum("hij,jhd->ihd", p, v))
        if self.varlen:
            return torch.cat(outs), torch.cat(lses, 1)
        return torch.stack(outs), torch.stack(lses)

    def visible(self, queries: int, keys: int) -> Tensor:
        left, right = self.options.get("window", (-1, -1))
        if self.options.get("causal"):
            right = 0
        shift = keys - queries if self.options["corner"] == "bottom_right" else 0
        i = torch.arange(queries, device=self.device)[:, None] + shift
        j = torch.arange(keys, device=self.device)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=self.device)
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        return seen


def check(problem: Problem) -> None:
    out, lse = problem.call(problem.q, problem.k, problem.v, bias=problem.bias, return_lse=True)
    expected, expected_lse = problem.plain()
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(lse, expected_lse, atol=1e-11, rtol=1e-9)
    pairs = [(out, expected)]
    if problem.uses_lse:
        # What sees nothing has no finite lse to be the gradient of.
        finite = expected_lse.isfinite()
        pairs.append((lse[finite], expected_lse[finite]))
    g = [random(*y.shape, seed=7 + n, device=problem.device) for n, (_, y) in enumerate(pairs)]
    found = torch.autograd.grad([x for x, _ in pairs], problem.leaves, g)
    wanted = torch.autograd.grad([y for _, y in pairs], problem.leaves, g)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("part", range(GROUPS))
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_autograd(device: str, part: int) -> None:
    count = int(os.environ.get("PULLBACK_FUZZ_COUNT", "300" if device == "cuda" else "60"))
    for number in range(part, count, GROUPS):
        seed = SEED * 1000003 + number
        try:
            check(Problem(seed, device))
        except Exception as error:
            raise AssertionError(f"problem {number}, PULLBACK_TEST_SEED={SEED}: {error}") from error

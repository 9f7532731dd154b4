"""Random problems of entmax, and the same in f64: for fuzz_torch.py."""

from __future__ import annotations

import math
import random

import torch
from fuzz_torch_attention import DTYPES, Problem, Results, randn
from torch import Tensor

import pullback.torch as pt

LENGTHS = [1, 7, 32, 100, 512, 1000, 1024, 4096, 5000, 32768, 50000, 131072]


def entmax_problem(r: random.Random) -> Problem:
    length = r.choice([*LENGTHS, r.randint(1, 600), r.randint(600, 9000), r.randint(9000, 300000)])
    rows = max((1 << r.choice([12, 18, 22])) // length, 1)
    inner = r.choice([1, 1, 1, rows, min(rows, 3), min(rows, 64)])  # dimensions behind the axis
    p: Problem = {
        "dtype": r.choice([*DTYPES, torch.float64]),
        "shape": (-(-rows // inner), length, inner),
        "alpha": r.choice([1.0, 1.5, 2.0, 1.3, 1.05, r.uniform(1.01, 4), "of rows"]),
        "sigma": r.choice([0.02, 0.3, 1, 3, 20]),
        "mask": r.random() < 0.2,
        "padding": r.choice([0, 0, 0, 8, 1]),  # elements behind each row in memory
    }
    if r.random() < 0.15:
        p["ragged"] = min(r.choice([1, 3, 40, 1000]), length)
    return p


def row_offsets(p: Problem) -> Tensor | None:
    if "ragged" not in p:
        return None
    length = p["shape"][1]
    ends = torch.randint(0, length + 1, (p["ragged"] - 1,)).sort().values
    return torch.cat([torch.tensor([0]), ends, torch.tensor([length])])


def row_indices(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of the axis is: [G,L], and which of these there are."""
    index = offsets[:-1, None] + torch.arange(int(offsets.diff().max()))
    return index.clamp(max=int(offsets[-1]) - 1), index < offsets[1:, None]


def threshold_and_power(z: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows whose largest is 0, alpha above 1: the threshold by bisection, and p."""
    power = 1 / (alpha - 1)
    low, high = torch.full_like(z[:, :1], -1), torch.zeros_like(z[:, :1])
    for _ in range(80):
        middle = (low + high) / 2
        over = (z - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) >= 1
        low, high = middle.where(over, low), high.where(over, middle)
    p = (z - low).clamp(min=0).pow(power).nan_to_num(0)
    return low, p / p.sum(-1, keepdim=True).clamp(min=1e-300)


def gradient_of_alpha(y: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """From y as it is saved: src/ops/entmax/README.md."""
    log = y.where(y > 0, 1).log()
    grown = torch.expm1(-b * log)
    rest = torch.where(b == 0, log**2 / 2, (grown + b * log) / (b**2).where(b > 0, 1))

    def total(t: Tensor) -> Tensor:
        return (y * t).sum(-1, keepdim=True)

    fall = total(g) - b * total(g * log)
    own = y.sum(-1, keepdim=True) - b * total(log)
    return (total(rest) * fall - own * total(g * rest)) / total(1 + grown).clamp(min=1e-300)


def entmax(p: Problem) -> Results:
    dtype, (outer, length, inner) = p["dtype"], p["shape"]
    offsets = row_offsets(p)
    index, there = row_indices(torch.tensor([0, length]) if offsets is None else offsets)

    def by_row(t: Tensor, hidden: float) -> Tensor:
        """[outer·inner·G,L] in f64."""
        rows = t.double().movedim(1, -1).reshape(-1, length)[:, index]
        return rows.masked_fill(~there, hidden).flatten(0, 1)

    padded = (p["sigma"] * randn(torch.float32, outer, length, inner + p["padding"])).to(dtype)
    own = padded[..., :inner].detach().requires_grad_()
    mask = torch.rand(own.shape) < 0.5 if p["mask"] else None
    groups = (len(index),) if offsets is not None else ()
    alpha = p["alpha"]
    if alpha == "of rows":
        choices = torch.tensor([1.0, 1.5, 2.0, 1.25, 1.1, 1.7, 3.0])
        alpha = choices[torch.randint(0, len(choices), (outer, *groups, inner))]
        alpha.requires_grad_()
    out = pt.entmax(own, alpha, 1, mask=mask, offsets=offsets)
    d_out = randn(dtype, *own.shape)
    wanted = [own, alpha] if isinstance(alpha, Tensor) else [own]
    d_x, *d_alpha = torch.autograd.grad(out, wanted, d_out)

    x, g, y = by_row(own.detach(), -math.inf), by_row(d_out, 0), by_row(out.detach(), 0)
    if mask is not None:
        x = x.masked_fill(by_row(mask, 1) == 0, -math.inf)
    if isinstance(alpha, Tensor):
        each = alpha.detach().double().view(outer, -1, inner).transpose(1, 2).reshape(-1, 1)
    else:
        each = x.new_full((len(x), 1), alpha)
    soft = each == 1
    z = (each - 1).where(~soft, 1) * (x - x.amax(-1, keepdim=True))
    z = z.nan_to_num(-math.inf, neginf=-math.inf)  # of rows that see nothing
    low, power = threshold_and_power(z, each.where(~soft, 2))
    right = torch.softmax(x, -1).nan_to_num(0).where(soft, power)
    # y as it is saved
    slope = right.where(soft, right.pow(2 - each).where(right.to(dtype) > 0, 0))
    share = slope / slope.sum(-1, keepdim=True).clamp(min=1e-300)
    right_d_x = slope * (g - (share * g).sum(-1, keepdim=True))
    # Beyond 2 p itself rises steeply from 0 at the edge of the support, where rounding in f64 is
    # 1e-6 of p; before it the slope does, the more so the nearer alpha is to 2, and jumps there:
    # an element that near may be on either side. Thresholds for 16 bits are within 1e-5 (measured).
    edge = torch.full_like(each, 3e-6)
    edge[(each > 1.5) & (each < 2)] = 2e-5 if dtype.itemsize == 2 else 4e-6
    edge[each > 2] = 1e-15
    clear = ((z - low).abs() > edge).all(-1, keepdim=True) | soft
    smooth = each <= 2
    results = [
        ("out", y.where(clear | smooth, 0), right.where(clear | smooth, 0)),
        ("d_x", by_row(d_x, 0).where(clear & smooth, 0), right_d_x.where(clear & smooth, 0)),
        ("sums", out.detach().double().sum(1), right.sum(-1).view(outer, inner, -1).sum(-1)),
    ]
    if d_alpha:
        expected = gradient_of_alpha(y, by_row(d_out, 0), each - 1)
        found = d_alpha[0].double().view(outer, -1, inner).transpose(1, 2).reshape(-1, 1)
        results.append(("d_alpha", found, expected))
    return results

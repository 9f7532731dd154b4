#!/usr/bin/env python3
"""Random problems of the sizes that models have, beside PyTorch in f64.

The tests' random problems are small, so that the reference can follow. These reach what depends on
how many keys, rows, tiles and thread blocks there are. Each is printed before it runs: one that
never ends is the last line. A number is a problem: --seed NUMBER --count 1 repeats it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable

import torch
from fuzz_torch_attention import DTYPES, Problem, Results, attention, attention_problem, randn
from fuzz_torch_blocks import matmul, matmul_problem, softmax, softmax_problem
from fuzz_torch_entmax import entmax, entmax_problem
from torch import Tensor

import pullback.torch as pt

# Of the largest value of a tensor: what rounding may do, and no wrong tile would.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-6}
LEAST_SCALE = 0.05  # of smaller values rounding of others may be all


# --- segment ---


def segment_problem(r: random.Random) -> Problem:
    columns = r.choice(
        [1, 1, 2, 3, 4, 8, 16, 33, 64, 100, 128, 128, 300, 1000, 1001, r.randint(1, 600)]
    )
    reduce = r.choice(["sum", "mean", "max", "min", "prod", "logsumexp", "softmax"])
    return {
        "dtype": r.choice([*DTYPES, torch.float64]),
        "columns": columns,
        "rows": max((1 << r.choice([12, 16, 20, 23])) // columns + r.randint(-9, 9), 1),
        "lengths": r.choice(["short", "fixed", "long", "power law", "giant", "sparse"]),
        "mean": r.choice([1, 3, 8, 40, 300, 5000]),
        "reduce": reduce,
        "ties": r.choice(["first", "last", "even"]) if reduce in ("max", "min") else "first",
        "by": r.choice(["offsets", "offsets", "ids", "permutation", "permutation with ids"]),
        "outside": r.choice([0, 0, 5, 700]),  # rows before all segments, and behind
        "padding": r.choice([0, 0, 0, 0, 3]),
    }


def segment_ids(p: Problem) -> tuple[Tensor, int]:
    """Ascending, -1 and S for rows in no segment; and S."""
    rows, mean, kind = p["rows"], p["mean"], p["lengths"]
    count = max(2 * rows // mean, 1) + 2
    if kind == "fixed":
        lengths = torch.full((count,), mean)
    elif kind == "power law":
        lengths = (torch.rand(count) ** -0.8).clamp(max=rows).long()
    elif kind == "giant":
        lengths = torch.cat([torch.randint(0, 4, (5,)), torch.tensor([rows // 2])])
    elif kind == "sparse":
        lengths = torch.randint(0, 2, (count,)) * torch.randint(0, 2 * mean + 1, (count,))
    else:
        lengths = torch.randint(0 if kind == "short" else mean, 2 * mean + 1, (count,))
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)[:rows]
    segments = int(ids[-1]) + 1 + p["mean"] % 3 if len(ids) else 2
    before, behind = min(p["outside"], rows // 3), rows - len(ids)
    ids = torch.cat([torch.full((before,), -1), ids, torch.full((behind,), segments)])[:rows]
    return ids, segments


def segment(p: Problem) -> Results:
    rows, columns, reduce = p["rows"], p["columns"], p["reduce"]
    ids, count = segment_ids(p)
    kinds: dict[str, Tensor] = {}
    if p["by"] == "ids":
        kinds["ids"] = ids
    elif p["by"].startswith("permutation"):
        ids = ids[torch.randperm(rows)]
        kinds["permutation"], kinds["offsets"] = pt.segment_permutation(ids, count)
        if p["by"] != "permutation":
            kinds["ids"] = ids
    else:
        kinds["offsets"] = torch.searchsorted(ids, torch.arange(count + 1))
    x = torch.randn(rows, columns + p["padding"])[:, :columns]
    if reduce == "prod":
        x = 1 + 0.1 * x
    own = x.to(p["dtype"]).requires_grad_()
    out = pt.segment_reduce(own, reduce, num_segments=count, ties=p["ties"], **kinds)
    g = randn(p["dtype"], *out.shape)
    (d_x,) = torch.autograd.grad(out, own, g)

    inside = (ids >= 0) & (ids < count)
    at, x, g = ids[inside], own.detach()[inside].double(), g.double()
    each = at[:, None].expand(-1, columns)
    lengths = torch.bincount(at, minlength=count).double()[:, None]

    def added(values: Tensor) -> Tensor:
        return values.new_zeros(count, columns).index_add(0, at, values)

    def largest(values: Tensor) -> Tensor:
        lowest = values.new_full((count, columns), -math.inf)
        return lowest.scatter_reduce(0, each, values, "amax")

    top = largest(x)
    lse = top + added((x - top[at]).exp()).log()
    if reduce in ("sum", "mean"):
        factor = 1 / lengths.clamp(min=1) if reduce == "mean" else torch.ones_like(lengths)
        right, right_d_x = added(x) * factor, (g * factor)[at]
    elif reduce in ("max", "min"):
        sign = 1 if reduce == "max" else -1
        top = largest(sign * x)
        tied, right = sign * x == top[at], sign * top
        if p["ties"] == "even":
            right_d_x = g[at] * tied / added(tied.double())[at]
        else:
            number = torch.arange(len(at), dtype=torch.float64)[:, None]
            order = (number if p["ties"] == "last" else -number).where(tied, -math.inf)
            right_d_x = g[at] * (order == largest(order)[at])
    elif reduce == "prod":
        right = torch.ones_like(top).scatter_reduce(0, each, x, "prod")
        right_d_x = (g * right)[at] / x
    elif reduce == "logsumexp":
        right, right_d_x = lse, g[at] * (x - lse[at]).exp()
    else:
        y, g = (x - lse[at]).exp(), g[inside]
        right = out.new_zeros(rows, columns, dtype=torch.float64)
        right[inside] = y
        right_d_x = y * (g - added(y * g)[at])
    whole = torch.zeros(rows, columns, dtype=torch.float64)
    whole[inside] = right_d_x
    finite = right.isfinite()  # of f16 and empty segments
    same = (out.double() == right) | finite
    return [
        ("out", out[finite], right[finite]),
        ("infinities", same.double(), torch.ones_like(right)),
        ("d_x", d_x, whole),
    ]


OPS: dict[str, tuple[Callable[[random.Random], Problem], Callable[[Problem], Results]]] = {
    "attention": (attention_problem, attention),
    "segment": (segment_problem, segment),
    "entmax": (entmax_problem, entmax),
    "block_softmax": (softmax_problem, softmax),
    "block_matmul": (matmul_problem, matmul),
}


def errors_of(results: Results, dtype: torch.dtype) -> dict[str, float]:
    errors = {}
    for name, ours, right in results:
        if right.numel() == 0:
            continue
        scale = max(float(right.abs().max()), LEAST_SCALE)
        error = float((ours.double() - right).abs().max()) / scale
        if not error <= TOLERANCE[dtype]:
            errors[name] = error
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    torch.set_default_device(args.device)
    make, run = OPS[args.op]
    end, number, wrong = time.monotonic() + args.seconds, args.seed, 0
    while time.monotonic() < end and (args.count is None or number < args.seed + args.count):
        problem = make(random.Random(number))
        print(number, problem, flush=True)
        torch.manual_seed(number)
        errors = errors_of(run(problem), problem["dtype"])
        if errors:
            wrong += 1
            print("WRONG", number, errors, flush=True)
        number += 1
    print(f"{number - args.seed} problems, {wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()

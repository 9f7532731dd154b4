#!/usr/bin/env python3
"""Random problems of the sizes that models have, beside PyTorch in f64 on a GPU.

The tests' random problems are small, so that the CPU can follow. These reach what depends on how
many keys, rows, tiles and thread blocks there are. Each is printed before it runs: one that never
ends is the last line. A number is a problem: --seed NUMBER --count 1 repeats it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pullback.torch as pt
from pullback.sparsity import BlockLayout

Problem = dict[str, Any]
Results = list[tuple[str, Tensor, Tensor]]  # name, ours, right

DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
# Of the largest value of a tensor: what rounding may do, and no wrong tile would.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-6}
LEAST_SCALE = 0.05  # of smaller values rounding of others may be all


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


# --- attention ---

MOST_PAIRS = 1 << 20, 1 << 22, 1 << 24  # which the reference holds ten times in f64
MOST_ELEMENTS = 1 << 25  # of q, or of keys for all heads


def attention_problem(r: random.Random) -> Problem:
    def length() -> int:
        kind = r.random()
        if kind < 0.15:
            return r.randint(1, 16)
        if kind < 0.4:
            return r.randint(17, 300)
        if kind < 0.8:
            return r.randint(300, 2500) if r.random() < 0.5 else 64 * r.randint(5, 40)
        return r.randint(2500, 16384)

    most = r.choice(MOST_PAIRS)
    query, key = length(), length()
    if r.random() < 0.5:
        key = query
    while query * key > most:
        query = max(query // 2, 1)
    dim = r.choice([64, 128, 64, 128, 96, 192, 256, 32, 80, r.randint(1, 256)])
    room = min(most // (query * key), MOST_ELEMENTS // (max(query, key) * dim))
    heads = max(min(r.choice([1, 2, 3, 4, 8, 12, 16]), room), 1)
    batch = max(min(r.choice([1, 1, 2, 3, 7, 30]), room // heads), 1)
    group = r.choice([g for g in (1, 1, 1, 2, 3, 4, 8) if heads % g == 0])
    p: Problem = {
        "dtype": r.choice(DTYPES),
        "batch": batch,
        "heads": heads,
        "kv_heads": heads // group,
        "query": query,
        "key": key,
        "dim": dim,
        "value_dim": dim if r.random() < 0.85 else r.choice([32, 64, 128, r.randint(1, 256)]),
    }
    options: Problem = {}
    if r.random() < 0.4:
        options["causal"] = True
    if r.random() < 0.2:
        left, right = r.randint(0, 700), r.randint(0, 300)
        options["window"] = r.choice([(left, -1), (left, right), (-1, right)])
    if r.random() < 0.3:
        options["corner"] = "top_left"
    if r.random() < 0.15:
        options["softcap"] = r.choice([5.0, 30.0])
    if r.random() < 0.25:
        options.update(dropout=r.choice([0.1, 0.5]), seed=r.getrandbits(63))
    kind = r.random()
    if kind < 0.3:
        whole = (batch, 0.5), (heads, 0.7), (query, 0.9), (key, 0.95)
        p["bias"] = tuple(n if r.random() < chance else 1 for n, chance in whole)
        p["bias_offset"] = r.choice([0, 0, 0, 1, 4])
    elif kind < 0.45:
        options["block"] = r.choice([16, 32, 64, 64, 128, 128])
        p["density"] = r.choice([0.05, 0.2, 0.5, 0.9])
        p["layout_heads"] = r.choice([1, heads])
    elif kind < 0.6 and batch > 1:
        p["packed"] = [(r.randint(0, query), r.randint(0, key)) for _ in range(batch)]
    p["padding"] = r.choice([0, 0, 0, 8])  # elements behind each row
    p["wanted"] = r.choice(["qkv", "qkv", "qkv", "qkv", "q", "kv", "v", "k"])
    p["lse"] = p["wanted"] != "v" and r.random() < 0.2
    p["options"] = options
    return p


def kept(seed: int, probability: float, planes: range, query: int, key: int) -> Tensor:
    """What dropout multiplies by, as src/ops/attention/dropout.cuh defines it: [planes,Sq,Sk]."""
    low = 0xFFFFFFFF
    blocks = torch.arange((key + 7) // 8, device="cuda")
    rows = torch.arange(query, device="cuda")[:, None]
    plane = torch.tensor(planes, device="cuda")[:, None, None]
    shape = (len(planes), query, len(blocks))
    word = [x.expand(shape) for x in (blocks, rows, plane & low, plane >> 32)]
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57
        high = b >> 32 & low, a >> 32 & low
        word = [high[0] ^ word[1] ^ keys[0], b & low, high[1] ^ word[3] ^ keys[1], a & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    draws = torch.stack([half for w in word for half in (w & 0xFFFF, w >> 16)], -1)
    threshold = min(int(probability * 65536 + 0.5), 65535)
    return (draws.flatten(-2)[..., :key] >= threshold) * (65536 / (65536 - threshold))


def seen(options: Problem, query: int, key: int) -> Tensor:
    """Of the band mask: [Sq,Sk]."""
    j = torch.arange(key, device="cuda")
    own = torch.arange(query, device="cuda")[:, None]
    if options.get("corner") != "top_left":
        own = own + key - query
    left, right = options.get("window") or (-1, -1)
    sees = torch.ones(query, key, dtype=torch.bool, device="cuda")
    if options.get("causal"):
        sees &= j <= own
    if left >= 0:
        sees &= j >= own - left
    if right >= 0:
        sees &= j <= own + right
    return sees


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    factor: Tensor | None,
    sees: Tensor,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    lse = s.masked_fill(~sees, -math.inf).logsumexp(-1)
    weights = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().masked_fill(~sees, 0)
    if factor is not None:
        weights = weights * factor
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def attention(p: Problem) -> Results:
    dtype, batch, heads, query, key = (p[n] for n in ("dtype", "batch", "heads", "query", "key"))
    options, packed = dict(p["options"]), p.get("packed")
    rows_q, rows_k = (batch, query), (batch, key)
    sequences = [(query, key)]
    if packed:
        sequences = packed
        ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*packed, strict=True)]
        rows_q, rows_k = ((int(e[-1]),) for e in ends)
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (e.int().cuda() for e in ends)
        options.update(max_seqlen_q=query, max_seqlen_k=key)
    inputs = {}
    for name, rows, of_heads, dim in (
        ("q", rows_q, heads, p["dim"]),
        ("k", rows_k, p["kv_heads"], p["dim"]),
        ("v", rows_k, p["kv_heads"], p["value_dim"]),
    ):
        inputs[name] = randn(dtype, *rows, of_heads, dim + p["padding"])[..., :dim]
    if "bias" in p:
        offset = p["bias_offset"]
        inputs["bias"] = randn(dtype, math.prod(p["bias"]) + offset)[offset:].view(p["bias"])
    sees = [seen(options, *lengths) for lengths in sequences]
    if "density" in p:
        block = options["block"]
        shape = p["layout_heads"], -(-query // block), -(-key // block)
        blocks = torch.rand(shape) < p["density"]
        options["layout"] = BlockLayout(blocks.to(torch.uint8).numpy())
        pairs = blocks.cuda().repeat_interleave(block, 1).repeat_interleave(block, 2)
        sees = [sees[0] & pairs[:, :query, :key]]
    wanted = [n for n in inputs if n in p["wanted"] or n == "bias"]
    own = {n: x.detach().requires_grad_(n in wanted) for n, x in inputs.items()}
    out, lse = pt.attention(**own, return_lse=True, **options)
    d_out, d_lse = randn(dtype, *out.shape), torch.randn_like(lse).masked_fill(lse == -math.inf, 0)
    ours, given = [out, lse][: 1 + p["lse"]], [d_out, d_lse][: 1 + p["lse"]]
    gradients = torch.autograd.grad(ours, [own[n] for n in wanted], given)

    exact = {n: x.detach().double().requires_grad_(n in wanted) for n, x in inputs.items()}
    parts = []
    for b, (lengths, sees_b) in enumerate(zip(sequences, sees, strict=True)):
        q, k, v = (exact[n] for n in "qkv")
        planes = range(batch * heads)
        if packed:
            (q_at, q_end), (k_at, k_end) = (e[b : b + 2].tolist() for e in ends)
            q, k, v = q[None, q_at:q_end], k[None, k_at:k_end], v[None, k_at:k_end]
            planes = range(b * heads, (b + 1) * heads)
        factor = None
        if "dropout" in options:
            factor = kept(options["seed"], options["dropout"], planes, *lengths)
            factor = factor.view(len(planes) // heads, heads, *lengths)
        parts.append(
            exact_attention(q, k, v, exact.get("bias"), factor, sees_b, options.get("softcap", 0.0))
        )
    right_out = torch.cat([o[0] for o, _ in parts]) if packed else parts[0][0]
    right_lse = torch.cat([r[0] for _, r in parts], -1) if packed else parts[0][1]
    right = torch.autograd.grad(
        [right_out, right_lse][: 1 + p["lse"]],
        [exact[n] for n in wanted],
        [g.double() for g in given],
    )
    finite = right_lse != -math.inf
    results = [
        ("out", out, right_out),
        ("which lse are finite", (lse != -math.inf).double(), finite.double()),
        ("lse", lse[finite], right_lse[finite]),
    ]
    # Of scores that change nothing, gradients are what rounding leaves.
    one_key = max((int(s.sum(-1).max()) for s in sees if s.numel()), default=0) <= 1
    for name, gradient, expected in zip(wanted, gradients, right, strict=True):
        if name == "v" or not (one_key or (name == "bias" and p["bias"][3] == 1)):
            results.append(("d_" + name, gradient, expected))
    return results


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
        "by": r.choice(["offsets", "offsets", "ids", "permutation"]),
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
    return ids.cuda(), segments


def segment(p: Problem) -> Results:
    rows, columns, reduce = p["rows"], p["columns"], p["reduce"]
    ids, count = segment_ids(p)
    kinds: dict[str, Tensor] = {}
    if p["by"] == "ids":
        kinds["ids"] = ids
    elif p["by"] == "permutation":
        ids = ids[torch.randperm(rows, device="cuda")]
        kinds["permutation"], kinds["offsets"] = pt.segment_permutation(ids, count)
    else:
        kinds["offsets"] = torch.searchsorted(ids, torch.arange(count + 1, device="cuda"))
    x = torch.randn(rows, columns + p["padding"], device="cuda")[:, :columns]
    if reduce == "prod":
        x = 1 + 0.1 * x
    own = x.to(p["dtype"]).requires_grad_()
    out = pt.segment_reduce(own, reduce, num_segments=count, ties=p["ties"], **kinds)
    g = randn(p["dtype"], *out.shape)
    (d_x,) = torch.autograd.grad(out, own, g)

    inside = (ids >= 0) & (ids < count)
    at, x, g = ids[inside], own.detach()[inside].double(), g.double()
    each = at[:, None].expand(-1, columns)
    zeros = x.new_zeros(count, columns)
    lengths = torch.bincount(at, minlength=count).double()[:, None]
    sums = zeros.index_add(0, at, x)
    largest = zeros.fill_(-math.inf).scatter_reduce(0, each, x, "amax")
    powers = (x - largest[at]).exp()
    lse = largest + x.new_zeros(count, columns).index_add(0, at, powers).log()
    if reduce in ("sum", "mean"):
        factor = 1 / lengths.clamp(min=1) if reduce == "mean" else torch.ones_like(lengths)
        right, right_d_x = sums * factor, (g * factor)[at]
    elif reduce in ("max", "min"):
        sign = 1 if reduce == "max" else -1
        top = largest.fill_(-math.inf).scatter_reduce(0, each, sign * x, "amax")
        tied, right = sign * x == top[at], sign * top
        if p["ties"] == "even":
            share = x.new_zeros(count, columns).index_add(0, at, tied.double())
            right_d_x = g[at] * tied / share[at]
        else:
            number = torch.arange(len(at), device="cuda", dtype=torch.float64)[:, None]
            order = (number if p["ties"] == "last" else -number).where(tied, -math.inf)
            chosen = torch.full_like(top, -math.inf).scatter_reduce(0, each, order, "amax")
            right_d_x = g[at] * (order == chosen[at])
    elif reduce == "prod":
        right = torch.ones_like(sums).scatter_reduce(0, each, x, "prod")
        right_d_x = (g * right)[at] / x
    elif reduce == "logsumexp":
        right, right_d_x = lse, g[at] * (x - lse[at]).exp()
    else:
        y, g = (x - lse[at]).exp(), g[inside]
        right = out.new_zeros(rows, columns, dtype=torch.float64)
        right[inside] = y
        mean = x.new_zeros(count, columns).index_add(0, at, y * g)
        right_d_x = y * (g - mean[at])
    whole = torch.zeros(rows, columns, device="cuda", dtype=torch.float64)
    whole[inside] = right_d_x
    finite = right.isfinite()  # of f16 and empty segments
    same = (out.double() == right) | finite
    return [
        ("out", out[finite], right[finite]),
        ("infinities", same.double(), torch.ones_like(right)),
        ("d_x", d_x, whole),
    ]


# --- entmax ---


def entmax_problem(r: random.Random) -> Problem:
    return {
        "dtype": r.choice([*DTYPES, torch.float64]),
        "length": r.choice([1, 7, 32, 100, 512, 1000, 1024, 4096, 5000, 32768, 50000, 131072]),
        "elements": 1 << r.choice([12, 18, 22]),
        "alpha": r.choice([1.0, 1.5, 2.0, 1.3, 1.05, r.uniform(1.01, 4)]),
        "sigma": r.choice([0.02, 0.3, 1, 3, 20]),
        "axis": r.choice([-1, -1, -1, 0]),
        "mask": r.random() < 0.2,
    }


def entmax(p: Problem) -> Results:
    rows = max(p["elements"] // p["length"], 1)
    shape = (rows, p["length"]) if p["axis"] else (p["length"], rows)
    own = (p["sigma"] * randn(torch.float32, *shape)).to(p["dtype"]).requires_grad_()
    mask = torch.rand(shape, device="cuda") < 0.5 if p["mask"] else None
    out = pt.entmax(own, p["alpha"], p["axis"], mask=mask)
    g = randn(p["dtype"], *shape)
    (d_x,) = torch.autograd.grad(out, own, g)

    axis, alpha = p["axis"], p["alpha"]
    x, g = own.detach().double(), g.double()
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf)
    if alpha == 1:
        right = torch.softmax(x, axis).nan_to_num(0)
        slope = right
    else:
        z = (alpha - 1) * (x - x.amax(axis, keepdim=True))
        low, high = (
            torch.full_like(z.narrow(axis, 0, 1), -1),
            torch.zeros_like(z.narrow(axis, 0, 1)),
        )
        for _ in range(80):
            middle = (low + high) / 2
            over = (z - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(axis, keepdim=True) >= 1
            low, high = middle.where(over, low), high.where(over, middle)
        right = (z - low).clamp(min=0).pow(1 / (alpha - 1)).nan_to_num(0)
        right = right / right.sum(axis, keepdim=True).clamp(min=1e-300)
        slope = right.pow(2 - alpha).where(right.to(p["dtype"]) > 0, 0)  # as it is saved
    mean = (slope * g).sum(axis, keepdim=True) / slope.sum(axis, keepdim=True).clamp(min=1e-300)
    results = [("out", out, right)]
    # Beyond 2 the slope is infinite at the edge of the support, and before it jumps there: an
    # element that near may be on either side.
    if alpha == 1:
        results.append(("d_x", d_x, slope * (g - mean)))
    elif alpha <= 2:
        clear = ((z - low).abs() > 3e-6).all(axis, keepdim=True)
        results.append(("d_x", d_x * clear, slope * (g - mean) * clear))
    return results


OPS: dict[str, tuple[Callable[[random.Random], Problem], Callable[[Problem], Results]]] = {
    "attention": (attention_problem, attention),
    "segment": (segment_problem, segment),
    "entmax": (entmax_problem, entmax),
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
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

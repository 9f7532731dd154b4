"""Random problems of attention, and the same in f64: for fuzz_torch.py."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import pullback.torch as pt
from pullback.sparsity import BlockLayout

Problem = dict[str, Any]
Results = list[tuple[str, Tensor, Tensor]]  # name, ours, right

DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


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
    dim = r.choice([64, 128, 64, 128, 96, 192, 256, 32, 80, 72, 88, 200, r.randint(1, 256)])
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
    blocks = torch.arange((key + 7) // 8)
    rows = torch.arange(query)[:, None]
    plane = torch.tensor(planes)[:, None, None]
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
    j = torch.arange(key)
    own = torch.arange(query)[:, None]
    if options.get("corner") != "top_left":
        own = own + key - query
    left, right = options.get("window") or (-1, -1)
    sees = torch.ones(query, key, dtype=torch.bool)
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
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (e.int() for e in ends)
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
        options["layout"] = BlockLayout(blocks.to(torch.uint8).cpu().numpy())
        pairs = blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)
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

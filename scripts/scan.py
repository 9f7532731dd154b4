#!/usr/bin/env python3
"""Times pullback.torch on sizes and features that tables of rivals leave out, to find where it is slow.

  scan.py attention|block_softmax|entmax|segment [--device cpu] [--match WORD ...] [--seconds S] [--json FILE]

A line a case: forward and backward, in µs and as a share of the device's copy or, of attention, in GFLOP/s.
compare_builds.py has it run for several builds in turns.

On a GPU kernels are compiled as they are met: run it with --warm I/N in N processes first, each takes every N-th
case once. On a CPU problems are smaller, and one thread's own time is counted, which others do not lengthen; have
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at 4294967296, or each large output is of new pages, which take
longer than the work.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time

import torch

import pullback.torch as pt
from pullback import sparsity

DEVICE = "cuda"
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 23}
# Of attention, and of the layouts of block_softmax.
BATCH, HEADS, LENGTH = {"cuda": 2, "cpu": 1}, {"cuda": 16, "cpu": 4}, {"cuda": 2048, "cpu": 512}
BLOCKS_LENGTH = {"cuda": 4096, "cpu": 2048}


def timed(run, repeats=8):
    """µs of run()."""
    run()
    return timed_on_cpu(run) if DEVICE == "cpu" else timed_on_gpu(run, repeats)


def timed_on_cpu(run):
    """The least of some."""
    times = []
    while len(times) < 3 or (sum(times) < 0.1 and len(times) < 15):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times) * 1e6


def timed_on_gpu(run, repeats):
    """The median, behind a kernel that sleeps while the host works ahead."""
    medians = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        stop.synchronize()
        medians.append(start.elapsed_time(stop) / repeats * 1e3)
    return statistics.median(medians)


def normal(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def both_passes(run, inputs, time_them):
    y = run()
    d_y = torch.randn_like(y)

    def backward():
        torch.autograd.grad(y, inputs, d_y, retain_graph=True)

    if not time_them:
        backward()
        return None
    return timed(run), timed(backward)


def copy_rate():
    x = normal(ELEMENTS[DEVICE], dtype=torch.float32, grad=False)
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / timed(lambda: y.copy_(x))


# Each yields (name, arguments); the functions behind return µs forward and backward, and the bytes or FLOP of each.


def segment_cases():
    columns = [1, 2, 3, 4, 6, 8, 10, 16, 20, 33, 50, 64, 100, 128, 300, 500, 1000, 1001]
    dtypes, reductions = [torch.float32, torch.bfloat16], ["sum", "max", "logsumexp", "softmax"]
    for d, dtype, reduce, kind in itertools.product(columns, dtypes, reductions, ["short", "power"]):
        yield f"D {d} {dtype} {reduce} {kind}", {"d": d, "dtype": dtype, "reduce": reduce, "kind": kind}
    for d, dtype, kind in itertools.product([1, 16, 128], dtypes, ["short", "long"]):
        given = {"d": d, "dtype": dtype, "reduce": "max", "kind": kind, "ties": "even"}
        yield f"D {d} {dtype} max {kind} even ties", given
    reductions = ["sum", "max", "prod", "logsumexp", "softmax"]
    ways = ["ids", "permutation", "permutation with ids"]
    for d, dtype, reduce, by in itertools.product([1, 2, 4, 8, 16, 128], dtypes, reductions, ways):
        yield f"D {d} {dtype} {reduce} by {by}", {"d": d, "dtype": dtype, "reduce": reduce, "kind": "short", "by": by}


def segment_offsets(kind, rows):
    if kind == "short":
        lengths = torch.randint(1, 16, (rows // 8 + rows // 16,), device=DEVICE)
    elif kind == "long":
        lengths = torch.randint(1, 8192, (rows // 4096 + 64,), device=DEVICE)
    else:
        uniform = torch.rand(rows // 4 + 64, device=DEVICE)
        lengths = (1 / (uniform + 1e-4) ** 0.8).long().clamp(1, 20000)
    ends = lengths.cumsum(0)
    ends = ends[ends < rows]
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), rows)])


def segment(time_them, d, dtype, reduce, kind, by="offsets", **options):
    rows = ELEMENTS[DEVICE] // d
    offsets = segment_offsets(kind, rows)
    segments = offsets.numel() - 1
    x = normal(rows, d, dtype=dtype)
    index = {"offsets": offsets}
    if by != "offsets":
        ids = torch.repeat_interleave(torch.arange(segments, device=DEVICE), offsets.diff())
        index = {"ids": ids, "num_segments": segments}
    if by.startswith("permutation"):
        ids = ids[torch.randperm(rows, device=DEVICE)]
        permutation, offsets = pt.segment_permutation(ids, segments)
        index = {"offsets": offsets, "permutation": permutation}
        if by != "permutation":
            index["ids"] = ids
    times = both_passes(lambda: pt.segment_reduce(x, reduce, **index, **options), (x,), time_them)
    result = rows if reduce == "softmax" else segments
    saved = {"max": 8 * segments * d, "logsumexp": 4 * segments * d}.get(reduce, 0)
    work = (rows + result) * d * x.element_size() + saved + 8 * (offsets.numel() if by == "offsets" else rows)
    more = rows * d * x.element_size() if reduce in ("logsumexp", "softmax") or options else 0
    return times, (work, work + more)


def block_softmax_cases():
    layouts = {
        "BigBird 64": (sparsity.BigBirdSparsityConfig(num_heads=16, block=64), 4),
        "Fixed 32": (sparsity.FixedSparsityConfig(num_heads=16, block=32), 2),
    }
    terms = [
        ("nothing", None, False),
        *[(f"rpe{' and its gradient' * grad}", "rpe", grad) for grad in (False, True)],
        *[(f"key_padding_mask added{' and its gradient' * grad}", "key_padding_mask", grad) for grad in (False, True)],
        *[(f"attn_mask added{' and its gradient' * grad}", "attn_mask", grad) for grad in (False, True)],
        ("key_padding_mask kept", "key_padding_keep", False),
        ("attn_mask kept", "attn_keep", False),
    ]
    dtypes = [torch.float32, torch.bfloat16]
    for (name, (config, batch)), dtype, (term, what, grad) in itertools.product(layouts.items(), dtypes, terms):
        given = {"config": config, "batch": batch, "dtype": dtype, "term": what, "grad": grad}
        yield f"{name} {dtype} {term}", given


def block_softmax(time_them, config, batch, dtype, term, grad):
    length = BLOCKS_LENGTH[DEVICE]
    layout = config.make_layout(length)
    x = normal(batch, layout.nnz, config.block, config.block, dtype=dtype)
    kept = {"key_padding_keep": ("key_padding", batch), "attn_keep": ("attn", length)}
    options = {"attn_mask_mode": "add"} if term == "attn_mask" else {}
    if term in kept:
        mask, rows = kept[term]
        options[f"{mask}_mask"] = torch.rand(rows, length, device=DEVICE) < 0.8
        options["key_padding_mode" if mask == "key_padding" else "attn_mask_mode"] = "keep"
    shapes = {"rpe": (1, 16, length, length), "key_padding_mask": (batch, length), "attn_mask": (length, length)}
    if term in shapes:
        options[term] = normal(*shapes[term], dtype=dtype, grad=grad)
    inputs = (x, options[term]) if grad else (x,)
    times = both_passes(lambda: pt.block_softmax(x, layout, scale=0.125, **options), inputs, time_them)
    own = x.numel() * x.element_size()
    return times, (2 * own, 3 * own)


def entmax_cases():
    dtypes, alphas = [torch.float32, torch.bfloat16], [1.0, 1.25, 1.5, 2.0]
    lengths = [2, 3, 5, 8, 10, 16, 33, 64, 100, 512, 1001, 4095, 4096, 32000, 50257, 151936]
    for v, dtype, alpha in itertools.product(lengths, dtypes, alphas):
        yield (
            f"V {v} {dtype} alpha {alpha}",
            {"shape": (ELEMENTS[DEVICE] // v, v), "dtype": dtype, "alpha": alpha, "axis": -1},
        )
    across = [(8, 64), (64, 64), (512, 3), (512, 64), (1000, 7), (4096, 128)]
    for (v, r), dtype, alpha in itertools.product(across, dtypes, alphas):
        shape = (ELEMENTS[DEVICE] // v // r, v, r)
        yield (
            f"axis 1 of [N,{v},{r}] {dtype} alpha {alpha}",
            {"shape": shape, "dtype": dtype, "alpha": alpha, "axis": 1},
        )
    for v, dtype in itertools.product([32, 100, 512, 1001, 4096, 32000], dtypes):
        given = {"shape": (ELEMENTS[DEVICE] // v, v), "dtype": dtype, "axis": -1}
        for alpha in alphas:
            yield f"V {v} {dtype} alpha {alpha} mask", {**given, "alpha": alpha, "mask": "whole"}
        yield f"V {v} {dtype} alpha 1.5 mask of all rows", {**given, "alpha": 1.5, "mask": "broadcast"}
        yield f"V {v} {dtype} alphas of rows", {**given, "alpha": "rows"}
        yield f"V {v} {dtype} alphas of rows, no d_alpha", {**given, "alpha": "rows", "alpha_grad": False}


def entmax(time_them, shape, dtype, alpha, axis, mask=None, alpha_grad=True):
    x = normal(*shape, dtype=dtype)
    inputs = [x]
    if alpha == "rows":
        alpha = (1.13 + 0.86 * torch.rand(shape[0], 1, device=DEVICE)).requires_grad_(alpha_grad)
        if alpha_grad:
            inputs.append(alpha)
    if mask:
        rows = 1 if mask == "broadcast" else shape[0]
        mask = (torch.rand(rows, shape[1], device=DEVICE) < 0.8).expand(*shape)
    times = both_passes(lambda: pt.entmax(x, alpha, axis, mask=mask), inputs, time_them)
    own = x.numel() * x.element_size()
    return times, (2 * own, 3 * own)


def attention_cases():
    batch, heads, length = BATCH[DEVICE], HEADS[DEVICE], LENGTH[DEVICE]
    for d, causal in itertools.product(
        [8, 16, 32, 33, 40, 50, 64, 65, 72, 80, 88, 96, 100, 112, 127, 128, 160, 192, 224, 250, 256], [False, True]
    ):
        yield f"D {d}{' causal' * causal}", {"d": d, "causal": causal}
    for d in [32, 33, 64, 80, 96, 128, 192, 256]:
        yield f"D {d} f32", {"d": d, "dtype": torch.float32}
    features = {
        "softcap": {"softcap": 30.0},
        "window 256": {"window": (256, 0)},
        "dropout": {"dropout": 0.1, "seed": 7},
        "bias [B,H,S,S]": {"bias": (batch, heads, length, length)},
        "bias [1,H,S,S]": {"bias": (1, heads, length, length)},
        "bias [1,H,S,S] causal": {"bias": (1, heads, length, length), "causal": True},
        "bias [B,1,1,S]": {"bias": (batch, 1, 1, length)},
        "bias [1,H,S,S] and dropout": {"bias": (1, heads, length, length), "dropout": 0.1, "seed": 7},
        "bias [B,H,S,S] and dropout": {"bias": (batch, heads, length, length), "dropout": 0.1, "seed": 7},
        "a quarter of the heads for keys": {"kv_heads": heads // 4},
        "packed": {"lengths": (100, 900, 1500, 300, 700, 50, 546)},
    }
    for d, (name, options) in itertools.product([64, 80, 128, 192, 256], features.items()):
        yield f"D {d} {name}", {"d": d, **options}
    for d, value_dim in [(192, 128), (64, 128), (128, 64)]:
        yield f"D {d} Dv {value_dim}", {"d": d, "value_dim": value_dim}
    shapes = [
        (1, 32, 1, 8192),
        (16, 32, 1, 4096),
        (1, 32, 16, 8192),
        (1, 8, 128, 65536),
        (1, 8, 512, 50176),
        (1, 1, 4096, 4096),
        (8, 16, 77, 77),
        (32, 12, 197, 197),
        (4, 16, 2048, 77),
        (2048, 4, 49, 49),
        (2, 16, 2047, 2047),
    ]
    for (b, h, q, k), d in itertools.product(shapes, [64, 128]):
        if DEVICE == "cpu" and b * h * q * k > 1 << 26:
            continue
        yield f"B {b} H {h} Sq {q} Sk {k} D {d}", {"d": d, "batch": b, "heads": h, "query": q, "key": k}
    # Those of docs/performance.md's tables: 16384 tokens.
    heads_of = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
    for (d, h), s, causal in itertools.product(heads_of.items(), [512, 1024, 2048, 8192], [False, True]):
        if DEVICE == "cuda":
            given = {"d": d, "causal": causal, "batch": 16384 // s, "heads": h, "query": s}
            yield f"table: D {d} S {s}{' causal' * causal}", given


def attention(
    time_them,
    d,
    causal=False,
    dtype=torch.bfloat16,
    batch=None,
    heads=None,
    query=None,
    key=None,
    value_dim=None,
    kv_heads=None,
    bias=None,
    lengths=None,
    **options,
):
    batch, heads, query = batch or BATCH[DEVICE], heads or HEADS[DEVICE], query or LENGTH[DEVICE]
    key, value_dim, kv_heads = key or query, value_dim or d, kv_heads or heads
    pairs = batch * heads * query * key
    rows_q, rows_k = (batch, query), (batch, key)
    if lengths:
        ends = torch.tensor((0, *lengths), dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        options.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
        rows_q = rows_k = (sum(lengths),)
        pairs = heads * sum(n * n for n in lengths)
    inputs = [
        normal(*rows_q, heads, d, dtype=dtype),
        normal(*rows_k, kv_heads, d, dtype=dtype),
        normal(*rows_k, kv_heads, value_dim, dtype=dtype),
    ]
    q, k, v = inputs
    if bias:
        options["bias"] = normal(*bias, dtype=dtype)
        inputs.append(options["bias"])
    if "window" in options:
        pairs = batch * heads * query * 257
    times = both_passes(lambda: pt.attention(q, k, v, causal=causal, **options), inputs, time_them)
    pairs = pairs / 2 if causal else pairs
    return times, (2 * pairs * (d + value_dim), 2 * pairs * (3 * d + 2 * value_dim))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["attention", "block_softmax", "entmax", "segment"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--match", nargs="+", default=[""], help="only cases with one of these in their names")
    parser.add_argument("--json", help="leaves {case: [µs forward, µs backward]} here")
    parser.add_argument("--seconds", type=float, default=600, help="stop after so many")
    parser.add_argument("--warm", help="I/N: run every N-th case once, from the I-th on, and time none")
    arguments = parser.parse_args()
    global DEVICE
    DEVICE = arguments.device
    torch.set_num_threads(1)
    cases = [case for case in globals()[f"{arguments.op}_cases"]() if any(word in case[0] for word in arguments.match)]
    if arguments.warm:
        first, step = map(int, arguments.warm.split("/"))
        cases = cases[first::step]
    rate = copy_rate()
    begin = time.perf_counter()
    measured = {}
    run = globals()[arguments.op]
    for name, given in cases:
        if time.perf_counter() - begin > arguments.seconds:
            print("out of time")
            break
        try:
            times, work = run(not arguments.warm, **given)
        except (NotImplementedError, RuntimeError) as error:
            print(f"{name:44} {error}", flush=True)
            continue
        if times is None:
            continue
        measured[name] = times
        shown = [
            f"{t:8.0f} µs {w / t / 1e3:9.0f} GFLOP/s"
            if arguments.op == "attention"
            else f"{t:8.0f} µs {w / t / rate:5.0%}"
            for t, w in zip(times, work)
        ]
        print(f"{name:44} {shown[0]}  {shown[1]}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(measured, file)
    if arguments.warm:
        # PyTorch's thread of backward passes may still hold Python objects, which CPython before 3.14 does not survive.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

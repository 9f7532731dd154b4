#!/usr/bin/env python3
"""What PyTorch (eager and compiled) and Triton need for the problems of `pullback bench --device cuda`.

gpu_rivals.py --json FILE [--op OP]   times them
gpu_rivals.py --compare FOLDER        a table of FOLDER/bench.json beside FOLDER/rivals.json, and the times of
                                     plans in FOLDER/plans_*.json
"""

import argparse
import json
import os
import statistics
import time


def times(run):
    """Median seconds of run() by events; its tensors are larger than the cache. Of a slow run(), one."""
    import torch

    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin
    if once > 0.05:
        return once
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(9)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e-3


def sparsemax_by_sort(x):
    import torch

    z = x.float()
    z = z - z.amax(-1, keepdim=True)
    ordered, _ = torch.sort(z, dim=-1, descending=True)
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float32)
    sums = ordered.cumsum(-1) - 1
    size = (ranks * ordered > sums).sum(-1, keepdim=True)
    tau = sums.gather(-1, size - 1) / size
    return (z - tau).clamp_min(0).to(x.dtype)


def sparsemax_backward(y, d_y):
    import torch

    support = y > 0
    count = support.sum(-1, keepdim=True)
    mean = torch.where(support, d_y, 0).sum(-1, keepdim=True, dtype=torch.float32) / count
    return torch.where(support, d_y - mean, 0).to(y.dtype)


def entmax15_backward(y, d_y):
    import torch

    s = y.float().sqrt()
    mean = (d_y * s).sum(-1, keepdim=True) / s.sum(-1, keepdim=True)
    return (s * (d_y - mean)).to(y.dtype)


def triton_rows():
    """Softmax forward and backward, a program a row, as in Triton's tutorial."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def forward(y, x, length, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        v = tl.load(x + row * length + columns, mask=columns < length, other=-float("inf")).to(tl.float32)
        e = tl.exp(v - tl.max(v, 0))
        tl.store(y + row * length + columns, e / tl.sum(e, 0), mask=columns < length)

    @triton.jit
    def backward(dx, y, dy, length, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < length
        p = tl.load(y + row * length + columns, mask=inside, other=0).to(tl.float32)
        g = tl.load(dy + row * length + columns, mask=inside, other=0).to(tl.float32)
        tl.store(dx + row * length + columns, p * (g - tl.sum(p * g, 0)), mask=inside)

    def launch(kernel, out, *inputs):
        rows, length = out.shape
        block = triton.next_power_of_2(length)
        kernel[(rows,)](out, *inputs, length, BLOCK=block, num_warps=min(32, max(4, block // 1024)))
        return out

    return (lambda x: launch(forward, torch.empty_like(x), x),
            lambda y, d_y: launch(backward, torch.empty_like(y), y, d_y))


def entmax_rivals(report):
    import torch

    triton_forward, triton_backward = triton_rows()
    for rows, length in [(262144, 512), (65536, 4096), (8192, 32768), (1024, 131072)]:
        for dtype, name in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
            x = torch.randn(rows, length, device="cuda", dtype=torch.float32).to(dtype)
            d_y = torch.randn(rows, length, device="cuda", dtype=torch.float32).to(dtype)
            case = f"{rows}x{length} sigma 1 alpha "
            two, three = 2 * x.nbytes, 3 * x.nbytes
            few = x[: max(1, rows // 8)].contiguous()  # the sort needs 16 times the memory
            report("entmax", case + "2", name, "forward", "PyTorch, sort", 8 * times(lambda: sparsemax_by_sort(few)), two)
            report("entmax", case + "1", name, "forward", "PyTorch", times(lambda: torch.softmax(x, -1)), two)
            report("entmax", case + "1", name, "forward", "Triton", times(lambda: triton_forward(x)), two)
            p = torch.softmax(x, -1)
            backward = torch.ops.aten._softmax_backward_data
            report("entmax", case + "1", name, "backward", "PyTorch", times(lambda: backward(d_y, p, -1, dtype)), three)
            report("entmax", case + "1", name, "backward", "Triton", times(lambda: triton_backward(p, d_y)), three)
            del p
            y = torch.cat([sparsemax_by_sort(piece) for piece in x.split(max(1, rows // 16))])
            for alpha, formula in [("2", sparsemax_backward), ("1.5", entmax15_backward)]:
                compiled = torch.compile(formula, dynamic=False)
                report("entmax", case + alpha, name, "backward", "torch.compile", times(lambda: compiled(y, d_y)), three)
            torch._dynamo.reset()
            report("entmax", case + "2", name, "backward", "PyTorch, formula", times(lambda: sparsemax_backward(y, d_y)), three)
            del x, d_y, y, few


def segment_rivals(report):
    import torch

    elements = 1 << 27
    for columns in [128, 1]:
        rows = elements // columns
        for kind, most in [("mean 8", 15), ("mean 4096", 8191), ("one giant", 0)]:
            if most:
                lengths = torch.randint(1, most + 1, (2 * rows // (most + 1) + 64,), device="cuda")
                offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).clamp_max(rows).unique()
                offsets[-1] = rows
            else:
                offsets = torch.tensor([0, rows], device="cuda")
            lengths = offsets.diff()
            ids = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
            for dtype, name in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
                x = torch.randn(rows, columns, device="cuda", dtype=torch.float32).to(dtype)
                d_out = torch.randn(len(lengths), columns, device="cuda", dtype=torch.float32).to(dtype)
                case, moved = f"D={columns} {kind} ", x.nbytes + d_out.nbytes + offsets.nbytes

                def reduce(how):
                    return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True)

                if kind == "one giant" and columns == 1:
                    continue  # segment_reduce adds the rows of a column one after the other: minutes
                for how in ["sum", "max"]:
                    ours = case + ("sum" if how == "sum" else "max from arg")
                    report("segment", ours, name, "forward", "segment_reduce", times(lambda: reduce(how)), moved)
                sums = torch.zeros_like(d_out)
                report("segment", case + "sum", name, "forward", "index_add", times(lambda: sums.index_add_(0, ids, x)), moved)
                report("segment", case + "sum", name, "backward", "index_select", times(lambda: d_out.index_select(0, ids)), moved)
                leaf = x.detach().requires_grad_()
                out = torch.segment_reduce(leaf, "max", offsets=offsets, axis=0, unsafe=True)
                report("segment", case + "max from arg", name, "backward", "segment_reduce",
                       times(lambda: torch.autograd.grad(out, leaf, d_out, retain_graph=True)), moved)
                del x, d_out, leaf, out, sums


def attention_rivals(report):
    """scaled_dot_product_attention by each of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION,
                "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for head_dim, heads in [(64, 32), (96, 16), (128, 16), (192, 8), (256, 8)]:
        for length in [512, 2048, 8192, 16384]:
            shape = (16384 // length, length, heads, head_dim)
            q, k, v, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                              for _ in range(4))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            for causal in [False, True]:
                case = f"B{shape[0]} H{heads} S{length} D{head_dim}" + (" causal" if causal else "")
                for rival, backend in backends.items():
                    def forward():
                        return scaled_dot_product_attention(*inputs, is_causal=causal)

                    try:
                        with sdpa_kernel(backend), torch.no_grad():
                            seconds = times(forward)
                        with sdpa_kernel(backend):
                            out = forward()
                        backward = times(lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True))
                    except RuntimeError:
                        continue  # the backend refuses the shape
                    report("attention", case, "bf16", "forward", rival, seconds, 0)
                    report("attention", case, "bf16", "backward", rival, backward, 0)


def measure(path, ops):
    import torch

    results = []

    def report(op, case, dtype, which, rival, seconds, moved):
        results.append(dict(op=op, case=case, dtype=dtype, rival=rival, seconds=seconds, bytes=moved,
                            **{"pass": which}))

    all_rivals = {"entmax": entmax_rivals, "segment": segment_rivals, "attention": attention_rivals}
    for rivals in [all_rivals[op] for op in ops or all_rivals]:
        try:
            rivals(report)
        except Exception as error:  # one that is missing or runs out of memory must not hide the others
            print(f"{rivals.__name__}: {type(error).__name__}: {error}")
    with open(path, "w") as file:
        json.dump(dict(torch=torch.__version__, gpu=torch.cuda.get_device_name(), results=results), file, indent=1)


def compare(folder):
    def load(name):
        path = os.path.join(folder, name)
        return json.load(open(path)) if os.path.exists(path) else dict(results=[])

    rivals = {}
    for r in load("rivals.json")["results"]:
        rivals.setdefault((r["op"], r["case"], r["dtype"], r["pass"]), []).append(r)
    print(f"{'problem':58} {'Pullback':>10} {'of copy':>8}  rivals: time, times ours")
    for r in load("bench.json")["results"]:
        ours = r["seconds"]["median"]
        others = ", ".join(f"{o['rival']} {o['seconds'] * 1e3:.3f} ms {o['seconds'] / ours:.2f}×"
                           for o in rivals.get((r["op"], r["case"], r["dtype"], r["pass"]), []))
        name = f"{r['op']} {r['case']} {r['dtype']} {r['pass']}"
        share = r["share_of_ceiling"]
        rate = f"{100 * share:6.1f} %" if share else f"{r['flops'] / ours * 1e-12:4.0f} TF/s"
        print(f"{name:58} {ours * 1e3:7.3f} ms {rate:>9}  {others}")
    for start in ["cold", "warm"]:
        plans = [(r["plan_seconds"], r["op"], r["case"], r["pass"])
                 for name in sorted(os.listdir(folder)) if name.startswith(f"plans_{start}_")
                 for r in load(name)["results"]]
        if plans:
            seconds = sorted(p[0] for p in plans)
            print(f"plans, {start} cache: median {seconds[len(seconds) // 2] * 1e3:.2f} ms, "
                  f"longest {max(plans)[0] * 1e3:.1f} ms ({' '.join(max(plans)[1:])})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--compare")
    parser.add_argument("--op", action="append", help="only the rivals of this op; may be repeated")
    arguments = parser.parse_args()
    if arguments.json:
        measure(arguments.json, arguments.op)
    if arguments.compare:
        compare(arguments.compare)

#!/usr/bin/env python3
"""What PyTorch (eager and compiled) and Triton need for the problems of `pullback bench --device cuda`."""

import argparse
import json
import statistics
import time

SETTLING, TIMING = 0.15, 0.15  # seconds; within a tenth of one a card at its power limit lowers its clock


def times(run):
    """Median seconds of run() by events, of a card at work; its tensors are larger than the cache."""
    import torch

    def record(seconds):
        events, begin = [], time.perf_counter()
        while not events or time.perf_counter() - begin < seconds:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            events.append((start, stop))
            if len(events) > 1:
                events[-2][1].synchronize()  # the card has the next run, and the host is no further ahead
        return events

    run()
    record(SETTLING)
    events = record(TIMING)
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
    """scaled_dot_product_attention by each of its backends, and Pullback in the same way where it is installed."""
    import warnings

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION,
                "cuDNN": SDPBackend.CUDNN_ATTENTION}

    def by_backend(backend):
        def run(inputs, bias, **options):
            mask = None if bias is None else bias.expand(inputs[0].shape[0], -1, -1, -1)
            with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):
                return scaled_dot_product_attention(*inputs, attn_mask=mask, **options)

        return run

    kernels = {name: by_backend(backend) for name, backend in backends.items()}
    try:
        from pullback.torch import attention
    except ImportError:
        pass
    else:
        def pullback(inputs, bias, is_causal=False, dropout_p=0.0, enable_gqa=False):
            q, k, v = (x.transpose(1, 2) for x in inputs)
            return attention(q, k, v, bias=bias, causal=is_causal, dropout=dropout_p).transpose(1, 2)

        kernels["Pullback, PyTorch"] = pullback

    def tensors(batch, length, heads, kv_heads, head_dim, dtype=torch.bfloat16):
        q, k, v, d_out = (torch.randn(batch, length, h, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
                          for h in (heads, kv_heads, kv_heads, heads))
        return [x.requires_grad_() for x in (q, k, v)], d_out

    def time_all(case, inputs, d_out, dtype="bf16", bias=None, **options):
        leaves = inputs if bias is None else [*inputs, bias]
        for name, kernel in kernels.items():
            try:
                with torch.no_grad():
                    seconds = times(lambda: kernel(inputs, bias, **options))
                out = kernel(inputs, bias, **options)
                backward = times(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))
            except RuntimeError:
                continue  # it refuses the problem
            report("attention", case, dtype, "forward", name, seconds, 0)
            report("attention", case, dtype, "backward", name, backward, 0)

    for head_dim, heads in [(64, 32), (96, 16), (128, 16), (192, 8), (256, 8)]:
        for length in [512, 1024, 2048, 8192]:
            batch = 16384 // length
            inputs, d_out = tensors(batch, length, heads, heads, head_dim)
            case = f"B{batch} H{heads} S{length} D{head_dim}"
            time_all(case, inputs, d_out)
            time_all(case + " causal", inputs, d_out, is_causal=True)
    for head_dim in [72, 80, 88, 104]:
        inputs, d_out = tensors(8, 2048, 16, 16, head_dim)
        time_all(f"B8 H16 S2048 D{head_dim}", inputs, d_out)
    for head_dim in [64, 128, 192, 256]:
        inputs, d_out = tensors(2, 8192, 16, 16, head_dim)
        time_all(f"B2 H16 S8192 D{head_dim} dropout 0.1", inputs, d_out, dropout_p=0.1)
    inputs, d_out = tensors(2, 8192, 16, 2, 128)
    time_all("B2 H16 over 2 S8192 D128 causal", inputs, d_out, is_causal=True, enable_gqa=True)
    inputs, d_out = tensors(2, 4096, 16, 16, 128, torch.float32)
    time_all("B2 H16 S4096 D128", inputs, d_out, "f32")
    for head_dim, heads in [(32, 8), (64, 16), (128, 16)]:
        inputs, d_out = tensors(2, 4096, heads, heads, head_dim)
        for batch in [2, 1]:
            bias = torch.randn(batch, heads, 4096, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
            time_all(f"B2 H{heads} S4096 D{head_dim} bias [{batch},{heads},S,S]", inputs, d_out, bias=bias)


def flex_attention_rivals(report):
    """FlexAttention, compiled: a window, a bias with its gradient (by atomics), and block masks."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # the graph is kept for several backward passes
    flex = torch.compile(flex_attention, dynamic=False)

    def time_one(case, shape, leaves=(), **options):
        q, k, v, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        try:
            out = flex(*inputs, **options)
            seconds = times(lambda: flex(*inputs, **options))
            backward = times(lambda: torch.autograd.grad(out, [*inputs, *leaves], d_out, retain_graph=True))
        except Exception as error:
            print(f"FlexAttention, {case}: {type(error).__name__}: {str(error)[:200]}")
            return
        report("attention", case, "bf16", "forward", "FlexAttention", seconds, 0)
        report("attention", case, "bf16", "backward", "FlexAttention", backward, 0)

    for head_dim in [64, 128]:
        # Blocks of 64 it refuses: no configuration of its backward pass divides them.
        # As the benchmark's layouts; the random blocks are others.
        row, column = torch.arange(128, device="cuda")[:, None], torch.arange(128, device="cuda")[None, :]
        ends = (row == 0) | (column == 0)
        chance = torch.rand(8, 128, 128, device="cuda")
        layouts = {
            "25 % of blocks of 128": chance < 0.25,
            "BigBird block 128": ends | ((row - column).abs() <= 1) | (chance < 3 / 128),
            "Longformer block 128": ends | ((row - column).abs() <= 3),
            "Fixed block 128": (row // 4 == column // 4) | (column % 4 == 3),
        }
        for name, layout in layouts.items():
            layout = layout.expand(8, 128, 128)[None]
            seen = layout.sum(-1, dtype=torch.int32)
            columns = layout.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
            mask = BlockMask.from_kv_blocks(torch.zeros_like(seen), columns, seen, columns, BLOCK_SIZE=128)
            time_one(f"B1 H8 S16384 D{head_dim} {name}", (1, 8, 16384, head_dim), block_mask=mask)
        bias = torch.randn(16, 4096, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
        time_one(f"B2 H16 S4096 D{head_dim} bias [1,16,S,S]", (2, 16, 4096, head_dim), [bias],
                 score_mod=lambda score, b, h, i, j, bias=bias: score + bias[h, i, j])
    window = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 1024), None, None, 8192, 8192)
    time_one("B2 H16 S8192 D128 window 1024", (2, 16, 8192, 128), block_mask=window)


def block_matmul_rivals(report):
    """The dense products, of all blocks."""
    import torch

    for dtype, name in [(torch.float32, "f32"), (torch.bfloat16, "bf16")]:
        for head_dim in [64, 128]:
            q, k = (torch.randn(16, 4096, head_dim, device="cuda", dtype=dtype) for _ in range(2))
            scores = torch.bmm(q, k.transpose(1, 2))
            for mode, run in [("sdd", lambda: torch.bmm(q, k.transpose(1, 2))), ("dsd", lambda: torch.bmm(scores, k))]:
                report("block_matmul", f"dense S 4096 D {head_dim} {mode}", name, "forward", "torch.bmm", times(run),
                       scores.nbytes + 2 * q.nbytes)


def measure(path, ops):
    import torch

    results = []

    def report(op, case, dtype, which, rival, seconds, moved):
        results.append(dict(op=op, case=case, dtype=dtype, rival=rival, seconds=seconds, bytes=moved,
                            **{"pass": which}))
        with open(path, "w") as file:  # an interrupted run leaves what it had
            json.dump(dict(torch=torch.__version__, gpu=torch.cuda.get_device_name(), results=results), file, indent=1)

    all_rivals = {"entmax": entmax_rivals, "segment": segment_rivals, "attention": attention_rivals,
                  "flex_attention": flex_attention_rivals, "block_matmul": block_matmul_rivals}
    for rivals in [all_rivals[op] for op in ops or all_rivals]:
        try:
            rivals(report)
        except Exception as error:  # one that is missing or runs out of memory must not hide the others
            print(f"{rivals.__name__}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--op", action="append",
                        help="only the rivals of this op; may be repeated; flex_attention: those of attention by torch.compile")
    arguments = parser.parse_args()
    measure(arguments.json, arguments.op)

"""Random problems of block_softmax and block_matmul, and the same in f64: for fuzz_torch.py."""

from __future__ import annotations

import math
import random

import torch
from fuzz_torch_attention import DTYPES, Problem, Results, randn
from torch import Tensor

import pullback.torch as pt
from pullback.sparsity import BlockLayout

MOST_ELEMENTS = 1 << 24  # of the dense matrix, which the reference holds some times in f64


def layout_problem(r: random.Random) -> Problem:
    block = r.choice([16, 32, 32, 64, 64, 128, 16 * r.randint(1, 8)])
    heads, batch = r.choice([1, 1, 2, 3, 8, 16]), r.choice([1, 1, 2, 5])
    rows, columns = (max(2 ** r.randint(4, 15) // block + r.randint(-1, 1), 1) for _ in range(2))
    if r.random() < 0.5:
        columns = rows
    while batch * heads * rows * columns * block**2 > MOST_ELEMENTS:
        if batch * heads > 1:
            batch, heads = max(batch // 2, 1), max(heads // 2, 1)
        elif rows > columns:
            rows //= 2
        else:
            columns //= 2
    return {
        "dtype": r.choice([*DTYPES, torch.float64]),
        "block": block,
        "batch": batch,
        "layout": (heads, rows, columns),
        "density": r.choice([0.02, 0.1, 0.3, 0.7, 1.0]),
        "whole": r.choice([0, 0, 0.05]),  # share of rows that see all, and of columns that all see
        "offset": r.choice([0, 0, 0, 1, 4]),  # elements before the blocks
    }


def layout_of(p: Problem) -> Tensor:
    """Which blocks there are: bool [H,R,C]."""
    heads, rows, columns = p["layout"]
    present = torch.rand(heads, rows, columns) < p["density"]
    present |= torch.rand(heads, rows, 1) < p["whole"]
    return present | (torch.rand(heads, 1, columns) < p["whole"])


def dense_of(blocks: Tensor, present: Tensor) -> Tensor:
    """[Z,H,R·b,C·b] of [Z,nnz,b,b], with zeros where no block is."""
    batch, _, block, _ = blocks.shape
    heads, rows, columns = present.shape
    dense = blocks.new_zeros(batch, heads, rows, columns, block, block)
    dense[(slice(None), *present.nonzero(as_tuple=True))] = blocks
    return dense.transpose(3, 4).reshape(batch, heads, rows * block, columns * block)


def blocks_of(dense: Tensor, present: Tensor) -> Tensor:
    block = dense.shape[-1] // present.shape[-1]
    tiles = dense.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)
    return tiles[(slice(None), *present.nonzero(as_tuple=True))]


def random_tensor(p: Problem, *shape: int) -> Tensor:
    """That begins `offset` elements behind an aligned address."""
    return randn(p["dtype"], math.prod(shape) + p["offset"])[p["offset"] :].view(shape)


def exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def gradients(out: Tensor, tensors: dict[str, Tensor], d_out: Tensor) -> dict[str, Tensor]:
    wanted = {n: t for n, t in tensors.items() if t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), d_out), strict=True))


# --- block_softmax ---


def softmax_problem(r: random.Random) -> Problem:
    p = layout_problem(r)
    p["scale"] = r.choice([1.0, 0.125, 3.0])
    batch, heads = p["batch"], p["layout"][0]
    if r.random() < 0.3:
        p["rpe"] = r.choice([1, batch]), r.choice([1, heads])
    for mask in ("key_padding_mask", "attn_mask"):
        if r.random() < 0.3:
            p[mask] = r.choice(["add", "keep", "keep bool"])
    return p


def softmax(p: Problem) -> Results:
    present, batch, block = layout_of(p), p["batch"], p["block"]
    rows, columns = (n * block for n in p["layout"][1:])
    own = {"x": random_tensor(p, batch, int(present.sum()), block, block).requires_grad_()}
    modes = {}
    if "rpe" in p:
        own["rpe"] = random_tensor(p, *p["rpe"], rows, columns).requires_grad_()
    for name, mode_name, shape in (
        ("key_padding_mask", "key_padding_mode", (batch, columns)),
        ("attn_mask", "attn_mask_mode", (rows, columns)),
    ):
        mode, *boolean = p.get(name, "none").split()
        if mode == "none":
            continue
        modes[mode_name] = mode
        if mode == "add":
            own[name] = random_tensor(p, *shape).requires_grad_()
        else:
            keep = torch.rand(shape) < 0.7
            own[name] = keep if boolean else keep.to(p["dtype"])
    x, others = own["x"], {n: t for n, t in own.items() if n != "x"}
    layout = BlockLayout(present.cpu().numpy())
    y = pt.block_softmax(x, layout, scale=p["scale"], **modes, **others)
    d_y = random_tensor(p, *y.shape)
    ours = gradients(y, own, d_y)

    right = exact(own)
    sees = present.repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    scores = p["scale"] * dense_of(right["x"], present)
    for name, term in right.items():
        if name == "x":
            continue
        term = term[:, None, None] if name == "key_padding_mask" else term
        if name == "rpe" or own[name].requires_grad:
            scores = scores + term
        else:
            sees = sees & (term != 0)
    scores = scores.masked_fill(~sees, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    right_y = blocks_of(weights, present)
    g = dense_of(d_y.double(), present)
    # Autograd has NaN of rows that see nothing.
    d_scores = (weights * (g - (weights * g).sum(-1, keepdim=True))).detach()
    results = [("y", y, right_y)]
    for name, gradient in ours.items():
        if name == "x":
            expected = p["scale"] * blocks_of(d_scores, present)
        elif name == "key_padding_mask":
            expected = d_scores.sum((1, 2))
        else:
            expected = d_scores.sum_to_size(gradient.shape)
        results.append(("d_" + name, gradient, expected))
    return results


# --- block_matmul ---


def matmul_problem(r: random.Random) -> Problem:
    p = layout_problem(r)
    p["mode"] = r.choice(["sdd", "dsd", "dds"])
    p["transposed"] = "".join(n for n in "abc" if r.random() < 0.3)
    p["width"] = r.choice([64, 128, 64, 32, 96, 1, 7, 300, r.randint(1, 200)])
    p["padding"] = r.choice([0, 0, 0, 8, 3])  # elements behind each row of dense matrices
    return p


def matmul(p: Problem) -> Results:
    present, batch, block, width = layout_of(p), p["batch"], p["block"], p["width"]
    heads, rows, columns = p["layout"]
    sparse = p["mode"].index("s")  # of c, a, b
    turned = {n: n in p["transposed"] for n in "abc"}

    def blocks() -> Tensor:
        return random_tensor(p, batch, int(present.sum()), block, block).requires_grad_()

    def dense(name: str, height: int, length: int) -> Tensor:
        if turned[name]:
            height, length = length, height
        padded = random_tensor(p, batch, heads, height, length + p["padding"])
        return padded[..., :length].detach().requires_grad_()

    tall, wide = rows * block, columns * block
    if turned["cab"[sparse]] and sparse:  # the layout stands for its transpose
        tall, wide = wide, tall
    if p["mode"] == "sdd":
        own = {"a": dense("a", tall, width), "b": dense("b", width, wide)}
    elif p["mode"] == "dsd":
        own = {"a": blocks(), "b": dense("b", wide, width)}
    else:
        own = {"a": dense("a", width, tall), "b": blocks()}
    layout = BlockLayout(present.cpu().numpy())
    transposes = {"transpose_" + n: yes for n, yes in turned.items()}
    c = pt.block_matmul(*own.values(), layout, p["mode"], block=block, **transposes)
    d_c = random_tensor(p, *c.shape)
    ours = gradients(c, own, d_c)

    right = exact(own)
    whole = {n: dense_of(t, present) if n == "cab"[sparse] else t for n, t in right.items()}
    factors = [t.transpose(2, 3) if turned[n] else t for n, t in whole.items()]
    right_c = factors[0] @ factors[1]
    if turned["c"]:
        right_c = right_c.transpose(2, 3)
    if sparse == 0:
        right_c = blocks_of(right_c, present.transpose(1, 2) if turned["c"] else present)
    expected = gradients(right_c, right, d_c.double())
    return [("c", c, right_c), *(("d_" + n, ours[n], expected[n]) for n in ours)]

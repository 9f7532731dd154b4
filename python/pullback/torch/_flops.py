"""Operations of our matrix products, for torch.utils.flop_counter.

They are counted as PyTorch's own are: neither masks nor gradients that are not needed take anything
off; blocks that a layout lacks do, and what packed sequences do not see of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .._native import TRANSPOSE_A, TRANSPOSE_B
from ..sparsity import BlockLayout
from ._operator import TorchOp
from ._ops import ATTENTION, BLOCK_MATMUL


def _lengths(given: Mapping[str, Any], side: str, total: int) -> list[int]:
    offsets, longest = given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"] or total
    if isinstance(offsets, FakeTensor) or offsets.device.type == "meta":
        return [longest] * (offsets.shape[0] - 1)
    # As the op does, whatever they hold.
    ends = offsets.clamp(0, total).cummax(0).values
    return [min(length, longest) for length in ends.diff().tolist()]


def _attention(given: Mapping[str, Any], with_d: int, with_dv: int) -> int:
    """Of so many products that have D for one of their sizes, and so many that have Dv."""
    q, k, v = (given[name] for name in "qkv")
    if given["cu_seqlens_q"] is None:
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    else:
        lengths = (_lengths(given, side, x.shape[0]) for side, x in (("q", q), ("k", k)))
        pairs = sum(queries * keys for queries, keys in zip(*lengths))
    if given["layout"]:
        pairs = round(pairs * BlockLayout.find(given["layout"]).density)
    return 2 * pairs * q.shape[-2] * (with_d * q.shape[-1] + with_dv * v.shape[-1])


def _block_matmul(given: Mapping[str, Any], products: int) -> int:
    a, b, flags, block = (given[name] for name in ("a", "b", "flags", "block"))
    # The size that is not the layout's: of sdd the inner one, of dsd columns, of dds rows.
    dense, transposed, usual = (
        (a, flags & TRANSPOSE_A, -1),
        (b, flags & TRANSPOSE_B, -1),
        (a, flags & TRANSPOSE_A, -2),
    )[given["mode"]]
    size = dense.shape[-3 - usual if transposed else usual]
    nnz = BlockLayout.find(given["layout"]).nnz
    return 2 * products * a.shape[0] * nnz * block * block * size


def _register(op: TorchOp, count: Callable[..., int], forward: Any, backward: Any) -> None:
    """Counts the operators of `op` by `count`, of their arguments by name and what follows."""
    names = [*op.inputs, *op.options]
    backward_names = [*op.upstream, *op.reads, *op.options, "needs"]
    for name, known, products in (
        (op.name, names, forward),
        (f"{op.name}_backward", backward_names, backward),
    ):

        def flops(
            *arguments: Any, out_val: Any = None, known: Any = known, products: Any = products
        ) -> int:
            return count(dict(zip(known, arguments)), *products)

        register_flop_formula(getattr(torch.ops.pullback, name), get_raw=True)(flops)


# Backward passes compute the scores anew.
_register(ATTENTION, _attention, (1, 1), (3, 2))
_register(BLOCK_MATMUL, _block_matmul, (1,), (2,))

"""Attention."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._options import AttentionOptions, attention_options
from ._fields import identifier, remembered
from ._ops import ATTENTION

if TYPE_CHECKING:
    from typing_extensions import Unpack

_fields = remembered(ATTENTION, attention_options)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    seed: Tensor | int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    seed: Tensor | int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seed: Tensor | int | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + bias) v in memory linear in the sequence lengths.

    Args:
        q: [B,Sq,H,D], or [total_q,H,D] with cu_seqlens; D from 1 to 256.
        k: [B,Sk,Hkv,D], or [total_k,Hkv,D]; H is a multiple of Hkv.
        v: [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv].
        bias: [B|1,H|1,Sq|1,Sk|1], added to the scores; its gradient has its own shape. -inf hides
            a key. Not with cu_seqlens.
        cu_seqlens_q: [B+1], the first rows of the sequences in q, and their total.
        cu_seqlens_k: the same for k and v.
        seed: of dropout, a number or an int64 tensor of one element, read when the kernels run;
            when not given, it is drawn from the generator of q's device. A CUDA graph draws at each
            replay.
        return_lse: also returns the logsumexp of the scores, which is differentiable, too.
        **options: see `AttentionOptions`.

    Returns:
        out [B,Sq,H,Dv], or [total_q,H,Dv]. With `return_lse` also the natural logarithm
        [B,H,Sq], or [H,total_q], in float32 (float64 for float64); -inf where a query sees nothing.
    """
    changed: dict[str, Any] = options  # type: ignore[assignment]
    layout = options.get("layout")
    changed["layout"] = 0 if layout is None else identifier(layout)
    if torch.are_deterministic_algorithms_enabled():
        changed["deterministic"] = True
    if options.get("dropout", 0) == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)
    elif isinstance(seed, Tensor):
        seed = seed.to(q.device)
    else:
        number = index(seed)
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"attention: seed: expected a number that fits 64 bits, got {number}")
        bits = (number + 2**63) % 2**64 - 2**63  # 64 bits without a sign, as those of an int64
        seed = torch.full((), bits, dtype=torch.int64, device=q.device)
    tensors = (q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seed)
    result: Any = ATTENTION.call(tensors, _fields(**changed), not return_lse)
    return result

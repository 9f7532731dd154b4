"""Attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _native
from .._native import FORWARD
from .._options import AttentionOptions, attention_options, integer
from ..sparsity import BlockLayout
from ._arrays import compute, gradients, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Array, Run

    class _Attention(AttentionOptions, Run):
        seed: int | None  # of dropout; 0 when not given


class AttentionOutputs(NamedTuple):
    """What `attention` returns: out like q, with the head dim of v, and lse.

    lse is the natural logarithm of the sum of exponentials, float32 (float64 for float64); -inf
    where a row sees nothing.
    """

    out: Array
    lse: Array


class AttentionGradients(NamedTuple):
    """What `attention_backward` returns: each of the shape of what it is the gradient of."""

    d_q: Array | None
    d_k: Array | None
    d_v: Array | None
    d_bias: Array | None


def _attention_options(options: Mapping[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    own = split(options, run)
    seed, layout = own.pop("seed", None), own.pop("layout", None)
    layout = None if layout is None else BlockLayout.of(layout)
    seed = 0 if seed is None else integer("attention: seed", seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"attention: seed: expected 64 bits, with a sign or without, got {seed}")
    return {**attention_options(**own), "layout": layout, "dropout_seed": seed % (1 << 64)}


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    **options: Unpack[_Attention],
) -> AttentionOutputs:
    """softmax(scale q kᵀ + bias) v in memory linear in the sequence lengths.

    Args:
        q: [B,Sq,H,D], or [total_q,H,D] with cu_seqlens; D from 1 to 256.
        k: [B,Sk,Hkv,D], or [total_k,Hkv,D]; H is a multiple of Hkv.
        v: [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv].
        bias: [B|1,H|1,Sq|1,Sk|1], added to the scores; -inf hides a key. Not with cu_seqlens.
        cu_seqlens_q: [B+1], the first rows of the sequences in q, and their total.
        cu_seqlens_k: the same for k and v.
        **options: see `AttentionOptions`, and `seed` of dropout.

    Returns:
        out [B,Sq,H,Dv], or [total_q,H,Dv], and lse [B,H,Sq], or [H,total_q].
    """
    run: dict[str, Any] = {}
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    own = _attention_options(options, run)
    return AttentionOutputs(
        *compute(_native.ATTENTION, FORWARD, inputs, ("out", "lse"), own, **run)
    )


def attention_backward(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    d_lse: Array | None = None,
    bias: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    needs: Iterable[str] | None = None,
    **options: Unpack[_Attention],
) -> AttentionGradients:
    """The gradients of `attention`, from what it was given and gave, with the same options.

    Args:
        d_out: the gradient of out, of its shape; any strides.
        d_lse: the gradient of lse.
        needs: some of "d_q", "d_k", "d_v", "d_bias"; all that exist when not given.
    """
    run: dict[str, Any] = {}
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "out": out,
        "lse": lse,
        "d_out": d_out,
        "d_lse": d_lse,
    }
    possible = {"d_q": q, "d_k": k, "d_v": v, "d_bias": bias}
    own = _attention_options(options, run)
    return gradients(AttentionGradients, _native.ATTENTION, inputs, possible, needs, own, run)

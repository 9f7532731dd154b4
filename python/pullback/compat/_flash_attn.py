"""Functions of flash-attn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import torch as ops
from .._checks import expect_none


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [B,Sq,H,D], k and v [B,Sk,Hkv,D]; causal and windows from the bottom right.

    `deterministic` changes nothing, as all results are the same bits every time.

    Returns out like q; with return_attn_probs (out, lse [B,H,Sq], None).
    """
    expect_none("flash_attn_func", alibi_slopes=alibi_slopes)
    out, lse = ops.attention(
        q,
        k,
        v,
        return_lse=True,
        dropout=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [total_q,H,D], k and v [total_k,Hkv,D]; cu_seqlens [B+1] int32 or int64.

    `deterministic` changes nothing, as in `flash_attn_func`.

    Returns out like q; with return_attn_probs (out, lse [H,total_q], None).
    """
    expect_none("flash_attn_varlen_func", alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = ops.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=True,
        dropout=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, lse, None) if return_attn_probs else out


def _unpacked(function: str, name: str, packed: Tensor, shape: str, count: int) -> Any:
    if packed.dim() != shape.count(",") + 1 or packed.shape[-3] != count:
        raise ValueError(f"{function}: {name}: expected {shape}, got {list(packed.shape)}")
    return packed.unbind(-3)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """`flash_attn_func` on qkv [B,S,3,H,D], with its options from dropout_p on."""
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "[B,S,3,H,D]", 3)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """`flash_attn_func` on kv [B,Sk,2,Hkv,D], with its options from dropout_p on."""
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, "[B,S,2,H,D]", 2)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """`flash_attn_varlen_func` on qkv [total,3,H,D], with its options from dropout_p on."""
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "[total,3,H,D]", 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    """`flash_attn_varlen_func` on kv [total_k,2,Hkv,D], with its options from dropout_p on."""
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "[total,2,H,D]", 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, **named
    )

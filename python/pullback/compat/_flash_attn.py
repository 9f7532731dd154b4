"""Functions of flash-attn."""

from __future__ import annotations

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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
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


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_func` on qkv [B,S,3,H,D]; returns out [B,S,H,D]."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"flash_attn_qkvpacked_func: qkv: expected [B,S,3,H,D], got {list(qkv.shape)}"
        )
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
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

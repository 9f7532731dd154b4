"""Pullback as an attention implementation of Hugging Face Transformers (4.53 or newer).

    import pullback.transformers
    pullback.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="pullback")

Grouped heads, softcap, attention sinks, position biases (with their gradients), packed sequences
and dropout are computed; sliding windows come with the mask, or, where that is left out, in the
kernel. Weights are not returned, and paged caches are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch import attention

NAME = "pullback"


def register(name: str = NAME) -> None:
    """Makes attention and masks known to Transformers under one name.

    A name without a mask function would get no masks at all.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Transformers' boolean mask as a bias, made once for all layers; None where causal will do.

    Arguments are those of the installed version's own mask functions, whatever they are.
    """
    from transformers.masking_utils import sdpa_mask

    visible = sdpa_mask(*arguments, **options)
    if visible is None:
        return None
    return _as_bias(visible, options.get("dtype") or torch.float32)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, float("-inf"))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B,H,Sq,D], key and value [B,Hkv,Sk,D]; the output is [B,Sq,H,D].

    s_aux [H] are the sinks: logits that take part in the sum of a row and have no value.
    """
    if cache is not None:
        raise NotImplementedError("pullback: attention: cache: expected None, got a paged cache")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    window = (sliding_window - 1, 0) if causal and sliding_window else None
    bias = None if attention_mask is None else _as_bias(attention_mask, query.dtype)
    if position_bias is not None:
        position_bias = position_bias.to(query.dtype)
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dim() == 3:
        bias = bias[None]

    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    packed: dict[str, Any] = {}
    if bias is None and options.get("cu_seq_lens_q") is not None:
        packed = {
            "cu_seqlens_q": options["cu_seq_lens_q"],
            "cu_seqlens_k": options["cu_seq_lens_k"],
            "max_seqlen_q": options.get("max_length_q") or 0,
            "max_seqlen_k": options.get("max_length_k") or 0,
        }
        q, k, v = q[0], k[0], v[0]
    out, lse = attention(
        q,
        k,
        v,
        bias=bias,
        dropout=dropout,
        scale=scaling,
        softcap=softcap or 0.0,
        causal=causal,
        window=window,
        corner="top_left",
        return_lse=True,
        **packed,
    )
    if s_aux is not None:
        # The share of a row's sum that is not the sink's.
        share = torch.sigmoid(lse - s_aux.to(lse.dtype).view(-1, 1))
        out = out * share.transpose(-1, -2)[..., None].to(out.dtype)
    return (out[None] if packed else out), None

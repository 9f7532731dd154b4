"""Pullback under ``torch.nn.functional.scaled_dot_product_attention``, for code that is not ours::

    import pullback.sdpa
    pullback.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("pullback")
    ...
    torch.nn.attention.restore_flash_attention_impl()

From then on, what PyTorch would give to its flash kernels runs here, forward and backward, on the
CPU (masks included) and on CUDA. PyTorch decides which calls those are: ``sdpa_kernel`` steers it.
What this cannot do is refused with a RuntimeError that says why. Needs torch 2.11 or newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._options import attention_options
from .torch._ops import ATTENTION

NAME = "pullback"


def register() -> None:
    """Makes the name known to torch.nn.attention; activates nothing."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no flash attention providers: 2.11 or newer has"
        ) from error
    register_flash_attention_impl(NAME, register_fn=_Handle)


class _Handle:
    """Our kernels in the place of aten's, until removed."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        name = "_scaled_dot_product_flash_attention"
        for suffix, device, forward, backward in (
            ("_for_cpu", "CPU", _cpu_forward, _cpu_backward),
            ("", "CUDA", _cuda_forward, _cuda_backward),
        ):
            self.library.impl(f"{name}{suffix}", forward, device)
            self.library.impl(f"{name}{suffix}_backward", backward, device)
        for name, function in (
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_forward_no_dropout_inplace", _flash_forward_into),
            ("_flash_attention_backward", _flash_backward),
        ):
            if hasattr(torch.ops.aten, name):
                self.library.impl(name, function, "CUDA")

    def remove(self) -> None:
        self.library = None


def _refuse(reason: str) -> None:
    raise RuntimeError(f"pullback: scaled_dot_product_attention: {reason}")


def _options(
    causal: bool, scale: float | None, dropout: float, corner: str = "top_left", **others: Any
) -> tuple[Any, ...]:
    own = attention_options(causal=causal, corner=corner, scale=scale, dropout=dropout, **others)
    own["layout"] = 0
    return tuple([own[name] for name in ATTENTION.options])


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """attn_mask [..., Sq, Sk] as a bias of rank 4."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, hidden, float("-inf"))
    elif mask.dtype != query.dtype:
        # The softmax sees differences alone: those to the largest of a row lose least in rounding.
        largest = mask.detach().amax(-1, keepdim=True)
        mask = (mask - largest.where(largest.isfinite(), 0)).to(query.dtype)
    return mask[(None,) * (4 - mask.dim())]


def _random_state(query: Tensor, dropout: float) -> Tensor:
    """What the backward pass gets back to drop the same weights: its first element is the seed."""
    if dropout == 0:
        return query.new_empty(2, dtype=torch.uint64)
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=query.device)
    return state.view(torch.uint64)


def _seed(random_state: Tensor, dropout: float) -> Tensor | None:
    return random_state.view(torch.int64)[:1] if dropout > 0 else None


def _check_head_dims(query: Tensor, value: Tensor) -> None:
    largest = max(query.shape[-1], value.shape[-1])
    if largest > 256:
        _refuse(
            f"head dims must be 256 or less, got {largest}; use "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or restore_flash_attention_impl()"
        )


# The kernels below see [B,H,S,D]. Compiled code counts on the strides of PyTorch's own kernels.


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor` with the strides that empty_like(other) has."""
    if tensor.stride() == torch.empty_like(other, device="meta").stride():
        return tensor
    return torch.empty_like(other).copy_(tensor)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    _check_head_dims(query, value)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = ATTENTION.call((q, k, v, bias, None, None, seed), options)
    return _like(out.transpose(1, 2), query), lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    d_out, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    tensors = (d_out, None, q, k, v, bias, None, None, seed, o, lse)
    gradients = ATTENTION.call_backward(tensors, (*options, 0b111))
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _cpu_options(causal: bool, scale: float | None, dropout: float) -> tuple[Any, ...]:
    if dropout > 0:
        _refuse("dropout_p must be 0 on the CPU, where PyTorch hands no random state over")
    return _options(causal, scale, dropout)


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    options = _cpu_options(is_causal, scale, dropout_p)
    out, lse = _forward(query, key, value, _bias(attn_mask, query), None, options)
    return out, lse.mT.contiguous().mT


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    options = _cpu_options(is_causal, scale, dropout_p)
    bias = _bias(attn_mask, query)
    return _backward(grad_out, query, key, value, bias, None, out, logsumexp, options)


def _cuda_options(causal: bool, scale: float | None, dropout: float) -> tuple[Any, ...]:
    # As aten's own: causal_lower_right calls this operator itself, while PyTorch gives no call of
    # scaled_dot_product_attention, which is causal from the top left, to it where Sq != Sk.
    return _options(causal, scale, dropout, corner="bottom_right")


def _cuda_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if return_debug_mask:
        _refuse("return_debug_mask must be False")
    options = _cuda_options(is_causal, scale, dropout_p)
    random_state = _random_state(query, dropout_p)
    out, lse = _forward(query, key, value, None, _seed(random_state, dropout_p), options)
    unused = query.new_empty((), dtype=torch.uint64)
    debug_mask = query.new_empty(0)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, random_state, unused, debug_mask


def _cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    options = _cuda_options(is_causal, scale, dropout_p)
    seed = _seed(philox_seed, dropout_p)
    gradients = _backward(grad_out, query, key, value, None, seed, out, logsumexp, options)
    return tuple(map(_like, gradients, (query, key, value)))


# _flash_attention_*, which torch.nn.attention.varlen uses: [B,S,H,D] or [total,H,D].


def _flash_options(
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    packed: bool,
    max_q: int,
    max_k: int,
    left: int | None,
    right: int | None,
) -> tuple[Any, ...]:
    window = (-1 if left is None else left, -1 if right is None else right)
    lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k} if packed else {}
    # Here causal is from the bottom right, as in flash-attn.
    return _options(is_causal, scale, dropout_p, corner="bottom_right", window=window, **lengths)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> Any:
    given = [name for name, value in others.items() if value is not None]
    if return_debug_mask or given:
        _refuse(f"{', '.join(given) or 'return_debug_mask'}: not supported")
    window = (window_size_left, window_size_right)
    packed = cum_seq_q is not None
    _check_head_dims(query, value)
    options = _flash_options(is_causal, scale, dropout_p, packed, max_q, max_k, *window)
    random_state = _random_state(query, dropout_p)
    seed = _seed(random_state, dropout_p)
    out, lse = ATTENTION.call((query, key, value, None, cum_seq_q, cum_seq_k, seed), options)
    unused = query.new_empty((), dtype=torch.uint64)
    return _like(out, query), lse, random_state, unused, query.new_empty(0)


def _flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    result, lse, *_ = _flash_forward(*arguments, **options)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    window = (window_size_left, window_size_right)
    packed = cum_seq_q is not None
    options = _flash_options(is_causal, scale, dropout_p, packed, max_q, max_k, *window)
    seed = _seed(rng_state, dropout_p)
    inputs = (query, key, value, None, cum_seq_q, cum_seq_k, seed)
    tensors = (grad_out, None, *inputs, out, logsumexp)
    gradients = ATTENTION.call_backward(tensors, (*options, 0b111))
    return tuple(map(_like, gradients, (query, key, value)))

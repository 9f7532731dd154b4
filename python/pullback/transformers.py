"""Attention for Hugging Face models, with version 4.53 or newer of transformers::

    pullback.transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="pullback")

Models whose class has `_supports_attention_backend` take it. It computes what eager attention does:
causal, sliding and chunked masks, padding, packed sequences, 4-D masks, grouped heads, softcap,
dropout, attention sinks, T5's position bias and its gradient, any cache but paged ones. What it
lacks raises NotImplementedError. One thing differs: a query that sees no key, such as a padding
token on the left, gets 0 instead of a mean of all values, but where its mask is built.

Causal, sliding and bidirectional masks, with or without padding, take memory linear in the sequence
lengths. All others are built as [B,1,Sq,Sk], once for all layers; so are those of packed sequences
that position_ids alone tell. Those that cu_seq_lens_q and cu_seq_lens_k tell take linear memory
and see nothing of each other, whatever the cache; DataCollatorWithFlattening makes both
(return_flash_attn_kwargs=True).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import sdpa_mask

from .torch import attention as _attention

__all__ = ["Mask", "attention", "mask", "register"]


def register(name: str = "pullback") -> None:
    """Makes attn_implementation=name known to transformers."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


# ---------------------------------------------------------------- masks


class Mask(NamedTuple):
    """A mask that is a band and padding, on its way through the model to `attention`.

    The last query stands at the last key.
    """

    left: int  # keys that a query sees to the left and right of its own; -1: all
    right: int
    keys: int  # Sk
    padding: Tensor | None  # [B,1,1,Sk], added to the scores
    # Packed sequences, in each of which the band is the mask: builds that of all, [B,1,Sq,Sk].
    packed: Callable[[], Tensor] | None = None

    # generate() makes the masks of static caches itself; on their way they are asked for these.
    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    def elements(self) -> Tensor:
        """For models that look into their mask: one of packed sequences has elements."""
        if self.packed is not None:
            return self.packed()
        raise _NoElements(
            "pullback.transformers: the model looks into its mask, which has no elements here; "
            "use attn_implementation='eager'"
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, slice)):
            return tuple.__getitem__(self, index)
        return self.elements()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.elements(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        def looked_into(value: Any) -> Any:
            return value.elements() if isinstance(value, Mask) else value

        given = tree_map(
            looked_into, (arguments, options or {}), is_leaf=lambda value: isinstance(value, Mask)
        )
        return function(*given[0], **given[1])


class _NoElements(NotImplementedError, AttributeError):
    """Also what hasattr() expects."""


def mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Mask | Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Mask | Tensor:
    """The mask function: a `Mask`, or a bias [B,1,Sq,Sk] for what is more than that.

    Its other options are those of transformers' sdpa_mask, which differ between versions.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    band = _band(options, kv_length, kv_offset)
    if band is not None:
        return Mask(*band, kv_length, _padding(attention_mask, kv_length, kv_offset, dtype))
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        options[name] = False

    def build() -> Tensor:
        seen = sdpa_mask(
            kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask, **options
        )
        assert seen is not None
        # As eager attention's: models that compute with it themselves get no NaN of rows of -inf.
        return _bias(seen, dtype, torch.finfo(dtype).min)

    # Compilers drop a mask that is not used.
    if not torch.compiler.is_compiling() and _is_packed_band(options.get("mask_function")):
        size = options.get("local_size")
        return Mask(-1 if size is None else size - 1, 0, kv_length, None, cache(build))
    return build()


# transformers' makers of the functions that causal masks of packed sequences are composed of.
_PACKED_BAND = {
    "and_masks",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
}


def _is_packed_band(mask_function: Any) -> bool:
    makers = set(_makers(mask_function))
    return "packed_sequence_mask_function" in makers and makers <= _PACKED_BAND


def _makers(function: Any) -> Iterator[str]:
    """The names of what made a function, and those that it calls."""
    if callable(function):
        yield getattr(function, "__qualname__", "").split(".")[0]
        for cell in getattr(function, "__closure__", None) or ():
            held = cell.cell_contents
            for value in held if type(held) is tuple else [held]:
                yield from _makers(value)


# transformers' function of a mask that hides nothing; its first versions have none.
_FULL: Any = getattr(masking_utils, "bidirectional_mask_function", object())


def _band(options: Mapping[str, Any], kv_length: int, kv_offset: int) -> tuple[int, int] | None:
    """(left, right), or None if the mask is not known to be a band."""
    # transformers allows to skip a mask if it is the plain one of its kind: nothing was combined
    # with it, and the model does not look into it.
    causal = options.get("allow_is_causal_skip", False)
    if not causal and not options.get("allow_is_bidirectional_skip", False):
        return None
    end = kv_offset + kv_length
    # The tokens of a sliding window, or of a chunk, of which there is only one if it holds all.
    size: int | None = options.get("local_size")
    if size is not None and end <= size:
        size = None
    if size is not None and size == getattr(options.get("config"), "attention_chunk_size", None):
        return None
    # Of a mask without a window it says how few keys allow to skip it.
    if options.get("mask_function") is _FULL:
        size = None
    if not causal and size is None:
        return -1, -1
    if not _ends_together(options, end, kv_length):
        return None
    left = -1 if size is None else size - 1 if causal else size
    return left, 0 if causal else left


def _ends_together(options: Mapping[str, Any], end: int, kv_length: int) -> bool:
    """Whether the last query is known to stand at the last key."""
    if "cache_position" in options:  # up to 5.3, on the device; a single query has no static cache
        return options["cache_position"].shape[0] in (1, kv_length)
    offset = options.get("q_offset", 0)
    return not isinstance(offset, Tensor) and bool(offset + options["q_length"] == end)


def _padding(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, dtype: torch.dtype
) -> Tensor | None:
    if attention_mask is None:
        return None
    keys = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if keys.shape[1] < kv_length:
        keys = torch.nn.functional.pad(keys, (0, kv_length - keys.shape[1]))
    # Looking waits for the device, as transformers' own masks do; a bias costs time.
    blind = torch.compiler.is_compiling() or (
        keys.is_cuda and torch.cuda.is_current_stream_capturing()
    )
    if not blind and keys.all():
        return None
    return _bias(keys[:, None, None, :], dtype)


def _bias(seen: Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The lowest number stays that, where it is such that scores added to it change nothing: rows
    of it have a mean of all values, and rows of -inf none."""
    if bias.dtype == dtype or dtype == torch.float16:
        return bias.to(dtype)
    low = bias == torch.finfo(bias.dtype).min
    return bias.to(dtype).masked_fill(low, torch.finfo(dtype).min)


# ---------------------------------------------------------------- attention

# Arguments of models that change what is computed, or what is returned.
_REFUSED = {
    "output_attentions": "attention weights are not kept",
    "head_mask": "weights of heads are not implemented",
    "cache": "paged caches are not implemented",
    "indices": "sparse attention by indices is not implemented",
    "block_indices": "sparse attention by indices is not implemented",
    "sinks": "sinks of queries are not implemented",
}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [B,H,Sq,D], key and value [B,Hkv,Sk,D] to [B,Sq,H,D]."""
    for name, reason in _REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise NotImplementedError(
                f"pullback.transformers: {name}: {reason}; use attn_implementation='eager'"
            )
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > 256:
            raise NotImplementedError(
                f"pullback.transformers: {name}: expected a head dim of 256 or less, got "
                f"{tensor.shape[-1]}; use attn_implementation='eager'"
            )
    if scaling is None:
        scaling = _own_scaling(module, value)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    queries, keys = q.shape[1], k.shape[1]
    own: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout": dropout}
    bias = None
    packed = options.get("cu_seq_lens_q") is not None
    if isinstance(attention_mask, Mask) and attention_mask.packed is not None and not packed:
        attention_mask = attention_mask.packed()
    if isinstance(attention_mask, Mask):
        if attention_mask.keys != keys:
            raise NotImplementedError(
                f"pullback.transformers: attention_mask: made for {attention_mask.keys} keys, but "
                f"the model has {keys}: what it adds to them is not implemented; "
                "use attn_implementation='eager'"
            )
        own["window"] = (attention_mask.left, attention_mask.right)
        bias = attention_mask.padding
    elif attention_mask is not None:
        if attention_mask.dim() != 4:
            raise NotImplementedError(
                "pullback.transformers: attention_mask: needed 4 dimensions "
                f"[B|1,H|1,Sq|1,Sk], got {list(attention_mask.shape)}"
            )
        bias = attention_mask[..., :keys]
        if bias.dtype == torch.bool:
            bias = _bias(bias, q.dtype)
        if packed:
            if getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
                raise NotImplementedError(
                    "pullback.transformers: cu_seq_lens_q: chunks of packed sequences are not "
                    "implemented; use attn_implementation='eager' with use_cache=False"
                )
            # More than a band, or not known to be one.
            bias = torch.where(_same_sequence(options, q, k), bias, -torch.inf)
            packed = False
    elif sliding_window is not None and sliding_window < keys:
        raise NotImplementedError(
            "pullback.transformers: sliding_window: the model applies it without a mask; "
            "call register() before the model makes its masks"
        )
    else:
        # The rules of transformers' sdpa_attention_forward.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        own.update(causal=bool(causal) and queries > 1, corner="top_left")
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if packed:
        if bias is not None:
            raise NotImplementedError(
                "pullback.transformers: cu_seq_lens_q: packed sequences have no "
                f"{'padding' if position_bias is None else 'position bias'}; "
                "leave attention_mask out, or cu_seq_lens_q and cu_seq_lens_k"
            )
        own.update(_sequences(options))
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    elif bias is not None:
        bias = _narrowed(bias, q.dtype)
    if s_aux is None:
        out = _attention(q, k, v, bias=bias, **own)
    else:
        out, lse = _attention(q, k, v, bias=bias, return_lse=True, **own)
        # A sink is one more key of a row, with this score and the value 0.
        share = torch.sigmoid(lse.transpose(-1, -2) - s_aux.to(lse.dtype))
        out = (out * share.unsqueeze(-1)).to(out.dtype)
    return out.view(query.shape[0], queries, query.shape[1], value.shape[-1]), None


def _own_scaling(module: Any, value: Tensor) -> float | None:
    """What the eager attention of GPT-2 and its like looks up itself, up to transformers 4.57."""
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", None)
    if by_layer is None:
        return None
    scaling: float = value.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    return scaling / float(module.layer_idx + 1) if by_layer else scaling


def _same_sequence(options: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor:
    """[B,1,Sq,Sk]: whether query and key are of one of the packed sequences."""
    numbers = []
    for side, tensor in (("q", q), ("k", k)):
        rows = torch.arange(tensor.shape[0] * tensor.shape[1], device=tensor.device)
        number = torch.searchsorted(options[f"cu_seq_lens_{side}"].to(rows.dtype), rows, right=True)
        numbers.append(number.view(tensor.shape[:2]))
    return (numbers[0][:, :, None] == numbers[1][:, None])[:, None]


def _sequences(options: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of packed sequences; their longest lengths are hints, used if on the CPU."""
    own: dict[str, Any] = {}
    for side in "qk":
        own[f"cu_seqlens_{side}"] = options[f"cu_seq_lens_{side}"]
        longest = options.get(f"max_length_{side}")
        own[f"max_seqlen_{side}"] = longest if isinstance(longest, int) else 0
    return own

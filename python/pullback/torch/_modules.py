"""Modules where users expect them."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_rank
from .._options import choice
from ..sparsity import BlockLayout, FixedSparsityConfig, SparsityConfig
from ._blocks import block_sparse_attention
from ._entmax import entmax


class Entmax(nn.Module):
    """`entmax` with a fixed alpha."""

    def __init__(self, alpha: float = 1.5, dim: int = -1) -> None:
        super().__init__()
        self.alpha, self.dim = alpha, dim

    def forward(self, x: Tensor) -> Tensor:
        return entmax(x, self.alpha, self.dim)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, dim={self.dim}"


class Sparsemax(Entmax):
    """`entmax` with alpha 2."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(2.0, dim)


class Entmax15(Entmax):
    """`entmax` with alpha 1.5."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(1.5, dim)


def _mask_mode(option: str, mode: str) -> Any:
    return ("add", "keep", "keep")[choice(option, mode, ("add", "mul", "keep"))]


def _version(tensor: Tensor) -> int:
    """Changes where the tensor does; those for inference do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _unbatched(tensor: Tensor) -> Tensor:
    """What torch.func's transforms have made it of, which vmap adds dimensions to."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class _Layouts:
    """By sequence length. A dict of the module's torch.export would put back as it was, without the
    layouts that what it has traced is of."""

    def __init__(self) -> None:
        self.made: dict[int, BlockLayout] = {}


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention with the interface of DeepSpeed's module of this name.

    Called with query and value [B,H,S,D], key of the same shape or [B,H,D,S], and optionally rpe,
    key_padding_mask [B,S] (or [B,1,1,S]) and attn_mask [S,S] (or [1,1,S,S]) of any dtype; gives
    [B,H,S,D].

    Args:
        sparsity_config: the pattern; `FixedSparsityConfig` of 4 heads when not given.
        key_padding_mask_mode: "add" adds the mask to the scores, "mul" (or "keep") hides where it
            is 0.
        attn_mask_mode: the same for the other mask.
        max_seq_length: the layout of this length is the buffer ``master_layout``; shorter sequences
            have its first rows and columns. Compiled code keeps the layouts that it was compiled
            with until the module loads a state. Whoever copies into the buffer makes the next call
            wait for the device, to see whether it changed: DistributedDataParallel does before
            every forward pass, unless its broadcast_buffers is False.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mode = _mask_mode("key_padding_mask_mode", key_padding_mask_mode)
        self.attn_mask_mode = _mask_mode("attn_mask_mode", attn_mask_mode)
        present = self.sparsity_config.make_layout(max_seq_length).present
        self.register_buffer("master_layout", torch.from_numpy(present).long())
        self._present = present.astype("int64")  # what the layouts are made of
        self._layouts = _Layouts()
        self._made_of = self.master_layout, _version(self.master_layout)
        self._loads = 0

    def get_layout(self, seq_len: int) -> BlockLayout:
        """That of a sequence length, made when first met."""
        self._take_changes()
        layout = self._layouts.made.get(seq_len)
        if layout is None:
            block, longest = self.sparsity_config.block, self.master_layout.shape[-1]
            rows = seq_len // block
            if seq_len % block != 0 or rows > longest:
                raise ValueError(
                    f"SparseSelfAttention: sequence length: expected a multiple of {block} up to "
                    f"max_seq_length, {longest * block}; got {seq_len}"
                )
            layout = BlockLayout(self._present[:, :rows, :rows])
            self._layouts.made[seq_len] = layout
        return layout

    def _take_changes(self) -> None:
        """Of the buffer. One without memory, as compilers have it, stands for what there is."""
        master = self.master_layout
        made_of, version = self._made_of
        if type(master) is not Tensor or master.is_meta:
            return
        if master is made_of and _version(master) == version:
            return
        own = _unbatched(master)
        present = own.cpu().numpy()
        if own is not master:
            if (present != self._present).any():
                raise NotImplementedError(
                    "SparseSelfAttention: vmap over modules of other layouts than the one that is "
                    "called is not implemented; call them one by one"
                )
            return
        if present.shape != self._present.shape or (present != self._present).any():
            self._layouts.made.clear()
            self._present = present.copy()
        self._made_of = master, _version(master)

    def _constant_layout(self, seq_len: int, loads: int) -> BlockLayout:
        return self.get_layout(seq_len)

    # As torch.compiler.assume_constant_result does, which imports the compiler.
    _constant_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._loads += 1
        super()._load_from_state_dict(*arguments)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_rank("SparseSelfAttention", name, tensor.shape, "[B,H,S,D]")
        if key.shape != query.shape:
            key = key.transpose(2, 3)

        def mask(given: Tensor | None, mode: str) -> Tensor | None:
            if given is None:
                return None
            flat = given.reshape(given.shape[:-1].numel(), given.shape[-1])
            return flat.to(query.dtype) if mode == "add" else flat != 0

        out = block_sparse_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self._constant_layout(index(query.shape[2]), index(self._loads)),
            rpe=None if rpe is None else rpe.to(query.dtype),
            key_padding_mask=mask(key_padding_mask, self.key_padding_mode),
            attn_mask=mask(attn_mask, self.attn_mask_mode),
            key_padding_mode=self.key_padding_mode,
            attn_mask_mode=self.attn_mask_mode,
        )
        return out.transpose(1, 2)

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
        self._present = self.master_layout.clone()  # on the CPU, what the layouts are made of
        self._layouts: dict[int, BlockLayout] = {}
        self._made_of = self.master_layout, _version(self.master_layout)
        self._loads = 0

    def get_layout(self, seq_len: int) -> BlockLayout:
        """That of a sequence length, made when first met."""
        master = self.master_layout, _version(self.master_layout)
        if master[0] is not self._made_of[0] or master[1] != self._made_of[1]:
            present = self.master_layout.cpu()
            if not torch.equal(present, self._present):
                self._layouts.clear()
                self._present = present.clone()
            self._made_of = master
        layout = self._layouts.get(seq_len)
        if layout is None:
            block, longest = self.sparsity_config.block, self.master_layout.shape[-1]
            rows = seq_len // block
            if seq_len % block != 0 or rows > longest:
                raise ValueError(
                    f"SparseSelfAttention: sequence length: expected a multiple of {block} up to "
                    f"max_seq_length, {longest * block}; got {seq_len}"
                )
            present = self._present[:, :rows, :rows]
            layout = self._layouts[seq_len] = BlockLayout(present.numpy())
        return layout

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

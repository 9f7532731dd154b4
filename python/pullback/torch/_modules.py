"""Modules where users expect them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention with the interface of DeepSpeed's module of this name.

    Called with query, key and value [B,H,S,D], and optionally rpe, key_padding_mask [B,S] and
    attn_mask [S,S]; gives [B,H,S,D]. The layout of a sequence length is made when first met.

    Args:
        sparsity_config: the pattern; `FixedSparsityConfig` of 4 heads when not given.
        key_padding_mask_mode: "add" adds the mask to the scores, "mul" (or "keep") hides where it
            is 0.
        attn_mask_mode: the same for the other mask.
        max_seq_length: accepted, and not needed.
    """

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
        self._layouts: dict[int, BlockLayout] = {}

    def get_layout(self, seq_len: int) -> BlockLayout:
        layout = self._layouts.get(seq_len)
        if layout is None:
            layout = self._layouts[seq_len] = self.sparsity_config.make_layout(seq_len)
        return layout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        out = block_sparse_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.get_layout(query.shape[2]),
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mode=self.key_padding_mode,
            attn_mask_mode=self.attn_mask_mode,
        )
        return out.transpose(1, 2)

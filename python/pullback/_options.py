"""The options of each op as users write them, turned into the fields of pullback.h.

Every front end takes them as keywords, so that the op means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from ._native import CHECK_INDICES, NONDETERMINISTIC, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_C

Corner = Literal["top_left", "bottom_right"]
MaskMode = Literal["add", "keep"]
MatmulMode = Literal["sdd", "dsd", "dds"]
Reduce = Literal["sum", "mean", "max", "min", "prod", "logsumexp", "softmax"]
Ties = Literal["first", "last", "even"]
Empty = Literal["identity", "zero", "nan"]

CORNERS = ("top_left", "bottom_right")
MASK_MODES = ("add", "keep")
MATMUL_MODES = ("sdd", "dsd", "dds")
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "logsumexp", "softmax")
TIES = ("first", "last", "even")
EMPTIES = ("identity", "zero", "nan")


def choice(option: str, value: Any, names: Sequence[str]) -> int:
    if value not in names:
        raise ValueError(f"{option}: expected {', '.join(map(repr, names))}, got {value!r}")
    return names.index(value)


class AttentionOptions(TypedDict, total=False):
    scale: float | None  # 1/sqrt(D)
    softcap: float  # c > 0: s <- c tanh(s/c), after the scale and before the bias
    causal: bool  # no query sees keys past its own
    window: tuple[int, int] | None  # keys seen to the left and right of a query's own; -1: all
    corner: Corner  # where causal and window are aligned if Sq != Sk; "bottom_right"
    dropout: float
    max_seqlen_q: int  # upper bounds of the lengths in cu_seqlens; 0: the total
    max_seqlen_k: int
    deterministic: bool  # False allows sums in no fixed order
    check_indices: bool  # report bad cu_seqlens instead of clamping them


def attention_options(
    scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    corner: str = "bottom_right",
    dropout: float = 0.0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    deterministic: bool = True,
    check_indices: bool = False,
) -> dict[str, Any]:
    left, right = (-1, -1) if window is None else window
    if causal and right >= -1:
        right = 0
    return {
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "scale": scale,
        "softcap": softcap,
        "mask_left": left,
        "mask_right": right,
        "mask_corner": choice("corner", corner, CORNERS),
        "flags": (0 if deterministic else NONDETERMINISTIC)
        | (CHECK_INDICES if check_indices else 0),
        "dropout": dropout,
    }


class BlockSoftmaxOptions(TypedDict, total=False):
    scale: float  # of x alone
    key_padding_mode: MaskMode  # "add"
    attn_mask_mode: MaskMode  # "keep"


def block_softmax_options(
    scale: float = 1.0, key_padding_mode: str = "add", attn_mask_mode: str = "keep"
) -> dict[str, Any]:
    return {
        "key_padding_mode": choice("key_padding_mode", key_padding_mode, MASK_MODES),
        "attn_mask_mode": choice("attn_mask_mode", attn_mask_mode, MASK_MODES),
        "scale": scale,
    }


class BlockMatmulOptions(TypedDict, total=False):
    transpose_a: bool
    transpose_b: bool
    transpose_c: bool


def block_matmul_options(
    mode: str, transpose_a: bool = False, transpose_b: bool = False, transpose_c: bool = False
) -> dict[str, Any]:
    return {
        "mode": choice("mode", mode, MATMUL_MODES),
        "flags": transpose_a * TRANSPOSE_A | transpose_b * TRANSPOSE_B | transpose_c * TRANSPOSE_C,
    }


def entmax_options(
    alpha: float = 2.0, axis: int = -1, check_indices: bool = False
) -> dict[str, Any]:
    return {"alpha": alpha, "axis": axis, "flags": CHECK_INDICES if check_indices else 0}


class SegmentOptions(TypedDict, total=False):
    ties: Ties  # who gets the gradient of max and min; "first"
    empty: Empty  # value of a segment without rows; "identity"
    num_segments: int  # needed with ids
    check_indices: bool


def segment_options(
    reduce: str,
    ties: str = "first",
    empty: str = "identity",
    num_segments: int = 0,
    check_indices: bool = False,
) -> dict[str, Any]:
    return {
        "num_segments": num_segments,
        "reduce": choice("reduce", reduce, REDUCTIONS),
        "ties": choice("ties", ties, TIES),
        "empty": choice("empty", empty, EMPTIES),
        "flags": CHECK_INDICES if check_indices else 0,
    }

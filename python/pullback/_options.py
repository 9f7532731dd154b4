"""The options of each op as users write them, turned into the fields of pullback.h.

Every front end takes them as keywords, so that the op means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal, TypedDict, TypeVar

from ._checks import check_rank
from ._native import CHECK_INDICES, NONDETERMINISTIC, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_C
from .sparsity import BlockLayout

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


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _called(name: str) -> Callable[[_Function], _Function]:
    """By what name Python refuses unknown keywords: users have called another function."""

    def rename(function: _Function) -> _Function:
        function.__qualname__ = name
        return function

    return rename


def choice(option: str, value: Any, names: Sequence[str]) -> int:
    if value not in names:
        raise ValueError(f"{option}: expected {', '.join(map(repr, names))}, got {value!r}")
    return names.index(value)


def integer(option: str, value: Any) -> Any:
    """A number of NumPy's or of a tensor as Python's, which caches can hold; torch's SymInt stays
    symbolic."""
    if value is None or isinstance(value, int) or type(value).__name__ == "SymInt":
        return value
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{option}: expected an integer, got {value!r}") from None


def real(option: str, value: Any, remedy: str = "detach it") -> float:
    # A number first: torch.compile's symbols have no attributes.
    if not isinstance(value, (int, float)) and getattr(value, "requires_grad", False):
        raise ValueError(
            f"{option}: expected a number, got a tensor that requires a gradient, which it would "
            f"not get; {remedy}"
        )
    return float(value)


class AttentionOptions(TypedDict, total=False):
    """Options of attention: keywords of every front end."""

    #: Factor of q·k; 1/sqrt(D) when not given. A tensor is read on the host, which one compiled
    #: graph cannot hold, and gets no gradient: multiply q by it instead.
    scale: float | None
    #: c > 0: a score s becomes c tanh(s/c), after the scale and before the bias; 0 or None: none.
    softcap: float | None
    #: No query sees keys past its own.
    causal: bool
    #: How many keys a query sees to the left and to the right of its own; -1 or None: all.
    window: tuple[int | None, int | None] | None
    #: Where causal and window are aligned if Sq != Sk: "bottom_right" (the default) or "top_left".
    corner: Corner
    #: The probability of dropping a weight, from 0 up to, but not including, 1.
    dropout: float
    #: An upper bound of the lengths in cu_seqlens_q; longer sequences are cut. 0: the total.
    max_seqlen_q: int
    #: The same for cu_seqlens_k.
    max_seqlen_k: int
    #: False allows sums in no fixed order. It changes nothing yet: every implementation has one.
    deterministic: bool
    #: Reports bad cu_seqlens instead of clamping them; on the CPU.
    check_indices: bool
    #: Query i sees key j only where the layout has the block (i / block, j / block). Its heads are
    #: 1 or H, times layout_batches.
    layout: BlockLayout | None
    #: B, if every batch item has a layout of its own; 0 or 1: the layout serves all.
    layout_batches: int
    #: The size of the layout's blocks: 16 to 128, a multiple of 16.
    block: int


@_called("attention")
def attention_options(
    scale: float | None = None,
    softcap: float | None = 0.0,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    corner: str = "bottom_right",
    dropout: float = 0.0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    deterministic: bool = True,
    check_indices: bool = False,
    layout: BlockLayout | None = None,
    layout_batches: int = 0,
    block: int = 0,
) -> dict[str, Any]:
    if window is None:
        window = (-1, -1)
    if not isinstance(window, Sequence) or len(window) != 2:
        raise ValueError(f"window: expected (left, right), -1 for no bound; got {window!r}")
    left, right = (-1 if bound is None else integer("window", bound) for bound in window)
    if isinstance(causal, str):
        raise ValueError(f"causal: expected True or False, got {causal!r}; its corner is `corner`")
    if causal and right >= -1:
        right = 0
    return {
        "max_seqlen_q": integer("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": integer("max_seqlen_k", max_seqlen_k),
        "scale": None if scale is None else real("scale", scale, "multiply q by it, or detach it"),
        "softcap": 0.0 if softcap is None else real("softcap", softcap),
        "mask_left": left,
        "mask_right": right,
        "mask_corner": choice("corner", corner, CORNERS),
        "flags": (0 if deterministic else NONDETERMINISTIC)
        | (CHECK_INDICES if check_indices else 0),
        "dropout": real("dropout", dropout),
        "layout": layout,
        "layout_batches": integer("layout_batches", layout_batches),
        "block": integer("block", block),
    }


class BlockSoftmaxOptions(TypedDict, total=False):
    """Options of block_softmax."""

    #: Factor of x alone; 1 when not given.
    scale: float
    #: "add" (the default) or "keep".
    key_padding_mode: MaskMode
    #: "keep" (the default) or "add".
    attn_mask_mode: MaskMode


@_called("block_softmax")
def block_softmax_options(
    scale: float = 1.0, key_padding_mode: str = "add", attn_mask_mode: str = "keep"
) -> dict[str, Any]:
    return {
        "key_padding_mode": choice("key_padding_mode", key_padding_mode, MASK_MODES),
        "attn_mask_mode": choice("attn_mask_mode", attn_mask_mode, MASK_MODES),
        "scale": real("scale", scale, "multiply x by it, or detach it"),
    }


class BlockMatmulOptions(TypedDict, total=False):
    """Options of block_matmul: what is stored transposed."""

    #: A sparse matrix keeps its layout and stands for the transposed one.
    transpose_a: bool
    #: As transpose_a.
    transpose_b: bool
    #: A sparse c has each block transposed, blocks in the order of the transposed layout.
    transpose_c: bool


def softmax_block(name: str, shape: Sequence[int]) -> int:
    """The block size, of x or y."""
    check_rank("block_softmax", name, shape, "[Z,nnz,b,b]")
    return shape[-1]


def matmul_block(
    mode: str, block: int | None, a_shape: Sequence[int], b_shape: Sequence[int]
) -> int:
    """The block size: that of the sparse operand when not given."""
    sparse = {"dsd": "a", "dds": "b"}.get(mode)
    for name, shape in (("a", a_shape), ("b", b_shape)):
        expected = "[Z,nnz,b,b]" if name == sparse else "[Z,H,rows,columns]"
        check_rank("block_matmul", name, shape, expected)
    if block is not None:
        return integer("block_matmul: block", block)
    if mode == "sdd":
        raise ValueError("block_matmul: block: expected the block size for mode 'sdd'")
    return (a_shape if mode == "dsd" else b_shape)[-1]


@_called("block_matmul")
def block_matmul_options(
    mode: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    transpose_c: bool = False,
) -> dict[str, Any]:
    return {
        "mode": choice("mode", mode, MATMUL_MODES),
        "flags": (TRANSPOSE_A if transpose_a else 0)
        | (TRANSPOSE_B if transpose_b else 0)
        | (TRANSPOSE_C if transpose_c else 0),
    }


@_called("entmax")
def entmax_options(
    alpha: float = 2.0, axis: int = -1, check_indices: bool = False
) -> dict[str, Any]:
    return {
        "alpha": alpha,
        "axis": integer("entmax: axis", axis),
        "flags": CHECK_INDICES if check_indices else 0,
    }


class SegmentOptions(TypedDict, total=False):
    """Options of segment reductions."""

    #: Who gets the gradient of equal maxima or minima: "first" (the default), "last", or "even", a
    #: share for each.
    ties: Ties
    #: The value of a segment without rows: "identity" (the default: 0, for max -inf, for prod 1),
    #: "zero" or "nan".
    empty: Empty
    #: S; needed where ids are given. With offsets 0, or what they say.
    num_segments: int
    #: Reports bad indices instead of clamping or dropping them; on the CPU.
    check_indices: bool


@_called("segment_reduce")
def segment_options(
    reduce: str,
    by_ids: bool,
    ties: str = "first",
    empty: str = "identity",
    num_segments: int | None = None,
    check_indices: bool = False,
) -> dict[str, Any]:
    if by_ids and num_segments is None:
        raise ValueError("segment: num_segments: expected a number, as ids are given; got none")
    return {
        "num_segments": 0
        if num_segments is None
        else integer("segment: num_segments", num_segments),
        "reduce": choice("reduce", reduce, REDUCTIONS),
        "ties": choice("ties", ties, TIES),
        "empty": choice("empty", empty, EMPTIES),
        "flags": CHECK_INDICES if check_indices else 0,
    }

"""Checks of tensors that the library does not get to see, with messages like its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_FLOATS = "float64, float32, bfloat16 or float16"
# Of tensors that are not always floating-point ones.
_DTYPES = {
    **dict.fromkeys(
        "cu_seqlens_q cu_seqlens_k offsets ids permutation arg".split(), "int32 or int64"
    ),
    **dict.fromkeys(("key_padding_mask", "attn_mask"), f"{_FLOATS}, bool or uint8"),
    **dict.fromkeys(("support", "arg_mask"), "uint8"),
    "mask": "bool or uint8",
    "seed": "int64",
    "support_size": "int32",
}


def unknown_dtype(op: str, name: str, got: Any) -> ValueError:
    """For a dtype that the library has no name for."""
    expected = _DTYPES.get(name, _FLOATS)
    return ValueError(
        f"{op}: {name}: expected dtype {expected}, got {got}; convert the tensor first"
    )


def expect_none(function: str, **arguments: Any) -> None:
    """For arguments that the function has for the sake of its signature."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{function}: {name}: expected None, got a tensor")


def check_rank(op: str, name: str, shape: Sequence[int], expected: str) -> None:
    """`expected` is a shape in words, "[B,S,H,D]"."""
    if len(shape) != expected.count(",") + 1:
        raise ValueError(f"{op}: {name}: expected {expected}, got {list(shape)}")

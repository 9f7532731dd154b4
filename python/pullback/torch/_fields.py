"""Options of calls as the fields of operators."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, Callable

import torch

from ..sparsity import BlockLayout
from ._operator import TorchOp

_CONSTANTS = {bool, int, float, str, tuple, type(None)}


def _constant(*collections: Collection[Any]) -> bool:
    """Whether the values cannot change; a cache tells 1.0 from 1, but not within tuples."""
    for values in collections:
        if not _CONSTANTS.issuperset(map(type, values)):
            return False
        for value in values:
            if type(value) is tuple and not {int, type(None)}.issuperset(map(type, value)):
                return False
    return True


def remembered(op: TorchOp, make: Callable[..., dict[str, Any]]) -> Callable[..., tuple[Any, ...]]:
    """What `make` makes of options, in the order of the operator's schema.

    It is remembered, as most calls of a model have the options of one before.
    """

    def fields(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        own = make(*arguments, **options)
        return tuple([own[name] for name in op.options if name in own])

    remembered = lru_cache(1024, typed=True)(fields)

    def call(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling() and _constant(options.values(), arguments):
            return remembered(*arguments, **options)
        return fields(*arguments, **options)

    return call


def identifier(layout: BlockLayout) -> int:
    if not isinstance(layout, BlockLayout):
        raise TypeError(
            f"layout: expected a BlockLayout, got {type(layout).__name__}; "
            "make one of an array, and keep it"
        )
    return layout.identifier

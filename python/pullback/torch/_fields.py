"""Options of calls as the fields of operators."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import torch

from ..sparsity import BlockLayout
from ._operator import TorchOp

_CONSTANTS = {bool, int, float, str, tuple, type(None)}


def remembered(op: TorchOp, make: Callable[..., dict[str, Any]]) -> Callable[..., tuple[Any, ...]]:
    """What `make` makes of options, in the order of the operator's schema.

    It is remembered, as most calls of a model have the options of one before.
    """

    def fields(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        own = make(*arguments, **options)
        return tuple([own[name] for name in op.options if name in own])

    remembered = lru_cache(1024)(fields)

    def call(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        constant = _CONSTANTS.issuperset(map(type, options.values()))
        constant = constant and _CONSTANTS.issuperset(map(type, arguments))
        if constant and not torch.compiler.is_compiling():
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

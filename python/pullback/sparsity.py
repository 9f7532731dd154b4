"""Block layouts, and the six patterns that block-sparse models are trained with.

The patterns and their parameters are DeepSpeed's; ``config.make_layout(seq_len)`` makes a
`BlockLayout`. "unidirectional" acts on whole blocks: exact causality also needs an element mask.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

from ._native import _lib, function

if TYPE_CHECKING:
    import numpy as np

_create = function(
    "pullback_block_layout_create", c_int64, c_int64, c_int64, c_void_p, POINTER(c_void_p)
)
_destroy = _lib.pullback_block_layout_destroy
_destroy.argtypes = (c_void_p,)
_destroy.restype = None
_size = function("pullback_block_layout_size", c_void_p, *[POINTER(c_int64)] * 4)
_present = function("pullback_block_layout_present", c_void_p, c_void_p, c_size_t)

_alive: weakref.WeakValueDictionary[int, BlockLayout] = weakref.WeakValueDictionary()


class BlockLayout:
    """Which blocks of a block-sparse matrix exist: `heads` heads of `rows` by `columns` blocks.

    A block-sparse tensor is [Z, nnz, block, block], its blocks ordered by (head, row, column).
    """

    def __init__(self, present: Any) -> None:
        """From an array [heads, rows, columns] that is true where a block is."""
        import numpy as np

        array = np.ascontiguousarray(np.asarray(present) != 0, dtype=np.uint8)
        if array.ndim != 3:
            raise ValueError(f"BlockLayout: expected [heads, rows, columns], got rank {array.ndim}")
        handle = c_void_p()
        _create(*array.shape, array.ctypes.data, byref(handle))
        self._adopt(handle)

    def _adopt(self, handle: c_void_p) -> None:
        self.handle = handle.value
        sizes = [c_int64() for _ in range(4)]
        _size(handle, *map(byref, sizes))
        self.heads, self.rows, self.columns, self.nnz = (size.value for size in sizes)
        # Names the layout where only numbers can be passed, as in torch operators: a process that
        # loads them finds an equal layout or none.
        shape = b"%d %d %d " % (self.heads, self.rows, self.columns)
        digest = hashlib.blake2b(shape + self.present.tobytes(), digest_size=8).digest()
        self.identifier = int.from_bytes(digest, "little") >> 1 or 1
        equal = _alive.setdefault(self.identifier, self)
        self._found = None if equal is self else equal  # kept alive: it stands for this one

    @classmethod
    def of(cls, layout: Any) -> BlockLayout:
        """`layout` itself, or one made from an array of it."""
        return layout if isinstance(layout, cls) else cls(layout)

    @staticmethod
    def find(identifier: int) -> BlockLayout:
        layout = _alive.get(identifier)
        if layout is None:
            raise ValueError(
                "the BlockLayout does not exist: keep a reference to it or an equal one"
            )
        return layout

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _destroy(self.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self.identifier == other.identifier

    def __hash__(self) -> int:
        return self.identifier

    def __reduce__(self) -> Any:  # copies have handles of their own
        return BlockLayout, (self.present,)

    @property
    def present(self) -> np.ndarray[Any, Any]:
        """uint8 [heads, rows, columns]: 1 where a block is."""
        import numpy as np

        array = np.empty((self.heads, self.rows, self.columns), np.uint8)
        _present(self.handle, array.ctypes.data, array.size)
        return array

    @property
    def density(self) -> float:
        return self.nnz / max(1, self.heads * self.rows * self.columns)

    def __repr__(self) -> str:
        return (
            f"BlockLayout(heads={self.heads}, rows={self.rows}, columns={self.columns}, "
            f"nnz={self.nnz})"
        )


# ---------------------------------------------------------------- patterns

_FLAGS = {
    "different_layout_per_head": 2,
    "horizontal_global_attention": 4,
}
_KEEP_ABOVE_DIAGONAL = 8


@dataclass
class SparsityConfig:
    """What all patterns have: heads, and the block size, 16 to 128 and a multiple of 16."""

    num_heads: int
    block: int = 16

    # The C struct's fields after num_heads and block, as (name, kind).
    _struct: ClassVar[Sequence[tuple[str, str]]] = ()
    _name: ClassVar[str] = "dense"

    def make_layout(self, seq_len: int) -> BlockLayout:
        """The layout for sequences of `seq_len` tokens, a multiple of the block."""
        values: list[Any] = [
            self._fitting("num_heads", self.num_heads),
            self._fitting("block", self.block),
        ]
        types: list[Any] = [c_int64, c_int64]
        kinds: dict[str, Any] = {"i64": c_int64, "u64": ctypes.c_uint64, "flags": ctypes.c_uint64}
        for name, kind in self._struct:
            if kind == "list":
                given = getattr(self, name)
                numbers = [] if given is None else [self._fitting(name, one) for one in given]
                values.append(None if given is None else (c_int64 * len(numbers))(*numbers))
                types.append(POINTER(c_int64))
                if name != "global_block_end_indices":
                    values.append(len(numbers))
                    types.append(c_size_t)
            else:
                number = self._flags() if kind == "flags" else getattr(self, name)
                values.append(self._fitting(name, number, kind))
                types.append(kinds[kind])
        begins = getattr(self, "global_block_indices", None)
        ends = getattr(self, "global_block_end_indices", None)
        if ends is not None and (begins is None or len(ends) != len(begins)):
            raise ValueError("global_block_end_indices: expected one for each global_block_indices")
        struct = type(
            "sparsity",
            (ctypes.Structure,),
            {"_fields_": [("struct_size", c_size_t)] + [(f"f{i}", t) for i, t in enumerate(types)]},
        )
        problem = struct(ctypes.sizeof(struct), *values)
        make = function(
            f"pullback_{self._name}_layout", POINTER(struct), c_int64, POINTER(c_void_p)
        )
        handle = c_void_p()
        make(byref(problem), self._fitting("seq_len", seq_len), byref(handle))
        layout = BlockLayout.__new__(BlockLayout)
        layout._adopt(handle)
        return layout

    def _fitting(self, name: str, value: Any, kind: str = "i64") -> int:
        """A number, of which ctypes would keep the low bits if it did not fit. Seeds, which are 64
        bits, may have a sign."""
        number = index(value)
        if not -(1 << 63) <= number < 1 << (63 if kind == "i64" else 64):
            pattern = type(self).__name__.removesuffix("Config")
            raise ValueError(f"{pattern}: {name}: expected a number that fits {kind}, got {number}")
        return number

    def _flags(self) -> int:
        attention = getattr(self, "attention", "bidirectional")
        if attention not in ("unidirectional", "bidirectional"):
            raise ValueError(
                f"attention: expected 'unidirectional' or 'bidirectional', got {attention!r}"
            )
        flags = int(attention == "unidirectional")
        for name, flag in _FLAGS.items():
            if getattr(self, name, False):
                flags |= flag
        if not getattr(self, "trim_above_diagonal", True):
            flags |= _KEEP_ABOVE_DIAGONAL
        return flags


@dataclass
class DenseSparsityConfig(SparsityConfig):
    """Every block, in all heads alike."""

    different_layout_per_head: bool = False


@dataclass
class FixedSparsityConfig(SparsityConfig):
    """Local windows, of each of which a few blocks are global (Sparse Transformers)."""

    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1
    trim_above_diagonal: bool = True

    _name = "fixed"
    _struct = (
        ("flags", "flags"),
        ("num_local_blocks", "i64"),
        ("num_global_blocks", "i64"),
        ("num_different_global_patterns", "i64"),
    )


@dataclass
class VariableSparsityConfig(SparsityConfig):
    """Local windows of the listed sizes, global blocks by index or range, random blocks."""

    different_layout_per_head: bool = False
    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = field(default_factory=lambda: [4])
    global_block_indices: Sequence[int] = field(default_factory=lambda: [0])
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0
    trim_above_diagonal: bool = True

    _name = "variable"
    _struct = (
        ("flags", "flags"),
        ("num_random_blocks", "i64"),
        ("local_window_blocks", "list"),
        ("global_block_indices", "list"),
        ("global_block_end_indices", "list"),
        ("seed", "u64"),
    )


@dataclass
class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a window around the diagonal, the first rows and columns."""

    different_layout_per_head: bool = False
    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    _name = "bigbird"
    _struct = (
        ("flags", "flags"),
        ("num_random_blocks", "i64"),
        ("num_sliding_window_blocks", "i64"),
        ("num_global_blocks", "i64"),
        ("seed", "u64"),
    )


@dataclass
class BSLongformerSparsityConfig(SparsityConfig):
    """A window around the diagonal, global rows and columns; all heads alike (Longformer)."""

    different_layout_per_head: bool = False
    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = field(default_factory=lambda: [0])
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def _flags(self) -> int:
        return super()._flags() & ~_FLAGS["different_layout_per_head"]

    _name = "bslongformer"
    _struct = (
        ("flags", "flags"),
        ("num_sliding_window_blocks", "i64"),
        ("global_block_indices", "list"),
        ("global_block_end_indices", "list"),
    )


@dataclass
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A window around the diagonal alone."""

    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    _name = "local_sliding_window"
    _struct = (("flags", "flags"), ("num_sliding_window_blocks", "i64"))

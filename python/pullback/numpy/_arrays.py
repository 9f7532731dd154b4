"""Plans on NumPy arrays: layouts of arrays, memory for outputs and workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._checks import unknown_dtype
from .._native import (
    BACKWARD,
    FORWARD,
    OPS,
    SMALL_WORKSPACE,
    WORKSPACE_ALIGNMENT,
    NativePlan,
    Op,
    Spec,
    align,
    thread_memory,
)
from ..sparsity import BlockLayout

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    Array = np.ndarray[Any, Any]

    class Run(TypedDict, total=False):
        threads: int
        variant: str | None
        workspace: Array | None


_Gradients = TypeVar("_Gradients")

_DTYPE_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "uint8": "u8",
    "bool": "bool",
}
_NAMES_OF = {short: name for name, short in _DTYPE_NAMES.items()}


def _dtype(name: str) -> Any:
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NAMES_OF[name])


def _refuse_masked(op: Op, name: str, value: Any) -> None:
    """Whose mask np.asarray() would drop."""
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{op.name}: {name}: expected an array without a mask, got a MaskedArray; "
            "give what filled() makes of it"
        )


def _spec(op: Op, name: str, array: Array) -> Spec:
    _refuse_masked(op, name, array)
    dtype = _DTYPE_NAMES.get(array.dtype.name)
    if dtype is None:
        raise unknown_dtype(op.name, name, array.dtype)
    if not array.dtype.isnative:
        raise unknown_dtype(op.name, name, f"{array.dtype}, not in native byte order")
    size = array.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError(
            f"{op.name}: {name}: expected strides of whole elements, {size} bytes each, "
            f"got {array.strides} bytes"
        )
    return Spec(dtype, array.shape, tuple(stride // size for stride in array.strides))


def _layout(spec: Spec) -> Spec:
    """Without the strides that no element depends on."""
    several = [size > 1 and 0 not in spec.shape for size in spec.shape]
    strides = tuple([stride if used else 0 for stride, used in zip(spec.strides, several)])
    return spec._replace(strides=strides)


def _array(op: Op, name: str, value: Any) -> Array:
    """An array whose strides are whole elements at aligned addresses; others are copied."""
    _refuse_masked(op, name, value)
    array = np.asarray(value)
    size = array.itemsize or 1  # V0 has none, and is refused for its dtype
    if any(stride % size for stride in array.strides) or not array.flags.aligned:
        array = array.copy()
    return array


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class Plan:
    """A checked problem of one op and pass, which runs on any arrays of the planned layouts."""

    def __init__(self, native: NativePlan) -> None:
        self._native = native

    @property
    def workspace_bytes(self) -> int:
        return self._native.workspace_bytes

    def describe(self) -> str:
        """Op, pass, variant, tiles, accumulation type, guarantee, and why it was chosen."""
        return self._native.describe()

    def empty(self, name: str) -> Array:
        """A new array for an output."""
        spec = self._native.spec(name)
        if spec is None:
            raise ValueError(f"{self._native.op.name}: this problem has no {name}")
        return np.empty(spec.shape, _dtype(spec.dtype))

    def run(self, arrays: Mapping[str, Array | None], workspace: Array | None = None) -> None:
        """Computes from and into `arrays`, by the names of the problem's tensors."""
        op = self._native.op
        unknown = [name for name in arrays if name not in op.tensors]
        if unknown:
            raise TypeError(f"{op.name} has no {', '.join(unknown)}")
        outputs = [name for name in op.tensors if op.writes(self._native.direction, name)]
        if all(arrays.get(name) is None for name in outputs):
            possible = [name for name in outputs if self._native.spec(name) is not None]
            raise ValueError(
                f"{op.name}: outputs: expected some of {', '.join(possible)}, got none"
            )
        pointers = []
        for name in op.tensors:
            array = arrays.get(name)
            if array is not None:
                if not isinstance(array, np.ndarray):
                    kind = type(array).__name__
                    raise TypeError(f"{op.name}: {name}: expected an array, got {kind}")
                if op.writes(self._native.direction, name) and not array.flags.writeable:
                    raise ValueError(f"{op.name}: {name}: expected writable memory, got read-only")
                planned, given = self._native.spec(name), _spec(op, name, array)
                if planned is not None and _layout(given) != _layout(planned):
                    raise ValueError(
                        f"{op.name}: {name}: expected {planned}, as planned, got {given}"
                    )
            pointers.append(0 if array is None else _address(array))
        if workspace is not None:
            if not isinstance(workspace, np.ndarray):
                kind = type(workspace).__name__
                raise TypeError(f"{op.name}: workspace: expected an array, got {kind}")
            if not (workspace.flags.c_contiguous and workspace.flags.writeable):
                raise ValueError(f"{op.name}: workspace: expected contiguous, writable memory")
            begin = _address(workspace)
            address = align(begin)
            size = max(workspace.nbytes - (address - begin), 0)
        elif (size := self.workspace_bytes) <= SMALL_WORKSPACE:
            address = thread_memory.address
        else:
            workspace = np.empty(size + WORKSPACE_ALIGNMENT, np.uint8)
            address = align(_address(workspace))
        self._native.run_pointers(pointers, 0, address, size)


def plan(
    op: str,
    direction: str,
    arrays: Mapping[str, Any],
    *,
    threads: int = 0,
    variant: str | None = None,
    **options: Any,
) -> Plan:
    """A plan by names: the op's and those of its tensors and options in pullback.h.

    `arrays` gives layouts alone, inputs and those outputs that are not row-major.
    """
    if op not in OPS:
        raise ValueError(f"op: expected {', '.join(OPS)}, got {op!r}")
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: expected 'forward' or 'backward', got {direction!r}")
    if options.get("layout") is not None:
        options["layout"] = BlockLayout.of(options["layout"])
    specs = {
        name: None if array is None else _spec(OPS[op], name, np.asanyarray(array))
        for name, array in arrays.items()
    }
    return Plan(
        NativePlan(
            OPS[op],
            BACKWARD if direction == "backward" else FORWARD,
            specs,
            options,
            threads=threads,
            variant=variant,
        )
    )


def compute(
    op: Op,
    direction: int,
    inputs: Mapping[str, Any],
    outputs: Iterable[str],
    options: Mapping[str, Any],
    threads: int = 0,
    variant: str | None = None,
    workspace: Array | None = None,
) -> tuple[Array, ...]:
    arrays = {name: _array(op, name, value) for name, value in inputs.items() if value is not None}
    specs = {name: _spec(op, name, array) for name, array in arrays.items()}
    made = Plan(NativePlan(op, direction, specs, options, threads=threads, variant=variant))
    results = {name: made.empty(name) for name in outputs}
    made.run({**arrays, **results}, workspace)
    return tuple(results.values())


def split(options: Mapping[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """What the op takes, after moving what a run takes into `run`."""
    own = dict(options)
    for name in ("threads", "variant", "workspace"):
        if name in own:
            run[name] = own.pop(name)
    return own


def wanted(needs: Iterable[str] | None, possible: Mapping[str, Any], op: str) -> list[str]:
    """The gradients to compute: of the inputs that are given, or those asked for."""
    if needs is None:
        return [name for name, source in possible.items() if source is not None]
    names = [needs] if isinstance(needs, str) else list(dict.fromkeys(needs))
    for name in names:
        if possible.get(name) is None:
            given = [known for known, source in possible.items() if source is not None]
            raise ValueError(f"{op}: needs: expected some of {', '.join(given)}, got {name!r}")
    return names


def gradients(
    kind: Callable[..., _Gradients],
    op: Op,
    inputs: Mapping[str, Any],
    possible: Mapping[str, Any],
    needs: Iterable[str] | None,
    options: Mapping[str, Any],
    run: Mapping[str, Any],
) -> _Gradients:
    """The backward pass, for those of `possible` (name -> what it is the gradient of) needed."""
    names = wanted(needs, possible, op.name)
    results = compute(op, BACKWARD, inputs, names, options, **run)
    return kind(**{**dict.fromkeys(possible), **dict(zip(names, results))})

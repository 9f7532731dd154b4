"""Makes PyTorch operators, ``torch.ops.pullback.<name>`` and ``<name>_backward``, of an op.

`TorchOp` makes both from a table (_ops.py): schema, kernel, fake kernel, derivative, vmap and
autocast rules. Kernels run on the current stream with outputs and workspace from torch's allocator,
and never wait. Plans are kept by problem, since a training step repeats the same ones.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from operator import itemgetter
from typing import Any, Callable, NoReturn

import torch
from torch import Tensor

from .._checks import unknown_dtype
from .._native import (
    BACKWARD,
    CPU,
    FORWARD,
    SMALL_WORKSPACE,
    WORKSPACE_ALIGNMENT,
    Device,
    NativePlan,
    Op,
    Spec,
    align,
    thread_memory,
)
from ..sparsity import BlockLayout
from ._derivation import Derivation, NoDerivation
from ._dispatch import Calls, define, differentiate, library

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
}

Given = Mapping[str, Any]
# Shape and dtype of an output.
Shape = tuple[Sequence[Any], torch.dtype]
Shapes = Callable[[Given, Given], Sequence[Shape]]

_DEVICES = ("cpu", "cuda")
_MAX_PLANS = 4096
_core: Any = torch._C  # typed in part
_data_ptr = Tensor.data_ptr
# PyTorch's own short ways, which may go, or those that all know.
_current_device: Callable[[], int] = getattr(_core, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(
    _core,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _spec(op: Op, name: str, tensor: Tensor) -> Spec:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise unknown_dtype(op.name, name, tensor.dtype)
    return Spec(dtype, tuple(tensor.shape), tensor.stride())


def _empty(device: torch.device) -> Callable[..., Tensor]:
    """Makes tensors of sizes, strides and dtype on a device that is the current one."""
    guards = getattr(getattr(_core, "_dynamo", None), "guards", None)
    short: Any = getattr(guards, f"_empty_strided_{device.type}", None)
    return short or (
        lambda sizes, strides, dtype: torch.empty_strided(
            sizes, strides, dtype=dtype, device=device
        )
    )


class _Prepared:
    """A plan, what to allocate for it, and where each pointer of its struct comes from."""

    __slots__ = (
        "allocates_workspace",
        "device",
        "empty",
        "has_tables",
        "layouts",
        "pick",
        "plan",
        "slots",
        "workspace_bytes",
    )

    def __init__(
        self,
        plan: NativePlan,
        shapes: Sequence[Shape],
        device: torch.device,
        slots: Sequence[int],
        has_tables: bool,
    ) -> None:
        self.plan = plan
        self.has_tables = has_tables  # on a GPU, freed with the plan
        self.device = -1 if device.type == "cpu" else device.index
        self.empty = _empty(device)
        # Sizes, strides and dtypes of outputs and workspace.
        self.layouts = [(tuple(shape), _row_major(shape), dtype) for shape, dtype in shapes]
        self.workspace_bytes = plan.workspace_bytes
        self.allocates_workspace = self.workspace_bytes > (
            SMALL_WORKSPACE if self.device < 0 else 0
        )
        if self.allocates_workspace:
            size = self.workspace_bytes + WORKSPACE_ALIGNMENT
            self.layouts.append(((size,), (1,), torch.uint8))
        # Of the addresses of given inputs and outputs, and a last 0, those of the op's tensors.
        self.slots = slots
        self.pick = itemgetter(*slots)

    def without(self, kept: Sequence[bool]) -> _Prepared:
        """The same for calls that give only those inputs that are kept."""
        reduced = copy.copy(self)
        before = [sum(kept[:i]) for i in range(len(kept))]
        gone = len(kept) - sum(kept)

        def moved(slot: int) -> int:
            if slot < 0 or slot >= len(kept):
                return slot if slot < 0 else slot - gone
            return before[slot] if kept[slot] else -1

        reduced.slots = [moved(slot) for slot in self.slots]
        reduced.pick = itemgetter(*reduced.slots)
        return reduced


def _is_castable(value: Any, dtype: torch.dtype) -> bool:
    """Whether autocast to `dtype` changes it."""
    return (
        isinstance(value, Tensor)
        and value.dtype not in (dtype, torch.float64)
        and value.is_floating_point()
    )


def _cast(values: Sequence[Any], device: str) -> Sequence[Any]:
    """As autocast does."""
    dtype = torch.get_autocast_dtype(device)
    return [value.to(dtype) if _is_castable(value, dtype) else value for value in values]


class _Kernel:
    """One pass of an op on tensors: called with the schema's arguments, tensors first.

    `pack` makes the schema's result of the list of outputs.
    """

    def __init__(
        self,
        owner: TorchOp,
        direction: int,
        names: Sequence[str],
        options: Sequence[str],
        pack: Callable[[list[Tensor]], Any],
    ) -> None:
        self.owner = owner
        self.direction = direction
        self.names = names
        self.options = options
        self.pack = pack
        self.plans: OrderedDict[Any, _Prepared] = OrderedDict()
        self.captured: set[_Prepared] = set()

    def __call__(self, *arguments: Any) -> Any:
        tensors, options = arguments[: len(self.names)], arguments[len(self.names) :]
        given = [tensor for tensor in tensors if tensor is not None]
        return self.run(self.prepare(tensors, options), given)

    def prepare(self, tensors: Sequence[Any], options: Sequence[Any]) -> _Prepared:
        threads = torch.get_num_threads() if tensors[0].is_cpu else 0
        key = (
            threads,
            options,
            *[
                None if t is None else (t.dtype, t.shape, t.stride(), t.get_device())
                for t in tensors
            ],
        )
        prepared = self.plans.get(key)
        if prepared is None:
            prepared = self._prepare(tensors, options, threads)
            if len(self.plans) >= _MAX_PLANS:
                self.plans.popitem(last=False)  # in one step, as other threads add theirs
            self.plans[key] = prepared
        return prepared

    def run(self, prepared: _Prepared, given: Sequence[Tensor]) -> Any:
        # The host cost of every call is here: what depends on the problem alone is in _prepare.
        device = prepared.device
        if device >= 0 and _current_device() != device:
            with torch.cuda.device(device):
                return self.run(prepared, given)
        outputs = [*starmap(prepared.empty, prepared.layouts)]
        addresses = [*map(_data_ptr, given), *map(_data_ptr, outputs)]
        if prepared.allocates_workspace:
            workspace = align(addresses.pop())
        else:
            workspace = thread_memory.address if device < 0 else 0
        addresses.append(0)
        stream = 0 if device < 0 else _current_stream(device)
        if prepared.has_tables and torch.cuda.is_current_stream_capturing():
            self.captured.add(prepared)  # the graph will read the plan's tables
        prepared.plan.run_pointers(
            prepared.pick(addresses), stream, workspace, prepared.workspace_bytes
        )
        if prepared.allocates_workspace:
            outputs.pop()
        return self.pack(outputs)

    def _prepare(self, tensors: Sequence[Any], values: Sequence[Any], threads: int) -> _Prepared:
        device = tensors[0].device
        given, options = self._named(tensors, values)
        names, shapes = self.outputs(given, options)
        kind = CPU if device.type == "cpu" else Device(2, device.index)
        plan = self._plan(given, options, zip(names, shapes), kind, threads)
        inputs = [name for name in self.names if given[name] is not None]
        places = {name: i for i, name in enumerate([*inputs, *names])}
        slots = [places.get(name, -1) for name in self.owner.op.tensors]
        has_tables = device.type == "cuda" and bool(options.get("layout"))
        return _Prepared(plan, shapes, device, slots, has_tables)

    def _plan(
        self,
        given: Given,
        options: Mapping[str, Any],
        outputs: Iterable[tuple[str, Shape]],
        device: Device,
        threads: int,
    ) -> NativePlan:
        op = self.owner.op
        specs: dict[str, Spec | None] = {
            name: _spec(op, name, tensor) for name, tensor in given.items() if tensor is not None
        }
        for name, (shape, dtype) in outputs:
            specs[name] = Spec(_DTYPES[dtype], tuple(shape), _row_major(shape))
        if self.direction == BACKWARD:
            for name, like in self.owner.like.items():
                specs.setdefault(name, specs[like])
        fields = {**options, **self.owner.constants}
        fields.pop("needs", None)
        if identifier := fields.pop("layout", None):
            fields["layout"] = BlockLayout.find(identifier)
        return NativePlan(op, self.direction, specs, fields, device, threads)

    def _named(
        self, tensors: Sequence[Any], options: Sequence[Any]
    ) -> tuple[Given, dict[str, Any]]:
        device = tensors[0].device
        for name, tensor in zip(self.names, tensors):
            if tensor is not None and tensor.device != device:
                message = f"expected a tensor on {device}, got {tensor.device}"
                raise ValueError(f"{self.owner.op.name}: {name}: {message}")
        return dict(zip(self.names, tensors)), dict(zip(self.options, options))

    def outputs(
        self, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Sequence[str], Sequence[Shape]]:
        """Names and shapes of what this pass computes."""
        if self.direction == FORWARD:
            return self.owner.outputs, self.owner.shapes(given, options)
        names, shapes = [], []
        for bit, (source, gradient) in enumerate(self.owner.gradients.items()):
            if options["needs"] >> bit & 1:
                like = given[self.owner.like.get(source, source)]
                names.append(gradient)
                shapes.append((like.shape, like.dtype))
        return names, shapes

    def fold(self, *arguments: Any) -> tuple[int, Sequence[str]] | None:
        given = dict(zip(self.names, arguments))
        options = dict(zip(self.options, arguments[len(self.names) :]))
        dim = self.owner.fold(given, options)
        indices = self.owner.indices
        return None if dim is None else (dim, [name for name in self.names if name not in indices])

    def casts(self, tensors: Sequence[Any]) -> bool:
        if not self.owner.cast or self.direction != FORWARD or not isinstance(tensors[0], Tensor):
            return False
        device = tensors[0].device.type
        if device not in _DEVICES or not torch.is_autocast_enabled(device):
            return False
        dtype = torch.get_autocast_dtype(device)
        return any([_is_castable(tensor, dtype) for tensor in tensors])

    def autocast(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return _cast(tensors, tensors[0].device.type) if self.casts(tensors) else tensors

    def fake(self, *arguments: Any) -> Any:
        count = len(self.names)
        given, options = self._named(arguments[:count], arguments[count:])
        first: Tensor = arguments[0]
        names, shapes = self.outputs(given, options)
        tensors = [tensor for tensor in given.values() if tensor is not None]
        if first.is_meta and all(isinstance(n, int) for tensor in tensors for n in tensor.shape):
            # Not a compiler's, with symbols for sizes: refused as on the CPU.
            self._plan(given, options, zip(names, shapes), CPU, 1)
        return self.pack([first.new_empty(shape, dtype=dtype) for shape, dtype in shapes])


class TorchOp:
    """A differentiable operator over one op of pullback.h.

    inputs     tensors in the order of the schema; those with a "?" are optional, the first is not
    options    fields of the problem in the order of the schema, "type name"
    outputs    names of the outputs; upstream: the names of their gradients
    shapes     (inputs by name, options by name) -> shape and dtype of every output
    reads      what the backward pass reads of inputs and outputs
    unread     (options by name) -> those of `reads` that this problem's backward pass does not read
    gradients  input -> name of its gradient
    like       tensors that the backward problem describes but does not read -> one of equal layout
    constants  fields of the problem with fixed values
    fold       (tensors by name, options by name) -> the dimension in which a batch of all tensors
               but `indices` may be laid out to make one problem of many, or None
    indices    tensors that such problems share
    cast       whether autocast applies
    """

    def __init__(
        self,
        name: str,
        op: Op,
        *,
        inputs: Sequence[str],
        options: Sequence[str],
        outputs: Sequence[str],
        shapes: Shapes,
        upstream: Sequence[str] = (),
        reads: Sequence[str] = (),
        unread: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
        gradients: Mapping[str, str] | None = None,
        like: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        fold: Callable[[Given, Given], int | None] = lambda given, options: None,
        indices: Sequence[str] = (),
        cast: bool = False,
    ) -> None:
        self.name, self.op, self.outputs, self.shapes = name, op, outputs, shapes
        self.inputs = [entry.rstrip("?") for entry in inputs]
        self.gradients = dict(gradients or {})
        self.like = dict(like or {})
        self.constants = dict(constants or {})
        self.fold, self.indices, self.cast = fold, indices, cast
        self.reads, self.unread, self.upstream = reads, unread, upstream
        self.options = [option.split()[1] for option in options]

        tensors = [
            f"Tensor{'?' if entry.endswith('?') else ''} {entry.rstrip('?')}" for entry in inputs
        ]
        results = ", ".join(f"Tensor {output}" for output in outputs)
        schema = f"({', '.join([*tensors, *options])}) -> ({results})"
        pack = itemgetter(0) if len(outputs) == 1 else tuple
        kernel = _Kernel(self, FORWARD, self.inputs, self.options, pack)
        operator = self.operator = define(name, schema, kernel)
        self.call: Callable[..., Any] = lambda tensors, options: operator(*tensors, *options)
        if self.gradients:
            backward_calls = self._define_backward(options)
            self.call_backward = backward_calls.call
            self.call = differentiate(name, operator, kernel, Derivation(self, backward_calls)).call
        if cast:
            for device in _DEVICES:
                library.impl(name, self._autocast(device), f"Autocast{device.upper()}")

    def _define_backward(self, options: Sequence[str]) -> Calls:
        # The first gradient of an output leads: it is always given, and tells the device.
        names = [*self.upstream, *self.reads]
        first, *others = names
        tensors = [f"Tensor {first}", *[f"Tensor? {other}" for other in others]]
        schema = f"({', '.join([*tensors, *options, 'int needs'])}) -> Tensor[]"
        kernel = _Kernel(self, BACKWARD, names, [*self.options, "needs"], list)
        name = f"{self.name}_backward"
        operator = define(name, schema, kernel)

        def refuse_batches(*arguments: Any) -> NoReturn:
            raise NotImplementedError(
                f"{self.op.name}: batches of gradients (is_grads_batched, vectorize=True) are not "
                "implemented; use torch.func.vmap, or torch.func.jacrev"
            )

        # The key of the vmap before torch.func's, which takes no lists.
        library.impl(name, refuse_batches, "Batched")
        return differentiate(name, operator, kernel, NoDerivation(self.op.name))

    def _autocast(self, device: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            cast = _cast(arguments, device)
            with torch.autocast(device, enabled=False):
                return self.operator(*cast)

        return kernel

"""Makes PyTorch operators, ``torch.ops.pullback.<name>`` and ``<name>_backward``, of an op.

`TorchOp` makes both from a table (_torch_ops.py): schema, kernel, fake kernel, derivative, vmap and
autocast rules. Kernels run on the current stream with outputs and workspace from torch's allocator,
and never wait. Plans are kept by problem, since a training step repeats the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Callable, NoReturn

import torch
from torch import Tensor

from ._native import (
    BACKWARD,
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
from ._torch_dispatch import KnownCall, define, differentiate, library
from .sparsity import BlockLayout

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

_MAX_PLANS = 4096
_empty_like, _data_ptr = torch.empty_like, Tensor.data_ptr


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _spec(op: Op, name: str, tensor: Tensor) -> Spec:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        names = ", ".join(str(known) for known in _DTYPES)
        raise ValueError(f"{op.name}: {name}: expected dtype {names}, got {tensor.dtype}")
    return Spec(dtype, tuple(tensor.shape), tensor.stride())


# Places of inputs and outputs, and what is saved for the backward pass instead of them.
StandIns = Sequence[tuple[int, Any]]


class _Prepared:
    """A plan, what to allocate for it, and where each pointer of its struct comes from."""

    __slots__ = (
        "allocates_workspace",
        "device",
        "models",
        "pick",
        "plan",
        "repeats",
        "stand_ins",
        "workspace_bytes",
    )

    def __init__(
        self,
        plan: NativePlan,
        shapes: Sequence[Shape],
        tensors: Sequence[Any],
        slots: Sequence[int],
        stand_ins: StandIns,
    ) -> None:
        first: Tensor = tensors[0]
        self.plan = plan
        self.device = first.get_device()  # -1: the CPU
        self.stand_ins = stand_ins
        # Backward passes of a forward pass, by what they need and get.
        self.repeats: dict[Any, tuple[KnownCall, Callable[[Sequence[Any]], Any]]] = {}
        self.workspace_bytes = plan.workspace_bytes
        # Outputs and workspace without their memory, as empty_like is quicker than new_empty.
        self.models = [first.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
        self.allocates_workspace = self.workspace_bytes > (SMALL_WORKSPACE if first.is_cpu else 0)
        if self.allocates_workspace:
            size = self.workspace_bytes + WORKSPACE_ALIGNMENT
            self.models.append(first.new_empty(size, dtype=torch.uint8))
        for model in self.models:
            model.untyped_storage().resize_(0)
        # Of the addresses of given inputs and outputs, and a last 0, those of the op's tensors.
        self.pick = itemgetter(*slots)


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
        self.plans: dict[Any, _Prepared] = {}

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
                self.plans.pop(next(iter(self.plans)), None)
            self.plans[key] = prepared
        return prepared

    def run(self, prepared: _Prepared, given: Sequence[Tensor]) -> Any:
        # The host cost of every call is here: what depends on the problem alone is in _prepare.
        outputs = list(map(_empty_like, prepared.models))
        addresses = [*map(_data_ptr, given), *map(_data_ptr, outputs)]
        device = prepared.device
        if prepared.allocates_workspace:
            workspace = align(addresses.pop())
        else:
            workspace = thread_memory.address if device < 0 else 0
        addresses.append(0)
        stream = 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)
        prepared.plan.run_pointers(
            prepared.pick(addresses), stream, workspace, prepared.workspace_bytes
        )
        if prepared.allocates_workspace:
            outputs.pop()
        return self.pack(outputs)

    def _prepare(self, tensors: Sequence[Any], values: Sequence[Any], threads: int) -> _Prepared:
        op, device = self.owner.op, tensors[0].device
        given, options = self._named(tensors, values)
        names, shapes = self.outputs(given, options)
        specs: dict[str, Spec | None] = {
            name: _spec(op, name, tensor) for name, tensor in given.items() if tensor is not None
        }
        for name, (shape, dtype) in zip(names, shapes):
            specs[name] = Spec(_DTYPES[dtype], tuple(shape), _row_major(shape))
        if self.direction == BACKWARD:
            for name, like in self.owner.like.items():
                specs.setdefault(name, specs[like])
        options.pop("needs", None)
        options.update(self.owner.constants)
        if "layout" in options:
            identifier = options["layout"]
            options["layout"] = BlockLayout.find(identifier) if identifier else None
        kind = Device(1, 0) if device.type == "cpu" else Device(2, device.index)
        plan = NativePlan(op, self.direction, specs, options, kind, threads)
        inputs = [name for name in self.names if given[name] is not None]
        places = {name: i for i, name in enumerate([*inputs, *names])}
        slots = [places.get(name, -1) for name in op.tensors]
        with torch.inference_mode(False):  # as these serve calls that are differentiated, too
            stand_ins = self.owner.stand_ins(tensors, values) if self.direction == FORWARD else ()
        return _Prepared(plan, shapes, tensors, slots, stand_ins)

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

    def fake(self, *arguments: Any) -> Any:
        count = len(self.names)
        given, options = self._named(arguments[:count], arguments[count:])
        first: Tensor = arguments[0]
        _, shapes = self.outputs(given, options)
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
        self.fold, self.indices = fold, indices
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
        self.call = lambda tensors, options: operator(*tensors, *options)
        if self.gradients:
            known = [*self.inputs, *self.outputs]
            self._read = itemgetter(*[known.index(name) for name in reads])
            self._gradient_places = [self.inputs.index(source) for source in self.gradients]
            self._layout_place = self.options.index("layout") if "layout" in self.options else None
            self._define_backward(options)
            self.call = differentiate(self.operator, kernel, self._setup, self._backward).call
        if cast:
            for device in ("CPU", "CUDA"):
                library.impl(name, self._autocast(device.lower()), f"Autocast{device}")

    def _define_backward(self, options: Sequence[str]) -> None:
        # The first gradient of an output leads: it is always given, and tells the device.
        names = [*self.upstream, *self.reads]
        first, *others = names
        tensors = [f"Tensor {first}", *[f"Tensor? {other}" for other in others]]
        schema = f"({', '.join([*tensors, *options, 'int needs'])}) -> Tensor[]"
        kernel = _Kernel(self, BACKWARD, names, [*self.options, "needs"], list)
        operator = define(f"{self.name}_backward", schema, kernel)

        def refuse(ctx: Any, *gradients: Any) -> NoReturn:
            raise NotImplementedError(f"{self.name}: second derivatives are not implemented")

        self._backward_calls = differentiate(operator, kernel, lambda *_: None, refuse)
        self.call_backward = self._backward_calls.call

    def stand_ins(self, tensors: Sequence[Any], options: Sequence[Any]) -> StandIns:
        """Of what the backward pass does not read, inputs leave their shapes behind."""
        found: list[tuple[int, Any]] = []
        for name in self.unread(dict(zip(self.options, options))) if self.unread else ():
            if name in self.inputs:
                place = self.inputs.index(name)
                kept = tensors[place]
                found.append((place, kept.new_empty(()).expand(kept.shape)))
            else:
                found.append((len(self.inputs) + self.outputs.index(name), None))
        return found

    def _setup(
        self,
        ctx: Any,
        tensors: Sequence[Any],
        options: Sequence[Any],
        outputs: Sequence[Any],
        prepared: _Prepared | None,
    ) -> None:
        known = [*tensors, *outputs]
        ctx.options, ctx.prepared = options, prepared
        if self.unread is not None:
            stand_ins = prepared.stand_ins if prepared else self.stand_ins(tensors, options)
            for place, stand_in in stand_ins:
                known[place] = stand_in
        ctx.save_for_backward(*self._read(known))
        ctx.set_materialize_grads(False)
        upstream = len(self.upstream)
        if len(outputs) > upstream:
            ctx.mark_non_differentiable(*outputs[upstream:])
        if self._layout_place is not None and options[self._layout_place]:
            ctx.layout = BlockLayout.find(options[self._layout_place])  # alive until then

    def _backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        prepared = None if torch.compiler.is_compiling() else ctx.prepared
        upstream, saved = gradients[: len(self.upstream)], ctx.saved_tensors
        # With the layouts that `prepared` stands for, these settle what is None.
        kind = needed, upstream[-1] is None
        if prepared is not None and (repeat := prepared.repeats.get(kind)):
            known, spread = repeat
            found = self._backward_calls.repeat(known, (*upstream, *saved))
            if found is not None:
                return spread((*found, None))
        needs, spread = self._route(needed)
        if needs == 0 or all(given is None for given in upstream):
            return (None,) * len(needed)
        if upstream[0] is None:
            out = saved[self.reads.index(self.outputs[0])]
            upstream = (out.new_zeros(()).expand(out.shape), *upstream[1:])
        arguments = (*upstream, *saved), (*ctx.options, needs)
        found = self.call_backward(*arguments)
        if prepared is not None:
            known = self._backward_calls.find(*arguments)
            if known is not None:
                prepared.repeats[kind] = known, spread
        return spread((*found, None))

    def _route(self, needed: Sequence[bool]) -> tuple[int, Callable[[Sequence[Any]], Any]]:
        """The backward pass's option `needs`, and how its results, followed by a None, become one
        for each argument, of which the tensors are the last."""
        before = len(needed) - len(self.inputs)
        places = [place for place in self._gradient_places if needed[before + place]]
        needs = sum(1 << self._gradient_places.index(place) for place in places)
        slots = [places.index(i) if i in places else -1 for i in range(-before, len(self.inputs))]
        return needs, itemgetter(*slots)

    def _autocast(self, device: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                floats = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(dtype) if floats and value.dtype != torch.float64 else value

            with torch.autocast(device, enabled=False):
                return self.operator(*map(cast, arguments))

        return kernel

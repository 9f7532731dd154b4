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
    WORKSPACE_ALIGNMENT,
    Device,
    NativePlan,
    Op,
    Spec,
)
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

_library = torch.library.Library("pullback", "DEF")

# Shape and dtype of an output.
Shape = tuple[Sequence[Any], torch.dtype]
Shapes = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Shape]]

_MAX_PLANS = 4096


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


class _Prepared:
    """A plan, what to allocate for it, and where each pointer of its struct comes from."""

    __slots__ = ("pick", "plan", "shapes", "workspace_bytes")

    def __init__(self, plan: NativePlan, shapes: Sequence[Shape], slots: Sequence[int]) -> None:
        self.plan = plan
        self.shapes = [(tuple(shape), dtype) for shape, dtype in shapes]
        # Of the addresses of inputs and outputs, and a last 0, those of the op's tensors.
        self.pick = itemgetter(*slots)
        self.workspace_bytes = plan.workspace_bytes


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
        # The host cost of every call is here: what depends on the problem alone is in _prepare.
        count = len(self.names)
        tensors = arguments[:count]
        first: Tensor = tensors[0]
        on_cpu = first.is_cpu
        threads = torch.get_num_threads() if on_cpu else 0
        key = (
            first.device,
            threads,
            arguments[count:],
            *[None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors],
        )
        prepared = self.plans.get(key)
        if prepared is None:
            prepared = self._prepare(arguments, tensors, first.device, threads)
            if len(self.plans) >= _MAX_PLANS:
                self.plans.pop(next(iter(self.plans)), None)
            self.plans[key] = prepared

        outputs = [first.new_empty(shape, dtype=dtype) for shape, dtype in prepared.shapes]
        addresses = [0 if t is None else t.data_ptr() for t in (*tensors, *outputs)]
        addresses.append(0)
        size = prepared.workspace_bytes
        workspace = 0
        if size > 0:
            memory = first.new_empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8)
            workspace = -(-memory.data_ptr() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        stream = 0 if on_cpu else torch._C._cuda_getCurrentRawStream(first.get_device())
        prepared.plan.run_pointers(prepared.pick(addresses), stream, workspace, size)
        return self.pack(outputs)

    def _prepare(
        self, arguments: Sequence[Any], tensors: Sequence[Any], device: torch.device, threads: int
    ) -> _Prepared:
        op = self.owner.op
        given = dict(zip(self.names, tensors))
        options = dict(zip(self.options, arguments[len(self.names) :]))
        for name, tensor in given.items():
            if tensor is not None and tensor.device != device:
                raise ValueError(
                    f"{op.name}: {name}: expected a tensor on {device}, got {tensor.device}"
                )
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
        places = {name: i for i, name in enumerate([*self.names, *names])}
        slots = [places.get(name, -1) for name in op.tensors]
        return _Prepared(plan, shapes, slots)

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

    def fake(self, *arguments: Any) -> Any:
        given = dict(zip(self.names, arguments))
        options = dict(zip(self.options, arguments[len(self.names) :]))
        first: Tensor = arguments[0]
        _, shapes = self.outputs(given, options)
        return self.pack([first.new_empty(shape, dtype=dtype) for shape, dtype in shapes])


def _define(name: str, schema: str, kernel: _Kernel) -> Any:
    """An operator without derivative; its overload."""
    # Any strides do, so the compiler may choose those of intermediate tensors.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    _library.define(name + schema, tags=tags)
    _library.impl(name, kernel.__call__, "CPU")
    _library.impl(name, kernel.__call__, "CUDA")
    torch.library.register_fake(f"pullback::{name}", kernel.fake, lib=_library)
    operator = getattr(torch.ops.pullback, name).default

    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        results = []
        for i in range(info.batch_size):
            row = [a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims)]
            results.append(operator(*row))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = [torch.stack(parts) for parts in zip(*results)]
        kind = type(results[0])
        return kind(stacked), kind([0] * len(stacked))

    torch.library.register_vmap(f"pullback::{name}", vmap, lib=_library)
    return operator


_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _differentiate(
    operator: Any, kernel: _Kernel, setup: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """What torch.library.register_autograd does, at half its cost, and for torch.func too:
    returns the operator as a function that is also differentiable there.

    setup(ctx, tensors, options, outputs) gets a sequence of outputs even if there is one;
    backward(ctx, needed, *gradients) is told which tensors need one, and returns those of all.
    """
    below, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    redispatch = operator.redispatch
    count = len(kernel.names)

    def compute(keyset: Any, arguments: Sequence[Any]) -> Any:
        rest = keyset & after_autograd
        # Without a mode or transform in between, the dispatcher would come back to our kernel,
        # after translating all arguments to C++ and back.
        if rest.highestPriorityTypeId() in _BACKENDS:
            return kernel(*arguments)
        with below():
            return redispatch(rest, *arguments)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, options: Any, *tensors: Any) -> Any:
            results = compute(keyset, (*tensors, *options))
            setup(ctx, tensors, options, (results,) if isinstance(results, Tensor) else results)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (None, None, *backward(ctx, ctx.needs_input_grad[2:], *gradients))

    # Function.apply looks for transforms, which do not come here.
    apply = super(torch.autograd.Function, Derivative).apply

    class Transformed(torch.autograd.Function):
        """The operator for torch.func.grad and the like, which do not reach Derivative."""

        generate_vmap_rule = True

        @staticmethod
        def forward(options: Any, *tensors: Any) -> Any:
            results = operator(*tensors, *options)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            results = (output,) if isinstance(output, Tensor) else output
            setup(ctx, inputs[1:], inputs[0], results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (None, *backward(ctx, ctx.needs_input_grad[1:], *gradients))

    def autograd(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return apply(keyset, arguments[count:], *arguments[:count])
        return compute(keyset, arguments)

    _library.impl(operator._opname, autograd, "Autograd", with_keyset=True)

    def call(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return Transformed.apply(arguments[count:], *arguments[:count])
        return operator(*arguments)

    return call


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
        cast: bool = False,
    ) -> None:
        self.name, self.op, self.outputs, self.shapes = name, op, outputs, shapes
        self.inputs = [entry.rstrip("?") for entry in inputs]
        self.gradients = dict(gradients or {})
        self.like = dict(like or {})
        self.constants = dict(constants or {})
        self.reads, self.unread, self.upstream = reads, unread, upstream
        self.options = [option.split()[1] for option in options]

        tensors = [
            f"Tensor{'?' if entry.endswith('?') else ''} {entry.rstrip('?')}" for entry in inputs
        ]
        results = ", ".join(f"Tensor {output}" for output in outputs)
        schema = f"({', '.join([*tensors, *options])}) -> ({results})"
        pack = (lambda found: found[0]) if len(outputs) == 1 else tuple
        kernel = _Kernel(self, FORWARD, self.inputs, self.options, pack)
        self.operator = self.call = _define(name, schema, kernel)
        if self.gradients:
            known = [*self.inputs, *self.outputs]
            self._read_places = [known.index(name) for name in reads]
            self._gradient_places = [self.inputs.index(source) for source in self.gradients]
            self._layout_place = self.options.index("layout") if "layout" in self.options else None
            self._define_backward(options)
            self.call = _differentiate(self.operator, kernel, self._setup, self._backward)
        if cast:
            for device in ("CPU", "CUDA"):
                _library.impl(name, self._autocast(device.lower()), f"Autocast{device}")

    def _define_backward(self, options: Sequence[str]) -> None:
        # The first gradient of an output leads: it is always given, and tells the device.
        names = [*self.upstream, *self.reads]
        first, *others = names
        tensors = [f"Tensor {first}", *[f"Tensor? {other}" for other in others]]
        schema = f"({', '.join([*tensors, *options, 'int needs'])}) -> Tensor[]"
        kernel = _Kernel(self, BACKWARD, names, [*self.options, "needs"], list)
        operator = _define(f"{self.name}_backward", schema, kernel)

        def refuse(ctx: Any, needed: Any, *gradients: Any) -> NoReturn:
            raise NotImplementedError(f"{self.name}: second derivatives are not implemented")

        self.call_backward = _differentiate(operator, kernel, lambda *_: None, refuse)

    def _setup(
        self, ctx: Any, tensors: Sequence[Any], options: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        known = [*tensors, *outputs]
        ctx.options = options
        if self.unread is not None:
            for name in self.unread(dict(zip(self.options, options))):
                place = self._read_places[self.reads.index(name)]
                kept = known[place]
                # What has a gradient leaves its shape behind.
                stand_in = kept.new_empty(()).expand(kept.shape) if place < len(tensors) else None
                known[place] = stand_in
        ctx.save_for_backward(*[known[place] for place in self._read_places])
        ctx.set_materialize_grads(False)
        upstream = len(self.upstream)
        if len(outputs) > upstream:
            ctx.mark_non_differentiable(*outputs[upstream:])
        if self._layout_place is not None and options[self._layout_place]:
            ctx.layout = BlockLayout.find(options[self._layout_place])  # alive until then

    def _backward(self, ctx: Any, needed: Sequence[bool], *gradients: Any) -> tuple[Any, ...]:
        results: list[Any] = [None] * len(self.inputs)
        places = [place for place in self._gradient_places if needed[place]]
        upstream = list(gradients[: len(self.upstream)])
        if not places or all(gradient is None for gradient in upstream):
            return tuple(results)
        saved = ctx.saved_tensors
        if upstream[0] is None:
            out = saved[self.reads.index(self.outputs[0])]
            upstream[0] = out.new_zeros(()).expand(out.shape)
        needs = sum(1 << self._gradient_places.index(place) for place in places)
        found = self.call_backward(*upstream, *saved, *ctx.options, needs)
        for place, gradient in zip(places, found):
            results[place] = gradient
        return tuple(results)

    def _autocast(self, device: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                floats = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(dtype) if floats and value.dtype != torch.float64 else value

            with torch.autocast(device, enabled=False):
                return self.operator(*map(cast, arguments))

        return kernel

"""How PyTorch gets to an operator's kernel: registration, derivative, vmap, and the direct way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _known as known_calls
from ._known import KnownCall, KnownCalls, places_of_leaves, unseen

library = torch.library.Library("pullback", "DEF")


class Kernel(Protocol):
    """One pass of an op, called with its schema's arguments, of which `names` are tensors."""

    names: Sequence[str]

    def __call__(self, *arguments: Any) -> Any: ...

    def prepare(self, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        """What such calls have in common, of the schema's tensors and the rest of its arguments."""

    def run(self, prepared: Any, given: Sequence[Tensor]) -> Any:
        """Computes, of the tensors that are not None."""

    def casts(self, tensors: Sequence[Any]) -> bool:
        """Whether autocast is to change any of the schema's tensors."""

    def autocast(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """What it makes of them."""

    def fake(self, *arguments: Any) -> Any: ...

    def fold(self, *arguments: Any) -> tuple[int, Sequence[str]] | None:
        """Where one call on longer tensors does what many calls do: the dimension in which a batch
        of the tensors named may be laid out, if no other tensor differs within it."""


def define(name: str, schema: str, kernel: Kernel) -> Any:
    """An operator without derivative; its overload."""
    # Any strides do, so the compiler may choose those of intermediate tensors.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(name + schema, tags=tags)
    library.impl(name, kernel.__call__, "CPU")
    library.impl(name, kernel.__call__, "CUDA")
    torch.library.register_fake(f"pullback::{name}", kernel.fake, lib=library)
    operator = getattr(torch.ops.pullback, name).default

    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        if info.batch_size == 0:
            # The shapes are those of one item.
            one = [
                a if d is None else a.new_zeros((*a.shape[:d], 1, *a.shape[d + 1 :]))
                for a, d in zip(arguments, in_dims)
            ]
            results, dims = vmap(info._replace(batch_size=1), in_dims, *one)
            if isinstance(results, Tensor):
                return results.narrow(dims, 0, 0), dims
            return type(results)([r.narrow(d, 0, 0) for r, d in zip(results, dims)]), dims

        def row(i: int) -> Any:
            return [a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims)]

        def folded(tensor: Any, place: Any) -> Any:
            if tensor is None:
                return None
            if place is None:
                # Copies, as what was an output of the forward pass may not overlap itself.
                return torch.cat([tensor] * info.batch_size, dim)
            return tensor.movedim(place, dim).flatten(dim, dim + 1)

        dim, names = kernel.fold(*row(0)) or (0, ())
        if names and all(d is None or name in names for d, name in zip(in_dims, kernel.names)):
            named = zip(arguments, in_dims, kernel.names)
            tensors = [folded(a, d) if name in names else a for a, d, name in named]
            results = operator(*tensors, *arguments[len(tensors) :])
            if isinstance(results, Tensor):
                return results.unflatten(dim, (info.batch_size, -1)), dim
            stacked = [result.unflatten(dim, (info.batch_size, -1)) for result in results]
        else:
            rows = [operator(*row(i)) for i in range(info.batch_size)]
            dim, results = 0, rows[0]
            if isinstance(results, Tensor):
                return torch.stack(rows), dim
            stacked = [torch.stack(parts) for parts in zip(*rows)]
        kind = type(results)
        return kind(stacked), kind([dim] * len(stacked))

    torch.library.register_vmap(f"pullback::{name}", vmap, lib=library)
    return operator


def _tangent(tensor: Any) -> bool:
    """Which autograd would drop without a word."""
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_tangents(name: str) -> NoReturn:
    raise NotImplementedError(f"{name}: forward-mode derivatives are not implemented")


class Calls(NamedTuple):
    """An operator's calls."""

    # Of tensors and options; with True after them, only the first output.
    call: Callable[..., Any]
    # What the last call is known as, of its tensors and options, by those that change from one such
    # call to the next alone; None if it is not known.
    know: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], KnownCall | None]
    # A known call again, on these, or None if it is not the same.
    repeat: Callable[[KnownCall, Sequence[Any]], Any]


class Derivation(Protocol):
    """How a pass of an op is differentiated."""

    def record(
        self, tensors: Sequence[Any], options: Sequence[Any], places: Sequence[int | None]
    ) -> Any:
        """What calls of one kind leave to their backward pass beside tensors. `places` tells which
        of the tensors each argument of the differentiated function is, or None."""

    def keep(self, ctx: Any, record: Any, tensors: Sequence[Any], results: Any, first: bool) -> Any:
        """Leaves to the backward pass what it needs; gives the results, or the first alone."""

    def backward(self, ctx: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """One gradient for each argument of the differentiated function."""


def differentiate(name: str, operator: Any, kernel: Kernel, derivation: Derivation) -> Calls:
    way = _differentiate if known_calls.available else _differentiate_publicly
    return way(name, operator, kernel, derivation)


# Names of PyTorch's own.
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


@contextmanager
def _other_levels() -> Iterator[None]:
    """Of torch.func's transforms: what is forward to one has derivatives in those further out,
    which Functions turn off."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def _by_dispatcher(
    name: str, operator: Any, kernel: Kernel, derivation: Derivation
) -> Callable[..., Any]:
    """`Calls.call`, also under torch.func.grad and the like, which know autograd by Functions."""
    count = len(kernel.names)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(options: Any, *tensors: Any) -> Any:
            results = operator(*tensors, *options)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            options, *tensors = inputs
            record = derivation.record(tensors, options, (None, *range(count)))
            derivation.keep(ctx, record, tensors, output, False)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            _refuse_tangents(name)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return derivation.backward(ctx, gradients)

    def call(tensors: Sequence[Any], options: Sequence[Any], first: bool = False) -> Any:
        transformed = False
        if not torch.compiler.is_compiling():
            if getattr(forward_ad, "_current_level", 0) >= 0 and any(map(_tangent, tensors)):
                _refuse_tangents(name)
            transformed = transforms_active()
        if transformed:
            # What is saved has to be what the operator computes with.
            results = Transformed.apply(options, *kernel.autocast(tensors))
        else:
            results = operator(*tensors, *options)
        return results[0] if first else results

    return call


def _differentiate_publicly(
    name: str, operator: Any, kernel: Kernel, derivation: Derivation
) -> Calls:
    count = len(kernel.names)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, options = inputs[:count], inputs[count:]
        record = derivation.record(tensors, options, [*range(count), *[None for _ in options]])
        derivation.keep(ctx, record, tensors, output, False)

    def backward(ctx: Any, *gradients: Any) -> Any:
        listed = isinstance(gradients[0], (list, tuple))
        return derivation.backward(ctx, gradients[0] if listed else gradients)

    full_name = f"pullback::{name}"
    torch.library.register_autograd(full_name, backward, setup_context=setup, lib=library)
    call = _by_dispatcher(name, operator, kernel, derivation)
    return Calls(call, lambda tensors, options, given: None, lambda known, given: None)


def _differentiate(name: str, operator: Any, kernel: Kernel, derivation: Derivation) -> Calls:
    """What register_autograd does at half its cost, and calls that leave the dispatcher out."""
    function_modes, dispatch_modes = known_calls.function_modes, known_calls.dispatch_modes
    profiled = known_calls.profiled
    count = len(kernel.names)
    calls = KnownCalls()
    keep = derivation.keep

    def function(forward: Callable[..., Any]) -> Callable[..., Any]:
        """A differentiable one of a first argument, and tensors that require gradients."""

        def backward(ctx: Any, *gradients: Any) -> Any:
            return derivation.backward(ctx, gradients)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        own: Any = type(name, (torch.autograd.Function,), methods)
        # Function.apply looks for transforms, which do not come here, and a node's for what else
        # may be its derivative.
        if hasattr(own, "_backward_cls"):
            own._backward_cls.apply = backward
        return getattr(super(torch.autograd.Function, own), "apply", own.apply)

    def forward_known(ctx: Any, job: Any, *leaves: Tensor) -> Any:
        known, tensors, given, first = job
        results = kernel.run(known.prepared, given)
        return keep(ctx, known.record, tensors, results, first)

    def forward_dispatched(ctx: Any, job: Any, *leaves: Tensor) -> Any:
        keyset, tensors, options, places = job
        with _other_levels() if transforms_active() else nullcontext():
            results = compute(keyset, tensors, options)
        record = derivation.record(tensors, options, (None, *places))
        return keep(ctx, record, tensors, results, False)

    apply_known, apply_dispatched = function(forward_known), function(forward_dispatched)

    def compute(keyset: Any, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        rest = keyset & known_calls.after_autograd
        if rest.highestPriorityTypeId() in known_calls.BACKENDS:
            return kernel(*tensors, *options)
        with known_calls.below_autograd():
            return operator.redispatch(rest, *tensors, *options)

    def autograd(keyset: Any, *arguments: Any) -> Any:
        tensors, options = arguments[:count], arguments[count:]
        if forward_ad._current_level >= 0 and any(map(_tangent, tensors)):
            _refuse_tangents(name)
        if torch.is_grad_enabled() and (places := places_of_leaves(tensors)):
            job = keyset, tensors, options, places
            with known_calls.one_level() if transforms_active() else nullcontext():
                return apply_dispatched(job, *[tensors[place] for place in places])
        return compute(keyset, tensors, options)

    library.impl(name, autograd, "Autograd", with_keyset=True)

    def call_by_dispatcher(
        tensors: Sequence[Any], options: Sequence[Any], first: bool = False
    ) -> Any:
        results = operator(*tensors, *options)
        return results[0] if first else results

    def call(tensors: Sequence[Any], options: Sequence[Any], first: bool = False) -> Any:
        if (
            not torch.compiler.is_compiling()
            and forward_ad._current_level < 0
            and function_modes() == 0
            and dispatch_modes() == 0
            and not profiled()
        ):
            if kernel.casts(tensors):
                if not unseen(tensors):
                    return call_by_dispatcher(tensors, options, first)
                tensors = kernel.autocast(tensors)
            found = calls.find(tensors, options)
            if found is None and unseen(tensors):
                found = learn(tensors, options)
            if found is not None:
                known, given = found
                if known.leaves is not None and torch.is_grad_enabled():
                    return apply_known((known, tensors, given, first), *known.leaves(tensors))
                results = kernel.run(known.prepared, given)
                return results[0] if first else results
        return call_by_dispatcher(tensors, options, first)

    def learn(tensors: Sequence[Any], options: Sequence[Any]) -> tuple[KnownCall, Sequence[Tensor]]:
        prepared = kernel.prepare(tensors, options)
        record = derivation.record(tensors, options, (None, *places_of_leaves(tensors)))
        known = known_calls.know(tensors, options, prepared, record)
        calls.add(known)
        return known, known.pick(tensors)

    def know(
        tensors: Sequence[Any], options: Sequence[Any], changing: Sequence[Any]
    ) -> KnownCall | None:
        found = calls.find(tensors, options)
        if found is None:
            return None
        kept = [any(tensor is other for other in changing) for tensor in found[1]]
        known = known_calls.know(changing, (), found[0].prepared.without(kept))
        return None if known.twins else known

    def repeat(known: KnownCall, given: Sequence[Any]) -> Any:
        if (
            known.check(*given)
            and known.threads == torch.get_num_threads()
            and forward_ad._current_level < 0
            and not (known.leaves is not None and torch.is_grad_enabled())
            and function_modes() == 0
            and dispatch_modes() == 0
            and not profiled()
        ):
            return kernel.run(known.prepared, given)
        return None

    return Calls(call, know, repeat)

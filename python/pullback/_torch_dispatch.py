"""How PyTorch gets to an operator's kernel: registration, derivative, vmap, and the direct way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any, Callable, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

library = torch.library.Library("pullback", "DEF")
_core: Any = torch._C  # typed in part


class Kernel(Protocol):
    """One pass of an op, called with its schema's arguments, of which `names` are tensors."""

    names: Sequence[str]

    def __call__(self, *arguments: Any) -> Any: ...

    def prepare(self, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        """What such calls have in common, of the schema's tensors and the rest of its arguments."""

    def run(self, prepared: Any, given: Sequence[Tensor]) -> Any:
        """Computes, of the tensors that are not None."""

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
        def row(i: int) -> Any:
            return [a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims)]

        def folded(tensor: Any, place: Any) -> Any:
            if tensor is None:
                return None
            if place is None:
                sizes = [*tensor.shape[:dim], info.batch_size, *tensor.shape[dim:]]
                return tensor.unsqueeze(dim).expand(sizes).flatten(dim, dim + 1)
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


_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _keys(*names: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


# The dispatch keys of tensors that are nothing but memory, with autograd and made for inference.
_PLAIN_KEYS = {
    _keys(name, f"Autocast{name}", *others).raw_repr()
    for name in ("CPU", "CUDA")
    for others in ((f"Autograd{name}", "ADInplaceOrView"), ())
}
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def _thread_keys(
    include: Any = torch._C._dispatch_tls_local_include_set,
    exclude: Any = torch._C._dispatch_tls_local_exclude_set,
) -> tuple[int, int]:
    """What modes, transforms, autocast and tracers make of a thread's dispatch keys."""
    return include().raw_repr(), exclude().raw_repr()


# Those of a thread that has none of them, as a new one, but for inference mode. Where torch knows
# names of dimensions, autograd leaves them aside.
with ThreadPoolExecutor(1) as _new_thread:
    _usual = _new_thread.submit(_thread_keys).result()
    _inferring = _new_thread.submit(torch.inference_mode()(_thread_keys)).result()
_named = torch._C._parse_dispatch_key("Named")
_nameless = torch._C.DispatchKeySet(_named).raw_repr() if _named is not None else 0
_IDLE_THREADS = {
    (included, excluded | others)
    for included, excluded in (_usual, _inferring)
    for others in (0, _nameless)
}


def _unseen(tensors: Sequence[Any], keys: Any = torch._C._dispatch_keys) -> bool:
    """Whether an operator's call on these tensors would pass through PyTorch's dispatcher to our
    kernels without being seen by anyone. Then it may be left out: translating all arguments to C++
    and back takes longer than all else that a call costs on the host."""
    if _thread_keys() not in _IDLE_THREADS:
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or keys(tensor).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


# A name of PyTorch's own, which may go: then all calls pass through the dispatcher.
_Guards: Any = getattr(getattr(_core._dynamo, "guards", None), "TensorGuards", None)
# How many calls of each pass of an op are known by their guards.
_MOST_CALLS = 8


class KnownCall(NamedTuple):
    threads: int
    options: Sequence[Any]
    types: Sequence[type]  # of the tensors, None's own where there is none
    pick: Callable[[Sequence[Any]], tuple[Tensor, ...]]  # those that are not None
    twins: Sequence[tuple[int, int]]  # places among those of the same tensor
    check: Callable[..., bool]  # takes each tensor once
    differentiable: bool
    prepared: Any


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """itemgetter makes no tuple of a single item."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


class _KnownCalls:
    """The last calls that were unseen, so that the next of their kind is told with little work.

    torch's own guards compare all that matters of tensors but their memory, in one call into C++:
    dtype, device, shape, strides, requires_grad, and the dispatch keys that this thread makes of
    them, which are others under any mode, transform, autocast or tracer.
    """

    def __init__(self) -> None:
        self.calls: list[KnownCall] = []
        self.oldest = 0

    def find(
        self, tensors: Sequence[Any], options: Sequence[Any]
    ) -> tuple[KnownCall, Sequence[Tensor]] | None:
        """The call, and its tensors that are not None."""
        now, types = torch.get_num_threads(), tuple(map(type, tensors))
        for known in self.calls:
            threads, known_options, known_types, pick, twins, check, _, _ = known
            if known_options == options and known_types == types and threads == now:
                given = firsts = pick(tensors)
                if twins:
                    if not all(given[i] is given[j] for i, j in twins):
                        continue
                    later = [j for _, j in twins]
                    firsts = tuple([x for i, x in enumerate(given) if i not in later])
                if check(*firsts):
                    return known, given
        return None

    def add(
        self, tensors: Sequence[Any], options: Sequence[Any], prepared: Any
    ) -> tuple[KnownCall, Sequence[Tensor]]:
        pick = _picker([i for i, tensor in enumerate(tensors) if tensor is not None])
        given = pick(tensors)
        places: dict[int, int] = {}
        twins = [(places.setdefault(id(tensor), i), i) for i, tensor in enumerate(given)]
        firsts = [given[i] for i in places.values()]
        guards = _Guards(
            *firsts,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in firsts],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in firsts],
        )
        known = KnownCall(
            torch.get_num_threads(),
            options,
            tuple(map(type, tensors)),
            pick,
            [(i, j) for i, j in twins if i != j],
            guards.check,
            any(tensor.requires_grad for tensor in firsts),
            prepared,
        )
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(known)
        else:
            self.calls[self.oldest] = known
            self.oldest = (self.oldest + 1) % _MOST_CALLS
        return known, given


def _tangent(tensor: Any) -> bool:
    """Which autograd would drop without a word."""
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


class Calls(NamedTuple):
    """An operator's calls of (tensors, options)."""

    call: Callable[[Sequence[Any], Sequence[Any]], Any]
    # What this call is known as, if it is.
    find: Callable[[Sequence[Any], Sequence[Any]], KnownCall | None]
    # A known call again, or None if it is not the same. The caller vouches for options and for the
    # tensors that are None.
    repeat: Callable[[KnownCall, Sequence[Any]], Any]


def differentiate(
    operator: Any,
    kernel: Kernel,
    setup: Callable[..., None],
    derive: Callable[..., tuple[Any, ...]],
) -> Calls:
    """What torch.library.register_autograd does, at half its cost, and for torch.func too.

    setup(ctx, tensors, options, outputs, prepared) gets a sequence of outputs even if there is one,
    and what the kernel prepared unless the dispatcher made the call; derive(ctx, *gradients)
    returns one gradient for each entry of ctx.needs_input_grad, of which those of the tensors are
    the last.
    """
    below, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    redispatch = operator.redispatch
    # Those that see calls that guards know.
    modes, profiled = torch._C._len_torch_function_stack, _core._autograd._profiler_enabled
    count = len(kernel.names)
    calls = _KnownCalls()

    def compute(keyset: Any, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        rest = keyset & after_autograd
        if rest.highestPriorityTypeId() in _BACKENDS:
            given = [tensor for tensor in tensors if tensor is not None]
            return kernel.run(kernel.prepare(tensors, options), given)
        with below():
            return redispatch(rest, *tensors, *options)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, planned: Any, options: Any, *tensors: Any) -> Any:
            prepared = None
            if planned is not None:
                prepared, given = planned
                results = kernel.run(prepared, given)
            else:
                results = compute(keyset, tensors, options)
            outputs = (results,) if isinstance(results, Tensor) else results
            setup(ctx, tensors, options, outputs, prepared)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return derive(ctx, *gradients)

    # Function.apply looks for transforms, which do not come here, and a node's for what else may be
    # its derivative.
    function: Any = super(torch.autograd.Function, Derivative)
    node: Any = Derivative._backward_cls
    apply, node.apply = function.apply, Derivative.backward

    def refuse_tangents() -> NoReturn:
        name = operator._opname
        raise NotImplementedError(f"{name}: forward-mode derivatives are not implemented")

    class Transformed(torch.autograd.Function):
        """The operator for torch.func.grad and the like, which do not reach Derivative."""

        generate_vmap_rule = True

        @staticmethod
        def forward(options: Any, *tensors: Any) -> Any:
            results = operator(*tensors, *options)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            outputs = (output,) if isinstance(output, Tensor) else output
            setup(ctx, inputs[1:], inputs[0], outputs, None)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            refuse_tangents()

        backward = staticmethod(derive)

    def autograd(keyset: Any, *arguments: Any) -> Any:
        tensors, options = arguments[:count], arguments[count:]
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return apply(keyset, None, options, *tensors)
        return compute(keyset, tensors, options)

    library.impl(operator._opname, autograd, "Autograd", with_keyset=True)

    def call(tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        if not torch.compiler.is_compiling():
            if forward_ad._current_level >= 0 and any(map(_tangent, tensors)):
                refuse_tangents()
            if _Guards and modes() == 0 and not profiled():
                found = calls.find(tensors, options)
                if found is None and _unseen(tensors):
                    found = calls.add(tensors, options, kernel.prepare(tensors, options))
                if found is not None:
                    known, given = found
                    if known.differentiable and torch.is_grad_enabled():
                        return apply(None, (known.prepared, given), options, *tensors)
                    return kernel.run(known.prepared, given)
            if torch._C._are_functorch_transforms_active():
                return Transformed.apply(options, *tensors)
        return operator(*tensors, *options)

    def find(tensors: Sequence[Any], options: Sequence[Any]) -> KnownCall | None:
        found = calls.find(tensors, options)
        return found[0] if found is not None and not found[0].twins else None

    def repeat(known: KnownCall, tensors: Sequence[Any]) -> Any:
        given = known.pick(tensors)
        if (
            known.check(*given)
            and known.threads == torch.get_num_threads()
            and not (known.differentiable and torch.is_grad_enabled())
            and modes() == 0
            and not profiled()
        ):
            return kernel.run(known.prepared, given)
        return None

    return Calls(call, find, repeat)

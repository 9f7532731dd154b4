"""How PyTorch gets to an operator's kernel: registration, derivative, vmap, and the direct way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Protocol

import torch
from torch import Tensor

library = torch.library.Library("pullback", "DEF")


class Kernel(Protocol):
    """One pass of an op, called with its schema's arguments, of which `names` are tensors."""

    names: Sequence[str]

    def __call__(self, *arguments: Any) -> Any: ...

    def run(self, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        """The same with the schema's tensors and the rest of its arguments apart."""

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


# The dispatch keys of tensors that are nothing but memory.
_PLAIN_KEYS = {
    _keys(name, f"Autograd{name}", f"Autocast{name}", "ADInplaceOrView").raw_repr()
    for name in ("CPU", "CUDA")
}
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}
_KEPT_TYPES = {*_PLAIN_TYPES, type(None)}


def _thread_keys(
    include: Any = torch._C._dispatch_tls_local_include_set,
    exclude: Any = torch._C._dispatch_tls_local_exclude_set,
) -> tuple[int, int]:
    """What modes, transforms, autocast and tracers make of a thread's dispatch keys."""
    return include().raw_repr(), exclude().raw_repr()


# Those of a thread that has none of them, as a new one. Where torch knows names of dimensions,
# autograd leaves them aside.
with ThreadPoolExecutor(1) as _new_thread:
    _included, _excluded = _new_thread.submit(_thread_keys).result()
_named = torch._C._parse_dispatch_key("Named")
_nameless = torch._C.DispatchKeySet(_named).raw_repr() if _named is not None else 0
_IDLE_THREADS = {(_included, _excluded), (_included, _excluded | _nameless)}


def _idle(profiled: Any = torch._C._autograd._profiler_enabled) -> bool:
    """Whether an operator's call on plain tensors would pass through PyTorch's dispatcher to our
    kernels without being seen by anyone. Then it may be left out: translating all arguments to C++
    and back takes longer than all else that a call costs on the host."""
    return (
        _thread_keys() in _IDLE_THREADS
        and torch._C._len_torch_function_stack() == 0
        and not profiled()
    )


def _plain(tensors: Sequence[Any], keys: Any = torch._C._dispatch_keys) -> bool:
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or keys(tensor).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


def differentiate(
    operator: Any, kernel: Kernel, setup: Callable[..., None], derive: Callable[..., Any]
) -> Callable[..., Any]:
    """What torch.library.register_autograd does, at half its cost, and for torch.func too.

    setup(ctx, tensors, options, outputs) gets a sequence of outputs even if there is one;
    derive(ctx, *gradients) returns one gradient for each entry of ctx.needs_input_grad, of which
    those of the tensors are the last. ctx.direct: the call's tensors were plain.

    Returns the operator as a function of (tensors, options, kept=()). Of the tensors that follow in
    `kept`, which a direct call saved, no more is looked at than what a hook may have made of them.
    """
    below, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    redispatch = operator.redispatch
    count = len(kernel.names)

    def compute(keyset: Any, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        if keyset is None:  # not from the dispatcher
            return kernel.run(tensors, options)
        rest = keyset & after_autograd
        if rest.highestPriorityTypeId() in _BACKENDS:
            return kernel.run(tensors, options)
        with below():
            return redispatch(rest, *tensors, *options)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, options: Any, *tensors: Any) -> Any:
            results = compute(keyset, tensors, options)
            ctx.direct = keyset is None
            setup(ctx, tensors, options, (results,) if isinstance(results, Tensor) else results)
            return tuple(results) if isinstance(results, list) else results

        backward = staticmethod(derive)

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
            ctx.direct = False
            setup(ctx, inputs[1:], inputs[0], results)

        backward = staticmethod(derive)

    def autograd(keyset: Any, *arguments: Any) -> Any:
        tensors, options = arguments[:count], arguments[count:]
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return apply(keyset, options, *tensors)
        return compute(keyset, tensors, options)

    library.impl(operator._opname, autograd, "Autograd", with_keyset=True)

    def call(tensors: Sequence[Any], options: Sequence[Any], kept: Sequence[Any] = ()) -> Any:
        if not torch.compiler.is_compiling():
            if _idle() and _plain(tensors) and _KEPT_TYPES.issuperset(map(type, kept)):
                tensors = (*tensors, *kept)
                if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
                    return apply(None, options, *tensors)
                return kernel.run(tensors, options)
            if torch._C._are_functorch_transforms_active():
                return Transformed.apply(options, *tensors, *kept)
        return operator(*tensors, *kept, *options)

    return call

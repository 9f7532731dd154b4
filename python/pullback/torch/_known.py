"""Calls of operators that PyTorch's dispatcher would pass on to our kernels unseen by anyone.

To leave it out then is most of what a small call on the host can save: it translates all arguments
to C++ and back. PyTorch has no public way to tell, so this needs names of its own, which may go:
`available` is False then, and every call passes through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

_core: Any = torch._C  # typed in part


def _keys(*names: str) -> Any:
    keys = _core.DispatchKeySet(getattr(_core.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | _core.DispatchKeySet(getattr(_core.DispatchKey, name))
    return keys


def _thread_keys() -> tuple[int, int]:
    """What modes, transforms, autocast and tracers make of a thread's dispatch keys."""
    included, excluded = _include(), _exclude()
    return included.raw_repr(), excluded.raw_repr()


def _in_new_thread(function: Callable[[], Any]) -> Any:
    """Under no mode or the like."""
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(function).result()


def _find_idle_threads() -> set[tuple[int, int]]:
    """The keys of a thread that has none of them, but for inference mode, and for autocast, which
    callers look after. Where torch knows names of dimensions, autograd leaves them aside."""
    usual = _in_new_thread(_thread_keys)
    inferring = _in_new_thread(torch.inference_mode()(_thread_keys))
    named = _core._parse_dispatch_key("Named")
    nameless = _core.DispatchKeySet(named).raw_repr() if named is not None else 0
    on_cpu, on_cuda = _keys("AutocastCPU").raw_repr(), _keys("AutocastCUDA").raw_repr()
    return {
        (included, (excluded | others) & ~casting)
        for included, excluded in (usual, inferring)
        for others in (0, nameless)
        for casting in (0, on_cpu, on_cuda, on_cpu | on_cuda)
    }


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """torch's own compare all that matters of tensors but their memory, in one call into C++:
    dtype, device, shape, strides, requires_grad, and the dispatch keys that this thread makes of
    them, which are others under any mode, transform, autocast or tracer."""
    check: Callable[..., bool] = _core._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


def _try_guards() -> bool:
    x, other = torch.empty(1), torch.empty(2)
    check = _guards([x])
    return check(x) and not check(other)


try:
    _include = _core._dispatch_tls_local_include_set
    _exclude = _core._dispatch_tls_local_exclude_set
    _tensor_keys = _core._dispatch_keys
    # Those that see calls that guards know.
    function_modes, profiled = _core._len_torch_function_stack, _core._autograd._profiler_enabled
    # Those of selective checkpointing leave no trace in the keys.
    dispatch_modes = _core._len_torch_dispatch_stack
    # What the dispatcher's way needs.
    BACKENDS = (_core.DispatchKey.CPU, _core.DispatchKey.CUDA)
    below_autograd, after_autograd = _core._AutoDispatchBelowAutograd, _core._after_autograd_keyset
    one_level = torch._functorch.utils.enable_single_level_autograd_function
    _: Any = torch._ops.OpOverload.redispatch, forward_ad._current_level
    _ = forward_ad._set_fwd_grad_enabled
    _IDLE_THREADS = _find_idle_threads()
    # The dispatch keys of tensors that are nothing but memory, with autograd and for inference.
    _PLAIN_KEYS = {
        _keys(name, f"Autocast{name}", *others).raw_repr()
        for name in ("CPU", "CUDA")
        for others in ((f"Autograd{name}", "ADInplaceOrView"), ())
    }
    available: bool = _in_new_thread(_try_guards)
except (AttributeError, TypeError):
    available = False
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def unseen(tensors: Sequence[Any]) -> bool:
    """Whether an operator's call on these tensors, cast as autocast does, would pass the dispatcher
    so."""
    if _thread_keys() not in _IDLE_THREADS:
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or _tensor_keys(tensor).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


Pick = Callable[[Sequence[Any]], Sequence[Any]]


def picker(places: Sequence[int]) -> Pick:
    """An itemgetter, which by itself makes no tuple of less than two items."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class KnownCall(NamedTuple):
    options: Sequence[Any]
    types: Sequence[type]  # of the tensors, None's own where there is none
    pick: Pick  # of the tensors, those that are not None
    twins: Sequence[tuple[int, int]]  # places among those of the same tensor
    firsts: Pick  # of those, each tensor once, as `check` takes them
    check: Callable[..., bool]
    threads: int
    leaves: Pick | None  # of the tensors, those that require gradients, if any do
    prepared: Any
    record: Any


def know(
    tensors: Sequence[Any], options: Sequence[Any], prepared: Any, record: Any = None
) -> KnownCall:
    pick = picker([i for i, tensor in enumerate(tensors) if tensor is not None])
    given = pick(tensors)
    places: dict[int, int] = {}
    twins = [(places.setdefault(id(tensor), i), i) for i, tensor in enumerate(given)]
    firsts = picker([*places.values()])
    leaves = places_of_leaves(tensors)
    return KnownCall(
        options,
        tuple(map(type, tensors)),
        pick,
        [(i, j) for i, j in twins if i != j],
        firsts,
        _guards(firsts(given)),
        torch.get_num_threads(),
        picker(leaves) if leaves else None,
        prepared,
        record,
    )


def places_of_leaves(tensors: Sequence[Any]) -> Sequence[int]:
    return [i for i, x in enumerate(tensors) if x is not None and x.requires_grad]


# How many calls of each pass of an op are known by their guards.
_MOST_CALLS = 8


class KnownCalls:
    """The last calls that were unseen, so that the next of their kind is told with little work."""

    def __init__(self) -> None:
        self.calls: list[KnownCall] = []
        self.oldest = 0

    def find(
        self, tensors: Sequence[Any], options: Sequence[Any]
    ) -> tuple[KnownCall, Sequence[Tensor]] | None:
        """The call, and its tensors that are not None."""
        types = tuple(map(type, tensors))
        for known in self.calls:
            if known.options == options and known.types == types:
                given = firsts = known.pick(tensors)
                if known.twins:
                    if not all([given[i] is given[j] for i, j in known.twins]):
                        continue
                    firsts = known.firsts(given)
                if known.check(*firsts) and known.threads == torch.get_num_threads():
                    return known, given
        return None

    def add(self, known: KnownCall) -> None:
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(known)
        else:
            self.calls[self.oldest] = known
            self.oldest = (self.oldest + 1) % _MOST_CALLS

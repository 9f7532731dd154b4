"""What an operator's call leaves to its backward pass, and that pass."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..sparsity import BlockLayout
from ._dispatch import Calls
from ._known import KnownCall, Pick, picker

if TYPE_CHECKING:
    from ._operator import TorchOp

# Of the gradients that the backward pass computes, and a last None, one for each argument.
Spread = Callable[[Sequence[Any]], Sequence[Any]]


class _Record(NamedTuple):
    """What calls of one kind leave to their backward pass beside tensors."""

    options: Sequence[Any]
    places: Sequence[int | None]  # of the arguments of the differentiated function, among inputs
    saved: Pick  # of inputs and outputs
    reads: Sequence[int]  # the places of what is saved among those that the backward pass reads
    unread: Sequence[tuple[int, Sequence[int], torch.dtype]]  # those that it needs the shapes of
    # Backward passes by what they need and get.
    known: dict[Any, tuple[KnownCall, Spread]]


class Derivation:
    """Of the forward pass of an op, by the calls of its backward operator."""

    def __init__(self, op: TorchOp, backward_calls: Calls) -> None:
        self.op, self.calls = op, backward_calls
        self.gradient_places = [op.inputs.index(source) for source in op.gradients]
        self.layout_place = op.options.index("layout") if "layout" in op.options else None

    def record(
        self, tensors: Sequence[Any], options: Sequence[Any], places: Sequence[int | None]
    ) -> _Record:
        op = self.op
        unread = op.unread(dict(zip(op.options, options))) if op.unread else ()
        # Inputs that are not read leave their shapes behind.
        shapes = [
            (i, tensors[op.inputs.index(name)].shape, tensors[op.inputs.index(name)].dtype)
            for i, name in enumerate(op.reads)
            if name in unread and name in op.inputs
        ]
        known = [*op.inputs, *op.outputs]
        given = [*[tensor is not None for tensor in tensors], *[True for _ in op.outputs]]
        reads = [
            i for i, name in enumerate(op.reads) if name not in unread and given[known.index(name)]
        ]
        saved = picker([known.index(op.reads[i]) for i in reads])
        return _Record(options, places, saved, reads, shapes, {})

    def keep(
        self, ctx: Any, record: _Record, tensors: Sequence[Any], results: Any, first: bool
    ) -> Any:
        outputs = (results,) if isinstance(results, Tensor) else results
        ctx.record = record
        ctx.save_for_backward(*record.saved((*tensors, *outputs)))
        ctx.set_materialize_grads(False)
        if self.layout_place is not None and record.options[self.layout_place]:
            ctx.layout = BlockLayout.find(record.options[self.layout_place])  # alive until then
        if first:
            return outputs[0]
        upstream = len(self.op.upstream)
        if len(outputs) > upstream:
            ctx.mark_non_differentiable(*outputs[upstream:])
        return results

    def backward(self, ctx: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        record, needed, saved = ctx.record, ctx.needs_input_grad, ctx.saved_tensors
        given = *[gradient for gradient in gradients if gradient is not None], *saved
        compiling = torch.compiler.is_compiling()
        kind = needed, gradients[0] is None, len(given)
        if not compiling and (known := record.known.get(kind)):
            call, spread = known
            found = self.calls.repeat(call, given)
            if found is not None:
                found.append(None)
                return spread(found)
        needs, spread = self._route(needed, record.places)
        count = len(self.op.upstream)
        upstream = [*gradients[:count], *[None] * (count - len(gradients))]
        if needs == 0 or all(gradient is None for gradient in upstream):
            return (None,) * len(needed)
        reads: list[Any] = [None] * len(self.op.reads)
        for place, tensor in zip(record.reads, saved):
            reads[place] = tensor
        if upstream[0] is None:
            out = reads[self.op.reads.index(self.op.outputs[0])]
            upstream[0] = out.new_zeros(()).expand(out.shape)
        for place, shape, dtype in record.unread:
            reads[place] = upstream[0].new_empty((), dtype=dtype).expand(shape)
        tensors, options = (*upstream, *reads), (*record.options, needs)
        results = self.calls.call(tensors, options)
        if not compiling and gradients[0] is not None:
            repeated = self.calls.know(tensors, options, given)
            if repeated is not None:
                record.known[kind] = repeated, spread
        return spread((*results, None))

    def _route(self, needed: Sequence[bool], places: Sequence[int | None]) -> tuple[int, Spread]:
        """The backward pass's option `needs`, and what makes a gradient for each argument."""
        wanted = {place for place, need in zip(places, needed) if need}
        own = [place for place in self.gradient_places if place in wanted]
        needs = sum(1 << self.gradient_places.index(place) for place in own)
        return needs, itemgetter(*[own.index(i) if i in own else -1 for i in places])


class NoDerivation:
    """Of the backward pass, which has none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, tensors: Any, options: Any, places: Any) -> None:
        return None

    def keep(self, ctx: Any, record: Any, tensors: Any, results: Any, first: bool) -> Any:
        return tuple(results)

    def backward(self, ctx: Any, gradients: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name}: second derivatives are not implemented")

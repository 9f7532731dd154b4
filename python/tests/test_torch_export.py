"""pullback.torch where tensors have no values yet: exported, traced, compiled for any length."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.func import functional_call, stack_module_state, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback import sparsity  # noqa: E402
from torch_cases import random  # noqa: E402

Q = random(1, 2, 64, 16)


def attention() -> pt.SparseSelfAttention:
    return pt.SparseSelfAttention(sparsity.FixedSparsityConfig(num_heads=2), max_seq_length=128)


class Rows(nn.Module):
    """Rows of a length that the input gives, of what requires a gradient."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8).double(), function

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.function(self.linear(x) @ x.transpose(1, 2))
        return rows


@pytest.mark.parametrize("function", [pt.sparsemax, pt.entmax15])
@pytest.mark.parametrize("strict", [False, True])
def test_one_program_is_for_rows_of_any_length(function: Any, strict: bool) -> None:
    module = Rows(function)
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({1: length},)
    exported = torch.export.export(module, (random(3, 9, 8),), dynamic_shapes=shapes, strict=strict)
    for n in (2, 300):
        x = random(3, n, 8)
        torch.testing.assert_close(exported.module()(x), module(x))


def test_lengths_that_the_data_gives_are_compiled() -> None:
    def f(x: Tensor, kept: Tensor, offsets: Tensor) -> Tensor:
        columns = pt.sparsemax(x.flatten(1)[:, kept].contiguous())
        maxima = pt.segment_reduce(x[kept], "max", offsets=offsets)
        return columns.square().sum() + maxima.square().sum()

    torch.compiler.reset()
    offsets, kept = torch.tensor([0, 1, 4]), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    x, again = (random(6, 2, 3).requires_grad_() for _ in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        compiled(x, kept, offsets).backward()
    f(again, kept, offsets).backward()
    torch.testing.assert_close(x.grad, again.grad)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
def test_sparse_self_attention_is_exported(strict: bool, called_before: bool) -> None:
    module = attention()
    if called_before:
        module(Q, Q, Q)
    exported = torch.export.export(module, (Q, Q, Q), strict=strict)
    torch.testing.assert_close(exported.module()(Q, Q, Q), module(Q, Q, Q))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_sparse_self_attention_is_traced(mode: str) -> None:
    module = attention()
    traced = make_fx(module, tracing_mode=mode)(Q, Q, Q)
    torch.testing.assert_close(traced(Q, Q, Q), module(Q, Q, Q))


def test_sparse_self_attention_without_memory() -> None:
    with FakeTensorMode():
        x = torch.empty(1, 2, 64, 16)
        assert attention()(x, x, x).shape == x.shape
    module = attention().to("meta")
    x = torch.empty(1, 2, 64, 16, device="meta")
    assert module(x, x, x).shape == x.shape
    module.to_empty(device="cpu")
    module.load_state_dict(attention().state_dict())
    torch.testing.assert_close(module(Q, Q, Q), attention()(Q, Q, Q))


def test_an_ensemble_of_sparse_self_attention() -> None:
    modules = [attention(), attention()]
    one = copy.deepcopy(modules[0])

    def call(parameters: Any, buffers: Any, x: Tensor) -> Any:
        return functional_call(one, (parameters, buffers), (x, x, x))

    x = random(2, 1, 2, 64, 16)
    found = vmap(call)(*stack_module_state(modules), x)
    torch.testing.assert_close(found, torch.stack([m(a, a, a) for m, a in zip(modules, x)]))
    modules[1].master_layout.fill_(1)
    with pytest.raises(NotImplementedError, match="vmap over modules of other layouts"):
        vmap(call)(*stack_module_state(modules), x)

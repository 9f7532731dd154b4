"""pullback.torch under torch.func's transforms, compiled or not, and forward-mode derivatives."""

from __future__ import annotations

from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacrev, jvp, vmap  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import pullback.torch as pt  # noqa: E402
from torch_cases import CASES, DENSE, Case, on_devices, random  # noqa: E402

pytestmark = pytest.mark.skipif(
    not pt._known.available, reason="this torch lacks names of its own that we know"
)


def entmax_operator(x: Tensor) -> Tensor:
    return torch.ops.pullback.entmax(x, None, None, None, 1.5, -1, 0)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@on_devices([c for c in CASES if c.name in ("attention-bias", "entmax-sparsemax", "segment-max")])
def test_transforms_compile(case: Case, device: str) -> None:
    inputs = [x.detach() for x in case.inputs(device)]
    places = tuple(range(len(inputs)))

    def loss(*tensors: Tensor) -> Tensor:
        return case.f(*tensors).square().sum()

    gradients = grad(loss, places)
    torch.testing.assert_close(compiled(gradients)(*inputs), gradients(*inputs))
    batches = [torch.stack([x, 2 * x]) for x in inputs]
    found = compiled(vmap(gradients))(*batches)
    torch.testing.assert_close(found, vmap(gradients)(*batches))
    torch.testing.assert_close([x[0] for x in found], [*gradients(*inputs)])


def test_transforms_of_operators() -> None:
    x = random(3, 8)

    def loss(x: Tensor) -> Tensor:
        return entmax_operator(x).square().sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    for gradient in (grad(loss), vmap(grad(loss)), grad(lambda x: vmap(loss)(x).sum())):
        torch.testing.assert_close(gradient(x), wanted)
    with torch.no_grad():
        torch.testing.assert_close(grad(loss)(x), wanted)
    for f in (loss, lambda x: pt.entmax15(x)[0, 0]):
        with pytest.raises(NotImplementedError, match="entmax: second derivatives"):
            grad(lambda x, f=f: grad(f)(x).sum())(x)
    with pytest.raises(NotImplementedError, match="entmax: second derivatives"):
        jacrev(jacrev(loss))(x)


def test_tangents_are_refused_wherever_they_come_from() -> None:
    x = random(3, 5)

    def dual(x: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(entmax_operator(forward_ad.make_dual(x, x)))

    def dual_gradient(x: Tensor) -> Any:
        (known,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        with forward_ad.dual_level():
            upstream = forward_ad.make_dual(torch.ones_like(y), y.detach())
            return torch.autograd.grad(y, x, upstream, retain_graph=True)

    leaf = x.clone().requires_grad_()
    y = pt.entmax15(leaf)
    plain = torch.compile(lambda x: jvp(pt.entmax15, (x,), (x,)), backend="aot_eager")
    for call, given in (
        (dual, x),
        (dual, leaf),
        (dual_gradient, leaf),
        (lambda x: jvp(entmax_operator, (x,), (x,)), x),
        (lambda x: jvp(vmap(entmax_operator), (x,), (x,)), x),
        (lambda x: jvp(grad(lambda x: entmax_operator(x)[0, 0]), (x,), (x,)), x),
        (hessian(lambda x: pt.entmax15(x)[0, 0]), x),
        (plain, x),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            call(given)


def test_batches_of_no_items() -> None:
    none = random(0, 3, 2, 5)
    assert vmap(pt.entmax15)(none).shape == none.shape
    assert vmap(grad(lambda x: pt.entmax15(x).sum()))(none).shape == none.shape
    moved = vmap(lambda q: pt.attention(q, q, q, return_lse=True), in_dims=1, out_dims=1)
    out, lse = moved(random(2, 0, 4, 2, 8))
    assert out.shape == (2, 0, 4, 2, 8) and lse.shape == (2, 0, 2, 4)
    summed = vmap(lambda x: pt.segment_reduce(x, offsets=torch.tensor([0, 1, 3])))
    assert summed(none[..., 0]).shape == (0, 2, 2)


def test_vmap_makes_one_call_where_it_can() -> None:
    layout = DENSE
    offsets = torch.tensor([0, 3, 9])
    calls: dict[str, tuple[Any, list[Tensor]]] = {
        "attention": (
            lambda q, k, v: pt.attention(q, k, v, causal=True),
            [random(3, 2, 5, 2, 4, seed=i) for i in range(3)],
        ),
        "block_softmax": (lambda x: pt.block_softmax(x, layout), [random(3, 2, 8, 16, 16)]),
        "block_matmul": (
            lambda a, b: pt.block_matmul(a, b, layout, "dsd"),
            [random(3, 1, 8, 16, 16), random(3, 1, 2, 32, 4)],
        ),
        "entmax": (lambda x: pt.entmax15(x), [random(3, 4, 6)]),
        "sparsemax": (lambda x: pt.sparsemax(x), [random(3, 2, 32)]),
        "segment": (lambda x: pt.segment_reduce(x, "sum", offsets=offsets), [random(3, 9, 4)]),
        "segment_arg": (lambda x: pt.segment_reduce(x, "max", offsets=offsets), [random(3, 9, 4)]),
    }

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(function.name())
            return function(*args, **kwargs or {})

    for name, (f, inputs) in calls.items():
        seen: list[str] = []
        loss = grad(lambda *x, f=f: f(*x).square().sum(), tuple(range(len(inputs))))
        with Count():
            found = vmap(loss)(*inputs)
        ours = [call for call in seen if call.startswith("pullback::")]
        assert ours == [f"pullback::{name}", f"pullback::{name}_backward"]
        for i in range(3):
            rows = loss(*[x[i] for x in inputs])
            torch.testing.assert_close([x[i] for x in found], list(rows))
    x, alphas, mask = random(3, 6), 1 + random(3).square(), random(3, 6) < 0.5
    ways: list[tuple[Any, list[Tensor], Tensor]] = [
        (pt.sparsemax, [x], pt.sparsemax(x)),
        (pt.entmax, [x, alphas], pt.entmax(x, alphas)),
        (lambda x, alpha: pt.entmax(x, alpha[None], 0), [x, alphas], pt.entmax(x, alphas)),
        (lambda x, mask: pt.entmax15(x, mask=mask), [x, mask], pt.entmax15(x, mask=mask)),
    ]
    for f, inputs, expected in ways:  # of single rows
        seen = []
        with Count():
            found = vmap(f)(*inputs)
        assert [call for call in seen if call.startswith("pullback::")] == ["pullback::entmax"]
        torch.testing.assert_close(found, expected)
    shared = vmap(pt.attention, (0, None, None))(
        *[calls["attention"][1][0]] + [x[0] for x in calls["attention"][1][1:]]
    )
    assert shared.shape == (3, 2, 5, 2, 4)


def test_batches_of_gradients() -> None:
    def f(q: Tensor) -> Tensor:
        return pt.attention(q, q, q)

    # They share what the forward pass gave, a batch of one among it.
    q = random(1, 3, 1, 2)
    expected = torch.autograd.functional.jacobian(f, q)
    torch.testing.assert_close(jacrev(f)(q), expected)
    with pytest.raises(NotImplementedError, match="attention: batches of .* use torch.func.vmap"):
        torch.autograd.functional.jacobian(f, q, vectorize=True)

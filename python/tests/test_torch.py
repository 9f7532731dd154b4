"""pullback.torch: what PyTorch asks of an operator, of every op.

Every test runs on the CPU, and on CUDA where there is one. PULLBACK_TEST_OPS names the ops to test
there, for libraries that do not have all of them on CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402
from torch.library import opcheck  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback.torch import _ops  # noqa: E402
from pullback.torch._operator import TorchOp  # noqa: E402
from torch_cases import CASES, CUDA_OPS, DENSE, DEVICES, OFFSETS, Case, on_devices, random  # noqa: E402


@on_devices(CASES)
def test_values_and_gradients_are_those_of_plain_torch(case: Case, device: str) -> None:
    if case.plain is None:
        pytest.skip("PyTorch has no such function")
    inputs = case.inputs(device)
    out, expected = case.f(*inputs), case.plain(*inputs)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    g = random(*out.shape, seed=9, device=device)
    found = torch.autograd.grad(out, inputs, g)
    wanted = torch.autograd.grad(expected, inputs, g)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


@on_devices(CASES)
def test_gradcheck(case: Case, device: str) -> None:
    fast = case.op.startswith("block")
    assert gradcheck(case.f, case.inputs(device), fast_mode=fast, nondet_tol=0.0)


@on_devices(CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(case: Case, device: str, dtype: Any) -> None:
    inputs = case.inputs(device, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = case.f(*inputs), case.f(*exact)
    d_out = random(*out.shape, seed=9, dtype=dtype, device=device)
    found = torch.autograd.grad(out, inputs, d_out)
    wanted = torch.autograd.grad(expected, exact, d_out.double())
    # Beside results: sums of f32, and what passes between two operators in the dtype.
    epsilons = 8 if dtype == torch.float32 else 3
    for x, y in zip((out, *found), (expected, *wanted)):
        assert x.dtype == dtype
        off = (x.double() - y).abs().max() / y.abs().max()
        assert off <= epsilons * torch.finfo(dtype).eps, off / torch.finfo(dtype).eps


@on_devices(CASES)
def test_gradients_of_any_layout_arrive(case: Case, device: str) -> None:
    """torch.cat sends narrowed gradients, sum() stride 0, transposes transposed ones."""
    inputs = case.inputs(device)
    out = case.f(*inputs)
    plain = random(*out.shape, seed=3, device=device)
    wide = torch.cat([plain, plain], -1)
    padded = torch.nn.functional.pad(plain.flatten(), (3, 0))
    layouts = {
        "expanded": torch.ones((), dtype=out.dtype, device=device).expand(out.shape),
        "transposed": plain.mT.contiguous().mT if plain.dim() > 1 else plain,
        "narrowed": wide.narrow(-1, 0, plain.shape[-1]),
        "offset": padded[3:].view(out.shape),
    }
    for name, g in layouts.items():
        found = torch.autograd.grad(out, inputs, g, retain_graph=True)
        expected = torch.autograd.grad(out, inputs, g.contiguous(), retain_graph=True)
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-12, msg=name)


@on_devices(CASES)
def test_inputs_of_any_layout(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    expected = case.f(*inputs)
    moved = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
    out = case.f(*moved)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)
    g = random(*out.shape, seed=1, device=device)
    for x, y in zip(torch.autograd.grad(out, moved, g), torch.autograd.grad(expected, inputs, g)):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-11)


@on_devices([case for case in CASES if len(case.shapes) > 1])
def test_gradients_of_any_subset(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    g = random(*case.f(*inputs).shape, seed=2, device=device)
    everything = torch.autograd.grad(case.f(*inputs), inputs, g)
    for i in range(len(inputs)):
        some = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        (alone,) = torch.autograd.grad(case.f(*some), [some[i]], g)
        torch.testing.assert_close(alone, everything[i], atol=0, rtol=0)


@on_devices(CASES)
def test_second_derivatives_are_refused(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    first = torch.autograd.grad(case.f(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        sum(x.sum() for x in first).backward()


@on_devices(CASES)
def test_the_same_bits_every_time(case: Case, device: str) -> None:
    inputs = case.inputs(device, torch.float32)
    g = random(*case.f(*inputs).shape, seed=2, device=device, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(case.f(*inputs), inputs, g) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0]))


@on_devices(CASES)
def test_vmap_and_per_sample_gradients(case: Case, device: str) -> None:
    inputs = [torch.stack([x, 2 * x]).detach() for x in case.inputs(device)]
    out = torch.func.vmap(case.f)(*inputs)
    expected = torch.stack([case.f(*[x[i] for x in inputs]) for i in range(2)])
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)

    def loss(*tensors: Tensor) -> Tensor:
        return case.f(*tensors).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(*inputs)
    for i in range(2):
        row = torch.func.grad(loss)(*[x[i] for x in inputs])
        torch.testing.assert_close(found[i], row, atol=1e-12, rtol=1e-11)


@on_devices(CASES)
def test_compiles_whole_with_dynamic_shapes(case: Case, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(case.f, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = case.inputs(device)
    out, expected = compiled(*inputs), case.f(*inputs)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    g = random(*out.shape, seed=4, device=device)
    found, wanted = (torch.autograd.grad(y, inputs, g) for y in (out, expected))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), expected, atol=0, rtol=0)


def test_one_graph_serves_other_sizes() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def f(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Any:
        return pt.attention(q, k, v, causal=True, window=(8, 0)) * 2, pt.entmax15(x)

    for s in (16, 24, 40):
        q, k, v = (random(2, s, 2, 8, seed=i) for i in range(3))
        out, y = f(q, k, v, random(s, 2 * s))
        torch.testing.assert_close(out, 2 * pt.attention(q, k, v, causal=True, window=(8, 0)))
        assert y.shape == (s, 2 * s)
    assert len(graphs) == 1


def test_inductor_compiles_a_layer_with_its_backward() -> None:
    torch.compiler.reset()
    weight = random(3 * 16, 16, dtype=torch.float32).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        q, k, v = (x @ weight.T).unflatten(-1, (3, 2, 8)).unbind(-3)
        return pt.attention(q, k, v, causal=True).flatten(-2).relu().sum()

    x = random(2, 12, 16, dtype=torch.float32)
    (expected,) = torch.autograd.grad(layer(x), weight)
    (found,) = torch.autograd.grad(torch.compile(layer, fullgraph=True)(x), weight)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def op_arguments(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ops = torch.ops.pullback
    q, k, v, bias = CASES[0].inputs(device)
    x = random(9, 4, device=device).requires_grad_()
    offsets = torch.tensor(OFFSETS, device=device)
    ids = torch.tensor([2, 0, 1, 1, 0], device=device)
    seed = torch.tensor(3, device=device)
    cu = torch.tensor([0, 2, 5], device=device, dtype=torch.int32)
    blocks = random(2, 8, 16, 16, device=device).requires_grad_()
    padding = random(2, 32, device=device).requires_grad_()
    dense = random(1, 2, 32, 4, device=device).requires_grad_()
    d, b = DENSE.identifier, 16
    one = blocks[:1].detach().requires_grad_()
    half = x.detach().bfloat16().requires_grad_()
    packed = [t.detach()[0].requires_grad_() for t in (q, k[:, :5], v[:, :5])]
    return {
        "attention": (
            ops.attention,
            (q, k, v, bias, None, None, None, 0, 0, None, 0.0, -1, 0, 1, 0, 0.0, 0, 0, 0),
        ),
        "attention-dropout": (
            ops.attention,
            (q, k, v, None, None, None, seed, 0, 0, 0.5, 2.0, 3, -1, 0, 0, 0.25, 0, 0, 0),
        ),
        "attention-varlen": (
            ops.attention,
            (*packed, None, cu, cu, None, 5, 5, None, 0.0, -1, -1, 1, 0, 0.0, 0, 0, 0),
        ),
        "entmax": (ops.entmax, (x, None, None, None, 1.5, -1, 0)),
        "entmax-sparsemax": (ops.sparsemax, (x, None, 0)),
        "segment": (ops.segment, (x, offsets, None, None, 0, 5, 0, 0, 0)),
        "segment-arg": (ops.segment_arg, (x, offsets, None, None, 0, 2, 0, 0, 0)),
        "segment-lse": (ops.segment_lse, (half, offsets, None, None, 0, 5, 0, 0, 0)),
        "segment-permutation": (ops.segment_permutation, (ids, 3)),
        "block_softmax": (ops.block_softmax, (blocks, None, padding, None, d, b, 0, 1, 0.5)),
        "block_matmul": (ops.block_matmul, (one, dense, d, b, 1, 0)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", op_arguments("cpu"))
def test_opcheck(name: str, device: str) -> None:
    if device == "cuda" and CUDA_OPS and name.split("-")[0] not in CUDA_OPS.split(","):
        pytest.skip("not among PULLBACK_TEST_OPS")
    op, arguments = op_arguments(device)[name]
    opcheck(op.default, arguments)
    # As the compiler sees tensors that need no gradient, and strided ones.
    detached = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    opcheck(op.default, tuple(detached))
    moved = [
        a.mT.contiguous().mT.requires_grad_() if isinstance(a, Tensor) and a.dim() > 1 else a
        for a in detached
    ]
    opcheck(op.default, tuple(moved))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in op_arguments("cpu") if "permut" not in name])
def test_opcheck_of_the_backward_pass(name: str, device: str) -> None:
    if device == "cuda" and CUDA_OPS and name.split("-")[0] not in CUDA_OPS.split(","):
        pytest.skip("not among PULLBACK_TEST_OPS")
    op, arguments = op_arguments(device)[name]
    owners = {o.operator: o for o in vars(_ops).values() if isinstance(o, TorchOp)}
    owner = owners[op.default]
    given = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    results = op(*given)
    results = (results,) if isinstance(results, Tensor) else results
    known = dict(zip([*owner.inputs, *owner.outputs], [*given[: len(owner.inputs)], *results]))
    upstream = [torch.ones_like(result) for result, _ in zip(results, owner.upstream)]
    needs = sum(1 << i for i, name in enumerate(owner.gradients) if known[name] is not None)
    backward = getattr(torch.ops.pullback, f"{owner.name}_backward").default
    reads = [known[name] for name in owner.reads]
    opcheck(backward, (*upstream, *reads, *given[len(owner.inputs) :], needs))

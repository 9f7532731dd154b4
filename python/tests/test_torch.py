"""pullback.torch: what PyTorch asks of an operator, and the mathematics against plain PyTorch.

Every test runs on the CPU, and on CUDA where there is one. PULLBACK_TEST_OPS names the ops to test
there, for libraries that do not have all of them on CUDA.
"""

from __future__ import annotations

import os
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import pullback.torch as pt  # noqa: E402
from pullback import BlockLayout, sparsity  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402
from torch.library import opcheck  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CUDA_OPS = os.environ.get("PULLBACK_TEST_OPS")
LAYOUT = sparsity.BigBirdSparsityConfig(2).make_layout(64)
DENSE = sparsity.DenseSparsityConfig(2).make_layout(32)


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    options.setdefault("dtype", torch.float64)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.to(**options)


# Each case: the op as a function of the tensors that have gradients, those tensors' shapes, and the
# same in plain PyTorch.
class Case:
    def __init__(self, name: str, f: Callable[..., Any], plain: Any, *shapes: tuple[int, ...]):
        self.name, self.f, self.plain, self.shapes = name, f, plain, shapes
        self.op = name.split("-")[0]

    def inputs(self, device: str, dtype: Any = torch.float64) -> list[Tensor]:
        return [
            random(*shape, seed=i, dtype=dtype, device=device).requires_grad_()
            for i, shape in enumerate(self.shapes)
        ]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        s = s.masked_fill(~visible.tril(s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", s.softmax(-1), v)


def plain_segment(x: Tensor, reduce: str, offsets: list[int]) -> Tensor:
    parts = [x[begin:end] for begin, end in zip(offsets, offsets[1:])]
    if reduce == "softmax":
        return torch.cat([part.softmax(0) for part in parts])
    function = {
        "sum": lambda p: p.sum(0),
        "mean": lambda p: p.mean(0),
        "max": lambda p: p.max(0).values,
        "min": lambda p: p.min(0).values,
        "prod": lambda p: p.prod(0),
        "logsumexp": lambda p: p.logsumexp(0),
    }[reduce]
    return torch.stack([function(part) for part in parts])


OFFSETS = [0, 3, 4, 9]


def segment_case(reduce: Any) -> Case:
    def f(x: Tensor) -> Tensor:
        return pt.segment_reduce(x, reduce, offsets=torch.tensor(OFFSETS, device=x.device))

    return Case(f"segment-{reduce}", f, lambda x: plain_segment(x, reduce, OFFSETS), (9, 4))


def plain_block_softmax(x: Tensor, rpe: Tensor, padding: Tensor) -> Tensor:
    dense = x.reshape(-1, 2, 2, 2, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(-1, 2, 32, 32)
    y = (0.5 * dense + rpe + padding[:, None, None]).softmax(-1)
    return y.reshape(-1, 2, 2, 16, 2, 16).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)


CASES = [
    Case(
        "attention-bias",
        lambda q, k, v, bias: pt.attention(q, k, v, bias=bias, causal=True),
        lambda q, k, v, bias: plain_attention(q, k, v, bias, True),
        (2, 5, 4, 3),
        (2, 7, 2, 3),
        (2, 7, 2, 5),
        (1, 4, 1, 7),
    ),
    Case(
        "entmax-1.5",
        lambda x: pt.entmax15(x, 0),
        None,
        (6, 5),
    ),
    Case(
        "entmax-softmax",
        lambda x: pt.entmax(x, 1.0),
        lambda x: x.softmax(-1),
        (6, 5),
    ),
    Case("entmax-sparsemax", lambda x: pt.sparsemax(x, -2), None, (3, 6, 5)),
    Case(
        "entmax-alpha",
        lambda x, alpha: pt.entmax(x, 1 + alpha.exp()),
        None,
        (6, 5),
        (6, 1),
    ),
    *[segment_case(r) for r in ("sum", "mean", "max", "min", "prod", "logsumexp", "softmax")],
    Case(
        "block_softmax",
        lambda x, rpe, padding: pt.block_softmax(
            x, DENSE, rpe=rpe, key_padding_mask=padding, scale=0.5
        ),
        plain_block_softmax,
        (2, 8, 16, 16),
        (1, 2, 32, 32),
        (2, 32),
    ),
    Case(
        "block_matmul-sdd",
        lambda a, b: pt.block_matmul(a, b, LAYOUT, "sdd", block=16, transpose_b=True),
        None,
        (1, 2, 64, 4),
        (1, 2, 64, 4),
    ),
    Case(
        "block_matmul-dsd",
        lambda a, b: pt.block_matmul(a, b, LAYOUT, "dsd"),
        None,
        (1, LAYOUT.nnz, 16, 16),
        (1, 2, 64, 3),
    ),
    Case(
        "block_matmul-attention",
        lambda q, k, v: pt.block_sparse_attention(q, k, v, DENSE),
        plain_attention,
        (1, 32, 2, 4),
        (1, 32, 2, 4),
        (1, 32, 2, 3),
    ),
]


def on_devices(cases: list[Case]) -> Any:
    """The cases on the devices that have them."""
    found = []
    for device in DEVICES:
        for case in cases:
            if device == "cpu" or CUDA_OPS is None or case.op in CUDA_OPS.split(","):
                found.append(pytest.param(case, device, id=f"{case.name}-{device}"))
    return pytest.mark.parametrize("case,device", found)


SMALL = [case for case in CASES if not case.op.startswith("block")]


@on_devices(CASES)
def test_values_and_gradients_are_those_of_plain_torch(case: Case, device: str) -> None:
    if case.plain is None:
        pytest.skip("PyTorch has no such function")
    inputs = case.inputs(device)
    out, expected = case.f(*inputs), case.plain(*inputs)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    g = random(*out.shape, seed=9, device=device)
    found = torch.autograd.grad(out, inputs, g)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, g), atol=1e-12, rtol=1e-9)


@on_devices(CASES)
def test_gradcheck(case: Case, device: str) -> None:
    fast = case.op.startswith("block")
    assert gradcheck(case.f, case.inputs(device), fast_mode=fast, nondet_tol=0.0)


@on_devices(CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(case: Case, device: str, dtype: Any) -> None:
    exact = case.inputs(device)
    inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
    out, expected = case.f(*inputs), case.f(*exact)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    if "prod" in case.name or "attention" in case.name:
        tolerance *= 3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad(out.float().square().sum(), inputs)
    assert [x.dtype for x in found] == [dtype] * len(inputs)
    if dtype == torch.float32:
        wanted = torch.autograd.grad(expected.square().sum(), exact)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x.double(), y, atol=1e-3, rtol=1e-3)


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
    seed = torch.tensor(3)
    cu = torch.tensor([0, 2, 5], device=device, dtype=torch.int32)
    blocks = random(2, 8, 16, 16, device=device).requires_grad_()
    padding = random(2, 32, device=device).requires_grad_()
    dense = random(1, 2, 32, 4, device=device).requires_grad_()
    d, b = DENSE.identifier, 16
    packed = [t.detach()[0].requires_grad_() for t in (q, k[:, :5], v[:, :5])]
    return {
        "attention": (ops.attention, (q, k, v, bias, None, None, None, 0, 0, None, 0.0, -1, 0, 1, 0, 0.0)),
        "attention-dropout": (
            ops.attention,
            (q, k, v, None, None, None, seed, 0, 0, 0.5, 2.0, 3, -1, 0, 0, 0.25),
        ),
        "attention-varlen": (
            ops.attention,
            (*packed, None, cu, cu, None, 5, 5, None, 0.0, -1, -1, 1, 0, 0.0),
        ),
        "entmax": (ops.entmax, (x, None, None, None, 1.5, -1, 0)),
        "entmax-sparsemax": (ops.sparsemax, (x, None, 0)),
        "segment": (ops.segment, (x, offsets, None, None, 0, 5, 0, 0, 0)),
        "segment-arg": (ops.segment_arg, (x, offsets, None, None, 0, 2, 0, 0, 0)),
        "segment-permutation": (ops.segment_permutation, (ids, 3)),
        "block_softmax": (ops.block_softmax, (blocks, None, padding, None, d, b, 0, 1, 0.5)),
        "block_matmul": (ops.block_matmul, (blocks[:1].detach().requires_grad_(), dense, d, b, 1, 0)),
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


# ---------------------------------------------------------------- attention


def test_lse_and_its_gradient() -> None:
    q, k, v = (random(1, 6, 2, 4, seed=i).requires_grad_() for i in range(3))
    out, lse = pt.attention(q, k, v, return_lse=True)
    s = torch.einsum("bshd,bthd->bhst", q, k) / 2
    torch.testing.assert_close(lse, s.logsumexp(-1))
    found = torch.autograd.grad(lse.square().sum(), (q, k, v), allow_unused=True)
    expected = torch.autograd.grad(s.logsumexp(-1).square().sum(), (q, k))
    torch.testing.assert_close(found[:2], expected)
    assert found[2] is None or (found[2] == 0).all()


def test_packed_qkv_views() -> None:
    qkv = random(2, 5, 3, 2, 4).requires_grad_()
    out = pt.attention(*qkv.unbind(2))
    (found,) = torch.autograd.grad(out.sum(), qkv)
    copies = [t.detach().contiguous().requires_grad_() for t in qkv.unbind(2)]
    expected = torch.autograd.grad(pt.attention(*copies).sum(), copies)
    torch.testing.assert_close(found, torch.stack(expected, 2))


def test_varlen_is_each_sequence_alone() -> None:
    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    q, k, v = (random(10, 2, 4, seed=i).requires_grad_() for i in range(3))
    out = pt.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, max_seqlen_k=7)
    parts = [
        pt.attention(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 3), (3, 10))
    ]
    torch.testing.assert_close(out, torch.cat(parts))


def test_dropout_follows_torchs_generator_and_is_undone_exactly() -> None:
    q, k, v = (random(1, 32, 2, 8, seed=i).requires_grad_() for i in range(3))
    torch.manual_seed(1)
    a, b = (pt.attention(q, k, v, dropout=0.5) for _ in range(2))
    torch.manual_seed(1)
    c = pt.attention(q, k, v, dropout=0.5)
    assert torch.equal(a, c) and not torch.equal(a, b)
    assert gradcheck(
        lambda q, k, v: pt.attention(q, k, v, dropout=0.5, seed=torch.tensor(7)),
        [t.detach()[:, :6].requires_grad_() for t in (q, k, v)],
    )

    def recomputed(*tensors: Tensor) -> Tensor:
        return pt.attention(*tensors, dropout=0.5)

    torch.manual_seed(1)
    d = torch.utils.checkpoint.checkpoint(recomputed, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(d.sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(a.sum(), (q, k, v)), atol=0, rtol=0)


def test_autocast_casts_products_only() -> None:
    q, k, v = (random(1, 8, 2, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = pt.attention(q, k, v)
        y = pt.entmax15(q)
    assert out.dtype == torch.bfloat16 and y.dtype == torch.float32
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_deterministic_algorithms_win() -> None:
    q = random(1, 8, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        assert pt.attention(q, q, q, deterministic=False).shape == q.shape
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- the others


def test_sparsemax_keeps_bits_not_values() -> None:
    x = random(4, 64, dtype=torch.float32).requires_grad_()
    y = pt.sparsemax(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() * t.element_size() for t in saved) < x.numel()


def test_a_mask_and_ragged_rows() -> None:
    x = random(2, 6).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]], dtype=torch.bool).expand(2, 6)
    for alpha in (1.0, 1.5, 2.0):
        y = pt.entmax(x, alpha, mask=mask)
        assert (y[~mask] == 0).all()
        torch.testing.assert_close(y[mask].view(2, 4), pt.entmax(x[mask].view(2, 4), alpha))
        assert gradcheck(lambda x, a=alpha: pt.entmax(x, a, mask=mask), x)
    offsets = torch.tensor([0, 2, 6])
    y = pt.entmax(x, 1.5, offsets=offsets)
    torch.testing.assert_close(y[:, 2:], pt.entmax(x[:, 2:], 1.5))


def test_learnable_scalar_alpha() -> None:
    x = random(3, 4, 5)
    alpha = torch.tensor(1.6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: pt.entmax(x, a, 1), alpha)


def test_segment_of_any_rank_and_order() -> None:
    ids = torch.tensor([2, 0, 2, 1, 0])
    permutation, offsets = pt.segment_permutation(ids, 3)
    for shape in ((5,), (5, 2), (5, 2, 3)):
        x = random(*shape).requires_grad_()
        out = pt.segment_reduce(x, "sum", permutation=permutation, offsets=offsets)
        expected = torch.zeros(3, *shape[1:], dtype=x.dtype).index_add(0, ids, x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
        )
    y = pt.segment_softmax(x, permutation=permutation, offsets=offsets)
    torch.testing.assert_close(y[ids == 2].sum(0), torch.ones(2, 3, dtype=y.dtype))


def test_segment_arg_and_ties() -> None:
    x = torch.tensor([[1.0], [3.0], [3.0], [2.0]], requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 4])
    out, arg = pt.segment_reduce_arg(x, "max", offsets=offsets)
    assert arg.tolist() == [[1], [-1], [3]]
    for ties, expected in (("first", [0, 1, 0, 1]), ("last", [0, 0, 1, 1]), ("even", [0, 0.5, 0.5, 1])):
        y = pt.segment_reduce(x, "max", offsets=offsets, ties=ties, empty="zero")
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.flatten().tolist() == expected


def test_sums_do_not_keep_their_input_alive() -> None:
    x = random(100, 8).requires_grad_()
    for reduce in ("sum", "mean", "max", "softmax"):
        out = pt.segment_reduce(x, reduce, offsets=torch.tensor([0, 50, 100]))
        held = [t.untyped_storage().data_ptr() for t in out.grad_fn.saved_tensors if t is not None]
        assert x.untyped_storage().data_ptr() not in held


def test_a_layout_that_is_gone_is_reported() -> None:
    a = random(1, 2, 32, 4)
    layout = BlockLayout(DENSE.present)
    identifier = layout.identifier
    del layout
    with pytest.raises(ValueError, match="no longer exists"):
        torch.ops.pullback.block_matmul(a, a, identifier, 16, 0, 2)


def test_modules() -> None:
    x = random(4, 6)
    torch.testing.assert_close(pt.Sparsemax()(x), pt.entmax(x, 2.0))
    torch.testing.assert_close(pt.Entmax15(dim=0)(x), pt.entmax15(x, 0))
    q, k, v = (random(2, 2, 64, 4, seed=i) for i in range(3))
    module = pt.SparseSelfAttention(sparsity.FixedSparsityConfig(num_heads=2))
    causal = torch.ones(64, 64, dtype=torch.float64).tril()
    out = module(q, k, v, attn_mask=causal)
    mask = torch.from_numpy(module.get_layout(64).present).bool()
    dense = mask.repeat_interleave(16, 1).repeat_interleave(16, 2) & causal.bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(out, expected)


def test_errors_of_the_library_reach_the_caller() -> None:
    q = random(2, 4, 2, 8)
    with pytest.raises(ValueError, match="attention: k: expected the batch size of q, 2"):
        pt.attention(q, q[:1], q)
    with pytest.raises(ValueError, match="q: expected dtype torch.float64.*got torch.int16"):
        pt.attention(q.to(torch.int16), q, q)
    with pytest.raises(ValueError, match="needed|one of|offsets"):
        pt.segment_reduce(q[0, :, 0], "sum")


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_of_zero(device: str) -> None:
    x = torch.empty(0, 3, device=device, requires_grad=True)
    out = pt.segment_reduce(x, "sum", offsets=torch.zeros(3, dtype=torch.int64, device=device))
    assert out.shape == (2, 3) and (out == 0).all()
    y = pt.entmax15(torch.empty(3, 0, device=device, requires_grad=True))
    y.sum().backward()
    if device == "cpu":
        q = torch.empty(2, 0, 2, 8, requires_grad=True)
        pt.attention(q, q, q).sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


# ---------------------------------------------------------------- CUDA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def step(x: Tensor) -> Tensor:
    """Forward and backward of ops that every build has on CUDA."""
    offsets = torch.arange(0, x.shape[0] + 1, 4, device=x.device)
    y = pt.segment_reduce(pt.entmax15(x), "max", offsets=offsets)
    (gradient,) = torch.autograd.grad(pt.sparsemax(y).square().sum(), x)
    return gradient


@needs_cuda
def test_cuda_agrees_with_the_cpu() -> None:
    x = random(64, 300, dtype=torch.float32)
    found = step(x.cuda().requires_grad_())
    torch.testing.assert_close(found.cpu(), step(x.requires_grad_()), atol=1e-5, rtol=1e-4)


@needs_cuda
def test_cuda_never_waits() -> None:
    x = random(64, 300, dtype=torch.float32, device="cuda").requires_grad_()
    step(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_cuda_streams() -> None:
    """Work goes to the current stream: it sees what that stream wrote before, however late."""
    x = random(4096, 1024, dtype=torch.float32, device="cuda")
    expected = pt.entmax15(x + 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        moved = x + 1
        found = pt.entmax15(moved)
    stream.synchronize()
    assert torch.equal(found, expected)


@needs_cuda
def test_cuda_graphs() -> None:
    x = random(64, 300, dtype=torch.float32, device="cuda").requires_grad_()
    step(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    with torch.no_grad():
        x.copy_(random(64, 300, seed=5))
    graph.replay()
    torch.testing.assert_close(captured, step(x), atol=0, rtol=0)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_tensors_of_a_device_that_is_not_current() -> None:
    x = random(64, 300, dtype=torch.float32)
    found = step(x.to("cuda:1").requires_grad_())
    torch.testing.assert_close(found.cpu(), step(x.requires_grad_()), atol=1e-5, rtol=1e-4)
    assert torch.cuda.current_device() == 0


@needs_cuda
def test_cuda_tensors_of_two_devices_are_refused() -> None:
    x = random(4, 8, device="cuda")
    with pytest.raises(ValueError, match="expected a tensor on cuda:0, got cpu"):
        pt.entmax(x, 1.5, mask=torch.ones(4, 8, dtype=torch.bool))

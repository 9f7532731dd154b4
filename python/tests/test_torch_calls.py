"""pullback.torch: calls and backward passes that take the short way past PyTorch's dispatcher."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback._native import BACKWARD, FORWARD  # noqa: E402
from pullback.torch import _operator  # noqa: E402
from pullback.torch._known import KnownCalls, know, unseen  # noqa: E402
from pullback.torch._operator import _Kernel  # noqa: E402
from pullback.torch._ops import ENTMAX  # noqa: E402
from torch_cases import CASES, DENSE, Case, on_devices, random  # noqa: E402


def test_modes_and_profilers_see_the_operators() -> None:
    """Though calls that nobody looks at take a shorter way."""
    x = random(4, 6).requires_grad_()
    expected = {"pullback::entmax", "pullback::entmax_backward"}

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.add(function.name())
            return function(*args, **kwargs or {})

    seen: set[str] = set()
    with Names():
        pt.entmax15(x).sum().backward()
    assert expected <= seen
    with torch.profiler.profile() as profile:
        pt.entmax15(x).sum().backward()
    assert expected <= {event.key for event in profile.key_averages()}
    assert unseen((x, None, torch.nn.Parameter(x)))
    with torch.inference_mode():
        inferred = pt.entmax15(x)
    assert inferred.is_inference() and unseen((inferred,))
    with torch.device("meta"):
        assert pt.entmax15(torch.empty(4, 6)).shape == (4, 6)


def test_selective_checkpointing_keeps_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of calls that are known, though its modes leave no trace in dispatch keys."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def run(self: Any, *arguments: Any) -> Any:
        passes.append(self.direction)
        return original(self, *arguments)

    def block(q: Tensor) -> Tensor:
        return pt.attention(q, q, q).square()

    passes: list[int] = []
    original = _Kernel.run
    monkeypatch.setattr(_Kernel, "run", run)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.pullback.attention.default])
    q = random(1, 6, 2, 4).requires_grad_()
    wanted = torch.autograd.grad(block(q).sum(), q)
    for _ in range(2):
        passes.clear()
        loss = checkpoint(block, q, use_reentrant=False, context_fn=contexts).sum()
        assert torch.equal(torch.autograd.grad(loss, q)[0], wanted[0])
        assert passes == [FORWARD, BACKWARD]
        block(q).sum().backward()


def test_calls_are_known_by_all_that_matters() -> None:
    x, ids = random(4, 6).requires_grad_(), torch.arange(4)
    calls = KnownCalls()
    calls.add(know((x, None, ids, ids), (1.0,), "first"))

    def known(*tensors: Any, options: Any = (1.0,)) -> bool:
        return calls.find(tensors, options) is not None

    other = random(4, 6, seed=1).requires_grad_()
    assert known(other, None, twin := ids + 1, twin)
    assert not known(other, None, twin, ids)
    assert not known(x, None, ids, ids, options=(2.0,))
    assert not known(x, ids, ids, None)
    assert not known(x, None, ids, ids.int())
    assert not known(x, None, ids[:3], ids[:3])
    for different in (
        x.detach(),
        torch.nn.Parameter(x),
        x.float(),
        x[:, :5],
        x.detach().t().contiguous().t().requires_grad_(),
        x.detach().to("meta").requires_grad_(),
        torch.complex(x, -x).conj().imag,
    ):
        assert not known(different, None, ids, ids)
    with torch.autocast("cpu"):
        assert not known(x, None, ids, ids)
    with torch.inference_mode():
        assert not known(x, None, ids, ids)
    with TorchDispatchMode():
        assert not known(x, None, ids, ids)
    torch.func.vmap(lambda row: row.sum() if not known(row, None, ids, ids) else 1 / 0)(
        x.unsqueeze(0)
    )

    for i in range(20):  # the first makes room for others
        calls.add(know((x[:1],), (float(i),), i))
    assert not known(x, None, ids, ids)
    assert [calls.find((x[:1],), (float(i),))[0].prepared for i in range(12, 20)] == [
        *range(12, 20)
    ]
    assert calls.find((x[:1],), (11.0,)) is None


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_calls_under_autocast_take_the_short_way(
    given: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some tensors are cast already, and where none is."""
    leaves = [random(1, 8, 2, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]

    def step() -> list[Tensor]:
        q, k, v = leaves
        with torch.autocast("cpu", torch.bfloat16):
            out = pt.attention(q.to(given), k.to(given), v)
        assert out.dtype == torch.bfloat16
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    with torch.profiler.profile() as profile:
        expected = step()
    assert "pullback::attention" in {event.key for event in profile.key_averages()}

    def find(self: KnownCalls, tensors: Any, options: Any) -> Any:
        result = original(self, tensors, options)
        found.append(result is not None)
        return result

    found: list[bool] = []
    original = KnownCalls.find
    monkeypatch.setattr(KnownCalls, "find", find)
    step()
    found.clear()
    torch.testing.assert_close(step(), expected, atol=0, rtol=0)
    assert found == [True]
    monkeypatch.undo()

    with torch.no_grad():
        with torch.autocast("cpu", torch.float16):
            assert pt.attention(*leaves).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert pt.attention(*leaves).dtype == torch.float32


def test_tracers_see_the_casts_of_autocast_once() -> None:
    q = random(1, 8, 2, 8, dtype=torch.float32)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(function.name())
            return function(*args, **kwargs or {})

    seen: list[str] = []
    with torch.autocast("cpu", torch.bfloat16), Names():
        pt.attention(q, q, q)
    assert seen == ["aten::_to_copy"] * 3 + ["pullback::attention"]


def test_inference_and_training_share_plans() -> None:
    x = random(5, 3)
    with torch.inference_mode():
        found = pt.segment_reduce(x, "sum", offsets=torch.tensor([0, 2, 5]))
    assert found.is_inference()
    trained = x.clone().requires_grad_()
    out = pt.segment_reduce(trained, "sum", offsets=torch.tensor([0, 2, 5]))
    assert torch.equal(out, found)
    (gradient,) = torch.autograd.grad(out.sum(), trained)
    assert torch.equal(gradient, torch.ones_like(x))


def test_calls_of_another_number_of_threads_have_their_own_plan() -> None:
    x = random(64, 300)
    expected = pt.entmax15(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert torch.equal(pt.entmax15(x), expected)
    finally:
        torch.set_num_threads(before)


def test_threads_may_make_room_for_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = _Kernel(ENTMAX, FORWARD, ("x",), ("alpha",), tuple), torch.zeros(1)
    monkeypatch.setattr(_Kernel, "_prepare", lambda self, *arguments: arguments)
    monkeypatch.setattr(_operator, "_MAX_PLANS", 64)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(
                threads.map(lambda n: [kernel.prepare((x,), (n, i)) for i in range(4000)], range(8))
            )
    finally:
        sys.setswitchinterval(interval)
    assert 64 <= len(kernel.plans) < 64 + 8


def test_options_may_be_tensors_that_change() -> None:
    q, k, v = (random(1, 6, 2, 4, seed=i) for i in range(3))
    scale = torch.tensor(0.5)
    first = pt.attention(q, k, v, scale=scale)
    scale.mul_(2)
    assert torch.equal(first, pt.attention(q, k, v, scale=0.5))
    assert torch.equal(pt.attention(q, k, v, scale=scale), pt.attention(q, k, v, scale=1.0))


def test_options_get_no_gradients_and_say_so() -> None:
    learnt = torch.tensor(0.5, requires_grad=True)
    q, a = random(1, 6, 2, 4, seed=1), random(1, 2, 32, 4, seed=2)
    scores = pt.block_matmul(a, a.mT, DENSE, "sdd", block=16)
    calls: list[tuple[str, Any]] = [
        ("scale", lambda: pt.attention(q, q, q, scale=learnt)),
        ("softcap", lambda: pt.attention(q, q, q, softcap=learnt)),
        ("dropout", lambda: pt.attention(q, q, q, dropout=learnt)),
        ("scale", lambda: pt.block_softmax(scores, DENSE, scale=learnt)),
        ("scale", lambda: pt.block_sparse_attention(*[a.transpose(1, 2)] * 3, DENSE, scale=learnt)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"{name}: expected a number, got a tensor"):
            call()
    pt.attention(q, q, q, scale=learnt.detach())


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_integers_may_be_those_of_numpy_and_of_tensors(number: Any) -> None:
    q, a = random(6, 2, 4).requires_grad_(), random(1, 2, 32, 4)
    ids, cu = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 3, 6])
    calls: list[tuple[Any, int]] = [
        (lambda n: pt.segment_reduce(q, "sum", ids=ids, num_segments=n), 3),
        (lambda n: pt.segment_permutation(ids, n), 3),
        (lambda n: pt.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n), 3),
        (lambda n: pt.attention(q[None], q[None], q[None], window=(n, n)), 1),
        (lambda n: pt.attention(*[a.transpose(1, 2)] * 3, layout=DENSE, block=n), 16),
        (lambda n: pt.block_matmul(a, a.mT, DENSE, "sdd", block=n), 16),
        (lambda n: pt.entmax15(q, n), 1),
        (lambda n: pt.sparsemax(random(32, 4).requires_grad_(), n), 0),
    ]
    for call, value in calls:
        first = call(number(value))
        torch.testing.assert_close([call(value), call(number(value))], [first] * 2, atol=0, rtol=0)
        with pytest.raises(TypeError, match="expected an integer, got"):
            call(float(value))
    segments = torch.tensor(3)
    for _ in range(2):
        assert len(pt.segment_reduce(q, "sum", ids=ids, num_segments=segments)) == segments
        segments.add_(1)


def test_what_is_saved_may_be_no_plain_tensor() -> None:
    y = random(1, 4, 1, 8).requires_grad_()
    negated = torch.complex(y, -y).conj().imag
    assert negated.is_neg() and not unseen((negated,))
    found = torch.autograd.grad(pt.attention(negated, negated, negated).sum(), y)
    expected = torch.autograd.grad(pt.attention(y, y, y).sum(), y)
    torch.testing.assert_close(found, expected)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        out = pt.entmax15(x := random(4, 6).requires_grad_())
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(pt.entmax15(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


def plain_gradients(outputs: Any, inputs: Any, upstream: Any) -> Any:
    """torch.autograd.grad with zeros for what is not reached."""
    found = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def test_a_backward_pass_is_known_by_all_that_matters() -> None:
    """Passes of one kind of call that differ in what they get and need, in any order, twice."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return pt.attention(q, k, v, causal=True, return_lse=True)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Any:
        s = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return torch.einsum("bhst,bthd->bshd", s.softmax(-1), v), s.logsumexp(-1)

    values = [random(2, 6, 2, 4, seed=i) for i in range(3)]
    d_out, d_lse = random(2, 6, 2, 4, seed=3), random(2, 2, 6, seed=4)
    upstreams = [
        (d_out, None),
        (None, d_lse),
        (d_out, d_lse),
        (d_out.mT.contiguous().mT, None),
        (d_out.sum().expand(d_out.shape), d_lse.mT.contiguous().mT),
    ]
    for _ in range(2):
        for needs in ((1, 1, 1), (0, 1, 0), (1, 0, 1)):
            inputs = [x.clone().requires_grad_(bool(n)) for x, n in zip(values, needs)]
            needed = [x for x in inputs if x.requires_grad]
            results, wanted = run(*inputs), expected(*inputs)
            for upstream in upstreams:
                pairs = [(a, b, g) for a, b, g in zip(results, wanted, upstream) if g is not None]
                ours, plain, given = zip(*[pair for pair in pairs if pair[0].requires_grad])
                torch.testing.assert_close(
                    plain_gradients(ours, needed, given), plain_gradients(plain, needed, given)
                )


def test_modes_hooks_and_threads_of_a_backward_pass_alone() -> None:
    x = random(64, 6).requires_grad_()
    wanted = torch.autograd.grad(pt.entmax15(x).square().sum(), x)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.add(function.name())
            return function(*args, **kwargs or {})

    seen: set[str] = set()
    out = pt.entmax15(x).square().sum()
    with Names():
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], wanted[0])
    assert "pullback::entmax_backward" in seen
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, x, retain_graph=True)
    assert "pullback::entmax_backward" in {event.key for event in profile.key_averages()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(torch.autograd.grad(out, x)[0], wanted[0])
    finally:
        torch.set_num_threads(threads)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT, lambda t: t):
        out = pt.entmax15(x).square().sum()
    torch.testing.assert_close(torch.autograd.grad(out, x), wanted)
    (first,) = torch.autograd.grad(pt.entmax15(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


def test_the_same_tensor_twice() -> None:
    x = random(2, 6, 2, 4).requires_grad_()
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    copies = [x.detach().clone().requires_grad_() for _ in "qkv"]
    for _ in range(2):
        (found,) = torch.autograd.grad(pt.attention(x, x, x).square().sum(), x)
        parts = torch.autograd.grad(pt.attention(*copies).square().sum(), copies)
        torch.testing.assert_close(found, sum(parts))
        packed = pt.attention(x[0], x[0], x[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
        (found,) = torch.autograd.grad(packed.square().sum(), x)
        halves = pt.attention(*[x[0].unflatten(0, (2, 3))] * 3)
        torch.testing.assert_close(found, *torch.autograd.grad(halves.square().sum(), x))


@on_devices([c for c in CASES if c.name in ("attention-bias", "entmax-sparsemax", "segment-max")])
def test_compiled_autograd(case: Case, device: str) -> None:
    from torch._dynamo import compiled_autograd

    torch.compiler.reset()
    inputs = case.inputs(device)
    wanted = torch.autograd.grad(case.f(*inputs).square().sum(), inputs)
    for _ in range(2):
        loss = case.f(*inputs).square().sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        torch.testing.assert_close([x.grad for x in inputs], list(wanted))
        for x in inputs:
            x.grad = None


WITHOUT_OWN_NAMES = """
import sys, pytest, torch
names = torch._C._dynamo.guards
gone = {name: getattr(names, name) for name in ("TensorGuards", "_empty_strided_cpu")}
for name in gone:
    delattr(names, name)
import pullback.torch
for name, value in gone.items():
    setattr(names, name, value)
assert not pullback.torch._known.available
cases = "attention-bias or entmax-sparsemax or segment-max or dropout or second or forward_mode"
options = ["-q", "-p", "no:cacheprovider", "-k", f"({cases}) and not cuda"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


def test_without_names_of_pytorchs_own() -> None:
    """If those go that tell which calls may leave the dispatcher out, all take the public way."""
    tests = ["test_torch.py", "test_torch_features.py"]
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_OWN_NAMES, *tests],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_seeds_are_of_64_bits() -> None:
    q = random(1, 4, 1, 8)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="seed: expected a number that fits 64 bits"):
            pt.attention(q, q, q, dropout=0.5, seed=seed)
    same = [pt.attention(q, q, q, dropout=0.5, seed=seed) for seed in (-1, 2**64 - 1)]
    assert torch.equal(*same)

"""pullback.torch: what each op has of its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback import sparsity  # noqa: E402
from pullback._native import NONDETERMINISTIC  # noqa: E402
from torch_cases import DENSE, DEVICES, random  # noqa: E402

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


def test_a_block_layout_is_a_mask() -> None:
    layout = sparsity.BigBirdSparsityConfig(2).make_layout(64)
    inputs = [random(2, 64, 2, 4, seed=i).requires_grad_() for i in range(3)]
    out = pt.attention(*inputs, layout=layout, block=16)
    expected = pt.block_sparse_attention(*inputs, layout)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="attention: .*block"):
        pt.attention(*inputs, layout=layout, block=32)


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
    seeded = [pt.attention(q, k, v, dropout=0.5, seed=s) for s in (7, torch.tensor(7), 8)]
    assert torch.equal(*seeded[:2]) and not torch.equal(*seeded[1:])
    large = [pt.attention(q, k, v, dropout=0.5, seed=s) for s in (2**64 - 3, torch.tensor(-3))]
    assert torch.equal(*large)
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


def test_dropout_compiles() -> None:
    q, k, v = (random(1, 32, 2, 8, seed=i).requires_grad_() for i in range(3))

    def f(*tensors: Tensor) -> Tensor:
        return pt.attention(*tensors, dropout=0.5)

    torch.compiler.reset()
    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.testing.assert_close(*results, atol=0, rtol=0)


def test_autocast_casts_products_only() -> None:
    q, k, v = (random(1, 8, 2, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = pt.attention(q, k, v)
        y = pt.entmax15(q)
    assert out.dtype == torch.bfloat16 and y.dtype == torch.float32
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.grad(lambda q: pt.attention(q, k, v).sum())(q.detach())
    torch.testing.assert_close(found, q.grad, atol=0, rtol=0)


def test_deterministic_algorithms_win() -> None:
    q = random(1, 8, 2, 8)

    class Flags(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            names = [argument.name for argument in function._schema.arguments]
            flags.append(args[names.index("flags")])
            return function(*args, **kwargs or {})

    flags: list[int] = []
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            with Flags():
                pt.attention(q, q, q, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags == [NONDETERMINISTIC, 0]


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
    for shape, own in itertools.product(((5,), (5, 2), (5, 2, 3)), (None, ids)):
        x = random(*shape).requires_grad_()
        out = pt.segment_reduce(x, "sum", permutation=permutation, offsets=offsets, ids=own)
        expected = torch.zeros(3, *shape[1:], dtype=x.dtype).index_add(0, ids, x)
        torch.testing.assert_close(out, expected)
        found, wanted = (torch.autograd.grad(y.square().sum(), x) for y in (out, expected))
        torch.testing.assert_close(found, wanted)
    y = pt.segment_softmax(x, permutation=permutation, offsets=offsets)
    torch.testing.assert_close(y[ids == 2].sum(0), torch.ones(2, 3, dtype=y.dtype))


def test_segment_arg_and_ties() -> None:
    x = torch.tensor([[1.0], [3.0], [3.0], [2.0]], requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 4])
    out, arg = pt.segment_reduce_arg(x, "max", offsets=offsets)
    assert arg.tolist() == [[1], [-1], [3]]
    gradients = {"first": [0, 1, 0, 1], "last": [0, 0, 1, 1], "even": [0, 0.5, 0.5, 1]}
    for ties, expected in gradients.items():
        y = pt.segment_reduce(x, "max", offsets=offsets, ties=ties, empty="zero")
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logsumexp_saves_more_than_its_result(dtype: torch.dtype) -> None:
    x = (random(40, 6) + 30).to(dtype).requires_grad_()
    offsets = torch.tensor([0, 15, 15, 40])
    out = pt.segment_reduce(x, "logsumexp", offsets=offsets)
    assert out.dtype == dtype
    saved = {t.dtype for t in out.grad_fn.saved_tensors if t is not None}
    assert torch.float32 in saved
    d_out = torch.ones_like(out)
    (found,) = torch.autograd.grad(out, x, d_out)
    exact = torch.cat([torch.softmax(part.double(), 0) for part in x.detach().split([15, 25])])
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=1e-7)


def test_sums_do_not_keep_their_input_alive() -> None:
    x = random(100, 8).requires_grad_()
    for reduce in ("sum", "mean", "max", "softmax"):
        out = pt.segment_reduce(x, reduce, offsets=torch.tensor([0, 50, 100]))
        held = [t.untyped_storage().data_ptr() for t in out.grad_fn.saved_tensors if t is not None]
        assert x.untyped_storage().data_ptr() not in held


def test_tensors_of_two_devices_are_refused() -> None:
    mask = torch.ones(4, 6, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="mask: expected a tensor on cpu, got meta"):
        pt.entmax15(random(4, 6), mask=mask)


def test_forward_mode_derivatives_are_refused() -> None:
    from torch.autograd import forward_ad

    x = random(3, 5)
    with pytest.raises(NotImplementedError, match="segment: forward-mode derivatives"):
        torch.func.jvp(lambda x: pt.segment_reduce(x, offsets=torch.tensor([0, 3])), (x,), (x,))
    with pytest.raises(NotImplementedError, match="entmax: forward-mode derivatives"):
        torch.func.jacfwd(pt.entmax15)(x)
    with forward_ad.dual_level():
        for given in (x.clone(), x.clone().requires_grad_()):
            with pytest.raises(NotImplementedError, match="entmax: forward-mode derivatives"):
                pt.entmax15(forward_ad.make_dual(given, x))
        assert torch.equal(pt.entmax15(x), pt.entmax15(x.clone()))


def test_forms_of_an_op_are_refused_by_its_name_and_known_by_their_own() -> None:
    x = random(4, 3).requires_grad_()
    out = pt.segment_reduce(x, "max", offsets=torch.tensor([0, 4]))
    assert out.grad_fn.name() == "segment_argBackward"
    with pytest.raises(NotImplementedError, match="^segment: batches of gradients"):
        torch.autograd.grad(out, x, random(6, 1, 3), retain_graph=True, is_grads_batched=True)
    (d_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^segment: second derivatives"):
        d_x.sum().backward()


def test_errors_of_the_library_reach_the_caller() -> None:
    q = random(2, 4, 2, 8)
    with pytest.raises(ValueError, match="attention: k: expected the batch size of q, 2"):
        pt.attention(q, q[:1], q)
    with pytest.raises(ValueError, match="q: expected dtype float64, .*got torch.int16; convert"):
        pt.attention(q.to(torch.int16), q, q)
    with pytest.raises(ValueError, match="offsets: expected dtype int32 or int64, got torch.int16"):
        pt.segment_reduce(q[0, :, 0], offsets=torch.tensor([0, 4], dtype=torch.int16))
    with pytest.raises(RuntimeError, match="type 'Tensor' for argument 'q' .* type 'ndarray'"):
        pt.attention(q.numpy(), q, q)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="needed|one of|offsets"):
        pt.segment_reduce(q[0, :, 0], "sum")
    with pytest.raises(ValueError, match="num_segments: expected a number, as ids are given"):
        pt.segment_reduce(q[0, :, 0], "sum", ids=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x: expected \[N,...\], got rank 0"):
        pt.segment_reduce(q[0, 0, 0, 0], "sum", offsets=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"window: expected \(left, right\), .* got 3"):
        pt.attention(q, q, q, window=3)
    with pytest.raises(TypeError, match="layout: expected a BlockLayout, got ndarray"):
        pt.block_softmax(q, DENSE.present)
    with pytest.raises(ValueError, match=r"alpha: .* broadcasts to \[2, 4, 2\], got \[3\]"):
        pt.entmax(q, torch.ones(3))
    with pytest.raises(ValueError, match=r"alpha: .* broadcasts to \[4\], got \[4, 4\]"):
        pt.entmax(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(ValueError, match="ties: expected 'first' or 'last'"):
        pt.segment_reduce_arg(q[0, :, 0], "max", offsets=torch.tensor([0, 2]), ties="even")
    with pytest.raises(ValueError, match=r"window: expected .* -1 for no bound; got \(0,\)"):
        pt.attention(q, q, q, window=(0,))  # type: ignore[arg-type]
    for leaf in (q.flatten(1), q.flatten(1).requires_grad_()):
        with pytest.raises(ValueError, match=r"entmax: axis: expected .*, got 5"):
            pt.sparsemax(leaf, 5)
    alpha, leaf = torch.tensor(2.0), random(3, 32).requires_grad_()
    for call in (
        lambda: pt.entmax(q, 1.5, None),  # type: ignore[arg-type]
        lambda: pt.entmax(q, alpha, None),  # type: ignore[arg-type]
        lambda: pt.sparsemax(leaf, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="entmax: axis: expected a number, got None"):
            call()
    with pytest.raises(ValueError, match=r"entmax: offsets: expected \[G\+1\], got \[\]"):
        pt.entmax(leaf, alpha, offsets=torch.tensor(0))
    with pytest.raises(ValueError, match=r"entmax: offsets: expected G \+ 1 elements .* got 0"):
        pt.entmax(leaf, alpha, offsets=torch.zeros(0, dtype=torch.int64))


def test_other_ranks_are_refused() -> None:
    ids, cu = torch.tensor(0), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="ids: expected rank 1"):
        pt.segment_permutation(ids, 1)
    with pytest.raises(ValueError, match="offsets: expected rank 1"):
        pt.segment_reduce(torch.ones(2, 2), offsets=ids)
    for rank in range(3):
        x, good = torch.ones((16,) * rank), torch.ones(1, 1, 16, 16)
        for call in (
            lambda x=x: pt.attention(x, x, x),
            lambda x=x, good=good: pt.attention(good, good, x),
            lambda x=x: pt.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu),
            lambda x=x: pt.block_sparse_attention(x, x, x, DENSE),
            lambda x=x: pt.block_softmax(x, DENSE),
            lambda x=x, good=good: pt.block_matmul(good, x, DENSE, "dsd"),
            lambda x=x: pt.block_matmul(x, x, DENSE, "sdd", block=16),
        ):
            with pytest.raises(ValueError, match=r": [qvabx]: expected \[.*got .*\["):
                call()


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


def test_meta_tensors() -> None:
    q = torch.empty(2, 5, 3, 8, device="meta", requires_grad=True)
    out = pt.attention(q, q, q)
    assert out.device.type == "meta" and out.shape == q.shape
    y = pt.entmax15(q)
    assert y.device.type == "meta" and y.shape == q.shape
    (d_q,) = torch.autograd.grad(out.sum(), q)
    assert d_q.device.type == "meta" and d_q.shape == q.shape
    # As on the CPU, so that a model that is built there for its shapes is refused there.
    with pytest.raises(ValueError, match="attention: k: expected the head dim of q, 8, got"):
        pt.attention(q, q[..., :4], q)
    with pytest.raises(ValueError, match="entmax: x: expected dtype .*, got i64"):
        pt.entmax15(torch.empty(3, 4, dtype=torch.int64, device="meta"))


def test_numbers_may_be_those_of_numpy_but_not_floats() -> None:
    q = random(1, 5, 2, 8)
    seeded = pt.attention(q, q, q, dropout=0.5, seed=5)
    assert torch.equal(pt.attention(q, q, q, dropout=0.5, seed=np.int64(5)), seeded)
    with pytest.raises(TypeError):
        pt.attention(q, q, q, dropout=0.5, seed=1.5)  # type: ignore[call-overload]


def test_none_bounds_and_caps_nothing() -> None:
    q = random(1, 5, 2, 8)
    for _ in range(2):
        for left, right in ((None, None), (None, 0), (1, None)):
            numbers = [-1 if bound is None else bound for bound in (left, right)]
            found = pt.attention(q, q, q, window=(left, right), softcap=None)
            assert torch.equal(found, pt.attention(q, q, q, window=tuple(numbers)))


def test_a_refused_float_leaves_no_trace_in_what_is_remembered() -> None:
    q = random(1, 5, 2, 8)
    for call in (
        lambda one: pt.entmax(q, 1.3, one),
        lambda one: pt.attention(q, q, q, window=(one, 0)),
    ):
        with pytest.raises(TypeError):
            call(1.0)
        assert call(1).shape == q.shape


def test_a_number_of_segments_that_the_data_gives_is_compiled() -> None:
    def count(x: Tensor, ids: Tensor) -> Tensor:
        return pt.segment_reduce(x, "sum", ids=ids, num_segments=int(ids.max()) + 1)

    x, ids = random(6, 3), torch.tensor([0, 0, 1, 1, 3, 3])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(count, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, ids), count(x, ids))


def test_options_within_tuples_may_be_tensors_that_change() -> None:
    q = random(1, 8, 2, 8)
    left = torch.tensor(1)
    pt.attention(q, q, q, window=(left, 0))  # type: ignore[typeddict-item]
    left.fill_(4)
    found = pt.attention(q, q, q, window=(left, 0))  # type: ignore[typeddict-item]
    assert torch.equal(found, pt.attention(q, q, q, window=(4, 0)))

"""pullback.compat: what the originals document, on ties, empties and dtypes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback import compat  # noqa: E402
from torch_cases import random  # noqa: E402


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def test_flash_attn_func() -> None:
    q, k, v = random(2, 4, 4, 8), random(2, 6, 2, 8, seed=1), random(2, 6, 2, 8, seed=2)
    torch.testing.assert_close(compat.flash_attn_func(q, k, v), sdpa(q, k, v, enable_gqa=True))
    # The documented example of the bottom-right corner, and of a window.
    rows, columns = torch.arange(4)[:, None] + 2, torch.arange(6)
    out, lse, probabilities = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    causal = columns <= rows
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=causal, enable_gqa=True))
    assert lse.shape == (2, 4, 4) and probabilities is None
    window = (columns >= rows - 1) & (columns <= rows + 2)
    found = compat.flash_attn_func(q, k, v, window_size=(1, 2), softmax_scale=0.3)
    torch.testing.assert_close(found, sdpa(q, k, v, attn_mask=window, scale=0.3, enable_gqa=True))
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        compat.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4))


def test_flash_attn_varlen_func_and_packed() -> None:
    qkv = random(10, 3, 2, 8)
    q, k, v = qkv.unbind(1)
    kv = qkv[:, 1:]
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    out = compat.flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True)
    for packed in (
        lambda a, b: compat.flash_attn_qkvpacked_func(qkv[None, a:b], 0.0, None, True),
        lambda a, b: compat.flash_attn_kvpacked_func(q[None, a:b], kv[None, a:b], causal=True),
    ):
        parts = [packed(a, b)[0] for a, b in ((0, 4), (4, 10))]
        torch.testing.assert_close(out, torch.cat(parts))
    for same in (
        compat.flash_attn_varlen_qkvpacked_func(qkv, cu, 6, causal=True),
        compat.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 6, 6, 0.0, None, True),
    ):
        assert torch.equal(out, same)


def test_options_of_flash_attn_varlen_func() -> None:
    q, k, v = random(10, 4, 8), random(14, 2, 8, seed=1), random(14, 2, 8, seed=2)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 4, 10], [0, 9, 14]))
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 2)}
    options["softcap"] = 2.0
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 6, 9, return_attn_probs=True, **options
    )
    assert lse.shape == (4, 10)
    for (a, b), (c, d) in (((0, 4), (0, 9)), ((4, 10), (9, 14))):
        one = q[None, a:b], k[None, c:d], v[None, c:d]
        expected = pt.attention(*one, scale=0.3, causal=True, window=(3, -1), softcap=2.0)
        torch.testing.assert_close(out[a:b], expected[0])
        torch.testing.assert_close(compat.flash_attn_func(*one, **options)[0], expected[0])
    for plain in ({"softcap": 0.0}, {"window_size": (-1, -1)}, {"softmax_scale": None}):
        other = compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 9, **{**options, **plain})
        assert not torch.allclose(out, other), plain


def test_dropout_of_flash_attn() -> None:
    q = random(1, 40, 2, 8)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    for call in (
        lambda p: compat.flash_attn_func(q, q, q, dropout_p=p),
        lambda p: compat.flash_attn_varlen_func(*[q[0]] * 3, cu, cu, 40, 40, dropout_p=p)[None],
    ):
        torch.manual_seed(1)
        first, second = call(0.5), call(0.5)
        torch.manual_seed(1)
        assert torch.equal(first, call(0.5)) and not torch.equal(first, second)
        torch.testing.assert_close(call(0.0), sdpa(q, q, q))


def test_rows_that_see_nothing_give_zeros_and_no_gradient() -> None:
    q = random(1, 4, 1, 8).requires_grad_()
    k = random(1, 2, 1, 8, seed=1).requires_grad_()
    out = compat.flash_attn_func(q, k, k, causal=True)
    assert (out[:, :2] == 0).all()
    (d_q,) = torch.autograd.grad(out.sum(), q)
    assert (d_q[:, :2] == 0).all() and torch.isfinite(d_q).all()


def test_segment_csr() -> None:
    """The example of torch_scatter's documentation, and what it says of empty segments."""
    src = torch.arange(1.0, 7)
    indptr = torch.tensor([0, 2, 2, 6])
    for reduce, expected in {
        "sum": [3, 0, 18],
        "add": [3, 0, 18],
        "mean": [1.5, 0, 4.5],
        "min": [1, 0, 3],
        "max": [2, 0, 6],
    }.items():
        assert compat.segment_csr(src, indptr, reduce=reduce).tolist() == expected
    out, arg = compat.segment_max_csr(src, indptr)
    assert out.tolist() == [2, 0, 6] and arg.tolist() == [1, 6, 5]
    assert compat.segment_min_csr(src, indptr)[1].tolist() == [0, 6, 2]
    # Leading dimensions of indptr are broadcast.
    batch = random(3, 6, 2)
    out = compat.segment_csr(batch, indptr[None], reduce="sum")
    assert out.shape == (3, 3, 2)
    torch.testing.assert_close(out[:, 2], batch[:, 2:].sum(1))
    for name in ("sum", "add", "mean"):
        named = getattr(compat, f"segment_{name}_csr")
        assert named(src, indptr).equal(compat.segment_csr(src, indptr, reduce=name))
    with pytest.raises(ValueError, match="reduce"):
        compat.segment_csr(src, indptr, reduce="median")
    wanted = r"segment_csr: out: expected \[3\] torch.float32 on cpu, got \[2\] torch.float32 on"
    with pytest.raises(ValueError, match=wanted):
        compat.segment_csr(src, indptr, out=torch.empty(2))


def test_segment_coo() -> None:
    src = random(5, 3).requires_grad_()
    index = torch.tensor([0, 0, 1, 3, 3])
    out = compat.segment_coo(src, index, reduce="mean")
    assert out.shape == (4, 3) and (out[2] == 0).all()
    torch.testing.assert_close(out[3], src[3:].mean(0))
    assert compat.segment_coo(src, index, dim_size=6).shape == (6, 3)
    values, arg = compat.segment_min_coo(src, index)
    torch.testing.assert_close(values[3], src[3:].min(0).values)
    assert (arg[2] == 5).all()
    (gradient,) = torch.autograd.grad(compat.segment_max_coo(src, index)[0].sum(), src)
    assert gradient.sum(0).tolist() == [3, 3, 3]
    for name in ("sum", "add", "mean"):
        named = getattr(compat, f"segment_{name}_coo")
        assert named(src, index, dim_size=6).equal(compat.segment_coo(src, index, None, 6, name))
    # An index of one element is that of all rows.
    torch.testing.assert_close(compat.segment_coo(src, torch.tensor([1]))[1], src.sum(0))
    batch = compat.segment_coo(random(2, 5), torch.stack([index, index]), dim_size=4)
    assert batch.shape == (2, 4)
    for reduce in ("sum", "max"):
        with pytest.raises(ValueError, match="ids"):
            compat.segment_coo(src, index.flip(0), reduce=reduce, dim_size=4)
        with pytest.raises(ValueError, match=r"ids\[3\]: expected 0 to 2, got 3"):
            compat.segment_coo(src, index, reduce=reduce, dim_size=3)


def test_results_in_a_given_tensor() -> None:
    """Written over by _csr and gather_*, joined by _coo, with both gradients."""
    src = random(2, 5, 3)
    indptr, index = torch.tensor([0, 2, 3, 3, 5]), torch.tensor([0, 0, 1, 3, 3])
    for reduce in ("sum", "mean", "min", "max"):
        wide = torch.full((2, 4, 6), 7.0, dtype=src.dtype)
        out = wide[..., ::2]
        result = compat.segment_csr(src, indptr[None], out, reduce)
        assert result is out and (wide[..., 1::2] == 7).all()
        assert out.equal(compat.segment_csr(src, indptr[None], reduce=reduce))
    out = torch.empty_like(src)
    assert compat.gather_csr(src[:, :4], indptr[None], out) is out and out.equal(src[:, index])
    out = torch.empty_like(src)
    assert compat.gather_coo(src, index[None], out) is out and out.equal(src[:, index])

    before = random(2, 4, 3, seed=1) * 0.3

    def joined(src: Tensor, before: Tensor, reduce: str) -> Tensor:
        return compat.segment_coo(src, index[None], before.clone(), reduce=reduce)

    for reduce in ("sum", "mean", "min", "max"):
        out = joined(src, before, reduce)
        for segment in range(4):
            rows = src[:, index == segment]
            both = torch.cat([before[:, segment : segment + 1], rows], 1)
            expected = {
                "sum": both.sum(1),
                "mean": both.sum(1) / max(rows.shape[1], 1),
                "min": both.amin(1),
                "max": both.amax(1),
            }[reduce]
            torch.testing.assert_close(out[:, segment], expected)
        inputs = src.clone().requires_grad_(), before.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, b, r=reduce: joined(x, b, r), inputs)
    # Sums that 16 bits do not hold, one index for all rows, and no row.
    hundreds, zeros = torch.full((1001,), 100.0, dtype=torch.float16), torch.zeros(1001).long()
    given = torch.tensor([1001.0, 3], dtype=torch.float16)
    assert compat.segment_coo(hundreds, zeros, given, reduce="mean").tolist() == [101, 3]
    assert compat.segment_coo(torch.ones(3), torch.tensor([1]), torch.ones(2)).tolist() == [1, 4]
    assert compat.segment_coo(torch.ones(0), zeros[:0], torch.ones(2)).tolist() == [1, 1]
    assert compat.segment_csr(torch.ones(0), zeros[:3], torch.ones(2)).tolist() == [0, 0]
    # Values that are no better than what is there, and NaN.
    nan = float("nan")
    out = torch.tensor([5.0, nan, 1, 9])
    values, arg = compat.segment_max_coo(torch.tensor([5.0, nan, 3]), torch.tensor([0, 2, 3]), out)
    assert values is out and arg.tolist() == [3, 3, 1, 3]
    assert out[0] == 5 and out[1:3].isnan().all() and out[3] == 9
    for bad in (torch.empty(4), torch.empty(2, 4, 2), torch.empty(2, 4, 3, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"segment_coo: out: expected \[2, .*, 3\] torch"):
            compat.segment_coo(src, index[None], bad)


def test_gathers() -> None:
    """Each row of src as often as its segment is long, and the sums of segments as gradients."""
    src = random(3, 4).requires_grad_()
    indptr, index = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 2, 2, 2])
    for gathered in (
        lambda x: compat.gather_csr(x, indptr),
        lambda x: compat.gather_coo(x, index),
        lambda x: compat.gather_csr(x[None], indptr[None])[0],
        lambda x: compat.gather_coo(x[None], index[None])[0],
    ):
        assert torch.equal(gathered(src), src[index])
        assert torch.autograd.gradcheck(gathered, src)
    assert compat.gather_coo(torch.arange(3), index).tolist() == index.tolist()
    with pytest.raises(ValueError, match=r"ids\[1\]: expected at least 2"):
        compat.gather_coo(src, torch.tensor([2, 0, 1])).sum().backward()
    with pytest.raises(ValueError, match="gather_csr: indptr: expected 4 offsets, .* got 2"):
        compat.gather_csr(src, indptr[:2])


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_one_index_of_all_items_is_that_of_each(lead: tuple[int, ...]) -> None:
    indptr, index = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 0, 2, 2, 2, 3])
    one, ones = (None,) * len(lead) + (...,), (*lead, -1)
    for call, row, rows in (
        (compat.segment_max_csr, indptr, 6),
        (lambda x, i: (compat.segment_csr(x, i, reduce="mean"),), indptr, 6),
        (lambda x, i: compat.segment_min_coo(x, i, dim_size=5), index, 6),
        (lambda x, i: (compat.gather_csr(x, i),), indptr, 3),
        (lambda x, i: (compat.gather_coo(x, i),), index, 4),
    ):
        src = random(*lead, rows, 2, 2).requires_grad_()
        found, expected = call(src, row[one]), call(src, row.expand(ones))
        # Rows of another width may be summed in another order.
        torch.testing.assert_close(found, expected)
        d_out = random(*found[0].shape, seed=1)
        gradients = [torch.autograd.grad(out[0], src, d_out)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_shapes_that_do_not_fit_are_refused() -> None:
    src = random(3, 4)
    for call in (compat.segment_csr, compat.segment_coo, compat.gather_csr, compat.gather_coo):
        for shape in ((), (2, 3), (3, 4, 5)):
            with pytest.raises(ValueError, match="expected leading dimensions .* src .3, 4., and"):
                call(src, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"qkv: expected \[B,S,3,H,D\], got \[2, 4, 8\]"):
        compat.flash_attn_qkvpacked_func(random(2, 4, 8))
    with pytest.raises(ValueError, match=r"kv: expected \[total,2,H,D\], got \[4, 3, 2, 8\]"):
        cu = torch.tensor([0, 4])
        compat.flash_attn_varlen_kvpacked_func(src, random(4, 3, 2, 8), cu, cu, 4, 4)
    with pytest.raises(ValueError, match="alpha: expected what broadcasts"):
        compat.entmax_bisect(src, torch.ones(3, 4))


def test_segments_of_no_batch() -> None:
    src = torch.ones(0, 6, 3)
    assert compat.segment_csr(src, torch.tensor([[0, 2, 6]])).shape == (0, 2, 3)
    assert compat.segment_coo(src, torch.zeros(0, 6, dtype=torch.int64), dim_size=4).shape == (
        0,
        4,
        3,
    )
    out, arg = compat.segment_max_csr(src, torch.zeros(0, 3, dtype=torch.int64))
    assert out.shape == arg.shape == (0, 2, 3) and arg.dtype == torch.int64
    none = torch.zeros(0, 0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"segment_csr: indptr: expected S\+1 offsets, .* got 0"):
        compat.segment_csr(src, none)
    for call, index in ((compat.segment_csr, none.new_zeros(0, 3)), (compat.segment_coo, none)):
        with pytest.raises(ValueError, match=f"{call.__name__}: reduce: expected sum, .*'median'"):
            call(src, index, reduce="median")


def test_ties_go_to_the_first() -> None:
    src = torch.tensor([2.0, 5, 5, 5], requires_grad=True)
    out, arg = compat.segment_max_csr(src, torch.tensor([0, 4]))
    (gradient,) = torch.autograd.grad(out.sum(), src)
    assert arg.tolist() == [1] and gradient.tolist() == [0, 1, 0, 0]


def test_entmax_functions_and_modules() -> None:
    x = random(3, 7)
    sparse, fifteen = compat.sparsemax(x), compat.entmax15(x)
    torch.testing.assert_close(compat.Sparsemax(dim=0, k=4)(x.T), sparse.T)
    torch.testing.assert_close(compat.Entmax15()(x), fifteen)
    torch.testing.assert_close(compat.entmax_bisect(x, alpha=1.5, n_iter=20), fifteen)
    torch.testing.assert_close(compat.sparsemax_bisect(x), sparse)
    torch.testing.assert_close(compat.SparsemaxBisect()(x), sparse)
    # One alpha for each row, with size 1 where the rows are, as entmax_bisect has it.
    alpha = torch.tensor([[1.2], [1.5], [2.0]], dtype=torch.float64, requires_grad=True)
    y = compat.entmax_bisect(x, alpha)
    torch.testing.assert_close(y[2], sparse[2])
    (d_alpha,) = torch.autograd.grad(y.square().sum(), alpha)
    assert d_alpha.shape == alpha.shape and (d_alpha != 0).all()
    assert compat.EntmaxBisect(alpha=1.2)(x)[0].allclose(y[0])
    assert compat.EntmaxBisect(alpha=alpha)(x).equal(y)
    # Of fewer dimensions it broadcasts from the last one on, dim's with size 1 among them.
    heads = random(2, 2, 4, 5, seed=1)
    one_each = torch.tensor([1.2, 2.0], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    y = compat.entmax_bisect(heads, one_each)
    torch.testing.assert_close(y[:, 1], compat.sparsemax(heads[:, 1]))
    (d_alpha,) = torch.autograd.grad(y.square().sum(), one_each)
    assert d_alpha.shape == one_each.shape
    sizes = compat.Sparsemax(dim=0, return_support_size=True)(x.T)[1]
    assert sizes.equal((sparse > 0).sum(-1)[None])
    assert compat.entmax15(x, return_support_size=True)[1].shape == (3, 1)
    with pytest.raises(ValueError, match="entmax: x: expected rank 1 to 8"):
        compat.sparsemax(x[0, 0])
    # A row of -inf, which is NaN there.
    assert (compat.entmax15(torch.full((2, 3), -torch.inf)) == 0).all()

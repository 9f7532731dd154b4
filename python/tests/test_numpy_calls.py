"""pullback.numpy: what a call takes beside its arrays, and arrays that are more than memory."""

from __future__ import annotations

import numpy as np
import pytest

import pullback.numpy as pn


def test_none_stands_for_what_is_not_given() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
    expected, _ = pn.attention(q, q, q)
    found, _ = pn.attention(q, q, q, variant=None, window=(None, None), softcap=None, seed=None)
    np.testing.assert_array_equal(found, expected)
    dropped, _ = pn.attention(q, q, q, dropout=0.5, seed=None)
    np.testing.assert_array_equal(dropped, pn.attention(q, q, q, dropout=0.5)[0])
    causal, _ = pn.attention(q, q, q, window=(None, 0))
    np.testing.assert_array_equal(causal, pn.attention(q, q, q, causal=True)[0])
    arrays = {"x": (x := q[0, 0]), "mask": None}
    plan = pn.plan("entmax", "forward", arrays, alpha=1.5)
    plan.run({**arrays, "y": (y := plan.empty("y"))})
    np.testing.assert_array_equal(y, pn.entmax(x))
    with pytest.raises(TypeError, match="entmax has no masks"):
        pn.plan("entmax", "forward", {"x": x, "masks": None})


def test_a_gradient_may_be_named_twice() -> None:
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 8))
    out, lse = pn.attention(q, k, v)
    once, twice = (
        pn.attention_backward(d_out, q, k, v, out, lse, needs=needs)
        for needs in (["d_q", "d_v"], ["d_q", "d_q", "d_v"])
    )
    np.testing.assert_array_equal(twice.d_q, once.d_q)
    np.testing.assert_array_equal(twice.d_v, once.d_v)
    assert twice.d_k is None


def test_threads_that_do_not_fit_are_refused() -> None:
    for threads in (10**12, -(2**32) + 1):
        with pytest.raises(ValueError, match=f"entmax: threads: expected .*, got {threads}"):
            pn.entmax(np.ones(4), threads=threads)


def test_masked_arrays_are_refused_rather_than_read_without_their_mask() -> None:
    x = np.ma.masked_array(np.ones((2, 4)), mask=np.eye(2, 4))
    alpha = np.ma.masked_array([1.5, 2.0], mask=[True, False])
    plan = pn.plan("entmax", "forward", {"x": x.data, "y": x.data})
    for call in (
        lambda: pn.entmax(x),
        lambda: pn.entmax(x.data, alpha),
        lambda: pn.entmax_backward(x, x.data),
        lambda: pn.plan("entmax", "forward", {"x": x}),
        lambda: plan.run({"x": x, "y": np.empty((2, 4))}),
    ):
        with pytest.raises(TypeError, match=r"entmax: \w+: .* got a MaskedArray; give .*filled"):
            call()
    np.testing.assert_allclose(pn.entmax(x.filled(-np.inf)).sum(-1), 1)


def test_a_seed_is_64_bits_with_a_sign_or_without() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
    expected, _ = pn.attention(q, q, q, dropout=0.5, seed=2**64 - 1)
    np.testing.assert_array_equal(pn.attention(q, q, q, dropout=0.5, seed=-1)[0], expected)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"attention: seed: expected 64 bits.*, got {seed}"):
            pn.attention(q, q, q, dropout=0.5, seed=seed)


def test_unknown_keywords_are_refused_by_the_name_of_what_was_called() -> None:
    q = np.ones((1, 5, 2, 8))
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword .*'is_causal'"):
        pn.attention(q, q, q, is_causal=True)  # type: ignore[call-arg]


def test_permutations_take_what_every_run_takes() -> None:
    ids = np.array([1, 0, 1])
    memory = np.empty(1 << 16, np.uint8)
    permutation, offsets = pn.segment_permutation(ids, 2, threads=1, workspace=memory)
    assert permutation.tolist() == [1, 0, 2] and offsets.tolist() == [0, 1, 3]


def test_a_plan_needs_arrays_and_somewhere_to_write() -> None:
    x = np.ones((2, 4))
    plan = pn.plan("entmax", "forward", {"x": x})
    with pytest.raises(ValueError, match="entmax: outputs: expected some of y, .*, got none"):
        plan.run({"x": x})
    with pytest.raises(TypeError, match="entmax: x: expected an array, got list"):
        plan.run({"x": x.tolist(), "y": np.empty_like(x)})

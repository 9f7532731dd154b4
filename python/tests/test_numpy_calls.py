"""pullback.numpy: what a call takes beside its arrays, and arrays that are more than memory."""

from __future__ import annotations

import numpy as np
import pytest

import pullback.numpy as pn


def test_none_stands_for_what_is_not_given() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
    expected, _ = pn.attention(q, q, q)
    found, _ = pn.attention(q, q, q, variant=None, window=(None, None), softcap=None)
    np.testing.assert_array_equal(found, expected)
    causal, _ = pn.attention(q, q, q, window=(None, 0))
    np.testing.assert_array_equal(causal, pn.attention(q, q, q, causal=True)[0])


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

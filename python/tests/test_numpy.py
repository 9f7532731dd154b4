"""pullback.numpy against formulas in NumPy, on any shapes, strides and dtypes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_cases import attention, random, softmax

import pullback.numpy as pn
from pullback import BlockLayout

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
ERRORS = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 1e-2, ml_dtypes.bfloat16: 6e-2}

settings.register_profile("pullback", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("pullback")


def strided(array: np.ndarray[Any, Any], way: int) -> np.ndarray[Any, Any]:
    """The same values behind other strides."""
    if way == 1:
        return np.asfortranarray(array)
    if way == 2:
        wide = np.full([2 * size for size in array.shape], np.nan, array.dtype)
        view = wide[tuple(slice(size) for size in array.shape)]
        view[...] = array
        return view
    if way == 3:
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    return array


@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_attention_is_the_formula(b, sq, sk, hkv, group, d, dv, causal, dtype, ways) -> None:
    shapes = ((b, sq, hkv * group, d), (b, sk, hkv, d), (b, sk, hkv, dv))
    exact = [random(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    bias = random(3, 1, hkv * group, 1, sk).astype(dtype)
    q, k, v = (strided(array, way) for array, way in zip(exact, ways))
    out, lse = pn.attention(q, k, v, bias=bias, causal=causal)
    expected = attention(*(a.astype(np.float64) for a in exact), bias.astype(np.float64), causal)
    assert out.dtype == dtype and lse.dtype == (dtype if dtype == np.float64 else np.float32)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=ERRORS[dtype], rtol=0)


def differences(f: Any, x: np.ndarray[Any, Any], g: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The gradient of sum(f(x) g) by central differences."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        steps = []
        for step in (1e-6, -1e-6):
            moved = x.copy()
            moved[i] += step
            steps.append(np.sum(f(moved) * g))
        gradient[i] = (steps[0] - steps[1]) / 2e-6
    return gradient


def test_attention_backward() -> None:
    q, k, v, bias = random(0, 1, 5, 4, 3), random(1, 1, 6, 2, 3), random(2, 1, 6, 2, 4), None
    bias = random(3, 1, 4, 1, 6)
    out, lse = pn.attention(q, k, v, bias=bias, softcap=2.0, window=(3, 2))
    d_out, d_lse = random(4, *out.shape), random(5, *lse.shape)
    options = {"softcap": 2.0, "window": (3, 2)}
    found = pn.attention_backward(d_out, q, k, v, out, lse, bias=bias, d_lse=d_lse, **options)
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):

        def f(moved: Any, name: str = name) -> Any:
            given = {"q": q, "k": k, "v": v, "bias": bias, name: moved}
            outputs = pn.attention(**given, **options)
            return np.concatenate([outputs.out.ravel(), outputs.lse.ravel()])

        g = np.concatenate([d_out.ravel(), d_lse.ravel()])
        np.testing.assert_allclose(getattr(found, "d_" + name), differences(f, x, g), atol=1e-7)
    for needs in (["d_v"], "d_v"):
        some = pn.attention_backward(d_out, q, k, v, out, lse, bias=bias, needs=needs, **options)
        assert some.d_q is None and some.d_v is not None


def test_varlen_is_each_sequence_alone() -> None:
    lengths = [3, 0, 7]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (random(i, 10, 2, 4) for i in range(3))
    out, lse = pn.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    for begin, end in zip(cu, cu[1:]):
        alone = pn.attention(*(t[None, begin:end] for t in (q, k, v)), causal=True)
        np.testing.assert_array_equal(out[begin:end], alone.out[0])
        np.testing.assert_array_equal(lse[:, begin:end], alone.lse[0])


def test_dropout_repeats_by_seed() -> None:
    q, k, v = (random(i, 1, 32, 2, 8) for i in range(3))
    a, b, c = (pn.attention(q, k, v, dropout=0.5, seed=seed).out for seed in (1, 1, 2))
    assert (a == b).all() and not (a == c).all()


def test_entmax_is_of_alpha_one_and_a_half_by_default() -> None:
    x = random(1, 3, 20)
    y, d_y = pn.entmax(x), random(2, 3, 20)
    np.testing.assert_array_equal(y, pn.entmax(x, 1.5))
    np.testing.assert_array_equal(
        pn.entmax_backward(d_y, y).d_x, pn.entmax_backward(d_y, y, 1.5).d_x
    )


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([1.0, 1.3, 1.5, 2.0, 3.0]))
def test_entmax_solves_its_equation(rows: int, columns: int, alpha: float) -> None:
    x = random(rows * columns, rows, columns) * 3
    y = pn.entmax(x, alpha)
    np.testing.assert_allclose(y.sum(-1), 1, atol=1e-9)
    if alpha == 1:
        np.testing.assert_allclose(y, softmax(x), atol=1e-12)
    else:
        # Where y > 0, (alpha-1) x - y^(alpha-1) is the row's tau; elsewhere (alpha-1) x is below.
        rest = (alpha - 1) * x - y ** (alpha - 1)
        tau = np.max(np.where(y > 0, rest, -np.inf), -1, keepdims=True)
        found = np.where(y > 0, rest, tau)
        np.testing.assert_allclose(found, np.broadcast_to(tau, x.shape), atol=1e-6)
        assert (np.where(y > 0, -np.inf, (alpha - 1) * x) <= tau + 1e-6).all()


def test_entmax_backward_and_axis() -> None:
    x, g = random(0, 4, 5, 3), random(1, 4, 5, 3)
    for alpha in (1.0, 1.5, 2.0):
        y = pn.entmax(x, alpha, axis=1)
        found = pn.entmax_backward(g, y, alpha, axis=1)
        expected = differences(lambda moved, a=alpha: pn.entmax(moved, a, axis=1), x, g)
        np.testing.assert_allclose(found.d_x, expected, atol=1e-6)
    alphas = np.linspace(1.2, 2.5, 12).reshape(4, 3)
    y = pn.entmax(x, alphas, axis=1)
    found = pn.entmax_backward(g, y, alphas, axis=1, needs=("d_x", "d_alpha"))
    expected = differences(lambda moved: pn.entmax(x, moved, axis=1), alphas, g)
    np.testing.assert_allclose(found.d_alpha, expected, atol=1e-5)


REDUCTIONS = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "prod": lambda rows: rows.prod(0),
    "logsumexp": lambda rows: np.log(np.exp(rows).sum(0)),
}


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from(list(REDUCTIONS)),
    st.integers(0, 3),
)
def test_segment_reduce(lengths: list[int], columns: int, reduce: Any, way: int) -> None:
    offsets = np.cumsum([0, *lengths])
    x = random(sum(lengths), sum(lengths), columns)
    out = pn.segment_reduce(strided(x, way), reduce, offsets=offsets, empty="zero")
    ids = np.repeat(np.arange(len(lengths)), lengths)
    by_ids = pn.segment_reduce(x, reduce, ids=ids, num_segments=len(lengths), empty="zero")
    np.testing.assert_allclose(out, by_ids, atol=1e-12)
    for s, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        expected = REDUCTIONS[reduce](x[begin:end]) if end > begin else np.zeros(columns)
        np.testing.assert_allclose(out[s], expected, atol=1e-12)
    g = random(1, *out.shape)
    d_x = pn.segment_reduce_backward(g, x, out, reduce, offsets=offsets, empty="zero")

    def f(moved: Any) -> Any:
        return pn.segment_reduce(moved, reduce, offsets=offsets, empty="zero")

    np.testing.assert_allclose(d_x, differences(f, x, g), atol=1e-6)


def test_segment_ids_in_any_order() -> None:
    ids = np.array([2, 0, 2, 1, 0, 5])
    x = random(0, 6, 3)
    permutation, offsets = pn.segment_permutation(ids, 3)
    expected = np.stack([x[ids == s].sum(0) for s in range(3)])
    for own in (None, ids):
        out = pn.segment_reduce(x, "sum", permutation=permutation, offsets=offsets, ids=own)
        np.testing.assert_allclose(out, expected, atol=1e-14)
    y = pn.segment_reduce(x, "softmax", permutation=permutation, offsets=offsets)
    np.testing.assert_allclose(y[:5].sum(0), 3)
    assert (y[5] == 0).all()


def test_layouts_and_alphas_may_be_plain_arrays() -> None:
    q = random(0, 1, 32, 1, 8).astype(np.float32)
    present = np.array([[[1, 0], [1, 1]]])
    out, _ = pn.attention(q, q, q, layout=present, block=16)
    np.testing.assert_allclose(out[:, :16], pn.attention(*[q[:, :16]] * 3)[0], atol=1e-6)
    x = random(1, 2, 5).astype(np.float32)
    np.testing.assert_array_equal(pn.entmax(x, [1.5, 2.0])[1], pn.entmax(x[1], 2.0))


def test_plan_describes_and_runs() -> None:
    x = random(0, 64, 1000).astype(np.float32)
    plan = pn.plan("entmax", "forward", {"x": x}, alpha=1.5)
    assert "entmax forward: cpu" in plan.describe()
    y = plan.empty("y")
    workspace = np.empty(plan.workspace_bytes + 256, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 256 :]
    plan.run({"x": x, "y": y}, workspace)
    np.testing.assert_array_equal(y, pn.entmax(x, 1.5))
    with pytest.raises(ValueError, match="workspace"):
        plan.run({"x": x, "y": y}, workspace[: plan.workspace_bytes - 1])
    with pytest.raises(ValueError, match="as planned"):
        plan.run({"x": x.astype(np.float64), "y": y})
    with pytest.raises(ValueError, match="strides=.*as planned"):
        plan.run({"x": np.asfortranarray(x), "y": y})
    fixed = y.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="entmax: y: expected writable memory"):
        plan.run({"x": x, "y": fixed})
    plan.run({"x": fixed, "y": y})  # inputs are read alone
    plan.run({"x": x, "y": y})
    with pytest.raises(TypeError, match="entmax: a plan cannot be copied"):
        copy.deepcopy(plan)
    one = pn.plan("entmax", "forward", {"x": x[:1]}, alpha=1.5)
    one.run({"x": x[:1].T.copy().T, "y": (first := one.empty("y"))})
    # Not y[:1]: rows that go together share the steps of their thresholds.
    np.testing.assert_array_equal(first, pn.entmax(x[:1], 1.5))


def test_plans_refuse_memory_that_is_not_what_was_planned() -> None:
    x = random(0, 64, 1000).astype(np.float32)
    plan = pn.plan("entmax", "forward", {"x": x}, alpha=1.3)
    y = plan.empty("y")
    # Wherever it begins.
    plan.run({"x": x, "y": y}, np.empty(plan.workspace_bytes + 255 + 3, np.uint8)[3:])
    np.testing.assert_array_equal(y, pn.entmax(x, 1.3))
    backwards = np.empty(plan.workspace_bytes + 256, np.uint8)[::-1]
    with pytest.raises(ValueError, match="entmax: workspace: expected contiguous"):
        plan.run({"x": x, "y": y}, backwards)
    with pytest.raises(TypeError, match="entmax has no Y"):
        plan.run({"x": x, "Y": y})
    packed = np.zeros(10, [("x", "f4"), ("more", "u1", 2)])["x"]
    with pytest.raises(ValueError, match="x: expected strides of whole elements"):
        pn.plan("entmax", "forward", {"x": packed})
    packed[:] = random(1, 10)
    np.testing.assert_array_equal(pn.entmax(packed), pn.entmax(packed.copy()))
    with pytest.raises(ValueError, match="axis: expected a number that fits i32, got 4294967296"):
        pn.entmax(x, axis=2**32)


def test_errors_are_of_their_kind_and_explain() -> None:
    q = random(0, 2, 4, 2, 8).astype(np.float32)
    with pytest.raises(ValueError, match="attention: k: expected the batch size of q, 2"):
        pn.attention(q, q[:1], q)
    with pytest.raises(ValueError, match="attention: k: expected .*got f64"):
        pn.attention(q, q.astype(np.float64), q)
    with pytest.raises(ValueError, match="q: expected dtype float64, .*got int16; convert"):
        pn.attention(q.astype(np.int16), q, q)
    with pytest.raises(ValueError, match=r"x: expected dtype float64, .*got \|V0; convert"):
        pn.entmax(np.empty(3, "V0"))
    expected = "offsets: expected dtype int32 or int64, got "
    with pytest.raises(ValueError, match=f"{expected}uint32; convert"):
        pn.segment_reduce(q[0, :, 0], offsets=np.array([0, 4], np.uint32))
    with pytest.raises(ValueError, match=f"{expected}>i8, not in native byte order; convert"):
        pn.segment_reduce(q[0, :, 0], offsets=np.array([0, 4], ">i8"))
    with pytest.raises(ValueError, match="corner: expected 'top_left', 'bottom_right'"):
        pn.attention(q, q, q, corner="left")
    with pytest.raises(ValueError, match="causal: expected True or False, got 'top_left'"):
        pn.attention(q, q, q, causal="top_left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variant"):
        pn.attention(q, q, q, variant="nonesuch")
    # Not on this CPU, or not for f32.
    refusal = "(?s)needs AMX|needed: .*; supported: .*; missing:"
    with pytest.raises(NotImplementedError, match=refusal):
        pn.attention(q, q, q, variant="cpu_amx_bf16")
    with pytest.raises(ValueError, match="ids"):
        ids = np.array([0, 3, 1, 2])
        pn.segment_reduce(q[0, :, 0], ids=ids, num_segments=4, check_indices=True)
    with pytest.raises(ValueError, match="num_segments: expected a number, as ids are given"):
        pn.segment_reduce(q[0, :, 0], ids=np.arange(4))
    with pytest.raises(TypeError, match="softcaps"):
        pn.attention(q, q, q, softcaps=1.0)


def test_other_ranks_are_refused() -> None:
    dense = BlockLayout(np.ones((1, 1, 1), bool))
    for rank in range(3):
        x = np.ones((16,) * rank, np.float32)
        for call in (
            lambda x=x: pn.attention(x, x, x),
            lambda x=x: pn.attention_backward(x, x, x, x, x, x),
            lambda x=x: pn.block_softmax(x, dense),
            lambda x=x: pn.block_softmax_backward(x, x, dense),
            lambda x=x: pn.block_matmul(x, x, dense, "dsd"),
            lambda x=x: pn.block_matmul_backward(x, x, x, dense, "dds"),
        ):
            with pytest.raises(ValueError, match=r": [qaxy]: expected \[.*got .*\["):
                call()


def test_sizes_of_zero() -> None:
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8)):
        q = np.empty(shape, np.float32)
        out, _ = pn.attention(q, q, q)
        assert out.shape == shape
    assert pn.entmax(np.empty((3, 0))).shape == (3, 0)
    assert pn.segment_reduce(np.empty((0, 3)), offsets=np.zeros(3, int)).shape == (2, 3)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"variant": 3}, "entmax: variant: expected a name, got 3"),
        ({"threads": 1.5}, "entmax: threads: expected an integer, got 1.5"),
        ({"workspace": [1]}, "entmax: workspace: expected an array, got list"),
    ],
)
def test_options_of_a_run_have_their_types(run: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        pn.entmax(random(1, 3, 5), **run)


def test_threads_have_workspaces_of_their_own() -> None:
    def gradients(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        q, k, v, d_out = (rng.standard_normal((1, 64, 2, 32), np.float32) for _ in range(4))
        out, lse = pn.attention(q, k, v, threads=1)
        return list(pn.attention_backward(d_out, q, k, v, out, lse, threads=1)[:3])

    seeds = [*range(4)] * 25
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(gradients, seeds))
    expected = [gradients(seed) for seed in range(4)]
    for seed, mine in zip(seeds, found):
        np.testing.assert_array_equal(mine, expected[seed])

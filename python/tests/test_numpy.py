"""pullback.numpy against formulas in NumPy, on any shapes, strides and dtypes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pullback.numpy as pn
from pullback import BlockLayout, sparsity

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
ERRORS = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 1e-2, ml_dtypes.bfloat16: 6e-2}

settings.register_profile("pullback", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("pullback")


def random(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def softmax(s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    top = np.max(s, -1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def attention(q: Any, k: Any, v: Any, bias: Any = 0.0, causal: bool = False) -> Any:
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(t, group, 2) for t in (k, v))
    s = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[3]) + bias
    if causal:
        rows, columns = np.arange(s.shape[2])[:, None], np.arange(s.shape[3])
        s = np.where(columns <= rows + s.shape[3] - s.shape[2], s, -np.inf)
    return np.einsum("bhst,bthd->bshd", softmax(s), v)


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


CONFIGS = [
    sparsity.DenseSparsityConfig(2),
    sparsity.FixedSparsityConfig(
        2, different_layout_per_head=True, num_different_global_patterns=2
    ),
    sparsity.VariableSparsityConfig(2, num_random_blocks=1, global_block_indices=[0, 3]),
    sparsity.BigBirdSparsityConfig(2, num_random_blocks=2),
    sparsity.BSLongformerSparsityConfig(2, 16, True, 3, [1], [3]),
    sparsity.LocalSlidingWindowSparsityConfig(2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_block_sparse_attention_is_masked_attention(config: Any) -> None:
    layout = config.make_layout(96)
    q, k, v = (random(i, 2, 2, 96, 8) for i in range(3))
    scores = pn.block_matmul(q, k, layout, "sdd", block=16, transpose_b=True)
    assert scores.shape == (2, layout.nnz, 16, 16)
    weights = pn.block_softmax(scores, layout, scale=8**-0.5)
    out = pn.block_matmul(weights, v, layout, "dsd")
    mask = np.kron(layout.present, np.ones((16, 16)))
    bias = np.where(mask[None] > 0, 0, -np.inf)
    expected = attention(*(t.transpose(0, 2, 1, 3) for t in (q, k, v)), bias)
    np.testing.assert_allclose(out, expected.transpose(0, 2, 1, 3), atol=1e-12)
    fused = pn.attention(*(t.transpose(0, 2, 1, 3) for t in (q, k, v)), layout=layout, block=16)
    np.testing.assert_allclose(fused.out, expected, atol=1e-12)
    d_w, d_v = pn.block_matmul_backward(np.ones_like(out), weights, v, layout, "dsd")
    assert d_w.shape == weights.shape and d_v.shape == v.shape
    d_x = pn.block_softmax_backward(d_w, weights, layout, scale=8**-0.5).d_x
    assert d_x.shape == scores.shape and abs(d_x.sum()) < 1e-10


@pytest.mark.parametrize(
    "config,grid",
    [
        (sparsity.FixedSparsityConfig(1, num_local_blocks=2), "1101 1101 0111 0111"),
        (
            sparsity.FixedSparsityConfig(1, num_local_blocks=2, attention="unidirectional"),
            "1000 1100 0110 0111",
        ),
        (
            sparsity.FixedSparsityConfig(1, num_local_blocks=2, horizontal_global_attention=True),
            "1101 1111 0111 1111",
        ),
        (
            sparsity.VariableSparsityConfig(
                1, local_window_blocks=[1, 2], global_block_indices=[1]
            ),
            "1100 0110 0110 0101",
        ),
        (
            sparsity.BSLongformerSparsityConfig(
                1, num_sliding_window_blocks=1, global_block_indices=[1]
            ),
            "1100 1111 0110 0101",
        ),
        (sparsity.LocalSlidingWindowSparsityConfig(1), "1000 1100 0110 0011"),
        (
            sparsity.LocalSlidingWindowSparsityConfig(1, attention="bidirectional"),
            "1100 1110 0111 0011",
        ),
    ],
)
def test_patterns(config: Any, grid: str) -> None:
    present = config.make_layout(64).present[0].astype(int)
    assert " ".join("".join(map(str, row)) for row in present) == grid


def test_options_that_nothing_else_tells_apart() -> None:
    """Each changes the result, to what it is without the option of other inputs."""
    layout = sparsity.FixedSparsityConfig(2).make_layout(64)
    q, k, v = (random(i, 2, 64, 2, 8) for i in range(3))
    plain = pn.attention(q, k, v, layout=layout, block=16).out
    # Layouts of batch items.
    both = np.concatenate([layout.present, np.ones_like(layout.present)])
    found = pn.attention(q, k, v, layout=both, layout_batches=2, block=16).out
    np.testing.assert_allclose(found[0], plain[0], atol=1e-12)
    np.testing.assert_allclose(found[1], pn.attention(q, k, v).out[1], atol=1e-12)
    # Sequences that are cut.
    cu = np.array([0, 20, 64], np.int32)
    flat = [x[0] for x in (q, k, v)]
    cut = pn.attention(*flat, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=30, max_seqlen_k=30)
    alone = pn.attention(*[x[None, 20:50] for x in flat]).out[0]
    np.testing.assert_allclose(cut.out[20:50], alone, atol=1e-12)
    assert (cut.out[50:] == 0).all()
    # A transposed product.
    a, b = random(5, 1, layout.nnz, 16, 16), random(6, 1, 2, 64, 8)
    c = pn.block_matmul(a, b, layout, "dsd")
    turned = pn.block_matmul(a, b, layout, "dsd", transpose_c=True)
    np.testing.assert_allclose(turned, c.swapaxes(-1, -2), atol=1e-12)
    # Bad indices are told.
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        bad = np.array([0, 70, 64], np.int32)
        pn.attention(*flat, cu_seqlens_q=bad, cu_seqlens_k=cu, check_indices=True)
    with pytest.raises(ValueError, match="offsets"):
        pn.entmax(random(0, 9), offsets=np.array([0, 7, 5]), check_indices=True)


def test_layouts_from_arrays() -> None:
    present = np.zeros((1, 2, 3), bool)
    present[0, 0, 0] = present[0, 1, 2] = True
    layout = BlockLayout(present)
    assert (layout.heads, layout.rows, layout.columns, layout.nnz) == (1, 2, 3, 2)
    np.testing.assert_array_equal(layout.present, present)
    with pytest.raises(ValueError, match="rank 2"):
        BlockLayout(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="unidirectional"):
        sparsity.FixedSparsityConfig(1, attention="sideways").make_layout(64)


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

"""Layouts, and block-sparse attention by the NumPy front end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_cases import attention, random

import pullback.numpy as pn
from pullback import BlockLayout, sparsity

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


def test_numbers_that_do_not_fit_are_refused() -> None:
    for name, config in (
        ("num_heads", sparsity.FixedSparsityConfig(2**64 + 4)),
        ("num_local_blocks", sparsity.FixedSparsityConfig(4, num_local_blocks=2**64 + 4)),
        ("global_block_indices", sparsity.VariableSparsityConfig(4, global_block_indices=[2**64])),
        ("seed", sparsity.BigBirdSparsityConfig(4, seed=2**64)),
    ):
        with pytest.raises(ValueError, match=f"Sparsity: {name}: expected .* fits .64, got 184467"):
            config.make_layout(64)
    with pytest.raises(
        ValueError, match="FixedSparsity: seq_len: expected .* fits i64, got 184467"
    ):
        sparsity.FixedSparsityConfig(4).make_layout(2**64 + 64)
    signed, unsigned = (sparsity.BigBirdSparsityConfig(4, seed=s) for s in (-1, 2**64 - 1))
    assert signed.make_layout(256) == unsigned.make_layout(256)
    config = sparsity.BSLongformerSparsityConfig(4, global_block_indices=None)  # type: ignore
    config.make_layout(64)
    config.global_block_end_indices = [1]
    with pytest.raises(ValueError, match="end_indices: expected one for each"):
        config.make_layout(64)
    config.global_block_indices = np.arange(1)  # type: ignore[assignment]
    assert config.make_layout(64).nnz == sparsity.BSLongformerSparsityConfig(4).make_layout(64).nnz


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

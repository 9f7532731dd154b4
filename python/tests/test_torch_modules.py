"""Layouts, and modules of pullback.torch."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pullback.torch as pt  # noqa: E402
from pullback import BlockLayout, sparsity  # noqa: E402
from torch_cases import random  # noqa: E402

IDENTIFIER = 9171021780797202767  # of blocks [[1, 0], [1, 1]]


def test_a_layout_that_is_gone_is_reported() -> None:
    a = random(1, 2, 32, 4)
    layout = BlockLayout(np.ones((1, 2, 3)))
    identifier = layout.identifier
    del layout
    with pytest.raises(ValueError, match="does not exist"):
        torch.ops.pullback.block_matmul(a, a, identifier, 16, 0, 2)


def test_a_layout_is_named_by_what_it_holds() -> None:
    present = np.tril(np.ones((1, 2, 2)))
    first, second = BlockLayout(present), BlockLayout(present)
    # The same in every process: exported programs keep it.
    assert first.identifier == second.identifier == IDENTIFIER
    assert first == second and len({first, second}) == 1
    for other in (present.transpose(0, 2, 1), present.reshape(1, 1, 4)):
        assert BlockLayout(other) != first and BlockLayout(other).identifier != IDENTIFIER
    del first
    gc.collect()
    assert (BlockLayout.find(IDENTIFIER).present == present).all()
    del second
    gc.collect()
    with pytest.raises(ValueError, match="does not exist"):
        BlockLayout.find(IDENTIFIER)


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


def test_block_sparse_attention_has_a_scale() -> None:
    q, k, v = (random(2, 64, 2, 4, seed=i) for i in range(3))
    layout = sparsity.DenseSparsityConfig(2).make_layout(64)
    out = pt.block_sparse_attention(q, k, v, layout, scale=0.1)
    torch.testing.assert_close(out, pt.attention(q, k, v, scale=0.1))


def test_sequences_without_tokens() -> None:
    q = random(1, 2, 0, 4).requires_grad_()
    module = pt.SparseSelfAttention(sparsity.FixedSparsityConfig(2), max_seq_length=64)
    out = module(q, q, q)
    assert out.shape == (1, 2, 0, 4)
    out.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    some = random(1, 64, 2, 4)
    with pytest.raises(ValueError, match=r"expected shape \[1, 2, 0, 4\], got \[1, 2, 64, 4\]"):
        pt.block_sparse_attention(some, some, some, module.get_layout(0))


def test_mask_modes() -> None:
    q, k, v = (random(2, 2, 64, 4, seed=i) for i in range(3))
    padding = torch.ones(2, 64, dtype=torch.float64)
    padding[1, 50:] = 0
    added = random(64, 64, seed=5)
    module = pt.SparseSelfAttention(
        sparsity.DenseSparsityConfig(2),
        key_padding_mask_mode="mul",
        attn_mask_mode="add",
        max_seq_length=64,
    )
    out = module(q, k, v, key_padding_mask=padding, attn_mask=added)
    mask = added.masked_fill(padding[:, None, None] == 0, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected)


def test_sparse_self_attention_takes_what_the_original_takes() -> None:
    q, k, v = (random(2, 2, 64, 4, seed=i) for i in range(3))
    config = sparsity.BigBirdSparsityConfig(num_heads=2, different_layout_per_head=True)
    module = pt.SparseSelfAttention(config, max_seq_length=256)
    assert module.master_layout.shape == (2, 16, 16)
    cropped = module.master_layout[:, :4, :4].numpy()
    np.testing.assert_array_equal(module.get_layout(64).present, cropped)
    padding = torch.zeros(2, 64, dtype=torch.float64)
    padding[1, 40:] = -10000
    seen = torch.ones(64, 64, dtype=torch.int64).tril()
    expected = module(q, k, v, key_padding_mask=padding, attn_mask=seen.bool())
    found = module(
        q,
        k.transpose(2, 3),
        v,
        rpe=torch.zeros(1, 1, 64, 64),
        key_padding_mask=padding.long()[:, None, None],
        attn_mask=seen[None, None],
    )
    torch.testing.assert_close(found, expected)
    # Its checkpoints bring the layout along.
    other = pt.SparseSelfAttention(config, max_seq_length=256)
    other.get_layout(64)
    other.load_state_dict({"master_layout": torch.ones(2, 16, 16, dtype=torch.int64)})
    assert other.get_layout(64).nnz == 2 * 4 * 4
    for length in (63, 272):
        with pytest.raises(
            ValueError, match=f"multiple of 16 up to max_seq_length, 256; got {length}"
        ):
            module.get_layout(length)
    with pytest.raises(ValueError, match="attn_mask_mode: expected 'add', 'mul', 'keep'"):
        pt.SparseSelfAttention(attn_mask_mode="multiply")
    with pytest.raises(ValueError, match=r"query: expected \[B,H,S,D\], got \[2, 64, 4\]"):
        module(q[0], k[0], v[0])
    with pytest.raises(ValueError, match=r"key_padding_mask: expected shape \[2, 64\], got \[3,"):
        module(q, k, v, key_padding_mask=torch.zeros(3, 64))


def test_sparse_self_attention_follows_its_layout() -> None:
    q = random(1, 2, 64, 4)
    local = pt.SparseSelfAttention(sparsity.FixedSparsityConfig(num_heads=2), max_seq_length=128)
    dense = pt.SparseSelfAttention(sparsity.DenseSparsityConfig(num_heads=2), max_seq_length=128)
    module = copy.deepcopy(local)
    torch.compiler.reset()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (64, 128, 64):  # the second makes lengths dynamic
        x = random(1, 2, length, 4)
        torch.testing.assert_close(whole(x, x, x), local(x, x, x))
    module.load_state_dict(dense.state_dict())
    for found in (whole(q, q, q), module(q, q, q)):
        torch.testing.assert_close(found, dense(q, q, q))
    module.master_layout.copy_(local.master_layout)
    torch.testing.assert_close(module(q, q, q), local(q, q, q))
    layout = module.get_layout(64)
    module.master_layout.copy_(local.master_layout)  # as DistributedDataParallel does each time
    assert module.get_layout(64) is layout
    module.load_state_dict(dense.state_dict(), assign=True)
    torch.testing.assert_close(module(q, q, q), dense(q, q, q))
    with torch.inference_mode():
        module = pt.SparseSelfAttention(sparsity.DenseSparsityConfig(2), max_seq_length=128)
        torch.testing.assert_close(module(q, q, q), dense(q, q, q))


def test_masks_of_block_sparse_attention_under_autocast() -> None:
    module = pt.SparseSelfAttention(sparsity.FixedSparsityConfig(num_heads=2), max_seq_length=64)
    q, k, v = (random(1, 2, 64, 4, seed=i).float() for i in range(3))
    masks = {"rpe": random(1, 1, 64, 64).float(), "key_padding_mask": random(1, 64).float()}
    expected = module(q, k, v, **masks)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(q, k, v, **masks)
        layout = module.get_layout(64)
        scores = pt.block_matmul(q, k, layout, "sdd", block=16, transpose_b=True)
        weights = pt.block_softmax(scores, layout, scale=0.5, **masks)
        by_hand = pt.block_matmul(weights, v, layout, "dsd")
        heads_last = [x.transpose(1, 2) for x in (q, k, v)]
        again = pt.block_sparse_attention(*heads_last, layout, **masks)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    assert torch.equal(again.transpose(1, 2), found)
    assert torch.equal(by_hand, found)


def test_layouts_and_modules_are_copied_and_pickled() -> None:
    module = pt.SparseSelfAttention(sparsity.FixedSparsityConfig(num_heads=2))
    q = random(1, 2, 64, 4)
    expected = module(q, q, q)
    copied = copy.deepcopy(module)
    layout = pickle.loads(pickle.dumps(module.get_layout(64)))
    assert (layout.present == module.get_layout(64).present).all()
    del module
    gc.collect()
    assert torch.equal(copied(q, q, q), expected)
    again = pt.block_sparse_attention(*[q.transpose(1, 2)] * 3, layout)
    assert torch.equal(again.transpose(1, 2), expected)

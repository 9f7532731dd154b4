"""
Block-sparse attention
======================

A layout says which blocks of the score matrix exist. The others are neither computed nor stored.
"""

import matplotlib.pyplot as plt
import torch

import pullback.torch as pt
from pullback import sparsity

# %%
# The six patterns that block-sparse models are trained with, for 512 tokens in blocks of 16.

patterns = {
    "Dense": sparsity.DenseSparsityConfig(1),
    "Fixed": sparsity.FixedSparsityConfig(1, attention="unidirectional"),
    "Variable": sparsity.VariableSparsityConfig(1, local_window_blocks=[2, 4, 8]),
    "BigBird": sparsity.BigBirdSparsityConfig(1, num_random_blocks=2),
    "BSLongformer": sparsity.BSLongformerSparsityConfig(1, global_block_indices=[0, 9]),
    "LocalSlidingWindow": sparsity.LocalSlidingWindowSparsityConfig(1, num_sliding_window_blocks=5),
}
figure, axes = plt.subplots(1, 6, figsize=(8, 1.9), layout="constrained")
for (name, config), place in zip(patterns.items(), axes):
    layout = config.make_layout(512)
    place.imshow(layout.present[0], cmap="Greys", vmin=0, vmax=1.3)
    place.set(xticks=[], yticks=[], xlabel=f"{layout.density:.0%}")
    place.set_title(name if len(name) < 13 else "Sliding window", fontsize=9)
plt.show()

# %%
# BigBird over 1024 tokens: scores, softmax and weighted sum at its blocks alone, and all gradients,
# compared with dense attention under a mask in double precision.

torch.manual_seed(0)
heads, length, block = 4, 1024, 32
config = sparsity.BigBirdSparsityConfig(heads, block, different_layout_per_head=True)
layout = config.make_layout(length)
q, k, v, d_out = (torch.randn(1, length, heads, 64) for _ in range(4))


def gradients(function, dtype):
    given = [tensor.to(dtype).detach().requires_grad_() for tensor in (q, k, v)]
    out = function(*given)
    return [out, *torch.autograd.grad(out, given, d_out.to(dtype))]


def dense(q, k, v):
    seen = torch.from_numpy(layout.present).bool()
    seen = seen.repeat_interleave(block, 1).repeat_interleave(block, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


sparse = gradients(lambda q, k, v: pt.block_sparse_attention(q, k, v, layout), torch.float32)
exact = gradients(dense, torch.float64)
for name, ours, theirs in zip(("out", "d_q", "d_k", "d_v"), sparse, exact):
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"{name:<4} error {error:.1e}")
    assert error < 1e-5
print(f"blocks: {layout.nnz} of {heads * (length // block) ** 2}, {layout.density:.0%}")

# %%
# As a module with DeepSpeed's interface, ``[batch, heads, sequence, head dim]``:

attention = pt.SparseSelfAttention(sparsity.BigBirdSparsityConfig(heads, block))
print(tuple(attention(*(tensor.transpose(1, 2) for tensor in (q, k, v))).shape))

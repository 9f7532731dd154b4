"""
Attention with a learned bias
=============================

A bias that is added to the attention scores costs memory quadratic in the sequence, and so does its
gradient. Most kernels therefore take no bias, or give it no gradient. Here the bias is a table of
one number for each head and distance, as in T5, added to the attention scores of a language model
that reads a text.
"""

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

import pullback.torch as pt

tensors = load_file("../data/attention.safetensors")
q, k, v = (tensors[name] for name in ("q", "k", "v"))  # [batch, sequence, heads, head dim]
padding = tensors["bias"]  # [batch, 1, 1, sequence]: -10000 at a padded key
batch, length, heads, head_dim = q.shape

# %%
# The table becomes a bias ``[1, heads, queries, keys]`` by indexing, which PyTorch differentiates.
# Pullback gives the gradient of the bias in the bias's own shape: summed over the batch in the
# kernel.

distance = torch.arange(length)[None, :] - torch.arange(length)[:, None] + length - 1
table = torch.zeros(heads, 2 * length - 1, requires_grad=True)
bias = table[:, distance][None]

mask = padding.expand(batch, 1, 1, length)
lengths = (mask[:, 0, 0] == 0).sum(1).tolist()
out = pt.attention(q, k, v, bias=bias + mask)
out.backward(tensors["d_out"])
print("tokens of each passage:", lengths)
print("gradient of the table: ", tuple(table.grad.shape))

# %%
# The same in plain PyTorch, in double precision, with all scores in memory.


def dense(table):
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / head_dim**0.5
    weights = torch.softmax(scores + table[:, distance] + mask, -1)
    return torch.einsum("bhij,bjhd->bihd", weights, v.double())


exact = torch.zeros_like(table, dtype=torch.float64, requires_grad=True)
dense(exact).backward(tensors["d_out"].double())
error = (table.grad - exact.grad).abs().max() / exact.grad.abs().max()
print(f"largest error of the gradient, relative to its largest element: {error:.1e}")
assert error < 1e-5

# %%
# What the text's loss would like each head to look at more (red) or less (blue), by the distance
# from the query to the key.

gradient = -table.grad / table.grad.abs().amax(1, keepdim=True)
middle = slice(length - 1 - 24, length + 24)
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
picture = axes.imshow(
    gradient[:, middle],
    cmap="RdBu_r",
    vmin=-1,
    vmax=1,
    aspect="auto",
    extent=(-24.5, 24.5, 5.5, -0.5),
)
axes.set(
    xlabel="key position − query position",
    ylabel="head",
    title="−gradient of the bias table",
)
figure.colorbar(picture, label="of the head's largest")
plt.show()

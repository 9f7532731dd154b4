"""
From softmax to sparsemax
=========================

``entmax`` with alpha 1 is softmax and with alpha 2 is sparsemax; in between, more and more elements
are exactly 0. The logits here are attention scores of a language model that was given 1.5-entmax in
place of softmax.
"""

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

import pullback.torch as pt

tensors = load_file("../data/entmax.safetensors")
x, d_y = tensors["x"], tensors["d_y"]  # [96 rows, 213 tokens]
alphas = (1.0, 1.25, 1.5, 1.75, 2.0)

rows = {alpha: pt.entmax(x, alpha) for alpha in alphas}
for alpha, y in rows.items():
    used = (y > 0).sum(-1)
    print(f"alpha {alpha:<4}  elements above 0: {used.min():3d} to {used.max():3d} of {x.shape[1]}")
    assert torch.allclose(y.sum(-1), torch.ones(len(x)), atol=1e-5)

# %%
# One row, its largest elements first.

row = (rows[1.5] > 0).sum(-1).argsort()[len(x) // 2]
order = x[row].argsort(descending=True)
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for alpha, y in rows.items():
    axes.plot(range(1, 41), y[row][order][:40], marker=".", label=f"alpha {alpha:g}")
axes.set(xlabel="element, by size", ylabel="probability", title=f"row {row} of the scores")
axes.legend()
plt.show()

# %%
# The gradient lives on the support: elsewhere it is exactly 0, and the kernel reads nothing there.

x.requires_grad_()
y = pt.sparsemax(x)
y.backward(d_y)
print("gradient outside of the support:", x.grad[y == 0].abs().max().item())
print("sum of each row's gradient, largest:", f"{x.grad.sum(-1).abs().max():.1e}")

# %%
# Alpha may be learned: a tensor of one number for each row, or broadcast to that, gets its
# gradient. Here one alpha for each head finds the sharpness at which the head's rows have a given
# entropy.

heads = x.detach().view(12, 8, -1)
alpha = torch.full((12, 1, 1), 1.5, requires_grad=True)
optimizer = torch.optim.Adam([alpha], lr=0.05)
for step in range(61):
    y = pt.entmax(heads, alpha)
    entropy = -torch.special.xlogy(y, y).sum(-1).mean(-1)
    loss = (entropy - 2).square().mean()
    if step % 20 == 0:
        print(f"step {step:2d}  loss {loss:.4f}  alpha {alpha.min():.2f} to {alpha.max():.2f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    alpha.data.clamp_(1, 4)

"""
Segment reductions on a graph
=============================

The import graph of SymPy: 854 modules, 7037 edges. A segment is a module, its rows the features of
the modules that import it. Segments have 0 to 228 rows, so that padding them would be mostly
padding.
"""

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

import pullback.torch as pt

tensors = load_file("../data/segment.safetensors")
x, offsets, d_out = tensors["x"], tensors["offsets"], tensors["d_out"]
counts = offsets.diff()
print(f"{len(counts)} segments of {len(x)} rows, {(counts == 0).sum()} empty")

# %%
# Every reduction, and where its gradient goes. For a maximum, one row (or all that tie, with
# ``ties="even"``) gets it; an empty segment takes its gradient nowhere.

for reduce in ("sum", "mean", "max", "min", "logsumexp"):
    rows = x.clone().requires_grad_()
    out = pt.segment_reduce(rows, reduce, offsets=offsets, empty="zero")
    out.backward(d_out)
    reached = (rows.grad != 0).float().mean()
    print(f"{reduce:<10} out {tuple(out.shape)!s:<12} gradient not 0 at {reached:4.0%} of x")

# %%
# Attention pooling: each module weighs its importers by a softmax over its segment's rows, with
# scores that are learned. Here it learns to find the maximum of every feature.

torch.manual_seed(0)
score = torch.nn.Linear(12, 12)
optimizer = torch.optim.Adam(score.parameters(), lr=0.1)
target = pt.segment_reduce(x, "max", offsets=offsets, empty="zero")

losses = []
for _ in range(60):
    weight = pt.segment_softmax(score(x), offsets=offsets)  # [7037, 12]
    pooled = pt.segment_reduce(weight * x, "sum", offsets=offsets)
    loss = (pooled - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} to {losses[-1]:.4f}")
assert losses[-1] < losses[0] / 20

# %%
# Ids in any order are sorted once; the permutation then serves every reduction.

segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
shuffled = torch.randperm(len(x))
permutation, found = pt.segment_permutation(segment[shuffled], len(counts))
back = pt.segment_reduce(x[shuffled], "max", offsets=found, permutation=permutation)
print(
    "the same as by offsets:",
    torch.equal(back, pt.segment_reduce(x, "max", offsets=offsets)),
)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.loglog(counts.sort(descending=True).values.clamp(min=0.5), drawstyle="steps-mid")
left.set(xlabel="modules, by importers", ylabel="importers", title="a power law")
right.plot(losses)
right.set(xlabel="step", ylabel="loss", title="attention pooling", yscale="log")
plt.show()

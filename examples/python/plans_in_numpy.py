"""
Plans and scratch memory, in NumPy
==================================

The functions of ``pullback.numpy`` plan, allocate and run at once. Programs that run one problem
many times keep its plan: what can be decided from shapes is then decided once, and a run allocates
nothing.
"""

import time

import numpy as np

import pullback.numpy as pn

generator = np.random.default_rng(0)
q, k, v, d_out = generator.standard_normal((4, 1, 512, 8, 64), dtype=np.float32)

out, lse = pn.attention(q, k, v, causal=True)
d_q, d_k, d_v, _ = pn.attention_backward(d_out, q, k, v, out, lse, causal=True)
print("out", out.shape, " lse", lse.shape, " d_q", d_q.shape)

# %%
# A plan tells what will run, why, and what scratch memory it needs.

arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out}
plan = pn.plan("attention", "backward", arrays, mask_right=0, mask_corner=1)
print(plan.describe())
print(f"workspace: {plan.workspace_bytes / 2**20:.1f} MiB")

# %%
# It writes where it is told: here into the three parts of one array, as the gradient of a packed
# projection wants it. Gradients that are not named are not computed.

d_qkv = np.empty((1, 512, 8, 3, 64), np.float32)
strided = {"d_q": d_qkv[..., 0, :], "d_k": d_qkv[..., 1, :], "d_v": d_qkv[..., 2, :]}
plan = pn.plan("attention", "backward", {**arrays, **strided}, mask_right=0, mask_corner=1)
workspace = np.empty(plan.workspace_bytes + 256, np.uint8)
workspace = workspace[-workspace.ctypes.data % 256 :]
for _ in range(3):
    begin = time.perf_counter()
    plan.run({**arrays, **strided}, workspace)
    print(f"{(time.perf_counter() - begin) * 1e3:.1f} ms")
print("the same bits:", all(map(np.array_equal, strided.values(), (d_q, d_k, d_v))))

# %%
# Errors say what was expected and what was given.

try:
    pn.attention(q, k[:, :, :3], v[:, :, :3])
except ValueError as error:
    print(error)
try:
    pn.entmax(q.astype(np.int32))
except ValueError as error:
    print(error)

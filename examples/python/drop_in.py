"""
Under code that is not yours
============================

A model that calls ``scaled_dot_product_attention``, as PyTorch's own transformer layers do, runs on
Pullback without a change; and programs written for flash-attn, entmax or torch_scatter find the
same functions in ``pullback.compat``.
"""

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import pullback.sdpa
from pullback import compat

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
x = torch.randn(2, 200, 256, requires_grad=True)
d_y = torch.randn_like(x)


def gradient():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.autograd.grad(layer(x), x, d_y)[0]


theirs = gradient()
pullback.sdpa.register()
activate_flash_attention_impl("pullback")
ours = gradient()
restore_flash_attention_impl()
error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
print(f"gradient through a transformer layer: difference {error:.1e}")
assert error < 1e-5

# %%
# With the signatures of other libraries:

q, k, v = (torch.randn(2, 200, 4, 64, requires_grad=True) for _ in range(3))
out = compat.flash_attn_func(q, k, v, causal=True, window_size=(64, 0))
out.sum().backward()
print("flash_attn_func:", tuple(out.shape), "d_k:", tuple(k.grad.shape))

weights = compat.entmax_bisect(torch.randn(4, 10), alpha=1.3)
print("entmax_bisect: rows sum to", weights.sum(-1).tolist())

values, rows = compat.segment_max_csr(torch.randn(9, 2), torch.tensor([0, 4, 9]))
print("segment_max_csr:", tuple(values.shape), "rows", rows.tolist())

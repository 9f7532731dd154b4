"""
Every gradient against finite differences
=========================================

Pullback's ops take float64, and ``torch.autograd.gradcheck`` moves each element of each input a
little to see what the output does. The cases are small and awkward on purpose: grouped heads, head
dims that differ and are odd, rows of different lengths, a window that hides all keys of some query.
"""

import torch
from torch.autograd import gradcheck

import pullback.torch as pt
from pullback.sparsity import BigBirdSparsityConfig

torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


layout = BigBirdSparsityConfig(num_heads=2).make_layout(48)
q, k, v, bias = (
    random(2, 4, 4, 5),
    random(2, 6, 2, 5),
    random(2, 6, 2, 3),
    random(1, 4, 1, 6),
)
packed = random(7, 3, 2, 4)  # q, k and v of three sequences, one after the other
cu_seqlens = torch.tensor([0, 3, 3, 7])
offsets = torch.tensor([0, 4, 4, 5, 9])
scores, weights = random(1, layout.nnz, 16, 16), random(1, layout.nnz, 16, 16)

cases = {
    "attention, causal, bias, softcap": (
        lambda q, k, v, bias: pt.attention(q, k, v, bias=bias, causal=True, softcap=2.0),
        (q, k, v, bias),
    ),
    "attention, window, logsumexp too": (
        lambda q, k, v: pt.attention(q, k, v, window=(1, 0), corner="top_left", return_lse=True),
        (q, k, v),
    ),
    "attention, packed sequences": (
        lambda qkv: pt.attention(*qkv.unbind(1), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens),
        (packed,),
    ),
    "attention, dropout": (
        lambda q, k, v: pt.attention(q, k, v, dropout=0.3, seed=torch.tensor(5)),
        (q, k, v),
    ),
    "block_softmax": (lambda x: pt.block_softmax(x, layout), (scores,)),
    "block_matmul, sdd": (
        lambda a, b: pt.block_matmul(a, b, layout, "sdd", block=16),
        (random(1, 2, 48, 3), random(1, 2, 3, 48)),
    ),
    "block_matmul, dsd": (
        lambda a, b: pt.block_matmul(a, b, layout, "dsd"),
        (weights, random(1, 2, 48, 3)),
    ),
    "entmax15": (pt.entmax15, (random(4, 9),)),
    "sparsemax, first axis": (lambda x: pt.sparsemax(x, 0), (random(9, 4),)),
    "entmax, alpha of each row": (
        pt.entmax,
        (
            random(4, 9),
            torch.tensor([[1.01], [1.2], [1.5], [2.5]]).double().requires_grad_(),
        ),
    ),
    **{
        f"segment_reduce, {reduce}": (
            lambda x, reduce=reduce: pt.segment_reduce(x, reduce, offsets=offsets, empty="zero"),
            (random(9, 3),),
        )
        for reduce in ("sum", "mean", "max", "min", "prod", "logsumexp", "softmax")
    },
}
for name, (function, inputs) in cases.items():
    # The block-sparse cases have thousands of elements: fast_mode checks random directions.
    fast = sum(tensor.numel() for tensor in inputs) > 1000
    assert gradcheck(function, inputs, fast_mode=fast)
    print(f"{name:<34} right")

"""pullback.sdpa: PyTorch's attention on these kernels."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
attention = pytest.importorskip("torch.nn.attention")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback.sdpa import _flash_backward, _flash_forward  # noqa: E402
from torch_cases import random  # noqa: E402


@pytest.fixture
def provider() -> Any:
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no flash attention providers")
    import pullback.sdpa

    pullback.sdpa.register()
    assert "pullback" in attention.list_flash_attention_impls()
    yield lambda: attention.activate_flash_attention_impl("pullback")
    attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.filterwarnings("ignore:.*verridden")
def test_unmodified_sdpa_runs_here_until_restored(provider: Any) -> None:
    mask = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[..., 0] = True
    cases: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": random(12, 12, dtype=torch.float32)},
        {"scale": 0.3},
    ]
    inputs = [random(2, 4, 12, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]

    def run(options: dict[str, Any]) -> tuple[Tensor, ...]:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*inputs, **options)
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    def calls() -> int:
        with torch.profiler.profile() as profile:
            run({})
        return sum(event.key.startswith("pullback::") for event in profile.key_averages())

    expected = [run(options) for options in cases]
    assert calls() == 0
    provider()
    assert calls() == 2
    # A mask of more precision than the rest: what its rows have in common is not rounded.
    distant = random(12, 12, dtype=torch.float32) + 200
    distant[3] = float("-inf")
    halves = [x.detach().bfloat16() for x in inputs]
    found = F.scaled_dot_product_attention(*halves, attn_mask=distant).float()
    exact = F.scaled_dot_product_attention(
        *[x.double() for x in halves], attn_mask=distant.double()
    )
    rows = [i for i in range(12) if i != 3]
    torch.testing.assert_close(found[:, :, rows], exact[:, :, rows].float(), rtol=0.02, atol=0.02)
    for options, wanted in zip(cases, expected):
        torch.testing.assert_close(run(options), wanted)
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(*inputs), expected[1][0])
    attention.restore_flash_attention_impl()
    assert calls() == 0


@pytest.mark.filterwarnings("ignore:Lower right")
@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (6, 6)])
def test_causal_of_flash_kernels_is_from_the_bottom_right(lengths: tuple[int, int]) -> None:
    """As torch.nn.attention.bias.causal_lower_right counts on; that of the CPU's is not."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    import pullback.sdpa as provider

    queries, keys = lengths
    shapes = [(2, 4, queries, 8), (2, 4, keys, 8), (2, 4, keys, 8)]
    inputs = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    values = [x.detach() for x in inputs]
    forward, backward = provider._cuda_forward, provider._cuda_backward
    kernels = [
        (provider._cpu_forward, provider._cpu_backward, causal_upper_left, ()),
        (forward, backward, causal_lower_right, (None, None, queries, keys)),
    ]
    for forward, backward, mask, cumulated in kernels:
        seen = mask(queries, keys)._materialize("cpu")
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=seen)
        found, lse, *rest = forward(*values, is_causal=True)
        some = seen.any(-1)
        torch.testing.assert_close(found[:, :, some], expected[:, :, some])
        d_out = random(*found.shape, seed=3) * some[:, None]
        wanted = torch.autograd.grad(expected, inputs, d_out)
        random_state = rest[4:6] if cumulated else ()
        given = (*values, found, lse, *cumulated, 0.0, True, *random_state)
        torch.testing.assert_close(backward(d_out, *given), wanted)


def test_windows_of_varlen_attn() -> None:
    """What torch.nn.attention.varlen gives to a provider, forward and backward."""
    q, k, v = random(10, 4, 8), random(14, 4, 8, seed=1), random(14, 4, 8, seed=2)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 4, 10], [0, 9, 14]))
    window = {"window_size_left": 3, "window_size_right": 1}
    out, lse, state, offset, _ = _flash_forward(
        q, k, v, cu_q, cu_k, 6, 9, 0.0, False, False, **window
    )
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = pt.attention(*ours, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=(3, 1))
    torch.testing.assert_close(out, expected)
    d_out = random(10, 4, 8, seed=3)
    found = _flash_backward(
        d_out, q, k, v, out, lse, cu_q, cu_k, 6, 9, 0.0, False, state, offset, **window
    )
    for gradient, wanted in zip(found, torch.autograd.grad(expected, ours, d_out)):
        torch.testing.assert_close(gradient, wanted)


def test_flash_kernels_write_into_a_given_output() -> None:
    import pullback.sdpa as provider

    q, k, v = (random(9, 2, 8, seed=i) for i in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    arguments = (q, k, v, cu, cu, 5, 5, 0.0, True, False)
    expected, lse, *_ = provider._flash_forward(*arguments)
    out = torch.full((2, 9, 8), torch.nan, dtype=q.dtype).transpose(0, 1)
    found = provider._flash_forward_into(out, *arguments, window_size_left=None, num_splits=None)
    assert torch.equal(out, expected) and torch.equal(found, lse)
    wide = random(1, 2, 4, 300)
    with pytest.raises(RuntimeError, match=r"256 or less, got 300; use .*SDPBackend.MATH"):
        provider._cpu_forward(wide, wide, wide)
    with pytest.raises(RuntimeError, match="256 or less, got 300"):
        _flash_forward(wide, wide, wide, None, None, 4, 4, 0.0, False, False)

"""pullback.torch on a GPU: streams, graphs, devices, and that nothing waits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from torch_cases import random  # noqa: E402


def step(x: Tensor) -> Tensor:
    """Forward and backward of ops that every build has on CUDA."""
    offsets = torch.arange(0, x.shape[0] + 1, 4, device=x.device)
    y = pt.segment_reduce(pt.entmax15(x), "max", offsets=offsets)
    (gradient,) = torch.autograd.grad(pt.sparsemax(y).square().sum(), x)
    return gradient


def test_cuda_agrees_with_the_cpu() -> None:
    x = random(64, 300, dtype=torch.float32)
    found = step(x.cuda().requires_grad_())
    torch.testing.assert_close(found.cpu(), step(x.requires_grad_()), atol=1e-5, rtol=1e-4)


def test_cuda_never_waits() -> None:
    x = random(64, 300, dtype=torch.float32, device="cuda").requires_grad_()
    step(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_streams() -> None:
    """Work goes to the current stream: it sees what that stream wrote before, however late."""
    x = random(4096, 1024, dtype=torch.float32, device="cuda")
    expected = pt.entmax15(x + 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        moved = x + 1
        found = pt.entmax15(moved)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_cuda_graphs() -> None:
    x = random(64, 300, dtype=torch.float32, device="cuda").requires_grad_()
    step(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    with torch.no_grad():
        x.copy_(random(64, 300, seed=5))
    graph.replay()
    torch.testing.assert_close(captured, step(x), atol=0, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_tensors_of_a_device_that_is_not_current() -> None:
    x = random(64, 300, dtype=torch.float32)
    found = step(x.to("cuda:1").requires_grad_())
    torch.testing.assert_close(found.cpu(), step(x.requires_grad_()), atol=1e-5, rtol=1e-4)
    assert torch.cuda.current_device() == 0


def test_cuda_tensors_of_two_devices_are_refused() -> None:
    x = random(4, 8, device="cuda")
    with pytest.raises(ValueError, match="expected a tensor on cuda:0, got cpu"):
        pt.entmax(x, 1.5, mask=torch.ones(4, 8, dtype=torch.bool))

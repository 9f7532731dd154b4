"""pullback.torch under DistributedDataParallel: two processes end with the gradients of one."""

from __future__ import annotations

import datetime
import os
import socket

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pullback.torch as pt  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.zeros(1, 2, 12, 12))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        y = pt.attention(q, k, v, bias=self.bias, causal=True).flatten(2)
        return pt.entmax15(self.out(y))


def inputs(device: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = Model()
    return model.to(device), torch.randn(4, 12, 16).to(device)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def train(rank: int, device: str, port: int) -> list[Tensor]:
    # gloo: two processes may share a GPU, which NCCL does not let them.
    address = f"tcp://127.0.0.1:{port}"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=limit)
    try:
        model, x = inputs(device)
        parallel = nn.parallel.DistributedDataParallel(model)
        return gradients(parallel, x[2 * rank : 2 * rank + 2])
    finally:
        dist.destroy_process_group()


# Some runs wait for each other for a minute or for ever, by a cause not yet found.
@pytest.mark.skipif("PULLBACK_TEST_DDP" not in os.environ, reason="PULLBACK_TEST_DDP is not set")
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_have_the_gradients_of_one(device: str) -> None:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=train, args=(1, device, port))
    other.start()
    found = train(0, device, port)
    other.join(60)
    assert other.exitcode == 0
    model, x = inputs(device)
    torch.testing.assert_close(found, gradients(model, x), atol=1e-6, rtol=1e-4)

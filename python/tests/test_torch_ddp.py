"""pullback.torch under DistributedDataParallel: two processes end with the gradients of one."""

from __future__ import annotations

import socket
from typing import Any

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


def train(rank: int, device: str, port: int, found: Any) -> None:
    # gloo: two processes may share a GPU, which NCCL does not let them.
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, x = inputs(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    for gradient in gradients(parallel, x[2 * rank : 2 * rank + 2]):
        found.put((rank, gradient.cpu().numpy()))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_have_the_gradients_of_one(device: str) -> None:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    workers = [context.Process(target=train, args=(rank, device, port, found)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    model, x = inputs(device)
    expected = gradients(model, x)
    by_rank: dict[int, list[Tensor]] = {0: [], 1: []}
    for _ in range(2 * len(expected)):
        rank, gradient = found.get()
        by_rank[rank].append(torch.from_numpy(gradient))
    for gathered in by_rank.values():
        for one, other in zip(gathered, expected):
            torch.testing.assert_close(one, other.cpu(), atol=1e-6, rtol=1e-4)

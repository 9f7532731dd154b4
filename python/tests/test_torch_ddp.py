"""pullback.torch in two processes, by batch and by sequence: they end with the gradients of one."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pullback.torch as pt  # noqa: E402

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

# DistributedDataParallel imports it, and its defaults keep the group that is there by then. If that
# is one of gloo, its threads live on to the end of the process, and may abort there.
pytest.importorskip("torch.distributed.nn.functional")

# The backend, and where the processes have their tensors. Two may share a GPU, but not with NCCL.
PLACES = [("gloo", "cpu", "cpu")]
if torch.cuda.is_available():
    PLACES.append(("gloo", "cuda:0", "cuda:0"))
if torch.cuda.device_count() >= 2:
    PLACES.append(("nccl", "cuda:0", "cuda:1"))

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return pt.attention(q, k, v, bias=bias, causal=True)


class Gather(torch.autograd.Function):
    """The tensors of all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[dist.get_rank()]


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Each process has the part of the sequence that its rank tells: what its queries find in each
    part of the keys is put together by the logsumexps, which have gradients, too."""
    rank, length = dist.get_rank(), q.shape[1]

    def part(i: int) -> slice:
        return slice(i * length, (i + 1) * length)

    outs, lses = [], []
    for i, pair in enumerate(Gather.apply(torch.stack([k, v]))[: rank + 1]):
        seen = bias[:, :, part(rank), part(i)]
        out, lse = pt.attention(q, *pair, bias=seen, causal=i == rank, return_lse=True)
        outs.append(out)
        lses.append(lse.transpose(1, 2).unsqueeze(-1))
    return (torch.stack(outs) * torch.stack(lses).softmax(0)).sum(0)


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(1, 2, 12, 12))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return pt.entmax15(self.out(self.attend(q, k, v, self.bias).flatten(2)))


def inputs(device: str, attend: Attend) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = Model(attend)
    return model.to(device), torch.randn(4, 12, 16).to(device)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def by_batch(rank: int, device: str) -> list[Tensor]:
    model, x = inputs(device, attend)
    return gradients(nn.parallel.DistributedDataParallel(model), x.chunk(2)[rank])


def by_sequence(rank: int, device: str) -> list[Tensor]:
    model, x = inputs(device, attend_in_parts)
    found = gradients(model, x.chunk(2, dim=1)[rank])
    for gradient in found:
        dist.all_reduce(gradient)
    return [gradient / 2 for gradient in found]


Split = Callable[[int, str], list[Tensor]]


def train(rank: int, split: Split, backend: str, device: str, meeting: str) -> list[Tensor]:
    if backend == "nccl":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(minutes=3)
    dist.init_process_group(backend, meeting, rank=rank, world_size=2, timeout=limit)
    try:
        # No DistributedDataParallel may outlive the group: if it is the last to let go of one of
        # gloo, it waits for the group's threads while it holds Python's lock, which they need.
        return split(rank, device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
@pytest.mark.parametrize("split", [by_batch, by_sequence])
def test_two_processes_have_the_gradients_of_one(
    split: Split, place: tuple[str, str, str], tmp_path: Path
) -> None:
    backend, *devices = place
    meeting = (tmp_path / "meeting").as_uri()
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=train, args=(1, split, backend, devices[1], meeting))
    other.start()
    found = train(0, split, backend, devices[0], meeting)
    other.join(180)
    assert other.exitcode == 0
    torch.testing.assert_close(found, gradients(*inputs(devices[0], attend)), atol=1e-6, rtol=1e-4)

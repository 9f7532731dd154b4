"""pullback.torch on a GPU: streams, graphs, devices, and that nothing waits."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import Tensor  # noqa: E402

import pullback.torch as pt  # noqa: E402
from pullback.sparsity import BlockLayout  # noqa: E402
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


def test_cuda_graphs_keep_what_their_plans_have_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = BlockLayout(torch.ones(1, 8, 8).tril().numpy())
    x = random(1, 36, 16, 16, dtype=torch.float32, device="cuda").requires_grad_()

    def step(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(pt.block_softmax(x, layout).square().sum(), x)
        return gradient

    step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    monkeypatch.setattr("pullback.torch._operator._MAX_PLANS", 1)
    for batch in range(2, 30):  # which takes the place of the captured plans, and their memory
        step(x.detach().expand(batch, -1, -1, -1).requires_grad_())
    gc.collect()
    graph.replay()
    torch.testing.assert_close(captured, step(x), atol=0, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_tensors_of_a_device_that_is_not_current() -> None:
    x = random(64, 300, dtype=torch.float32)
    found = step(x.to("cuda:1").requires_grad_())
    torch.testing.assert_close(found.cpu(), step(x.requires_grad_()), atol=1e-5, rtol=1e-4)
    assert torch.cuda.current_device() == 0


def test_cuda_tensors_of_two_devices_are_refused() -> None:
    x, mask = random(4, 8, device="cuda"), torch.ones(4, 8, dtype=torch.bool)
    pt.entmax15(x, mask=mask.cuda())  # which makes a plan
    with pytest.raises(ValueError, match="expected a tensor on cuda:0, got cpu"):
        pt.entmax15(x, mask=mask)


def dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    """What attention with dropout keeps, and its gradient: v is the identity."""
    v = torch.eye(64, device=x.device).expand(1, 1, 64, 64).transpose(1, 2)
    out = pt.attention(x, x, v, dropout=0.5)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), gradient


def test_cuda_drops_what_the_cpu_drops() -> None:
    q = random(2, 70, 4, 32, dtype=torch.float32)
    seed = torch.tensor(2**62 + 5)
    expected, found = (pt.attention(x, x, x, dropout=0.3, seed=seed) for x in (q, q.cuda()))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_cuda_graphs_draw_at_each_replay() -> None:
    x = random(1, 64, 1, 32, dtype=torch.float32, device="cuda").requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dropped(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dropped(x)
    torch.cuda.manual_seed(3)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([t.clone() for t in captured])
    assert not torch.equal(replays[0][0] != 0, replays[1][0] != 0)
    torch.cuda.manual_seed(3)
    for replay in replays:
        for found, expected in zip(replay, dropped(x)):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


def bf16(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed, dtype=torch.bfloat16, device="cuda").requires_grad_()


@pytest.mark.filterwarnings("ignore:.*verridden")
def test_unmodified_sdpa_and_varlen_run_here() -> None:
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no flash attention providers")
    import pullback.sdpa

    q, k, v = (bf16(2, 4, 130, 64, seed=i) for i in range(3))
    packed = [bf16(4, 130, 64, seed=i).transpose(0, 1) for i in range(3)]
    cu = torch.tensor([0, 30, 130], dtype=torch.int32, device="cuda")

    def run() -> list[Tensor]:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
        varlen = pytest.importorskip("torch.nn.attention.varlen")
        out = varlen.varlen_attn(*packed, cu, cu, 100, 100)
        found += [out, *torch.autograd.grad(out.square().sum(), packed)]
        # What compiled code counts on.
        assert all(x.stride() == torch.empty_like(packed[0]).stride() for x in found[-4:])
        return found

    expected = run()
    pullback.sdpa.register()
    attention.activate_flash_attention_impl("pullback")
    try:
        with torch.profiler.profile() as profile:
            found = run()
        names = {event.key for event in profile.key_averages()}
        assert {"pullback::attention", "pullback::attention_backward"} <= names
    finally:
        attention.restore_flash_attention_impl()
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=3e-2, rtol=3e-2)


@pytest.mark.filterwarnings("ignore:.*verridden")
def test_unmodified_sdpa_drops_weights() -> None:
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no flash attention providers")
    import pullback.sdpa

    inputs = [bf16(2, 4, 130, 64, seed=i) for i in range(3)]
    pullback.sdpa.register()
    attention.activate_flash_attention_impl("pullback")
    torch.cuda.manual_seed(1)
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, dropout_p=0.4)
        found = torch.autograd.grad(out.square().sum(), inputs)
    finally:
        attention.restore_flash_attention_impl()
    torch.cuda.manual_seed(1)
    seed = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device="cuda")[0]
    expected = pt.attention(*[x.transpose(1, 2) for x in inputs], dropout=0.4, seed=seed)
    assert torch.equal(out, expected.transpose(1, 2))
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


def test_attention_in_a_cuda_graph_with_a_compiled_neighbour() -> None:
    q, k, v = (bf16(2, 96, 4, 64, seed=i) for i in range(3))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pt.attention(q * 2, k, v, causal=True).square()

    expected = layer(q, k, v)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.testing.assert_close(compiled(q, k, v), expected, atol=2e-2, rtol=2e-2)

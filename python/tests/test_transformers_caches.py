"""pullback.transformers: what queries see with caches, without a mask, and by built ones."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers_cases import DECODERS, TOKENS, batch, models, on_devices, spread  # noqa: E402

import pullback.transformers as pt  # noqa: E402


@on_devices
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str, device: str) -> None:
    inputs = batch("left", device)
    del inputs["labels"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    eager, ours = (model.generate(**inputs, **options) for model in spread("mistral", device))
    assert eager.tolist() == ours.tolist()


@on_devices
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_caches(name: str, kind: str, padded: bool, device: str) -> None:
    tokens = batch("plain", device)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def logits(model: Any, parts: list[int]) -> Tensor:
        make = transformers.StaticCache if kind == "static" else transformers.DynamicCache
        sizes = {"config": model.config, "max_cache_len": TOKENS + 4, "max_batch_size": 2}
        sizes["device"] = device
        known = inspect.signature(make).parameters
        cache = make(**{name: value for name, value in sizes.items() if name in known})
        found, end = [], 0
        for length in parts:
            begin, end = end, end + length
            options = {}
            if padded:
                options = {
                    "attention_mask": mask[:, :end],
                    "position_ids": positions[:, begin:end],
                }
            with torch.no_grad():
                part = model(tokens[:, begin:end], past_key_values=cache, **options)
            found.append(part.logits)
        return torch.cat(found, 1)

    seen = mask.bool() if padded else torch.ones_like(mask, dtype=torch.bool)
    eager, ours = spread(name, device)
    for parts in ([TOKENS], [12, *[1] * 8], [8, 11, 1], [3, 9, 8]):
        expected, found = logits(eager, parts)[seen], logits(ours, parts)[seen]
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@on_devices
def test_a_cache_may_be_filled_in_parts(device: str) -> None:
    _, ours = models("mistral", device, torch.float64)
    tokens = batch("plain", device)["input_ids"]
    cache = transformers.DynamicCache()
    with torch.no_grad():
        whole = ours(tokens).logits
        parts = [ours(part, past_key_values=cache).logits for part in tokens.split([8, 11, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)


@on_devices
@pytest.mark.parametrize("sq,sk", [(5, 8), (1, 8), (8, 8)])
@pytest.mark.parametrize("causal", [None, True, False])
def test_attention_without_a_mask(sq: int, sk: int, causal: bool | None, device: str) -> None:
    module = torch.nn.Module()
    module.is_causal = causal is None
    q = torch.randn(2, 4, sq, 8, dtype=torch.float64, device=device)
    k, v = torch.randn(2, 2, 4, sk, 8, dtype=torch.float64, device=device)
    found, _ = pt.attention(module, q, k, v, None, is_causal=causal)
    hides = sq > 1 and causal is not False
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=hides, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-12, rtol=1e-12)


@on_devices
def test_rows_that_a_built_mask_hides_have_the_mean(device: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8, device=device).bfloat16()
    mask = torch.zeros(1, 1, 6, 6, device=device)  # of a model in f32, under autocast
    mask[..., 0, :] = torch.finfo(torch.float32).min
    mask[..., 1, 3:] = torch.finfo(torch.float32).min
    out, _ = pt.attention(torch.nn.Module(), q, k, v, mask)
    mean = v.float().mean(2)
    torch.testing.assert_close(out[:, 0].float(), mean, atol=0.01, rtol=0.01)
    alone, _ = pt.attention(
        torch.nn.Module(), q[:, :, 1:2], k[:, :, :3], v[:, :, :3], None, is_causal=False
    )
    assert torch.equal(out[:, 1:2], alone)

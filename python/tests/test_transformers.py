"""pullback.transformers: tiny models give the loss and gradients of eager attention."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers_cases import (  # noqa: E402
    DECODERS,
    TOKENS,
    assert_same,
    batch,
    gradients,
    models,
    on_devices,
)

import pullback.transformers as pt  # noqa: E402


@on_devices
@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, kind: str, device: str) -> None:
    assert_same(*models(name, device), batch(kind, device), 1e-5)


@on_devices
@pytest.mark.parametrize("kind", ["plain", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "t5"])
def test_encoders(name: str, kind: str, device: str) -> None:
    assert_same(*models(name, device), batch(kind, device), 1e-5)


@on_devices
@pytest.mark.parametrize("name", ["bert", "gpt_oss", "t5"])
def test_f64(name: str, device: str) -> None:
    assert_same(*models(name, device, torch.float64), batch("right", device), 1e-12)


@on_devices
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_the_user(kind: str, device: str) -> None:
    eager, ours = models("llama", device, torch.float64)
    seen = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
    seen[0, :, 10:, 3] = False
    added = torch.zeros(seen.shape, dtype=torch.float64, device=device).masked_fill(~seen, -1e30)
    inputs = batch("plain", device)
    expected, wanted = gradients(eager, {**inputs, "attention_mask": added})
    mask = seen if kind == "bool" else added
    loss, found = gradients(ours, {**inputs, "attention_mask": mask})
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max().item() <= 1e-6 * scale, name


@on_devices
def test_packed_sequences_by_offsets(device: str) -> None:
    module = torch.nn.Module()
    q = torch.randn(1, 4, TOKENS, 8, dtype=torch.float64, device=device)
    k, v = torch.randn(2, 1, 2, TOKENS, 8, dtype=torch.float64, device=device)
    sinks = torch.randn(4, dtype=torch.float64, device=device)
    offsets = torch.tensor([0, 7, TOKENS], dtype=torch.int32, device=device)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 13}
    out, _ = pt.attention(module, q, k, v, None, s_aux=sinks, **packed)
    for rows in (slice(0, 7), slice(7, TOKENS)):
        alone = (tensor[:, :, rows] for tensor in (q, k, v))
        expected, _ = pt.attention(module, *alone, None, s_aux=sinks)
        torch.testing.assert_close(out[:, rows], expected, atol=1e-12, rtol=1e-12)


@on_devices
def test_dropout_keeps_the_mean(device: str) -> None:
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64, device=device)
    plain, _ = pt.attention(module, q, k, v, None)
    torch.manual_seed(0)
    draws = torch.stack([pt.attention(module, q, k, v, None, dropout=0.2)[0] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - plain).abs() / (draws.std(0) / 20 + 1e-9)
    assert error.max().item() < 5
    torch.manual_seed(0)
    assert torch.equal(pt.attention(module, q, k, v, None, dropout=0.2)[0], draws[0])


def packed_batch(device: str) -> tuple[dict[str, Any], list[Tensor]]:
    """What DataCollatorWithFlattening makes of two sequences, and these."""
    tokens = batch("plain", device)["input_ids"][:1]
    offsets = torch.tensor([0, 7, TOKENS], dtype=torch.int32, device=device)
    packed = {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(7), torch.arange(13)])[None].to(device),
        **{f"cu_seq_lens_{side}": offsets for side in "qk"},
        **{f"max_length_{side}": 13 for side in "qk"},
    }
    return packed, [*tokens.split([7, 13], 1)]


@on_devices
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_sequences_of_a_model_by_offsets(
    name: str, use_cache: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, ours = models(name, device)
    packed, sequences = packed_batch(device)
    expected = torch.cat([eager(sequence).logits for sequence in sequences], 1)
    monkeypatch.setattr(pt, "_bias", None)  # no mask is built
    found = ours(**packed, use_cache=use_cache).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_sequences_by_offsets_and_other_masks() -> None:
    _, ours = models("mistral", "cpu", torch.float64)
    packed, _ = packed_batch("cpu")
    expected = ours(**packed).logits
    positions = torch.arange(TOKENS)
    distance = positions[:, None] - positions
    window = ((distance >= 0) & (distance < 5))[None, None]
    found = ours(**packed, attention_mask=window).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    torch.compiler.reset()
    for use_cache in (False, True):
        whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
        found = whole(**packed, use_cache=use_cache).logits
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    padding = torch.ones(1, TOKENS, dtype=torch.int64)
    assert torch.equal(ours(**packed, attention_mask=padding).logits, expected)
    padding[0, -1] = 0
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: packed sequences have no padd"):
        ours(**packed, attention_mask=padding)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: chunks of packed sequences"):
        models("llama4", "cpu")[1](**packed)


@on_devices
def test_checkpointing_and_autocast(device: str) -> None:
    inputs = batch("right", device)
    eager, ours = (model.train() for model in models("llama", device))
    ours.gradient_checkpointing_enable()
    assert_same(eager, ours, inputs, 1e-5)
    expected, _ = gradients(eager, inputs)
    with torch.autocast(device, torch.bfloat16):
        loss, _ = gradients(ours, inputs)
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()


def test_compiles_in_one_graph() -> None:
    eager, ours = models("mistral", "cpu")
    torch.compiler.reset()
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = batch("right", "cpu")
    torch.testing.assert_close(whole(**inputs).loss, eager(**inputs).loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True},
        {"head_mask": torch.ones(4)},
        {"cache": object()},
        {"indices": torch.zeros(1, dtype=torch.int64)},
        {"sliding_window": 4},
        {"attention_mask": torch.ones(1, 8)},
    ],
)
def test_refusals(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 8, 4)
    options.setdefault("attention_mask", None)
    with pytest.raises(NotImplementedError, match="^pullback.transformers: "):
        pt.attention(torch.nn.Module(), q, q, q, **options)


@pytest.mark.parametrize("name", ["query", "value"])
def test_head_dims_past_256_are_refused(name: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 8, 256))
    assert pt.attention(torch.nn.Module(), **given, attention_mask=None)[0].shape[-1] == 256
    given[name] = torch.randn(1, 2, 8, 257)
    with pytest.raises(
        NotImplementedError, match=f"{name}: .* 256 or less, got 257; use attn_impl"
    ):
        pt.attention(torch.nn.Module(), **given, attention_mask=None)


def test_a_mask_has_no_elements() -> None:
    mask, scores = pt.Mask(-1, 0, 8, None), torch.zeros(1, 1, 8, 8)
    for look in (
        lambda: mask[:, 0],
        lambda: mask[..., :4],
        lambda: mask.dtype,
        lambda: scores + mask,
        lambda: torch.cat([scores, mask]),
    ):
        with pytest.raises(NotImplementedError, match="looks into its mask"):
            look()
    assert not hasattr(mask, "to") and copy.deepcopy(mask) == mask
    assert mask[0] == -1 and mask.ndim == 4


def test_masks_that_models_may_look_into_are_those_of_eager_attention() -> None:
    parameters = inspect.signature(masking_utils.sdpa_mask).parameters
    place = {"q_length": 8} if "q_length" in parameters else {"cache_position": torch.arange(8)}
    options = {
        **place,
        "batch_size": 2,
        "kv_length": 8,
        "mask_function": masking_utils.causal_mask_function,
        "attention_mask": torch.arange(8).expand(2, -1) >= torch.tensor([[0], [3]]),
        "allow_is_causal_skip": False,
        "dtype": torch.float32,
    }
    found = pt.mask(**options)
    assert torch.equal(found, masking_utils.eager_mask(**options))
    # Rows that see nothing have the mean of all values.
    q, k, v = torch.randn(3, 2, 2, 8, 4)
    expected = (q @ k.mT / 2 + found).softmax(-1) @ v
    out, _ = pt.attention(torch.nn.Module(), q, k, v, found)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_local_size_without_a_window_hides_nothing() -> None:
    """DiffusionGemma's: for its layers of full attention, too, it is where masks may be skipped."""
    parameters = inspect.signature(masking_utils.sdpa_mask).parameters
    if "q_offset" not in parameters:
        pytest.skip("this transformers has no such models")
    options: dict[str, Any] = {
        "batch_size": 1,
        "q_length": 4,
        "kv_length": 12,
        "q_offset": 8,
        "mask_function": masking_utils.bidirectional_mask_function,
        "attention_mask": torch.arange(12)[None] >= 1,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": True,
        "local_size": 5,
        "dtype": torch.float32,
    }
    mask = pt.mask(**options)
    assert isinstance(mask, pt.Mask) and mask[:2] == (-1, -1)
    options["mask_function"] = masking_utils.sliding_window_bidirectional_mask_function(5)
    windowed = pt.mask(**options)
    assert isinstance(windowed, pt.Mask) and windowed[:2] == (5, 5)


def test_masks_of_packed_sequences_have_elements() -> None:
    _, ours = models("mistral", "cpu")
    packed, _ = packed_batch("cpu")
    masks: list[Any] = []
    for layer in ours.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    ours(packed["input_ids"], position_ids=packed["position_ids"], use_cache=False)
    mask = masks[0]
    assert mask.shape == (1, 1, TOKENS, TOKENS) and mask is masks[1]
    assert torch.equal(mask[..., :4], (torch.zeros(TOKENS) + mask)[..., :4])
    assert mask[0, 0, 6, 5] == 0 and mask[0, 0, 7, 6] < -1e30


def test_a_mask_is_of_the_keys_it_was_made_for() -> None:
    q = torch.randn(1, 2, 8, 4)
    kept = torch.cat([q, q[:, :, :2]], 2)
    with pytest.raises(NotImplementedError, match="made for 8 keys, but the model has 10"):
        pt.attention(torch.nn.Module(), q, kept, kept, pt.Mask(-1, 0, 8, None))


def test_empty_batches() -> None:
    q = torch.randn(0, 2, 8, 4)
    assert pt.attention(torch.nn.Module(), q, q, q, None)[0].shape == (0, 8, 2, 4)


def test_attention_weights_are_refused_by_models() -> None:
    _, ours = models("llama", "cpu")
    with pytest.raises(NotImplementedError, match="attention weights"):
        ours(**batch("plain", "cpu"), output_attentions=True)

"""pullback.transformers: small models give the loss and gradients of eager attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402

import pullback.transformers  # noqa: E402

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grouped heads": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "window": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "window and softcap": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bidirectional": (
        "BertForMaskedLM",
        "BertConfig",
        {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "position bias": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
}


@pytest.fixture(autouse=True)
def registered() -> None:
    pullback.transformers.register()


def make(name: str) -> Any:
    model, config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


def loss_and_gradients(
    model: Any, implementation: str, **inputs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(model: Any, other: str = "eager", **inputs: Any) -> None:
    loss, gradients = loss_and_gradients(model, other, **inputs)
    found_loss, found = loss_and_gradients(model, "pullback", **inputs)
    torch.testing.assert_close(found_loss, loss, atol=1e-5, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            found[name], gradient, atol=1e-4 * scale + 1e-7, rtol=1e-3, msg=name
        )


def tokens(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(5, 99, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_eager_attention(name: str, padded: bool) -> None:
    assert_alike(make(name), **tokens(padded))


def test_packed_sequences() -> None:
    """Positions that begin anew begin a sequence, which sees nothing of the others."""
    ids = tokens(False)["input_ids"][:1]
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    # With a cache, Transformers does not look for packed sequences.
    assert_alike(make("grouped heads"), "sdpa", **inputs, use_cache=False)
    lengths = torch.tensor([0, 10, 24], dtype=torch.int32)
    model = make("grouped heads")
    expected = loss_and_gradients(model, "sdpa", **inputs, use_cache=False)[0]
    packed = {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": 14,
        "max_length_k": 14,
    }
    found = loss_and_gradients(model, "pullback", **inputs, **packed)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_generation_with_a_cache() -> None:
    model = make("window and softcap").eval()
    ids = tokens(False)["input_ids"]
    found = []
    for implementation in ("eager", "pullback"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(*found)


def test_dropout_is_drawn_in_training_alone() -> None:
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config)
    model.set_attn_implementation("pullback")
    inputs = tokens(True)
    first, second = (model.train()(**inputs).loss for _ in range(2))
    assert first != second
    assert model.eval()(**inputs).loss == model(**inputs).loss


def test_a_model_with_attention_compiles_whole() -> None:
    torch.compiler.reset()
    model = make("grouped heads")
    model.set_attn_implementation("pullback")
    inputs = tokens(False)
    expected = model(**inputs).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).loss, expected)


def test_a_paged_cache_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="cache"):
        pullback.transformers.attention_forward(torch.nn.Module(), q, q, q, None, cache=object())

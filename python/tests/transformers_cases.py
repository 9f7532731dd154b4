"""Tiny Transformers models, eager and ours, with the same weights.

The eager attention of many models computes the softmax in f32 whatever their dtype, which bounds
how close the two can be. PULLBACK_TEST_OPS: see test_torch.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import pullback.transformers as pt  # noqa: E402
from torch_cases import CUDA_OPS, DEVICES  # noqa: E402

pt.register()

on_devices = pytest.mark.parametrize(
    "device",
    [d for d in DEVICES if d == "cpu" or CUDA_OPS is None or "attention" in CUDA_OPS.split(",")],
)
TOKENS, VOCABULARY = 20, 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
DECODERS = ("llama", "mistral", "gemma2", "gpt_oss", "llama4", "gpt2")


def configuration(name: str) -> tuple[Any, Any]:
    """A tiny model: its configuration, and the class that makes it."""
    t = transformers
    if name == "llama":
        return t.LlamaConfig(**GROUPED), AutoModelForCausalLM
    if name == "mistral":  # all layers have a window
        return t.MistralConfig(sliding_window=5, **GROUPED), AutoModelForCausalLM
    if name == "gemma2":  # softcap; windows in every other layer
        special = {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 0.5}
        return t.Gemma2Config(sliding_window=5, **special, **GROUPED), AutoModelForCausalLM
    if name == "gpt_oss":  # sinks
        if not hasattr(t, "GptOssConfig"):
            pytest.skip("this version has no such model")
        return t.GptOssConfig(sliding_window=5, **EXPERTS, **GROUPED), AutoModelForCausalLM
    if name == "gpt2":  # scores scaled by layer
        special = {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
        dropouts = {f"{part}_pdrop": 0.0 for part in ("attn", "embd", "resid")}
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return t.GPT2Config(**sizes, **special, **dropouts), AutoModelForCausalLM
    if name == "llama4":  # chunks
        special = {"attention_chunk_size": 6, "intermediate_size_mlp": 48, "pad_token_id": 0}
        return t.Llama4TextConfig(**special, **EXPERTS, **GROUPED), AutoModelForCausalLM
    if name == "bert":
        return t.BertConfig(**SMALL, attention_probs_dropout_prob=0.0), AutoModelForMaskedLM
    if name == "modernbert":  # bidirectional windows
        tokens = {
            f"{kind}_token_id": i for i, kind in enumerate(("pad", "bos", "eos", "cls", "sep"))
        }
        return t.ModernBertConfig(local_attention=6, **tokens, **SMALL), AutoModelForMaskedLM
    assert name == "t5"  # position bias, cross attention
    shapes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    special = {"num_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return t.T5Config(**shapes, **special), AutoModelForSeq2SeqLM


def models(name: str, device: str, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """(eager, pullback) with the same weights."""
    config, auto = configuration(name)
    if transformers.__version__ < "5" and "bert" in name:
        pytest.skip("chooses among its own attention classes")
    torch.manual_seed(0)
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager")
    if name == "t5" and not eager._supports_attention_backend:
        pytest.skip("in this version it has no attention but its own")
    for parameter in eager.parameters():
        if parameter.dim() < 2 or parameter.isnan().any() or "experts" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # biases, norms and sinks, too
    ours = auto.from_config(copy.deepcopy(config), attn_implementation="pullback")
    ours.load_state_dict(eager.state_dict())
    return eager.to(device, dtype).eval(), ours.to(device, dtype).eval()


def spread(name: str, device: str) -> tuple[Any, Any]:
    """models(), with weights so large that what a token sees is seen in its logits."""
    eager, ours = models(name, "cpu")
    torch.manual_seed(3)
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(eager.state_dict())
    return eager.to(device), ours.to(device)


def batch(kind: str, device: str) -> dict[str, Tensor]:
    tokens = torch.randint(6, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    made = {"input_ids": tokens, "labels": labels}
    if kind in ("right", "left"):
        padding = torch.zeros_like(tokens, dtype=torch.bool)
        if kind == "right":
            padding[0, 13:] = True
            labels[padding] = -100
        else:
            padding[1, :4] = True
            # The first token would be predicted from padding, where the two differ.
            labels[1, :5] = -100
        made["attention_mask"] = (~padding).long()
    elif kind == "packed":
        made["position_ids"] = torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1)
    return {name: tensor.to(device) for name, tensor in made.items()}


def gradients(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(eager: Any, ours: Any, inputs: dict[str, Any], tolerance: float = 2e-6) -> None:
    expected, wanted = gradients(eager, inputs)
    loss, found = gradients(ours, inputs)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max().item() <= tolerance * scale, name

#!/usr/bin/env python3
"""Training steps of Transformers models on a GPU by attention implementation: time, memory, loss.

Weights are random, from each model's own configuration: all-MiniLM-L6-v2, ModernBERT-base (windows of
128 in two layers of three) and a Llama 3.2 1B cut to 4 layers. bf16 autocast, no dropout.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers

import pullback.transformers

BERT = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODERN = {"vocab_size": 50368, "global_attn_every_n_layers": 3, "local_attention": 128}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
# Name, configuration, model, batch, tokens.
MODELS: list[tuple[str, Callable[[], Any], str, int, int]] = [
    ("MiniLM-L6, 64 x 256", lambda: transformers.BertConfig(**BERT), "BertForMaskedLM", 64, 256),
    ("ModernBERT-base, 4 x 4096", lambda: transformers.ModernBertConfig(**MODERN), "ModernBertForMaskedLM", 4, 4096),
    ("Llama 1B, 4 layers, 2 x 8192", lambda: transformers.LlamaConfig(**LLAMA), "LlamaForCausalLM", 2, 8192),
]


def train(config: Any, model_class: Any, implementation: str, batch: int, tokens: int) -> str:
    torch.manual_seed(0)
    config._attn_implementation = implementation
    model = model_class._from_config(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    memory = torch.cuda.max_memory_allocated() / 2**30
    return f"{statistics.median(times[3:]):.1f} | {memory:.1f} | {loss.item():.4f}"


def main() -> None:
    pullback.transformers.register()
    print("| model | attention | ms a step | GiB | loss after 8 steps |\n|---|---|---|---|---|")
    for name, config, model_class, batch, tokens in MODELS:
        for implementation in ("eager", "sdpa", "pullback"):
            try:
                row = train(config(), getattr(transformers, model_class), implementation, batch, tokens)
            except torch.OutOfMemoryError:
                row = "out of memory | | "
            print(f"| {name} | {implementation} | {row} |", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

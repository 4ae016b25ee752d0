"""The package TransformerEngine, and the order in which its modules must be imported."""

from __future__ import annotations

from typing import Any

from megalight.plugins.package import Package

PACKAGE = Package("transformer_engine", "transformer-engine", "pip install --no-build-isolation 'megalight[te]'")
TORCH = "transformer_engine.pytorch"
KERNELS = "transformer_engine_torch"
"""The compiled extension. :data:`TORCH` must be imported first, because it finds the extension."""


def why_not(device: str, feature: str, minimum: str, *paths: str) -> str | None:
    """Return why the package cannot serve ``feature``, or None."""
    return PACKAGE.why_not(device, feature, TORCH, *paths, minimum=minimum)


def kernel(name: str) -> Any:
    """Return a function of the compiled extension."""
    PACKAGE.load(TORCH)
    return PACKAGE.load(f"{KERNELS}:{name}")


def dtype_code(dtype: Any) -> Any:
    """Return the extension's value for a torch dtype."""
    return PACKAGE.load("transformer_engine.pytorch.constants:TE_DType")[dtype]

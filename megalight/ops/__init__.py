"""Operations, one folder or file each: a reference in plain torch, and faster backends."""

from __future__ import annotations

import importlib
from typing import Any

from megalight.errors import ConfigurationError, nearest
from megalight.registry import Backend, BackendRegistry

OPS = (
    "attention",
    "attention_block",
    "attention_merge",
    "fp8_attention",
    "norm",
    "rotary",
    "latent_heads",
    "activation",
    "linear",
    "embedding",
    "cross_entropy",
    "divergence",
    "adam",
    "quantize",
    "cast_flat",
    "scaled_mm",
    "scaled_accumulate",
    "router",
    "permute",
    "grouped_linear",
    "grouped_scaled",
    "causal_conv",
    "ssd",
    "delta_rule",
    "gated_norm",
    "quantized_weight",
    "sum_rows",
    "sum_terms",
    "syrk",
    "momentum",
)
"""Names of the modules in this folder, one per op."""


def registries() -> dict[str, tuple[BackendRegistry[Any, Any], Any]]:
    """Return op -> its registry and a typical request."""
    modules = [importlib.import_module(f"megalight.ops.{name}") for name in OPS]
    return {registry.op: (registry, module.EXAMPLE) for module in modules for registry in module.REGISTRIES}


def backends_of(device: str) -> dict[str, list[tuple[Backend[Any, Any], str | None]]]:
    """Return op -> its backends, highest priority first, each with the reason why it cannot serve, or None.

    Backends of plugins import their packages to answer.

    Args:
        device: the device type to ask for.
    """
    return {op: registry.table(spec._replace(device=device)) for op, (registry, spec) in registries().items()}


def use_backends(**names: str) -> None:
    """Make ``auto`` mean the given backend for each op, in this process.

    Example: ``use_backends(weight_gradient="transformer_engine")``. ``"auto"`` restores the usual order. A given
    backend that cannot serve raises. Ops whose backend is named in a model's configuration are not affected.

    Raises:
        ConfigurationError: there is no such op.
        BackendError: the op has no such backend.
    """
    known = registries()
    for op in names:
        if op not in known:
            raise ConfigurationError(f"there is no op {op!r}; known: {', '.join(sorted(known))}." + nearest(op, known))
    for op, name in names.items():
        known[op][0].prefer(name)

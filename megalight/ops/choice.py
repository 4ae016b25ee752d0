"""Choosing backends for ops as a whole, beside what a model's configuration names."""

from __future__ import annotations

import importlib
from typing import Any

from megalight.errors import ConfigurationError, nearest
from megalight.ops import OPS
from megalight.registry import Backend, BackendRegistry


def registries() -> dict[str, tuple[BackendRegistry[Any, Any], Any]]:
    """Op -> its registry, and a typical request."""
    modules = [importlib.import_module(f"megalight.ops.{name}") for name in OPS]
    return {registry.op: (registry, module.EXAMPLE) for module in modules for registry in module.REGISTRIES}


def backends_of(device: str) -> dict[str, list[tuple[Backend[Any, Any], str | None]]]:
    """Every op's backends, highest priority first, each with why it cannot serve on ``device`` (a device type).

    Plugins' backends are asked too, and import their packages to answer.
    """
    return {op: registry.table(spec._replace(device=device)) for op, (registry, spec) in registries().items()}


def use_backends(**names: str) -> None:
    """Let ``auto`` be a named backend, for ops that no configuration names one for; holds for this process.

    ``use_backends(weight_gradient="transformer_engine")``; ``"auto"`` restores the usual order. A named backend serves
    or raises.

    Raises:
        ConfigurationError: no such op.
        BackendError: the op has no such backend.
    """
    known = registries()
    for op in names:
        if op not in known:
            raise ConfigurationError(f"there is no op {op!r}; known: {', '.join(sorted(known))}." + nearest(op, known))
    for op, name in names.items():
        known[op][0].prefer(name)

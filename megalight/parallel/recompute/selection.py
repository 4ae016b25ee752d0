"""Selecting modules of a layer by names and patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from megalight.errors import ConfigurationError, nearest_pattern
from megalight.nn import Activation, Embedding, LayerNorm, Linear, RMSNorm
from megalight.parallel.tensor.column import ColumnLinear
from megalight.parallel.tensor.dropout import ParallelDropout
from megalight.parallel.tensor.row import RowLinear

Layer: TypeAlias = tuple[str, nn.Module]
"""Name in the model and module of a layer: ``layers.3``, or ``mtp.depths.0.layers.0``."""
DISCARDED = (RMSNorm, LayerNorm, Activation, nn.RMSNorm, nn.LayerNorm, nn.GELU, nn.SiLU, nn.ReLU)
"""Modules whose output the next linear layer can compute again."""
USELESS: dict[tuple[type[nn.Module], ...], str] = {
    (Linear, ColumnLinear, RowLinear, nn.Linear): "a linear layer keeps only its input, and so would its recompute",
    (nn.Dropout, ParallelDropout): "dropout keeps a mask, and its recompute would keep its input, which is larger",
    (Embedding, nn.Embedding): "an embedding keeps only token ids",
    (nn.ModuleDict, nn.ModuleList): "it is a container, which is never called",
}
"""Module types for which recompute saves nothing, and why."""


def _matches(layer: Layer, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a pattern names, in the layer or as the layer itself, which has an empty name."""
    outer, module = layer
    matches = re.compile(fnmatch.translate(pattern)).match
    found = []
    # By both names: patterns for one layer begin with `layers.`.
    for name, part in module.named_modules():
        whole = f"{outer}.{name}" if name else outer
        if (name and matches(name)) or matches(whole):
            found.append((name, part))
    return found


def selected(layer: Layer, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules of a layer to recompute, without modules inside another one of the list."""
    # A dict, as several patterns may name the same module, which must be replaced once.
    found = {name: module for p in patterns for name, module in _matches(layer, p) if not _why_useless(module)}
    return [
        (name, module)
        for name, module in found.items()
        # An outer region runs its inner modules again anyway; a region in a region would run them three times.
        if not any(name != other and (not other or name.startswith(f"{other}.")) for other in found)
    ]


def _why_useless(module: nn.Module) -> str | None:
    if getattr(module, "inplace", False):
        return "it overwrites its input, so it cannot run a second time"
    if getattr(module, "fp8_input_store", False):
        return "it keeps its input in 8 bits (fp8_input_store), and its recompute would keep it whole"
    return next((reason for types, reason in USELESS.items() if isinstance(module, types)), None)


def check_pattern(layers: list[Layer], pattern: str, patterns: Sequence[str], option: str) -> None:
    """Check that a pattern, among others of an ``option``, names a module whose recompute saves memory.

    Raises:
        ConfigurationError: it names none.
    """
    found = [(layer, name, module) for layer in layers for name, module in _matches(layer, pattern)]
    if not found:
        names = dict.fromkeys(name for _, layer in layers for name, _ in layer.named_modules() if name)
        raise ConfigurationError(
            f"pattern {pattern!r} of {option} matches no module of any layer; modules inside a layer are "
            f"{', '.join(names)}." + nearest_pattern(pattern, names)
        )
    useful = [one for one in found if not _why_useless(one[2])]
    if not useful:
        raise ConfigurationError(
            f"{pattern!r} of {option} would save nothing: {_why_useless(found[0][2])}. Leave it out."
        )
    if not any(name in dict(selected(layer, patterns)) for layer, name, _ in useful):
        raise ConfigurationError(
            f"{pattern!r} of {option} lies inside another module of the list, which is recomputed as a whole; "
            "leave out one of the two."
        )

"""Options of activation recompute, and the modules of a layer that they select."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from megalight.errors import ConfigurationError, nearest, nearest_pattern
from megalight.nn import Activation, Embedding, LayerNorm, Linear, RMSNorm
from megalight.parallel.layers import translated
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.tensor.shared import ParallelDropout

GRANULARITIES = ("none", "selective", "full")
METHODS = ("uniform", "block")


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations that the backward pass computes again, so that they need not be kept.

    Attributes:
        granularity: ``none``; ``selective``: the named modules inside every layer; ``full``: whole layers.
        modules: for ``selective``: names or glob patterns (``*`` also matches dots) of modules, as they are called
            inside a layer (``attention.inner``, ``mlp``, ``*_norm``, ``mlp.act``), or in the model
            (``layers.1?.mlp``, ``layers.3``). Megatron's names are known too (:mod:`~megalight.parallel.layers`).
        method: for ``full``: ``uniform`` (the default): consecutive layers form groups of ``num_layers``, and each
            group keeps only its input; ``block``: the first ``num_layers`` layers of every model chunk are recomputed
            one by one, and the others keep everything. Layers of multi-token prediction are recomputed by ``uniform``,
            one by one.
        num_layers: for ``full``; the default for ``uniform`` is 1.
        vision: recompute of the layers of a vision tower, which the other settings leave alone. Names in its
            ``modules`` are those inside of a layer of the tower, or begin with ``embed.tower.layers``.

    Raises:
        ConfigurationError: an unknown word, or settings that do not belong together.
    """

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[str, ...] = ()
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    vision: RecomputeOptions | None = None

    def __post_init__(self) -> None:
        # Translated here, so that all other code knows one name for each module. Frozen, hence past the guard.
        object.__setattr__(self, "modules", translated(self.modules))
        _check_word("granularity", self.granularity, GRANULARITIES)
        if self.vision is not None and self.vision.vision is not None:
            raise ConfigurationError("recompute.vision.vision is set, and a tower has no tower; leave it out.")
        full = self.granularity == "full"
        if not full and (self.method is not None or self.num_layers is not None):
            raise ConfigurationError(
                f"recompute.granularity={self.granularity!r} with method={self.method!r}, "
                f"num_layers={self.num_layers}: they need granularity='full'; set it, or leave them out."
            )
        if self.granularity != "selective" and self.modules:
            raise ConfigurationError(
                f"recompute.granularity={self.granularity!r} with modules={list(self.modules)}: they need "
                "granularity='selective'; set it, or leave them out."
            )
        if self.granularity == "selective" and not self.modules:
            raise ConfigurationError(
                "recompute.granularity='selective' needs modules; name some, for example "
                "modules=['attention_norm', 'mlp_norm', 'mlp.act']."
            )
        if full:
            self._check_full()

    def _check_full(self) -> None:
        method = "uniform" if self.method is None else self.method
        _check_word("method", method, METHODS)
        if self.num_layers is None and method == "block":
            raise ConfigurationError(
                "recompute.method='block' needs num_layers: how many layers of a chunk to recompute."
            )
        number = 1 if self.num_layers is None else self.num_layers
        if number < 1:
            raise ConfigurationError(f"recompute.num_layers={number}; it must be at least 1.")
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "num_layers", number)


def _check_word(what: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise ConfigurationError(
            f"recompute.{what}={word!r}; it must be one of {', '.join(known)}." + nearest(str(word), known)
        )


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

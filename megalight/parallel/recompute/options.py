"""Options of activation recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megalight.errors import ConfigurationError, nearest
from megalight.parallel.aliases import translated

GRANULARITIES = ("none", "selective", "full")
METHODS = ("uniform", "block")


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activations that the backward pass computes again, so that they need not be kept.

    Attributes:
        granularity: ``none``; ``selective``: the named modules inside every layer; ``full``: whole layers.
        modules: for ``selective``: names or glob patterns (``*`` also matches dots) of modules, as they are called
            inside a layer (``attention.inner``, ``mlp``, ``*_norm``, ``mlp.act``), or in the model
            (``layers.1?.mlp``, ``layers.3``). Megatron's names are known too (:mod:`~megalight.parallel.aliases`).
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
    vision: Recompute | None = None

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

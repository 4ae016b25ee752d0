"""What a user chooses for GEMMs in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megalight.errors import ConfigurationError, nearest
from megalight.ops.quantize.recipes import QuantizationRecipe, recipe

MAX_MARGIN = 14
"""Largest margin: 448 / 2^14 is the smallest such quotient that e4m3 holds with all its bits."""

TOWERS = ("language", "vision")


@dataclass(frozen=True)
class LowPrecisionOptions:
    """User options for GEMMs in 8 or 4 bits.

    Args:
        recipe: ``tensorwise``, ``delayed``, ``rowwise``, ``blockwise``, ``mxfp8`` or ``nvfp4``; see
            :mod:`megalight.ops.quantize.recipes`.
        formats: ``hybrid`` (gradients e5m2) or ``e4m3``; None: the usual one for the recipe.
        power_of_two: scales are powers of two.
        margin: scales leave room for values ``2 ** margin`` times as large, up to 14; for ``tensorwise`` and
            ``delayed``.
        history: number of past steps that ``delayed`` uses; None: 16.
        first_layers: number of layers at the beginning that keep the weights' own dtype.
        last_layers: number of layers at the end that do.
        modules: patterns of linear layers inside a layer that use low precision (``mlp.*``). Embeddings and the output
            layer never do, nor does a router. Experts are ``mlp.experts.up`` and ``mlp.experts.down``; the matrices of
            each are cast on their own. Layers of a vision tower begin with ``tower.`` (``tower.mlp.*``).
        towers: which layers of a model that reads images use low precision: ``language``, ``vision`` (the vision
            tower), or both. ``first_layers`` and ``last_layers`` are of the language model.
        reduce_amax: scales that span features of several ``tp`` (experts: ``etp``) ranks agree, so that results do not
            depend on it.
            This costs one small all-reduce per cast. For ``tensorwise`` and ``rowwise``; ``delayed`` always agrees: in
            the first step per cast (experts: in every step), later once a step over all ranks that hold the weight or a
            part of it.
        primary_weights: store weights of these layers as 8-bit values during training. The optimizer's masters are cast
            with the scale of the whole weight, the quantized values are sent to the data-parallel ranks, and no rank
            holds the weights in their own dtype. For ``tensorwise`` and ``delayed``. Not for experts. None: with these
            recipes of our own products, quantized values where they spare messages or memory: ranks gather weights, or
            masters are wider copies. Masters are then rounded to the dtype of the weights first, so that no value
            differs from False. Experts keep their dtype, and so do all weights where hooks may read them. False:
            weights keep their dtype.
        experts_together: run all experts of a stack in one product, also large ones, which are faster one by one. The
            host then never waits for their numbers of rows: so recorded steps need it. For ``tensorwise``, ``delayed``
            and ``rowwise``.
        router_padding_for_quantization: fill up the tokens of each expert with zeros to a multiple of 16 (``mxfp8``:
            32, ``nvfp4``: 128) when they are brought to it. Casts then need no padding of their own.
        fp8_attention: attention of these layers multiplies in 8 bits, too. Queries, keys, values and weights are in
            e4m3. The gradients of the output and of the scores are in the format of gradients: e5m2, or e4m3 with
            ``formats="e4m3"``. Whatever the recipe, each tensor has one scale, by the current values of each rank's
            own heads. It needs equally long sequences without windows, soft caps, sinks, dropout or context
            parallelism, and heads of a multiple of 16 features up to 128. Its kernels are TransformerEngine's, from
            Blackwell on; elsewhere it is emulated.
        emulate: compute products in float64 from the decoded values, on machines without the real products.

    Raises:
        ConfigurationError: a value is not allowed, or has no effect for the recipe.
    """

    recipe: str = "tensorwise"
    formats: Literal["hybrid", "e4m3"] | None = None
    power_of_two: bool = False
    margin: int = 0
    history: int | None = None
    first_layers: int = 0
    last_layers: int = 0
    modules: Sequence[str] = ("*",)
    towers: Sequence[str] = ("language",)
    reduce_amax: bool = False
    primary_weights: bool | None = None
    experts_together: bool = False
    router_padding_for_quantization: bool = False
    fp8_attention: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        schemes = self.schemes()
        self._check_numbers()
        self._check_modules()
        if self.margin and not schemes.one_scale:
            raise ConfigurationError(f"margin={self.margin} does nothing for recipe {self.recipe!r}; leave it out.")
        if self.history is not None and not schemes.delayed:
            raise ConfigurationError(
                f"history={self.history} does nothing for recipe {self.recipe!r}; leave it out, or choose 'delayed'."
            )
        if self.reduce_amax and not schemes.agrees:
            raise ConfigurationError(f"reduce_amax does nothing for recipe {self.recipe!r}; leave it out.")
        if self.primary_weights and not schemes.one_scale:
            raise ConfigurationError(
                f"primary_weights=True keeps each weight quantized once, and recipe {self.recipe!r} needs two, as a "
                "weight and its transpose have different scales; choose 'tensorwise' or 'delayed', or leave it out."
            )
        if self.fp8_attention and self.reduce_amax:
            raise ConfigurationError(
                "fp8_attention=True: the scales of attention are of each rank's own heads, and reduce_amax=True asks "
                "for results that do not depend on tp; leave one of the two out."
            )
        if self.experts_together and not schemes.whole_rows:
            raise ConfigurationError(
                f"experts_together=True: recipe {self.recipe!r} has products of one expert only; leave it out, or "
                "choose 'tensorwise', 'delayed' or 'rowwise'."
            )

    def schemes(self) -> QuantizationRecipe:
        """Return the recipe."""
        return recipe(self.recipe, self.formats, self.power_of_two)

    def _check_numbers(self) -> None:
        for name, least in (("margin", 0), ("history", 1), ("first_layers", 0), ("last_layers", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ConfigurationError(f"{name}={value!r}; give a whole number, at least {least}.")
        if self.margin > MAX_MARGIN:
            raise ConfigurationError(
                f"margin={self.margin}; with more than {MAX_MARGIN} even the largest value is below e4m3's normal "
                "numbers. Lower it; 0 leaves no room."
            )

    def _check_modules(self) -> None:
        words = [self.towers] if isinstance(self.towers, str) else list(self.towers)
        unknown = [word for word in words if word not in TOWERS]
        if unknown or not words or isinstance(self.towers, str):
            wrong = f"; {unknown[0]!r} is no tower" if unknown else ""
            raise ConfigurationError(
                f"towers={self.towers!r}{wrong}. Give a list of {' and '.join(TOWERS)}, or one of them in a list."
                + (nearest(str(unknown[0]), TOWERS) if unknown else "")
            )
        if "language" not in self.towers and (self.first_layers or self.last_layers):
            raise ConfigurationError(
                f"first_layers={self.first_layers} and last_layers={self.last_layers} are of the language model, and "
                f"towers={list(self.towers)}; leave them out."
            )
        if isinstance(self.modules, str):
            raise ConfigurationError(f"modules={self.modules!r} is one string; give a list: [{self.modules!r}].")
        if not self.modules:
            raise ConfigurationError(
                f"modules={self.modules!r} names no layer, so that none would multiply in low precision; give patterns "
                "such as 'mlp.*', leave modules out for all layers, or choose another precision."
            )

"""Recipes: how the three matrices of a linear layer are quantized for its three products.

============== ============================= ============================= ==========================================
recipe         input and its gradient        weight                        scales
============== ============================= ============================= ==========================================
``tensorwise`` one scale                     one scale                     from the current values
``delayed``    one scale                     one scale                     from the largest values of past steps
``rowwise``    one per token or feature      one per output or input       from the current values
``blockwise``  one per 1 x 128               one per 128 x 128             fp32, or powers of two
``mxfp8``      one per 1 x 32                one per 1 x 32                e8m0
``nvfp4``      one per 1 x 16                one per 16 x 16               e4m3, and one fp32 per matrix
============== ============================= ============================= ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from megalight.errors import ConfigurationError, nearest
from megalight.ops.quantize.formats import Scheme


class QuantizationRecipe(NamedTuple):
    """Schemes of the input, the weight and the output gradient, and of their transposes.

    Attributes:
        name: the name that users type.
        x: input, contracted over input features (forward).
        x_t: input, contracted over tokens (weight gradient).
        weight: weight, contracted over input features (forward).
        weight_t: weight, contracted over output features (input gradient).
        gradient: output gradient, contracted over output features (input gradient).
        gradient_t: output gradient, contracted over tokens (weight gradient).
        delayed: whether scales come from past steps.
    """

    name: str
    x: Scheme
    x_t: Scheme
    weight: Scheme
    weight_t: Scheme
    gradient: Scheme
    gradient_t: Scheme
    delayed: bool = False

    @property
    def multiple(self) -> int:
        """What all sides of the three products must be multiples of."""
        return max(self.weight.multiple, self.weight_t.multiple, self.x_t.multiple)

    @property
    def alignment(self) -> int:
        """Number of tokens of which products of experts get multiples, if they are padded: 16, 32 or 128."""
        # 128 for 4 bits: whole blocks of scales and of rotated tokens (Megatron-core takes 128 for NVFP4, too).
        return 128 if self.x.format == "e2m1" else self.x_t.multiple

    def with_schemes(self, change: Callable[[Scheme], Scheme]) -> QuantizationRecipe:
        """Return the recipe with each scheme changed."""
        return self._replace(
            x=change(self.x),
            x_t=change(self.x_t),
            weight=change(self.weight),
            weight_t=change(self.weight_t),
            gradient=change(self.gradient),
            gradient_t=change(self.gradient_t),
        )

    @property
    def one_scale(self) -> bool:
        """Whether each matrix has a single scale."""
        return self.x.tile == (0, 0)

    @property
    def whole_rows(self) -> bool:
        """Whether a scale is of all features of a row, or of more, and not of a block of them."""
        return self.x.tile[1] == 0

    @property
    def agrees(self) -> bool:
        """Whether ranks that divide the features of a matrix may agree on scales by its current values."""
        return self.whole_rows and not self.delayed


HYBRID = ("tensorwise", "delayed")
"""Recipes whose gradients are e5m2 by default: one scale must cover all gradients, which needs more exponent bits."""
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def recipe(
    name: str, formats: Literal["hybrid", "e4m3"] | None = None, power_of_two: bool = False
) -> QuantizationRecipe:
    """Return a recipe by name.

    Args:
        name: one of :data:`RECIPES`.
        formats: ``hybrid``: gradients in e5m2, everything else in e4m3; ``e4m3``: everything; None: the recipe's
            default.
        power_of_two: whether to round scales to powers of two, which makes the scaling itself exact.

    Raises:
        ConfigurationError: there is no such recipe, or it does not have this option.
    """
    if name not in RECIPES:
        raise ConfigurationError(
            f"precision recipe {name!r} is not known; choose from {', '.join(RECIPES)}." + nearest(name, RECIPES)
        )
    if formats not in (None, "hybrid", "e4m3"):
        raise ConfigurationError(f"formats is {formats!r}; choose 'hybrid' or 'e4m3'.")
    if formats == "hybrid" and name not in HYBRID:
        raise ConfigurationError(f"recipe {name!r} keeps gradients in e4m3; remove formats='hybrid'.")
    if formats is not None and name == "nvfp4":
        raise ConfigurationError("recipe 'nvfp4' has its own format; remove formats.")
    if power_of_two and name in ("mxfp8", "nvfp4"):
        raise ConfigurationError(f"recipe {name!r} has its own kind of scales; remove power_of_two.")
    if name == "nvfp4":
        return _nvfp4()
    kind: Literal["fp32", "power"] = "power" if power_of_two else "fp32"
    if name == "mxfp8":
        one = Scheme("e4m3", (1, 32), "e8m0")
        return QuantizationRecipe(name, one, one, one, one, one, one)
    tile = {"tensorwise": (0, 0), "delayed": (0, 0), "rowwise": (1, 0), "blockwise": (1, 128)}[name]
    value = Scheme("e4m3", tile, kind)
    weight = value._replace(tile=(128, 128)) if name == "blockwise" else value
    gradient = value._replace(format="e5m2") if name in HYBRID and formats != "e4m3" else value
    return QuantizationRecipe(name, value, value, weight, weight, gradient, gradient, delayed=name == "delayed")


def _nvfp4() -> QuantizationRecipe:
    """NVFP4. Weights have square tiles, so both products use the same values. Gradients round stochastically."""
    value = Scheme("e2m1", (1, 16), "e4m3")
    weight = Scheme("e2m1", (16, 16), "e4m3")
    gradient = value._replace(stochastic=True)
    # The rotation cancels only if both factors are rotated along the contracted dim. For the weight gradient
    # (contracted over tokens) both are; weights are not, so the other two products do without.
    mixed = value._replace(hadamard=True)
    return QuantizationRecipe("nvfp4", value, mixed, weight, weight, gradient, mixed._replace(stochastic=True))

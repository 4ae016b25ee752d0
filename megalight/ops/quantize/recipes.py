"""Recipes: how the three matrices of a linear layer are cast for its three products.

============== ============================= ============================= ==========================================
recipe         input and its gradient        weight                        scales
============== ============================= ============================= ==========================================
``tensorwise`` one scale                     one scale                     of the values that are there
``delayed``    one scale                     one scale                     of the largest values of past steps
``rowwise``    one per token or feature      one per output or input       of the values that are there
``blockwise``  one per 1 x 128               one per 128 x 128             fp32, or powers of two
``mxfp8``      one per 1 x 32                one per 1 x 32                e8m0
``nvfp4``      one per 1 x 16                one per 16 x 16               e4m3, and one fp32 of the matrix
============== ============================= ============================= ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megalight.errors import ConfigurationError, nearest
from megalight.ops.quantize.types import Scheme


@dataclass(frozen=True)
class Recipe:
    """Schemes of input, weight and gradient of the output, and of their transposes.

    Attributes:
        name: what users type.
        x: contracted over input features (forward), ``x_t`` over tokens (weight gradient).
        weight: contracted over input features (forward), ``weight_t`` over output features (input gradient).
        gradient: contracted over output features (input gradient), ``gradient_t`` over tokens (weight gradient).
        delayed: scales come from past steps.
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
    def one_scale(self) -> bool:
        """Whether each matrix has a single scale, from a single amax."""
        return self.x.tile == (0, 0)


HYBRID = ("tensorwise", "delayed")
"""Recipes whose gradients are e5m2 unless asked otherwise: one scale must span them."""
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def recipe(name: str, formats: Literal["hybrid", "e4m3"] | None = None, power_of_two: bool = False) -> Recipe:
    """The recipe of that name.

    Args:
        formats: ``hybrid``: gradients in e5m2, all else in e4m3; ``e4m3``: everything; None: as is usual.
        power_of_two: scales are rounded to powers of two, which makes scaling itself exact.

    Raises:
        ConfigurationError: no such recipe, or not in that form.
    """
    if name not in RECIPES:
        raise ConfigurationError(
            f"precision recipe {name!r} is not known; choose from {', '.join(RECIPES)}." + nearest(name, RECIPES)
        )
    if formats not in (None, "hybrid", "e4m3"):
        raise ConfigurationError(f"formats={formats!r}; choose 'hybrid' or 'e4m3'.")
    if formats == "hybrid" and name not in HYBRID:
        raise ConfigurationError(f"recipe {name!r} keeps gradients in e4m3; leave formats='hybrid' out.")
    if formats is not None and name == "nvfp4":
        raise ConfigurationError("recipe 'nvfp4' has a format of its own; leave formats out.")
    if power_of_two and name in ("mxfp8", "nvfp4"):
        raise ConfigurationError(f"recipe {name!r} has scales of its own kind; leave power_of_two out.")
    if name == "nvfp4":
        return _nvfp4()
    kind: Literal["fp32", "power"] = "power" if power_of_two else "fp32"
    if name == "mxfp8":
        one = Scheme("e4m3", (1, 32), "e8m0")
        return Recipe(name, one, one, one, one, one, one)
    tile = {"tensorwise": (0, 0), "delayed": (0, 0), "rowwise": (1, 0), "blockwise": (1, 128)}[name]
    value = Scheme("e4m3", tile, kind)
    weight = replace(value, tile=(128, 128)) if name == "blockwise" else value
    gradient = replace(value, format="e5m2") if name in HYBRID and formats != "e4m3" else value
    return Recipe(name, value, value, weight, weight, gradient, gradient, delayed=name == "delayed")


def _nvfp4() -> Recipe:
    """Weights have square tiles, so that both products see the same weight; gradients are right in the mean."""
    value = Scheme("e2m1", (1, 16), "e4m3")
    weight = Scheme("e2m1", (16, 16), "e4m3")
    gradient = replace(value, stochastic=True)
    mixed = replace(value, hadamard=True)
    return Recipe("nvfp4", value, mixed, weight, weight, gradient, replace(mixed, stochastic=True))

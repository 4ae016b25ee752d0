"""Transforms of models. Checkpoints record them by registered name and plain values, never by an import path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalight.models.config import from_plain, to_plain
from megalight.models.fused import Fused as Fused
from megalight.models.transforms.comparison import HiddenStateComparison as HiddenStateComparison
from megalight.models.transforms.lora import DoRA as DoRA
from megalight.models.transforms.lora import LoRA as LoRA
from megalight.models.transforms.lora import activate as activate
from megalight.models.transforms.quantized_base import QuantizedBase as QuantizedBase
from megalight.parallel.transform import TRANSFORMS, ModelTransform


def describe(transforms: Iterable[ModelTransform]) -> list[dict[str, Any]]:
    """Convert transforms to plain values for JSON."""
    return [{"name": transform.name, "values": to_plain(transform)} for transform in transforms]


def rebuild(described: Iterable[Mapping[str, Any]]) -> list[ModelTransform]:
    """Make the transforms from the values of :func:`describe`.

    Raises:
        MegalightError: a name is unknown. The message lists the known ones.
        ConfigurationError: the transform does not have these settings.
    """
    # Through the same checks as settings of a recipe.
    return [from_plain(TRANSFORMS[entry["name"]], entry["values"]) for entry in described]

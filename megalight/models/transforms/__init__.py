"""Transforms of models, and how checkpoints record them: by registered name and plain values, never an import path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalight.models.config import from_plain, to_plain
from megalight.models.transforms.lora import LoRA as LoRA
from megalight.parallel.transform import TRANSFORMS, ModelTransform


def describe(transforms: Iterable[ModelTransform]) -> list[dict[str, Any]]:
    """Transforms as plain values, fit for JSON."""
    return [{"name": transform.name, "values": to_plain(transform)} for transform in transforms]


def rebuild(described: Iterable[Mapping[str, Any]]) -> list[ModelTransform]:
    """The transforms that :func:`describe` described.

    Raises:
        MegalightError: an unknown name; the message lists the known ones.
        ConfigurationError: values that the transform does not know.
    """
    return [from_plain(TRANSFORMS[entry["name"]], entry["values"]) for entry in described]

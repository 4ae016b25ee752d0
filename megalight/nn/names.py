"""Canonical names: a fused weight appears as its parts (``attention.qkv.weight`` as ``attention.q.weight``, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import nn


@dataclass(frozen=True)
class Section:
    """A part of a fused layer's output features.

    Attributes:
        name: takes the fused layer's place in canonical names.
        size: output features.
        units: indivisible parts they consist of (attention heads); ``size`` where every feature stands alone.
    """

    name: str
    size: int
    units: int


@dataclass(frozen=True)
class Part:
    """One canonical tensor inside a parameter of a one-device model.

    Attributes:
        parameter: the parameter's name in the model.
        name: canonical name.
        shape: shape of the canonical tensor.
        start: its first element in the flattened parameter.
    """

    parameter: str
    name: str
    shape: tuple[int, ...]
    start: int


def parts(model: nn.Module) -> Iterator[Part]:
    """The canonical tensors of a one-device model, in order; a tied parameter appears once, under its first name."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        sections: tuple[Section, ...] | None = getattr(module, "sections", None)
        for local, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{path}.{local}" if path else local
            if not sections:
                yield Part(full, full, tuple(parameter.shape), 0)
                continue
            parent = path.rpartition(".")[0]
            start = 0
            for section in sections:
                shape = (section.size, *parameter.shape[1:])
                name = ".".join(filter(None, (parent, section.name, local)))
                yield Part(full, name, shape, start)
                start += prod(shape)

"""Canonical tensors: what a one-device model's parameters consist of, under names that no layout changes.

Most parameters are one canonical tensor. A module whose parameters hold several says so by a method
:meth:`HasCanonicalParts.canonical_parts`: a fused layer's sections (``attention.qkv.weight`` holds
``attention.q.weight``, ``.k.``, ``.v.``), the experts of a stack (``experts.up`` holds ``experts.0.up.weight``, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megalight.errors import CheckpointError


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


@runtime_checkable
class HasCanonicalParts(Protocol):
    """A module whose own parameters consist of several canonical tensors."""

    def canonical_parts(self, path: str, local: str) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Full name and shape of each canonical tensor, in the order in which they lie end to end in a parameter.

        Args:
            path: the module's name in the model.
            local: the parameter's name in the module.
        """
        ...


def parts(model: nn.Module) -> Iterator[Part]:
    """The canonical tensors of a one-device model, in order; a tied parameter appears once, under its first name."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full, start = joined(path, local), 0
            stated: Iterable[tuple[str, tuple[int, ...]]] = [(full, tuple(parameter.shape))]
            if isinstance(module, HasCanonicalParts):
                stated = module.canonical_parts(path, local)
            for name, shape in stated:
                yield Part(full, name, shape, start)
                start += prod(shape)


def joined(*names: str) -> str:
    """Names of nested modules as one; empty ones (the model itself) are left out."""
    return ".".join(filter(None, names))


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every canonical tensor by name, as a view of its parameter: writing to it changes the model."""
    parameters = dict(model.named_parameters())
    views = {}
    for part in parts(model):
        flat = parameters[part.parameter].detach().view(-1)
        views[part.name] = flat[part.start : part.start + prod(part.shape)].view(part.shape)
    return views


@torch.no_grad()
def load_canonical(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill every parameter of ``model`` from canonical tensors, cast to the parameter's type.

    Raises:
        CheckpointError: a tensor is missing, unknown to the model, or of another shape.
    """
    views = canonical_tensors(model)
    missing, unknown = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the tensors are of another model: missing {missing[:5]} ({len(missing)} in all), "
            f"not in the model {unknown[:5]} ({len(unknown)} in all). Build the model with the configuration it had."
        )
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            raise CheckpointError(
                f"{name} is {list(tensors[name].shape)} and must be {list(view.shape)}. "
                "Build the model with the configuration it had."
            )
        view.copy_(tensors[name])

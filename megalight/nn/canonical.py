"""Canonical tensors: the parts of a single-device model's parameters, with names that are the same in every layout.

Most parameters are one canonical tensor. If a parameter holds several, its module lists them in the method
:meth:`HasCanonicalParts.canonical_parts`. Examples: the sections of a fused layer (``attention.qkv.weight`` holds
``attention.q.weight``, ``.k.``, ``.v.``), and the experts of a stack (``experts.up`` holds ``experts.0.up.weight``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Section:
    """A part of a fused layer's output features.

    Attributes:
        name: replaces the fused layer's name in canonical names.
        size: number of output features.
        units: number of indivisible parts (attention heads). Equal to ``size`` if single features can be separated.
    """

    name: str
    size: int
    units: int


@dataclass(frozen=True)
class CanonicalPart:
    """One canonical tensor inside a parameter of a single-device model.

    Attributes:
        parameter: the parameter's name in the model.
        name: the canonical name.
        shape: shape of the canonical tensor.
        start: index of its first element in the flattened parameter.
    """

    parameter: str
    name: str
    shape: tuple[int, ...]
    start: int


@runtime_checkable
class HasCanonicalParts(Protocol):
    """A module whose own parameters consist of several canonical tensors."""

    def canonical_parts(self, path: str, local: str) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Return full name and shape of each canonical tensor, in the order in which the parameter holds them.

        Args:
            path: the module's name in the model.
            local: the parameter's name in the module.
        """
        ...


def parts(model: nn.Module) -> Iterator[CanonicalPart]:
    """Yield the canonical tensors of a model in order. A tied parameter appears once, by its first name."""
    # By identity, as names differ.
    seen: set[int] = set()
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            # a tied parameter is the same object in two modules
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full, start = joined(path, local), 0
            stated: Iterable[tuple[str, tuple[int, ...]]] = [(full, tuple(parameter.shape))]
            if isinstance(module, HasCanonicalParts):
                stated = module.canonical_parts(path, local)
            for name, shape in stated:
                yield CanonicalPart(full, name, shape, start)
                start += prod(shape)


def joined(*names: str) -> str:
    """Join names of nested modules with dots, without empty names (the model itself has one)."""
    return ".".join(filter(None, names))


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every canonical tensor by name, as a view of its parameter: writing to it changes the model.

    Persistent buffers are among them, each as one tensor (the expert bias of a router).
    """
    parameters = dict(model.named_parameters())
    views = {}
    for part in parts(model):
        # `view` fails where a copy would be made, and writing to a copy would change nothing.
        flat = parameters[part.parameter].detach().view(-1)
        views[part.name] = flat[part.start : part.start + prod(part.shape)].view(part.shape)
    for path, module in model.named_modules():
        for local, buffer in module._buffers.items():
            if buffer is not None and local not in module._non_persistent_buffers_set:
                views[joined(path, local)] = buffer
    return views


def section_parts(
    sections: Sequence[Section] | None, path: str, local: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield full name and shape of each section of a fused parameter; None: it is not fused."""
    if sections is None:
        yield joined(path, local), shape
    for section in sections or ():
        # Weights keep the names of layers that are not fused (`q`, `k`, `v`), so fused and separate models share
        # checkpoints.
        yield joined(path.rpartition(".")[0], section.name, local), (section.size, *shape[1:])

"""Conversion of another library's tensors to canonical tensors and back, with one table for both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from megalight.errors import CheckpointError

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""An index inside a name, for example of a layer. Tables write ``N`` instead."""

T = TypeVar("T")


@dataclass(frozen=True)
class Theirs:
    """The place of a canonical tensor in the other library's tensors ("theirs").

    Attributes:
        name: in tables, the name of their module or tensor with ``N`` for indices. After a look-up, their tensor.
        rows: ``(first, end)``, its rows in their fused tensor. None means all rows.
        transposed: whether they store matrices as ``[in, out]``. ``rows`` always counts in ``[out, in]``.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def part(self, tensor: Tensor) -> Tensor:
        """Return the canonical tensor as a view of their tensor."""
        ours = tensor.T if self.transposed and tensor.ndim == 2 else tensor
        return ours if self.rows is None else ours[slice(*self.rows)]

    def shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the canonical shape, if their tensor has shape ``theirs``."""
        ours = theirs[::-1] if self.transposed and len(theirs) == 2 else theirs
        return ours if self.rows is None else (self.rows[1] - self.rows[0], *ours[1:])


@dataclass(frozen=True)
class Whole:
    """One of their tensors.

    Attributes:
        shape: its shape.
        parts: the canonical tensors in it, and the place of each.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, Theirs]

    @classmethod
    def of(cls, name: str, parts: list[tuple[str, Theirs]], shapes: Mapping[str, tuple[int, ...]]) -> Whole:
        """Put their tensor ``name`` together from canonical tensors with ``shapes``.

        Raises:
            CheckpointError: a part is missing.
        """
        # parts of a fused tensor can come in any order; their rows must follow each other without gaps
        parts = sorted(parts, key=lambda part: part[1].rows or (0, 0))
        stop = 0
        for ours, place in parts:
            if place.rows is not None and (place.rows[0] != stop or place.rows[1] - stop != shapes[ours][0]):
                raise CheckpointError(f"{name} is made of parts, and its rows {stop} to {place.rows[0]} are missing.")
            stop += shapes[ours][0] if place.rows is not None else 0
        first, place = parts[0]
        shape = shapes[first] if place.rows is None else (stop, *shapes[first][1:])
        return cls(shape[::-1] if place.transposed and len(shape) == 2 else shape, dict(parts))


@dataclass(frozen=True)
class WeightMap:
    """The table of a model's tensors in another library.

    Attributes:
        places: our module, or a single tensor -> theirs. The entry of a module covers its weight and its bias.
        root: prefix of all their names (``transformer.``). Files of the base model alone do not have it.
        copies: their tensor -> another one with equal values. The first is read only if the second is missing.
        left_out: pattern of their tensors that are not read (buffers).
        respelt: pattern -> replacement, for names from older releases.
        doubles: their tensor -> another one that is written with equal values.
    """

    places: Mapping[str, Theirs]
    root: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    left_out: str = r"(?!)"
    respelt: Mapping[str, str] = field(default_factory=dict)
    doubles: Mapping[str, str] = field(default_factory=dict)

    def theirs(self, name: str) -> Theirs:
        """Return the place of our canonical tensor.

        Raises:
            CheckpointError: they have no such tensor.
        """
        template, numbers = _template(name)
        module, _, leaf = template.rpartition(".")
        if template in self.places:
            found = self.places[template]
        elif module in self.places:
            found = self.places[module]
            found = replace(found, name=f"{found.name}.{leaf}")
        else:
            raise CheckpointError(f"{name} has no counterpart; known modules: {', '.join(self.places)}.")
        return replace(found, name=_numbered(found.name, numbers))

    def ours(self, names: Iterable[str]) -> dict[str, Theirs]:
        """Return the canonical tensors that their tensors contain, and the place of each.

        Raises:
            CheckpointError: a tensor has no counterpart.
        """
        reverse: dict[str, list[tuple[str, Theirs]]] = {}
        for ours, place in self.places.items():
            reverse.setdefault(place.name, []).append((ours, place))
        # look up names in the spelling of the tables, but remember the names in the file
        spelt = {self._spelt(name, reverse): name for name in names}
        spelt = {modern: name for modern, name in spelt.items() if not re.fullmatch(self.left_out, modern)}
        # a file may hold a tied tensor twice, or only the copy: keep one of them
        for copy, original in self.copies.items():
            if copy in spelt:
                spelt.setdefault(original, spelt[copy])
                del spelt[copy]
        found: dict[str, Theirs] = {}
        for modern, name in spelt.items():
            template, numbers = _template(modern)
            module, _, leaf = template.rpartition(".")
            whole = [(ours, place) for ours, place in reverse.get(template, ())]
            parts = [(f"{ours}.{leaf}", place) for ours, place in reverse.get(module, ())]
            if not whole and not parts:
                known = ", ".join(reverse)
                raise CheckpointError(f"{name} has no counterpart; known modules: {known}. Is it another model?")
            for ours, place in whole or parts:
                found[_numbered(ours, numbers)] = replace(place, name=name)
        return found

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert their tensors to canonical tensors.

        Raises:
            CheckpointError: a tensor has no counterpart.
        """
        return {name: place.part(tensors[place.name]).contiguous() for name, place in self.ours(tensors).items()}

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Whole]:
        """Return their tensors that hold the canonical tensors with these shapes, by name.

        Raises:
            CheckpointError: a tensor has no counterpart, or a part of a fused tensor is missing.
        """
        parts: dict[str, list[tuple[str, Theirs]]] = {}
        for name in shapes:
            place = self.theirs(name)
            for theirs in (place.name, self.doubles.get(place.name)):
                if theirs is not None:
                    parts.setdefault(theirs, []).append((name, place))
        return {name: Whole.of(name, found, shapes) for name, found in parts.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert canonical tensors to theirs.

        Raises:
            CheckpointError: a tensor has no counterpart, or a part of a fused tensor is missing.
        """
        written = {}
        for name, whole in self.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}).items():
            first = tensors[next(iter(whole.parts))]
            written[name] = first.new_empty(whole.shape)
            for ours, place in whole.parts.items():
                place.part(written[name]).copy_(tensors[ours])
        return written

    def _spelt(self, name: str, known: Mapping[str, object]) -> str:
        """Return their name in the spelling of the current release."""
        for pattern, replacement in self.respelt.items():
            name = re.sub(pattern, replacement, name)
        rooted = self.root + name
        template = _template(rooted)[0]
        return rooted if template in known or template.rpartition(".")[0] in known else name


def _template(name: str) -> tuple[str, list[str]]:
    return NUMBER.sub("N", name), NUMBER.findall(name)


def _numbered(template: str, numbers: list[str]) -> str:
    """Replace each ``N`` of ``template`` by a number, in order."""
    left = iter(numbers)
    return re.sub(r"(?<=\.)N(?=\.)|^N(?=\.)", lambda _: next(left), template)

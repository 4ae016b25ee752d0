"""Conversion of another library's tensors to canonical tensors and back, with one table for both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from megalight.errors import CheckpointError

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""An index inside a name, for example of a layer. Tables write ``N`` instead."""

T = TypeVar("T")


@dataclass(frozen=True)
class RowBlocks:
    """Rows in blocks of one size, at equal distances: the queries of one group of heads after another, for example.

    Attributes:
        start: the first row of the first block.
        size: rows of a block.
        stride: distance of the first rows of neighboring blocks.
        count: number of blocks.
    """

    start: int
    size: int
    stride: int
    count: int

    def __len__(self) -> int:
        return self.size * self.count

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.stride * (self.count - 1) + self.size

    def slices(self, first: int = 0, last: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Yield where the rows from ``first`` to ``last`` lie, block by block.

        Yields:
            places among these rows, counted from ``first``, and in the fused tensor.
        """
        last = len(self) if last is None else last
        for block in range(first // self.size, -(-last // self.size)):
            low, high = max(first, block * self.size), min(last, (block + 1) * self.size)
            shift = self.start + block * (self.stride - self.size)
            yield slice(low - first, high - first), slice(low + shift, high + shift)


@dataclass(frozen=True)
class TensorMapping:
    """The place of a canonical tensor in the other library's tensors ("theirs").

    Attributes:
        name: in tables, the name of their module or tensor with ``N`` for indices. After a look-up, their tensor.
        rows: its rows in their fused tensor: with a step where single rows of several tensors take turns, and in blocks
            where several rows of each do. None means all rows.
        transposed: whether they store matrices as ``[in, out]``. ``rows`` always counts in ``[out, in]``.
        depthwise: whether they store matrices ``[channels, k]`` as ``[channels, 1, k]`` (weights of a convolution).
        stack: how many canonical tensors they stack along the first dim. The last index of our name, which theirs
            lacks, counts them. 0: they do not stack.
        index: after a look-up, the place in the stack.
        leading: how many dims of size 1 theirs has before those of ours.
    """

    name: str
    rows: range | RowBlocks | None = None
    transposed: bool = False
    depthwise: bool = False
    stack: int = 0
    index: int = 0
    leading: int = 0

    def part(self, tensor: Tensor) -> Tensor:
        """Return the canonical tensor in their tensor: a view of it, unless it lies in several blocks."""
        views = self.views(tensor)
        return views[0] if len(views) == 1 else torch.cat(views)

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return views of their tensor that are the canonical tensor, one after another along the first dim."""
        tensor = tensor[(0,) * self.leading]
        ours = tensor[self.index] if self.stack else tensor
        # First the stack, then the transposition, then the rows: they count in `[out, in]`.
        ours = ours.T if self.transposed and ours.ndim == 2 else ours
        ours = ours[:, 0] if self.depthwise and ours.ndim == 3 else ours
        if isinstance(self.rows, RowBlocks):
            return [ours[rows] for _, rows in self.rows.slices()]
        return [ours if self.rows is None else ours[self.rows.start : self.rows.stop : self.rows.step]]

    def shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the canonical shape, if their tensor has shape ``theirs``."""
        ours = self.fused(theirs)
        return ours if self.rows is None else (len(self.rows), *ours[1:])

    def fused(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape with the rows of all tensors that they fuse, as ``[out, in]``."""
        theirs = theirs[self.leading :]
        one = theirs[1:] if self.stack else theirs
        if self.depthwise and len(one) == 3:
            return one[::2]
        return one[::-1] if self.transposed and len(one) == 2 else one

    def whole(self, fused: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of their tensor: the inverse of :meth:`fused`."""
        one = fused[::-1] if self.transposed and len(fused) == 2 else fused
        one = (one[0], 1, one[1]) if self.depthwise and len(one) == 2 else one
        return (1,) * self.leading + ((self.stack, *one) if self.stack else one)

    def read(self, fill: Callable[[Sequence[int], Tensor], None], offset: Sequence[int], data: Tensor) -> None:
        """Fill ``data`` with the box of the canonical tensor that begins at ``offset``.

        Args:
            fill: fills memory with a box of their tensor, given where the box begins.
            offset: where ours begins.
            data: the memory, with the box's shape.
        """
        if self.leading:
            first, dims = [0] * self.leading, (None,) * self.leading
            replace(self, leading=0).read(lambda place, box: fill([*first, *place], box[dims]), offset, data)
            return
        if isinstance(self.rows, RowBlocks):
            # Block by block, so that rows of other tensors between them are not read.
            for here, rows in self.rows.slices(offset[0], offset[0] + len(data)):
                one = replace(self, rows=range(rows.start, rows.stop))
                one.read(fill, (0, *offset[1:]), data[here])
            return
        turned = self.transposed and data.ndim == 2
        place, step, shift = list(offset), 1, 0
        if self.rows is not None:
            step = self.rows.step
            shift = self.rows[offset[0]] % step
            # The box begins at the first row that is read, which may belong to another tensor.
            place[0] = self.rows[offset[0]] - shift
        # `t` is a view: filling it fills `data`.
        place, theirs = (place[::-1], data.t()) if turned else (place, data)
        if self.depthwise and data.ndim == 2:
            place, theirs = [place[0], 0, place[1]], data[:, None]
        if step > 1:
            # rows of other tensors lie between ours: they are read too, as one box, and dropped
            shape = list(theirs.shape)
            shape[-1 if turned else 0] *= step
            # In the dtype of the target, so that nothing is rounded twice.
            theirs = torch.empty(shape, dtype=data.dtype)
        fill([self.index, *place] if self.stack else place, theirs[None] if self.stack else theirs)
        if step > 1:
            data.copy_((theirs.t() if turned else theirs)[shift::step])


@dataclass(frozen=True)
class WholeTensor:
    """One of their tensors.

    Attributes:
        shape: its shape.
        parts: the canonical tensors in it, and the place of each.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, TensorMapping]

    @classmethod
    def of(cls, name: str, parts: dict[str, TensorMapping], shapes: Mapping[str, tuple[int, ...]]) -> WholeTensor:
        """Put their tensor ``name`` together from all canonical tensors in it, which have ``shapes``.

        Raises:
            CheckpointError: a part has another number of rows than its place.
        """
        first, place = next(iter(parts.items()))
        fused = shapes[first]
        if place.rows is not None:
            for ours, each in parts.items():
                rows, count = each.rows, shapes[ours][0]
                if rows is not None and len(rows) != count:
                    raise CheckpointError(f"{ours} has {count} rows; its place in {name} has {len(rows)}.")
            fused = (max(each.rows.stop for each in parts.values() if each.rows is not None), *fused[1:])
        return cls(place.whole(fused), parts)


@dataclass(frozen=True)
class WeightMap:
    """The table of a model's tensors in another library.

    Attributes:
        places: our module, or a single tensor -> theirs. The entry of a module covers its weight and its bias.
        root: prefix of all their names (``transformer.``). Files of the base model alone do not have it.
        copies: their tensor -> another one with equal values. The first is read only if the second is missing.
        left_out: pattern of their tensors that are not read (buffers).
        renamed: pattern -> replacement, for names from older releases.
        doubles: their tensor -> other ones that are written with equal values.
        moved: prefix of their names in files -> its spelling in ``places``, where two modules would else have one name.
        kept: pattern of their tensors that are not read, and that a folder which is written after training has again.
        held: whether the model has a canonical tensor, where one name of theirs means several of ours: layers of
            different kinds have the same names there. None: each name of theirs has one meaning.
    """

    places: Mapping[str, TensorMapping]
    root: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    left_out: str = r"(?!)"
    renamed: Mapping[str, str] = field(default_factory=dict)
    doubles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    held: Callable[[str], bool] | None = None
    kept: str = ""

    def theirs(self, name: str) -> TensorMapping:
        """Return the place of our canonical tensor.

        Raises:
            CheckpointError: they have no such tensor.
        """
        template, numbers = _template(name)
        module, _, leaf = template.rpartition(".")
        # A single tensor is more specific than its module.
        if template in self.places:
            found = self.places[template]
        elif module in self.places:
            found = self.places[module]
            found = replace(found, name=f"{found.name}.{leaf}")
        else:
            raise CheckpointError(f"{name} has no counterpart; known modules: {', '.join(self.places)}.")
        index = int(numbers[-1]) if found.stack else 0
        if found.stack and index >= found.stack:
            raise CheckpointError(f"{name} has no counterpart: {found.name} stacks {found.stack}.")
        theirs = _numbered(found.name, numbers)
        for filed, spelled in self.moved.items():
            if theirs.startswith(spelled):
                theirs = filed + theirs.removeprefix(spelled)
        return replace(found, name=theirs, index=index)

    def ours(self, names: Iterable[str], unknown: list[str] | None = None) -> dict[str, TensorMapping]:
        """Return the canonical tensors that their tensors contain, and the place of each.

        Args:
            names: their tensors.
            unknown: gets the names without a counterpart. None: such a name is an error.

        Raises:
            CheckpointError: a tensor has no counterpart, and ``unknown`` is None.
        """
        reverse: dict[str, list[tuple[str, TensorMapping]]] = {}
        for ours, place in self.places.items():
            # a name of theirs may have fixed numbers beside those of our tensor
            reverse.setdefault(_template(place.name)[0], []).append((ours, place))
        spelled = self._spellings(names, reverse)
        # a file may hold a tied tensor twice, or only the copy: keep one of them
        for copy, original in self.copies.items():
            if copy in spelled:
                spelled.setdefault(original, spelled[copy])
                del spelled[copy]
        found: dict[str, TensorMapping] = {}
        for modern, name in spelled.items():
            template, numbers = _template(modern)
            module, _, leaf = template.rpartition(".")
            # An entry may name a tensor or a module. A tensor of that very name wins.
            whole = [(ours, place) for ours, place in reverse.get(template, ())]
            parts = [(f"{ours}.{leaf}", place) for ours, place in reverse.get(module, ())]
            if not whole and not parts:
                if unknown is not None:
                    unknown.append(name)
                    continue
                known = ", ".join(reverse)
                raise CheckpointError(f"{name} has no counterpart; known modules: {known}. Is it another model?")
            for ours, place in whole or parts:
                for index in range(max(1, place.stack)):
                    canonical = _numbered(ours, [*numbers, str(index)])
                    if self.held is None or self.held(canonical):
                        found[canonical] = replace(place, name=name, index=index)
        return found

    def twice(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield each tied weight outside the layers, and the tensor it is a copy of, if both are among ``names``."""
        spelled = self._spellings(names, {_template(place.name)[0] for place in self.places.values()})
        for copy, original in self.copies.items():
            # A bias that nothing reads may have values of its own, as BERT's does.
            if {copy, original} <= spelled.keys() and copy.endswith(".weight") and not NUMBER.search(copy):
                yield spelled[copy], spelled[original]

    def spelled(self, name: str) -> str:
        """Return the name of one of their tensors as the tables spell it."""
        return self._spelled(name, {_template(place.name)[0] for place in self.places.values()})

    def unread(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of their tensors that match ``kept`` and are not read: spelled as in tables -> as in files."""
        names = list(names)
        read = {place.name for place in self.ours(names, []).values()}
        spelled = {self.spelled(name): name for name in names if name not in read}
        return {modern: name for modern, name in spelled.items() if re.fullmatch(self.kept, modern)}

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert their tensors to canonical tensors.

        Raises:
            CheckpointError: a tensor has no counterpart.
        """
        return {name: place.part(tensors[place.name]).contiguous() for name, place in self.ours(tensors).items()}

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, WholeTensor]:
        """Return their tensors that hold the canonical tensors with these shapes, by name.

        Raises:
            CheckpointError: a tensor has no counterpart, or a part of a fused tensor is missing.
        """
        # Every part of a fused tensor must be there, or its other rows would be left without values.
        parts: dict[str, dict[str, TensorMapping]] = {}
        for name in shapes:
            place = self.theirs(name)
            for theirs in (place.name, *self.doubles.get(place.name, ())):
                parts.setdefault(theirs, {})[name] = place
        doubles = {double for each in self.doubles.values() for double in each}
        for name, place in self.ours(parts.keys() - doubles).items():
            if name not in shapes:
                raise CheckpointError(f"{place.name} is made of parts, and {name} is missing.")
        return {name: WholeTensor.of(name, found, shapes) for name, found in parts.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert canonical tensors to theirs.

        Raises:
            CheckpointError: a tensor has no counterpart, or a part of a fused tensor is missing.
        """
        written = {}
        for name, whole in self.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}).items():
            first = tensors[next(iter(whole.parts))]
            # In the dtype of the first part: parts of one tensor have one dtype.
            written[name] = first.new_empty(whole.shape)
            for ours, place in whole.parts.items():
                views = place.views(written[name])
                # A scalar has no rows, and is one view.
                rows = (tensors[ours],) if len(views) == 1 else torch.split(tensors[ours], [len(v) for v in views])
                for view, values in zip(views, rows, strict=True):
                    view.copy_(values)
        return written

    def _spellings(self, names: Iterable[str], known: Container[str]) -> dict[str, str]:
        """Return the names that are read, in the spelling of the tables -> as they are in the files."""
        # Old and new names of a tensor fall together.
        spelled = {self._spelled(name, known): name for name in names}
        return {modern: name for modern, name in spelled.items() if not re.fullmatch(self.left_out, modern)}

    def _spelled(self, name: str, known: Container[str]) -> str:
        """Return their name in the spelling of the current release."""
        for pattern, replacement in self.renamed.items():
            name = re.sub(pattern, replacement, name)
        for filed, spelled in self.moved.items():
            if name.startswith(filed):
                name = spelled + name.removeprefix(filed)
        rooted = self.root + name
        template = _template(rooted)[0]
        return rooted if template in known or template.rpartition(".")[0] in known else name


def _template(name: str) -> tuple[str, list[str]]:
    return NUMBER.sub("N", name), NUMBER.findall(name)


def _numbered(template: str, numbers: list[str]) -> str:
    """Replace each ``N`` of ``template`` by a number, in order."""
    left = iter(numbers)
    return re.sub(r"(?<=\.)N(?=\.)|^N(?=\.)", lambda _: next(left), template)

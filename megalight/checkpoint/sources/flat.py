"""Optimizer state that was saved as flat shards (``dp_reshardable``), as canonical tensors: what conversions read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from megalight.checkpoint.boxes import intersection
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.manifest import DP_RESHARDABLE
from megalight.checkpoint.loading import Checkpoint, SavedCheckpoint, compare
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.view import piece_name
from megalight.errors import CheckpointError
from megalight.parallel.source import FillReport, FillRequest, Source, Target, TensorMetadata, WrappedSource

_PIECE = re.compile(r"(?P<name>.+)@(?P<offset>[\d,]*)\+(?P<size>[\d,]*)")


def canonical(saved: SavedCheckpoint) -> Source:
    """Return a checkpoint as a source of canonical tensors, whatever scheme wrote it."""
    return FlatStates(saved) if isinstance(saved, Checkpoint) and saved.scheme == DP_RESHARDABLE else saved


@dataclass(frozen=True)
class FlattenedTensor:
    """A canonical tensor that is stored in flattened pieces.

    Attributes:
        shape: its shape.
        dtype: torch's name of its dtype.
        pieces: offset and size of each piece.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class FlatStates(WrappedSource):
    """A checkpoint of the scheme ``dp_reshardable`` as a source of canonical tensors.

    A fill reads the whole of each piece that a box touches: this is for one process that converts, not for training.
    """

    source: Checkpoint

    @cached_property
    def wholes(self) -> dict[str, FlattenedTensor]:
        """The tensors that are stored in pieces.

        Raises:
            CheckpointError: the pieces of a tensor do not cover it.
        """
        found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], TensorInfo]]] = {}
        for name, info in self.source.tensors.items():
            match = _PIECE.fullmatch(name)
            if match is not None:
                found.setdefault(match["name"], []).append((_numbers(match["offset"]), _numbers(match["size"]), info))
        wholes = {}
        for name, parts in found.items():
            ends = [[o + n for o, n in zip(offset, size, strict=True)] for offset, size, _ in parts]
            # Pieces have offsets. Their ends give the shape of the whole.
            shape = tuple(map(max, zip(*ends, strict=True)))
            if sum(prod(size) for _, size, _ in parts) != prod(shape) or any(
                info.shape != (prod(size),) for _, size, info in parts
            ):
                raise CheckpointError(f"checkpoint {self.source.path} is malformed: the pieces of {name!r} do not fit.")
            wholes[name] = FlattenedTensor(shape, parts[0][2].dtype, tuple((offset, size) for offset, size, _ in parts))
        return wholes

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors, by canonical name."""
        others = {name: info for name, info in self.source.tensors.items() if not _PIECE.fullmatch(name)}
        return {**others, **self.wholes}

    def read(self, passed: FillRequest) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.read`."""
        boxes, group = passed.targets, passed.process_group
        asked = {box.name: box.shape for box in boxes}
        where = f"checkpoint {self.source.path}"
        filled = compare(Ranks(group), where, self.tensors, asked, strict=passed.strict, prefix=passed.prefix)
        plain = [box for box in boxes if box.name not in self.wholes]
        touched: dict[str, Tensor] = {}
        overlaps = []
        for box in boxes:
            # Tensors that are not in pieces are filled as they are.
            for offset, size in self.wholes[box.name].pieces if box.name in self.wholes else ():
                found = intersection(box.offset, box.data.shape, offset, size)
                if found is not None:
                    mine, inside = found
                    name = piece_name(box.name, offset, size)
                    # Once for all boxes that touch the piece.
                    touched.setdefault(name, torch.empty(prod(size), dtype=box.data.dtype))
                    overlaps.append((name, size, box.data[mine], inside))
        flat = [Target(name, (len(data),), (0,), data) for name, data in touched.items()]
        # One fill for all, so that files are opened once.
        self.source.fill([*plain, *flat], strict=False, process_group=group)
        for name, size, part, inside in overlaps:
            part.copy_(touched[name].view(size)[inside])
        return filled


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)

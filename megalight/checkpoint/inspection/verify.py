"""Verify every byte of a checkpoint, and name every file and tensor that is damaged. No torch in here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from megalight.checkpoint.disk import index, publish
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.datafile import DataFile
from megalight.checkpoint.disk.files import CODES, TORCH_SUFFIX, FileRecord, PathLike, blocks, parse_json, read_file
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.errors import CheckpointError


@dataclass(frozen=True)
class Damage:
    """Something in a checkpoint that differs from what was saved.

    Attributes:
        file: the file, relative to the checkpoint.
        tensor: canonical name of the tensor, or None if the file as a whole is damaged.
        problem: what is wrong.
    """

    file: str
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        return f"{self.tensor} in {self.file}: {self.problem}" if self.tensor else f"{self.file}: {self.problem}"


def verify(path: str | os.PathLike[str]) -> list[Damage]:
    """Read a whole checkpoint and return what is damaged; empty if nothing is.

    A tensor is named once per file, however many of its blocks differ.
    """
    root = publish.resolve(path)
    try:
        # Without the manifest nothing is known of the rest.
        manifest = manifests.read(root)
    except (CheckpointError, OSError) as error:
        return [Damage(manifests.NAME, None, str(error))]
    records = dict(manifest.files)
    found = [damage for name in records if not name.startswith("data/") for damage in _small(root, name, records)]
    if any(damage.file == index.NAME for damage in found) or index.NAME not in records:
        return [*found, Damage(index.NAME, None, "tensors cannot be verified without it.")]
    try:
        data = read_file(root, index.NAME, records[index.NAME])
        tensors = index.from_json(parse_json(data, index.NAME), index.NAME)
    except CheckpointError as error:
        return [*found, Damage(index.NAME, None, str(error))]
    by_file: dict[str, list[tuple[TensorInfo, Chunk]]] = {name: [] for name in records if name.startswith("data/")}
    for info in tensors.values():
        for chunk in info.chunks:
            by_file.setdefault(chunk.file, []).append((info, chunk))
    return found + [damage for name, parts in sorted(by_file.items()) for damage in _data(root, name, records, parts)]


def _small(root: PathLike, name: str, records: Mapping[str, FileRecord]) -> Iterator[Damage]:
    try:
        read_file(root, name, records[name])
    except CheckpointError as error:
        yield Damage(name, None, str(error))


def _data(
    root: PathLike, name: str, records: Mapping[str, FileRecord], parts: list[tuple[TensorInfo, Chunk]]
) -> Iterator[Damage]:
    try:
        with DataFile(root, name, records) as file:
            try:
                # What lies around the blocks: headers and gaps.
                file.verify(())
                if file.path.suffix == TORCH_SUFFIX:
                    file.verify_around((c.start, c.start + prod(c.size) * CODES[i.dtype][1]) for i, c in parts)
            except CheckpointError as error:
                yield Damage(name, None, str(error))
            # In the order of the file: disks read forward faster.
            for info, chunk in sorted(parts, key=lambda part: part[1].start):
                nbytes = prod(chunk.size) * CODES[info.dtype][1]
                # Each tensor by itself, so that all damaged ones are named.
                try:
                    file.verify_blocks(
                        (chunk.start + start, chunk.start + stop, digest)
                        for (start, stop), digest in zip(blocks(nbytes), chunk.sums, strict=True)
                    )
                except CheckpointError as error:
                    yield Damage(name, info.name, str(error))
    except (CheckpointError, OSError) as error:
        yield Damage(name, None, str(error))

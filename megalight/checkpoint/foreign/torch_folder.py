"""Folders of torch's Distributed Checkpoint (DCP), which other libraries write: their tensors, read by boxes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megalight.checkpoint.boxes import in_threads, meeting
from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.files import (
    CODES,
    MAX_JSON,
    TORCH_METADATA,
    Place,
    checked_count,
    checked_shape,
    located,
)
from megalight.checkpoint.foreign import pickles
from megalight.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """A box of a tensor in a file, as ``torch.save`` wrote it.

    Attributes:
        offset: where it begins in the tensor, per dim.
        size: its extent, per dim.
        file: name of the file.
        start: first byte of the archive in the file.
        length: bytes of the archive.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of a folder. ``dtype`` is torch's name for it."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor, and the memory for it, of the box's shape and any dtype."""

    key: str
    offset: tuple[int, ...]
    data: Tensor


class TorchFolder:
    """A folder with ``.metadata`` and ``*.distcp`` files. The constructor reads the first, and runs nothing of it.

    Attributes:
        tensors: key -> tensor. Objects that are no tensors are left out.

    Raises:
        CheckpointError: the metadata is missing, damaged or hostile.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self.tensors: dict[str, TorchTensor] = {}
        file = path / TORCH_METADATA
        # A size limit before reading: the file comes from others.
        if not file.is_file() or file.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} has no {TORCH_METADATA} of a reasonable size; is it a finished checkpoint?")
        what = str(file)
        content = pickles.read(file.read_bytes(), what)
        try:
            places = {
                (index.get("fqn"), tuple(index.get("offset") or ())): place
                for index, place in content.get("storage_data").items()
            }
            for key, stored in content.get("state_dict_metadata").items():
                # Entries without chunks are objects, which nothing here needs.
                if stored.get("chunks") is not None and stored.get("size") is not None:
                    self.tensors[key] = _tensor(key, stored, places, what)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {error}.") from error

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read boxes. Each shard that a box touches is read once, as a whole.

        Raises:
            CheckpointError: a shard is missing or damaged; the message names key, shape and shard.
        """
        jobs: dict[str, dict[tuple[str, Shard], list[tuple[Tensor, tuple[slice, ...]]]]] = {}
        for box in wanted:
            found = 0
            for shard in self.tensors[box.key].shards:
                inside = meeting(box.offset, box.data.shape, shard.offset, shard.size)
                if inside is not None:
                    mine, theirs = inside
                    found += box.data[mine].numel()
                    jobs.setdefault(shard.file, {}).setdefault((box.key, shard), []).append((box.data[mine], theirs))
            # Before anything is read: an incomplete shard list would leave values of the memory.
            if found != box.data.numel():
                raise CheckpointError(
                    f"{box.key} of shape {list(self.tensors[box.key].shape)} in {self.path}: from {list(box.offset)} "
                    f"on, shards have {found} of {box.data.numel()} elements. The checkpoint is not complete."
                )

        def read(file: str, items: Sequence[tuple[tuple[str, Shard], list[tuple[Tensor, tuple[slice, ...]]]]]) -> None:
            for (key, shard), parts in items:
                tensor = self._read(key, shard)
                for target, place in parts:
                    target.copy_(tensor[place])

        in_threads(read, ((file, list(shards.items())) for file, shards in sorted(jobs.items())))

    def _read(self, key: str, shard: Shard) -> Tensor:
        where = f"{key} in {self.path}: the shard at {list(shard.offset)} of shape {list(shard.size)} ({shard.file})"
        path = located(self.path, shard.file)
        # before anything is allocated: the metadata may claim any length
        if shard.start + shard.length > path.stat().st_size:
            raise CheckpointError(f"{where} is damaged: the file ends before it does. Copy the checkpoint again.")
        data = bytearray(shard.length)
        with OpenFile(path, where) as file:
            file.read(shard.start, memoryview(data))
        try:
            pickles.check_archive(io.BytesIO(data))
            # Tensors only: a pickle that names anything else is refused.
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch, zipfile and the unpickler each raise their own kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{where} is damaged: {reason}") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shard.size:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"{where} holds {shape}. The checkpoint is damaged; copy it again.")
        return tensor


def _tensor(key: str, stored: pickles.Record, places: dict[Any, pickles.Record], what: str) -> TorchTensor:
    properties = stored.get("properties").state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = checked_shape(stored.get("size"), what)
    if dtype not in CODES:
        raise CheckpointError(f"{what}: {key} has the unknown dtype {str(dtype)[:40]!r}.")
    shards = []
    for chunk in stored.get("chunks"):
        offset, size = checked_shape(chunk.get("offsets"), what), checked_shape(chunk.get("sizes"), what)
        # Unsplit tensors may have an index without an offset.
        place = places.get((key, offset)) or places.get((key, ()))
        if place is None:
            raise CheckpointError(f"{what}: {key} of shape {list(shape)}: the shard at {list(offset)} is in no file.")
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{what}: {key} was written through an extension (compressed); save it without.")
        if len(offset) != len(shape) or any(o + n > m for o, n, m in zip(offset, size, shape, strict=True)):
            raise CheckpointError(f"{what}: {key} of shape {list(shape)} has a shard at {list(offset)}, outside of it.")
        start, length = (checked_count(place.get(name), what) for name in ("offset", "length"))
        shards.append(Shard(offset, size, str(place.get("relative_path")), start, length))
    # Shards may overlap (copies of replicas), but must not leave elements out.
    if sum(prod(shard.size) for shard in shards) < prod(shape):
        raise CheckpointError(f"{what}: {key} of shape {list(shape)} is not complete: shards are missing.")
    return TorchTensor(shape, dtype, tuple(shards))

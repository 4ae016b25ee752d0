"""Folders of torch's Distributed Checkpoint (DCP): those of others, read by boxes, and our own, written for torch.

:class:`TorchFolder` reads. The format ``fsdp_dtensor`` (:func:`write_data`, :func:`write_metadata`) writes files that
torch reads, with our index beside theirs: each chunk is stored as ``torch.save`` stores a tensor, its elements inside a
small zip archive. The index says where the elements are, so that Megalight reads them alone, and unpickles nothing.
``.metadata`` is DCP's own index, a pickle: it is written for torch, and never read here.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megalight.checkpoint.boxes import in_threads, intersection
from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.files import (
    CODES,
    MAX_JSON,
    TORCH_METADATA,
    FileRecord,
    PathLike,
    TorchArchive,
    Write,
    WrittenBox,
    checked_count,
    checked_shape,
    checksum,
    created,
    located,
    write_file,
)
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.checkpoint.foreign import pickles
from megalight.errors import CheckpointError


@dataclass(frozen=True)
class Archive:
    """A tensor in a file, as ``torch.save`` wrote it.

    Attributes:
        file: name of the file.
        start: first byte of the archive in the file.
        length: bytes of the archive.
        offset: where the tensor starts in the whole one, per dim, as the metadata says.
        shape: its shape.
    """

    file: str
    start: int
    length: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, and the archive that has it.

    Attributes:
        offset: where it starts in the tensor, per dim.
        size: its extent, per dim.
        first: the element of the archive's tensor, flattened, from which on the box lies row-major.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    archive: Archive
    first: int = 0


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of a folder. ``dtype`` is torch's name for it."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class WantedBox:
    """A box of a tensor, and the memory for it, of the box's shape and any dtype."""

    key: str
    offset: tuple[int, ...]
    data: Tensor


class TorchFolder:
    """A folder with ``.metadata`` and ``*.distcp`` files. The constructor reads the first, and runs nothing of it.

    Attributes:
        tensors: key -> tensor.
        objects: keys of objects that are no tensors.
        notes: what a library has added to the metadata: the name of its attribute -> value.

    Raises:
        CheckpointError: the metadata is missing, damaged or hostile.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self.tensors: dict[str, TorchTensor] = {}
        self.objects: set[str] = set()
        self.notes: dict[str, Any] = {}
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
                # Entries without chunks are objects, which are not read.
                if stored.get("chunks") is not None and stored.get("size") is not None:
                    self.tensors[key] = _tensor(key, stored, places, what)
                else:
                    self.objects.add(str(key))
            own = ("storage_data", "state_dict_metadata")
            self.notes = {name: value for name, value in content.state.items() if name not in own}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {error}.") from error

    def fill(self, wanted: Iterable[WantedBox]) -> None:
        """Read boxes. Each shard that a box touches is read once, as a whole.

        Raises:
            CheckpointError: a shard is missing or damaged; the message names key, shape and shard.
        """
        jobs: dict[str, dict[tuple[str, Archive], list[_BoxTarget]]] = {}
        for box in wanted:
            found = 0
            for shard in self.tensors[box.key].shards:
                inside = intersection(box.offset, box.data.shape, shard.offset, shard.size)
                if inside is not None:
                    mine, theirs = inside
                    found += box.data[mine].numel()
                    part = _BoxTarget(box.data[mine], theirs, shard)
                    jobs.setdefault(shard.archive.file, {}).setdefault((box.key, shard.archive), []).append(part)
            # Before anything is read: an incomplete shard list would leave values of the memory.
            if found != box.data.numel():
                raise CheckpointError(
                    f"{box.key} of shape {list(self.tensors[box.key].shape)} in {self.path}: from {list(box.offset)} "
                    f"on, shards have {found} of {box.data.numel()} elements. The checkpoint is not complete."
                )

        def read(file: str, items: Sequence[tuple[tuple[str, Archive], list[_BoxTarget]]]) -> None:
            for (key, archive), parts in items:
                flat = self._read(key, archive).flatten()
                for part in parts:
                    size, first = part.shard.size, part.shard.first
                    part.target.copy_(flat[first : first + prod(size)].view(size)[part.place])

        in_threads(read, ((file, list(shards.items())) for file, shards in sorted(jobs.items())))

    def _read(self, key: str, archive: Archive) -> Tensor:
        where = f"the shard at {list(archive.offset)} of shape {list(archive.shape)} ({archive.file})"
        where = f"{key} in {self.path}: {where}"
        path = located(self.path, archive.file)
        # before anything is allocated: the metadata may claim any length
        if archive.start + archive.length > path.stat().st_size:
            raise CheckpointError(f"{where} is damaged: the file ends before it does. Copy the checkpoint again.")
        data = bytearray(archive.length)
        with OpenFile(path, where) as file:
            file.read(archive.start, memoryview(data))
        try:
            pickles.check_archive(io.BytesIO(data))
            # Tensors only: a pickle that names anything else is refused.
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch, zipfile and the unpickler each raise their own kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{where} is damaged: {reason}") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != archive.shape:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"{where} holds {shape}. The checkpoint is damaged; copy it again.")
        return tensor


@dataclass(frozen=True)
class _BoxTarget:
    """Where a box of a shard goes."""

    target: Tensor
    place: tuple[slice, ...]
    shard: Shard


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
        shards.append(Shard(offset, size, Archive(str(place.get("relative_path")), start, length, offset, size)))
    # Shards may overlap (copies of replicas), but must not leave elements out.
    if sum(prod(shard.size) for shard in shards) < prod(shape):
        raise CheckpointError(f"{what}: {key} of shape {list(shape)} is not complete: shards are missing.")
    return TorchTensor(shape, dtype, tuple(shards))


def write_data(
    folder: PathLike, name: str, pieces: Sequence[WrittenBox], blocks: Iterable[Iterable[memoryview]]
) -> tuple[FileRecord, list[TensorInfo], list[TorchArchive]]:
    """Write a data file of archives, and say where the tensors and the archives lie."""
    position, frames = 0, bytearray()
    tensors: list[TensorInfo] = []
    archives: list[TorchArchive] = []
    with created(folder / name) as write:
        for piece, parts in zip(pieces, blocks, strict=True):
            # The whole piece in memory, as `torch.save` takes a tensor and not a stream.
            memory, sums, filled = memoryview(bytearray(piece.entry.nbytes)), [], 0
            for part in parts:  # each is good until the next but one only
                memory[filled : filled + len(part)] = part
                sums.append(checksum(part))
                filled += len(part)
            archive = Archived(write, torch.frombuffer(memory, dtype=getattr(torch, piece.dtype)).view(piece.size))
            frames += archive.frame
            chunk = Chunk(piece.offset, piece.size, name, piece.name, position + archive.first, tuple(sums))
            tensors.append(TensorInfo(piece.name, piece.shape, piece.dtype, (chunk,)))
            archives.append((piece.name, piece.offset, name, position, archive.size))
            position += archive.size
    return FileRecord(position, checksum(bytes(frames))), tensors, archives


def write_metadata(
    folder: PathLike, tensors: Mapping[str, TensorInfo], archives: Iterable[TorchArchive]
) -> dict[str, FileRecord]:
    """Write DCP's own index."""
    paths = {name: torch_path(name) for name in tensors}
    keys = {name: ".".join(path) for name, path in paths.items()}
    theirs = Metadata(
        {keys[name]: _stored(info) for name, info in tensors.items()},
        planner_data={keys[name]: path for name, path in paths.items()},
        storage_data={
            MetadataIndex(keys[name], torch.Size(offset)): _StorageInfo(file, start, length)
            for name, offset, file, start, length in archives
        },
        storage_meta=StorageMeta(),
    )
    return {TORCH_METADATA: write_file(folder / TORCH_METADATA, pickles.dumps(theirs))}


def _stored(info: TensorInfo) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)) for chunk in info.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, info.dtype)), torch.Size(info.shape), chunks)


def torch_path(name: str) -> tuple[str, ...]:
    """Return the keys that lead to a canonical tensor in torch's nested ``state_dict``.

    They are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``, which go by the parameter's name:
    ``model.X`` is ``["model"]["X"]``, and ``optimizer.exp_avg.model.X`` is ``["optimizer"]["state"]["X"]["exp_avg"]``.
    """
    kind, found, parameter = name.partition("model.")
    if not found:
        # Entries that are no state of a parameter keep their name as a single key.
        return (name,)
    first, _, state = kind.removesuffix(".").partition(".")
    return (
        ("optimizer", "state", parameter, state)
        if first == "optimizer"
        else (kind.removesuffix(".") or "model", parameter)
    )


class Archived:
    """The archive that ``torch.save`` makes of one tensor, passed on to a file. The elements are not copied.

    Args:
        write: puts bytes into the file.
        tensor: contiguous, on the CPU.

    Attributes:
        frame: the bytes around the elements.
        first: place of the first element in the archive.
        size: bytes of the archive.
    """

    def __init__(self, write: Write, tensor: Tensor) -> None:
        self.frame = bytearray()
        self.first = -1
        self.size = 0
        self._write = write
        self._elements = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        torch.save(tensor, self)  # type: ignore[arg-type]

    def write(self, data: memoryview) -> int:
        """Take the next bytes of the archive."""
        # torch writes a record from where it lies: the address shows which are elements
        if np.frombuffer(data, np.uint8).ctypes.data not in self._elements:
            self.frame += data
        elif self.first < 0:
            self.first = self.size
        self._write(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

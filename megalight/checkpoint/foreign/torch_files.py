"""The format ``fsdp_dtensor`` on disk: files that torch's own Distributed Checkpoint (DCP) reads, beside our index.

Each chunk is stored as ``torch.save`` stores a tensor: its elements inside a small zip archive. The index says where
the elements lie, so that Megalight reads them alone, and unpickles nothing. ``.metadata`` is DCP's own index, a pickle:
it is written for torch, and never read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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

from megalight.checkpoint.disk.checksum import checksum
from megalight.checkpoint.disk.files import TORCH_METADATA, FileRecord, Place, Write, created, write_file
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.checkpoint.disk.part import Archive, Piece
from megalight.checkpoint.foreign import pickles


def write_data(
    folder: Place, name: str, pieces: Sequence[Piece], blocks: Iterable[Iterable[memoryview]]
) -> tuple[FileRecord, list[TensorInfo], list[Archive]]:
    """Write a data file of archives, and say where the tensors and the archives lie."""
    position, frames = 0, bytearray()
    tensors: list[TensorInfo] = []
    archives: list[Archive] = []
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
    folder: Place, tensors: Mapping[str, TensorInfo], archives: Iterable[Archive]
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

"""The format ``fsdp_dtensor`` on disk: files that torch's own Distributed Checkpoint (DCP) reads, beside our index.

Each chunk is stored as ``torch.save`` stores a tensor: its elements inside a small zip archive. The index says where
the elements lie, so that Megalight reads them alone, and unpickles nothing. ``.metadata`` is DCP's own index, a pickle:
it is written for torch, and never read here.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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

from megalight.checkpoint.disk.checksum import blocks as checksummed
from megalight.checkpoint.disk.checksum import checksum
from megalight.checkpoint.disk.files import TORCH_METADATA, FileRecord, write_all, write_file
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.checkpoint.disk.part import Archive, Piece
from megalight.checkpoint.foreign import pickles


def write_data(
    folder: Path, name: str, pieces: Sequence[Piece], blocks: Iterable[Iterable[memoryview]]
) -> tuple[FileRecord, list[TensorInfo], list[Archive]]:
    """Write a data file of archives, and say where the tensors and the archives lie."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    position, frames = 0, bytearray()
    tensors: list[TensorInfo] = []
    archives: list[Archive] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece, parts in zip(pieces, blocks, strict=True):
            memory = bytearray()
            for part in parts:  # not join(), which asks for all first: a block is good until the next but one
                memory += part
            archive = archived(torch.frombuffer(memory, dtype=getattr(torch, piece.dtype)).view(piece.size))
            first, last = elements_of(io.BytesIO(archive))
            data = memoryview(archive)[first:last]
            sums = tuple(checksum(data[start:stop]) for start, stop in checksummed(len(data)))
            write_all(descriptor, archive)
            frames += archive[:first] + archive[last:]
            chunk = Chunk(piece.offset, piece.size, name, piece.name, position + first, sums)
            tensors.append(TensorInfo(piece.name, piece.shape, piece.dtype, (chunk,)))
            archives.append((piece.name, piece.offset, name, position, len(archive)))
            position += len(archive)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(position, checksum(bytes(frames))), tensors, archives


def write_metadata(
    folder: Path, tensors: Mapping[str, TensorInfo], archives: Iterable[Archive]
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
        return (name,)
    first, _, state = kind.removesuffix(".").partition(".")
    return (
        ("optimizer", "state", parameter, state)
        if first == "optimizer"
        else (kind.removesuffix(".") or "model", parameter)
    )


def archived(tensor: Tensor) -> bytes:
    """Return what ``torch.save`` writes for the tensor, without the rest of the memory that it is a view of."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), buffer)
    return buffer.getvalue()


def elements_of(archive: io.BufferedIOBase) -> tuple[int, int]:
    """Return the first byte of a tensor's elements in an archive of ``torch.save``, and the byte behind the last."""
    with zipfile.ZipFile(archive) as opened:
        (info,) = (info for info in opened.infolist() if info.filename.endswith("/data/0"))
    # a local header has 30 bytes, and then a name and padding, whose lengths stand at its end
    archive.seek(info.header_offset + 26)
    name, padding = (int.from_bytes(archive.read(2), "little") for _ in range(2))
    first = info.header_offset + 30 + name + padding
    return first, first + info.file_size

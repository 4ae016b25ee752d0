"""What one rank writes of a checkpoint, and how it is written and sealed. No torch in here.

A synchronous save writes parts in the trainer's own process. An asynchronous save
(:mod:`megalight.checkpoint.async_save`) writes them in a worker process, by the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from megalight.checkpoint.disk import index, publish
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.files import (
    TORCH_SUFFIX,
    FileRecord,
    PathLike,
    TensorEntry,
    TorchArchive,
    WrittenBox,
    checksum,
    created,
    dump_json,
    pack_header,
    sync_directory,
    write_file,
)
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.errors import CheckpointError

MAX_FILE = 4 << 30
"""A rank starts another data file rather than let one grow beyond this many bytes."""


@dataclass(frozen=True)
class RankFiles:
    """One rank's part of a checkpoint.

    Attributes:
        scheme: by which the tensors were made; ``fsdp_dtensor`` has data files of its own kind.
        pieces: the tensors, in the order in which they are written.
        small: whole files by name: contents, or where to copy from.
    """

    rank: int
    scheme: str
    pieces: tuple[WrittenBox, ...]
    small: Mapping[str, bytes | Path]


@dataclass(frozen=True)
class WrittenFiles:
    """What a rank has written: its files, its chunks of tensors, and torch's archives around them, if any."""

    records: dict[str, FileRecord]
    tensors: tuple[TensorInfo, ...]
    archives: tuple[TorchArchive, ...] = ()


@dataclass(frozen=True)
class Seal:
    """What rank 0 needs to seal a checkpoint when all parts are written.

    Attributes:
        path: where the checkpoint is published.
        scheme, world_size, versions: see :class:`~megalight.checkpoint.disk.manifest.Manifest`.
    """

    path: PathLike
    scheme: str
    world_size: int
    versions: Mapping[str, str]

    def close(self, folder: PathLike, parts: Sequence[WrittenFiles]) -> None:
        """Write the index and the manifest, after a look whether all files are there.

        Raises:
            CheckpointError: parts do not fit together, or files of another rank are not there.
        """
        # Names contain the rank, so parts of ranks do not meet.
        records = {name: record for part in parts for name, record in part.records.items()}
        tensors = _joined(tensor for part in parts for tensor in part.tensors)
        with naming(index.NAME):
            records[index.NAME] = write_file(folder / index.NAME, dump_json(index.to_json(tensors)))
        if self.scheme == manifests.FSDP_DTENSOR:
            records |= _torch_files().write_metadata(
                folder, tensors, [each for part in parts for each in part.archives]
            )
        # Later than any checkpoint in the same folder, even if the clock went back: the latest one must sort last.
        latest = publish.latest(self.path.parent)
        floor = manifests.read(publish.resolve(latest)).saved_at + 1 if latest else 0
        saved_at = max(time.time_ns(), floor)
        manifest = manifests.Manifest(records, saved_at, self.world_size, self.versions, self.scheme)
        try:
            # Files of other ranks may be on another machine's disk.
            manifests.check_files(folder, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{error} Is {self.path.parent} on storage that all ranks share?") from error
        with naming(manifests.NAME):
            manifest.write(folder)


def write_part(folder: PathLike, part: RankFiles, blocks: Iterable[Iterable[memoryview]]) -> WrittenFiles:
    """Write a rank's part into the folder of a checkpoint that is being made, and bring it to the disk.

    Args:
        folder: the checkpoint while it is written.
        blocks: for each piece, its bytes as blocks of :data:`~megalight.checkpoint.disk.files.BLOCK`. They are
            asked for one after another, so a source may read each tensor only then.
    """
    records: dict[str, FileRecord] = {}
    tensors: list[TensorInfo] = []
    archives: list[TorchArchive] = []
    # One iterator for all files: blocks are made in the order in which they are written.
    remaining = iter(blocks)
    for number, pieces in enumerate(_batches(part.pieces)):
        name = f"data/{part.rank}-{number}{_suffix(part.scheme)}"
        with naming(name):
            data = islice(remaining, len(pieces))
            if part.scheme == manifests.FSDP_DTENSOR:
                records[name], found, around = _torch_files().write_data(folder, name, pieces, data)
                archives += around
            else:
                records[name], found = _write_data(folder, name, pieces, data)
        tensors += found
    for name, source in part.small.items():
        with naming(name):
            records[name] = write_file(folder / name, source.read_bytes() if isinstance(source, Path) else source)
    # The entries of the files, which are not on disk with their contents.
    for inside in {name.rpartition("/")[0] for name in records}:
        sync_directory(folder / inside if inside else folder)
    return WrittenFiles(records, tuple(tensors), tuple(archives))


def _torch_files() -> Any:
    """What writes torch's own files. It needs torch, which a worker loads for this scheme alone."""
    # By name, as importing torch would slow the start of every worker.
    return import_module("megalight.checkpoint.foreign.torch_dcp")


def _suffix(scheme: str) -> str:
    return TORCH_SUFFIX if scheme == manifests.FSDP_DTENSOR else ".safetensors"


def _write_data(
    folder: PathLike, name: str, pieces: Sequence[WrittenBox], blocks: Iterable[Iterable[memoryview]]
) -> tuple[FileRecord, list[TensorInfo]]:
    """Write a data file, and say where its tensors lie."""
    record, placed, sums = write_tensors(folder / name, [piece.entry for piece in pieces], blocks, name)
    tensors = []
    for piece, entry, digests in zip(pieces, placed, sums, strict=True):
        chunk = Chunk(piece.offset, piece.size, name, entry.key, entry.start, digests)
        tensors.append(TensorInfo(piece.name, piece.shape, piece.dtype, (chunk,)))
    return record, tensors


def write_tensors(
    path: PathLike, entries: Sequence[TensorEntry], blocks: Iterable[Iterable[memoryview]], name: str
) -> tuple[FileRecord, list[TensorEntry], list[tuple[str, ...]]]:
    """Write one safetensors file and bring it to the disk.

    While a block is being written, the next is fetched and summed.

    Args:
        entries: its tensors, in order.
        blocks: the bytes of each tensor.
        name: the file's name in messages.

    Returns:
        size and header checksum of the file; the entries with their places; for each tensor its blocks' checksums.

    Raises:
        CheckpointError: the system cannot write the file; it names the tensor.
    """
    header, placed = pack_header(entries, {"format": "pt"})
    sums: list[tuple[str, ...]] = []
    with naming(name), created(path) as write, ThreadPoolExecutor(1) as thread:

        def put(block: memoryview, tensor: str) -> None:
            with naming(name, f" (tensor {tensor})"):
                write(block)

        pending: Future[None] = thread.submit(write, header)
        for entry, tensor in zip(placed, blocks, strict=True):
            digests = []
            for block in tensor:
                digests.append(checksum(block))
                # The block before must be on its way before its memory is used again.
                pending.result()
                pending = thread.submit(put, block, entry.key)
            sums.append(tuple(digests))
        pending.result()
    size = placed[-1].start + placed[-1].nbytes if placed else len(header)
    # The header's sum alone: tensors have sums of their own, by block.
    return FileRecord(size, checksum(header)), placed, sums


@contextmanager
def naming(file: str, part: str = "") -> Iterator[None]:
    """Errors of the system say which file they are about, and which ``part`` of it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}{part}.") from error


def _batches(pieces: Sequence[WrittenBox]) -> Iterator[list[WrittenBox]]:
    batch: list[WrittenBox] = []
    size = 0
    for piece in pieces:
        nbytes = piece.entry.nbytes
        # A piece larger than the limit gets a file of its own.
        if batch and size + nbytes > MAX_FILE:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += nbytes
    if batch:
        yield batch


def _joined(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """The chunks of all ranks by tensor, checked to tile each.

    Raises:
        CheckpointError: they do not, or ranks disagree about a tensor.
    """
    parts: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.name, []).append(tensor)
    joined = {}
    for name, infos in parts.items():
        if len({(info.shape, info.dtype) for info in infos}) > 1:
            raise CheckpointError(f"{name!r} has different shapes or dtypes on different ranks.")
        chunks = sorted((chunk for info in infos for chunk in info.chunks), key=lambda chunk: chunk.offset)
        joined[name] = replace(infos[0], chunks=tuple(chunks))
    index.validate(joined.values(), "the tensors to save")
    return joined

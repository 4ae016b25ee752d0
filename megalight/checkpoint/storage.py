"""DCP's storage layer, ours: safetensors data files, checksummed block by block, read back straight into the views."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalight.checkpoint.checksum import BLOCK, blocks, checksum
from megalight.checkpoint.datafile import DataFile
from megalight.checkpoint.files import (
    CODES,
    Entry,
    FileRecord,
    dump_json,
    pack_header,
    sync_directory,
    write_all,
    write_file,
)
from megalight.checkpoint.index import Chunk, TensorInfo, to_json, validate
from megalight.errors import CheckpointError

MAX_FILE = 4 << 30
"""A rank starts another data file rather than let one grow beyond this many bytes."""

INDEX = "index.json"


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a dtype.

    Raises:
        CheckpointError: safetensors has no code for it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in CODES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved; safetensors knows {', '.join(CODES)}. Convert it.")
    return name


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat ``uint8``."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class Writer(StorageWriter):
    """Writes one rank's part of the tensors under ``directory/data``; the coordinator writes the index.

    Attributes:
        records: the files this rank wrote, for the manifest.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are: views already say who writes what."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes, in files of at most about ``MAX_FILE`` bytes."""
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            results += self._write(f"data/{self.rank}-{number}.safetensors", items, planner)
        if results:
            sync_directory(self.directory / "data")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        tensors = []
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors.append(tensor)
        entries = [
            Entry(_key(item), dtype_name(tensor.dtype), tuple(tensor.shape))
            for item, tensor in zip(items, tensors, strict=True)
        ]
        record, entries, sums = write_tensors(self.directory / name, entries, tensors)
        self.records[name] = record
        results = []
        for item, entry, digests in zip(items, entries, sums, strict=True):
            assert item.tensor_data is not None
            offset = tuple(item.tensor_data.chunk.offsets)
            chunk = Chunk(offset, entry.shape, name, entry.key, entry.start, digests)
            info = TensorInfo(item.index.fqn, tuple(item.tensor_data.size), entry.dtype, (chunk,))
            results.append(WriteResult(item.index, entry.nbytes, info))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join all ranks' chunks to the index, check that they tile every tensor, and write it."""
        parts: dict[str, list[TensorInfo]] = {}
        for result in (result for rank in results for result in rank):
            parts.setdefault(result.storage_data.name, []).append(result.storage_data)
        tensors = {}
        for name, infos in parts.items():
            if len({(info.shape, info.dtype) for info in infos}) > 1:
                raise CheckpointError(f"{name!r} has different shapes or dtypes on different ranks.")
            chunks = (chunk for info in infos for chunk in info.chunks)
            tensors[name] = replace(infos[0], chunks=tuple(sorted(chunks, key=lambda chunk: chunk.offset)))
        validate(tensors.values(), "the tensors to save")
        self.records[INDEX] = write_file(self.directory / INDEX, dump_json(to_json(tensors)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by path: folders are published by :func:`megalight.checkpoint.save`."""
        return False


def _key(item: WriteItem) -> str:
    """A whole tensor goes by its own name, a part by name and offset."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def _batches(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None
        nbytes = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if batch and size + nbytes > MAX_FILE:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch


def write_tensors(
    path: Path, entries: Sequence[Entry], tensors: Sequence[Tensor]
) -> tuple[FileRecord, list[Entry], list[tuple[str, ...]]]:
    """Write one safetensors file and bring it to the disk.

    While a block is being written, the next is fetched from its device and summed.

    Returns:
        size and header checksum of the file; the entries with their places; for each tensor its blocks' checksums.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header, placed = pack_header(entries, {"format": "pt"})
    sums: list[tuple[str, ...]] = []
    on_device = any(tensor.device.type != "cpu" for tensor in tensors)
    staging = cycle([host_buffer(), host_buffer()] if on_device else [])  # one is written while the other is filled
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with ThreadPoolExecutor(1) as thread:
            pending: Pending[None] = thread.submit(write_all, descriptor, header)
            for tensor in tensors:
                digests = []
                for block in _host_blocks(as_bytes(tensor), staging):
                    digests.append(checksum(block))
                    pending.result()
                    pending = thread.submit(write_all, descriptor, block)
                sums.append(tuple(digests))
            pending.result()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size = placed[-1].start + placed[-1].nbytes if placed else len(header)
    return FileRecord(size, checksum(header)), placed, sums


def host_buffer() -> Tensor:
    """Host memory for one block; page-locked where there is a GPU, for fast copies."""
    return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _host_blocks(data: Tensor, staging: Iterator[Tensor]) -> Iterator[memoryview]:
    """The blocks of flat bytes in host memory: the memory itself where it is the host's already."""
    for start, stop in blocks(data.numel()):
        block = data[start:stop]
        yield (block if data.device.type == "cpu" else next(staging)[: stop - start].copy_(block)).numpy().data


class Reader(StorageReader):
    """Reads the parts of a checkpoint that a rank's views need, after verifying them.

    Everything is verified while DCP plans, so that a torn file fails all ranks before any tensor has changed.
    """

    def __init__(self, directory: Path, tensors: dict[str, TensorInfo], records: dict[str, FileRecord]) -> None:
        self.directory = directory
        self.records = records
        self.tensors = tensors
        self.buffer = host_buffer()
        self.chunks = {
            MetadataIndex(info.name, chunk.offset): (info, chunk) for info in tensors.values() for chunk in info.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in DCP's terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, info.dtype)),
                    torch.Size(info.shape),
                    [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in info.chunks],
                )
                for name, info in self.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify every block that the plan will read."""
        wanted: dict[str, set[tuple[int, int, str]]] = {}
        for item in plan.items:
            info, chunk = self.chunks[item.storage_index]
            width = CODES[info.dtype][1]
            first, last = _hull(chunk.size, item.storage_offsets, item.lengths)
            for number, (start, stop) in enumerate(blocks(prod(chunk.size) * width)):
                if start < last * width and first * width < stop:
                    place = (chunk.start + start, chunk.start + stop, chunk.sums[number])
                    wanted.setdefault(chunk.file, set()).add(place)
        for name, places in sorted(wanted.items()):
            with DataFile(self.directory, name, self.records, self.buffer.numpy()) as file:
                file.verify(sorted(places))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the views' memory."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.chunks[item.storage_index][1].file, []).append(item)
        for name, items in sorted(by_file.items()):
            with DataFile(self.directory, name, self.records, self.buffer.numpy()) as file:
                for item in items:
                    info, chunk = self.chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    _fill(file, target, info, chunk, tuple(item.storage_offsets))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by path: folders are opened by :func:`megalight.checkpoint.open`."""
        return False


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(size[dim + 1 :]) for dim in range(len(size)))


def _hull(size: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """First and one-past-last element of a sub-box in a flattened row-major box of ``size``."""
    strides = _strides(size)
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))


def _fill(file: DataFile, target: Tensor, info: TensorInfo, chunk: Chunk, offset: tuple[int, ...]) -> None:
    """Read the box at ``offset`` of a chunk, of the target's shape, into ``target``."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    first, last = _hull(chunk.size, offset, target.shape)
    nbytes = (last - first) * dtype.itemsize
    start = chunk.start + first * dtype.itemsize
    straight = last - first == target.numel() and target.is_contiguous() and target.dtype == dtype
    if straight and target.device.type == "cpu":
        file.read(start, as_bytes(target).numpy().data)
    elif nbytes <= BLOCK:
        file.read(start, file.buffer.data[:nbytes])
        source = torch.from_numpy(file.buffer[:nbytes]).view(dtype)
        target.copy_(source.as_strided(target.shape, _strides(chunk.size)))
    else:
        dim = next(dim for dim, length in enumerate(target.shape) if length > 1)
        row = _strides(chunk.size)[dim] * dtype.itemsize
        step = max(1, min(BLOCK // row, target.shape[dim] // 2))
        for low in range(0, target.shape[dim], step):
            part = target.narrow(dim, low, min(step, target.shape[dim] - low))
            _fill(file, part, info, chunk, (*offset[:dim], offset[dim] + low, *offset[dim + 1 :]))

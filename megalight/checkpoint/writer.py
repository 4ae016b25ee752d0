"""DCP's storage layer, writing: safetensors data files, checksummed block by block."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megalight.checkpoint import index
from megalight.checkpoint.checksum import blocks, checksum
from megalight.checkpoint.files import (
    Entry,
    FileRecord,
    dump_json,
    pack_header,
    sync_directory,
    write_all,
    write_file,
)
from megalight.checkpoint.index import Chunk, TensorInfo
from megalight.checkpoint.memory import as_bytes, dtype_name, host_buffer
from megalight.errors import CheckpointError

MAX_FILE = 4 << 30
"""A rank starts another data file rather than let one grow beyond this many bytes."""


class Writer(StorageWriter):
    """Writes one rank's part of the tensors under ``directory/data``; the coordinator writes the index.

    Attributes:
        records: the files this rank wrote, for the manifest.
    """

    suffix = ".safetensors"

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
            results += self._write(f"data/{self.rank}-{number}{self.suffix}", items, planner)
        if results:
            sync_directory(self.directory / "data")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries = []
        for item in items:
            assert item.tensor_data is not None
            dtype = dtype_name(item.tensor_data.properties.dtype)
            entries.append(Entry(_key(item), dtype, tuple(item.tensor_data.chunk.sizes)))
        # one after another: views of a source read each tensor only now
        tensors = (_tensor(planner.resolve_data(item)) for item in items)
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
        index.validate(tensors.values(), "the tensors to save")
        self.records[index.NAME] = write_file(self.directory / index.NAME, dump_json(index.to_json(tensors)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by path: folders are published by :func:`megalight.checkpoint.save`."""
        return False


def _tensor(data: Any) -> Tensor:
    assert isinstance(data, Tensor)
    return data


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
    path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor]
) -> tuple[FileRecord, list[Entry], list[tuple[str, ...]]]:
    """Write one safetensors file and bring it to the disk.

    While a block is being written, the next is fetched from its device and summed.

    Returns:
        size and header checksum of the file; the entries with their places; for each tensor its blocks' checksums.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header, placed = pack_header(entries, {"format": "pt"})
    sums: list[tuple[str, ...]] = []
    staging = _two_buffers()
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


def _two_buffers() -> Iterator[Tensor]:
    """Two blocks of host memory in turn: one is written while the other is filled. Made when first asked for."""
    yield from cycle([host_buffer(), host_buffer()])


def _host_blocks(data: Tensor, staging: Iterator[Tensor]) -> Iterator[memoryview]:
    """The blocks of flat bytes in host memory: the memory itself where it is the host's already."""
    for start, stop in blocks(data.numel()):
        block = data[start:stop]
        yield (block if data.device.type == "cpu" else next(staging)[: stop - start].copy_(block)).numpy().data

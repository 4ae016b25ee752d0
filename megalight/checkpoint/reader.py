"""DCP's storage layer, reading: what a rank's views need, verified, then straight into their memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megalight.checkpoint.checksum import BLOCK, blocks
from megalight.checkpoint.datafile import DataFile
from megalight.checkpoint.files import CODES, FileRecord
from megalight.checkpoint.index import Chunk, TensorInfo
from megalight.checkpoint.memory import as_bytes, host_buffer

THREADS = 4
"""Threads per rank that read and verify."""

JOB = 64
"""Blocks, or boxes, that a thread takes at a time, at most."""

T = TypeVar("T")


class Reader(StorageReader):
    """Reads the parts of a checkpoint that a rank's views need, after verifying them.

    Everything is verified while DCP plans, so that a torn file fails all ranks before any tensor has changed.
    """

    def __init__(self, directory: Path, tensors: dict[str, TensorInfo], records: dict[str, FileRecord]) -> None:
        self.directory = directory
        self.records = records
        self.tensors = tensors
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

        def verify(name: str, places: Sequence[tuple[int, int, str]]) -> None:
            with DataFile(self.directory, name, self.records) as file:
                file.verify(places)

        _in_threads(verify, ((name, sorted(places)) for name, places in sorted(wanted.items())))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the views' memory."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.chunks[item.storage_index][1].file, []).append(item)

        def read(name: str, items: Sequence[ReadItem]) -> None:
            with DataFile(self.directory, name, self.records, host_buffer().numpy()) as file:
                for item in items:
                    info, chunk = self.chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    _fill(file, target, info, chunk, tuple(item.storage_offsets))
                    planner.commit_tensor(item, target)

        _in_threads(read, sorted(by_file.items()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by path: folders are opened by :func:`megalight.checkpoint.open`."""
        return False


def _in_threads(work: Callable[[str, Sequence[T]], None], by_file: Iterable[tuple[str, Sequence[T]]]) -> None:
    """Call ``work`` with parts of each file's list, several at a time: disks and checksums both gain."""
    jobs = []
    with ThreadPoolExecutor(THREADS) as pool:
        for name, items in by_file:
            step = max(1, min(JOB, len(items) // (2 * THREADS)))
            jobs += [pool.submit(work, name, items[first : first + step]) for first in range(0, len(items), step)]
    for job in jobs:
        job.result()


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

"""DCP's storage layer, reading: what a rank's views need, verified, then straight into their memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
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

from megalight.checkpoint.boxes import hull, in_threads, read_box
from megalight.checkpoint.disk.checksum import blocks
from megalight.checkpoint.disk.datafile import DataFile
from megalight.checkpoint.disk.files import CODES, FileRecord, Place
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.memory import host_buffer
from megalight.errors import CheckpointError


class Reader(StorageReader):
    """Reads the parts of a checkpoint that a rank's views need, after verifying them.

    Verification is part of DCP's planning, so that a torn file fails all ranks before any tensor has changed.
    """

    def __init__(self, directory: Place, tensors: dict[str, TensorInfo], records: dict[str, FileRecord]) -> None:
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
        wanted: dict[str, dict[tuple[int, int, str], str]] = {}
        for item in plan.items:
            info, chunk = self.chunks[item.storage_index]
            width = CODES[info.dtype][1]
            first, last = hull(chunk.size, item.storage_offsets, item.lengths)
            # Whole blocks, as a checksum covers one. A block that no box touches is not read.
            for number, (start, stop) in enumerate(blocks(prod(chunk.size) * width)):
                if start < last * width and first * width < stop:
                    place = (chunk.start + start, chunk.start + stop, chunk.sums[number])
                    wanted.setdefault(chunk.file, {})[place] = info.name

        def verify(name: str, places: Sequence[tuple[int, int, str]]) -> None:
            with DataFile(self.directory, name, self.records) as file:
                file.verify(())
                for place in places:
                    try:
                        file.block(*place)
                    except CheckpointError as error:
                        raise CheckpointError(f"{error} They belong to {wanted[name][place]!r}.") from error

        # Verified here, in DCP's planning: an error on one rank stops all of them before memory changes.
        in_threads(verify, ((name, sorted(places)) for name, places in sorted(wanted.items())))
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
                    # Straight into the memory of the view, whatever its device and strides.
                    read_box(file, chunk.start, getattr(torch, info.dtype), chunk.size, item.storage_offsets, target)
                    planner.commit_tensor(item, target)

        in_threads(read, sorted(by_file.items()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP does not choose this reader by path; :func:`megalight.checkpoint.open` opens folders."""
        return False

"""Save a checkpoint: all ranks write their parts of a new folder, then rank 0 seals and publishes it.

A save has two halves. :func:`stage` fixes what a rank writes at one moment, if asked by a copy to host memory;
:func:`write` writes it, perhaps later, while training continues. :func:`save` does both without a copy. An asynchronous
save (:mod:`megalight.checkpoint.async_save`) stages in the same way, and a worker process writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight import __version__
from megalight.checkpoint import json_values
from megalight.checkpoint.boxes import as_bytes, dtype_name, host_buffer, host_memory
from megalight.checkpoint.disk import manifest, publish
from megalight.checkpoint.disk.files import PathLike, WrittenBox, blocks, checked_name
from megalight.checkpoint.disk.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.disk.rank_files import RankFiles, Seal, WrittenFiles, write_part
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.view import Box, View, elements
from megalight.errors import CheckpointError

ALIGNMENT = 16
"""Bytes; every dtype may start there."""

Allocate = Callable[[int], Tensor]
"""Gives that many bytes of host memory, as ``uint8``."""


def save(
    path: str | os.PathLike[str],
    views: Mapping[str, View],
    *,
    common: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    other_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    files: Mapping[str, bytes | Path] | None = None,
    scheme: str = manifest.FULLY_RESHARDABLE,
    process_group: ProcessGroup | None = None,
) -> None:
    """Save a checkpoint as the folder ``path``, atomically. All ranks of the group call it together.

    A save that fails or is killed at any moment leaves what was at ``path`` before, untouched.

    Args:
        path: a folder, or an address in an object store, that all ranks share. A checkpoint that is there is replaced.
        views: this rank's views (see :mod:`megalight.checkpoint.view`), by canonical name.
        common: plain values that belong to the whole run; rank 0's are kept.
        rank_state: plain values of this rank (random states).
        other_ranks: the same of ranks that are not here, because a checkpoint of theirs is rewritten.
        files: further files, by name: contents, or where to copy from; rank 0's are kept.
        scheme: by which the views were made (see :mod:`megalight.checkpoint.scheme`).
        process_group: who saves; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank, when any rank failed; nothing is left behind.
    """
    staged = stage(
        views,
        common=common,
        rank_state=rank_state,
        other_ranks=other_ranks,
        files=files,
        scheme=scheme,
        copy=False,
        process_group=process_group,
    )
    write(path, staged, process_group=process_group)


def write(path: str | os.PathLike[str], staged: Staged, *, process_group: ProcessGroup | None = None) -> None:
    """The second half of :func:`save`: write what :func:`~megalight.checkpoint.stage` collected.

    It may run in another thread than training, with its own process group.

    Raises:
        CheckpointError: on every rank, when any rank failed; nothing is left behind.
    """
    ranks = Ranks(process_group)
    path = publish.absolute(path)
    started: list[publish.Save] = []

    def begin() -> PathLike:
        started.append(publish.Save(path))
        folder: PathLike = started[0].folder
        return folder

    def write_mine() -> WrittenFiles:
        return write_part(folder, staged.part(ranks.rank), host_blocks(elements(staged.boxes)))

    def finish() -> None:
        # The manifest is written last. A folder without it is not a checkpoint.
        seal_of(path, staged).close(folder, parts)
        started[0].publish()

    try:
        # Rank 0 makes the folder before others write into it.
        folder = ranks.first(f"starting to save {path}", begin)
        parts = ranks.together(f"saving {path}", write_mine)
        ranks.first(f"publishing {path}", finish)
    # Also on an interrupt: a half-written folder must not stay.
    except BaseException as error:
        for partial in started:
            partial.discard()
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"saving {path} failed, perhaps because another rank died: {error}") from error
        raise


def stage(
    views: Mapping[str, View],
    *,
    common: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    other_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    files: Mapping[str, bytes | Path] | None = None,
    scheme: str = FULLY_RESHARDABLE,
    copy: bool | Allocate = True,
    later: Callable[[str], bool] = lambda name: False,
    process_group: ProcessGroup | None = None,
) -> Staged:
    """Collect what a save writes. All ranks of the group call it together.

    Args:
        views: this rank's views, by name.
        common: see :func:`megalight.checkpoint.save`.
        rank_state: see there.
        other_ranks: the same of ranks that are not here, because a checkpoint of theirs is rewritten.
        files: see there.
        scheme: see there.
        copy: copy the boxes that this rank writes to host memory, so that their owners may change them. False: write
            before they change. A function gives the memory.
        later: names of views that keep their values until ``copies.fence()``. What they hold on GPUs is copied in
            parallel with the next kernels.
        process_group: who saves; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank, when any rank has a value that cannot be kept.
    """
    ranks = Ranks(process_group)
    # States of other ranks first: this rank's own replaces one of the same number.
    states = {**(other_ranks or {}), **({} if rank_state is None else {ranks.rank: rank_state})}

    staged: list[Staged] = []

    def collect() -> None:
        small: dict[str, bytes | Path] = {}
        # Whole files come from rank 0 only, as they are the same on all ranks.
        if ranks.rank == 0:
            small |= json_values.files("common", dict(common or {}), "common")
            for name, source in (files or {}).items():
                if copy and isinstance(source, Path):
                    source = source.read_bytes()  # it may have changed by the time it is written
                small[f"files/{checked_name(name)}"] = source
        for rank, state in states.items():
            small |= json_values.files(f"ranks/{rank}", dict(state), "rank_state")
        fixed, copies = _copied(views, host_memory if copy is True else copy, later) if copy else (views, None)
        world_size = max(ranks.size, *(rank + 1 for rank in states), 1)
        staged.append(Staged(fixed, small, scheme, world_size, copies))

    try:
        ranks.together("preparing to save", collect)
    except CheckpointError:
        # Another rank failed. Nobody else knows of this rank's copies, and the next save uses the same memory.
        for each in staged:
            if each.copies is not None:
                each.copies.wait()
        raise
    return staged[0]


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint that is to be written.

    Attributes:
        views: what to write, by name.
        small: whole files by name: contents, or where to copy from.
        scheme: by which the views were made.
        world_size: ranks whose values are in it: of this group, or of the checkpoint that is rewritten.
        copies: those that are still in progress; None: there are none.
    """

    views: Mapping[str, View]
    small: Mapping[str, bytes | Path]
    scheme: str
    world_size: int
    copies: HostCopies | None = None

    @property
    def boxes(self) -> list[tuple[View, Box]]:
        """The boxes that this rank writes, in order."""
        return [(view, box) for view in self.views.values() for box in view.boxes if box.write]

    def part(self, rank: int) -> RankFiles:
        """The plan of what this rank writes.

        Raises:
            CheckpointError: tensors of a dtype that safetensors does not know.
        """
        pieces = (
            WrittenBox(name, tuple(view.shape), dtype_name(view.dtype), box.offset, tuple(box.data.shape))
            for name, view in self.views.items()
            for box in view.boxes
            if box.write
        )
        return RankFiles(rank, self.scheme, tuple(pieces), self.small)


class HostCopies:
    """Copies from GPUs to host memory on side streams, in parallel with the next kernels.

    Args:
        sources: what is copied. It is held, so that its memory is not given to anything else before.
        into: where to, one tensor for each.
    """

    def __init__(self, sources: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        self._sources: Sequence[Tensor] = sources
        streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in dict.fromkeys(source.device for source in sources)
        }
        for device, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for source, target in zip(sources, into, strict=True):
            with torch.cuda.stream(streams[source.device]):
                target.copy_(source, non_blocking=True)
        self._events = {device: stream.record_event() for device, stream in streams.items()}

    def fence(self) -> None:
        """Let GPU work that is queued from now on wait for the copies. The host does not wait."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until all is copied, and let go of the sources."""
        for event in self._events.values():
            event.synchronize()
        # Writing takes longer than copying, and an optimizer may be offloaded meanwhile: its memory must become free.
        self._sources = ()


def size_of(views: Mapping[str, View]) -> int:
    """Return the bytes of host memory that :func:`stage` takes for copies."""
    return sum(map(_aligned, (box for view in views.values() for box in view.boxes if box.write)))


def seal_of(path: PathLike, staged: Staged) -> Seal:
    """What rank 0 needs to seal the checkpoint."""
    # a plain str: torch's own class of versions would make a worker import torch
    versions = {"megalight": __version__, "torch": str(torch.__version__)}
    return Seal(path, staged.scheme, staged.world_size, versions)


def host_blocks(tensors: Iterable[Tensor]) -> Iterator[Iterator[memoryview]]:
    """The blocks of each tensor in host memory: the memory itself where it is the host's already.

    Blocks from a device lie in two buffers in turn, so that one is written while the other is filled.
    """
    buffers = _two_buffers()
    for tensor in tensors:
        yield _blocks(as_bytes(tensor), buffers)


def _aligned(box: Box) -> int:
    # Each copy is viewed in its own dtype.
    return -(-box.data.nbytes // ALIGNMENT) * ALIGNMENT


def _copied(
    views: Mapping[str, View], allocate: Allocate, later: Callable[[str], bool]
) -> tuple[dict[str, View], HostCopies | None]:
    """The boxes that this rank writes, copied one after another into one piece of host memory."""
    memory = allocate(size_of(views))
    boxes: dict[str, list[Box]] = {}
    devices: set[torch.device] = set()
    deferred: list[tuple[Tensor, Tensor]] = []
    start = 0
    for name, box in ((name, box) for name, view in views.items() for box in view.boxes if box.write):
        source = box.data
        copy = memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        if source.is_cuda and later(name):
            deferred.append((source, copy))
        else:
            # Not waited for one by one: copies of all boxes are queued before the wait below.
            copy.copy_(source, non_blocking=True)
            devices.add(source.device)
        boxes.setdefault(name, []).append(Box(box.offset, copy))
        start += _aligned(box)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # the copies have arrived before anybody changes what they were of
    # After that wait, which would be for these as well.
    copies = HostCopies([source for source, _ in deferred], [copy for _, copy in deferred]) if deferred else None
    return {name: View(name, views[name].shape, found) for name, found in boxes.items()}, copies


def _two_buffers() -> Iterator[Tensor]:
    """Two blocks of host memory in turn. Made when first asked for."""
    yield from cycle([host_buffer(), host_buffer()])


def _blocks(data: Tensor, buffers: Iterator[Tensor]) -> Iterator[memoryview]:
    for start, stop in blocks(data.numel()):
        block = data[start:stop]
        # Memory of the host is written as it is. That of a device passes through one of the two buffers.
        yield (block if data.device.type == "cpu" else next(buffers)[: stop - start].copy_(block)).numpy().data

"""Symmetric memory of processes on one host without a GPU: files that all map, with streams that do everything at once.

What it shows is the arithmetic of shares, slots and offsets, and that every rank meets the same barriers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.ops.common import HALF
from megalight.parallel.tensor.overlap import symmetric


class Stream:
    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()

    def synchronize(self) -> None: ...


class Handle:
    def __init__(self, folder: str, size: int, group: dist.ProcessGroup) -> None:
        self.group = group
        rank = group.rank()
        paths = [f"{folder}/{other}" for other in range(group.size())]
        self.memory = {rank: torch.from_file(paths[rank], shared=True, size=size, dtype=torch.uint8)}
        dist.barrier(group)
        for other, path in enumerate(paths):
            if other != rank:
                self.memory[other] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        return self.memory[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(self.group)


class Memory:
    """Stands for the module ``torch.distributed._symmetric_memory``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.count = 0

    def empty(self, size: int, dtype: torch.dtype, device: object) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Handle:
        self.count += 1
        folder = f"{self.folder}/{self.count}"
        os.makedirs(folder, exist_ok=True)
        return Handle(folder, memory.numel(), group)


@contextmanager
def symmetric_on_cpu() -> Iterator[None]:
    """The way ``symmetric`` serves CPU tensors of any floating type meanwhile; all ranks of the world enter."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    memory = Memory(str(folder[0]))
    stream = Stream()
    cuda = SimpleNamespace(
        current_stream=lambda: stream,
        default_stream=lambda device: stream,
        Stream=Stream,
        stream=lambda _: nullcontext(),
        current_device=lambda: 0,
    )
    with ExitStack() as stack:
        for name, value in (
            ("cuda_why_not", lambda device: None),
            ("HALF", (*HALF, torch.float32, torch.float64)),
            ("symmetric_memory", lambda: memory),
        ):
            stack.enter_context(patch.object(symmetric, name, value))
        stack.enter_context(patch.multiple(torch.cuda, **vars(cuda)))
        yield

"""Symmetric memory of processes on one host without a GPU: files that all map, with streams that do everything at once.

What it shows is the arithmetic of shares, slots and offsets, that no flag is raised twice before it is seen, and that
ranks come to an end although a wait holds up everything else that its rank has queued.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.ops.common import HALF
from megalight.parallel.peers import driver, spin
from megalight.parallel.peers import memory as copies
from megalight.parallel.tensor.overlap import symmetric
from tests.parallel.graphs.tape import act

PATIENCE = 60.0


class Event:
    def query(self) -> bool:
        return True


class Stream:
    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None: ...


class Handle:
    def __init__(self, folder: str, number: int, memory: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), memory.numel()
        paths = [f"{folder}/{other}" for other in range(group.size())]
        own = torch.from_file(paths[rank], shared=True, size=size, dtype=torch.uint8).copy_(memory)
        memory.set_(own)  # type: ignore[call-overload]  # torch maps the memory that was allocated
        self.memory = {rank: own}
        dist.barrier(group)
        for other, path in enumerate(paths):
            if other != rank:
                self.memory[other] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.buffer_ptrs = [number << 40 | other << 32 for other in range(group.size())]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        return self.memory[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)


class Memory:
    """Stands for the module ``torch.distributed._symmetric_memory``, and for the driver."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.handles: list[Handle] = []

    def empty(self, size: int, dtype: torch.dtype, device: object) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Handle:
        # As in torch, a meeting has the number of the process, and ranks with others would never meet.
        number = len(self.handles)
        numbers: list[int] = [number] * group.size()
        dist.all_gather_object(numbers, number, group=group)
        assert len(set(numbers)) == 1, f"ranks would wait for each other in meetings {numbers}"
        folder = f"{self.folder}/{group.group_name}/{number}"
        os.makedirs(folder, exist_ok=True)
        self.handles.append(Handle(folder, number, memory, group))
        return self.handles[-1]

    def _word(self, flag: int) -> Tensor:
        memory = self.handles[flag >> 40].memory[flag >> 32 & 0xFF]
        return memory.view(torch.int32)[(flag & 0xFFFFFFFF) // 4]

    def wait(self, stream: object, flags: tuple[int, ...]) -> None:
        act(lambda: self.spin(flags))

    def spin(self, flags: tuple[int, ...]) -> None:
        """What waits holds up all else of its rank, as if it had one hardware queue."""
        for flag in flags:
            word, end = self._word(flag), time.monotonic() + PATIENCE
            while not word.item():
                assert time.monotonic() < end, "a flag is never raised"
                time.sleep(0)
            word.zero_()

    def spin_with(self, watch: object, flags: tuple[int, ...], memory: object = None) -> None:
        act(lambda: self.spin(flags))

    def raise_flags(self, stream: object, flags: tuple[int, ...]) -> None:
        act(lambda: self.raise_now(flags))

    def raise_now(self, flags: tuple[int, ...]) -> None:
        for flag in flags:
            word = self._word(flag)
            assert not word.item(), "a flag is raised twice"
            word.fill_(1)

    def copy(self, stream: object, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous()
        assert source.is_contiguous()
        act(lambda: target.copy_(source))


@contextmanager
def symmetric_on_cpu() -> Iterator[None]:
    """The way ``symmetric`` serves CPU tensors of any float type and size meanwhile; all ranks of the world enter."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    memory = Memory(str(folder[0]))
    stream = Stream()
    cuda = SimpleNamespace(
        current_stream=lambda: stream,
        default_stream=lambda device: stream,
        Stream=Stream,
        stream=nullcontext,
        current_device=lambda: 0,
    )
    with ExitStack() as stack:
        for module, name, value in (
            (symmetric, "HALF", (*HALF, torch.float32, torch.float64)),
            (symmetric, "LEAST_BYTES", 0),
            (copies, "why_not", lambda device: None),
            (copies, "unreachable", lambda group: None),
            (copies, "symmetric_memory", lambda: memory),
            (copies.MEETINGS, "count", 0),
            (spin, "wait_with", memory.spin_with),
            (spin, "raise_flags", lambda flags: memory.raise_flags(stream, flags)),
            (spin, "prepare", lambda count: None),
        ):
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.multiple(driver, wait=memory.wait, raise_flags=memory.raise_flags, copy=memory.copy))
        stack.enter_context(patch.multiple(torch.cuda, **vars(cuda)))
        yield

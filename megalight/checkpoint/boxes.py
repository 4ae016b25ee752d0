"""Boxes of row-major tensors, read from files by several threads: little more than the bytes of the box is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.files import BLOCK, CODES
from megalight.errors import CheckpointError


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
    # Any dtype is written as bytes; safetensors' header says which one it was.
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_memory(nbytes: int) -> Tensor:
    """Host memory as ``uint8``; pinned if there is a GPU, for fast copies."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def host_buffer() -> Tensor:
    """Host memory for one block."""
    return host_memory(BLOCK)


THREADS = 4
"""Threads per rank that read and verify."""

JOB = 64
"""Blocks, or boxes, that a thread takes at a time, at most."""

GAP = 4096
"""Bytes between two parts of a box that are worth a read of their own; smaller gaps are read and dropped."""

_STARTING = threading.Lock()

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[str, Sequence[T]], R], by_file: Iterable[tuple[str, Sequence[T]]]) -> list[R]:
    """Call ``work`` with parts of each file's list, several at a time: disks and checksums both gain."""
    jobs: list[tuple[str, Sequence[T]]] = []
    for name, items in by_file:
        # Small jobs at the end keep all threads busy.
        step = max(1, min(JOB, len(items) // (2 * THREADS)))
        jobs += [(name, items[first : first + step]) for first in range(0, len(items), step)]
    # Tensors that are read one by one make one job each. To start a thread takes longer than many of them.
    if len(jobs) <= 1:
        return [work(*job) for job in jobs]
    with ThreadPoolExecutor(THREADS, initializer=_start_thread) as pool:
        running = [pool.submit(work, *job) for job in jobs]
    return [job.result() for job in running]


def _start_thread() -> None:
    """Let PyTorch prepare a new thread, one thread at a time.

    In a forked process PyTorch renews its own pool when the first thread asks, and fails if another asks meanwhile.
    """
    with _STARTING:
        torch.get_num_threads()


def strides(size: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major tensor, in elements."""
    return tuple(prod(size[dim + 1 :]) for dim in range(len(size)))


def hull(size: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """First and one-past-last element of a box in a flattened row-major tensor of ``size``."""
    steps = strides(size)
    first = sum(o * s for o, s in zip(offset, steps, strict=True))
    return first, first + 1 + sum((n - 1) * s for n, s in zip(lengths, steps, strict=True))


def intersection(
    first: Sequence[int], size: Sequence[int], second: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes meet, as places in the first and in the second; None if they do not."""
    low = [max(a, b) for a, b in zip(first, second, strict=True)]
    high = [min(a + m, b + n) for a, m, b, n in zip(first, size, second, extent, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return (
        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, first, strict=True)),
        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, second, strict=True)),
    )


def read_box(
    file: OpenFile, start: int, dtype: torch.dtype, size: Sequence[int], offset: Sequence[int], target: Tensor
) -> None:
    """Fill ``target`` with a box of a tensor in a file.

    Args:
        file: open; its buffer holds one block.
        offset: where the box starts; its extent is the target's.
        target: not empty; of any dtype, device and strides.
    """
    first, last = hull(size, offset, target.shape)
    nbytes = (last - first) * dtype.itemsize
    place = start + first * dtype.itemsize
    # No gap between the first and the last element: one read brings all of it.
    whole = last - first == target.numel()
    # Read straight into the target, with no buffer between.
    if whole and target.is_contiguous() and target.dtype == dtype and target.device.type == "cpu":
        file.read(place, as_bytes(target).numpy().data)
    elif nbytes <= BLOCK:
        run, gap = _run(size, target.shape)
        # Small gaps are read as well: a read of its own for each run would take longer.
        if whole or gap * dtype.itemsize < GAP:
            file.read(place, file.buffer.data[:nbytes])
            source = torch.from_numpy(file.buffer[:nbytes]).view(dtype).as_strided(target.shape, strides(size))
        else:
            source = _read_runs(file, place, dtype, size, target.shape, run)
        target.copy_(source)
    else:
        # Along the first dim that can be divided, so that each part is as contiguous as possible.
        dim = next(dim for dim, length in enumerate(target.shape) if length > 1)
        row = strides(size)[dim] * dtype.itemsize
        # At least two parts, or the recursion would never end.
        step = max(1, min(BLOCK // row, target.shape[dim] // 2))
        for low in range(0, target.shape[dim], step):
            part = target.narrow(dim, low, min(step, target.shape[dim] - low))
            read_box(file, start, dtype, size, (*offset[:dim], offset[dim] + low, *offset[dim + 1 :]), part)


def _run(size: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Length of the contiguous runs of a box, in elements, and the smallest gap between two runs."""
    run = inner = 1
    for extent, length in zip(reversed(size), reversed(lengths), strict=True):
        run, inner = run * length, inner * extent
        if length != extent:
            break
    return run, inner - run


def _runs(size: Sequence[int], lengths: Sequence[int], run: int) -> Iterator[int]:
    """The first element of each run, from the box's first on."""
    outer, covered = len(lengths), 1
    while covered < run:
        outer -= 1
        covered *= lengths[outer]
    steps = strides(size)
    for index in product(*(range(length) for length in lengths[:outer])):
        yield sum(i * step for i, step in zip(index, steps, strict=False))


def _read_runs(
    file: OpenFile, place: int, dtype: torch.dtype, size: Sequence[int], lengths: Sequence[int], run: int
) -> Tensor:
    """The runs of a box, concatenated in the file's buffer."""
    width = run * dtype.itemsize
    position = 0
    for first in _runs(size, lengths, run):
        file.read(place + first * dtype.itemsize, file.buffer.data[position : position + width])
        position += width
    return torch.from_numpy(file.buffer[:position]).view(dtype).view(tuple(lengths))

"""Tensors as the blocks of memory that are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

from torch import Tensor

from megalight.checkpoint.disk.checksum import blocks
from megalight.checkpoint.memory import as_bytes, host_buffer


def host_blocks(tensors: Iterable[Tensor]) -> Iterator[Iterator[memoryview]]:
    """The blocks of each tensor in host memory: the memory itself where it is the host's already.

    Blocks from a device lie in two buffers in turn, so that one is written while the other is filled.
    """
    buffers = _two_buffers()
    for tensor in tensors:
        yield _blocks(as_bytes(tensor), buffers)


def _two_buffers() -> Iterator[Tensor]:
    """Two blocks of host memory in turn. Made when first asked for."""
    yield from cycle([host_buffer(), host_buffer()])


def _blocks(data: Tensor, buffers: Iterator[Tensor]) -> Iterator[memoryview]:
    for start, stop in blocks(data.numel()):
        block = data[start:stop]
        # Memory of the host is written as it is. That of a device passes through one of the two buffers.
        yield (block if data.device.type == "cpu" else next(buffers)[: stop - start].copy_(block)).numpy().data

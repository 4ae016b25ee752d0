"""Shares copied between GPUs of one host by their copy engines, through symmetric memory: no multiprocessor is taken.

Every rank can read and write its peers' part of a buffer (``torch.distributed._symmetric_memory``). Products stay on
the current stream; copies run on one stream of their own. What must not be overtaken is fenced by two barriers per
call, both on the current stream, where no product holds the multiprocessors that a barrier's kernel needs. Multicast
is never used: torch is told so before the first buffer is made.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.imports import has_symmetric_memory, symmetric_memory
from megalight.ops.common import HALF, cuda_why_not
from megalight.parallel.collectives import Pending, check_divides
from megalight.parallel.tensor.overlap.pipelined import Pipelined, as_rows, pieces_why_not
from megalight.parallel.tensor.overlap.rounds import Round, rounds_of
from megalight.parallel.tensor.overlap.spec import OverlapSpec, Product

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
BUFFERS = "TORCH_SYMMMEM"
"""Environment variables that torch reads when it makes symmetric memory."""
MOST_VIEWS = 256
"""Tensors in a buffer that are remembered; each shape of micro-batch has its own."""


def why_not(spec: OverlapSpec) -> str | None:
    """Copies need GPUs that reach each other's memory, and pieces need plain half products."""
    if (reason := cuda_why_not(spec.device)) is not None:
        return reason
    if not has_symmetric_memory():
        return (
            f"needs torch.distributed._symmetric_memory with CUDA peer buffers, which torch {torch.__version__} lacks"
        )
    if os.environ.get(NO_MULTICAST, "1") != "1":
        return f"goes without NVLink multicast, which {NO_MULTICAST}={os.environ[NO_MULTICAST]} asks for; set it to 1"
    if os.environ.get(BUFFERS, "CUDA") != "CUDA":
        return f"uses torch's own peer buffers, and {BUFFERS}={os.environ[BUFFERS]} asks for others; unset it"
    if not spec.sequence_parallel:
        return "needs sequence parallelism: without it sums go to all ranks, which pipelined overlaps"
    if spec.weight_dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.weight_dtype}"
    if spec.group is not None and hosts_of(spec.group) > 1:
        return f"needs all ranks on one host, and tp={spec.tp} spans {hosts_of(spec.group)}"
    return pieces_why_not(spec)


@lru_cache
def hosts_of(group: ProcessGroup) -> int:
    """Over how many hosts a group spreads; its ranks ask together, once."""
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return len(set(names))


class Symmetric(Pipelined):
    """Pieces as in ``pipelined``; what the caller covers with other work leaves by copy engine too.

    Args:
        group: ranks of one host.
        pieces: of every product; None: by its sizes.
    """

    carrier: PeerCopies

    def __init__(self, group: ProcessGroup, pieces: int | None) -> None:
        super().__init__(group, PeerCopies(group), pieces)

    def start_gather(self, share: Tensor, dim: int) -> Pending:
        """Copies run until the caller waits."""
        flat, back = as_rows(share, dim)
        arriving = self.carrier.gather(flat, rounds_of(self.group.rank(), self.group.size(), 1), place_own=True)

        def finish() -> Tensor:
            arriving.wait(0)
            return back(arriving.whole)

        return Pending(None, finish)

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """In pieces; as one where the caller covers the copies."""
        if not covered:
            return super().start_product_scatter(x, product, dim, covered=False)
        check_divides(x, self.group, dim)
        flat, back = as_rows(x, dim)
        leaving = self.scatter_in_pieces(flat, product, 1)
        return Pending(None, lambda: back(leaving.finish()))


class Buffer:
    """Symmetric memory that grows; ranks ask for equal sizes at the same time.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.outgrown: list[Tensor] = []
        """Kept: peers may still read them."""
        self.memory: Tensor | None = None
        self.handle: Any = None
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def reserve(self, size: int) -> None:
        """Make sure of so many bytes on every rank. A size larger than ever before is agreed upon by all of them."""
        if self.memory is None or self.memory.numel() < size:
            os.environ[NO_MULTICAST] = "1"
            if self.memory is not None:
                self.outgrown.append(self.memory)
            rounded = 1 << (size - 1).bit_length()
            device = torch.device("cuda", torch.cuda.current_device())
            self.memory = symmetric_memory().empty(rounded, dtype=torch.uint8, device=device)
            # torch clears it on the default stream and does not wait: behind other work, a peer's first signal is lost
            torch.cuda.default_stream(device).synchronize()
            self.handle = symmetric_memory().rendezvous(self.memory, self.group)
            self._views.clear()

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A tensor in the memory of a rank, from element ``offset`` on."""
        key = rank, shape, dtype, offset
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = self.handle.get_buffer(rank, shape, dtype, offset)
        return self._views[key]

    def barrier(self) -> None:
        """The current streams of all ranks wait for each other."""
        self.handle.barrier(channel=0)


class PeerCopies:
    """A carrier.

    Args:
        group: ranks of one host.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.shares, self.sums = Buffer(group), Buffer(group)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def gather(self, share: Tensor, rounds: tuple[Round, ...], *, place_own: bool) -> GatheringCopies:
        """Start to bring all shares here."""
        return GatheringCopies(self, share, rounds, place_own)

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[Round, ...]) -> ScatteringCopies:
        """Be ready for partial sums."""
        return ScatteringCopies(self, (rows, width), like.dtype, rounds)


class GatheringCopies:
    """Each rank lays its share open and pulls those of the others."""

    def __init__(self, carrier: PeerCopies, share: Tensor, rounds: tuple[Round, ...], place_own: bool) -> None:
        rank, size, shape = carrier.group.rank(), carrier.group.size(), tuple(share.shape)
        current, aside, laid_open = torch.cuda.current_stream(), carrier.stream, carrier.shares
        laid_open.reserve(share.nbytes)
        aside.wait_stream(current)  # so that a CUDA graph that is being recorded knows both
        current.wait_stream(aside)  # what this rank still pulls
        laid_open.barrier()  # and with that everybody: the shares of the call before may be overwritten
        laid_open.view(rank, shape, share.dtype).copy_(share)
        laid_open.barrier()  # all shares are there
        self.whole = share.new_empty(size * shape[0], *shape[1:])
        shares = self.whole.view(size, *shape)
        aside.wait_stream(current)
        self.arrived = []
        with torch.cuda.stream(aside):
            for each in rounds:
                for ahead, _ in each.pairs:
                    shares[ahead].copy_(laid_open.view(ahead, shape, share.dtype), non_blocking=True)
                self.arrived.append(aside.record_event())
        if place_own:
            shares[rank].copy_(share)

    def wait(self, number: int) -> None:
        """The current stream waits for the shares of a round."""
        torch.cuda.current_stream().wait_event(self.arrived[number])


class ScatteringCopies:
    """Each rank pushes partial sums into the buffers of the ranks that own their rows."""

    def __init__(
        self, carrier: PeerCopies, shape: tuple[int, int], dtype: torch.dtype, rounds: tuple[Round, ...]
    ) -> None:
        self.carrier, self.shape, self.dtype, self.rounds = carrier, shape, dtype, rounds
        self.rank, self.size = carrier.group.rank(), carrier.group.size()
        self.buffer = carrier.sums
        self.buffer.reserve(self.size * prod(shape) * dtype.itemsize)
        self.parts = self.buffer.view(self.rank, (self.size, *shape), dtype)
        self.own = self.parts[self.rank]
        self.leaving: list[Tensor] = []
        self.buffer.barrier()  # everybody has summed up what came in the call before

    def send(self, number: int, piece: Tensor) -> None:
        """Start to push the rows of a piece."""
        run, aside = self.size // len(self.rounds), self.carrier.stream
        by_owner = piece.view(run, *self.shape)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for ahead, _ in self.rounds[number].pairs:
                slot = self.buffer.view(ahead, self.shape, self.dtype, self.rank * prod(self.shape))
                slot.copy_(by_owner[ahead % run], non_blocking=True)
        self.leaving.append(piece)  # freed when the current stream has waited

    def finish(self) -> Tensor:
        """Wait until everybody has pushed, and sum in float32."""
        torch.cuda.current_stream().wait_stream(self.carrier.stream)
        self.buffer.barrier()
        self.leaving.clear()
        if self.size == 2:
            return torch.add(self.parts[0], self.parts[1])  # the same number, without a reduction
        return torch.sum(self.parts, 0)

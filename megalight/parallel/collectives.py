"""Collectives over one process group: on plain tensors (with handles for overlap), and as differentiable regions.

A group of None has one member; everything here is then the identity. Regions are pairs of a forward and a backward:

================== ======================= =======================
region             forward                 backward
================== ======================= =======================
``copy``           identity                all-reduce
``all_reduce``     all-reduce              identity
``split``          own slice               all-gather
``join``           all-gather              own slice
``all_gather``     all-gather              reduce-scatter
``reduce_scatter`` reduce-scatter          all-gather
``all_to_all``     all-to-all              all-to-all
================== ======================= =======================

Use ``join`` if all ranks then compute the same with the whole, and ``all_gather`` if each rank computes a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from megalight.errors import LayoutError
from megalight.imports import torch_distributed
from megalight.parallel.trace import capturing

_gather_into = torch_distributed("all_gather_single", "all_gather_into_tensor")
_scatter_into = torch_distributed("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass
class PendingCollective:
    """A collective in flight. Do not write to its input before :meth:`wait`."""

    work: dist.Work | None
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Return the result. On a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result()


def start_all_reduce(x: Tensor, group: ProcessGroup | None) -> PendingCollective:
    """Start to sum ``x`` over the group, in place."""
    if group is None:
        return PendingCollective(None, lambda: x)
    # Collectives read memory in order. A tensor with other strides is copied, and the copy is the result.
    x = x.contiguous()
    return PendingCollective(dist.all_reduce(x, group=group, async_op=True), lambda: x)


def start_all_gather(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> PendingCollective:
    """Start to concatenate ``x`` of all ranks along ``dim``."""
    if group is None:
        return PendingCollective(None, lambda: x)
    size = group.size()
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    # Shares of all ranks follow each other in `out`, which is a concatenation along dim 0. Other dims need a copy
    # afterwards.
    work = _gather_into(out, x.contiguous(), group=group, async_op=True)
    # Only after the wait: the copy must not read what has not arrived.
    return PendingCollective(work, lambda: out if dim == 0 else torch.cat(out.chunk(size), dim))


def start_reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> PendingCollective:
    """Start to sum ``x`` over the group; the result is this rank's slice of the sum along ``dim``.

    Raises:
        LayoutError: ``dim`` does not divide by the group's size.
    """
    if group is None:
        return PendingCollective(None, lambda: x)
    slices = _slices(x, group, dim)
    # What goes to each rank must be contiguous.
    x = x.contiguous() if dim == 0 else torch.cat(slices)
    out = torch.empty_like(slices[0], memory_format=torch.contiguous_format)
    work = _scatter_into(out, x, group=group, async_op=True)
    return PendingCollective(work, lambda: out)


def start_all_to_all(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> PendingCollective:
    """Start to send slice ``i`` along ``dim`` to rank ``i``; the result is the slices of all ranks for this rank.

    Raises:
        LayoutError: ``dim`` does not divide by the group's size.
    """
    if group is None:
        return PendingCollective(None, lambda: x)
    slices = _slices(x, group, dim)
    # Slice `i` of a contiguous tensor goes to rank `i`.
    x = x.contiguous() if dim == 0 else torch.cat(slices)
    out = torch.empty_like(x)
    work = dist.all_to_all_single(out, x, group=group, async_op=True)
    return PendingCollective(work, lambda: out if dim == 0 else torch.cat(out.chunk(len(slices)), dim))


def own_slice(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Return this rank's slice of ``x`` along ``dim``: a view.

    Raises:
        LayoutError: ``dim`` does not divide by the group's size.
    """
    return x if group is None else _slices(x, group, dim)[group.rank()]


def check_divides(x: Tensor, group: ProcessGroup, dim: int) -> None:
    """Check that a group can divide ``x`` along ``dim``.

    Raises:
        LayoutError: ``dim`` does not divide by the group's size.
    """
    if x.shape[dim] % group.size():
        raise LayoutError(
            f"dim {dim} of a tensor {tuple(x.shape)} must be a multiple of the {group.size()} ranks that share it. "
            f"Pad it: PackedSequences.pad_to({group.size()}) for packed tokens, a sequence length that is a multiple "
            "of tp for rows of tokens."
        )


def _slices(x: Tensor, group: ProcessGroup, dim: int) -> tuple[Tensor, ...]:
    check_divides(x, group, dim)
    return x.chunk(group.size(), dim)


def _region(
    name: str, forward: Callable[[Tensor, Any, int], Tensor], backward: Callable[[Tensor, Any, int], Tensor]
) -> Callable[[Tensor, ProcessGroup | None, int], Tensor]:
    """Make a differentiable region from a forward and a backward collective."""

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
            # Nothing is saved but the group: the backward of each region needs its gradient alone.
            ctx.group, ctx.dim = group, dim
            return forward(x, group, dim)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
            return backward(grads[0], ctx.group, ctx.dim), None, None

    Region.__name__ = Region.__qualname__ = name
    apply: Callable[..., Tensor] = Region.apply
    return apply


def _sum(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    # A copy: the collective works in place, and autograd or the caller may still need `x`.
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return start_all_gather(x, group, dim).wait()


def _scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return start_reduce_scatter(x, group, dim).wait()


def _exchange(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return start_all_to_all(x, group, dim).wait()


def _own(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return own_slice(x, group, dim).contiguous()


def _same(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


_COPY = _region("Copy", _same, _sum)
_ALL_REDUCE = _region("AllReduce", _sum, _same)
_SPLIT = _region("Split", _own, _gather)
_JOIN = _region("Join", _gather, _own)
_ALL_GATHER = _region("AllGather", _gather, _scatter)
_REDUCE_SCATTER = _region("ReduceScatter", _scatter, _gather)
_ALL_TO_ALL = _region("AllToAll", _exchange, _exchange)


def copy(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return ``x``, for ranks that each compute a part with it. The backward sums gradients over the group."""
    return x if group is None else _COPY(x, group, 0)


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the group. The backward is the identity."""
    return x if group is None else _ALL_REDUCE(x, group, 0)


def split(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Return this rank's slice of an ``x`` that is equal on all ranks. The backward gathers gradients."""
    return x if group is None else _SPLIT(x, group, dim)


def join(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Gather all slices, for ranks that compute the same with them. The backward takes this rank's slice."""
    return x if group is None else _JOIN(x, group, dim)


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Gather all slices, for ranks that each compute a part with them. The backward reduce-scatters gradients."""
    return x if group is None else _ALL_GATHER(x, group, dim)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Return this rank's slice of the sum over the group. The backward gathers gradients."""
    return x if group is None else _REDUCE_SCATTER(x, group, dim)


def all_to_all(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Send slice ``i`` to rank ``i``. The backward sends gradients back the same way."""
    return x if group is None else _ALL_TO_ALL(x, group, dim)


class Work(Protocol):
    """A part of a message in flight; :class:`torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Wait; on a GPU the current stream waits, not the host."""

    def is_completed(self) -> bool:
        """Whether it is known to be done. gloo knows this only after :meth:`wait`."""


@dataclass(frozen=True)
class Message:
    """Tensors in flight, kept alive until they have arrived."""

    tensors: list[Tensor]
    works: Sequence[Work]

    def wait(self) -> list[Tensor]:
        """Wait, and return the tensors; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.tensors

    def done(self) -> bool:
        """Whether the tensors have arrived, without waiting; always False while a CUDA graph is captured."""
        return not capturing() and all(work.is_completed() for work in self.works)


def start(
    kind: Callable[..., dist.Work | None], parts: Sequence[tuple[int, Tensor]], group: ProcessGroup | None
) -> Message:
    """Start to send or receive contiguous tensors, each with the global rank of its peer.

    Args:
        kind: ``dist.isend`` or ``dist.irecv``.
    """
    # Backends do not send empty tensors; both sides leave out the same ones, so their messages still pair up.
    operations = [P2POp(kind, as_bytes(part), peer, group) for peer, part in parts if part.numel()]
    # Together, so that one peer does not wait for another; NCCL sends all tensors in one kernel.
    return Message([part for _, part in parts], dist.batch_isend_irecv(operations) if operations else [])


def send_text(text: bytes, peers: Sequence[int], group: ProcessGroup) -> Message:
    """Start to send a few bytes to the hosts of global ranks, over gloo."""
    # A `bytearray`, because torch warns of memory that cannot be written.
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # The receiver cannot know the length of the text, so it comes first.
    return start(dist.isend, [(peer, part) for peer in peers for part in (torch.tensor([len(text)]), tensor)], group)


def receive_text(peer: int, group: ProcessGroup) -> bytes:
    """Wait for the bytes of :func:`send_text`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(as_bytes(length), peer, group=group)
    text = torch.empty(int(length), dtype=torch.uint8)
    # Messages between the same two ranks arrive in the order in which they were sent.
    dist.recv(text, peer, group=group)
    return text.numpy().tobytes()


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, so that the backend need not support its dtype."""
    return tensor.view(-1).view(torch.uint8)

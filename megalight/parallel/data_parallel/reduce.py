"""Gradient reduction: reduce-scatter over data-parallel ranks, and sums of partial gradients over other axes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.imports import torch_distributed
from megalight.ops.sum_terms import sum_terms
from megalight.parallel.data_parallel.buffers import Bucket, FlatShard
from megalight.parallel.data_parallel.communication import TransportChoice
from megalight.parallel.data_parallel.gather import finish
from megalight.parallel.peers import driver, spin
from megalight.parallel.peers.memory import BOUNDARY, Flag, PeerMemory
from megalight.parallel.peers.spin import PeerCopyStream, Watch

SLOT_BYTES = 64 << 20
"""Largest size of a slot, for the terms of all peers together. Larger ones gain nothing: a piece takes 0.2 ms."""


class PushedSums:
    """Slots for terms of gradients, and the copies into those of peers.

    Each rank pushes its term of a peer's interval into a slot of that peer's symmetric memory. The owner sums the
    terms in the order of ranks, in float32, in one kernel. Copies occupy no SM, so the computation beside them
    keeps all of them. An interval travels in pieces of the size of a slot: two slots in turn serve gradients of any
    size, and one piece is summed while the next one travels.

    All ranks sum the same gradients in the same order. So each wait is for something that the peer has queued
    before its own wait.

    Args:
        device: of the gradients.

    Attributes:
        without: why some groups that were asked for have no slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.without: list[str] = []
        self._copies = PeerCopyStream()
        self._slots: dict[ProcessGroup, tuple[PeerMemory, Watch]] = {}
        # Copies may still be on their way when a run is dropped, and they must not meet memory that is gone.
        weakref.finalize(self, finish, device).atexit = False

    def serve(self, buckets: Sequence[Bucket], wire_dtype: torch.dtype | None, choice: TransportChoice) -> None:
        """Let the gradients of units be summed here; those of all buckets, if none is reduced by units.

        Args:
            buckets: all of them. Their ranks call this together.
            wire_dtype: dtype in which gradients are sent; None: that of the buffers.
            choice: decides which groups of ranks do so.
        """
        # Others may be sent at different times on different ranks: those of a parameter that a rank does not use come
        # last there. Where they met gradients of units, ranks would wait for each other.
        for bucket in [bucket for bucket in buckets if bucket.shards_grads] or buckets:
            if bucket.shard_group is None:
                continue
            if (reason := choice.why_not_over(bucket.shard_group)) is not None:
                self.without.append(reason)
                continue
            itemsize = (wire_dtype or bucket.grads.dtype).itemsize
            self.reserve(bucket.shard_group, (bucket.kept[1] - bucket.kept[0]) * itemsize)

    def reserve(self, group: ProcessGroup, nbytes: int) -> None:
        """Let the ranks of a group sum gradients. They call this together, and in the same order.

        Args:
            group: ranks among which gradients are divided, that copy engines may serve (:meth:`.Choice.why_not_over`).
            nbytes: the largest interval that a rank will sum; larger ones travel in more pieces.
        """
        if group not in self._slots:
            made = PeerMemory(group, exact=True)
            self._slots[group] = made, Watch(made)
        made, _ = self._slots[group]
        peers = len(made.others)
        # Each term begins at a boundary.
        row = min(-(-nbytes // BOUNDARY), SLOT_BYTES // peers // BOUNDARY) * BOUNDARY
        made.reserve(peers * max(row, BOUNDARY))

    def serves(self, group: ProcessGroup | None) -> bool:
        """Whether the ranks of a group have slots."""
        return group in self._slots

    def sum(self, terms: Tensor, group: ProcessGroup, out: Tensor, add: bool) -> None:
        """Sum gradients on the current stream, which waits until all terms are there.

        Args:
            terms: ``[numel]``, this rank's term of all intervals, one after the other. Free again when the stream is
                done.
            group: a group with slots.
            out: ``[numel / ranks]``, where the sum of this rank's interval goes; it may be this interval of ``terms``.
            add: add the sum to it instead.

        Raises:
            MegalightError: in an earlier call, a peer was missing.
        """
        made, watch = self._slots[group]
        watch.check()
        others, rank = made.others, made.rank
        current, copies = torch.cuda.current_stream(), self._copies
        length, most = len(terms) // made.size, made.capacity // len(others) // BOUNDARY * BOUNDARY // terms.itemsize
        copies.stream.wait_stream(current)
        for first in range(0, length, most):
            slot, piece = made.slot(0), slice(first, min(first + most, length))
            own = terms[rank * length + piece.start : rank * length + piece.stop]
            shape, dtype = tuple(own.shape), own.dtype
            with torch.cuda.stream(copies.stream):
                spin.wait_with(watch, slot.flags(Flag.FREE, others), made)
            for to in others:
                # The owner has a row for each of its peers, in the order of ranks.
                row = slot.view(to, shape, dtype, (rank - (rank > to)) * most)
                copies.push(slot, to, (row, terms[to * length + piece.start : to * length + piece.stop]))
            spin.wait_with(watch, slot.flags(Flag.READY, others), made)
            rows = [slot.view(rank, shape, dtype, row * most) for row in range(len(others))]
            sum_terms(out[piece], own, rows, rank, add=add)
            driver.raise_flags(current, slot.flags_at(Flag.FREE, others))
        # The terms have left, too.
        current.wait_stream(copies.stream)


reduce_scatter = torch_distributed("reduce_scatter_single", "reduce_scatter_tensor")


class Reducer:
    """Reduces a bucket's gradients so that this rank's interval holds the sum over all ranks.

    Args:
        scatter: every rank needs only its own interval (reduce-scatter); otherwise it needs all (all-reduce).
        wire_dtype: dtype in which gradients are sent and summed; None: the buffer's.
        fp32_accumulation: exchange the intervals (all-to-all, with the same number of bytes) and sum them here in
            float32, so that the sum of low-precision gradients loses no precision, however many ranks there are. False:
            the collective sums. It needs ``scatter``.
        pushed: sums the gradients of the groups that it serves, in float32 whatever ``fp32_accumulation`` says.
    """

    def __init__(
        self, scatter: bool, wire_dtype: torch.dtype | None, fp32_accumulation: bool, pushed: PushedSums | None = None
    ) -> None:
        self.scatter = scatter
        self.wire_dtype = wire_dtype
        self.exchange = fp32_accumulation
        self._pushed = pushed

    def start(self, bucket: Bucket) -> Callable[[], Tensor]:
        """Start reducing ``bucket.grads`` over the bucket's group.

        Returns:
            a function that waits and returns the reduced gradients of this rank's interval: a slice of the buffer, or
            with scattering a new tensor if they were summed in a wider dtype.
        """
        if self._pushes(bucket):
            own, dtype = bucket.own_grads, self.sum_dtype(bucket.grads.dtype)
            # Sums in a wider dtype stay wide: the optimizer reads them before they are rounded.
            return self._push(bucket, own if own.dtype == dtype else torch.empty_like(own, dtype=dtype), add=False)
        return self._start(bucket, bucket.own_grads)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the sums of gradients of this dtype: the wider one of buffer and sum."""
        wide = torch.promote_types(dtype, self.wire_dtype or dtype)
        return torch.promote_types(wide, torch.float32) if self.exchange else wide

    def start_adding(self, bucket: Bucket, first: bool) -> Callable[[], Tensor]:
        """Start reducing ``bucket.grads``, to add this rank's interval to ``bucket.own_grads``, which has own memory.

        Args:
            first: overwrite it instead.

        Returns:
            a function that waits and returns the sums. The gradients must not change before.
        """
        if self._pushes(bucket):
            return self._push(bucket, bucket.own_grads, add=not first)
        sums, dtype = bucket.own_grads, bucket.grads.dtype
        finish = self._start(bucket, sums if first and sums.dtype == dtype else torch.empty_like(sums, dtype=dtype))

        def add() -> Tensor:
            own = finish()
            if own is sums:
                return sums
            return sums.copy_(own) if first else sums.add_(own)

        return add

    def _pushes(self, bucket: Bucket) -> bool:
        return self.scatter and self._pushed is not None and self._pushed.serves(bucket.shard_group)

    def _sent(self, bucket: Bucket) -> Tensor:
        """Return the gradients as they are sent: the buffer itself, unless another dtype is asked for."""
        return bucket.grads if self.wire_dtype is None else bucket.grads.to(self.wire_dtype)

    def _push(self, bucket: Bucket, sums: Tensor, add: bool) -> Callable[[], Tensor]:
        """Sum this rank's interval into ``sums``, or add it there. Streams wait for it, not the host."""
        assert self._pushed is not None
        assert bucket.shard_group is not None
        sent = self._sent(bucket)
        if bucket.replica_group is None:
            self._pushed.sum(sent, bucket.shard_group, sums, add)
            return lambda: sums
        term = sums.new_empty(bucket.kept[1] - bucket.kept[0], dtype=self.sum_dtype(bucket.grads.dtype))
        self._pushed.sum(sent, bucket.shard_group, term, add=False)
        own = sum_replicas(term, bucket)
        if add:
            sums.add_(own)
        else:
            sums.copy_(own)
        return lambda: sums

    def _start(self, bucket: Bucket, out: Tensor) -> Callable[[], Tensor]:
        """Start reducing; ``out``: where this rank's interval goes, in the dtype of the buffer."""
        if bucket.group is None:
            return lambda: out
        sent = self._sent(bucket)
        # A single holder of all shards, as in pure replication, has nothing to exchange: the collective itself must sum
        # in the wide dtype.
        if self.exchange and bucket.shard_group is None:
            sent = sent.to(self.sum_dtype(sent.dtype))
        if self.exchange and bucket.shard_group is not None:
            return self._exchange(sent, bucket)
        if not self.scatter or not bucket.state_groups:
            term = sent
            work = dist.all_reduce(sent, group=bucket.group, async_op=True)
        elif bucket.shard_group is None:
            term, work = sent, None  # each rank holds all shards, and replicas divide them
        else:
            # In place where the dtypes agree: the result is this rank's interval of the buffer.
            own_size = bucket.kept[1] - bucket.kept[0]
            in_place = bucket.grads[slice(*bucket.kept)] if bucket.divides_replicas else out
            term = in_place if sent is bucket.grads else sent.new_empty(own_size)
            work = reduce_scatter(term, sent, group=bucket.shard_group, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            # Hybrid sharding: the sum over the ranks of one set of shards is a term of the sum over the sets.
            own = term
            if self.scatter and bucket.state_groups:
                own = sum_replicas(term, bucket, out if sent is bucket.grads else None)
            # Sums in a wider dtype stay wide: the optimizer reads them before they are rounded.
            if self.scatter and own.dtype.itemsize > bucket.grads.dtype.itemsize:
                return own
            return out if sent is bucket.grads else out.copy_(own)

        return finish

    @staticmethod
    def _exchange(sent: Tensor, bucket: Bucket) -> Callable[[], Tensor]:
        group = bucket.shard_group
        assert group is not None
        # Out of place: all terms of an interval must be there before any of them is added.
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        assert work is not None
        world = group.size()

        def finish() -> Tensor:
            work.wait()
            dtype = torch.promote_types(received.dtype, torch.float32)
            # `[world, n]`: one term from each rank, in rank order, so every run adds in the same order.
            return sum_replicas(received.view(world, -1).sum(0, dtype=dtype), bucket)

        return finish


def sum_replicas(term: Tensor, bucket: Bucket, out: Tensor | None = None) -> Tensor:
    """Sum the gradients of a shard over its replicas; each gets all of the sum, or the part whose masters it has.

    Args:
        term: this replica's sum.
        out: where a part of the sum goes; None: a new tensor. All of it stays in ``term``.
    """
    if bucket.replica_group is None:
        return term
    if not bucket.divides_replicas:
        dist.all_reduce(term, group=bucket.replica_group)
        return term
    own = term.new_empty(bucket.shard.numel) if out is None else out
    reduce_scatter(own, term, group=bucket.replica_group)
    return own


def partial_runs(shards: Mapping[int, FlatShard]) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
    """Return the elements of numbered shards that hold partial gradients: axes -> joined ``(number, start, stop)``."""
    runs: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
    for index, shard in shards.items():
        for piece, first, last, start in shard.intervals():
            if not piece.partial:
                continue
            stop = start + last - first
            of_axes = runs.setdefault(piece.partial, [])
            # Join it with the previous run if the two are adjacent.
            if of_axes and of_axes[-1][0] == index and of_axes[-1][2] == start:
                of_axes[-1] = index, of_axes[-1][1], stop
            else:
                of_axes.append((index, start, stop))
    return runs


class PartialReducer:
    """Sums partial gradients, which are one term per rank, over the axes that their pieces name.

    It needs one all-reduce per set of axes and dtype.

    Raises:
        LayoutError: ranks along the axes hold parameters of different sizes, so their intervals do not match.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.runs: list[tuple[ProcessGroup, list[tuple[int, int, int]]]] = []
        for mesh in dict.fromkeys(bucket.layout.kind.mesh for bucket in buckets):
            # Numbers of shards are those of all buckets, because gradients are looked up by them.
            own = [(i, bucket) for i, bucket in enumerate(buckets) if bucket.layout.kind.mesh == mesh]
            # By name: stages may come to tensors that they share in different orders.
            own.sort(key=lambda numbered: numbered[1].layout.kind.shared)
            shards = {i: bucket.shard for i, bucket in own}
            runs = partial_runs(shards)
            pieces = (piece for shard in shards.values() for spec, _ in shard.slots for piece in spec.pieces)
            # Sorted: groups are made, and fingerprints compared, in the same order on all ranks.
            for axes in sorted({piece.partial for piece in pieces if piece.partial}):
                group = mesh.group(*axes)
                if group is not None:
                    # Once, before training: intervals that do not match would add
                    # gradients of different elements.
                    _check_agreement(axes, shards.values(), group, device)
                    self.runs.append((group, runs.get(axes, [])))

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place; ``gradients`` are the reduced gradients of the shards, in the shards' order."""
        for group, runs in self.runs:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for index, start, stop in runs:
                gradient = gradients[index]
                by_dtype.setdefault(gradient.dtype, []).append(gradient[start:stop])
            for views in by_dtype.values():
                # One message for all of them: most partial gradients are those of norms and biases, a few kilobytes
                # each.
                joined = torch.cat(views)
                dist.all_reduce(joined, group=group)
                torch._foreach_copy_(views, list(torch.split(joined, [view.numel() for view in views])))


def _check_agreement(
    axes: tuple[str, ...], shards: Iterable[FlatShard], group: ProcessGroup, device: torch.device
) -> None:
    parts = [
        (piece.name, piece.offset, first, last)
        for shard in shards
        for piece, first, last, _ in shard.intervals()
        if piece.partial == axes
    ]
    # One MAX reduction of (x, -x) gives the largest and the smallest fingerprint; they are equal if all ranks agree.
    fingerprint = zlib.crc32(repr(parts).encode())
    extremes = torch.tensor([fingerprint, -fingerprint], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        raise LayoutError(
            f"ranks along {' x '.join(axes)} keep different parts of partial gradients; parameters whose gradients are "
            "summed over these axes must come in the same order and sizes on each of them."
        )

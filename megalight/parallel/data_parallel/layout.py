"""The position of every parameter in the flat buffers, and each data-parallel rank's part: arithmetic only.

Parameters with the same dtypes, data axes, optimizer group and pipeline chunk are packed in *reverse*
registration order, so that the first bucket is the first one complete in the backward pass. Every parameter starts at a
multiple of :data:`ALIGNMENT` elements. Every bucket ends at a multiple of ``world * SHARD_ALIGNMENT``, so that all
ranks hold equal, aligned intervals. One parameter may lie on several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megalight.errors import ConfigurationError, nearest
from megalight.ops.quantize.formats import DTYPES, Format
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.parallel.shard import ShardSpec

ALIGNMENT = 64
"""Alignment of the start of each parameter, in elements."""
SHARD_ALIGNMENT = 128
"""Each rank's interval is a multiple of this number of elements."""
MIN_BUCKET = 40_000_000
"""Default minimum size of a bucket, in elements: large enough for full link bandwidth."""
MIN_SHARD = 1_000_000
"""Default minimum size of a rank's interval of a bucket, in elements."""


@dataclass(frozen=True)
class Level:
    """What data-parallel ranks divide among themselves: three independent choices.

    Attributes:
        state: masters and optimizer state.
        gradients: gradients, from one micro-batch to the next.
        parameters: parameters, except those of the layer that runs.
    """

    state: bool
    gradients: bool = False
    parameters: bool = False


LEVELS = {
    "no_shard": Level(state=False),
    "optim": Level(state=True),
    "optim_grads": Level(state=True, gradients=True),
    "optim_grads_params": Level(state=True, gradients=True, parameters=True),
}
REPLICA_AXES = ("dp", "edp")
"""Axes whose ranks hybrid sharding divides into groups."""


def level_of(name: str) -> Level:
    """Return the level called ``name``.

    Raises:
        ConfigurationError: no such level is available.
    """
    if name not in LEVELS:
        raise ConfigurationError(
            f"data_parallel.level={name!r}; it must be one of {', '.join(LEVELS)}." + nearest(str(name), LEVELS)
        )
    return LEVELS[name]


@dataclass(frozen=True)
class BucketKey:
    """What the parameters of one bucket have in common.

    Attributes:
        param_dtype: dtype of the parameters.
        grad_dtype: dtype of the gradient buffer.
        group: index of the optimizer's parameter group.
        shared: name of a tensor that other pipeline stages hold as well. It has a bucket of its own, so that its
            intervals are the same on all these stages.
        chunk: index of the model chunk on this rank. The last micro-batch leaves the chunks at different times.
        storage_format: the 8-bit format in which parameters are stored, instead of ``param_dtype``.
        mesh: the mesh over which their model is split.
        data: mesh axes over which their gradients are summed and their state is sharded.
        unit: number of the unit to which they belong, in the order of the forward pass; None: they are always resident.
            All parameters of a unit and kind share one bucket.
        replicate: number of groups of neighboring ranks, each of which holds all shards (hybrid sharding).
        divide_replicas: the ranks that hold the same shard divide its masters and optimizer state among themselves.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    group: int
    shared: str = ""
    chunk: int = 0
    storage_format: Format | None = None
    mesh: ParallelMesh = field(default_factory=ParallelMesh)
    data: tuple[str, ...] = TOKEN_AXES
    unit: int | None = None
    replicate: int = 1
    divide_replicas: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype in which parameters are stored and sent: that of their quantized values, if they have any."""
        return self.param_dtype if self.storage_format is None else DTYPES[self.storage_format]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks over which gradients are summed."""
        return self.mesh.ranks(*self.data)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold different shards."""
        return tuple(f"{axis}%{self._run(axis)}" if self._replicates(axis) else axis for axis in self.data)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold the same shard."""
        return tuple(f"{axis}/{self._run(axis)}" for axis in self.data if self._replicates(axis))

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Global ranks that hold all shards together."""
        return self.mesh.ranks(*self.shard_axes)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Global ranks that hold this rank's shard."""
        return self.mesh.ranks(*self.replica_axes)

    @property
    def place(self) -> int:
        """Index of this process in :attr:`shard_ranks`."""
        return self.shard_ranks.index(self.mesh.global_rank)

    @property
    def holders(self) -> tuple[int, ...]:
        """Global ranks that hold the same masters as this one."""
        return (self.mesh.global_rank,) if self.divide_replicas else self.replica_ranks

    @property
    def parts(self) -> int:
        """Number of different parts of the masters."""
        return len(self.shard_ranks) * len(self.replica_ranks) // len(self.holders)

    def _replicates(self, axis: str) -> bool:
        return self.replicate > 1 and axis in REPLICA_AXES

    def _run(self, axis: str) -> int:
        """Return the number of neighbors along an axis that hold different shards."""
        size = self.mesh.size(axis)
        if size % self.replicate:
            raise ConfigurationError(
                f"replicate={self.replicate} does not divide the {size} ranks along {axis}, so that they form no equal "
                "groups that hold all shards each; choose a divisor."
            )
        return size // self.replicate


@dataclass(frozen=True)
class BucketSlot:
    """One parameter's place in a bucket: elements ``[start, stop)``; ``index`` is its registration index."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket, in buffer order, and its size in elements, padding included."""

    kind: BucketKey
    slots: tuple[BucketSlot, ...]
    numel: int

    def interval(self, place: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of one of the ranks that hold all shards together."""
        share = self.numel // len(self.kind.shard_ranks)
        return place * share, (place + 1) * share

    def state_interval(self) -> tuple[int, int]:
        """Return the elements of this process's masters: its interval, or its replica's part of that."""
        kind, (start, stop) = self.kind, self.interval(self.kind.place)
        if not kind.divide_replicas:
            return start, stop
        share, replica = self.numel // kind.parts, kind.replica_ranks.index(kind.mesh.global_rank)
        return start + replica * share, start + (replica + 1) * share


def align(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def default_bucket_size(world: int) -> int:
    """Return the default bucket size, in elements."""
    return max(MIN_BUCKET, MIN_SHARD * world)


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[BucketKey], bucket_size: int | None = None, edge_size: int | None = None
) -> list[BucketLayout]:
    """Assign parameters to buckets.

    Args:
        sizes: elements of each parameter, in registration order.
        kinds: kind of each.
        bucket_size: elements; a bucket closes once it holds at least as many. None: chosen from the number of ranks.
        edge_size: the same for the first ``bucket_size`` elements of each kind. These are reduced last, when no
            backward pass is left to hide the message, and gathered first, while the forward pass waits.

    Returns:
        the buckets in the order in which the backward pass should complete them: by each bucket's first-registered
        parameter, descending.
    """
    open_slots: dict[BucketKey, list[BucketSlot]] = {}
    buckets: list[BucketLayout] = []

    def close(kind: BucketKey) -> None:
        slots = open_slots.pop(kind)
        # Reduce-scatter and all-gather need equal intervals on all ranks.
        buckets.append(BucketLayout(kind, tuple(slots), align(slots[-1].stop, kind.parts * SHARD_ALIGNMENT)))

    # Elements of each kind that have no place yet. Once they fit into one bucket, the edge has begun.
    left: dict[BucketKey, int] = {}
    for size, kind in zip(sizes, kinds, strict=True):
        left[kind] = left.get(kind, 0) + size
    # Backward passes complete gradients in about the reverse order of registration.
    for index in reversed(range(len(sizes))):
        kind = kinds[index]
        limit: float = bucket_size or default_bucket_size(len(kind.shard_ranks))
        if kind.unit is not None:
            # One bucket per unit and kind: its memory is lent and taken back as a whole.
            limit = math.inf
        elif edge_size is not None and left[kind] <= limit:
            limit = edge_size
        left[kind] -= sizes[index]
        slots = open_slots.setdefault(kind, [])
        if slots and slots[-1].stop >= limit:  # the bucket grew under the larger limit; now the edge limit holds
            close(kind)
            slots = open_slots.setdefault(kind, [])
        start = align(slots[-1].stop, ALIGNMENT) if slots else 0
        slots.append(BucketSlot(index, start, sizes[index]))
        if slots[-1].stop >= limit:
            close(kind)
    for kind in list(open_slots):
        close(kind)
    # The last slot of a bucket arrives last. All ranks compute this order from the same sizes
    # and kinds, and start their collectives in it.
    return sorted(buckets, key=lambda bucket: -bucket.slots[-1].index)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, with what the engine needs to know about it.

    Attributes:
        name: its name in the local model, for messages.
        parameter: the object. It keeps its identity; its storage moves into a flat buffer. It may have no memory yet:
            its values may come after the engine is built.
        spec: the canonical pieces that it holds.
        group: index of its optimizer parameter group.
        chunk: index of the model chunk on this rank that holds it, in model order.
        mesh: the mesh over which its model is split; None: the engine's mesh.
        unit: number of the unit that holds it; None: none does. See :mod:`~megalight.parallel.data_parallel.unshard`.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    group: int
    chunk: int = 0
    mesh: ParallelMesh | None = None
    unit: int | None = None

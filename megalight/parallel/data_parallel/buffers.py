"""Flat buffers: parameters and gradients are views of them, and each rank's optimizer updates its masters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.imports import has_grad_dtype, torch_distributed
from megalight.ops.parameter import cast_of, release, state_of
from megalight.parallel.data_parallel.layout import BucketKey, BucketLayout, ParamInfo
from megalight.parallel.host_memory import host_memory
from megalight.parallel.initial_values import is_materialized, unmaterialized
from megalight.parallel.shard import ShardPiece, ShardSpec

Allocating = Callable[[], AbstractContextManager[object]]
"""Returns a context inside of which tensors are allocated in a certain way."""

all_gather = torch_distributed("all_gather_single", "all_gather_into_tensor")


@dataclass(frozen=True)
class Groups:
    """The process groups of a bucket; None for a single rank.

    Attributes:
        data: ranks over which gradients are summed.
        shards: ranks that hold all shards together.
        replicas: ranks that hold the same shard.
    """

    data: ProcessGroup | None
    shards: ProcessGroup | None
    replicas: ProcessGroup | None


class FlatParameters:
    """Parameters that lie end to end in one flat tensor. On its own: those of one unit that are frozen and sharded.

    Args:
        layout: the position of every parameter.
        infos: all parameters that layouts count.
        groups: the ranks that share them.
        divided: each rank keeps only the masters of its own interval.
        params: ``[numel]`` memory that the whole parameters share with those of other units; None: memory of their own.
        gathering: the ranks of ``groups.shards``, over the communicator of units; None: the same one.
        allocating: a context in which the memory of messages is allocated.
        whole: ``[numel]`` memory for parameters that stay whole, in the dtype in which they are stored; None: memory of
            their own.

    Attributes:
        group: ranks over which gradients are summed; None for a single rank.
        shard_group: ranks among which the masters are divided; None: each rank has all masters.
        unit_group: the same ranks, where units are gathered.
        replica_group: ranks that hold the same masters, if these are divided; None for a single rank.
        state_groups: groups over which masters are divided, one after the other: first the shards among ranks, then,
            if that is wanted, a shard among its replicas.
        params: ``[numel]`` flat parameters, or their 8-bit values; the parameters are views of it.
        own_params: the interval of the parameters that this rank keeps: a view of :attr:`params`, or memory of its own
            if the whole parameters come and go.
        kept: ``(start, stop)``, the elements that :attr:`own_params` holds.
        updated: the part of :attr:`own_params` that this rank's optimizer updates.
        shards_params: whether this rank keeps only its interval of them.
        shown: ``[numel]`` the flat parameters of which the parameters are views now; one NaN if they have no memory.
        shard: this rank's part.
        is_quantized: whether the parameters are 8-bit values; the precision of each weight holds its scale.
    """

    def __init__(
        self,
        layout: BucketLayout,
        infos: Sequence[ParamInfo],
        groups: Groups,
        divided: bool,
        params: Tensor | None = None,
        gathering: ProcessGroup | None = None,
        allocating: Allocating = nullcontext,
        whole: Tensor | None = None,
    ) -> None:
        kind, storage_format, stored = layout.kind, layout.kind.storage_format, layout.kind.stored_dtype
        self.layout = layout
        self.group = groups.data
        # Without divided masters every rank steps all of them: gradients are still
        # summed over `group`, and nothing is gathered.
        self.shard_group = groups.shards if divided else None
        self.unit_group = gathering or groups.shards if divided else None
        self.replica_group = groups.replicas if divided else None
        self.infos = [infos[slot.index] for slot in layout.slots]
        self.shards_params = params is not None
        self.is_quantized = storage_format is not None
        device = self.infos[0].parameter.device
        self.divides_replicas = kind.divide_replicas and self.replica_group is not None
        own_groups = (self.shard_group, self.replica_group if self.divides_replicas else None)
        self.state_groups = [group for group in own_groups if group is not None]
        self.kept = layout.interval(kind.place) if divided else (0, layout.numel)
        interval = layout.state_interval() if divided else self.kept
        # In the parameters' own dtype: they become the parameters, or, with quantized values, only the source of the
        # masters.
        if whole is not None and storage_format is None:
            values = whole
        else:
            with nullcontext() if self.shards_params or storage_format is not None else allocating():
                values = torch.zeros(layout.numel, dtype=kind.param_dtype, device=device)
        for parameter, view in self._views(values):
            if is_materialized(parameter):
                view.copy_(parameter.detach())
            elif storage_format is None:
                view.fill_(torch.nan)  # the values come later; NaN shows parameters that never got any
        own = values[slice(*self.kept)]
        if params is not None:
            # The whole tensor was needed only to cut this rank's interval from it, and is freed here.
            with allocating() if storage_format is None else nullcontext():
                own = own.clone()
            values = params
        if storage_format is None:
            self.params, self.own_params = values, own
        else:
            with allocating():
                if whole is None:
                    whole = values if self.shards_params else torch.zeros(layout.numel, dtype=stored, device=device)
                self.params = whole
                place = self.params[slice(*self.kept)]
                self.own_params = torch.zeros_like(place) if self.shards_params else place
        self.updated = self._updated(*interval)
        self._nowhere = self._no_memory()
        self.show(self.params)
        if self.shards_params:
            self.vacate()
        # Undivided masters are equal on all data-parallel ranks, so the ranks
        # share the counting and the writing.
        replicas = kind.holders if divided else kind.ranks
        slots = [(info.spec, slot.start) for info, slot in zip(self.infos, layout.slots, strict=True)]
        first = interval[0] - self.kept[0]
        master = own.detach()[first : first + interval[1] - interval[0]]
        self.shard = FlatShard(kind.group, *interval, master, slots, replicas)
        self.shard.place = replicas.index(kind.mesh.global_rank)

    def _no_memory(self) -> Tensor:
        return unmaterialized(torch.empty(2, dtype=self.params.dtype, device="meta"), self.params.device)

    def _updated(self, start: int, stop: int) -> Tensor:
        return self.own_params[start - self.kept[0] : stop - self.kept[0]]

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its place in a flat tensor of the bucket."""
        for info, slot in zip(self.infos, self.layout.slots, strict=True):
            yield info.parameter, flat[slot.start : slot.stop].view(info.parameter.shape)

    def show(self, flat: Tensor) -> None:
        """Let the parameters be views of a flat tensor of the bucket."""
        self.shown = flat
        for parameter, view in self._views(flat):
            parameter.data = view

    def addresses(self) -> dict[int, int]:
        """Return where each parameter, by its id, has its values."""
        return {id(parameter): view.data_ptr() for parameter, view in self._views(self.params)}

    def vacate(self) -> None:
        """Take the memory of the parameters away: they read NaN until :meth:`show`, and cannot be written."""
        self.shown = self._nowhere
        for info in self.infos:
            nan = self._nowhere[0] if info.parameter.numel() > 1 else self._nowhere[0].clone()  # one element: writable
            # Strides of 0: one element in memory serves the whole shape.
            info.parameter.data = nan.expand(info.parameter.shape)
            # It keeps casts of the whole weight, or the quantized values that another unit is about to overwrite.
            if (cast := cast_of(info.parameter)) is not None:
                cast.forget()

    def replaced(self) -> list[tuple[ParamInfo, Tensor]]:
        """Return the parameters that are no views of :attr:`shown` any more, each with its place there."""
        if self.shown is self._nowhere or self.is_quantized:
            return []
        # By address: `parameter.data = ...` keeps the object and its hooks, so
        # that nothing else shows the change.
        first, size = self.shown.data_ptr(), self.shown.element_size()
        return [
            (info, self.shown[slot.start : slot.stop].view(info.parameter.shape))
            for info, slot in zip(self.infos, self.layout.slots, strict=True)
            if info.parameter.data_ptr() != first + slot.start * size
        ]

    def gathered(self, own: Tensor) -> Tensor:
        """Return a flat tensor ``[numel]`` of the whole bucket, on the device, from every rank's interval of it."""
        own = own.to(self.params.device)  # masters may be on the host
        for group in reversed(self.state_groups):
            whole = own.new_empty(own.numel() * group.size())
            all_gather(whole, own, group=group)
            own = whole
        return own

    @property
    def weights(self) -> Tensor:
        """This rank's interval of the parameters: to read, and to write before the masters are refreshed."""
        return self.shard.master.detach() if self.is_quantized else self.updated


class Bucket(FlatParameters):
    """The storage of one bucket: flat parameters, flat gradients, and this rank's masters.

    Args:
        layout, infos, groups, divided, params, gathering, allocating, whole: as for :class:`FlatParameters`.
        master_dtype: dtype of the masters.
        grads: ``[numel]`` memory that the gradients share with those of other units; None: memory of their own.
        sum_dtype: dtype of the sums over ranks and micro-batches; only used with ``grads``.
        on_host: keep the masters in host memory, as separate copies. See
            :class:`~megalight.parallel.data_parallel.parameters.HostMasters`.

    Attributes:
        on_host: whether the masters are in host memory.
        reduced: the reduced gradients of this rank's interval, on the device; None: they are not complete.
        grads: ``[numel]`` flat gradients.
        own_grads: the interval of them that this rank keeps: a view of :attr:`grads`, or memory of its own, which sums
            them over micro-batches.
        shards_grads: whether this rank keeps only its interval of them.
        main_grads: every parameter with its view of :attr:`grads`.
        arrived: number of parameters whose gradients of the last micro-batch are complete.
        sent: whether the reduction of the gradients has started.
        master_is_own_params: whether the optimizer updates the parameters' storage itself.
    """

    def __init__(
        self,
        layout: BucketLayout,
        infos: Sequence[ParamInfo],
        groups: Groups,
        divided: bool,
        master_dtype: torch.dtype,
        params: Tensor | None = None,
        grads: Tensor | None = None,
        sum_dtype: torch.dtype | None = None,
        on_host: bool = False,
        gathering: ProcessGroup | None = None,
        allocating: Allocating = nullcontext,
        whole: Tensor | None = None,
    ) -> None:
        super().__init__(layout, infos, groups, divided, params, gathering, allocating, whole)
        self.on_host = on_host
        self.reduced: Tensor | None = None
        shard, dtype = self.shard, layout.kind.grad_dtype
        self.shards_grads = grads is not None
        with allocating():
            self.grads = torch.zeros(layout.numel, dtype=dtype, device=self.params.device) if grads is None else grads
            self.own_grads = self.grads[shard.start : shard.stop]
            if self.shards_grads:
                # The sums of a step outlive the memory that is lent to one micro-batch. They may be wider than it is.
                self.own_grads = torch.zeros_like(self.own_grads, dtype=sum_dtype)
        self.main_grads = list(self._views(self.grads))
        self.arrived = 0
        self.sent = False
        own = shard.master  # the values in the parameters' own dtype, also of parameters that are quantized
        self.master_is_own_params = not self.is_quantized and master_dtype == own.dtype and not on_host
        # With equal dtypes the optimizer steps on the parameters' own memory, so no copy must be kept in step with it.
        if self.master_is_own_params:
            master = own
        elif on_host:
            master = host_memory(own.shape, master_dtype, own.device).copy_(own)
        else:
            master = own.to(master_dtype, copy=True)
        # Optimizers of torch take leaves only.
        shard.master = master.requires_grad_()
        state_of(shard.master).master_copy = not self.master_is_own_params

    @torch.no_grad()
    def widen(self, params: Tensor | None = None) -> None:
        """Turn parameters that are quantized back into their own dtype, with the values of the masters.

        Args:
            params: memory in that dtype that sharded parameters share with those of other units.
        """
        dtype = self.layout.kind.param_dtype
        if params is not None:
            self.vacate()  # nothing shows the quantized values any more, and no cast of them stays
            self.params, self.own_params = params, self.shard.master.detach().to(dtype)
            self.updated, self.is_quantized = self.own_params, False
            self._nowhere = self._no_memory()
            self.vacate()
            return
        self.params = torch.zeros(self.layout.numel, dtype=dtype, device=self.params.device)
        self.own_params = self.params[self.shard.start : self.shard.stop]
        self.updated = self.own_params
        self.is_quantized = False
        self.own_params.copy_(self.shard.master)
        # In place: each rank has just written its own interval of `params`.
        if self.shard_group is not None:
            all_gather(self.params, self.own_params, group=self.shard_group)
        self.show(self.params)

    def drop_gradients(self) -> None:
        """Give gradients back to autograd, and free the memory of the buffer."""
        for parameter, _ in self.main_grads:
            release(parameter)
        self.set_reduced(None)
        self.grads, self.main_grads = self.grads.new_empty(0), []
        self.own_grads = self.grads

    def set_reduced(self, gradient: Tensor | None) -> None:
        """Give the optimizer the reduced gradient, or take it away. Masters on the host get it when a step begins."""
        self.reduced = gradient
        self.shard.master.grad = None if self.on_host else gradient

    @property
    def autograd_adds(self) -> bool:
        """Whether ``parameter.grad`` may be the buffer's view itself, so that autograd adds into it."""
        return self.grads.dtype == self.params.dtype or has_grad_dtype()

    def gaps(self) -> list[Tensor]:
        """Return the parts of :attr:`grads` that belong to no parameter."""
        starts = [slot.start for slot in self.layout.slots[1:]] + [self.layout.numel]
        gaps = zip((slot.stop for slot in self.layout.slots), starts, strict=True)
        return [self.grads[low:high] for low, high in gaps if low < high]

    @property
    def rounds_masters(self) -> bool:
        """Whether the parameters are the masters rounded to a narrower dtype (and not quantized values with scales)."""
        return not (self.master_is_own_params or self.is_quantized)


def masters_of(kind: BucketKey, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the masters of parameters of one kind.

    Args:
        wanted: a dtype, for parameters whose values it holds exactly; None: float32 or wider.
    """
    # Small updates vanish in half precision: a step is often below half a unit in the last place of the weight. So
    # float32, unless somebody asks for less.
    if wanted is not None and _holds(wanted, kind):
        return wanted
    return torch.promote_types(kind.param_dtype, torch.float32)


def check_masters(kinds: Sequence[BucketKey], wanted: torch.dtype | None) -> None:
    """Check that some parameters can have the masters that were asked for.

    Raises:
        ConfigurationError: none can, or parameters are quantized.
    """
    if wanted is None or not kinds:
        return
    name = str(wanted).removeprefix("torch.")
    if wanted.itemsize < 4 and any(kind.storage_format is not None for kind in kinds):
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} with weights stored in FP8 (primary_weights), which are cast "
            "from float32 masters; leave one of the two out."
        )
    if not any(_holds(wanted, kind) for kind in kinds):
        found = ", ".join(sorted({str(kind.param_dtype).removeprefix("torch.") for kind in kinds}))
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} and weights in {found}, whose values such masters cannot hold. Leave "
            "it out, or train bfloat16 weights: Trainer(precision='bf16-true'), or 'bf16-mixed' with MegatronStrategy."
        )


def _holds(wanted: torch.dtype, kind: BucketKey) -> bool:
    return torch.promote_types(kind.param_dtype, wanted) == wanted


SCALARS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number per parameter."""


@dataclass(eq=False)
class FlatShard:
    """The interval of one bucket for which this rank holds the optimizer state.

    Attributes:
        group: index of the optimizer's parameter group.
        start, stop: the interval, in elements of the bucket.
        master: ``[stop - start]`` leaf tensor that the optimizer updates. ``master.grad`` is set once gradients are
            reduced. If it has the parameters' own dtype, it shares their storage; its state (``master_copy``) says so.
        slots: ``(spec, first element in the bucket)`` of every parameter in the bucket.
        replicas: ranks that hold this same shard. They divide the work that must be done only once: counting for the
            norm, writing to a checkpoint.
        place: index of this rank in ``replicas``.
    """

    group: int
    start: int
    stop: int
    master: Tensor
    slots: Sequence[tuple[ShardSpec, int]] = field(repr=False)
    replicas: tuple[int, ...] = (0,)
    place: int = 0

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tensor:
        """Return a view of the master at elements ``[start, stop)`` of the bucket, which must lie in this shard."""
        return self.master.detach()[start - self.start : stop - self.start]

    def fill(self, offset: int, values: Tensor) -> None:
        """Copy the part of ``values`` that lies in this shard; ``values`` start at element ``offset`` of the bucket."""
        low, high = max(self.start, offset), min(self.stop, offset + values.numel())
        if low < high:
            part = values.reshape(-1)[low - offset : high - offset]
            self.master[low - self.start : high - self.start] = part

    def multiply(self, offset: int, factors: Tensor) -> None:
        """Multiply the part that ``factors`` meet in this shard; they start at element ``offset`` of the bucket."""
        low, high = max(self.start, offset), min(self.stop, offset + factors.numel())
        if low < high:
            part = self.part(low, high)
            part.copy_(part * factors.reshape(-1)[low - offset : high - offset].to(part.device))

    def intervals(self) -> Iterator[tuple[ShardPiece, int, int, int]]:
        """Yield the parts of canonical pieces that lie in this shard.

        Yields:
            piece, first, last, shard_start: elements ``[first, last)`` of the flattened piece lie at ``shard_start`` of
            the shard. Elements that no interval covers are padding.
        """
        for spec, offset in self.slots:
            low, high = max(self.start, offset), min(self.stop, offset + spec.numel)
            if low < high:
                for piece, first, last in spec.cut(low - offset, high - offset):
                    yield piece, first, last, offset + piece.start + first - self.start

    def counted_runs(self) -> list[tuple[int, int]]:
        """Return the elements ``[start, stop)`` of the shard that this rank counts, in as few runs as possible.

        Pieces that another rank owns are left out, and so are elements inside parameters that no piece covers
        (vocabulary padding). Gaps *between* parameters hold zeros; they are included, so that a shard is usually one
        run. If several ranks hold the same shard, each counts an equal interval.
        """
        # Each replica of the shard counts one of equal intervals.
        bounds = [self.numel * n // len(self.replicas) for n in (self.place, self.place + 1)]
        excluded = [(0, bounds[0]), (bounds[1], self.numel)]
        for spec, offset in self.slots:
            base, covered = offset - self.start, 0
            for piece in sorted(spec.pieces, key=lambda piece: piece.start):
                # Another rank counts the piece. It stays part of the excluded gap.
                if not piece.owner:
                    continue
                excluded.append((base + covered, base + piece.start))  # elements between pieces: padding
                covered = piece.stop
            excluded.append((base + covered, base + spec.numel))
        # The complement of the excluded intervals, in one pass over them in order.
        runs: list[tuple[int, int]] = []
        position = 0
        for low, high in sorted(excluded):
            low, high = max(low, 0), min(high, self.numel)
            if low < high:
                if position < low:
                    runs.append((position, low))
                # Excluded intervals may overlap: those inside parameters, and those of other replicas.
                position = max(position, high)
        if position < self.numel:
            runs.append((position, self.numel))
        return runs


def history(state: Mapping[str, Any]) -> Hashable:
    """Return what parameters must have in common to be stepped together: names and counts of their states."""
    numbers = (int, float)
    return tuple(
        (name, float(value) if name in SCALARS or isinstance(value, numbers) else None)
        for name, value in sorted(state.items())
    )

"""The data-parallel engine: flat buffers, gradients reduced as they arrive, parameters gathered when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, MegalightError
from megalight.ops.parameter import storage_format_of
from megalight.parallel.data_parallel.buffers import (
    Bucket,
    FlatShard,
    Groups,
    check_masters,
    masters_of,
)
from megalight.parallel.data_parallel.communication import TransportChoice, UserBuffers
from megalight.parallel.data_parallel.gather import Pushes
from megalight.parallel.data_parallel.grad_hooks import UnusedParameters
from megalight.parallel.data_parallel.grad_norm import check_finite
from megalight.parallel.data_parallel.gradients import MainGradients
from megalight.parallel.data_parallel.layout import (
    BucketKey,
    BucketLayout,
    Level,
    ParamInfo,
    level_of,
    plan_buckets,
)
from megalight.parallel.data_parallel.options import DTYPES, DataParallelOptions
from megalight.parallel.data_parallel.parameters import HostMasters, ShardedParameters, fill, offloaded
from megalight.parallel.data_parallel.reduce import PushedSums, Reducer
from megalight.parallel.data_parallel.unit_memory import (
    GRADIENT_BUFFERS,
    PassOrder,
    Room,
    RotatingBuffers,
    UnitMemory,
    choose,
    free_memory,
)
from megalight.parallel.data_parallel.unshard import FrozenShards, Units, can_be_sharded
from megalight.parallel.mesh import ParallelMesh, check_max_ctas, new_group, shared_group
from megalight.parallel.shard import ShardSpec
from megalight.parallel.trace import spanned


def _shared(spec: ShardSpec) -> str:
    """Return the tensor's name if other pipeline stages hold it as well, else an empty string."""
    # Such a tensor is a tied weight: the first and the last stage each have one term of its gradient.
    return next((p.name for p in spec.pieces if any(axis.startswith("pp") for axis in p.partial)), "")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def groups_of(kind: BucketKey, max_ctas: int | None, purpose: str = "data parallelism") -> Groups:
    """Return the process groups of the buckets of a kind, over communicators for this purpose alone.

    Their communicators are for data parallelism alone. A communicator sends one message after the other, and
    buckets take long: what the next layer waits for (counts of tokens, keys of other ranks, sums) would queue
    behind all of them.
    """
    made: dict[tuple[int, ...], ProcessGroup | None] = {}

    def group(*axes: str) -> ProcessGroup | None:
        # The same ranks under other names of axes share a group: a second one
        # would cost a communicator of its own.
        ranks = kind.mesh.ranks(*axes)
        if ranks not in made:
            if len(ranks) == 1:
                made[ranks] = None
            elif max_ctas is not None:
                check_max_ctas("max_ctas", max_ctas, dist.get_backend())
                made[ranks] = new_group(ranks, purpose, max_ctas=max_ctas)
            else:
                made[ranks] = shared_group(ranks, purpose)
        return made[ranks]

    return Groups(group(*kind.data), group(*kind.shard_axes), group(*kind.replica_axes))


class CopyEngines:
    """Decides what copy engines carry on this machine, and holds what carries it.

    Args:
        device: of the buffers.
        level: what is sharded. If it shards parameters, those outside of units are left to collectives.
        gathers: the way of parameters.
        reductions: the way of gradients. ``auto`` leaves those that no unit holds to collectives.

    Attributes:
        pushes: gathers parameters; None: collectives do.
        sums: sums gradients; None: collectives do.

    Raises:
        ConfigurationError: copy engines were asked for by name, and are not available.
    """

    def __init__(
        self, device: torch.device, level: Level, gathers: TransportChoice, reductions: TransportChoice
    ) -> None:
        self._gathers, self._reductions = gathers, reductions
        self._level = level
        summing = level.gradients or (level.state and reductions.way != "auto")
        self._no_sums = reductions.why_not(device) if summing else None
        self._no_pushes = gathers.why_not(device) if level.state else None
        self.sums = PushedSums(device) if summing and self._no_sums is None else None
        self.pushes = Pushes(device, gathers) if level.state and self._no_pushes is None else None

    def room(self, groups: Mapping[Any, Groups]) -> Room | None:
        """Return what makes buffers of units that peers fill, over the groups of each kind."""
        if self.pushes is None:
            return None
        pushes = self.pushes

        def make(layout: BucketLayout, numel: int, dtype: torch.dtype) -> Tensor | None:
            group = groups[layout.kind.mesh, layout.kind.data].shards
            assert group is not None, "a unit is sharded over several ranks"
            return pushes.room(numel, dtype, group)

        return make

    def whole(self, layouts: Sequence[BucketLayout], groups: Mapping[Any, Groups]) -> list[Tensor | None]:
        """Return memory for the parameters of each bucket that stays whole; None: it has memory of its own."""
        found: list[Tensor | None] = [None] * len(layouts)
        if self.pushes is None or self._level.parameters:
            return found
        together: dict[tuple[ProcessGroup, torch.dtype], list[int]] = {}
        for place, layout in enumerate(layouts):
            group = groups[layout.kind.mesh, layout.kind.data].shards
            if group is not None:
                together.setdefault((group, layout.kind.stored_dtype), []).append(place)
        for (group, dtype), places in together.items():
            rooms = self.pushes.rooms([layouts[place].numel for place in places], dtype, group)
            for place, room in zip(places, rooms or (), strict=rooms is not None):
                found[place] = room
        return found

    def serve(self, buckets: Sequence[Bucket], wire_dtype: torch.dtype | None) -> None:
        """Make room for the gradients of buckets; see :meth:`.PushedSums.serve`."""
        if self.sums is not None:
            self.sums.serve(buckets, wire_dtype, self._reductions)

    @property
    def reasons(self) -> dict[str, str]:
        """Option -> the way of its messages, and why; complete once all buffers are made."""
        found = {}
        for choice, nowhere, carrier in (
            (self._gathers, self._no_pushes, self.pushes),
            (self._reductions, self._no_sums, self.sums),
        ):
            if carrier is not None:
                found[choice.option] = choice.describe(carrier.without)
            elif nowhere is not None and choice.way == "auto":
                found[choice.option] = choice.describe([nowhere])
        return found


class DataParallelEngine:
    """Keeps parameters, gradients and masters in flat buffers and moves them between data-parallel ranks.

    One optimizer step::

        engine.zero_grad()
        with engine.micro_batches(len(batches)):
            for batch in batches:
                loss(batch).backward()
        engine.finish_grad_sync()
        norm = engine.grad_norm()
        optimizer.step()                 # on engine.shards, see megalight.optim.shard_optimizer
        engine.publish()

    All reductions are sums, so scale the loss. Parameters that need no gradient are left alone, but those of units are
    sharded where parameters are.

    Args:
        params: the local parameters, of one model or of several; a tied parameter may be listed several times.
        mesh: all ranks, and the split of all models without a mesh of their own; ``ParallelMesh()`` for one process.
        options: what the ranks shard, in which dtypes, and how they communicate.
        device: device of numbers that ranks exchange, if there are no parameters (a pipeline stage without any).
        units: the modules of each unit that ``ParamInfo.unit`` counts, in the order of the forward pass. Levels that
            shard gradients or parameters do so for these; everything else stays whole.
        route: the chunks of this rank, and the order of passes through them; None: all units are one chunk.

    Attributes:
        host: the masters in host memory. An optimizer's step is between ``host.begin()`` and :meth:`publish`.
        unit_memory: what was chosen for ``prefetch``, ``reduce_each_micro_batch``, ``gathers`` and ``reductions``, and
            why.
        units: the modules whose parameters or gradients are sharded; None: there are none.
        main_gradients: the gradient side. Code that replays recorded passes reports to it.
        shards: this rank's part of every bucket, in bucket order (last parameters of the model first).
        frozen_shards: what units hold beside the parameters that are trained, where it is sharded.

    Raises:
        ConfigurationError: ``max_ctas`` is set and the backend is not NCCL; or ``nccl_ub``, ``gathers`` or
            ``reductions`` is not available; or ``master_dtype`` can hold no parameter.
    """

    def __init__(
        self,
        params: Sequence[ParamInfo],
        mesh: ParallelMesh,
        options: DataParallelOptions | None = None,
        *,
        device: torch.device | None = None,
        units: Sequence[Sequence[nn.Module]] = (),
        route: PassOrder | None = None,
    ) -> None:
        self.mesh = mesh
        self.options = options = options or DataParallelOptions()
        self.level = level_of(options.level)
        # A tied parameter comes once: a second slot would send its gradient
        # twice, and count it twice in the norm.
        every = _distinct(params)
        self.infos = [info for info in every if info.parameter.requires_grad]
        self.unit_memory = UnitMemory(1, True, {})
        advanced, reduce_dtype = options.advanced, _dtype(options.reduce_dtype)
        master_dtype = _dtype(options.master_dtype)
        device = self.infos[0].parameter.device if self.infos else device or torch.device("cpu")
        self._route, self._units = route or PassOrder(), units
        nccl_ub = advanced.nccl_ub
        against = None if nccl_ub == "off" else f"nccl_ub={nccl_ub!r}: NCCL has the buffers"
        # One rank gathers nothing, and needs no stream of copies.
        gathers = "plain" if advanced.gathers == "auto" and mesh.everyone is None else advanced.gathers
        gathering = TransportChoice("gathers", gathers, against)
        reducing = TransportChoice("reductions", advanced.reductions, against)
        self._copy_engines = CopyEngines(device, self.level, gathering, reducing)
        in_fp32 = options.reduce_scatter_with_fp32_accumulation
        self._reducer = Reducer(self.level.state, reduce_dtype, in_fp32, self._copy_engines.sums)
        self._user_buffers = UserBuffers(nccl_ub if mesh.everyone is not None else "off", device)
        self.device = device
        self.buckets = self._make_buckets(_dtype(options.gradient_dtype), master_dtype)
        self._copy_engines.serve(self.buckets, reduce_dtype)
        self.shards: list[FlatShard] = [bucket.shard for bucket in self.buckets]
        self.main_gradients = MainGradients(
            self.buckets,
            mesh.everyone,
            self.device,
            self._reducer,
            options.overlap_grad_reduce,
            UnusedParameters(self.buckets, mesh.everyone, self.device, bool(options.find_unused_parameters)),
        )
        self.host = HostMasters([bucket for bucket in self.buckets if bucket.on_host], self.device)
        pushes = None if self.level.parameters else self._copy_engines.pushes
        self.parameters = ShardedParameters(self.buckets, self.device, options.overlap_param_gather, self.host, pushes)
        self.units: Units | None = None
        frozen = [info for info in every if not info.parameter.requires_grad]
        self.frozen_shards = self._shard_frozen(frozen)
        if any(bucket.shard_group is not None for bucket in self.buckets):
            self.unit_memory.reasons.update(self._copy_engines.reasons)
        sharded = [bucket for bucket in self.buckets if bucket.shards_params]
        self._addresses = {key: place for bucket in sharded for key, place in bucket.addresses().items()}
        # Once all buffers are there: what comes later would be registered by ranks at different times.
        self._user_buffers.register(
            group
            for bucket in (*self.buckets, *self.frozen_shards.buckets)
            for group in (bucket.group, bucket.shard_group, bucket.unit_group, bucket.replica_group)
        )
        # Level `optim_grads` shards gradients only, and a model may have units whose parameters are all frozen.
        if self.main_gradients.of_units.buckets or sharded or self.frozen_shards.all:
            self.units = Units(
                units,
                sharded,
                self.main_gradients.of_units,
                self.device,
                self._route,
                self.unit_memory.turns,
                pushes=self._copy_engines.pushes,
                frozen=self.frozen_shards,
            )
            self.parameters.unsharder = self.units.unsharder
            # Parameters outside of units may still be in flight when somebody asks for all parameters.
            self.units.sync = self.parameters.sync

    def _kind_of(self, info: ParamInfo, grad_dtype: torch.dtype | None = None) -> BucketKey:
        """Return the kind of a parameter.

        Args:
            info: the parameter.
            grad_dtype: dtype of its gradient buffer. None: float32, or float64 for float64 parameters.

        Raises:
            ConfigurationError: it is quantized, and replicas divide its masters.
        """
        kind = BucketKey(
            info.parameter.dtype,
            # Gradients of half precision are summed over micro-batches in float32, or small terms would be lost.
            grad_dtype or _wide(info.parameter.dtype),
            info.group,
            _shared(info.spec),
            info.chunk,
            storage_format_of(info.parameter),
            info.mesh or self.mesh,
            info.spec.data,
            replicate=self.options.replicate,
            divide_replicas=self.options.divides_optimizer,
        )
        if info.parameter.requires_grad and self.options.may_quantize:
            gathered = self.level.state and len(kind.shard_ranks) > 1
            # Beside wider masters, weights are copies, and quantized values are smaller ones.
            spared = gathered or masters_of(kind, None) != kind.param_dtype
            kind = replace(kind, storage_format=storage_format_of(info.parameter, spared))
        if kind.storage_format is not None and self.options.divides_optimizer:
            raise ConfigurationError(
                f"{info.name} is stored in FP8 (primary_weights), which each group of replicas casts from "
                "masters of its own; leave primary_weights out, or use advanced.replicate_optimizer=True."
            )
        # A single rank holds all shards. Gathers would only copy.
        if info.unit is None or not self.level.gradients or len(kind.shard_ranks) == 1:
            return kind  # always whole
        return replace(kind, unit=info.unit)

    def _make_buckets(self, grad_dtype: torch.dtype | None, master_dtype: torch.dtype | None) -> list[Bucket]:
        options, max_ctas = self.options, self.options.advanced.max_ctas
        kinds = [self._kind_of(info, grad_dtype) for info in self.infos]
        sizes = [info.parameter.numel() for info in self.infos]
        # One set of groups per mesh and data axes, not per bucket: making a group
        # is collective, and each costs buffers.
        ways = {(kind.mesh, kind.data): kind for kind in kinds}
        groups = {key: groups_of(kind, max_ctas) for key, kind in ways.items()}
        layouts = plan_buckets(sizes, kinds, options.bucket_size, options.advanced.edge_bucket_size)
        check_masters(kinds, master_dtype)
        params = grads = None
        device, allocating = self.device, self._user_buffers.allocating
        # All ranks ask each other how much memory is free, also pipeline stages without units.
        choices = options.prefetch, options.reduce_each_micro_batch
        asks = self.level.gradients and None in choices
        free = free_memory(device, self.mesh.everyone) if asks else None
        if any(layout.kind.unit is not None for layout in layouts):
            self.unit_memory = choose(layouts, self.level.parameters, *choices, free)
            if self.level.parameters:
                turns = self._route.turns(self._units, self.unit_memory.turns)
                params = RotatingBuffers(layouts, turns, device, allocating, self._copy_engines.room(groups))
            if self.unit_memory.reduce_each:
                turns = self._route.turns(self._units, GRADIENT_BUFFERS, backward_only=True)
                grads = RotatingBuffers(layouts, turns, device, allocating)
        reducing = groups
        if options.overlap_grad_reduce and any(layout.kind.unit is not None for layout in layouts):
            # Units are gathered and reduced by hooks, in one order on all ranks. Whole buckets are sent when their
            # gradients have arrived, which is not at the same time on all ranks: a bucket of a parameter that a rank
            # does not use is sent last there. Over one communicator, these messages would meet those of units.
            reducing = {key: groups_of(kind, max_ctas, "whole gradients") for key, kind in ways.items()}
        whole = self._copy_engines.whole(layouts, groups)
        on_host = offloaded(layouts, options.optimizer_offload_fraction)
        if any(layouts[index].kind.storage_format is not None for index in on_host):
            raise ConfigurationError(
                f"data_parallel.optimizer_offload_fraction={options.optimizer_offload_fraction} with weights "
                "stored in FP8 (primary_weights), which are cast from masters on the device; leave one of the "
                "two out."
            )
        return [
            Bucket(
                layout,
                self.infos,
                (groups if self._reduces_by_unit(layout) else reducing)[layout.kind.mesh, layout.kind.data],
                self.level.state,
                masters_of(layout.kind, master_dtype),
                None if params is None else params.take(layout, layout.kind.stored_dtype),
                None if grads is None else grads.take(layout, layout.kind.grad_dtype),
                self._reducer.sum_dtype(layout.kind.grad_dtype),
                index in on_host,
                groups[layout.kind.mesh, layout.kind.data].shards,
                allocating,
                whole[index],
            )
            for index, layout in enumerate(layouts)
        ]

    def _reduces_by_unit(self, layout: BucketLayout) -> bool:
        return layout.kind.unit is not None and self.unit_memory.reduce_each

    def _shard_frozen(self, infos: Sequence[ParamInfo]) -> FrozenShards:
        """Shard what units hold beside the parameters that are trained. Only plain and quantized weights can be."""
        sharded = [info for info in infos if self.level.parameters and can_be_sharded(info.parameter)]
        kinds = {info: kind for info in sharded if (kind := self._kind_of(info)).unit is not None}
        turns = self._route.turns(self._units, self.unit_memory.turns) if kinds else ()
        ways = {(kind.mesh, kind.data): kind for kind in kinds.values()}
        groups = {key: groups_of(kind, self.options.advanced.max_ctas) for key, kind in ways.items()}
        return FrozenShards(kinds, groups, turns, self._user_buffers.allocating, self._copy_engines.room(groups))

    # ---------------------------------------------------------------- gradients

    def zero_grad(self) -> None:
        """Discard all gradients, and prepare for the micro-batches of the next step.

        ``parameter.grad`` is None until a gradient arrives. If none arrives, it is zero after the passes.
        """
        self.main_gradients.zero()

    @contextmanager
    def micro_batches(self, count: int, reduce: bool = True) -> Iterator[None]:
        """Run forward and backward passes of ``count`` micro-batches inside; complete buckets are reduced there.

        It first waits for parameters that are still being gathered, unless the modules wait
        (:meth:`ShardedParameters.attach_gather_hooks`).

        Args:
            reduce: these are the last micro-batches before :meth:`finish_grad_sync`.
        """
        if not self.parameters.waited_by_modules:
            self.sync_parameters()
        with self.main_gradients.passes(count, reduce):
            yield

    @spanned("finish_gradients")
    def finish_grad_sync(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and set ``shard.master.grad``; once per step.

        Afterwards ``parameter.grad`` holds sums on level ``no_shard``. On ``optim`` only this rank's interval does.

        Raises:
            MegalightError: with ``check_for_nan``, a gradient of some rank is NaN or infinite.
        """
        self.sync_parameters()  # the optimizer will overwrite the memory from which parameters are gathered
        if not self.main_gradients.reduced:
            self.main_gradients.finish()
            if self.options.check_for_nan:
                check_finite(self.buckets, self.grad_norm(), self.main_gradients.everyone)

    def grad_norm(self) -> Tensor:
        """The L2 norm of the reduced gradients of the whole model: 0-dim, on the device, equal on every rank."""
        return self.main_gradients.norm()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor on the device (in the optimizer, if it has offered to)."""
        self.main_gradients.scale(factor)

    def fuse(self, scaler: Callable[[Tensor | None], None]) -> Callable[[], None]:
        """Let an optimizer scale gradients and round masters into ``bucket.own_params`` inside its own step.

        The optimizer then also gets gradients in the dtype in which they were summed.

        Args:
            scaler: called by :meth:`scale_gradients` instead of a multiplication, with the product of a step's factors;
                None: there is none, or it was for gradients that are discarded.

        Returns:
            a function to call after each optimizer step: the next :meth:`publish` then skips the copy.
        """

        def written() -> None:
            self.parameters.written = True
            self.main_gradients.stepped()

        self.main_gradients.scale_by(scaler)
        return written

    # ---------------------------------------------------------------- parameters

    def publish(self) -> None:
        """Copy the updated masters into the parameters of every data-parallel rank, or start to."""
        self.parameters.publish()

    def sync_parameters(self, homes: Sequence[int] | None = None) -> None:
        """Wait until every parameter is up to date. Call it before reading weights; it costs nothing if they are.

        Args:
            homes: wait for the parameters of these buckets only (:meth:`.Gatherer.buckets_of`).
        """
        self.parameters.sync(homes)

    def widen(self) -> None:
        """End training: gather all parameters and give them their own dtype again. Training may begin again."""
        self.sync_parameters()
        self.parameters.widen()

    def close(self) -> None:
        """End the run: :meth:`widen`, and let autograd keep gradients as usual. Sharded parameters stay sharded.

        This frees the memory of main gradients. Masters stay, so that a checkpoint can still be saved.
        """
        self.widen()
        self.parameters.release_modules()
        for bucket in self.buckets:
            bucket.drop_gradients()
        if self.units is not None:
            self.units.end_training()
        self._user_buffers.release()

    def refresh_masters(self) -> None:
        """Copy the parameters into the masters, after weights were loaded into the parameters, or into their shards.

        If parameters are quantized, weights are loaded into the masters, and the quantized values are cast from them.
        """
        # Loading may have put other tensors into `parameter.data`. The masters
        # must follow these, not the old views.
        if (unsharder := self.parameters.unsharder) is not None and unsharder.whole:
            self.reattach()
        self.parameters.refresh_masters()

    def gather_parameters(self) -> None:
        """Make sharded parameters whole until :meth:`release_parameters`, for code that may read or write any of them.

        All ranks call this together. It takes memory for the whole model.
        """
        self.sync_parameters()
        if (unsharder := self.parameters.unsharder) is not None and not unsharder.whole:
            unsharder.unshard_all()

    def release_parameters(self) -> None:
        """End :meth:`gather_parameters`: keep this rank's shards, with what all ranks have written equally."""
        if (unsharder := self.parameters.unsharder) is not None and unsharder.whole:
            self.reattach()
            unsharder.reshard()

    def fill_masters(self, name: str, values: Tensor) -> None:
        """Set the masters of one parameter, or its shard if it is frozen, from values of its shape in a wider dtype.

        Made for the float32 draws of ``parallel.initial_values``. Names that the engine does not know are ignored.
        """
        fill([*self.buckets, *self.frozen_shards.buckets], name, values)

    @torch.no_grad()
    def rescale(self, factors: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Multiply parameters. Masters that are wider are multiplied themselves, so nothing is rounded twice.

        All ranks call this together. The parameters follow their masters on return.

        Args:
            factors: each parameter with what it is multiplied by, of any shape that broadcasts to its own. Frozen ones
                must be whole (:meth:`gather_parameters`).
        """
        self.sync_parameters()
        held = {
            id(info.parameter): (bucket, slot.start)
            for bucket in self.buckets
            for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True)
        }
        for parameter, factor in factors:
            if (found := held.get(id(parameter))) is None:
                parameter.copy_(parameter * factor)
            else:
                bucket, start = found
                bucket.shard.multiply(start, factor.expand(parameter.shape))
        self.publish()
        self.sync_parameters()

    def give_masters(self, other: DataParallelEngine) -> None:
        """Copy masters that are wider than their parameters to another engine over (some of) the same parameters."""
        for bucket in self.buckets:
            if bucket.master_is_own_params:
                continue
            # Whole, because the other engine may cut the same parameters into other buckets and intervals.
            masters = bucket.gathered(bucket.shard.master.detach())
            for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
                other.fill_masters(info.name, masters[slot.start : slot.stop])

    def reattach(self) -> None:
        """Take over the values of parameters whose memory somebody has replaced (``parameter.data = ...``)."""
        self.sync_parameters()
        for bucket in (*self.buckets, *self.frozen_shards.buckets):
            for info, view in bucket.replaced():
                view.copy_(info.parameter.detach())
                info.parameter.data = view
                self.fill_masters(info.name, view)

    def address_of(self, parameter: Tensor) -> int:
        """Return the address at which a parameter has its values, also while it has no memory."""
        key = id(parameter)
        return self._addresses.get(key, 0) or self.frozen_shards.addresses.get(key, 0) or parameter.data_ptr()

    def memory(self) -> dict[str, int]:
        """Return bytes on this rank's device: ``parameters``, ``gradients``, ``masters`` (only those that are copies).

        If there are masters in host memory, ``host`` is the number of bytes there.
        """
        with_parameters = (*self.buckets, *self.frozen_shards.all)
        return {
            "parameters": _nbytes(flat for bucket in with_parameters for flat in (bucket.params, bucket.own_params)),
            "gradients": _nbytes(flat for bucket in self.buckets for flat in (bucket.grads, bucket.own_grads)),
            "masters": sum(b.shard.master.nbytes for b in self.buckets if not (b.master_is_own_params or b.on_host)),
            **({"host": self.host.nbytes()} if self.host.buckets else {}),
        }


def _distinct(infos: Iterable[ParamInfo]) -> list[ParamInfo]:
    """Return the parameters in order; a tied parameter comes once.

    Raises:
        MegalightError: those that need gradients have no storage yet, or live on several devices.
    """
    seen: dict[int, ParamInfo] = {}
    for info in infos:
        seen.setdefault(id(info.parameter), info)
    devices = {info.parameter.device: info.name for info in seen.values() if info.parameter.requires_grad}
    if len(devices) > 1 or torch.device("meta") in devices:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise MegalightError(f"parameters must have storage on one device: {where}. Materialize the model first.")
    return list(seen.values())


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the memory of tensors; memory that several of them share counts once."""
    return sum({(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in tensors}.values())


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]

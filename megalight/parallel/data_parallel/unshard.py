"""ZeRO-3 unshard/reshard: shards stay, the whole parameters of a unit are all-gathered into a few buffers in turn.

A unit is a module (a layer, usually) with the parameters that it alone holds, or several such modules that share one.
Units never overlap in time: in the forward pass, a unit begins when its module is called. In the backward pass, it
begins when the gradient of its output is there, and ends when another unit begins or the passes end. Autograd runs all
operations of a unit before, because these came later in the forward pass.

Forward::

    gather unit i + 1 (and further ones, if they have memory)  |  compute unit i

Backward::

    gather unit i - 1  |  compute unit i  |  reduce unit i + 1

A pipeline has several micro-batches between their forward and backward passes. They hold no parameters: what they saved
for the backward pass refers to the parameters by address, and each unit comes back to its own address. So a unit is
whole only while one micro-batch computes with it, whatever the order of passes. :meth:`Units.follow` says which pass
comes next, so that its first units are gathered while the last ones of this pass compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megalight.attachments import UNIT_HOOKS
from megalight.errors import MegalightError
from megalight.imports import in_backward
from megalight.ops.parameter import storage_format_of
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.data_parallel.buffers import Allocating, FlatParameters, Groups
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized
from megalight.parallel.data_parallel.gather import Pushes, gather
from megalight.parallel.data_parallel.gradients import UnitGradients
from megalight.parallel.data_parallel.layout import BucketKey, BucketLayout, ParamInfo, plan_buckets
from megalight.parallel.data_parallel.unit_memory import PassOrder, Room, RotatingBuffers, UnitPass


class Unsharder:
    """Gathers the whole parameters of a unit into the buffers of its turn, and knows which unit's are there.

    Memory is permanent, contents are temporary: whenever a parameter has its values, it is a view of the same memory.
    A unit's parameters stay until another unit of the same turn needs the buffers. Without its values, a parameter has
    no memory: it reads NaN, and writing to it is an error. So nobody ever takes the values of another unit for its own.

    Args:
        units: the buckets of each unit, in the order of the forward pass.
        turn_of: the turn of each unit (:meth:`.route.Route.turns`), which has buffers of its own.
        first: the units of each model's first pass of a step, in order.
        pushes: the buffers that copy engines fill; None: collectives do.

    Attributes:
        turns: number of units that have memory at a time, of all models.
        whole: all parameters have their values, in memory of their own (:meth:`unshard_all`).
    """

    def __init__(
        self,
        units: Sequence[Sequence[FlatParameters | FlatQuantized]],
        device: torch.device,
        turn_of: Sequence[int],
        first: Sequence[Sequence[int]],
        pushes: Pushes | None = None,
    ) -> None:
        self.units = list(units)
        self.pushes = pushes
        self.turn_of = turn_of
        self.turns = max(turn_of) + 1
        self.first = first
        self.whole = False
        self._present: list[int | None] = [None] * self.turns
        self._shown: set[int] = set()
        self._arriving: dict[int, Callable[[], None]] = {}
        self._stream = side_stream(device)
        self.guard()

    def exchange(
        self, unit: int, old: Sequence[FlatParameters | FlatQuantized], new: Sequence[FlatParameters | FlatQuantized]
    ) -> None:
        """Replace some of a unit's buckets by others, which have no memory now."""
        # Buckets that leave are no longer gathered, and those that come have not been.
        self.forget()
        self.units[unit] = [*(bucket for bucket in self.units[unit] if bucket not in old), *new]

    def guard(self) -> None:
        """Keep memory from other uses until the last gathers from and into it are done."""
        # After the last step of a run the next units are still on their way. If the run is dropped then, nobody waits
        # for them, and their memory must not be used again before they have arrived.
        if self._stream is not None:
            self._stream.uses(flat for bucket in self._buckets for flat in (bucket.params, bucket.own_params))

    def prefetch(self, unit: int) -> None:
        """Start to gather a unit, unless it is there. The computation with its predecessor must have been enqueued."""
        turn = self.turn_of[unit]
        before = self._present[turn]
        if self.whole or before == unit:
            return
        if before is not None:
            self._wait(before)  # a gather that nobody has waited for may still write there
            # Before the gather starts: otherwise parameters of the old unit would read values of the new one.
            self._hide(before)
        self._present[turn] = unit
        if self._stream is None:
            self._arriving[unit] = partial(_wait_all, [self._start(bucket) for bucket in self.units[unit]])
            return
        # On its own stream, after all computation with the parameters that these replace.
        with self._stream.after_computation():
            for bucket in self.units[unit]:
                self._start(bucket)()
        self._arriving[unit] = self._stream.done()

    def _start(self, bucket: FlatParameters | FlatQuantized) -> Callable[[], object]:
        """Start to gather a bucket; return a function that waits for it."""
        if bucket.unit_group is None or (self.pushes is not None and self.pushes.gather(bucket)):
            return _nothing
        return gather(bucket.params, bucket.own_params, bucket.unit_group).wait

    def unshard(self, unit: int) -> None:
        """Make a unit's parameters available now. On CUDA the current stream waits, not the host."""
        if self.whole:
            return
        self.prefetch(unit)
        self._wait(unit)
        if unit not in self._shown:
            self._shown.add(unit)
            for bucket in self.units[unit]:
                bucket.show(bucket.params)

    def settle(self) -> None:
        """Wait for all gathers in flight, which read the shards."""
        for unit in list(self._arriving):
            self._wait(unit)

    def expire(self) -> None:
        """Forget what is there: the shards have new values."""
        self.forget()
        for bucket in self._buckets if self.whole else ():
            if bucket.unit_group is not None:
                gather(bucket.shown, bucket.own_params, bucket.unit_group).wait()

    def prefetch_first(self) -> None:
        """Start to gather the first units of the next forward pass."""
        for units in self.first:
            taken = set[int]()
            for unit in units:
                if self.turn_of[unit] in taken:
                    break
                taken.add(self.turn_of[unit])
                self.prefetch(unit)

    def unshard_all(self) -> None:
        """Give all parameters memory of their own, with their values, until :meth:`reshard`."""
        # Gathers in flight write to the buffers of turns, which are no longer shown.
        self.forget()
        for bucket in self._buckets:
            bucket.show(bucket.own_params.new_empty(bucket.layout.numel))
        self.whole = True
        self.expire()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of whole parameters, which somebody may have written to, into the shards."""
        # All ranks wrote the same values, so each keeps its own interval and nothing is sent.
        for bucket in self._buckets if self.whole else ():
            if not bucket.is_quantized:  # those come from the masters alone
                bucket.own_params.copy_(bucket.shown[slice(*bucket.kept)])

    def reshard(self) -> None:
        """End :meth:`unshard_all`: keep the shards only."""
        if self.whole:
            self.write_back()
            self.whole = False
            for unit in range(len(self.units)):
                self._hide(unit)

    @property
    def _buckets(self) -> list[FlatParameters | FlatQuantized]:
        return [bucket for buckets in self.units for bucket in buckets]

    def forget(self) -> None:
        """Wait for all gathers, and take the parameters of units from the buffers."""
        self.settle()
        self._present = [None] * self.turns
        for unit in tuple(self._shown):
            self._hide(unit)

    def _hide(self, unit: int) -> None:
        self._shown.discard(unit)
        for bucket in self.units[unit]:
            bucket.vacate()

    def _wait(self, unit: int) -> None:
        wait = self._arriving.pop(unit, None)
        if wait is not None:
            wait()


def _nothing() -> None: ...


def _wait_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


Store: TypeAlias = Callable[[nn.Parameter], None]
"""Stores a weight that has its values quantized."""

FROZEN = -1
"""In the place of the optimizer's group, for parameters in none."""


class FrozenShards:
    """Shards what units hold beside the parameters that are trained.

    Args:
        kinds: the frozen parameters of units, in registration order, and their kinds.
        groups: the process groups of each mesh and data axes.
        turns: the turn of each unit.
        allocating: a context in which the memory of messages is allocated.
        room: makes memory that peers fill; None: torch makes it.

    Attributes:
        buckets: parameters in their own dtype.
        quantized: those that are quantized.
        addresses: where each parameter, by its id, has its values or its quantized values.
    """

    def __init__(
        self,
        kinds: Mapping[ParamInfo, BucketKey],
        groups: Mapping[Any, Groups],
        turns: Sequence[int],
        allocating: Allocating,
        room: Room | None,
    ) -> None:
        # A kind of their own: they have no place in an optimizer, and must not lie in a bucket that has gradients.
        self._kinds = {info: replace(kind, group=FROZEN, divide_replicas=False) for info, kind in kinds.items()}
        self._groups, self._turns, self._room = groups, turns, room
        self._device = next((info.parameter.device for info in kinds), torch.device("cpu"))
        layouts, plain = self._layouts([info for info in kinds if stored_of(info.parameter) is None])
        memory = self._memory(layouts, allocating)
        self.buckets = [self._bucket(layout, plain, memory, allocating) for layout in layouts]
        # A second run over a model whose weights are quantized already.
        self.quantized = self._flat_quantized([info for info in kinds if stored_of(info.parameter) is not None])
        self._lend()

    @property
    def all(self) -> list[FlatParameters | FlatQuantized]:
        """Everything that is sharded."""
        return [*self.buckets, *self.quantized]

    def store(self, unsharder: Unsharder, wanted: Sequence[nn.Parameter], store: Store) -> None:
        """Replace weights by quantized values, one unit after the other, so that only one is whole at a time.

        All ranks call this together. The memory of the weights is freed, and that in which they were gathered: what
        stays plain gets other memory, which is as large as the rest of the largest unit.

        Args:
            wanted: some of the parameters.
            store: called with each weight while it has its values; stores it quantized.
        """
        assert not unsharder.whole, "units are gathered one after the other"
        weights = {id(weight) for weight in wanted}
        old: dict[int | None, list[FlatParameters]] = {}
        for bucket in self.buckets:
            old.setdefault(bucket.layout.kind.unit, []).append(bucket)
        infos = [info for info in self._kinds if stored_of(info.parameter) is None]
        layouts, rest = self._layouts([info for info in infos if id(info.parameter) not in weights])
        # Not among the buffers that NCCL knows: ranks would register them at different times.
        memory = self._memory(layouts, nullcontext)
        # In the order of registration, which is the same on all ranks that gather together.
        for unit in dict.fromkeys(self._kinds[info].unit for info in infos):
            assert unit is not None, "only parameters of units are sharded"
            unsharder.unshard(unit)
            chosen = [info for info in infos if id(info.parameter) in weights and self._kinds[info].unit == unit]
            for info in chosen:
                store(info.parameter)
            plain = [self._bucket(each, rest, memory, nullcontext) for each in layouts if each.kind.unit == unit]
            quantized = self._flat_quantized(chosen)
            # Taken out, so that their memory is freed on the way.
            leaving = old.pop(unit)
            unsharder.exchange(unit, leaving, [*plain, *quantized])
            self.buckets = [*(bucket for bucket in self.buckets if bucket not in leaving), *plain]
            self.quantized += quantized
        self._lend()
        unsharder.guard()

    def _layouts(self, infos: Sequence[ParamInfo]) -> tuple[list[BucketLayout], Sequence[ParamInfo]]:
        sizes, kinds = [info.parameter.numel() for info in infos], [self._kinds[info] for info in infos]
        return plan_buckets(sizes, kinds), infos

    def _memory(self, layouts: Sequence[BucketLayout], allocating: Allocating) -> RotatingBuffers:
        return RotatingBuffers(layouts, self._turns, self._device, allocating, self._room)

    def _bucket(
        self, layout: BucketLayout, infos: Sequence[ParamInfo], memory: RotatingBuffers, allocating: Allocating
    ) -> FlatParameters:
        groups, lent = self._groups[layout.kind.mesh, layout.kind.data], memory.take(layout, layout.kind.param_dtype)
        return FlatParameters(layout, infos, groups, True, lent, allocating=allocating)

    def _flat_quantized(self, infos: Sequence[ParamInfo]) -> list[FlatQuantized]:
        together: dict[BucketKey, list[ParamInfo]] = {}
        for info in infos:
            # Weights of all dtypes are bytes.
            together.setdefault(replace(self._kinds[info], param_dtype=torch.uint8), []).append(info)
        return [FlatQuantized(kind, each, self._groups[kind.mesh, kind.data].shards) for kind, each in together.items()]

    def _lend(self) -> None:
        """Give quantized values of units memory in turn, once all sizes are known, and note where everything is."""
        memory = self._memory([quantized.layout for quantized in self.quantized], nullcontext)
        for quantized in self.quantized:
            lent = memory.take(quantized.layout, torch.uint8)
            assert lent is not None, "quantized values belong to a unit"
            quantized.lend(lent)
        self.addresses = {key: place for held in self.all for key, place in held.addresses().items()}


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter is plain numbers, or quantized (:mod:`megalight.ops.quantized_weight`).

    Parameters that are quantized themselves (``primary_weights``), and types that pack several values, stay whole.
    """
    if stored_of(parameter) is not None:
        return True
    plain = type(parameter.data) is Tensor and parameter.is_floating_point() and parameter.element_size() > 1
    return plain and storage_format_of(parameter) is None


class Units:
    """Makes the contents of units come and go as their modules run.

    Args:
        modules: those of each unit, in the order of the forward pass. The further modules of units with several (an
            embedding, and the head that shares its weight) come after all others of their chunk.
        buckets: the sharded parameters that are trained; they know their unit by ``layout.kind.unit``.
        route: the chunks of this rank.
        turns: number of units whose whole parameters have memory at a time.
        frozen: the sharded parameters that are not trained.

    Attributes:
        modules: the modules of units, in the order of the forward pass.
        unsharder: their parameters; None: these are always whole.
        gradients: their gradients; None after training.
        sync: waits for the parameters outside of units, which may be on their way; the engine sets it.
    """

    def __init__(
        self,
        modules: Sequence[Sequence[nn.Module]],
        buckets: Sequence[FlatParameters],
        gradients: UnitGradients,
        device: torch.device,
        route: PassOrder,
        turns: int,
        pushes: Pushes | None = None,
        frozen: FrozenShards | None = None,
    ) -> None:
        self._order: list[int] = []
        """The unit of each place in the forward pass."""
        self._chunk: list[range] = []
        """The places of the chunk of each place."""
        self.modules: list[nn.Module] = []
        self._places: dict[int, range] = {}
        """The places of each chunk, by its id."""
        every = []
        for number, part in enumerate(route.parts(modules)):
            # Further modules of a unit (a tied head) run after all first ones.
            calls = [(modules[unit][0], unit) for unit in part]
            calls += [(module, unit) for unit in part for module in modules[unit][1:]]
            places = range(len(self._order), len(self._order) + len(calls))
            every.append(places)
            self.modules += [module for module, _ in calls]
            self._order += [unit for _, unit in calls]
            self._chunk += [places] * len(calls)
            if number < len(route.chunks):
                self._places[id(route.chunks[number])] = places
        self._coming: Sequence[UnitPass] = ()
        self._chunks: Sequence[nn.Module] = ()
        self._divided = False
        """Whether a unit's parameters come from several ranks."""
        self._trained, self._frozen = list(buckets), frozen
        self.gradients: UnitGradients | None = gradients
        self.unsharder: Unsharder | None = None
        self.sync: Callable[[], None] = _nothing
        if held := [*self._trained, *(frozen.all if frozen else ())]:
            own = [[b for b in held if b.layout.kind.unit == unit] for unit in range(len(modules))]
            # Of each model those of its first chunk, which may have none.
            first = [[self._order[place] for place in next(filter(None, phase), ())] for phase in route.by_phase(every)]
            self._divided = any(bucket.unit_group is not None for bucket in held)
            self.unsharder = Unsharder(own, device, route.turns(modules, turns), first, pushes)
        for place, module in enumerate(self.modules):
            remove_hooks(module)
            # Hooks know the place in the forward pass, not the unit: a unit
            # with two modules has two neighbors.
            before = module.register_forward_pre_hook(self._before_forward(place))
            after = module.register_forward_hook(self._after_forward(place), with_kwargs=True)
            UNIT_HOOKS.set(module, [before, after])

    def follow(self, chunks: Sequence[nn.Module], coming: Sequence[UnitPass]) -> None:
        """Say which passes come after the one that begins now, so that their first units are gathered in time.

        Args:
            chunks: the chunks that passes count.
            coming: the passes; none: it is not known.
        """
        self._chunks, self._coming = chunks, coming

    def begin_forward(self, place: int) -> None:
        """Make the parameters of a unit available, and start to gather those of the next one.

        Args:
            place: place of its module in the forward pass.
        """
        unit, recomputes = self._order[place], in_backward()
        if self.gradients is not None:
            # A unit that is recomputed goes on with its backward pass.
            (self.gradients.close_complete if recomputes else self.gradients.close)(unless=unit)
        if self.unsharder is None:
            return
        self.unsharder.unshard(unit)
        if recomputes:
            return  # the backward pass goes the other way
        own = self._chunk[place]
        self._prefetch(unit, self._ahead(own[place - own.start + 1 :], own[: place - own.start]))

    def begin_backward(self, place: int) -> None:
        """Make parameters and memory for gradients of a unit available, and start to gather the previous unit."""
        unit = self._order[place]
        if self.gradients is not None:
            self.gradients.open(unit)
        if self.unsharder is not None:
            # The parameters are needed again, and another unit has used their buffers since the forward pass.
            self.unsharder.unshard(unit)
            own = self._chunk[place]
            self._prefetch(unit, self._ahead(own[: place - own.start][::-1]))

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Give all parameters memory of their own inside, with their values.

        What every rank writes there equally is kept. If there are wider masters, ``engine.refresh_masters()`` must
        follow inside, or the next step undoes it.
        """
        self.sync()
        if self.unsharder is None or self.unsharder.whole:
            yield
            return
        self.unsharder.unshard_all()
        try:
            yield
        finally:
            self.unsharder.reshard()

    @property
    def buckets(self) -> list[FlatParameters]:
        """The sharded parameters, without those that are quantized."""
        return [*self._trained, *(self._frozen.buckets if self._frozen else ())]

    @property
    def sharded(self) -> frozenset[int]:
        """The ids of all parameters of which this rank holds only a shard."""
        quantized = self._frozen.quantized if self._frozen else ()
        return frozenset(id(info.parameter) for held in (*self.buckets, *quantized) for info in held.infos)

    def store(self, weights: Sequence[nn.Parameter], store: Store) -> None:
        """Replace frozen weights that are sharded by quantized values; see :meth:`.frozen.FrozenShards.store`."""
        assert self._frozen is not None and self.unsharder is not None, "sharded weights are in a unit"
        # Values may be on their way to whole parameters, and the shards may be newer than what is there.
        self.sync()
        self._frozen.store(self.unsharder, weights, store)
        if self.unsharder.pushes is not None:
            # The buffers of the weights that were replaced: quantized values have others.
            self.unsharder.pushes.keep([*self._trained, *self._frozen.all])

    def expire(self) -> None:
        """Gather parameters again before they are used: values were written to the shards."""
        if self.unsharder is not None:
            self.unsharder.expire()

    def end_training(self) -> None:
        """Forget the engine, whose parameters are all here, and its gradients."""
        self.gradients, self.sync = None, _nothing

    def unshard(self) -> None:
        """Give all parameters memory of their own, with their values, for good."""
        for module in self.modules:
            remove_hooks(module)
        if self.unsharder is not None:
            self.unsharder.write_back()
            self.unsharder.unshard_all()
        self._trained, self._frozen, self.unsharder = [], None, None

    def _ahead(self, rest: range, wrapped: range = range(0)) -> Iterator[int]:
        """Yield the units that come next.

        Args:
            rest: the places that this pass has still to go through.
            wrapped: the places of the next forward pass of evaluation, if nobody has said what comes.
        """
        yield from (self._order[place] for place in rest)
        for chunk, forward in self._coming:
            places = self._places.get(id(self._chunks[chunk]), range(0))
            yield from (self._order[place] for place in places[:: 1 if forward else -1])
        if not self._coming and not torch.is_grad_enabled():
            yield from (self._order[place] for place in wrapped)

    def _prefetch(self, unit: int, ahead: Iterator[int]) -> None:
        """Start to gather the units that come after this one, as many as have memory beside it."""
        assert self.unsharder is not None
        turn_of = self.unsharder.turn_of
        wanted = {turn_of[unit]: unit}
        for following in ahead:
            if wanted.setdefault(turn_of[following], following) != following:
                return  # it would take the memory of a unit that is needed before
            self.unsharder.prefetch(following)
            if len(wanted) == self.unsharder.turns:
                return

    def _before_forward(self, place: int) -> Any:
        def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.begin_forward(place)

        return begin

    def _after_forward(self, place: int) -> Any:
        def begin_backward(gradient: Tensor) -> None:
            # Only under `create_graph=True` does a backward pass record what it does.
            if torch.is_grad_enabled() and self._divided and self.unsharder and not self.unsharder.whole:
                raise MegalightError(
                    f"create_graph=True reached {type(self.modules[place]).__name__}, whose parameters are sharded: "
                    "the backward pass of the gradients would read parameters that are no longer there. Use "
                    "data_parallel.level='optim_grads' (sharding_strategy='SHARD_GRAD_OP'), which keeps them whole, "
                    "or run all passes of the step in `with sharded.full_parameters():` of megalight.fully_shard."
                )
            self.begin_backward(place)

        def after(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            # A tensor that is passed through is also the output of the unit before. Its gradient begins that one.
            given = {id(leaf) for leaf in tree_leaves((inputs, named))}
            for tensor in [output] if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in given:
                    tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

        return after


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of an earlier engine."""
    for hook in UNIT_HOOKS.pop(module, ()):
        hook.remove()

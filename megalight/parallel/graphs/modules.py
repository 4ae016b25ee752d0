"""CUDA graphs per module: one pair of graphs, forward and backward, per module and micro-batch in flight.

Packages may register backends that record layers, or their attention, in their own way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalight.attachments import restore
from megalight.errors import MegalightError
from megalight.ops.autograd import once_differentiable
from megalight.ops.parameter import cast_of
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.graphs.fingerprint import Fingerprint, Inspection, format_changing
from megalight.parallel.graphs.recorder import Recorder, Recording
from megalight.parallel.graphs.static import (
    Argument,
    HeldArgument,
    Leaf,
    StaticValue,
    recordable,
    tensors_of,
    with_tensors,
)
from megalight.parallel.layers import check_own_forwards
from megalight.parallel.peers.spin import check_all
from megalight.parallel.pipeline.schedules import Actions
from megalight.registry import Registry

Named = tuple[str, nn.Module]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Parts:
    """The modules to record, and what a backend needs for it.

    Attributes:
        lanes: the modules of each chunk of this rank, in the order in which they run.
        chained: each module's output is the next one's input, and the last module's output leaves the chunk.
        engine: gathers parameters and reduces gradients, both outside the graphs.
        device: device of the modules.
        recorder: records and replays.
        schedule: number of micro-batches of a step -> this rank's work in it.
        rehearsal: a context for trial runs; it restores the scale histories that they change.
        generators: random generators that modules use besides the default ones.
        warmup_steps: number of eager steps, at least 2.
        refuse: called with the reason why modules run eagerly; may raise.
        agree: numbers of the ranks that share each module -> the largest of each. These must record, replay and run
            eagerly together: what one of them sends, the others expect in the slot of their own recording.
        tell: called on all of these ranks together, when it changes whether calls are recorded. Modules may then work
            in another way.
    """

    lanes: Sequence[Sequence[Named]]
    chained: bool
    engine: DataParallelEngine
    device: torch.device
    recorder: Recorder
    schedule: Callable[[int], Actions]
    rehearsal: Callable[[], AbstractContextManager[None]]
    generators: Callable[[], Sequence[torch.Generator]]
    warmup_steps: int
    refuse: Callable[[str], None]
    agree: Callable[[list[int]], list[int]] = list
    tell: Callable[[bool], None] = lambda recorded: None


class PartGraphs(Protocol):
    """Replaces the forwards of modules: they run eagerly at first, then from graphs.

    Attributes:
        replays: number of forwards that were replayed.
    """

    replays: int

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step of ``micro_batches`` micro-batches."""
        ...

    def close(self) -> None:
        """Restore the modules' own forwards, and free the graphs."""
        ...


@dataclass(frozen=True)
class GraphBackend:
    """One way to record modules.

    Attributes:
        start: takes over the modules.
        why_not: device type -> why the backend cannot serve it, or None.
    """

    start: Callable[[Parts], PartGraphs]
    why_not: Callable[[str], str | None]


GRAPH_BACKENDS: Registry[GraphBackend] = Registry("backend of CUDA graphs")


log = logging.getLogger(__name__)


class Unit:
    """A module's forward and backward, recorded from one call and replayed, strictly in turn, for all later calls.

    Recorded work adds parameters' gradients to the engine's buffers, and the engine is notified after each replay. The
    gradient of a chained input is written directly to the memory where the previous unit reads it.

    Args:
        name: for messages.
        function: the module's own forward.
        arguments: static memory for its arguments, with the names of keyword arguments.
        previous: the unit whose outputs are this one's inputs; None: the inputs come from elsewhere.
        copies: return copies of the outputs, because the caller may keep or change them.
        done: called after the backward.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[str | None, Argument]],
        engine: DataParallelEngine,
        previous: Unit | None,
        copies: bool,
        done: Callable[[], None],
    ) -> None:
        self.name = name
        self.function = function
        self.arguments = list(arguments)
        self.engine = engine
        self.previous = previous
        self.copies = copies
        self.done = done
        self.forwarded = False
        self.leaves = [argument.tensor for _, argument in self.arguments if isinstance(argument, Leaf)]
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.arrivals: list[tuple[int, int]] = []
        self._structure: Any = None
        self._forward: Recording[Any] | None = None
        self._backward: Recording[list[Tensor | None]] | None = None
        # Autograd runs the backward even if no input of the first module requires a gradient (token ids).
        self._anchor = torch.empty(0, requires_grad=True)

    def record(self, recorder: Recorder, generators: Sequence[torch.Generator], pool: Any) -> None:
        """Record both graphs in the middle of a step, while messages of other ranks may be in flight.

        Raises:
            MegalightError: no output has a gradient.
        """
        # Forward before backward, in one pool: the backward reads activations that the forward's graph keeps alive.
        self._forward = recorder.record(self._call, generators, pool, settle=False)
        self._structure = self._forward.result
        self.outputs = tensors_of(self._structure)
        if not any(output.requires_grad for output in self.outputs):
            raise MegalightError(f"{self.name} must return at least one tensor that needs a gradient")
        self.gradients = [torch.empty_like(output) for output in self._differentiable]
        self._backward = recorder.record(self._differentiate, generators, pool, settle=False)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the form of the recorded one."""
        values = [(None, value) for value in args] + list(kwargs.items())
        return [name for name, _ in values] == [name for name, _ in self.arguments] and all(
            argument.fits(value) for (_, argument), (_, value) in zip(self.arguments, values, strict=True)
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the forward for this call, and return the module's output."""
        values = [*args, *kwargs.values()]
        for (_, argument), value in zip(self.arguments, values, strict=True):
            argument.fill(value)
        inputs = [v for (_, a), v in zip(self.arguments, values, strict=True) if isinstance(a, Leaf)]
        outputs = _Replay.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return with_tensors(self._structure, iter(outputs))

    def drop(self) -> None:
        """Free the graphs, results first."""
        self.outputs, self.gradients, self.leaves, self.previous, self._structure = [], [], [], None, None
        for recording in (self._backward, self._forward):
            if recording is not None:
                recording.drop()
        self._backward = self._forward = None

    def _call(self) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, argument in self.arguments:
            value = argument.tensor if isinstance(argument, Leaf) else argument.value
            if name is None:
                args.append(value)
            else:
                kwargs[name] = value
        with torch.enable_grad():
            return self.function(*args, **kwargs)

    def _differentiate(self) -> list[Tensor | None]:
        with self.engine.main_gradients.noting() as self.arrivals:
            # Replays read the activations that the forward saved, so autograd must not free them.
            torch.autograd.backward(self._differentiable, self.gradients, retain_graph=True)
        found = [leaf.grad for leaf in self.leaves]
        if self.previous is None:
            return found
        # Inside the graph: the replay leaves gradients where the previous unit's backward reads them, without a launch
        # of its own.
        with torch.no_grad():
            for target, gradient in zip(self.previous.gradients, found, strict=True):
                assert gradient is not None
                target.copy_(gradient)
        for leaf in self.leaves:  # copied, so the graphs' pool can reuse the memory
            leaf.grad = None
        return list(self.previous.gradients)

    @property
    def _differentiable(self) -> list[Tensor]:
        """The outputs with gradients. A router returns indices of experts, too."""
        return [output for output in self.outputs if output.requires_grad]

    def replay_forward(self) -> tuple[Tensor, ...]:
        """Replay the forward, and return the module's outputs."""
        assert self._forward is not None
        self.forwarded = True
        self._forward.replay()
        return tuple(output.detach().clone() if self.copies else output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward: gradients of the outputs -> gradients of the leaves."""
        if not self.forwarded:
            raise MegalightError(
                f"the backward of {self.name} ran twice for one forward, or after another micro-batch took its memory; "
                "a layer that is recorded as a CUDA graph has one backward per forward."
            )
        assert self._backward is not None
        self.forwarded = False
        arrived = [g for g, output in zip(gradients, self.outputs, strict=True) if output.requires_grad]
        for target, gradient in zip(self.gradients, arrived, strict=True):
            if gradient.data_ptr() != target.data_ptr():
                target.copy_(gradient, non_blocking=True)
        self._backward.replay()
        found = self._backward.result
        if self.previous is None:  # autograd may keep these gradients, and the next replay would overwrite them
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            found = [None if gradient is None else gradient.detach() for gradient in found]
        # After the replay is queued: the engine may start to reduce a bucket, in stream order behind this work.
        self.engine.main_gradients.arrive(self.arrivals)
        self.done()
        return found


class _Replay(torch.autograd.Function):
    """Runs a unit as one autograd operation."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        outputs = unit.replay_forward()
        ctx.mark_non_differentiable(*(x for x, own in zip(outputs, unit.outputs, strict=True) if not own.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found = ctx.unit.replay_backward(gradients)
        return None, None, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[2:], strict=True))


def follows(previous: Unit | None, values: Sequence[Any]) -> bool:
    """Whether the arguments that need gradients are exactly the outputs of the unit that ran just before."""
    inputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return (
        previous is not None
        and len(inputs) == len(previous.outputs)
        and all(
            (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)
            for x, y in zip(inputs, previous.outputs, strict=True)
        )
    )


def argument_for(value: Any, chained: bool, held: list[HeldArgument]) -> Argument:
    """Return static memory for one argument of the call that is recorded.

    Args:
        chained: arguments that need gradients are outputs of the previous unit, so its memory is used.
        held: arguments held by units of the same pass. One may hold the value already; otherwise a new one is added.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        memory = value.detach() if chained else value.detach().clone()
        return Leaf(memory.requires_grad_())
    if not tensors_of(value):
        return StaticValue(value)
    for each in held:
        if each.holds(value):
            return each
    held.append(HeldArgument(value))
    return held[-1]


DROPS = 4
"""Number of times that attributes may change within ``WITHIN`` steps, before modules run eagerly."""
WITHIN = 64


@dataclass
class GraphSlot:
    """Memory of one micro-batch in flight through one chunk. Its units run in a fixed order, so they share a pool."""

    pool: tuple[int, int]
    busy: bool = False
    units: dict[int, Unit] = field(default_factory=dict)
    held: list[HeldArgument] = field(default_factory=list)

    def free(self) -> None:
        """Mark the slot as free: its micro-batch has finished its backward pass."""
        self.busy = False


@dataclass
class ChunkGraphs:
    """One chunk's modules, and its slots.

    Attributes:
        slot: slot of the current pass; None: the pass runs eagerly.
        last: the unit of the current pass that ran last.
    """

    number: int
    modules: list[Named]
    slots: list[GraphSlot] = field(default_factory=list)
    slot: GraphSlot | None = None
    last: Unit | None = None

    def enter(self) -> GraphSlot:
        """Take a free slot, or a new one; called with the first module, when another micro-batch is in flight."""
        for slot in self.slots:
            if not slot.busy:
                break
        else:
            slot = GraphSlot((self.number, len(self.slots)))
            self.slots.append(slot)
        slot.busy, self.last = True, None
        return slot


class ModuleGraphs:
    """Replaces the forwards of modules: they run eagerly at first, then from graphs.

    A unit is recorded when its module is first called for its slot, after ``warmup_steps`` steps. So units are recorded
    in the order of the schedule, with the pipeline's own arguments. Evaluation, calls of another form, and a second
    call of a module in one pass run eagerly.

    Raises:
        ConfigurationError: the forward of a module was set on the instance.
    """

    def __init__(self, parts: Parts) -> None:
        self.recorder = parts.recorder
        self.engine = engine = parts.engine
        self.device = parts.device
        self.generators = parts.generators
        self.chained = parts.chained
        self.warmup_steps = parts.warmup_steps
        self.refuse = parts.refuse
        self.agree = parts.agree
        self.tell = parts.tell
        self.replays = 0
        # Before anything changes: a run that is refused leaves the modules as they were.
        check_own_forwards((named for lane in parts.lanes for named in lane), "a graph")
        self._lanes = [ChunkGraphs(number, list(modules)) for number, modules in enumerate(parts.lanes)]
        self._steps = 0
        self._off = False  # on this rank
        self._ended = False  # on all ranks that share the modules
        self._other = False
        everything = [module for lane in self._lanes for _, module in lane.modules]
        # A graph cannot decide at replay whether to overwrite or to add. These parameters are zeroed at the start of a
        # step instead, and always added to.
        engine.main_gradients.only_add(p for m in everything for p in m.parameters())
        named = (named for lane in self._lanes for named in lane.modules)
        self.fingerprint = Fingerprint(named, address=engine.address_of)
        self._recorded_under: Any = None
        self._dropped: deque[int] = deque(maxlen=DROPS)  # the last steps at which other code had changed attributes
        self._homes = {id(m): engine.parameters.gatherer.buckets_of(m.parameters()) for m in everything}
        self._casts = {id(m): [p for p in m.parameters() if cast_of(p) is not None] for m in everything}
        self._external: dict[int, Tensor] = {}  # tensors that recorded work reads besides its arguments
        for lane in self._lanes:
            for place, (_, module) in enumerate(lane.modules):
                module.forward = partial(self._forward, lane, place)
        self.tell(True)

    @property
    def graphs(self) -> int:
        """Number of graphs, forward and backward."""
        return 2 * sum(len(slot.units) for lane in self._lanes for slot in lane.slots)

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step: no micro-batch is in flight.

        Raises:
            MegalightError: a wait for a peer in an earlier replay has ended without it.
        """
        check_all()  # replays run no Python that would
        self._steps += 1
        for lane in self._lanes:
            for slot in lane.slots:
                slot.busy = False
                for unit in slot.units.values():
                    unit.forwarded = False
        if self._ended:
            if self.graphs:  # of a step in which a later recording failed
                self.drop()
            return
        now = self.fingerprint()
        stale = bool(self.graphs) and not self._off and now != self._recorded_under
        if stale:
            self._changed()
        off, stale_anywhere = self.agree([int(self._off), int(stale)])
        if off:
            self._end()
        elif stale_anywhere:
            self.drop()
        self._recorded_under = now

    def _changed(self) -> None:
        """Tell what makes the graphs stale, and refuse if that happens time and again."""
        names = self.fingerprint.attributes.changed
        if not names:
            log.info("a module changed its mode or moved its tensors: CUDA graphs are recorded again")
            return
        log.info("CUDA graphs are recorded again: other code changed %s", ", ".join(names))
        self._dropped.append(self._steps)
        if len(self._dropped) == DROPS and self._steps - self._dropped[0] < WITHIN:
            self._refuse(format_changing(names))
        names.clear()

    def _end(self) -> None:
        """Run everything eagerly from now on, as all ranks that share the modules do."""
        self._ended = True
        self.drop()
        self.tell(False)
        if not self._off:
            self._refuse("another rank cannot record its layers")

    def drop(self) -> None:
        """Free all graphs."""
        for lane in self._lanes:
            lane.slot = lane.last = None
            for slot in lane.slots:
                # In reverse: a unit's backward writes into memory of the previous unit.
                for unit in reversed(slot.units.values()):
                    unit.drop()
            lane.slots.clear()
        for parameters in self._casts.values():
            for parameter in parameters:
                if (cast := cast_of(parameter)) is not None:
                    cast.release()

    def close(self) -> None:
        """Free all graphs, and restore the modules' own forwards."""
        self.drop()
        self.tell(False)
        self._external.clear()
        for lane in self._lanes:
            for _, module in lane.modules:
                restore(module, "forward")

    # ------------------------------------------------------------------ a call

    def _forward(self, lane: ChunkGraphs, place: int, *args: Any, **kwargs: Any) -> Any:
        name, module = lane.modules[place]
        plain = partial(type(module).forward, module)
        if not torch.is_grad_enabled() or not module.training or self._off:
            return plain(*args, **kwargs)
        if self._steps <= self.warmup_steps:
            return self._warm_up(plain, args, kwargs)
        if place == 0:
            lane.slot = lane.enter()
        slot = lane.slot
        # An earlier module of this pass ran eagerly: its autograd graph does not end in the slot's memory.
        if slot is None:
            return plain(*args, **kwargs)
        # Work inside a graph cannot wait for a gather that began outside, and reads weights at fixed addresses.
        self.engine.sync_parameters(self._homes[id(module)])
        # Low-precision weights are cast outside the graph, once a step, into the memory that it reads.
        for parameter in self._casts[id(module)]:
            if (cast := cast_of(parameter)) is not None:
                cast.refresh(parameter)
        unit = slot.units.get(place) or self._record(lane, slot, place, plain, args, kwargs)
        # `forwarded`: the module was called a second time, and its memory still holds activations of the first call.
        if unit is None or unit.forwarded or not unit.fits(args, kwargs):
            if unit is not None and not unit.forwarded:
                self._tell_other(name)
            if place == 0:  # the whole pass runs eagerly
                lane.slot = None
                slot.free()
            return plain(*args, **kwargs)
        lane.last = unit
        self.replays += 1
        return unit.run(args, kwargs)

    def _warm_up(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Seen from the first step on: what the modules change themselves is no reason to record again.
        with self.fingerprint.attributes.running():
            if self._steps < self.warmup_steps:
                return plain(*args, **kwargs)
            with Inspection(self.device) as inspection:
                result = plain(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        self._external |= {key: tensor for key, tensor in inspection.external.items() if key not in given}
        if inspection.reasons:
            self._refuse("; ".join(inspection.reasons))
        return result

    def _record(
        self, lane: ChunkGraphs, slot: GraphSlot, place: int, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Unit | None:
        name = lane.modules[place][0]
        unit = self._try_to_record(lane, slot, place, plain, args, kwargs)
        problem = unit if isinstance(unit, str) else None
        # Nothing has run yet, so the ranks may still decide.
        if self.agree([int(problem is not None)]) == [0]:
            assert isinstance(unit, Unit)
            slot.units[place] = unit
            return unit
        if isinstance(unit, Unit):
            unit.drop()
        self._ended = True
        self.tell(False)
        self._refuse(problem or f"recording {name} failed on another rank")
        return None

    def _try_to_record(
        self, lane: ChunkGraphs, slot: GraphSlot, place: int, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Unit | str:
        """Record a module on this rank; return the reason if that fails."""
        name = lane.modules[place][0]
        values = [(None, value) for value in args] + list(kwargs.items())
        for _, value in values:
            if (why := recordable(value)) is not None:
                return f"{name} is called with {why}"
        previous = lane.last if self.chained and follows(lane.last, [value for _, value in values]) else None
        arguments = [(key, argument_for(value, previous is not None, slot.held)) for key, value in values]
        unit = Unit(
            name,
            plain,
            arguments,
            self.engine,
            previous,
            copies=self.chained and place == len(lane.modules) - 1,
            done=slot.free if place == 0 else nothing,
        )
        try:
            with self.fingerprint.attributes.running():
                unit.record(self.recorder, self.generators(), slot.pool)
        except Exception as error:
            unit.drop()
            return f"recording {name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return unit

    def _tell_other(self, name: str) -> None:
        if not self._other:
            self._other = True
            self.refuse(f"{name} is called with arguments of a different form than when it was recorded")

    def _refuse(self, reason: str) -> None:
        self._off = True
        self.refuse(reason)

"""Simulation of a schedule: when each action runs, the bubble, the memory for activations, and a picture.

``F`` of a stage needs ``F`` of the stage before it. ``B`` (or ``I``) needs the ``B`` (or ``I``) of the stage after it,
and its own ``F``. ``W`` needs its own ``I``. A rank runs its actions in order, one at a time. A forward and a backward
that run together take as long as one after the other: what they gain by it is not simulated.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from megalight.errors import LayoutError
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.schedules import Action, ActionKind, Actions, PipelineOptions, bubble_warning, build

if TYPE_CHECKING:  # without torch, which the command line need not wait for
    from megalight.parallel.mesh import ParallelMesh

Number: TypeAlias = "int | float | Fraction"
Place: TypeAlias = tuple[str, int, int]
"""A result that other actions wait for: ``"F"`` or ``"I"`` (the input gradient is done), stage, micro-batch."""


@dataclass(frozen=True)
class Costs:
    """Times of the work of one chunk for one micro-batch, and of a transfer between ranks, in any unit."""

    forward: Number = 1
    backward: Number = 2
    input_gradient: Number = 1
    weight_gradient: Number = 1
    transfer: Number = 0

    def of(self, kind: ActionKind) -> Number:
        """Return the time of one action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.INPUT_GRADIENT: self.input_gradient,
            ActionKind.WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]

    def times(self, factor: Number) -> Costs:
        """Return the costs of a chunk with ``factor`` times the work. The transfer time stays the same."""
        # Fractions keep the times exact, so that two events at the same time stay equal.
        forward, backward, inputs, weights = (Fraction(self.of(kind)) * Fraction(factor) for kind in ActionKind)
        return Costs(forward, backward, inputs, weights, self.transfer)


@dataclass(frozen=True)
class ActionSpan:
    """One action with its start and end."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """The actions of all ranks with their times.

    Attributes:
        ranks: the actions of each rank, in order.
    """

    ranks: tuple[tuple[ActionSpan, ...], ...]

    @property
    def total(self) -> Number:
        """Time from the first start to the last end."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each rank works."""
        return tuple(sum((span.end - span.start for span in spans), start=0) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Waiting time divided by working time over all ranks. For equal stages it is ``(pp - 1) / (m * vpp)``."""
        return float(self.total * len(self.ranks) / sum(self.busy)) - 1

    @property
    def peak(self) -> tuple[int, ...]:
        """Largest number of activations on each rank, in chunks, from the forward to the (weight) gradient."""
        return tuple(_peak([span.action for span in spans]) for spans in self.ranks)

    def draw(self, width: int = 160) -> str:
        """Return a picture with a line per rank, cut off at ``width`` characters.

        A column is the time of the shortest action; times are rounded to columns. ``F3`` is the forward of micro-batch
        3 (``F3.1`` that of chunk 1), ``F3+B1`` two that run together, ``=`` continues the action before it, and ``.``
        is waiting.
        """
        column = float(min(s.end - s.start for spans in self.ranks for s in spans if s.end > s.start))
        several = any(span.action.chunk for spans in self.ranks for span in spans)
        names = [[str(span.action) for span in spans] for spans in self.ranks]
        labels = names if several else [[name.replace(".0", "") for name in line] for line in names]
        cell = max(len(label) for line in labels for label in line) + 1
        width_of_name = len(f"rank {len(self.ranks) - 1}")
        lines = []
        for rank, (spans, texts) in enumerate(zip(self.ranks, labels, strict=True)):
            line = ["."] * round(float(self.total) / column)
            for span, label in zip(spans, texts, strict=True):
                start, end = round(float(span.start) / column), round(float(span.end) / column)
                line[start:end] = [label, *["="] * (end - start - 1)][: end - start]
            text = f"{f'rank {rank}':<{width_of_name}}  " + "".join(f"{slot:<{cell}}" for slot in line).rstrip()
            lines.append(text if len(text) <= width else text[: width - 3] + "...")
        return "\n".join(lines)


def simulate(schedules: Sequence[Actions], costs: Costs | Sequence[Costs] | None = None) -> Timeline:
    """Simulate the actions of all ranks.

    Args:
        schedules: the actions of each pipeline rank. They determine the numbers of chunks and micro-batches.
        costs: times of actions, for all stages or one for each stage. By default a backward takes two forwards.

    Raises:
        LayoutError: work is missing or occurs twice, ranks wait for each other forever, a rank receives messages in
            another order than they are sent, or the number of costs is not the number of stages.
    """
    vpp = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    _check_complete(schedules, vpp)
    check_transfers(schedules)
    pp = len(schedules)
    each = [costs or Costs()] * (pp * vpp) if costs is None or isinstance(costs, Costs) else list(costs)
    if len(each) != pp * vpp:
        raise LayoutError(
            f"there are costs for {len(each)} stages, but {pp * vpp} stages (pp={pp}, vpp={vpp}); give one per stage."
        )
    done: dict[Place, tuple[Number, int]] = {}
    spans: list[list[ActionSpan]] = [[] for _ in schedules]
    waiting: dict[Place, list[int]] = defaultdict(list)
    # Ranks that may be able to go on; each goes on as far as it can.
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        while len(spans[rank]) < len(schedules[rank]):
            action = schedules[rank][len(spans[rank])]
            cost = sum((each[part.chunk * pp + rank].of(part.kind) for part in action.parts), start=0)
            needs = [place for part in action.parts for place in _needs(part, rank, pp, vpp)]
            if missing := [place for place in needs if place not in done]:
                # Come back to this rank as soon as what it waits for is done: no action is looked at twice in vain.
                waiting[missing[0]].append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0
            # A result of the same rank needs no transfer.
            for place in needs:
                end, other = done[place]
                start = max(start, end + (each[action.chunk * pp + rank].transfer if other != rank else 0))
            spans[rank].append(ActionSpan(action, start, start + cost))
            for part in action.parts:
                if (given := output_of(part, rank, pp)) is not None:
                    done[given] = (spans[rank][-1].end, rank)
                    ready += waiting.pop(given, [])
    # A rank that still waits when no other can move waits forever.
    if waiting:
        raise LayoutError(_deadlock(schedules, spans, waiting))
    return Timeline(tuple(tuple(line) for line in spans))


def check_transfers(schedules: Sequence[Actions]) -> None:
    """Check that every rank receives messages in the order in which they are sent.

    Activations and gradients are checked separately, because each has its own channel.

    Raises:
        LayoutError: on a channel the orders differ, so messages would be confused or never arrive.
    """
    pp = len(schedules)
    vpp = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    sent: dict[tuple[int, int, str], list[Place]] = defaultdict(list)
    taken: dict[tuple[int, int, str], list[Place]] = defaultdict(list)
    for rank, actions in enumerate(schedules):
        for part in (part for action in actions for part in action.parts):
            if (place := input_of(part, rank, pp, vpp)) is not None and place[1] % pp != rank:
                taken[place[1] % pp, rank, place[0]].append(place)
            if (given := output_of(part, rank, pp)) is not None:
                to = given[1] + (1 if given[0] == "F" else -1)
                if 0 <= to < pp * vpp and to % pp != rank:
                    sent[rank, to % pp, given[0]].append(given)
    for source, target, what in taken:
        # Of unequal length if work is missing, which `_check_complete` and the simulation report better.
        pairs = zip(sent[source, target, what], taken[source, target, what], strict=False)
        if wrong := next(((a, b) for a, b in pairs if a != b), None):
            raise LayoutError(
                f"rank {source} sends {_name(wrong[0])} to rank {target}, which expects {_name(wrong[1])}; order the "
                "work of both ranks in the same way."
            )


def _needs(action: Action, rank: int, pp: int, vpp: int) -> list[Place]:
    """Return the results that an action needs."""
    stage = action.chunk * pp + rank
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return [("I", stage, action.micro_batch)]
    # A backward needs the forward of its own stage, and the gradient of the stage behind.
    own: list[Place] = [] if action.kind is ActionKind.FORWARD else [("F", stage, action.micro_batch)]
    coming = input_of(action, rank, pp, vpp)
    return own if coming is None else [*own, coming]


def input_of(action: Action, rank: int, pp: int, vpp: int) -> Place | None:
    """Return the result of another stage that an action needs, or None."""
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return None
    forward = action.kind is ActionKind.FORWARD
    stage = action.chunk * pp + rank + (-1 if forward else 1)
    return ("F" if forward else "I", stage, action.micro_batch) if 0 <= stage < pp * vpp else None


def output_of(action: Action, rank: int, pp: int) -> Place | None:
    """Return the result of an action that others may wait for, or None."""
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return None
    return ("F" if action.kind is ActionKind.FORWARD else "I", action.chunk * pp + rank, action.micro_batch)


def _peak(actions: Actions) -> int:
    live = most = 0
    for part in (part for action in actions for part in action.parts):
        if part.kind is ActionKind.FORWARD:
            most = max(most, live := live + 1)
        # Activations are needed until the weight gradient, which B contains and I leaves to W.
        elif part.kind is not ActionKind.INPUT_GRADIENT:
            live -= 1
    return most


def _check_complete(schedules: Sequence[Actions], vpp: int) -> None:
    """Check that every chunk and micro-batch occurs once: only forward everywhere, or with backward (or I and W)."""
    micro_batches = 1 + max((action.micro_batch for actions in schedules for action in actions), default=0)
    trains = any(action.kind is not ActionKind.FORWARD for actions in schedules for action in actions)
    wanted = set(product(range(vpp), range(micro_batches)))
    for rank, actions in enumerate(schedules):
        kinds: dict[ActionKind, set[tuple[int, int]]] = {kind: set() for kind in ActionKind}
        for part in (part for action in actions for part in action.parts):
            if (part.chunk, part.micro_batch) in kinds[part.kind]:
                raise LayoutError(f"rank {rank} does {part} more than once; list it once.")
            kinds[part.kind].add((part.chunk, part.micro_batch))
        forward, whole, inputs, weights = kinds.values()
        wrong = (
            (wanted - forward) | (inputs ^ weights) | (whole & inputs) | (wanted - whole - inputs if trains else set())
        )
        if wrong:
            chunk, i = min(wrong)
            found = "+".join(kind.value for kind in ActionKind if (chunk, i) in kinds[kind])
            raise LayoutError(
                f"rank {rank} does {found or 'nothing'} for micro-batch {i} on chunk {chunk}; "
                f"it must do {'F and B, or F, I and W' if trains else 'F'}."
            )


def _deadlock(schedules: Sequence[Actions], spans: list[list[ActionSpan]], waiting: dict[Place, list[int]]) -> str:
    lines = [
        f"rank {rank}: {schedules[rank][len(spans[rank])]} (its action {len(spans[rank])}) waits for {_name(place)} of "
        f"rank {place[1] % len(schedules)}"
        for place, ranks in sorted(waiting.items(), key=lambda item: item[1])
        for rank in ranks
    ]
    return "these ranks wait for each other forever; put what others wait for first:\n  " + "\n  ".join(lines)


def _name(place: Place) -> str:
    what = "the activations" if place[0] == "F" else "the gradient"
    return f"{what} of micro-batch {place[2]} from stage {place[1]}"


log = logging.getLogger(__name__)


class Expected(NamedTuple):
    """A message that a rank expects.

    Attributes:
        chunk, micro_batch: the work that needs it.
        before: number of this rank's first action that begins after the message is sent. If the form of the message was
            unknown, the sender has announced it by then, so the host does not wait for the announcement.
    """

    chunk: int
    micro_batch: int
    before: int


@dataclass(frozen=True)
class RankSchedule:
    """The actions of one rank and the messages that it receives.

    Attributes:
        actions: the actions, in order.
        activations, gradients: the messages of each channel, in the order of use.
        slots: number of slots that hold messages between two ranks, in each direction, until the receiver begins to use
            them; the same for all ranks. A sender that waits until a slot is free then waits only for an action that,
            on the timeline, begins before the message is sent.
    """

    actions: Actions
    activations: tuple[Expected, ...] = ()
    gradients: tuple[Expected, ...] = ()
    slots: int = 2


def rank_schedule_of(rank: int, schedules: Sequence[Actions]) -> RankSchedule:
    """Return the schedule of one pipeline rank.

    Args:
        rank: the pipeline rank.
        schedules: the actions of all ranks.

    Raises:
        LayoutError: the schedules do not fit together (:func:`simulate`).
    """
    pp = len(schedules)
    vpp = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    # Default costs: only the order counts. It is without deadlock for the device, whatever the true times are.
    lines = simulate(schedules).ranks
    sent: dict[Place, Number] = {}
    for sender, spans in enumerate(lines):
        # Between chunks of one rank nothing is sent.
        if sender != rank:
            ends = [(part, span.end) for span in spans for part in span.action.parts]
            # Both parts of a combined action end together, so both messages leave at its end.
            sent |= {place: end for part, end in ends if (place := output_of(part, sender, pp)) is not None}
    starts = [span.start for span in lines[rank]]
    found: dict[bool, list[Expected]] = {True: [], False: []}
    for part in (part for action in schedules[rank] for part in action.parts):
        place = input_of(part, rank, pp, vpp)
        if place is not None and place in sent:
            # The first action that starts when the message has been sent, or later.
            expected = Expected(part.chunk, part.micro_batch, bisect_left(starts, sent[place]))
            found[part.kind is ActionKind.FORWARD].append(expected)
    return RankSchedule(schedules[rank], tuple(found[True]), tuple(found[False]), _slots(lines, pp, vpp))


def _slots(lines: Sequence[Sequence[ActionSpan]], pp: int, vpp: int) -> int:
    """Return the largest number of messages of one channel that are sent and not yet in use, the next one, and a spare.

    Ranks are never as regular as the timeline. With the spare, one that is a little late does not hold up its sender.
    """
    sent = {
        place: span.end
        for rank, spans in enumerate(lines)
        for span in spans
        for part in span.action.parts
        if (place := output_of(part, rank, pp)) is not None
    }
    times: dict[tuple[int, str], list[tuple[Number, Number]]] = defaultdict(list)
    for rank, spans in enumerate(lines):
        for span in spans:
            for part in span.action.parts:
                place = input_of(part, rank, pp, vpp)
                if place is not None and place[1] % pp != rank:
                    times[rank, place[0]].append((sent[place], span.start))
    most = 1
    for messages in times.values():
        for number, (leaves, _) in enumerate(messages):
            # Strictly before: what begins when this message leaves may wait for another one that leaves then.
            waiting = sum(used >= leaves for _, used in messages[:number])
            most = max(most, waiting + 1)
    return most + 1


class Timetable:
    """This rank's work in steps of every kind, worked out once each.

    Args:
        pipeline: the schedule of training steps.
        layout: which stage holds what.
    """

    def __init__(self, pipeline: PipelineOptions, layout: PipelineLayout, mesh: ParallelMesh) -> None:
        self.pipeline = pipeline
        self.layout = layout
        self.mesh = mesh
        self._known: dict[tuple[str, int], RankSchedule] = {}

    def __call__(self, name: str, micro_batches: int) -> RankSchedule:
        """The work in a step of so many micro-batches; says where ranks would wait longer than they must.

        Args:
            name: ``train``, or a schedule's.
        """
        # The same few numbers of micro-batches come again and again, and a simulation of many ranks takes time.
        if (name, micro_batches) not in self._known:
            pp, vpp, group_size = self.layout.pp, self.layout.vpp, self.pipeline.group_size
            warning = bubble_warning(pp, vpp, micro_batches, group_size) if name == "train" and pp > 1 else None
            # All ranks work out the same timetable.
            if warning is not None and self.mesh.global_rank == 0:
                log.warning(warning)
            wanted = self.pipeline.schedule if name == "train" else name
            lists = build(wanted, pp, vpp, micro_batches, group_size)
            self._known[name, micro_batches] = rank_schedule_of(self.mesh.rank("pp"), lists)
        return self._known[name, micro_batches]

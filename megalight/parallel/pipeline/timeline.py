"""Simulation of a schedule: when each action runs, the bubble, the memory for activations, and a picture.

``F`` of a stage needs ``F`` of the stage before it. ``B`` (or ``I``) needs the ``B`` (or ``I``) of the stage after it,
and its own ``F``. ``W`` needs its own ``I``. A rank runs its actions in order, one at a time. A forward and a backward
that run together take as long as one after the other: what they gain by it is not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypeAlias

from megalight.errors import LayoutError
from megalight.parallel.pipeline.schedules import Action, ActionKind, Actions

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

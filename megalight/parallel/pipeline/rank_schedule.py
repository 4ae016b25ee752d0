"""The schedule of a rank: its actions in a step, and when it posts the receive of each message.

A receive that is posted too early can cause a deadlock on GPUs:

- A posted receive waits on the device and occupies SMs.
- A host that loads a kernel or frees memory waits until its device is idle. This happens in the first step, and later
  whenever a new shape needs a new kernel.
- So a host may wait for a receive whose sender waits for a message of this host.

Therefore a rank posts a receive before an action only if, on the timeline, the message is sent before the action
begins. Then every wait is for something that began earlier. A step ends even if each host waits for all posted messages
before every action. Tests simulate this.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.options import PipelineOptions
from megalight.parallel.pipeline.schedules import ActionKind, Actions
from megalight.parallel.pipeline.timeline import ActionSpan, Number, Place, input_of, output_of, simulate

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
            warning = (
                schedules.bubble_warning(pp, vpp, micro_batches, group_size) if name == "train" and pp > 1 else None
            )
            # All ranks work out the same timetable.
            if warning is not None and self.mesh.global_rank == 0:
                log.warning(warning)
            wanted = self.pipeline.schedule if name == "train" else name
            lists = schedules.build(wanted, pp, vpp, micro_batches, group_size)
            self._known[name, micro_batches] = rank_schedule_of(self.mesh.rank("pp"), lists)
        return self._known[name, micro_batches]
